//! A framework given as function pointers: its kernels, its allocator and its collectives. Its tensors are DLPack tensors.
//!
//! | module | subject |
//! |---|---|
//! | [`dl`] | DLPack's structs |
//! | [`table`] | what a framework passes: its functions, and the leaves of calls |
//! | [`tensor`] | held tensors, and who owns their memory |
//! | [`program`] | a bound plan's ops and slots |
//! | `storages` | the storages of one call, held to what the leaves say of them |
//! | [`frontend`] | calls: their leaves, and facts by name |
//!
//! Sizes, element types and bounds of memory that a framework passes are checked before they are used. The framework promises
//! that its pointers are live and that its functions have the declared types.

pub mod dl;
pub mod frontend;
pub mod program;
mod storages;
pub mod table;
pub mod tensor;

pub use dl::{DlDevice, DlManagedTensor, DlTensor, DlType};
pub use frontend::{Arguments, Callbacks, Fact, Facts, NamedLeaf};
pub use program::CallbackProgram;
pub use table::{Collective, Framework, Leaf};
pub use tensor::Tensor;

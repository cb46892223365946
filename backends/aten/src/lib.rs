//! PyTorch under Rote: its kernels, its process groups and its Python objects, through a bridge in C++ (`bridge/`).
//!
//! | module | subject |
//! |---|---|
//! | [`sources`] | the C++ sources of the bridge |
//! | [`sys`] | the C ABI of the bridge |
//! | [`bridge`] | the loaded bridge, and safe owners of Python objects |
//! | [`frontend`] | PyTorch as a session sees it: calls and their tensors |
//! | [`words`] | the names of the words of a call |
//! | [`fact_table`] | facts about Python objects that outlive calls |
//! | [`fact_kind`] | the kinds of these facts |
//! | [`describe`] | descriptions of ops and tensors for a recording |
//! | [`program`] | a bound plan's ops and slots on the bridge's side |
//! | [`ranks`] | exchanges of bytes among the ranks of a process group |
//! | [`kernels`] | PyTorch's kernels for the truth table: single calls on host tensors |

pub mod bridge;
pub mod describe;
pub mod fact_kind;
pub mod fact_table;
pub mod frontend;
pub mod kernels;
pub mod program;
pub mod ranks;
pub mod sources;
#[allow(missing_docs)]
pub mod sys;
pub mod words;

pub use bridge::{Borrowed, Bridge, Object};
pub use describe::Describer;
pub use fact_kind::FactKind;
pub use fact_table::FactTable;
pub use frontend::{Args, Aten};
pub use program::AtenProgram;
pub use ranks::Group;

/// A plan, bound to PyTorch.
pub type BoundPlan = rote_replay::BoundPlan<AtenProgram>;

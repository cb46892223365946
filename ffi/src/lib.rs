//! The C ABI of Rote: `librote.so`, described to C by `include/rote.h`.
//!
//! Every function returns a status: 0 or a positive code that its documentation
//! names, or -1 for an error. `rote_last_error()` then returns its message. No
//! panic leaves this library. Text that a function returns belongs to the
//! library and lives until the calling thread's next call.
//!
//! | module | subject |
//! |---|---|
//! | [`status`] | statuses, errors, text across the border |
//! | [`log`] | messages for the host |
//! | [`bridge`] | the bridge to PyTorch: its sources, loading it |
//! | [`session`] | sessions of any framework: statistics, explanations, process groups |
//! | [`record`] | recording a step of any framework: guards, strategies, numbers |
//! | [`torch_session`] | sessions of PyTorch: calls with Python objects |
//! | [`torch_record`] | recording a step of PyTorch, op by op |
//! | [`framework`] | sessions of a framework of function pointers: no Python |
//! | [`recorder`] | recording ops of any program, without Python |
//! | `spec` | specs as text |
//! | `faults` | plans made wrong, for tests |
//! | [`plan`] | opening and describing plan files |
//! | [`partial`] | partials that scripts register |
//! | [`propagate`] | sharding propagation |
//! | [`question`] | the same, asked in JSON; rules that scripts state |
//! | [`sharding`] | shardings that scripts register |
//! | [`validate`] | the truth table of sharding rules |

pub mod bridge;
#[cfg(feature = "faults")]
pub mod faults;
pub mod framework;
pub mod log;
pub mod partial;
pub mod plan;
pub mod propagate;
pub mod question;
pub mod record;
pub mod recorder;
pub mod session;
pub mod sharding;
mod spec;
pub mod status;
pub mod torch_record;
pub mod torch_session;
pub mod validate;

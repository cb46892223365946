//! Ops and tensors as C structs, as the bridge to PyTorch and any program through `rote.h` describe them.
//!
//! | module | subject |
//! |---|---|
//! | [`op`] | the structs |
//! | [`events`] | what they tell the recorder |
//! | [`args`] | an op's arguments in a plan as such structs |
//! | [`question`] | questions to sharding propagation, and its answers |

pub mod args;
pub mod events;
pub mod op;
pub mod question;

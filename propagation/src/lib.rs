//! Sharding propagation: the placements of an op's inputs and outputs, and the
//! redistributions before it.
//!
//! | module | subject |
//! |---|---|
//! | [`placement`] | how one mesh dim holds a tensor |
//! | [`sharding`] | ways to split a dim that callers register |
//! | [`family`] | shardings with parameters |
//! | [`partials`] | partials that callers register |
//! | `names` | what callers register by name |
//! | [`layout`] | which global index each local index stands for |
//! | [`spec`] | meshes, specs and their notations |
//! | `notation` | the notation of other arguments |
//! | [`rule`] | strategies on one mesh dim |
//! | `each` | ops on lists, entry by entry |
//! | [`stated`] | rules that a caller states as lists of placements |
//! | [`forms`] | which op an in-place or `out=` name is a form of |
//! | `schema` | the kinds of arguments that an op takes |
//! | [`registry`] | the registry of ops |
//! | `rules` | the tables of rules |
//! | [`decompose`] | ops without a rule, through ops that have one |
//! | `decompositions` | the table of decompositions |
//! | `fill` | sharding placeholders filled with the inputs' shard types |
//! | [`cost`] | the cost of a collective |
//! | `dtensors_order` | the ways by which DTensor redistributes |
//! | `operation` | what changes the placement of one mesh dim, and what it costs |
//! | [`redistribute`] | the cheapest way between two specs |
//! | [`search`] | the cheapest strategies on a mesh |
//! | `enumerate` | all of them, cheapest first |
//! | `descent` | a descent, when that search would take too long |
//! | [`explain`] | the reasons of a decision |
//! | [`strict`] | partials that would be reduced silently |
//! | [`propagator`] | registry, mesh and options together |
//! | `cache` | decisions that were made before |
//! | `promote` | the element type that an op on several tensors and numbers computes in |
//! | `combination` | the notation of placement combinations |
//! | [`strides`] | how outputs lie in memory |
//! | [`strategies`] | every combination that the rules claim |
//! | [`local`] | the arguments of the local op |
//! | `work` | how much work answers take |
//! | [`error`] | errors in questions |

#![forbid(unsafe_code)]

mod cache;
mod combination;
pub mod cost;
#[cfg(test)]
mod data_tests;
pub mod decompose;
#[cfg(test)]
mod decompose_tests;
mod decompositions;
#[cfg(test)]
mod defect_tests;
mod descent;
mod dtensors_order;
mod each;
#[cfg(test)]
mod each_tests;
mod enumerate;
pub mod error;
pub mod explain;
pub mod family;
mod fill;
pub mod forms;
pub mod layout;
pub mod local;
mod names;
mod notation;
mod operation;
pub mod partials;
pub mod placement;
mod promote;
pub mod propagator;
pub mod redistribute;
pub mod registry;
pub mod rule;
mod rules;
mod schema;
pub mod search;
pub mod sharding;
#[cfg(test)]
mod sharding_tests;
pub mod spec;
pub mod stated;
pub mod strategies;
pub mod strict;
pub mod strides;
#[cfg(test)]
mod tests;
mod work;

pub use combination::Combination;
pub use cost::{Kind, Link, Topology};
pub use decompose::{Builder, Decomposition, Part, Value};
pub use enumerate::candidates;
pub use error::PropagationError;
pub use explain::{Choice, Explanation, OneDim, Other, Verdict, explain};
pub use family::{Run, Runs, Splits, forget_family, register_family};
pub use forms::Form;
pub use layout::Layout;
pub use local::{LocalArgs, LocalOp, Lookup, local_args, local_meta, local_op};
pub use partials::{Combine, PartialId, forget_partials, register_partials};
pub use placement::{Order, PartialOp, Placement};
pub use propagator::Propagator;
pub use redistribute::{Step, plan};
pub use registry::{OwnRule, Registry};
pub use rule::{Arg, Query, Rule};
pub use schema::MEMORY_FORMATS;
pub use search::{
    Input, Propagation, propagate, propagate_by, propagate_passing_sums, rule_with, standard_rules,
};
pub use sharding::{Sharding, ShardingId, register_sharding};
pub use spec::{Mesh, Spec, TensorMeta, parse_placements, partition_spec, written};
pub use strategies::{Claims, claims};
pub use strict::check_partials;
pub use strides::{contiguous, output_strides};

//! Where arguments must lie in their storages for a plan to be replayed.
//!
//! An argument may start anywhere in its storage, as batches of one data set do: the
//! plan counts from the start of the argument. There are two exceptions. If a plan
//! reaches bytes around an argument, the storage must have these bytes. If a plan counts
//! from the start of the storage, or the step asked for the argument's place in it, the
//! plan fits only arguments at the very same place (an anchor).

use rote_plans::value::reach;
use rote_plans::{Anchor, BindingKind, Plan};
use rote_replay::{Frontend, ReplayError, TensorOf};

use crate::bound::no_leaf;
use crate::recording::Named;

/// What must hold of the arguments of a plan.
#[derive(Clone, Debug, Default)]
pub struct Places(Vec<Place>);

/// What must hold of an argument.
#[derive(Clone, Debug)]
struct Place {
    leaf: u32,
    subject: String,
    /// The bytes around where it starts that the plan reaches, if these are more than
    /// its own.
    reach: Option<(i128, i128)>,
    anchor: Option<Anchor>,
}

impl Places {
    /// What must hold for a plan. `named`: the tensors that it may bind.
    pub fn of<F: Frontend>(plan: &Plan, named: &[Named<TensorOf<F>>]) -> Self {
        let mut places = Vec::new();
        for binding in plan.bindings.iter().filter(|b| b.kind == BindingKind::Arg) {
            let path = plan.str(binding.path);
            let is_it =
                |named: &&Named<TensorOf<F>>| named.kind == binding.kind && named.path == path;
            let Some(leaf) = named.iter().find(is_it).and_then(|named| named.leaf) else {
                continue; // binding it will fail, and say so
            };
            let own = reach_of(plan, binding.value);
            let all = (0..plan.values.len() as u32)
                .filter(|id| plan.values[*id as usize].root == binding.value)
                .filter_map(|id| reach_of(plan, id))
                .reduce(|a, b| (a.0.min(b.0), a.1.max(b.1)));
            let inside =
                |all: &(i128, i128)| own.is_some_and(|own| own.0 <= all.0 && all.1 <= own.1);
            let reach = all.filter(|all| !inside(all));
            if reach.is_some() || binding.anchor.is_some() {
                places.push(Place {
                    leaf,
                    subject: format!("{path}.storage"),
                    reach,
                    anchor: binding.anchor,
                });
            }
        }
        Places(places)
    }

    /// The first argument of a call that does not lie where it must.
    pub fn difference<F: Frontend>(&self, frontend: &F) -> Result<Option<&str>, ReplayError> {
        for place in &self.0 {
            let tensor = (frontend.leaf(place.leaf)).ok_or_else(|| no_leaf(place.leaf))?;
            let found = frontend.place(tensor, place.anchor.is_some())?;
            let start = i128::from(found.start);
            let outside = place
                .reach
                .is_some_and(|(from, to)| start + from < 0 || start + to > i128::from(found.bytes));
            if outside || place.anchor.is_some_and(|anchor| anchor != found) {
                return Ok(Some(&place.subject));
            }
        }
        Ok(None)
    }
}

/// The bytes that a value reaches, counted from where its root starts.
fn reach_of(plan: &Plan, value: u32) -> Option<(i128, i128)> {
    let region = plan.region(value);
    let dims = region.meta.shape.iter().copied();
    reach(
        region.meta.kind.dtype.bytes()?,
        region.offset,
        dims.zip(region.meta.strides.iter().copied()),
    )
}

//! The tensors of a plan: which slot of its program each of them is in.

use rote_plans::{BindingKind, Plan};
use rote_replay::{BoundPlan, Counted, Frontend, Part, ReplayError, TensorOf};

use crate::recording::Named;

/// The tensors that a plan binds, and those that its step writes as autograd counts it.
#[derive(Debug)]
pub struct BoundTensors<F: Frontend> {
    args: Vec<ArgSlot>,
    /// Slots and owners of gradients.
    grads: Vec<(u32, TensorOf<F>)>,
    /// Slots and tensors of the state.
    state: Vec<(u32, TensorOf<F>)>,
    /// Tensors whose version counters a replay raises.
    counted: Vec<Writes<TensorOf<F>>>,
}

/// A tensor that a step writes, and how often.
#[derive(Debug)]
struct Writes<T> {
    /// The slot of the binding that has its memory.
    slot: Option<u32>,
    /// The tensor, or its owner; of an argument its leaf.
    tensor: Result<T, u32>,
    grad: bool,
    times: [u32; 2],
}

#[derive(Clone, Copy, Debug)]
struct ArgSlot {
    slot: u32,
    leaf: u32,
    part: Part,
}

impl<F: Frontend> BoundTensors<F> {
    pub fn bind(
        frontend: &F,
        plan: &Plan,
        bound: &BoundPlan<F::Program>,
        named: &[Named<TensorOf<F>>],
    ) -> Result<Self, ReplayError> {
        let mut tensors = BoundTensors {
            args: Vec::new(),
            grads: Vec::new(),
            state: Vec::new(),
            counted: Vec::new(),
        };
        let mut slots = vec![None; named.len()];
        let mut counts = vec![[0; 2]; named.len()];
        for (binding, &(kind, slot)) in plan.bindings.iter().zip(bound.bindings()) {
            let path = plan.str(binding.path);
            let Some(at) = named.iter().position(|n| n.kind == kind && n.path == path) else {
                return Err(ReplayError::Bind(format!(
                    "the plan binds {path}, which this process does not have"
                )));
            };
            counts[at] = binding.counted;
            let bound_twice = slots[at].replace(slot).is_some();
            match (kind, named[at].leaf, &named[at].tensor) {
                (BindingKind::Arg | BindingKind::Grad, Some(leaf), _) => {
                    let part = match kind {
                        BindingKind::Grad => Part::Grad,
                        _ => Part::Tensor,
                    };
                    tensors.args.push(ArgSlot { slot, leaf, part });
                }
                (BindingKind::Grad, _, Some(owner)) if !bound_twice => {
                    tensors.grads.push((slot, frontend.hold(F::borrow(owner))));
                }
                (_, _, Some(tensor)) if !bound_twice => {
                    tensors.state.push((slot, frontend.hold(F::borrow(tensor))));
                }
                _ => return Err(ReplayError::Bind(format!("{path} is bound twice"))),
            }
        }
        tensors.put_state(frontend, bound)?;
        for (tensor, stored) in named.iter().zip(counts) {
            let times = tensor.written.unwrap_or(stored);
            if times == [0, 0] {
                continue;
            }
            let memory = slots
                .iter()
                .zip(named)
                .find_map(|(slot, other)| slot.filter(|_| other.storage == tensor.storage));
            tensors.counted.push(Writes {
                slot: memory,
                tensor: match (tensor.leaf, &tensor.tensor) {
                    (Some(leaf), _) => Err(leaf),
                    (None, Some(held)) => Ok(frontend.hold(F::borrow(held))),
                    (None, None) => continue,
                },
                grad: tensor.kind == BindingKind::Grad,
                times,
            });
        }
        Ok(tensors)
    }

    /// Puts the tensors of the state into the slots of a program.
    pub fn put_state(
        &self,
        frontend: &F,
        bound: &BoundPlan<F::Program>,
    ) -> Result<(), ReplayError> {
        (self.state.iter()).try_for_each(|(slot, tensor)| {
            frontend.put(bound.program(), *slot, F::borrow(tensor), Part::Memory)
        })
    }

    /// Puts the tensors of a call into the slots of a program, and the gradients that it finds.
    pub fn put_call(&self, frontend: &F, bound: &BoundPlan<F::Program>) -> Result<(), ReplayError> {
        for arg in &self.args {
            let leaf = frontend.leaf(arg.leaf).ok_or_else(|| no_leaf(arg.leaf))?;
            frontend.put(bound.program(), arg.slot, leaf, arg.part)?;
        }
        (self.grads.iter()).try_for_each(|(slot, owner)| {
            frontend.put(bound.program(), *slot, F::borrow(owner), Part::Grad)
        })
    }

    /// Gives the tensors of the state the sizes and strides that a run which failed has left.
    pub fn leave_shapes(
        &self,
        frontend: &F,
        bound: &BoundPlan<F::Program>,
    ) -> Result<(), ReplayError> {
        (self.state.iter()).try_for_each(|(slot, tensor)| {
            frontend.leave_shape(bound.program(), *slot, F::borrow(tensor))
        })
    }

    /// Raises version counters as the step does: of all that it writes, or of what lies in
    /// the memory of some bindings, at most so many times.
    pub fn count(&self, frontend: &F, only: Option<&[(u32, usize)]>) -> Result<(), ReplayError> {
        let written = self.counted.iter().filter_map(|counted| {
            let times = match only {
                Some(written) => {
                    let own = written.iter().find(|(slot, _)| Some(*slot) == counted.slot);
                    let (_, most) = own?;
                    counted.times.map(|times| times.min(*most as u32))
                }
                None => counted.times,
            };
            let tensor = match &counted.tensor {
                Ok(tensor) => F::borrow(tensor),
                Err(leaf) => frontend.leaf(*leaf)?,
            };
            Some(Counted {
                tensor,
                grad: counted.grad,
                times,
            })
        });
        frontend.count(written)
    }
}

pub(crate) fn no_leaf(leaf: u32) -> ReplayError {
    ReplayError::Bind(format!("the call has no leaf {leaf}"))
}

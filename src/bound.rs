//! A plan through its passes, bound to the tensors and numbers of a variant.

use rote_passes::{Done, Program};
use rote_plans::{BindingKind, Scalar, Schedule};
use rote_replay::{Bound, BoundPlan, Counted, Frontend, Left, Program as _, ReplayError, TensorOf};
use rote_tracer::scalars::{evaluate, read_behind};

use crate::SessionError;
use crate::facts::NamedFacts;
use crate::recording::{Named, state_tensor};

/// A program that can run on the arguments of a call.
#[derive(Debug)]
pub(crate) struct BoundVariant<F: Frontend> {
    bound: BoundPlan<F::Program>,
    args: Vec<ArgBinding>,
    grads: Vec<(u32, TensorOf<F>)>,
    scalars: Vec<Scalar>,
    scalar_words: Vec<usize>,
    /// What each of them is read from; empty where it is computed.
    scalar_paths: Vec<String>,
    /// The tensor that each of them is read from, if it is one.
    scalar_tensors: Vec<Option<TensorOf<F>>>,
    /// The scalars' values, as computed last.
    numbers_now: Vec<f64>,
    /// Whether they were computed for the call that is handled now.
    computed: bool,
    /// Slots and tensors of the state.
    state: Vec<(u32, TensorOf<F>)>,
    /// Tensors whose version counters a replay raises.
    counted: Vec<Writes<TensorOf<F>>>,
    /// The plan after its passes, and how it runs.
    program: Program,
    /// What a replay that failed has left of each gradient.
    left: Vec<Left<TensorOf<F>>>,
    /// Whether a run has failed since the program was bound. An op that raises may leave
    /// tensors with other sizes and strides, or without what it makes: the program is
    /// bound anew before it runs again.
    failed: bool,
    /// Whether the last replay failed and has left nothing: the call can be made again.
    undone: bool,
    /// The check that found another answer in the last replay, if that has left nothing.
    answered: Option<usize>,
    /// What is to be bound once a replay has shown what its ops allocate.
    unplaced: Option<Unplaced>,
    /// What is new of the arena pass.
    pub(crate) arranged: Option<Done>,
}

/// A program whose results get their places in the arena after the first replay,
/// which runs without one.
#[derive(Debug)]
struct Unplaced {
    /// How it runs then.
    schedule: Schedule,
    /// For each instruction, the most bytes that it had allocated at once in a replay.
    allocated: Option<Vec<u64>>,
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
struct ArgBinding {
    slot: u32,
    leaf: u32,
    grad: bool,
}

impl<F: Frontend> BoundVariant<F> {
    /// Binds a program to named tensors, and its scalars to the facts that
    /// follow them.
    pub(crate) fn bind(
        frontend: &F,
        mut program: Program,
        named: &[Named<TensorOf<F>>],
        facts: &NamedFacts<F>,
    ) -> Result<Self, SessionError> {
        let arena = !program.schedule.offsets.is_empty();
        let unplaced = arena.then(|| Unplaced {
            schedule: std::mem::take(&mut program.schedule),
            allocated: None,
        });
        let plan = &program.plan;
        plan.check()?;
        let bound = BoundPlan::bind(frontend.program(plan)?, plan, &program.schedule)?;
        let mut taken = vec![false; named.len()];
        let mut args = Vec::new();
        let mut grads = Vec::new();
        let mut state = Vec::new();
        let mut slots = vec![None; named.len()];
        let mut counts = vec![[0; 2]; named.len()];
        let mut counted = Vec::new();
        for (binding, &(kind, slot)) in plan.bindings.iter().zip(bound.bindings()) {
            let path = plan.str(binding.path);
            let Some(at) = named.iter().position(|n| n.kind == kind && n.path == path) else {
                return Err(ReplayError::Bind(format!(
                    "the plan binds {path}, which this process does not have"
                ))
                .into());
            };
            let named = &named[at];
            slots[at] = Some(slot);
            counts[at] = binding.counted;
            match (kind, named.leaf) {
                (BindingKind::Arg, Some(leaf)) => args.push(ArgBinding {
                    slot,
                    leaf,
                    grad: false,
                }),
                (BindingKind::Grad, Some(leaf)) => args.push(ArgBinding {
                    slot,
                    leaf,
                    grad: true,
                }),
                (_, _) => {
                    let held = named.tensor.as_ref();
                    let Some(tensor) = held.filter(|_| !std::mem::replace(&mut taken[at], true))
                    else {
                        return Err(ReplayError::Bind(format!("{path} is bound twice")).into());
                    };
                    let tensor = F::borrow(tensor);
                    if kind == BindingKind::Grad {
                        grads.push((slot, frontend.hold(tensor)));
                    } else {
                        frontend.bind(bound.program(), slot, tensor, Bound::Memory)?;
                        state.push((slot, frontend.hold(tensor)));
                    }
                }
            }
        }
        for (tensor, stored) in named.iter().zip(counts) {
            let times = tensor.written.unwrap_or(stored);
            if times == [0, 0] {
                continue;
            }
            let memory = slots
                .iter()
                .zip(named)
                .find_map(|(slot, other)| slot.filter(|_| other.storage == tensor.storage));
            counted.push(Writes {
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
        let scalars = bound.scalars().to_vec();
        let mut scalar_words = vec![usize::MAX; scalars.len()];
        let mut scalar_paths = vec![String::new(); scalars.len()];
        let mut scalar_tensors: Vec<_> = scalars.iter().map(|_| None).collect();
        let not_here = |path: &str| {
            ReplayError::Bind(format!(
                "the plan reads {path}, which this process does not have"
            ))
        };
        for (i, scalar) in scalars.iter().enumerate() {
            if let Scalar::Read { path } = scalar {
                let path = plan.str(*path);
                path.clone_into(&mut scalar_paths[i]);
                scalar_words[i] = facts.float_word(path).ok_or_else(|| not_here(path))?;
            }
            if let Scalar::Tensor { path } = scalar {
                let path = plan.str(*path);
                path.clone_into(&mut scalar_paths[i]);
                let tensor = state_tensor(named, path)
                    .filter(|held| frontend.number(F::borrow(held)).is_some())
                    .ok_or_else(|| not_here(path))?;
                scalar_tensors[i] = Some(frontend.hold(F::borrow(tensor)));
            }
        }
        Ok(BoundVariant {
            bound,
            args,
            grads,
            scalars,
            numbers_now: Vec::with_capacity(scalar_words.len()),
            computed: false,
            scalar_words,
            scalar_paths,
            scalar_tensors,
            state,
            counted,
            program,
            left: Vec::new(),
            failed: false,
            undone: false,
            answered: None,
            unplaced,
            arranged: arena.then(|| {
                without_arena(
                    "until a replay without a profiler has shown how much memory ops allocate",
                )
            }),
        })
    }

    /// Computes the scalars from the hyperparameters and tensors of now, for the replay that
    /// follows. Comes back: a hyperparameter or a tensor under which the plan does not apply, if
    /// Python would raise, the sources of a number do not agree, or a comparison has another
    /// outcome.
    pub(crate) fn compute(&mut self, frontend: &F, facts: &NamedFacts<F>) -> Option<String> {
        self.computed = true;
        if self.scalars.is_empty() {
            return None;
        }
        let mut missing = None;
        let done = evaluate(&self.scalars, &mut self.numbers_now, |i| {
            let found = match &self.scalar_tensors[i] {
                Some(tensor) => frontend.number(F::borrow(tensor)),
                None => facts.float_at(self.scalar_words[i]).ok(),
            };
            found.unwrap_or_else(|| {
                missing.get_or_insert(i); // no float any more
                f64::NAN
            })
        });
        let unfit = missing.or_else(|| {
            let scalar = done.err()?;
            Some(read_behind(&self.scalars, scalar).unwrap_or(scalar))
        })?;
        self.computed = false;
        Some(self.scalar_paths[unfit].clone())
    }

    /// Replays the plan on the arguments that the frontend has collected. `together`: all ranks
    /// replay it, and end it together where a check fails. Results: outputs, then gradients.
    pub(crate) fn replay(
        &mut self,
        frontend: &F,
        facts: &NamedFacts<F>,
        together: bool,
    ) -> Result<F::Results, ReplayError> {
        let seen = |unplaced: &mut Unplaced| unplaced.allocated.is_some();
        if let Some(unplaced) = self.unplaced.take_if(seen) {
            self.place(frontend, unplaced);
        }
        self.mend(frontend)?;
        self.bound.begin()?;
        let results = self.replayed(frontend, facts);
        self.failed = results.is_err();
        self.undone = match &results {
            Err(ReplayError::Step { step, .. }) => {
                let plan = &self.program.plan;
                let begins_anew = match together {
                    true => self.bound.failed_check(plan, *step).is_some(),
                    false => self.bound.is_undone_at(plan, *step),
                };
                begins_anew && self.bound.program().undo()?
            }
            _ => false,
        };
        self.answered = match &results {
            Err(ReplayError::Step { step, .. }) if self.undone => {
                self.bound.failed_check(&self.program.plan, *step)
            }
            _ => None,
        };
        self.left = match &results {
            Err(ReplayError::Step { step, .. }) if !self.undone && !self.lost() => {
                let slots = self.bound.written_before(&self.program.plan, *step);
                self.count(frontend, Some(&slots))?;
                for (slot, tensor) in &self.state {
                    frontend.leave_shape(self.bound.program(), *slot, F::borrow(tensor))?;
                }
                (self.bound.left(&self.program.plan, *step)).unwrap_or_default()
            }
            _ => Vec::new(),
        };
        // Whatever became of it.
        let cleared = self.bound.clear();
        let ended = self.bound.end();
        let results = results?;
        cleared.and(ended)?;
        Ok(results)
    }

    /// What the last replay has left of each gradient, if it failed.
    pub(crate) fn take_left(&mut self) -> Vec<Left<TensorOf<F>>> {
        std::mem::take(&mut self.left)
    }

    /// Whether the last replay failed with an error and has left nothing: no write, no
    /// collective, no draw.
    pub(crate) fn undone(&self) -> bool {
        self.undone
    }

    /// The check, counted from 0, that found another answer in the last replay, which has left nothing.
    pub(crate) fn answered(&self) -> Option<usize> {
        self.answered
    }

    /// What the framework raised in the last run that failed.
    pub(crate) fn exception(&self, frontend: &F) -> Option<F::Exception> {
        frontend.exception(self.bound.program())
    }

    /// Whether a collective of a replay that failed may still use its memory.
    pub(crate) fn lost(&self) -> bool {
        self.bound.program().lost()
    }

    /// Whether an op of a replay that failed has made another result than the plan says.
    pub(crate) fn differs(&self) -> bool {
        self.bound.program().differs()
    }

    /// Replays the plan without a result. Shows what each instruction has made or
    /// written in place: the recorded value, or [`rote_plans::NONE`] for one that
    /// a pass has added, and its tensor.
    pub(crate) fn show(
        &mut self,
        frontend: &F,
        facts: &NamedFacts<F>,
        seen: &mut dyn FnMut(u32, u32, TensorOf<F>),
    ) -> Result<(), ReplayError> {
        self.mend(frontend)?;
        let run = (self.prepare(frontend, facts)).and_then(|()| {
            let Program { plan, values, .. } = &self.program;
            (self.bound).run_shown(plan, &mut |instr, value, tensor| {
                seen(instr, values[value as usize], tensor);
            })
        });
        self.failed = run.is_err();
        let cleared = self.bound.clear();
        run.and_then(|()| self.count(frontend, None)).and(cleared)
    }

    /// Raises version counters as the step does: of all that it writes, or of what lies in
    /// the memory of some bindings, at most so many times.
    fn count(&self, frontend: &F, only: Option<&[(u32, usize)]>) -> Result<(), ReplayError> {
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

    fn replayed(&mut self, frontend: &F, facts: &NamedFacts<F>) -> Result<F::Results, ReplayError> {
        self.prepare(frontend, facts)?;
        let run = match &mut self.unplaced {
            Some(unplaced) => {
                (self.bound.run_watched()).map(|allocated| unplaced.allocated = allocated)
            }
            None => self.bound.run(),
        };
        run?;
        self.count(frontend, None)?;
        frontend.results(&self.bound)
    }

    /// Binds the numbers and tensors of a call.
    fn prepare(&mut self, frontend: &F, facts: &NamedFacts<F>) -> Result<(), ReplayError> {
        let computed = std::mem::take(&mut self.computed);
        let unfit = if computed {
            None
        } else {
            self.compute(frontend, facts)
        };
        if let Some(path) = unfit {
            return Err(ReplayError::Bind(format!(
                "the plan does not apply to {path} as it is now"
            )));
        }
        self.computed = false;
        if !self.scalars.is_empty() {
            self.bound.set_numbers(&self.numbers_now)?;
        }
        for arg in &self.args {
            let what = match arg.grad {
                true => Bound::Grad,
                false => Bound::Tensor,
            };
            let leaf = frontend.leaf(arg.leaf).ok_or_else(|| no_leaf(arg.leaf))?;
            frontend.bind(self.bound.program(), arg.slot, leaf, what)?;
        }
        for (slot, owner) in &self.grads {
            frontend.bind(self.bound.program(), *slot, F::borrow(owner), Bound::Grad)?;
        }
        Ok(())
    }

    /// The program bound anew to the tensors of the state.
    fn bound_anew(&self, frontend: &F) -> Result<BoundPlan<F::Program>, ReplayError> {
        let Program { plan, schedule, .. } = &self.program;
        let bound = BoundPlan::bind(frontend.program(plan)?, plan, schedule)?;
        for (slot, tensor) in &self.state {
            frontend.bind(bound.program(), *slot, F::borrow(tensor), Bound::Memory)?;
        }
        Ok(bound)
    }

    /// Binds the program anew if its last run has failed.
    fn mend(&mut self, frontend: &F) -> Result<(), ReplayError> {
        if self.failed {
            self.bound = self.bound_anew(frontend)?;
            self.failed = false;
        }
        Ok(())
    }

    /// Binds the program with its results at their places in the arena, which depend
    /// on what its ops were seen to allocate in an earlier replay.
    fn place(&mut self, frontend: &F, unplaced: Unplaced) {
        self.program.schedule = unplaced.schedule;
        let allocated = unplaced.allocated.unwrap_or_default();
        let done = self.program.arrange(frontend.ops(), &allocated);
        match self.bound_anew(frontend) {
            Ok(bound) => {
                self.bound = bound;
                self.failed = false;
                self.arranged = Some(done);
            }
            Err(error) => {
                self.program.schedule = Schedule::default();
                tracing::warn!(target: "rote::replay", "a plan is replayed without an arena: {error}");
                self.arranged = Some(without_arena(&format!("binding failed: {error}")));
            }
        }
    }
}

pub(crate) fn no_leaf(leaf: u32) -> ReplayError {
    ReplayError::Bind(format!("the call has no leaf {leaf}"))
}

fn without_arena(why: &str) -> Done {
    Done {
        changed: 0,
        what: format!("no arena: {why}"),
    }
}

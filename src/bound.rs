//! A plan through its passes, bound to the tensors and numbers of a variant.

use rote_passes::{Done, Program};
use rote_plans::{BindingKind, PlanFile, Scalar, Schedule};
use rote_replay::ReplayError;
use rote_replay::aten::{Bound, BoundPlan, Bridge, Call, Left, Object, Written};
use rote_tracer::scalars::{evaluate, read_behind};

use crate::SessionError;
use crate::facts::Facts;
use crate::recording::Named;

/// A program that can run on the arguments of a call.
#[derive(Debug)]
pub(crate) struct BoundVariant {
    bound: BoundPlan,
    args: Vec<ArgBinding>,
    grads: Vec<(u32, Object)>,
    scalars: Vec<Scalar>,
    scalar_words: Vec<usize>,
    /// What each of them is read from; empty where it is computed.
    scalar_paths: Vec<String>,
    /// The scalars' values, as computed last.
    numbers_now: Vec<f64>,
    /// Whether they were computed for the call that is handled now.
    computed: bool,
    /// Slots and tensors of the state.
    state: Vec<(u32, Object)>,
    /// Tensors whose version counters a replay raises.
    counted: Vec<Counted>,
    written: Written,
    /// The plan after its passes.
    plan: PlanFile,
    /// For each of its values, the recorded one that it is, or [`rote_plans::NONE`].
    values: Vec<u32>,
    /// What a replay that failed has left of each gradient.
    left: Vec<Left>,
    /// How the bound program runs.
    schedule: Schedule,
    /// Whether a run has failed since the program was bound. An op that raises may leave
    /// tensors with other sizes and strides, or without what it makes: the program is
    /// bound anew before it runs again.
    failed: bool,
    /// Whether the last replay failed and has left nothing: the call can be made again.
    undone: bool,
    /// What is to be bound once a replay has shown what its ops allocate.
    unplaced: Option<Unplaced>,
    /// What is new of the arena pass.
    pub(crate) arranged: Option<Done>,
}

/// A program whose results get their places in the arena after the first replay,
/// which runs without one.
#[derive(Debug)]
struct Unplaced {
    program: Program,
    /// For each instruction, the most bytes that it had allocated at once in a replay.
    allocated: Option<Vec<u64>>,
}

/// A tensor that a step writes, and how often.
#[derive(Debug)]
struct Counted {
    /// The slot of the binding that has its memory.
    slot: Option<u32>,
    /// The tensor, or its owner; of an argument its leaf.
    object: Result<Object, u32>,
    grad: bool,
    times: [u32; 2],
}

#[derive(Clone, Copy, Debug)]
struct ArgBinding {
    slot: u32,
    leaf: u32,
    grad: bool,
}

impl BoundVariant {
    /// Binds a program to named tensors, and its scalars to the facts that
    /// follow them.
    pub(crate) fn bind(
        program: Program,
        named: &[Named],
        facts: &Facts,
    ) -> Result<Self, SessionError> {
        let optimized = PlanFile::from_plan(&program.plan)?;
        let plan = optimized.plan();
        let arena = !program.schedule.offsets.is_empty();
        let schedule = match arena {
            true => Schedule::default(),
            false => program.schedule.clone(),
        };
        let bound = BoundPlan::to_pytorch(plan, &schedule)?;
        let mut taken = vec![false; named.len()];
        let mut args = Vec::new();
        let mut grads = Vec::new();
        let mut state = Vec::new();
        let mut slots = vec![None; named.len()];
        let mut counts = vec![[0; 2]; named.len()];
        let mut counted = Vec::new();
        for (binding, &(kind, slot)) in plan.bindings.iter().zip(bound.bindings()) {
            let path = plan.str(binding.path.to_native());
            let Some(at) = named.iter().position(|n| n.kind == kind && n.path == path) else {
                return Err(ReplayError::Bind(format!(
                    "the plan binds {path}, which this process does not have"
                ))
                .into());
            };
            let named = &named[at];
            slots[at] = Some(slot);
            counts[at] = binding.counted.map(|times| times.to_native());
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
                    let held = named.object.as_ref();
                    let Some(object) = held.filter(|_| !std::mem::replace(&mut taken[at], true))
                    else {
                        return Err(ReplayError::Bind(format!("{path} is bound twice")).into());
                    };
                    // SAFETY: the object is held, a tensor, and the GIL is held.
                    let object = unsafe { Object::hold(object.as_ptr()) };
                    if kind == BindingKind::Grad {
                        grads.push((slot, object));
                    } else {
                        // SAFETY: as above.
                        unsafe { bound.program().bind(slot, object.as_ptr(), Bound::Memory)? };
                        state.push((slot, object));
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
            // SAFETY: the object is held, a tensor, and the GIL is held.
            let held = |object: &Object| unsafe { Object::hold(object.as_ptr()) };
            counted.push(Counted {
                slot: memory,
                object: match (tensor.leaf, &tensor.object) {
                    (Some(leaf), _) => Err(leaf),
                    (None, Some(object)) => Ok(held(object)),
                    (None, None) => continue,
                },
                grad: tensor.kind == BindingKind::Grad,
                times,
            });
        }
        let values = program.values.clone();
        let scalars = bound.scalars().to_vec();
        let mut scalar_words = vec![usize::MAX; scalars.len()];
        let mut scalar_paths = vec![String::new(); scalars.len()];
        for (i, scalar) in scalars.iter().enumerate() {
            if let Scalar::Read { path } = scalar {
                let path = plan.str(*path);
                path.clone_into(&mut scalar_paths[i]);
                scalar_words[i] = facts.float_word(path).ok_or_else(|| {
                    ReplayError::Bind(format!(
                        "the plan reads {path}, which this process does not have"
                    ))
                })?;
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
            state,
            counted,
            written: Written::default(),
            plan: optimized,
            values,
            left: Vec::new(),
            schedule,
            failed: false,
            undone: false,
            unplaced: arena.then_some(Unplaced {
                program,
                allocated: None,
            }),
            arranged: arena.then(|| {
                without_arena("until a replay outside of any profiler has shown what ops allocate")
            }),
        })
    }

    /// Computes the scalars from the hyperparameters of now, for the replay that
    /// follows. Comes back: a hyperparameter under which the plan does not apply,
    /// if Python would raise or the sources of a number do not agree.
    pub(crate) fn compute(&mut self, facts: &Facts) -> Option<String> {
        self.computed = true;
        if self.scalars.is_empty() {
            return None;
        }
        let mut missing = None;
        let done = evaluate(&self.scalars, &mut self.numbers_now, |i| {
            facts.float_at(self.scalar_words[i]).unwrap_or_else(|_| {
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

    /// Replays the plan on the arguments that `call` has collected. Results:
    /// outputs, then gradients, in a Python list.
    pub(crate) fn replay(&mut self, call: &Call, facts: &Facts) -> Result<Object, ReplayError> {
        let seen = |unplaced: &mut Unplaced| unplaced.allocated.is_some();
        if let Some(unplaced) = self.unplaced.take_if(seen) {
            self.place(unplaced);
        }
        self.mend()?;
        self.bound.begin()?;
        let results = self.replayed(call, facts);
        self.failed = results.is_err();
        self.undone = match &results {
            Err(ReplayError::Step { step, .. }) => {
                self.bound.is_undone_at(self.plan.plan(), *step) && self.bound.program().undo()?
            }
            _ => false,
        };
        self.left = match &results {
            Err(ReplayError::Step { step, .. }) if !self.undone && !self.lost() => {
                let slots = self.bound.written_before(self.plan.plan(), *step);
                self.count(call, Some(&slots))?;
                for (slot, tensor) in &self.state {
                    // SAFETY: the object is held, a tensor, and the GIL is held.
                    unsafe { (self.bound.program()).leave_shape(*slot, tensor.as_ptr())? };
                }
                self.bound.left(self.plan.plan(), *step).unwrap_or_default()
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
    pub(crate) fn take_left(&mut self) -> Vec<Left> {
        std::mem::take(&mut self.left)
    }

    /// Whether the last replay failed with an error and has left nothing: no write, no
    /// collective, no draw.
    pub(crate) fn undone(&self) -> bool {
        self.undone
    }

    /// What the first call that failed since the last time raised.
    pub(crate) fn exception(&self) -> Option<Object> {
        self.bound.program().exception()
    }

    /// Whether a collective of a replay that failed may still use its memory.
    pub(crate) fn lost(&self) -> bool {
        self.bound.program().lost()
    }

    /// Replays the plan without a result. Shows what each instruction has made or
    /// written in place: the recorded value, or [`rote_plans::NONE`] for one that
    /// a pass has added, and its tensor.
    pub(crate) fn show(
        &mut self,
        call: &Call,
        facts: &Facts,
        seen: &mut dyn FnMut(u32, u32, Object),
    ) -> Result<(), ReplayError> {
        self.mend()?;
        let run = (self.prepare(call, facts)).and_then(|()| {
            let values = &self.values;
            (self.bound).run_shown(self.plan.plan(), &mut |instr, value, tensor| {
                seen(instr, values[value as usize], tensor);
            })
        });
        self.failed = run.is_err();
        let cleared = self.bound.clear();
        run.and_then(|()| self.count(call, None)).and(cleared)
    }

    /// Raises version counters as the step does: of all that it writes, or of what lies in
    /// the memory of some bindings, at most so many times.
    fn count(&mut self, call: &Call, only: Option<&[(u32, usize)]>) -> Result<(), ReplayError> {
        self.written.clear();
        for counted in &self.counted {
            let times = match only {
                Some(written) => {
                    let own = written.iter().find(|(slot, _)| Some(*slot) == counted.slot);
                    let Some((_, most)) = own else { continue };
                    counted.times.map(|times| times.min(*most as u32))
                }
                None => counted.times,
            };
            let object = match &counted.object {
                Ok(object) => object.as_ptr(),
                Err(leaf) => call.leaf(*leaf),
            };
            self.written.add(object, counted.grad, times);
        }
        // SAFETY: objects that are held, and leaves of the caller's live arguments, whose
        // types were guarded.
        unsafe { Bridge::get().written(&self.written) }
    }

    fn replayed(&mut self, call: &Call, facts: &Facts) -> Result<Object, ReplayError> {
        self.prepare(call, facts)?;
        let run = match &mut self.unplaced {
            Some(unplaced) => {
                (self.bound.run_watched()).map(|allocated| unplaced.allocated = allocated)
            }
            None => self.bound.run(),
        };
        run?;
        self.count(call, None)?;
        self.bound.list()
    }

    /// Binds the numbers and tensors of a call.
    fn prepare(&mut self, call: &Call, facts: &Facts) -> Result<(), ReplayError> {
        let computed = std::mem::take(&mut self.computed);
        let unfit = if computed { None } else { self.compute(facts) };
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
            // SAFETY: the leaf belongs to the caller's live arguments, and its
            // type was guarded.
            unsafe {
                self.bound
                    .program()
                    .bind(arg.slot, call.leaf(arg.leaf), what)?
            };
        }
        for (slot, owner) in &self.grads {
            // SAFETY: the owner is held.
            unsafe {
                self.bound
                    .program()
                    .bind(*slot, owner.as_ptr(), Bound::Grad)?
            };
        }
        Ok(())
    }

    /// The plan bound to the tensors of the state, to run by a schedule.
    fn bound_by(&self, schedule: &Schedule) -> Result<BoundPlan, ReplayError> {
        let bound = BoundPlan::to_pytorch(self.plan.plan(), schedule)?;
        for (slot, tensor) in &self.state {
            // SAFETY: the object is held, a tensor, and the GIL is held.
            unsafe {
                bound
                    .program()
                    .bind(*slot, tensor.as_ptr(), Bound::Memory)?
            };
        }
        Ok(bound)
    }

    /// Binds the program anew if its last run has failed.
    fn mend(&mut self) -> Result<(), ReplayError> {
        if self.failed {
            self.bound = self.bound_by(&self.schedule)?;
            self.failed = false;
        }
        Ok(())
    }

    /// Binds the program with its results at their places in the arena, which depend
    /// on what its ops were seen to allocate in an earlier replay.
    fn place(&mut self, unplaced: Unplaced) {
        let Unplaced {
            mut program,
            allocated,
        } = unplaced;
        let done = program.arrange(&allocated.unwrap_or_default());
        match self.bound_by(&program.schedule) {
            Ok(bound) => {
                self.bound = bound;
                self.schedule = program.schedule;
                self.failed = false;
                self.arranged = Some(done);
            }
            Err(error) => {
                tracing::warn!(target: "rote::replay", "a plan goes without an arena: {error}");
                self.arranged = Some(without_arena(&format!("binding failed: {error}")));
            }
        }
    }
}

fn without_arena(why: &str) -> Done {
    Done {
        changed: 0,
        what: format!("no arena: {why}"),
    }
}

//! A plan through its passes, bound to the tensors and numbers of a variant.

mod scalars;
mod tensors;

use rote_passes::{Done, Program};
use rote_plans::Schedule;
use rote_replay::{BoundPlan, Frontend, Left, Program as _, ReplayError, TensorOf};

use crate::SessionError;
use crate::facts::NamedFacts;
use crate::recording::Parts;

use scalars::BoundScalars;
use tensors::BoundTensors;
pub(crate) use tensors::no_leaf;

/// A program that can run on the arguments of a call.
#[derive(Debug)]
pub(crate) struct BoundVariant<F: Frontend> {
    bound: BoundPlan<F::Program>,
    tensors: BoundTensors<F>,
    scalars: BoundScalars<F>,
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

impl<F: Frontend> BoundVariant<F> {
    /// Binds a program to named tensors, and its scalars to the facts that
    /// follow them.
    pub(crate) fn bind(
        frontend: &F,
        mut program: Program,
        parts: &Parts<F>,
    ) -> Result<Self, SessionError> {
        let arena = !program.schedule.offsets.is_empty();
        let unplaced = arena.then(|| Unplaced {
            schedule: std::mem::take(&mut program.schedule),
            allocated: None,
        });
        let plan = &program.plan;
        plan.check()?;
        let bound = BoundPlan::bind(frontend.program(plan)?, plan, &program.schedule)?;
        Ok(BoundVariant {
            tensors: BoundTensors::bind(frontend, plan, &bound, &parts.named)?,
            scalars: BoundScalars::bind(frontend, plan, bound.scalars(), parts)?,
            bound,
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

    /// The program as it was before anything was bound, until its results have places in the arena.
    pub(crate) fn unplaced_program(&self) -> Option<Program> {
        let unplaced = self.unplaced.as_ref()?;
        let mut program = self.program.clone();
        program.schedule = unplaced.schedule.clone();
        Some(program)
    }

    /// Computes the numbers of the replay that follows. Comes back: a hyperparameter or a tensor
    /// under which the plan does not apply, if there is one.
    pub(crate) fn compute(&mut self, frontend: &F, facts: &NamedFacts<F>) -> Option<String> {
        self.scalars.compute(frontend, facts)
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
        let mut results = self.replayed(frontend, facts);
        if let Err(ReplayError::Step { step, message }) = &mut results {
            let what = self.bound.failed_text(&self.program.plan, *step);
            *message = format!("{what}: {message}");
        }
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
                self.tensors.count(frontend, Some(&slots))?;
                self.tensors.leave_shapes(frontend, &self.bound)?;
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
        run.and_then(|()| self.tensors.count(frontend, None))
            .and(cleared)
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
        self.tensors.count(frontend, None)?;
        frontend.results(&self.bound)
    }

    /// Binds the numbers and tensors of a call.
    fn prepare(&mut self, frontend: &F, facts: &NamedFacts<F>) -> Result<(), ReplayError> {
        let numbers = self.scalars.values(frontend, facts)?;
        if !numbers.is_empty() {
            self.bound.set_numbers(numbers)?;
        }
        self.tensors.put_call(frontend, &self.bound)
    }

    /// The program bound anew to the tensors of the state.
    fn bound_anew(&self, frontend: &F) -> Result<BoundPlan<F::Program>, ReplayError> {
        let Program { plan, schedule, .. } = &self.program;
        let bound = BoundPlan::bind(frontend.program(plan)?, plan, schedule)?;
        self.tensors.put_state(frontend, &bound)?;
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

fn without_arena(why: &str) -> Done {
    Done {
        changed: 0,
        what: format!("no arena: {why}"),
    }
}

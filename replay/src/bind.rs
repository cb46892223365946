//! Binds a plan: every op handle, constant argument, view and process group is
//! resolved once, so that running is a loop over numbers.
//!
//! A plan must have passed [`Plan::check`], so that its indices are valid.

use std::ffi::CString;

use rote_plans::schedule::Into;
use rote_plans::{
    Arg, BindingKind, Collective, CollectiveKind, Def, Device, Instr, NONE, Plan, RngAction,
    Scalar, Schedule, ValueId, is_check,
};

use crate::backend::{LocalOp, NumberSite, Program};
use crate::executor::{Executor, ReplayError, Step};
use crate::ranges::{Origins, Ranges, text};

/// A plan, bound to this process.
#[derive(Debug)]
pub struct BoundPlan<P> {
    program: P,
    /// What the first run executes: all of it.
    first: Executor,
    /// The instruction of each of its steps.
    instrs: Vec<u32>,
    /// What every later run executes.
    executor: Executor,
    /// The instruction of each of its steps.
    later_instrs: Vec<u32>,
    /// What the first run keeps for later ones: the instruction, and its result.
    kept: Vec<(u32, u32)>,
    /// What a profiler is shown: the step's name, and ranges of the first run
    /// and of later ones.
    name: CString,
    ranges: [Ranges; 2],
    /// Whether a profiler listens to the step under way.
    listened: bool,
    /// Whether the first run is done, and the slots hold what it leaves.
    settled: bool,
    /// Slots whose tensors are the same in every run once the first is done.
    fixed: Vec<u32>,
    numbers: Vec<NumberSite>,
    scalars: Vec<Scalar>,
    last_numbers: Vec<Option<u64>>,
    /// Slots to empty after a run: all but the state's and fixed ones.
    transient: Vec<u32>,
    /// Slots to hand out: outputs first, then gradients; and whether each is
    /// the slot's own tensor.
    results: Vec<(u32, bool)>,
    /// How many of the results are outputs.
    outputs: usize,
    marked: Vec<bool>,
    /// Kind and slot of each binding, in the plan's order.
    bindings: Vec<(BindingKind, u32)>,
}

/// Values whose tensors are the same in every run: the state, what lies in the
/// arena, what only the first run makes, and views of these.
struct Lasting(Vec<bool>);

impl Lasting {
    fn of(plan: &Plan, schedule: &Schedule) -> Self {
        let made_once = |def| matches!(def, Def::Instr(instr) if schedule.once(instr as usize));
        let is_state = |def| match def {
            Def::Binding(binding) => plan.bindings[binding as usize].kind == BindingKind::State,
            _ => false,
        };
        let values = (0..).zip(&plan.values).map(|(id, value)| {
            let root = plan.values[value.root as usize].def;
            let root_lasts =
                schedule.offset(value.root).is_some() || is_state(root) || made_once(root);
            let is_view = match value.def {
                Def::Instr(instr) => matches!(plan.instrs[instr as usize], Instr::View { .. }),
                _ => false,
            };
            root_lasts && (value.root == id || is_view) || made_once(value.def)
        });
        Lasting(values.collect())
    }

    fn value(&self, value: u32) -> bool {
        self.0[value as usize]
    }

    /// Whether only the first run executes an instruction.
    fn step(&self, plan: &Plan, schedule: &Schedule, at: usize) -> bool {
        let lasting_view = match plan.instrs[at] {
            Instr::View { out, .. } => self.value(out),
            _ => false,
        };
        schedule.once(at) || lasting_view
    }
}

/// Makes the arena and the tensors that lie in it.
fn place(program: &mut impl Program, plan: &Plan, schedule: &Schedule) -> Result<(), ReplayError> {
    let Some(device) = schedule.arena_device.filter(|_| schedule.arena_bytes > 0) else {
        return Ok(());
    };
    if schedule.offsets.len() != plan.values.len() {
        return Err(bind_error("the schedule is not one for this plan"));
    }
    program.bind_arena(schedule.arena_bytes, device)?;
    for value in 0..plan.values.len() as u32 {
        if let Some(offset) = schedule.offset(value) {
            program.bind_place(plan, value, offset)?;
        }
    }
    Ok(())
}

/// What a run that failed leaves in the `.grad` of a tensor.
#[derive(Debug)]
pub enum Left<T> {
    /// A gradient.
    Made(T),
    /// None.
    Nothing,
    /// What was there before.
    AsItWas,
}

/// Whether an instruction writes a root in place.
fn writes(plan: &Plan, instr: &Instr, root: u32) -> bool {
    let looks_at = |value: u32| plan.values[value as usize].root == root;
    match *instr {
        Instr::Local { writes, .. } => plan.ids(writes).iter().any(|&value| looks_at(value)),
        Instr::Collective(c) => c.output == c.input && looks_at(c.output),
        _ => false,
    }
}

/// The devices whose generators a plan moves.
fn draws(plan: &Plan) -> Vec<Device> {
    let mut found = Vec::new();
    for instr in &plan.instrs {
        let device = match *instr {
            Instr::Local {
                outs,
                writes,
                seeded: true,
                ..
            } => {
                let mut values = plan.ids(outs).iter().chain(plan.ids(writes));
                let made = values.find(|&&value| value != NONE);
                made.map(|&value| plan.values[value as usize].device)
            }
            Instr::Rng { device, .. } => Some(device),
            _ => None,
        };
        found.extend(device.filter(|device| !found.contains(device)));
    }
    found
}

/// The places of numbers that are set before each run, in one argument.
fn number_sites(plan: &Plan, op: u32, arg: u32, of: Arg) -> Vec<NumberSite> {
    let site = |element, of| match of {
        Arg::Scalar(scalar) => Some(NumberSite {
            op,
            arg,
            element,
            scalar,
        }),
        _ => None,
    };
    match of {
        Arg::Wrapped(inner) => Vec::from_iter(site(None, plan.args[inner as usize])),
        Arg::List(range) => (0..)
            .zip(&plan.args[range.indices()])
            .filter_map(|(i, inner)| site(Some(i), *inner))
            .collect(),
        _ => Vec::from_iter(site(None, of)),
    }
}

fn bind_error(message: impl std::convert::Into<String>) -> ReplayError {
    ReplayError::Bind(message.into())
}

/// The steps of a plan while it is bound.
#[derive(Default)]
struct Steps {
    /// Those of the first run, and the instruction of each.
    all: Vec<Step>,
    instrs: Vec<u32>,
    /// Those of later runs, likewise.
    later: Vec<Step>,
    later_instrs: Vec<u32>,
    rng: Vec<(RngAction, Device, u32)>,
    numbers: Vec<NumberSite>,
    /// What the first run keeps for later ones: the instruction, and its result.
    kept: Vec<(u32, u32)>,
}

impl Steps {
    /// Binds an instruction to a program. None for one that no run executes.
    fn bind(
        &mut self,
        program: &mut impl Program,
        plan: &Plan,
        schedule: &Schedule,
        lasting: &Lasting,
        at: usize,
    ) -> Result<Option<Step>, ReplayError> {
        let into = schedule.into(at);
        Ok(Some(match plan.instrs[at] {
            Instr::Local { .. } if into == Some(Into::Nothing) => return Ok(None),
            Instr::Local {
                op,
                overload,
                args,
                outs,
                grad,
                ..
            } => {
                let args = &plan.args[args.indices()];
                let local = LocalOp {
                    name: plan.str(op),
                    overload: plan.str(overload),
                    args,
                    outs: plan.ids(outs),
                    into,
                    grad,
                };
                let op = program.bind_op(plan, &local)?;
                for (i, &arg) in (0..).zip(args) {
                    self.numbers.extend(number_sites(plan, op, i, arg));
                }
                Step::Local(op)
            }
            Instr::View { base, out } => {
                let root = plan.values[out as usize].root;
                if root != base {
                    return Err(bind_error(format!("view {out} is not based on its root")));
                }
                Step::View(program.bind_view(plan, base, out)?)
            }
            Instr::Collective(c) => Step::Start(program.bind_collective(plan, &c)?),
            Instr::Wait { value } => Step::Wait(value),
            Instr::Free { value } if lasting.value(value) => return Ok(None),
            Instr::Free { value } => Step::Free(value),
            Instr::Rng {
                action,
                device,
                slot,
            } => {
                self.rng.push((action, device, slot));
                Step::Rng(self.rng.len() as u32 - 1)
            }
        }))
    }
}

impl<P: Program> BoundPlan<P> {
    /// Binds a plan that runs by this schedule to a program with as many slots as the plan has values.
    ///
    /// # Errors
    ///
    /// [`ReplayError`] when the plan names an op or a process group that this
    /// process does not have, or the schedule is not one for this plan.
    pub fn bind(mut program: P, plan: &Plan, schedule: &Schedule) -> Result<Self, ReplayError> {
        let lasting = Lasting::of(plan, schedule);
        place(&mut program, plan, schedule)?;
        for device in draws(plan) {
            program.bind_generator(device)?;
        }
        let mut steps = Steps::default();
        for (at, instr) in plan.instrs.iter().enumerate() {
            let Some(step) = steps.bind(&mut program, plan, schedule, &lasting, at)? else {
                continue;
            };
            if let (&Instr::Local { outs, .. }, true) = (instr, schedule.once(at)) {
                let outs = plan.ids(outs).iter().filter(|&&out| out != NONE);
                steps.kept.extend(outs.map(|&out| (at as u32, out)));
            }
            if !lasting.step(plan, schedule, at) {
                steps.later.push(step);
                steps.later_instrs.push(at as u32);
            }
            steps.all.push(step);
            steps.instrs.push(at as u32);
        }
        let Steps {
            all,
            instrs,
            later,
            later_instrs,
            rng,
            numbers,
            kept,
        } = steps;
        let first = Executor {
            steps: all,
            rng: rng.clone(),
        };
        let executor = Executor { steps: later, rng };
        let origins = Origins::of(plan);
        let ranges = [
            origins.ranges(&first, &instrs),
            origins.ranges(&executor, &later_instrs),
        ];

        let bindings = plan.bindings.iter();
        let bindings = bindings.map(|binding| (binding.kind, binding.value));
        let (fixed, transient): (Vec<u32>, Vec<u32>) =
            (0..plan.values.len() as u32).partition(|value| lasting.value(*value));
        let mut results: Vec<(u32, bool)> = Vec::new();
        let outputs = plan.outputs.iter().map(|output| output.value);
        let grads = plan.grads.iter().map(|grad| grad.value);
        let grads = grads.filter(|&value| value != NONE);
        for value in outputs.chain(grads) {
            let lasts = plan.is_bound(value) || lasting.value(value);
            let fresh = !lasts && results.iter().all(|&(other, _)| other != value);
            results.push((value, fresh));
        }
        Ok(BoundPlan {
            program,
            first,
            instrs,
            executor,
            later_instrs,
            kept,
            name: text(&format!("rote::replay {}", plan.function)),
            ranges,
            listened: false,
            settled: false,
            fixed,
            last_numbers: vec![None; numbers.len()],
            numbers,
            scalars: plan.scalars.clone(),
            transient,
            results,
            outputs: plan.outputs.len(),
            marked: plan
                .outputs
                .iter()
                .map(|output| output.requires_grad)
                .collect(),
            bindings: bindings.collect(),
        })
    }

    /// The program, for binding tensors.
    pub fn program(&self) -> &P {
        &self.program
    }

    /// Kind and slot of each binding, in the plan's order.
    pub fn bindings(&self) -> &[(BindingKind, u32)] {
        &self.bindings
    }

    /// The scalars to evaluate before each run.
    pub fn scalars(&self) -> &[Scalar] {
        &self.scalars
    }

    /// Sets the numbers that are read anew at every replay. `values`: one per
    /// scalar.
    pub fn set_numbers(&mut self, values: &[f64]) -> Result<(), ReplayError> {
        for (site, last) in self.numbers.iter().zip(&mut self.last_numbers) {
            let value = values[site.scalar as usize];
            if *last != Some(value.to_bits()) {
                self.program.set_number(site, value)?;
                *last = Some(value.to_bits());
            }
        }
        Ok(())
    }

    /// Begins a replay: a profiler that listens shows everything from here to
    /// [`BoundPlan::end`] as one step.
    pub fn begin(&mut self) -> Result<(), ReplayError> {
        self.listened = self.program.listened();
        if self.listened {
            self.program.begin_range(&self.name)?;
        }
        Ok(())
    }

    /// Ends a replay, whatever became of it.
    pub fn end(&self) -> Result<(), ReplayError> {
        if self.listened {
            self.program.end_range()?;
        }
        Ok(())
    }

    /// Runs the plan. Results wait in their slots, and everything but the
    /// state is dropped by [`BoundPlan::clear`].
    pub fn run(&mut self) -> Result<(), ReplayError> {
        let [first, later] = &self.ranges;
        if self.settled {
            self.executed(&self.executor, later)?;
        } else {
            self.executed(&self.first, first)?;
            self.program.fix(&self.fixed)?;
            self.settled = true;
        }
        Ok(())
    }

    /// Runs an executor's steps; in ranges if a profiler listens.
    fn executed(&self, executor: &Executor, ranges: &Ranges) -> Result<(), ReplayError> {
        let program = &self.program;
        program.under_way(|| match self.listened {
            false => executor.run(program, program),
            true => ranges.run(executor, program),
        })
    }

    /// Runs an executor's steps. Returns the most bytes that each had allocated at once,
    /// above those before it; nothing, and runs nothing, where that can't be watched.
    fn watched(&self, executor: &Executor) -> Result<Option<Vec<u64>>, ReplayError> {
        let program = &self.program;
        let Some(mut rise) = program.watch()? else {
            return Ok(None);
        };
        let mut rises = Vec::with_capacity(executor.steps.len() + 1);
        program.under_way(|| executor.run_observed(program, program, |_| rises.push(rise())))?;
        rises.push(rise());
        rises.remove(0); // before the first step
        Ok(Some(rises))
    }

    /// Runs an executor's steps. Calls `seen` with each, by its place, once it is done.
    fn seen(&self, executor: &Executor, seen: &mut dyn FnMut(usize)) -> Result<(), ReplayError> {
        let program = &self.program;
        let mut done = None;
        let mut show = |step: Option<usize>| match step {
            Some(step) => program.aside(&mut || seen(step)),
            None => Ok(()),
        };
        program.under_way(|| {
            let mut shown = Ok(());
            executor.run_observed(program, program, |next| {
                if shown.is_ok() {
                    shown = show(done.replace(next));
                }
            })?;
            shown?;
            show(done.take())
        })
    }

    /// Runs all of the plan, as the first run does. Returns, for each instruction,
    /// the most bytes that it had allocated at once, results included; nothing while
    /// a profiler runs.
    pub fn run_watched(&mut self) -> Result<Option<Vec<u64>>, ReplayError> {
        let watched = match self.listened {
            true => None,
            false => self.watched(&self.first)?,
        };
        let Some(steps) = watched else {
            return self.run().map(|()| None);
        };
        let count = self.instrs.last().map_or(0, |last| *last as usize + 1);
        let mut allocated = vec![0; count];
        for (instr, bytes) in self.instrs.iter().zip(steps) {
            allocated[*instr as usize] = bytes;
        }
        Ok(Some(allocated))
    }

    /// Runs the plan, and shows what each instruction has made or written in place:
    /// the instruction, the value, and its tensor. `plan`: the one that was bound.
    pub fn run_shown(
        &mut self,
        plan: &Plan,
        seen: &mut dyn FnMut(u32, u32, P::Tensor),
    ) -> Result<(), ReplayError> {
        // Views that last are made anew, to be shown; what is kept is shown as it is.
        let kept = |instr: &u32| self.settled && self.kept.iter().any(|(at, _)| at == instr);
        let steps = self.first.steps.iter().zip(&self.instrs);
        let (steps, instrs): (Vec<Step>, Vec<u32>) =
            steps.filter(|(_, instr)| !kept(instr)).unzip();
        let executor = Executor {
            steps,
            rng: self.first.rng.clone(),
        };
        let program = &self.program;
        let mut show = |instr: u32, value: u32| {
            if let Some(tensor) = program.shown(value) {
                seen(instr, value, tensor);
            }
        };
        for &(instr, value) in self.kept.iter().filter(|_| self.settled) {
            show(instr, value);
        }
        self.seen(&executor, &mut |step| {
            let instr = instrs[step];
            match plan.instrs[instr as usize] {
                Instr::Local { outs, writes, .. } => {
                    let values = plan.ids(outs).iter().chain(plan.ids(writes));
                    let values = values.filter(|&&value| value != NONE);
                    values.for_each(|&value| show(instr, value));
                }
                Instr::View { out, .. } => show(instr, out),
                Instr::Wait { value } => show(instr, value),
                _ => {}
            }
        })?;
        if !self.settled {
            self.program.fix(&self.fixed)?;
            self.settled = true;
        }
        Ok(())
    }

    /// Of a run that failed at a step: the instruction.
    fn failed_at(&self, step: usize) -> u32 {
        let instrs = match self.settled {
            true => &self.later_instrs,
            false => &self.instrs,
        };
        instrs.get(step).copied().unwrap_or(0)
    }

    /// Of a run that failed at a step: the op or the collective, for people. `plan`: the one that was bound.
    pub fn failed_text(&self, plan: &Plan, step: usize) -> String {
        let failed = self.failed_at(step) as usize;
        let told = |c: &Collective| {
            let over = plan.str(plan.groups[c.group as usize].label);
            format!("{} over {over}", CollectiveKind::TEXTS[c.kind as usize])
        };
        match plan.instrs.get(failed) {
            Some(Instr::Local { op, .. }) => plan.str(*op).to_owned(),
            Some(Instr::Collective(c)) => told(c),
            Some(Instr::Wait { value }) => {
                let root = |value: ValueId| plan.values[value as usize].root;
                let started = plan.instrs[..failed]
                    .iter()
                    .rev()
                    .find_map(|instr| match instr {
                        Instr::Collective(c) if root(c.output) == root(*value) => Some(told(c)),
                        _ => None,
                    });
                format!(
                    "the wait for {}",
                    started.as_deref().unwrap_or("a collective")
                )
            }
            _ => "an instruction".to_owned(),
        }
    }

    /// Of a run that failed at a step: which of the plan's checks failed there, counted from 0, if it was one.
    /// `plan`: the one that was bound.
    pub fn failed_check(&self, plan: &Plan, step: usize) -> Option<usize> {
        let failed = self.failed_at(step) as usize;
        let checks =
            |instr: &&Instr| matches!(**instr, Instr::Local { op, .. } if is_check(plan.str(op)));
        plan.instrs.get(failed).filter(checks)?;
        Some(plan.instrs[..failed].iter().filter(checks).count())
    }

    /// Whether a run that failed at a step has done nothing by then that lasts but draw from
    /// generators, so that the call can be made again: it has written no binding, started no
    /// collective and called no op of another library, which may keep something itself.
    /// `plan`: the one that was bound.
    pub fn is_undone_at(&self, plan: &Plan, step: usize) -> bool {
        let run = &plan.instrs[..=self.failed_at(step) as usize];
        let slots = || self.bindings.iter().map(|&(_, slot)| slot);
        run.iter().all(|instr| match *instr {
            Instr::Local { op, .. } => {
                self.program.is_own(plan.str(op)) && !slots().any(|slot| writes(plan, instr, slot))
            }
            Instr::Collective(_) | Instr::Wait { .. } => false,
            Instr::View { .. } | Instr::Rng { .. } | Instr::Free { .. } => true,
        })
    }

    /// Slots of bindings that a run which failed at a step has written by then, and how
    /// many instructions did. `plan`: the one that was bound.
    pub fn written_before(&self, plan: &Plan, step: usize) -> Vec<(u32, usize)> {
        let before = &plan.instrs[..self.failed_at(step) as usize];
        let writers = |slot| {
            before
                .iter()
                .filter(|instr| writes(plan, instr, slot))
                .count()
        };
        let slots = self.bindings.iter().map(|&(_, slot)| (slot, writers(slot)));
        slots.filter(|&(_, times)| times > 0).collect()
    }

    /// What eager leaves behind when an instruction fails: for each gradient that the
    /// plan leaves, in its order, the tensor if it was made by then, and nothing if
    /// eager has dropped the one before it or never had one. Where the recording has not
    /// seen when it was dropped: before the step's first op, if no op reads it.
    /// `step`: the one of the run that failed. `plan`: the one that was bound. To be
    /// called before [`BoundPlan::clear`].
    pub fn left(&self, plan: &Plan, step: usize) -> Result<Vec<Left<P::Tensor>>, ReplayError> {
        let failed = self.failed_at(step);
        let mut results = self.results[self.outputs..].iter();
        let left = plan.grads.iter().map(|grad| {
            let before = match grad.gone <= failed {
                true => Left::Nothing,
                false => Left::AsItWas,
            };
            if grad.value == NONE {
                return Ok(before);
            }
            let &(value, fresh) = results.next().ok_or_else(|| bind_error("a gradient"))?;
            let read = plan
                .bindings
                .iter()
                .any(|binding| binding.kind == BindingKind::Grad && binding.path == grad.path);
            Ok(match plan.values[value as usize].def {
                // Autograd takes a gradient as soon as it is there.
                Def::Instr(at) if at < failed => Left::Made(self.program.output(value, fresh)?),
                Def::Instr(_) if grad.gone == NONE && !read => Left::Nothing,
                _ => before,
            })
        });
        left.collect()
    }

    /// The slots of outputs, then of gradients, and whether each is the slot's own tensor
    /// ([`Backend::output`](crate::Backend::output)).
    pub fn results(&self) -> &[(u32, bool)] {
        &self.results
    }

    /// How many of the results are outputs, and which of them require grad.
    pub fn outputs(&self) -> (usize, &[bool]) {
        (self.outputs, &self.marked)
    }

    /// Drops what a run has left, the state's tensors apart.
    pub fn clear(&self) -> Result<(), ReplayError> {
        self.program.clear(&self.transient)
    }

    /// How many steps a run after the first takes, views and frees included.
    pub fn steps(&self) -> usize {
        self.executor.steps.len()
    }
}

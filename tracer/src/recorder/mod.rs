//! The recorder: makes a plan of a stream of ops.
//!
//! The recorder identifies a tensor by its storage. A tensor that shares the
//! storage of a known tensor is a view of it, whichever op made it. So a view op
//! leaves no instruction: a view is bound from its root by shape, strides and
//! offset when it is first needed. A storage that has no name and that no
//! recorded op made is refused: a replay would read stale data.
//!
//! | file | subject |
//! |---|---|
//! | `checks` | what is refused |
//! | `roots` | storages that the plan knows, and the values that look at them |
//! | `local` | local ops: their arguments and results |
//! | `undeclared` | arguments that ops write though their schemas do not say so |
//! | `collectives` | collectives, and the waits for them |
//! | `buckets` | memory that the framework fills anew in every step: buckets of gradients |
//! | `by_hand` | collectives that the step calls by hand, with handles to wait |
//! | `exchanges` | ops of process groups that a plan holds as they are: lists of tensors, point to point |
//! | `waits` | collectives under way, and who uses their memory too early |
//! | `met` | tensors without a name that the step can reach |
//! | `generations` | memory that the framework takes and gives back while a step runs |
//! | `failing` | ops that may raise, and what a step has done by then |
//! | `reads` | answers about data that the host asks for |
//! | `strategies` | global ops and redistributions |
//! | `results` | what the step leaves behind |

mod buckets;
mod by_hand;
mod checks;
mod collectives;
mod exchanges;
mod failing;
mod generations;
mod local;
mod met;
#[cfg(test)]
mod random;
mod reads;
mod results;
mod roots;
mod shadows;
mod strategies;
#[cfg(test)]
mod tests;
mod undeclared;
mod waits;

use hashbrown::{HashMap, HashSet};
use rote_plans::{
    Device, Fingerprint, Guard, GuardKind, Instr, InstrId, Plan, RngAction, StrId, ValueId,
};

use crate::event::{ArgEvent, OpEvent, TensorEvent};
use crate::refusal::Refusal;
use crate::tables::Tables;
pub(crate) use checks::OF_FIXED_SHAPE;
pub use reads::{checks_can_agree, checks_come_first, has_checks};
use roots::{Candidate, Geometry, Named, Root};
use rote_passes::liveness;

/// Records one run of a step.
#[derive(Debug, Default)]
pub struct Recorder {
    tables: Tables,
    /// Tensors that have a name and that nothing has used yet, by storage.
    candidates: HashMap<u64, Candidate>,
    /// Storages that the plan knows.
    roots: HashMap<u64, Root>,
    /// Storages of tensors that the step can reach and that have no name, with the places where they are.
    reach: HashMap<u64, String>,
    /// Those of them that ops have met.
    met: met::Met,
    geometries: HashMap<Geometry, ValueId>,
    /// Of each binding of the plan, in order.
    named: Vec<Named>,
    /// Outputs of collectives that were started and not yet waited for.
    pending: HashSet<ValueId>,
    /// Buckets of gradients that the framework keeps between steps.
    buckets: buckets::Buckets,
    /// Storages that have got new memory in the step, with the lines at which they got it.
    generations: HashMap<u64, String>,
    /// Handles of collectives that the step has called by hand.
    handles: by_hand::Handles,
    /// The user's source line of each instruction.
    sources: Vec<StrId>,
    /// Global ops that are under way, as indices of strategies.
    open_strategies: Vec<u32>,
    open_redistributions: Vec<u32>,
    /// The first instruction of the op that was recorded last.
    last: usize,
    /// Whether that op may raise for other data.
    may_raise: bool,
    /// The first instruction of the last op that may raise.
    last_raising: Option<InstrId>,
    /// The first instruction that does what lasts, even if a later one fails.
    first_lasting: Option<InstrId>,
    /// The first instruction that does what lasts and is no collective between tensors of the step's own.
    first_final: Option<InstrId>,
    /// Whether the host may ask for data, and plans check the answers.
    may_ask: bool,
    /// Whether the ranks agree about the answers, so that collectives may come before.
    ranks_agree: bool,
    /// The refusal of the step unless its plan writes to copies of tensors ahead of its checks.
    unless_shadowed: Option<Refusal>,
    /// The ops of which the step handles errors, behind what lasts.
    handled: Vec<usize>,
    /// Checks that must run before what lasts, and came later.
    ahead: Vec<usize>,
    /// For each path of a tensor whose gradient has gone, the instruction that has shown it.
    gone: HashMap<StrId, InstrId>,
}

impl Recorder {
    /// A recorder for one run of `function` in the process `fingerprint`.
    pub fn new(fingerprint: Fingerprint, function: &str) -> Self {
        let mut recorder = Recorder::default();
        recorder.tables.plan.fingerprint = fingerprint;
        recorder.tables.plan.function = function.to_owned();
        recorder
    }

    /// Says where the step can reach a storage that is no argument and not in the state: a refusal names the place.
    pub fn reaches(&mut self, storage: u64, place: &str) {
        self.reach
            .entry(storage)
            .or_insert_with(|| place.to_owned());
    }

    /// How many instructions there are so far.
    pub fn len(&self) -> usize {
        self.tables.plan.instrs.len()
    }

    /// How many of the instructions are local ops or waits.
    pub fn executed(&self) -> usize {
        let counted = |instr: &&Instr| matches!(instr, Instr::Local { .. } | Instr::Wait { .. });
        self.tables.plan.instrs.iter().filter(counted).count()
    }

    /// Whether nothing was recorded yet.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Records an op that has just run.
    pub fn op(&mut self, op: &OpEvent<'_>) -> Result<(), Refusal> {
        let first = self.len();
        self.add(op)?;
        self.look_at_last(first);
        Ok(())
    }

    fn add(&mut self, op: &OpEvent<'_>) -> Result<(), Refusal> {
        let marked = undeclared::marked(op);
        let op = marked.as_ref().unwrap_or(op);
        let namespace = op.name.split("::").next().unwrap_or_default();
        if namespace == "profiler" || op.name == "aten::detach_" || touches_meta(op) {
            return Ok(());
        }
        if self.turns_own(op) {
            return Ok(());
        }
        if (op.hidden && self.concerns_others(op)) || self.reads_usage_map(op) {
            return Ok(());
        }
        self.end_used(op)?;
        self.begin_generations(op)?;
        self.follow_buckets(op)?;
        self.meet(op);
        if by_hand::is_by_hand(op) {
            return self.by_hand(op);
        }
        if reads::asks(op) {
            return self.question_of_data(op);
        }
        self.check(op)?;
        self.check_tensors(op)?;
        self.anchor_absolute(op);
        let of_torch = namespace == "aten" || namespace == "prims";
        let fresh = self.has_fresh_output(op);
        let writes = op
            .args
            .iter()
            .any(|arg| arg.written && has_tensor(&arg.value));
        if op.name == "_c10d_functional::wait_tensor" {
            return self.wait(op);
        }
        if !writes && !fresh && has_tensors(&op.outs) && (of_torch || is_wrapper(op)) {
            return self.views(op);
        }
        // An op that returns nothing was called for what it does, such as to raise.
        if of_torch && !writes && !has_tensors(&op.outs) && !op.outs.is_empty() {
            return self.question(op);
        }
        if !self.collective(op)? {
            if !of_torch {
                Self::check_answers(op)?;
            }
            self.local(op)?;
            self.check_shapes(op)?;
        }
        Ok(())
    }

    /// Whether an op changes in place how a tensor looks at memory that the step has made. There
    /// is nothing to record: whoever uses the tensor later says how it lies.
    fn turns_own(&self, op: &OpEvent<'_>) -> bool {
        let tensor = op.args.first().and_then(|arg| tensors(&arg.value).next());
        checks::turns(op.name) && tensor.is_some_and(|tensor| self.is_made(tensor.storage))
    }

    /// Whether an op is none of the step's, as far as anybody could tell: it reads what
    /// the plan does not know, and leaves nothing but tensors that the plan does not know.
    fn concerns_others(&self, op: &OpEvent<'_>) -> bool {
        let known = |t: &TensorEvent<'_>| self.knows(t.storage);
        let strange = op
            .args
            .iter()
            .flat_map(|arg| tensors(&arg.value))
            .any(|t| !known(t));
        let writes_known = op
            .args
            .iter()
            .filter(|arg| arg.written)
            .flat_map(|arg| tensors(&arg.value))
            .any(known);
        strange && !writes_known && !op.seeded && op.outs.iter().all(has_tensor)
    }

    fn refuse<T>(
        op: &OpEvent<'_>,
        reason: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Result<T, Refusal> {
        Err(Refusal::op(op.name, op.source, reason, remedy))
    }

    fn push_instr(&mut self, instr: Instr, source: &str) {
        self.tables.plan.instrs.push(instr);
        let source = self.tables.str(source);
        self.sources.push(source);
    }

    fn next_instr(&self) -> InstrId {
        self.tables.plan.instrs.len() as InstrId
    }

    /// An op that only made views of known tensors.
    fn views(&mut self, op: &OpEvent<'_>) -> Result<(), Refusal> {
        let mut lazy = false;
        for tensor in op.outs.iter().flat_map(tensors) {
            let mut given = op.args.iter().flat_map(|arg| tensors(&arg.value));
            if !given.any(|arg| arg.storage == tensor.storage) {
                return Err(Refusal::op(
                    op.name,
                    op.source,
                    format!(
                        "returns {} in memory that is none of its arguments', as if it had written there",
                        tensor.describe()
                    ),
                    "report what the op writes (`written`), or give its result memory of its own",
                ));
            }
            lazy |= self.value(tensor, op.source).is_none();
        }
        if lazy { self.local(op) } else { Ok(()) }
    }

    /// Whether a storage has a name, or an op of the step has made it.
    fn knows(&self, storage: u64) -> bool {
        self.roots.contains_key(&storage) || self.candidates.contains_key(&storage)
    }

    fn only_views(&self, op: &OpEvent<'_>) -> bool {
        has_tensors(&op.outs)
            && !self.has_fresh_output(op)
            && !op.args.iter().any(|arg| arg.written)
    }

    fn has_fresh_output(&self, op: &OpEvent<'_>) -> bool {
        let mut outs = op.outs.iter().flat_map(tensors);
        outs.any(|t| !self.knows(t.storage))
    }

    /// Records a change of generator state outside the dispatcher. Returns the
    /// slot that a save fills.
    pub fn rng(
        &mut self,
        action: RngAction,
        device: Device,
        slot: Option<u32>,
        source: &str,
    ) -> u32 {
        let slots = &mut self.tables.plan.rng_slots;
        let slot = slot.unwrap_or_else(|| {
            *slots += 1;
            *slots - 1
        });
        self.push_instr(
            Instr::Rng {
                action,
                device,
                slot,
            },
            source,
        );
        slot
    }

    /// Names of the process groups that the recorded collectives use.
    pub fn group_names(&self) -> Vec<String> {
        let plan = &self.tables.plan;
        plan.groups
            .iter()
            .map(|group| plan.str(group.name).to_owned())
            .collect()
    }

    /// Says which ranks a group has and what people call it.
    pub fn describe_group(&mut self, name: &str, ranks: &[i64], label: &str) {
        self.tables.describe_group(name, ranks, label);
    }

    /// Adds a guard.
    pub fn guard(&mut self, kind: GuardKind, subject: &str, expected: &str) {
        let subject = self.tables.str(subject);
        let expected = self.tables.str(expected);
        self.tables.plan.guards.push(Guard {
            kind,
            subject,
            expected,
        });
    }

    /// The plan, with last uses and frees, and the source line of each
    /// instruction. `result` is the structure of the result as JSON.
    pub fn finish(mut self, result: &str) -> (Plan, Vec<String>) {
        self.put_checks_first();
        self.write_behind_checks();
        self.anchor_neighbours();
        self.tables.plan.result = result.to_owned();
        let sources: Vec<String> = self
            .sources
            .iter()
            .map(|&id| self.tables.plan.str(id).to_owned())
            .collect();
        liveness::finish(self.tables.plan, sources)
    }
}

fn tensors<'e, 'a>(arg: &'e ArgEvent<'a>) -> impl Iterator<Item = &'e TensorEvent<'a>> {
    let list: &'e [TensorEvent<'a>] = match arg {
        ArgEvent::Tensor(tensor) => std::slice::from_ref(tensor),
        ArgEvent::Tensors(list) => list,
        _ => &[],
    };
    list.iter().filter(|t| t.storage != 0 || t.opaque)
}

fn has_tensor(arg: &ArgEvent<'_>) -> bool {
    tensors(arg).next().is_some()
}

fn has_tensors(args: &[ArgEvent<'_>]) -> bool {
    args.iter().any(has_tensor)
}

/// Ops on meta tensors are shape arithmetic of the framework, not work.
fn touches_meta(op: &OpEvent<'_>) -> bool {
    let args = op.args.iter().flat_map(|arg| tensors(&arg.value));
    args.chain(op.outs.iter().flat_map(tensors))
        .any(|t| t.device.kind == Device::META)
}

fn is_wrapper(op: &OpEvent<'_>) -> bool {
    op.name == "_c10d_functional::_wrap_tensor_autograd"
}

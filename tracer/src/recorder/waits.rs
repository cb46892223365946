//! Collectives that are under way: what is left to wait for, and who uses their memory too early.

use rote_passes::liveness::{for_each_out, for_each_value};
use rote_plans::value::reach;
use rote_plans::{Arg, Instr, Plan, ValueId, WAIT};

use super::Recorder;
use crate::Refusal;

impl Recorder {
    /// How many collectives the step has not waited for.
    pub fn unwaited(&self) -> usize {
        self.pending.len() + self.handles.unwaited()
    }

    /// The refusal of a step that uses the memory of a collective before it has waited for the collective, or that
    /// never waits for one. `waits`: the framework waits at the first use, but for collectives that the step calls by
    /// hand.
    pub fn race(&self, waits: bool) -> Option<Refusal> {
        let plan = &self.tables.plan;
        let mut under_way: Vec<UnderWay> = Vec::new();
        for ((instr, source), at) in plan.instrs.iter().zip(&self.sources).zip(0..) {
            let waited = waited(plan, instr);
            under_way.retain(|one| Some(one.output) != waited);
            if let Some(does) = under_way
                .iter()
                .find_map(|one| one.disturbed_by(plan, instr))
            {
                let op = match instr {
                    Instr::Local { op, .. } => plan.str(*op),
                    _ => "a collective",
                };
                let remedy = "wait for the collective first";
                return Some(Refusal::op(op, plan.str(*source), does, remedy));
            }
            match instr {
                Instr::Local { op, .. }
                    if !waits && plan.str(*op).starts_with("_c10d_functional::") =>
                {
                    return Some(Refusal::op(
                        plan.str(*op),
                        plan.str(*source),
                        "is a collective that plans cannot hold: Rote cannot tell when its result is there",
                        "use all_reduce, all_gather_into_tensor, reduce_scatter_tensor, all_to_all_single or broadcast",
                    ));
                }
                Instr::Collective(c) if !waits || self.handles.started_at(at) => {
                    let writes = [Some(c.output), self.handles.target(c.output)];
                    under_way.push(UnderWay {
                        output: c.output,
                        writes: writes.into_iter().flatten().collect(),
                        reads: vec![c.input],
                    });
                }
                Instr::Local { outs, writes, .. } if self.handles.started_at(at) => {
                    let mut reads = Vec::new();
                    for_each_value(plan, instr, |value| reads.push(value));
                    let writes = plan.ids(*writes).to_vec();
                    reads.retain(|value| !writes.contains(value));
                    under_way.extend(plan.ids(*outs).first().map(|handle| UnderWay {
                        output: *handle,
                        writes,
                        reads,
                    }));
                }
                _ => {}
            }
        }
        let unwaited = under_way.len();
        (unwaited > 0).then(|| {
            Refusal::step(
                format!("does not wait for {unwaited} of the collectives that it starts"),
                "wait for each collective inside the step",
            )
        })
    }
}

/// What was not waited for yet, and the values that it writes and reads meanwhile.
struct UnderWay {
    /// The value that the wait is for.
    output: ValueId,
    writes: Vec<ValueId>,
    reads: Vec<ValueId>,
}

impl UnderWay {
    /// What an instruction does too early, if anything.
    fn disturbed_by(&self, plan: &Plan, instr: &Instr) -> Option<&'static str> {
        // A view says where to look, and looks at nothing.
        if matches!(
            instr,
            Instr::View { .. } | Instr::Wait { .. } | Instr::Free { .. }
        ) || waited(plan, instr).is_some()
        {
            return None;
        }
        let any = |own: &[ValueId], value| own.iter().any(|own| overlap(plan, *own, value));
        let (mut looks, mut writes) = (false, false);
        for_each_value(plan, instr, |value| looks |= any(&self.writes, value));
        for_each_out(plan, instr, |value| looks |= any(&self.writes, value));
        let mut write = |value| {
            looks |= any(&self.writes, value);
            writes |= any(&self.reads, value);
        };
        match instr {
            Instr::Local { writes, .. } => plan.ids(*writes).iter().copied().for_each(&mut write),
            Instr::Collective(c) => write(c.output),
            _ => {}
        }
        match (looks, writes) {
            (true, _) => Some("uses the result of a collective before the step has waited for it"),
            (_, true) => {
                Some("writes what a collective still sends, before the step has waited for it")
            }
            (false, false) => None,
        }
    }
}

/// The value that an instruction waits for.
fn waited(plan: &Plan, instr: &Instr) -> Option<ValueId> {
    match instr {
        Instr::Wait { value } => Some(*value),
        Instr::Local { op, args, .. } if plan.str(*op) == WAIT => {
            match plan.args[args.indices()].first() {
                Some(Arg::Value(handle)) => Some(*handle),
                _ => None,
            }
        }
        _ => None,
    }
}

/// Whether two values may look at the same bytes.
fn overlap(plan: &Plan, a: ValueId, b: ValueId) -> bool {
    if root(plan, a) != root(plan, b) {
        return false;
    }
    meet(extent(plan, a), extent(plan, b))
}

/// Bytes of a root, from and to; `None` of what has no elements.
pub(super) type Extent = Option<(i128, i128)>;

/// The bytes of its root that a value looks at.
pub(super) fn extent(plan: &Plan, value: ValueId) -> Extent {
    let meta = plan.meta(value);
    let dims = meta.shape.iter().copied().zip(meta.strides.iter().copied());
    let width = meta.kind.dtype.bytes().unwrap_or(1);
    reach(width, plan.values[value as usize].offset, dims)
}

/// Whether two extents of one root have bytes in common.
pub(super) fn meet(a: Extent, b: Extent) -> bool {
    matches!((a, b), (Some(a), Some(b)) if a.0 < b.1 && b.0 < a.1)
}

fn root(plan: &Plan, value: ValueId) -> ValueId {
    plan.values[value as usize].root
}

#[cfg(test)]
mod tests {
    use crate::event::{ArgEvent, OpEvent};
    use crate::sample::{Tensor, collective, in_place, op, record, recorder, tensor, wait};

    const SUM: &str = "_c10d_functional::all_reduce";
    const SUM_IN_PLACE: &str = "_c10d_functional::all_reduce_";

    fn sum<'a>(input: &'a Tensor, out: &'a Tensor) -> OpEvent<'a> {
        let name = if input.storage == out.storage {
            SUM_IN_PLACE
        } else {
            SUM
        };
        let mut event = collective(name, input, vec![ArgEvent::Str("sum")], out);
        event.args[0].written = input.storage == out.storage;
        event
    }

    /// What a step of these ops is refused for.
    fn race(args: &[&Tensor], ops: &[OpEvent<'_>]) -> Option<String> {
        let mut recorder = recorder(args);
        record(&mut recorder, ops);
        recorder.race(false).map(|refusal| refusal.to_string())
    }

    #[test]
    fn memory_of_collectives_is_used_after_their_waits_only() {
        let (x, other) = (tensor(1, &[4]), tensor(2, &[4]));
        let [s, t, made] = [3, 4, 5].map(|storage| tensor(storage, &[4]));
        let half = s.view(&[2], &[1], 2);
        let small = tensor(6, &[2]);
        let args = [&x, &other];
        let reads = op("aten::neg", &[&s], &[&made]);
        let reads_half = op("aten::neg", &[&half], &[&small]);
        let writes = in_place("aten::add_", &s, &[&other]);
        let writes_sent = in_place("aten::add_", &x, &[&other]);
        let sums_again = sum(&s, &t);
        let reads_sent = op("aten::neg", &[&x], &[&made]);
        let elsewhere = op("aten::neg", &[&other], &[&made]);
        let early = "uses the result of a collective before the step has waited for it";
        let sent = "writes what a collective still sends";
        for (op, expected) in [
            (&reads, Some(early)),
            (&reads_half, Some(early)),
            (&writes, Some(early)),
            (&sums_again, Some(early)),
            (&writes_sent, Some(sent)),
            (&reads_sent, None),
            (&elsewhere, None),
        ] {
            let mut before = vec![sum(&x, &s), op.clone(), wait(&s)];
            let mut after = vec![sum(&x, &s), wait(&s), op.clone()];
            if op.name == SUM {
                before.push(wait(&t));
                after.push(wait(&t));
            }
            let found = race(&args, &before);
            match expected {
                Some(expected) => assert!(
                    found.is_some_and(|found| found.contains(expected)),
                    "{}",
                    op.name
                ),
                None => assert_eq!(found, None, "{}", op.name),
            }
            assert_eq!(race(&args, &after), None, "{} after the wait", op.name);
        }
    }

    #[test]
    fn what_a_collective_reduces_in_place_is_under_way_too() {
        let (x, made) = (tensor(1, &[4]), tensor(2, &[4]));
        let reads = || op("aten::neg", &[&x], &[&made]);
        let found = race(&[&x], &[sum(&x, &x), reads(), wait(&x)]);
        assert!(
            found.is_some_and(|found| found.contains("aten::neg at train.py:1 uses the result"))
        );
        assert_eq!(race(&[&x], &[sum(&x, &x), wait(&x), reads()]), None);
    }

    #[test]
    fn a_step_waits_for_every_collective() {
        let (x, s, t) = (tensor(1, &[4]), tensor(2, &[4]), tensor(3, &[4]));
        let found = race(&[&x], &[sum(&x, &s), sum(&x, &t), wait(&t)]);
        assert!(
            found.is_some_and(|found| found.contains("does not wait for 1 of the collectives"))
        );
        assert_eq!(
            race(&[&x], &[sum(&x, &s), sum(&x, &t), wait(&t), wait(&s)]),
            None
        );
    }
}

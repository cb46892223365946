//! Memory that the framework's own code keeps between steps and fills anew in every one: buckets in which a
//! data-parallel wrapper reduces gradients.
//!
//! No tensor of the step leads to such memory before the step, so that a plan cannot bind it. A plan makes it anew: that
//! is the same, if the step writes every byte of it before it reads any. Nobody else gets to see it but as the gradients
//! that the step leaves. `generations` uses what is here for memory that is taken and given back within a step.

use hashbrown::HashMap;
use rote_plans::{DType, Kind, Marks};

use super::checks::reads_meta_only;
use super::{Recorder, tensors};
use crate::event::{ArgEvent, Argument, OpEvent, TensorEvent};
use crate::refusal::Refusal;

/// Ops that write their written arguments and do not read these.
const FILLS: &[(&str, &str)] = &[
    ("aten::copy_", ""),
    ("aten::zero_", ""),
    ("aten::fill_", "Scalar"),
];

/// The type of the numbers by which the framework notes which parameters are used.
const USAGE: DType = DType::I32;

/// What was written to a bucket so far: bytes from, to.
#[derive(Debug, Default)]
pub(super) struct Bucket {
    filled: Vec<(i128, i128)>,
    /// The number that fills all that was written.
    number: Option<i64>,
    /// Whether it holds numbers by which the framework notes which parameters are used.
    is_usage_map: bool,
    /// Whether a collective of the framework's own has reduced all of it.
    reduced: bool,
}

impl Bucket {
    fn fill(&mut self, (from, to): (i128, i128)) {
        let at = self.filled.partition_point(|other| other.1 < from);
        let mut whole = (from, to);
        while self.filled.get(at).is_some_and(|other| other.0 <= whole.1) {
            let other = self.filled.remove(at);
            whole = (whole.0.min(other.0), whole.1.max(other.1));
        }
        self.filled.insert(at, whole);
    }

    /// Whether everything that was written lies within an extent.
    fn lies_in(&self, (from, to): (i128, i128)) -> bool {
        (self.filled.iter()).all(|other| from <= other.0 && other.1 <= to)
    }

    fn is_filled(&self, (from, to): (i128, i128)) -> bool {
        from == to || (self.filled.iter()).any(|other| other.0 <= from && to <= other.1)
    }
}

/// Buckets by their storages.
pub(super) type Buckets = HashMap<u64, Bucket>;

impl Recorder {
    /// Makes the buckets that an op of the framework's own writes first, and notes what ops write to buckets.
    pub(super) fn follow_buckets(&mut self, op: &OpEvent<'_>) -> Result<(), Refusal> {
        let only_fills = op.overload == "out" || FILLS.contains(&(op.name, op.overload));
        if op.internal && only_fills {
            for tensor in written(op) {
                if self.is_unknown(tensor) {
                    self.make_bucket(tensor, op)?;
                }
            }
        }
        if self.buckets.is_empty() || is_view(op) || reads_meta_only(op.name) {
            return Ok(());
        }
        for arg in &op.args {
            for tensor in tensors(&arg.value) {
                let Some(bucket) = self.buckets.get(&tensor.storage) else {
                    continue;
                };
                let reads = !arg.written || !only_fills;
                if !reads || (tensor.reach()).is_none_or(|reach| bucket.is_filled(reach)) {
                    continue;
                }
                if self.is_of_generation(tensor) {
                    return Self::refuse(
                        op,
                        "reads memory that FSDP or another library has taken in this step and not filled by ops that \
                         the recording has seen",
                        "keep the step eager, and report the op",
                    );
                } else {
                    return Self::refuse(
                        op,
                        "reads a bucket of gradients of which this step has not written all: what an earlier step has \
                         left there would be frozen",
                        "give every parameter a gradient in every step; in PyTorch, where the same parameters go \
                         without one in every step, DistributedDataParallel(static_graph=True)",
                    );
                }
            }
        }
        for tensor in written(op) {
            if let (Some(bucket), Some(reach)) =
                (self.buckets.get_mut(&tensor.storage), dense(tensor))
            {
                let number = number(op);
                if bucket.number != number {
                    bucket.number = number.filter(|_| bucket.lies_in(reach));
                }
                bucket.fill(reach);
                bucket.reduced |= op.internal
                    && op.name == "c10d::allreduce_"
                    && reach == (0, i128::from(tensor.storage_bytes));
            }
        }
        Ok(())
    }

    /// Whether an op only reads numbers by which the framework's own code notes which parameters are used. Either
    /// the step has filled them with one number, or no step writes them: in a static graph its first step has.
    pub(super) fn reads_usage_map(&self, op: &OpEvent<'_>) -> bool {
        let reads = match op.name {
            "aten::select" => false,
            "aten::_local_scalar_dense" => true,
            _ => return false,
        };
        let mut args = op.args.iter().flat_map(|arg| tensors(&arg.value));
        op.internal
            && args.all(|tensor| match self.buckets.get(&tensor.storage) {
                _ if tensor.dtype != USAGE => false,
                Some(bucket) if reads => {
                    let filled = |reach| bucket.is_filled(reach);
                    bucket.number.is_some() && tensor.reach().is_none_or(filled)
                }
                Some(_) => true,
                None => self.is_unknown(tensor),
            })
    }

    fn is_unknown(&self, tensor: &TensorEvent<'_>) -> bool {
        !tensor.opaque
            && tensor.dtype.bytes().is_some()
            && !self.knows(tensor.storage)
            && !self.reach.contains_key(&tensor.storage)
    }

    /// Records that the plan allocates the memory of a bucket.
    pub(super) fn make_bucket(
        &mut self,
        tensor: &TensorEvent<'_>,
        op: &OpEvent<'_>,
    ) -> Result<(), Refusal> {
        let width = tensor.dtype.bytes().unwrap_or(1);
        let sizes = [(tensor.storage_bytes / width) as i64];
        let Kind { dtype, device, .. } = tensor.kind();
        let flat = TensorEvent {
            sizes: &sizes,
            strides: &[1],
            offset: 0,
            marks: Marks::NONE,
            ..*tensor
        };
        let argument = |value| Argument {
            value,
            written: false,
        };
        self.local(&OpEvent {
            name: "aten::empty",
            overload: "memory_format",
            args: vec![
                argument(ArgEvent::Ints(&sizes)),
                argument(ArgEvent::DType(dtype)),
                argument(ArgEvent::None),
                argument(ArgEvent::Device(device)),
                argument(ArgEvent::None),
                argument(ArgEvent::None),
            ],
            outs: vec![ArgEvent::Tensor(flat)],
            seeded: false,
            data_dependent: false,
            inplace_view: false,
            hidden: false,
            internal: true,
            grad: op.grad,
            source: op.source,
        })?;
        let bucket = Bucket {
            is_usage_map: dtype == USAGE,
            ..Bucket::default()
        };
        self.buckets.insert(tensor.storage, bucket);
        Ok(())
    }

    /// Ends what the framework's own code has begun: waits for its collectives. Refuses memory that seemed to be a
    /// bucket and was none.
    pub fn settle(&mut self) -> Result<(), Refusal> {
        self.end_internal(|_| true, "")?;
        self.end_generations()?;
        self.end_met()?;
        if self
            .buckets
            .values()
            .all(|bucket| bucket.reduced || bucket.is_usage_map)
        {
            return Ok(());
        }
        Err(Refusal::step(
            "writes a tensor that is no argument of the step and not in the state, and no bucket of gradients that are \
             reduced in this step",
            "name the tensor in the state (state= in Python), or report this as a bug",
        ))
    }

    /// The refusal of a step that leaves something to later steps in the framework's notes of used parameters, if it
    /// does so at every call: a replay leaves nothing there.
    pub fn leaves_usage(&self) -> Option<Refusal> {
        let left =
            |bucket: &Bucket| bucket.is_usage_map && !bucket.reduced && bucket.number != Some(0);
        self.buckets.values().any(left).then(|| {
            Refusal::step(
                "leaves to the next call which parameters it has used, in memory of the wrapper's own",
                "handle all parts of a batch in one call of the captured function, or wrap the model without \
                 find_unused_parameters=True",
            )
        })
    }
}

/// The number with which an op fills what it writes, if it is a whole one.
fn number(op: &OpEvent<'_>) -> Option<i64> {
    match (op.name, op.args.get(1).map(|arg| &arg.value)) {
        ("aten::fill_", Some(ArgEvent::Int(number))) => Some(*number),
        _ => None,
    }
}

fn written<'e, 'a>(op: &'e OpEvent<'a>) -> impl Iterator<Item = &'e TensorEvent<'a>> {
    (op.args.iter().filter(|arg| arg.written)).flat_map(|arg| tensors(&arg.value))
}

/// Whether an op only looks at its arguments in other ways.
fn is_view(op: &OpEvent<'_>) -> bool {
    let given = || op.args.iter().flat_map(|arg| tensors(&arg.value));
    let mut outs = op.outs.iter().flat_map(tensors).peekable();
    written(op).next().is_none()
        && outs.peek().is_some()
        && outs.all(|out| given().any(|arg| arg.storage == out.storage))
}

/// The bytes of its storage that a tensor reaches, if it reaches each byte between the first and the last.
fn dense(tensor: &TensorEvent<'_>) -> Option<(i128, i128)> {
    let (from, to) = tensor.reach()?;
    let width = i128::from(tensor.dtype.bytes()?);
    let mut strides: Vec<(i64, i64)> = (tensor.strides.iter().copied())
        .zip(tensor.sizes.iter().copied())
        .filter(|(_, size)| *size != 1)
        .collect();
    strides.sort_unstable();
    let mut expected = 1;
    for (stride, size) in strides {
        if stride != expected {
            return None;
        }
        expected *= size;
    }
    (i128::from(expected) * width == to - from).then_some((from, to))
}

#[cfg(test)]
mod tests {
    use rote_plans::{DType, Instr, Plan};

    use crate::event::{ArgEvent, OpEvent};
    use crate::sample::{Tensor, finish, op, read, record, recorder, refusal, tensor, written};

    /// A gradient of 4 elements is copied to the part of a bucket of 8 that begins at `offset`.
    fn packed<'a>(gradient: &'a Tensor, part: &'a Tensor) -> OpEvent<'a> {
        let mut event = internal(op("aten::mul", &[gradient], &[part]));
        event.overload = "out";
        event.args.push(written(part.arg()));
        event
    }

    fn internal(mut event: OpEvent<'_>) -> OpEvent<'_> {
        event.internal = true;
        event
    }

    fn reduced(bucket: &Tensor) -> OpEvent<'_> {
        let mut event = internal(op("c10d::allreduce_", &[], &[]));
        event.args = vec![
            written(ArgEvent::Tensors(vec![bucket.event()])),
            read(ArgEvent::Str("tp")),
            read(ArgEvent::Str("sum")),
            read(ArgEvent::None),
            read(ArgEvent::Bool(true)),
            read(ArgEvent::Int(-1)),
        ];
        event.outs.push(ArgEvent::Int(7));
        event
    }

    fn parts(bucket: &Tensor) -> [Tensor; 2] {
        [0, 4].map(|offset| bucket.view(&[4], &[1], offset))
    }

    /// What the instructions of a plan are, views left out.
    fn names(plan: &Plan) -> Vec<&str> {
        let name = |instr: &'_ Instr| match instr {
            Instr::Local { op, .. } => Some(plan.str(*op)),
            Instr::Collective(_) => Some("all_reduce"),
            Instr::Wait { .. } => Some("wait"),
            _ => None,
        };
        plan.instrs.iter().filter_map(name).collect()
    }

    #[test]
    fn a_bucket_is_memory_of_the_plan_and_waited_for_where_it_is_used() {
        let (x, bucket) = (tensor(1, &[4]), tensor(2, &[8]));
        let ([first, second], out, other) = (parts(&bucket), tensor(3, &[4]), tensor(4, &[4]));
        let mut recorder = recorder(&[&x]);
        record(
            &mut recorder,
            &[
                packed(&x, &first),
                packed(&x, &second),
                reduced(&bucket),
                op("aten::neg", &[&x], &[&other]),
                op("aten::neg", &[&second], &[&out]),
            ],
        );
        recorder.settle().expect("a bucket");
        assert_eq!(recorder.race(true), None);
        let (plan, _) = finish(recorder, &[&out]);
        let expected = ["aten::empty", "aten::mul", "aten::mul", "all_reduce"];
        assert_eq!(names(&plan)[..4], expected);
        assert_eq!(names(&plan)[4..], ["aten::neg", "wait", "aten::neg"]);
        assert_eq!(plan.bindings.len(), 1, "the gradient alone");
    }

    #[test]
    fn what_nobody_uses_is_waited_for_at_the_end() {
        let (x, bucket) = (tensor(1, &[8]), tensor(2, &[8]));
        let mut recorder = recorder(&[&x]);
        record(&mut recorder, &[packed(&x, &bucket), reduced(&bucket)]);
        assert_eq!(recorder.unwaited(), 1);
        recorder.settle().expect("a bucket");
        assert_eq!(recorder.unwaited(), 0);
        assert_eq!(names(&finish(recorder, &[&bucket]).0).last(), Some(&"wait"));
    }

    #[test]
    fn what_an_earlier_step_has_left_is_not_read() {
        let (x, bucket) = (tensor(1, &[4]), tensor(2, &[8]));
        let [first, second] = parts(&bucket);
        let mut recorder = recorder(&[&x]);
        record(&mut recorder, &[packed(&x, &first)]);
        let early = "of which this step has not written all";
        for event in [
            reduced(&bucket),
            internal(op("aten::neg", &[&second], &[&x])),
        ] {
            assert!(refusal(&mut recorder, &event).to_string().contains(early));
        }
        record(&mut recorder, &[packed(&x, &second), reduced(&bucket)]);
        recorder.settle().expect("a bucket");
    }

    #[test]
    fn other_memory_is_no_bucket() {
        let (x, unknown) = (tensor(1, &[4]), tensor(2, &[4]));
        let mut recorder = recorder(&[&x]);
        let mut of_the_step = packed(&x, &unknown);
        of_the_step.internal = false;
        let why = refusal(&mut recorder, &of_the_step).to_string();
        assert!(why.contains("no recorded op made it"), "{why}");
        record(&mut recorder, &[packed(&x, &unknown)]);
        let why = recorder.settle().expect_err("never reduced").to_string();
        assert!(why.contains("no bucket of gradients"), "{why}");
    }

    #[test]
    fn used_parameters_are_known_if_the_step_has_noted_them() {
        let mut map = tensor(2, &[2]);
        map.dtype = DType::I32;
        let [first, second] = [0, 1].map(|offset| map.view(&[], &[], offset));
        let noted = |part, number| {
            let mut event = internal(op("aten::fill_", &[], &[part]));
            event.overload = "Scalar";
            event.args = vec![written(part.arg()), read(ArgEvent::Int(number))];
            event
        };
        let asked = |part| {
            let mut event = internal(op("aten::_local_scalar_dense", &[part], &[]));
            event.outs.push(ArgEvent::Int(1));
            event
        };
        let mut recorder = recorder(&[]);
        record(&mut recorder, &[asked(&first)]); // as the first step of a static graph has left it
        record(&mut recorder, &[noted(&first, 1), asked(&first)]);
        let why = refusal(&mut recorder, &asked(&second)).to_string();
        assert!(why.contains("has not written all"), "{why}");
        record(&mut recorder, &[noted(&second, 1), asked(&second)]);
        assert!(recorder.leaves_usage().is_some());
        record(&mut recorder, &[noted(&second, 0)]);
        refusal(&mut recorder, &asked(&first)); // of different numbers, none is known
        record(&mut recorder, &[noted(&map, 0)]);
        assert!(recorder.leaves_usage().is_none());
        recorder.settle().expect("no bucket");
    }
}

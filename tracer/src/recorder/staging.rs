//! Memory that the framework's own code keeps between steps and fills anew in every one: buckets in which a
//! data-parallel wrapper reduces gradients.
//!
//! No tensor of the step leads to such memory before the step, so that a plan cannot bind it. A plan makes it anew: that
//! is the same, if the step writes every byte of it before it reads any. Nobody else gets to see it but as the gradients
//! that the step leaves.

use hashbrown::HashMap;
use rote_plans::{DType, Kind, Marks};

use super::{Recorder, tensors};
use crate::event::{ArgEvent, Argument, OpEvent, TensorEvent};
use crate::refusal::Refusal;

/// Ops that write their written arguments and do not read these.
const FILLS: &[(&str, &str)] = &[
    ("aten::copy_", ""),
    ("aten::zero_", ""),
    ("aten::fill_", "Scalar"),
];

/// The type of the numbers by which the framework keeps book.
const BOOK: DType = DType::I32;

/// What was written to a bucket so far: bytes from, to.
#[derive(Debug, Default)]
pub(super) struct Staged {
    filled: Vec<(i128, i128)>,
    /// The number that fills all that was written.
    number: Option<i64>,
    /// Whether it holds numbers by which the framework keeps book.
    is_book: bool,
    /// Whether a collective of the framework's own has reduced all of it.
    reduced: bool,
}

impl Staged {
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
pub(super) type Staging = HashMap<u64, Staged>;

impl Recorder {
    /// Makes the buckets that an op of the framework's own writes first, and notes what ops write to buckets.
    pub(super) fn stage(&mut self, op: &OpEvent<'_>) -> Result<(), Refusal> {
        let only_fills = op.overload == "out" || FILLS.contains(&(op.name, op.overload));
        if op.internal && only_fills {
            for tensor in written(op) {
                if self.is_unknown(tensor) {
                    self.make_bucket(tensor, op)?;
                }
            }
        }
        if self.staging.is_empty() {
            return Ok(());
        }
        for arg in &op.args {
            for tensor in tensors(&arg.value) {
                let Some(staged) = self.staging.get(&tensor.storage) else {
                    continue;
                };
                let reads = !arg.written || !only_fills;
                if reads && tensor.reach().is_some_and(|reach| !staged.is_filled(reach)) {
                    return Self::refuse(
                        op,
                        "reads a bucket of gradients of which this step has not written all: what an earlier step has \
                         left there would be frozen",
                        "give every parameter a gradient in every step",
                    );
                }
            }
        }
        for tensor in written(op) {
            if let (Some(staged), Some(reach)) =
                (self.staging.get_mut(&tensor.storage), dense(tensor))
            {
                let number = number(op);
                if staged.number != number {
                    staged.number = number.filter(|_| staged.lies_in(reach));
                }
                staged.fill(reach);
                staged.reduced |= op.internal
                    && op.name == "c10d::allreduce_"
                    && reach == (0, i128::from(tensor.storage_bytes));
            }
        }
        Ok(())
    }

    /// Whether an op only reads numbers by which the framework's own code keeps book: which parameters are used. Either
    /// the step has filled them with one number, or no step writes them: in a static graph its first step has.
    pub(super) fn reads_book(&self, op: &OpEvent<'_>) -> bool {
        let reads = match op.name {
            "aten::select" => false,
            "aten::_local_scalar_dense" => true,
            _ => return false,
        };
        let mut args = op.args.iter().flat_map(|arg| tensors(&arg.value));
        op.internal
            && args.all(|tensor| match self.staging.get(&tensor.storage) {
                _ if tensor.dtype != BOOK => false,
                Some(staged) if reads => {
                    let filled = |reach| staged.is_filled(reach);
                    staged.number.is_some() && tensor.reach().is_none_or(filled)
                }
                Some(_) => true,
                None => self.is_unknown(tensor),
            })
    }

    fn is_unknown(&self, tensor: &TensorEvent<'_>) -> bool {
        !tensor.opaque
            && tensor.dtype.bytes().is_some()
            && !self.roots.contains_key(&tensor.storage)
            && !self.candidates.contains_key(&tensor.storage)
            && !self.reach.contains_key(&tensor.storage)
    }

    /// Records that the plan allocates the memory of a bucket.
    fn make_bucket(&mut self, tensor: &TensorEvent<'_>, op: &OpEvent<'_>) -> Result<(), Refusal> {
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
        let staged = Staged {
            is_book: dtype == BOOK,
            ..Staged::default()
        };
        self.staging.insert(tensor.storage, staged);
        Ok(())
    }

    /// Ends what the framework's own code has begun: waits for its collectives. Refuses memory that seemed to be a
    /// bucket and was none.
    pub fn settle(&mut self) -> Result<(), Refusal> {
        self.end_internal(|_| true, "")?;
        if self
            .staging
            .values()
            .all(|staged| staged.reduced || staged.is_book)
        {
            return Ok(());
        }
        Err(Refusal::step(
            "writes a tensor that is no argument of the step and not in the state, and no bucket of gradients that are \
             reduced in this step",
            "name the tensor in the state (state= in Python), or report this as a bug",
        ))
    }

    /// The refusal of a step that leaves something to later steps in numbers by which the framework keeps book, if it
    /// does so at every call: a replay leaves nothing there.
    pub fn leaves_in_book(&self) -> Option<Refusal> {
        let left = |staged: &Staged| staged.is_book && !staged.reduced && staged.number != Some(0);
        self.staging.values().any(left).then(|| {
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

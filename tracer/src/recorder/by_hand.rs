//! Collectives that a step calls by hand, on a process group of its own choice.
//!
//! Such a call writes into tensors that the step gives, and returns a handle to wait with. An instruction makes its
//! output, or works in place. So what has another output than its input gets an output of its own, and a copy behind
//! the wait. Ops that no instruction is for are recorded as they are: see `exchanges`.

use hashbrown::{HashMap, HashSet};
use rote_plans::{Collective, CollectiveKind, Instr, InstrId, ReduceOp, ValueId};

use super::exchanges::{self, Exchange};
use super::waits::{Extent, extent, meet};
use super::{Recorder, tensors};
use crate::event::{ArgEvent, Argument, OpEvent, TensorEvent};
use crate::refusal::Refusal;
use crate::tables::parse_reduce;

/// How the names of such ops begin.
pub(super) const BY_HAND: &str = "c10d::";

/// Storages of outputs that are no tensor of the step's: no storage has these numbers.
const OWN_STORAGES: u64 = u64::MAX - (1 << 32);

/// The handles that a step got, and what their waits wait for.
#[derive(Debug, Default)]
pub(super) struct Handles {
    /// By the numbers of the handles; `None` for one that was waited for.
    started: HashMap<i64, Option<Started>>,
    /// The values that are written behind a wait, by the output that is waited for.
    targets: HashMap<ValueId, ValueId>,
    /// The instructions that start them.
    starts: HashSet<InstrId>,
    /// Handles of the framework's own code, which waits before it uses results.
    internal: Vec<i64>,
    /// How many outputs are no tensor of the step's.
    own: u64,
}

impl Handles {
    /// How many collectives the step has not waited for.
    pub(super) fn unwaited(&self) -> usize {
        self.started.values().flatten().count()
    }

    /// The values that a collective uses until it was waited for; none after that.
    fn used_by(&self, handle: i64) -> Vec<ValueId> {
        match self.started.get(&handle) {
            Some(Some(Started::Collective { output, .. })) => [Some(*output), self.target(*output)]
                .into_iter()
                .flatten()
                .collect(),
            Some(Some(Started::Op(exchange))) => exchange.values().copied().collect(),
            _ => Vec::new(),
        }
    }

    /// The values that collectives use which the step has not waited for.
    pub(super) fn used(&self) -> impl Iterator<Item = ValueId> {
        self.started.keys().flat_map(|handle| self.used_by(*handle))
    }

    /// Whether an instruction starts a collective that the step calls by hand.
    pub(super) fn started_at(&self, instr: InstrId) -> bool {
        self.starts.contains(&instr)
    }

    /// The value that a collective writes in the end, though its instruction has an output of its own.
    pub(super) fn target(&self, output: ValueId) -> Option<ValueId> {
        self.targets.get(&output).copied()
    }
}

/// What is under way.
#[derive(Clone, Debug)]
pub(super) enum Started {
    /// A collective that has an instruction of its own.
    Collective {
        output: ValueId,
        /// The given tensor, and the storage of what is copied there.
        into: Option<(Given, u64)>,
    },
    /// An op that the plan holds as it is.
    Op(Exchange),
}

/// A tensor as it was given.
#[derive(Clone, Debug)]
pub(super) struct Given {
    sizes: Vec<i64>,
    strides: Vec<i64>,
    tensor: TensorEvent<'static>,
}

impl Given {
    fn of(tensor: &TensorEvent<'_>) -> Self {
        Given {
            sizes: tensor.sizes.to_vec(),
            strides: tensor.strides.to_vec(),
            tensor: TensorEvent {
                sizes: &[],
                strides: &[],
                ..*tensor
            },
        }
    }

    fn event(&self) -> TensorEvent<'_> {
        TensorEvent {
            sizes: &self.sizes,
            strides: &self.strides,
            ..self.tensor
        }
    }
}

/// A collective that an op of a process group is, as far as its arguments tell.
struct Call<'e, 'a> {
    kind: CollectiveKind,
    reduce: Option<ReduceOp>,
    group: &'a str,
    root: u32,
    input: &'e TensorEvent<'a>,
    output: &'e TensorEvent<'a>,
    input_splits: &'a [i64],
    output_splits: &'a [i64],
}

/// Where the arguments of an op lie that instructions know.
struct Layout {
    name: &'static str,
    kind: CollectiveKind,
    output: usize,
    input: usize,
    group: usize,
    reduce: Option<usize>,
    /// The source of a broadcast, a rank of the group.
    root: Option<usize>,
    /// Rows received from each rank, and rows sent.
    splits: Option<(usize, usize)>,
    /// Arguments that must have these values: others are not known to do the same in a replay.
    zero: Option<usize>,
    absent: Option<usize>,
    timeout: usize,
}

const fn layout(name: &'static str, kind: CollectiveKind, timeout: usize) -> Layout {
    Layout {
        name,
        kind,
        output: 0,
        input: 1,
        group: 2,
        reduce: None,
        root: None,
        splits: None,
        zero: None,
        absent: None,
        timeout,
    }
}

const LAYOUTS: &[Layout] = &[
    Layout {
        input: 0,
        group: 1,
        reduce: Some(2),
        absent: Some(3),
        ..layout("c10d::allreduce_", CollectiveKind::AllReduce, 5)
    },
    Layout {
        input: 0,
        group: 1,
        root: Some(2),
        zero: Some(3),
        ..layout("c10d::broadcast_", CollectiveKind::Broadcast, 5)
    },
    layout("c10d::_allgather_base_", CollectiveKind::AllGather, 4),
    Layout {
        reduce: Some(3),
        ..layout(
            "c10d::_reduce_scatter_base_",
            CollectiveKind::ReduceScatter,
            5,
        )
    },
    Layout {
        splits: Some((3, 4)),
        ..layout("c10d::alltoall_base_", CollectiveKind::AllToAll, 6)
    },
];

/// What of an op's arguments a plan does not hold.
pub(super) const OTHERWISE: &str = "is a call of a process group in a form that plans cannot hold";

impl<'e, 'a> Call<'e, 'a> {
    fn of(op: &'e OpEvent<'a>) -> Result<Self, Refusal> {
        let refused = |why: String, remedy: &str| {
            Err(Refusal::op(op.name, op.source, why, remedy.to_owned()))
        };
        let Some(layout) = LAYOUTS.iter().find(|layout| layout.name == op.name) else {
            return refused(
                "is a call of a process group that plans cannot hold".to_owned(),
                if op.name == "c10d::recv_any_source_" {
                    "name the rank that sends (src=)"
                } else {
                    "call the process group outside the captured function"
                },
            );
        };
        let arg = |at: usize| op.args.get(at).map(|arg| &arg.value);
        let one = |at: usize| match arg(at) {
            Some(ArgEvent::Tensor(tensor)) => Some(tensor),
            Some(ArgEvent::Tensors(list)) if list.len() == 1 => list.first(),
            _ => None,
        };
        let (Some(output), Some(input)) = (one(layout.output), one(layout.input)) else {
            return refused(
                format!("{OTHERWISE}: with other tensors than one of each kind"),
                "call the process group once for each tensor",
            );
        };
        let group = match arg(layout.group) {
            Some(ArgEvent::Str(name)) => *name,
            Some(ArgEvent::Other(what)) => {
                return refused(
                    format!("{OTHERWISE}: with a {what}"),
                    "make the group by torch.distributed.new_group",
                );
            }
            _ => {
                return refused(
                    format!("{OTHERWISE}: without a process group"),
                    "report this as a bug, with the op",
                );
            }
        };
        let reduce = match layout.reduce.map(arg) {
            None => None,
            Some(Some(ArgEvent::Str(name))) if parse_reduce(name).is_some() => parse_reduce(name),
            Some(_) => {
                return refused(
                    format!(
                        "{OTHERWISE}: with another reduction than SUM, AVG, MAX, MIN and PRODUCT"
                    ),
                    "use one of these",
                );
            }
        };
        let number = |at: usize| match arg(at) {
            Some(ArgEvent::Int(number)) => Some(*number),
            _ => None,
        };
        if layout.zero.is_some_and(|at| number(at) != Some(0)) {
            return refused(
                format!("{OTHERWISE}: with a root among several tensors"),
                "call the process group once for each tensor",
            );
        }
        if (layout.absent).is_some_and(|at| !matches!(arg(at), None | Some(ArgEvent::None))) {
            return refused(
                format!("{OTHERWISE}: with sparse tensors"),
                "convert the tensor to a strided tensor",
            );
        }
        if number(layout.timeout).is_some_and(|timeout| timeout >= 0) {
            return refused(
                format!("{OTHERWISE}: with a timeout of its own"),
                "give the timeout to the process group when it is made",
            );
        }
        let ints = |at: usize| match arg(at) {
            Some(ArgEvent::Ints(list)) => *list,
            _ => &[],
        };
        Ok(Call {
            kind: layout.kind,
            reduce,
            group,
            root: match layout.root.map(number) {
                Some(root) => match root.and_then(|root| u32::try_from(root).ok()) {
                    Some(root) => root,
                    None => {
                        return refused(format!("{OTHERWISE}: without a root"), "name the root");
                    }
                },
                None => 0,
            },
            input,
            output,
            input_splits: layout.splits.map_or(&[], |(_, sent)| ints(sent)),
            output_splits: layout.splits.map_or(&[], |(received, _)| ints(received)),
        })
    }
}

impl Recorder {
    /// Records the start of a collective that the step has called by hand.
    pub(super) fn by_hand(&mut self, op: &OpEvent<'_>) -> Result<(), Refusal> {
        let started = match exchanges::layout(op.name) {
            Some(layout) => Started::Op(self.exchange(op, layout)?),
            None => self.start(op)?,
        };
        let handle = op.outs.iter().find_map(|out| match out {
            ArgEvent::Int(number) => Some(*number),
            _ => None,
        });
        let Some(handle) = handle else {
            return Self::refuse(
                op,
                "returns no handle to wait with: Rote cannot tell when its result is there",
                "report this as a bug, with the op",
            );
        };
        // The number 0 is of no handle: what has run already, or runs in the stream of its device.
        if handle == 0 {
            return self.end(started, op.source);
        }
        self.handles.started.insert(handle, Some(started));
        if op.internal {
            self.handles.internal.push(handle);
        }
        Ok(())
    }

    /// Starts a collective that has an instruction of its own.
    fn start(&mut self, op: &OpEvent<'_>) -> Result<Started, Refusal> {
        let call = Call::of(op)?;
        self.check_tensors(op)?;
        if !call.kind.is_in_place() {
            return self.start_beside(op, &call);
        }
        let value = self.known_value(op, 0, call.input)?;
        self.push_collective(&call, value, value, op.source);
        Ok(Started::Collective {
            output: value,
            into: None,
        })
    }

    /// Starts a collective with an output of its own, which the wait copies to the given tensor.
    fn start_beside(&mut self, op: &OpEvent<'_>, call: &Call<'_, '_>) -> Result<Started, Refusal> {
        let (input, output) = (call.input, call.output);
        if !is_contiguous(input) || !is_contiguous(output) || input.kind() != output.kind() {
            return Self::refuse(
                op,
                "sends from a tensor, or writes into one, that is not contiguous, or the two are of different dtypes",
                "make contiguous copies of the tensors (contiguous() in PyTorch)",
            );
        }
        if input.storage == output.storage && call.kind != CollectiveKind::AllGather {
            return Self::refuse(
                op,
                "sends from the memory into which it writes",
                "give the collective an output of its own",
            );
        }
        let along_rows = !input.sizes.is_empty()
            && !output.sizes.is_empty()
            && input.sizes[1..] == output.sizes[1..];
        let flat_input = [input.numel()];
        let flat_output = [output.numel()];
        let rows = along_rows || call.kind == CollectiveKind::AllToAll;
        let sent = if rows {
            *input
        } else {
            flat(input, &flat_input)
        };
        let received = if rows {
            *output
        } else {
            flat(output, &flat_output)
        };
        let value = self.known_value(op, 0, &sent)?;
        let target = self.known_value(op, 0, output)?;
        let storage = self.own_storage();
        let width = output.dtype.bytes().unwrap_or(1);
        let own = TensorEvent {
            storage,
            offset: 0,
            storage_bytes: output.numel().unsigned_abs().saturating_mul(width),
            ..received
        };
        let result = self.fresh(&own, self.next_instr(), false);
        self.push_collective(call, value, result, op.source);
        self.handles.targets.insert(result, target);
        Ok(Started::Collective {
            output: result,
            into: Some((Given::of(output), storage)),
        })
    }

    /// The number of a storage that is no tensor's of the step.
    pub(super) fn own_storage(&mut self) -> u64 {
        self.handles.own += 1;
        OWN_STORAGES + self.handles.own
    }

    /// Notes that the next instruction starts what the step has called by hand.
    pub(super) fn mark_start(&mut self) {
        self.handles.starts.insert(self.next_instr());
    }

    fn push_collective(
        &mut self,
        call: &Call<'_, '_>,
        input: ValueId,
        output: ValueId,
        source: &str,
    ) {
        let collective = Collective {
            kind: call.kind,
            reduce: call.reduce,
            group: self.tables.group(call.group),
            root: call.root,
            input,
            output,
            input_splits: self.tables.dims(call.input_splits),
            output_splits: self.tables.dims(call.output_splits),
        };
        self.mark_start();
        self.push_instr(Instr::Collective(collective), source);
    }

    /// Records that the step has waited with a handle, by its number; 0 for one that it got from no recorded op.
    pub fn waited(&mut self, handle: i64, source: &str) -> Result<(), Refusal> {
        let first = self.len();
        match self.handles.started.get_mut(&handle).map(Option::take) {
            Some(Some(started)) => self.end(started, source)?,
            Some(None) => {} // again
            None => {
                return Err(Refusal::op(
                    "Work.wait",
                    source,
                    "waits for a collective that no recorded op started",
                    "start and wait for a collective in the same captured function, or both outside",
                ));
            }
        }
        self.look_at_last(first);
        Ok(())
    }

    /// Records that the framework's own code has waited for the collectives whose memory an op uses.
    pub(super) fn end_used(&mut self, op: &OpEvent<'_>) -> Result<(), Refusal> {
        if self.handles.internal.is_empty() {
            return Ok(());
        }
        let args = op.args.iter().flat_map(|arg| tensors(&arg.value));
        let used: Vec<(ValueId, Extent)> = args
            .filter_map(|tensor| {
                let (root, geometry) = self.geometry(tensor)?;
                Some((root.value, geometry.extent()))
            })
            .collect();
        let plan = &self.tables.plan;
        let touches = |value: ValueId| {
            let (root, extent) = (plan.values[value as usize].root, extent(plan, value));
            (used.iter()).any(|(used, reach)| *used == root && meet(*reach, extent))
        };
        let handles: Vec<i64> = (self.handles.internal.iter().copied())
            .filter(|handle| self.handles.used_by(*handle).into_iter().any(touches))
            .collect();
        self.end_internal(|handle| handles.contains(&handle), op.source)
    }

    /// Records that the framework's own code has waited with some of its handles.
    pub(super) fn end_internal(
        &mut self,
        waits: impl Fn(i64) -> bool,
        source: &str,
    ) -> Result<(), Refusal> {
        let mut left = std::mem::take(&mut self.handles.internal);
        let mut ended = Ok(());
        left.retain(|&handle| {
            if ended.is_err() || !waits(handle) {
                return true;
            }
            ended = self.waited(handle, source);
            false
        });
        self.handles.internal = left;
        ended
    }

    /// Waits for a collective, and brings its output to the tensor that was given.
    fn end(&mut self, started: Started, source: &str) -> Result<(), Refusal> {
        let (output, into) = match started {
            Started::Collective { output, into } => (output, into),
            Started::Op(exchange) => {
                self.wait_for(&exchange, source);
                return Ok(());
            }
        };
        self.push_instr(Instr::Wait { value: output }, source);
        let Some((given, storage)) = into else {
            return Ok(());
        };
        if self.take_over(&given.event(), storage) {
            return Ok(());
        }
        let own = TensorEvent {
            storage,
            offset: 0,
            ..given.event()
        };
        let argument = |value, written| Argument { value, written };
        self.local(&OpEvent {
            name: "aten::copy_",
            overload: "",
            args: vec![
                argument(ArgEvent::Tensor(given.event()), true),
                argument(ArgEvent::Tensor(own), false),
                argument(ArgEvent::Bool(false), false),
            ],
            outs: vec![ArgEvent::Tensor(given.event())],
            seeded: false,
            data_dependent: false,
            inplace_view: false,
            hidden: false,
            internal: false,
            grad: false,
            source,
        })
    }
}

impl Recorder {
    /// Lets the output of a collective be the memory of the given tensor from now on, in place of a copy. So it can be
    /// where the step has made that memory and the collective fills all of it.
    fn take_over(&mut self, given: &TensorEvent<'_>, output: u64) -> bool {
        let known = [given.storage, output].map(|storage| self.roots.get(&storage).copied());
        let [Some(old), Some(new)] = known else {
            return false;
        };
        let width = given.dtype.bytes().unwrap_or(0);
        let filled = given.numel().unsigned_abs().checked_mul(width);
        let whole = given.offset == 0 && filled == Some(old.storage_bytes);
        let of_step = old.binding.is_none()
            && !self.buckets.contains_key(&given.storage)
            && !self.is_result(old.value);
        if whole && of_step {
            self.roots.insert(given.storage, new);
        }
        whole && of_step
    }
}

/// The same elements in one dim.
fn flat<'a>(tensor: &TensorEvent<'a>, sizes: &'a [i64]) -> TensorEvent<'a> {
    TensorEvent {
        sizes,
        strides: &[1],
        ..*tensor
    }
}

fn is_contiguous(tensor: &TensorEvent<'_>) -> bool {
    let mut expected = 1_i64;
    let dims = tensor.sizes.iter().zip(tensor.strides).rev();
    let plain = tensor.marks == rote_plans::Marks::NONE;
    let mut fits = |(size, stride): (&i64, &i64)| {
        let fits = *size == 1 || *stride == expected;
        expected = expected.saturating_mul(*size);
        fits
    };
    plain && (tensor.numel() == 0 || dims.into_iter().all(&mut fits))
}

/// Whether an op is one of these.
pub(super) fn is_by_hand(op: &OpEvent<'_>) -> bool {
    op.name.starts_with(BY_HAND)
}

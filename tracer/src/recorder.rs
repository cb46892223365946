//! The recorder: a stream of ops in, a plan out.
//!
//! Identity is the storage. A tensor that shares the storage of a known one is
//! a view of it, whatever made it, so view ops leave no instruction behind:
//! a view is bound from its root by shape, strides and offset where it is
//! first needed. A storage that nobody named and no recorded op made is
//! refused: replaying would read it stale.

use hashbrown::HashMap;
use rote_plans::{
    Arg, Binding, BindingKind, Collective, CollectiveKind, Def, Device, Fingerprint, GradResult,
    Guard, GuardKind, Instr, InstrId, NONE, Output, Plan, Range, Redistribution, RngAction,
    Strategy, Value, ValueId,
};

use crate::event::{ArgEvent, Argument, OpEvent, SpecEvent, TensorEvent};
use crate::finish;
use crate::refusal::Refusal;
use crate::tables::{Tables, parse_reduce};

/// A tensor that the plan may bind, should an op read or write it.
#[derive(Clone, Debug)]
struct Candidate {
    kind: BindingKind,
    path: String,
    spec: Option<SpecEvent>,
    dtype: rote_plans::DType,
    device: Device,
    sizes: Vec<i64>,
    strides: Vec<i64>,
    start_bytes: i64,
    lazy_bits: u8,
}

/// A storage that the plan knows.
#[derive(Clone, Copy, Debug)]
struct Root {
    value: ValueId,
    /// Where the root's data starts in the storage, in bytes.
    start_bytes: i64,
    storage_bytes: u64,
    lazy_bits: u8,
    /// Allocated by an `empty`, and nothing has been written to it yet.
    uninitialized: bool,
    binding: Option<u32>,
}

/// A way of looking at a root.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Geometry {
    root: ValueId,
    dtype: u8,
    lazy_bits: u8,
    offset: i64,
    sizes: Vec<i64>,
    strides: Vec<i64>,
}

/// Records one run of a step.
#[derive(Debug, Default)]
pub struct Recorder {
    tables: Tables,
    candidates: HashMap<u64, Candidate>,
    roots: HashMap<u64, Root>,
    storage_of: Vec<u64>,
    geometries: HashMap<Geometry, ValueId>,
    /// Collectives that were started and not yet waited for, by output.
    pending: HashMap<ValueId, ()>,
    sources: Vec<u32>,
    open_global: Vec<(u32, u32)>,
    open_redistribution: Vec<u32>,
    rng_slots: u32,
}

/// Ops that allocate without writing.
const ALLOCATORS: &[&str] = &[
    "aten::empty",
    "aten::empty_strided",
    "aten::empty_like",
    "aten::new_empty",
    "aten::new_empty_strided",
    "aten::empty_permuted",
    "aten::empty_quantized",
];

/// Ops that look only at the meta of their tensor argument.
fn reads_meta_only(name: &str) -> bool {
    name.ends_with("_like")
        || name.starts_with("aten::new_")
        || name == "aten::bernoulli"
        || name == "aten::expand"
}

impl Recorder {
    /// A recorder for one run of `function` in the process `fingerprint`.
    pub fn new(fingerprint: Fingerprint, function: &str) -> Self {
        let mut recorder = Recorder::default();
        recorder.tables.plan.fingerprint = fingerprint;
        recorder.tables.plan.function = function.to_owned();
        recorder
    }

    /// Names a tensor that exists before the step. The first name of a storage
    /// is the one that counts.
    pub fn name_tensor(
        &mut self,
        kind: BindingKind,
        path: &str,
        tensor: &TensorEvent<'_>,
        spec: Option<&SpecEvent>,
    ) {
        let Some(bytes) = tensor.dtype.bytes() else {
            return;
        };
        if tensor.opaque || tensor.storage == 0 || self.roots.contains_key(&tensor.storage) {
            return;
        }
        self.candidates
            .entry(tensor.storage)
            .or_insert_with(|| Candidate {
                kind,
                path: path.to_owned(),
                spec: spec.cloned(),
                dtype: tensor.dtype,
                device: tensor.device,
                sizes: tensor.sizes.to_vec(),
                strides: tensor.strides.to_vec(),
                start_bytes: tensor.offset * bytes as i64,
                lazy_bits: tensor.lazy_bits,
            });
    }

    /// How many instructions there are so far.
    pub fn len(&self) -> usize {
        self.tables.plan.instrs.len()
    }

    /// Whether nothing was recorded yet.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Records an op that has just run.
    pub fn op(&mut self, op: &OpEvent<'_>) -> Result<(), Refusal> {
        let namespace = op.name.split("::").next().unwrap_or_default();
        if namespace == "profiler" || op.name == "aten::detach_" || touches_meta(op) {
            return Ok(());
        }
        self.check(op)?;
        self.check_tensors(op)?;
        let fresh = self.has_fresh_output(op);
        let writes = op
            .args
            .iter()
            .any(|arg| arg.written && has_tensor(&arg.value));
        if op.name == "_c10d_functional::wait_tensor" {
            return self.wait(op);
        }
        if !writes
            && !fresh
            && has_tensors(&op.outs)
            && (namespace == "aten" || namespace == "prims" || is_wrapper(op))
        {
            return self.views(op);
        }
        if !writes && !has_tensors(&op.outs) && !op.name.contains("assert") {
            return Ok(()); // asks for meta only: sizes, strides, ...
        }
        if let Some(kind) = collective_kind(op) {
            return self.collective(op, kind);
        }
        self.local(op)
    }

    fn refuse<T>(
        op: &OpEvent<'_>,
        reason: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Result<T, Refusal> {
        Err(Refusal::op(op.name, op.source, reason, remedy))
    }

    /// Refuses ops that a plan can never hold.
    fn check(&self, op: &OpEvent<'_>) -> Result<(), Refusal> {
        if op.name == "aten::_local_scalar_dense"
            || op.name == "aten::equal"
            || op.name == "aten::is_nonzero"
        {
            return Self::refuse(
                op,
                "reads a tensor on the host (.item(), float(), bool(), print()): what Python does with the value \
                 leaves no trace in a plan",
                "return the tensor and read it outside the captured function, or keep the decision on the device \
                 (torch.where); for optimizers, fused=True or capturable=True keep their step counters in tensors",
            );
        }
        let indexes_by_integers = op.name == "aten::index"
            && !op.args.iter().skip(1).any(|arg| match &arg.value {
                ArgEvent::Tensors(list) => list
                    .iter()
                    .any(|t| t.storage != 0 && matches!(t.dtype.0, 0 | 11)),
                _ => false,
            });
        if op.data_dependent && !indexes_by_integers {
            return Self::refuse(
                op,
                "makes a result whose shape or value on the host depends on tensor data",
                "use a form with a fixed shape (masks with torch.where, topk, masked_fill), or leave this part \
                 outside the captured function",
            );
        }
        if op.inplace_view {
            return Self::refuse(
                op,
                "changes the shape or strides of an existing tensor in place",
                "use the out-of-place form of the op (without the trailing underscore)",
            );
        }
        if matches!(op.name, "aten::resize_" | "aten::resize_as_" | "aten::set_") {
            return Self::refuse(
                op,
                "changes the storage of an existing tensor",
                "allocate tensors with their final size",
            );
        }
        if op.name.starts_with("c10d::") {
            return Self::refuse(
                op,
                "calls a process group directly",
                "use torch.distributed._functional_collectives, or DTensor, inside the captured function",
            );
        }
        for (i, arg) in op.args.iter().enumerate() {
            if let Some(kind) = other(&arg.value) {
                return Self::refuse(
                    op,
                    format!("argument {i} is a {kind}, which a plan cannot hold"),
                    "leave this call outside the captured function",
                );
            }
        }
        Ok(())
    }

    /// Refuses tensors that the plan could only read stale.
    fn check_tensors(&mut self, op: &OpEvent<'_>) -> Result<(), Refusal> {
        for (i, arg) in op.args.iter().enumerate() {
            for tensor in tensors(&arg.value) {
                if tensor.opaque || tensor.dtype.bytes().is_none() {
                    return Self::refuse(
                        op,
                        format!(
                            "argument {i} ({}) is not a plain strided tensor",
                            tensor.describe()
                        ),
                        "convert it to a strided tensor of a supported dtype",
                    );
                }
                if !self.roots.contains_key(&tensor.storage) && !self.bind(tensor.storage) {
                    if matches!(
                        op.name,
                        "aten::lift_fresh" | "aten::lift" | "aten::lift_fresh_copy"
                    ) {
                        return Self::refuse(
                            op,
                            format!(
                                "makes a tensor ({}) from host data inside the step (torch.tensor, torch.from_numpy): \
                                 a replay would reuse the old data",
                                tensor.describe()
                            ),
                            "pass the data as an argument, register it as a buffer, or make it with torch.full or \
                             torch.arange",
                        );
                    }
                    return Self::refuse(
                        op,
                        format!(
                            "argument {i} ({}) is a tensor that no name in state= reaches and no recorded op made",
                            tensor.describe()
                        ),
                        "name it in state=, pass it as an argument, or make it inside the step with torch ops",
                    );
                }
                let root = self.roots[&tensor.storage];
                if root.storage_bytes != tensor.storage_bytes && root.binding.is_none() {
                    return Self::refuse(
                        op,
                        format!(
                            "the storage of argument {i} changed its size from {} to {} bytes",
                            root.storage_bytes, tensor.storage_bytes
                        ),
                        "allocate tensors with their final size",
                    );
                }
                if arg.written {
                    if let Some(root) = self.roots.get_mut(&tensor.storage) {
                        root.uninitialized = false;
                    }
                    if let Some(binding) = root.binding {
                        self.tables.plan.bindings[binding as usize].written = true;
                    }
                } else if root.uninitialized
                    && tensor.numel() > 0
                    && !reads_meta_only(op.name)
                    && !self.only_views(op)
                {
                    return Self::refuse(
                        op,
                        format!(
                            "argument {i} ({}) comes from an empty() that no recorded op wrote to: it was written \
                             outside the dispatcher (a raw kernel launch, numpy, ctypes)",
                            tensor.describe()
                        ),
                        "wrap the kernel as a custom op (torch.library.custom_op), or leave it outside the captured \
                         function",
                    );
                }
            }
        }
        Ok(())
    }

    /// Makes a candidate a binding. False when the storage has no name.
    fn bind(&mut self, storage: u64) -> bool {
        let Some(candidate) = self.candidates.remove(&storage) else {
            return false;
        };
        let index = self.tables.plan.bindings.len() as u32;
        let value = self.push_value(
            candidate.dtype,
            candidate.device,
            Def::Binding(index),
            None,
            &candidate.sizes,
            &candidate.strides,
            0,
            0,
            storage,
        );
        let path = self.tables.str(&candidate.path);
        let spec = self.tables.optional_spec(candidate.spec.as_ref());
        self.tables.plan.bindings.push(Binding {
            kind: candidate.kind,
            path,
            value,
            spec,
            written: false,
        });
        self.geometries.insert(
            Geometry {
                root: value,
                dtype: candidate.dtype.0,
                lazy_bits: candidate.lazy_bits,
                offset: 0,
                sizes: candidate.sizes,
                strides: candidate.strides,
            },
            value,
        );
        self.roots.insert(
            storage,
            Root {
                value,
                start_bytes: candidate.start_bytes,
                storage_bytes: 0,
                lazy_bits: candidate.lazy_bits,
                uninitialized: false,
                binding: Some(index),
            },
        );
        true
    }

    #[allow(clippy::too_many_arguments)]
    fn push_value(
        &mut self,
        dtype: rote_plans::DType,
        device: Device,
        def: Def,
        root: Option<ValueId>,
        sizes: &[i64],
        strides: &[i64],
        offset: i64,
        storage_bytes: u64,
        storage: u64,
    ) -> ValueId {
        let id = self.tables.plan.values.len() as ValueId;
        let shape = self.tables.dims(sizes);
        let strides = self.tables.dims(strides);
        self.tables.plan.values.push(Value {
            dtype,
            device,
            def,
            root: root.unwrap_or(id),
            shape,
            strides,
            offset,
            storage_bytes,
            last_use: NONE,
        });
        self.storage_of.push(storage);
        id
    }

    fn push_instr(&mut self, instr: Instr, source: &str) -> InstrId {
        let id = self.tables.plan.instrs.len() as InstrId;
        self.tables.plan.instrs.push(instr);
        let source = self.tables.str(source);
        self.sources.push(source);
        id
    }

    fn next_instr(&self) -> InstrId {
        self.tables.plan.instrs.len() as InstrId
    }

    /// Where `tensor` looks at its root.
    fn geometry(&self, tensor: &TensorEvent<'_>) -> Option<(Root, Geometry)> {
        let root = *self.roots.get(&tensor.storage)?;
        let bytes = tensor.dtype.bytes()? as i64;
        let start = tensor.offset * bytes - root.start_bytes;
        (start % bytes == 0).then(|| {
            (
                root,
                Geometry {
                    root: root.value,
                    dtype: tensor.dtype.0,
                    lazy_bits: tensor.lazy_bits,
                    offset: start / bytes,
                    sizes: tensor.sizes.to_vec(),
                    strides: tensor.strides.to_vec(),
                },
            )
        })
    }

    /// The value of a known tensor, made by a view instruction if need be.
    fn value(&mut self, tensor: &TensorEvent<'_>, source: &str) -> Option<ValueId> {
        let (root, geometry) = self.geometry(tensor)?;
        if let Some(&value) = self.geometries.get(&geometry) {
            return Some(value);
        }
        if root.lazy_bits != tensor.lazy_bits {
            return None; // only the op itself can make it
        }
        let def = Def::Instr(self.next_instr());
        let out = self.push_value(
            tensor.dtype,
            tensor.device,
            def,
            Some(root.value),
            tensor.sizes,
            tensor.strides,
            geometry.offset,
            0,
            tensor.storage,
        );
        self.push_instr(
            Instr::View {
                base: root.value,
                out,
            },
            source,
        );
        self.geometries.insert(geometry, out);
        Some(out)
    }

    fn known_value(
        &mut self,
        op: &OpEvent<'_>,
        i: usize,
        tensor: &TensorEvent<'_>,
    ) -> Result<ValueId, Refusal> {
        match self.value(tensor, op.source) {
            Some(value) => Ok(value),
            None => Self::refuse(
                op,
                format!(
                    "argument {i} ({}) is a lazily conjugated or negated view, or starts inside an element",
                    tensor.describe()
                ),
                "call resolve_conj(), resolve_neg() or contiguous() on it",
            ),
        }
    }

    /// An op that only made views of known tensors.
    fn views(&mut self, op: &OpEvent<'_>) -> Result<(), Refusal> {
        let mut lazy = false;
        for tensor in op.outs.iter().flat_map(tensors) {
            lazy |= self.value(tensor, op.source).is_none();
        }
        if lazy { self.local(op) } else { Ok(()) }
    }

    fn only_views(&self, op: &OpEvent<'_>) -> bool {
        has_tensors(&op.outs)
            && !self.has_fresh_output(op)
            && !op.args.iter().any(|arg| arg.written)
    }

    fn has_fresh_output(&self, op: &OpEvent<'_>) -> bool {
        op.outs.iter().flat_map(tensors).any(|t| {
            !self.roots.contains_key(&t.storage) && !self.candidates.contains_key(&t.storage)
        })
    }

    /// The value of a new storage.
    fn fresh(&mut self, tensor: &TensorEvent<'_>, instr: InstrId, uninitialized: bool) -> ValueId {
        let value = self.push_value(
            tensor.dtype,
            tensor.device,
            Def::Instr(instr),
            None,
            tensor.sizes,
            tensor.strides,
            0,
            tensor.storage_bytes,
            tensor.storage,
        );
        let start_bytes = tensor.offset * tensor.dtype.bytes().unwrap_or(1) as i64;
        self.roots.insert(
            tensor.storage,
            Root {
                value,
                start_bytes,
                storage_bytes: tensor.storage_bytes,
                lazy_bits: tensor.lazy_bits,
                uninitialized,
                binding: None,
            },
        );
        self.geometries.insert(
            Geometry {
                root: value,
                dtype: tensor.dtype.0,
                lazy_bits: tensor.lazy_bits,
                offset: 0,
                sizes: tensor.sizes.to_vec(),
                strides: tensor.strides.to_vec(),
            },
            value,
        );
        value
    }

    fn local(&mut self, op: &OpEvent<'_>) -> Result<(), Refusal> {
        let mut args = Vec::with_capacity(op.args.len());
        for (i, arg) in op.args.iter().enumerate() {
            args.push(self.arg(op, i, &arg.value)?);
        }
        let args = self.push_args(&args);
        let instr = self.next_instr();
        let uninitialized = ALLOCATORS.contains(&op.name);
        let mut outs = Vec::new();
        let mut later = Vec::new();
        for out in &op.outs {
            match out {
                ArgEvent::Tensor(tensor) => {
                    outs.push(self.out(op, tensor, instr, uninitialized, &mut later)?)
                }
                ArgEvent::Tensors(list) if op.outs.len() == 1 => {
                    for tensor in list {
                        outs.push(self.out(op, tensor, instr, uninitialized, &mut later)?);
                    }
                }
                ArgEvent::Tensors(_) => {
                    return Self::refuse(
                        op,
                        "returns a list among other results",
                        "leave it outside the captured function",
                    );
                }
                _ => outs.push(NONE),
            }
        }
        let outs = self.tables.ids(&outs);
        let name = self.tables.str(op.name);
        let overload = self.tables.str(op.overload);
        self.push_instr(
            Instr::Local {
                op: name,
                overload,
                args,
                outs,
            },
            op.source,
        );
        for tensor in later {
            self.value(&tensor, op.source);
        }
        Ok(())
    }

    /// The id under which a result is kept. Results on known storages are
    /// views, bound after the op, unless only the op can make them.
    fn out<'a>(
        &mut self,
        op: &OpEvent<'_>,
        tensor: &TensorEvent<'a>,
        instr: InstrId,
        uninitialized: bool,
        later: &mut Vec<TensorEvent<'a>>,
    ) -> Result<ValueId, Refusal> {
        if tensor.storage == 0 && !tensor.opaque {
            return Ok(NONE);
        }
        if tensor.opaque || tensor.dtype.bytes().is_none() {
            return Self::refuse(
                op,
                format!(
                    "makes a tensor ({}) that is not plain and strided",
                    tensor.describe()
                ),
                "convert it to a strided tensor of a supported dtype inside the op",
            );
        }
        match self.geometry(tensor) {
            None if self.roots.contains_key(&tensor.storage) => Self::refuse(
                op,
                "makes a view that starts inside an element",
                "copy the tensor before viewing it as another dtype",
            ),
            None => Ok(self.fresh(tensor, instr, uninitialized)),
            Some((root, geometry)) => {
                if self.geometries.contains_key(&geometry) {
                    return Ok(NONE);
                }
                if root.lazy_bits == tensor.lazy_bits {
                    later.push(*tensor);
                    return Ok(NONE);
                }
                let value = self.push_value(
                    tensor.dtype,
                    tensor.device,
                    Def::Instr(instr),
                    Some(root.value),
                    tensor.sizes,
                    tensor.strides,
                    geometry.offset,
                    0,
                    tensor.storage,
                );
                self.geometries.insert(geometry, value);
                Ok(value)
            }
        }
    }

    /// Nested arguments go into the pool before the argument that holds them.
    fn arg(&mut self, op: &OpEvent<'_>, i: usize, arg: &ArgEvent<'_>) -> Result<Arg, Refusal> {
        Ok(match arg {
            ArgEvent::None => Arg::None,
            ArgEvent::Tensor(tensor) if tensor.storage == 0 => Arg::None,
            ArgEvent::Tensor(tensor) => Arg::Value(self.known_value(op, i, tensor)?),
            ArgEvent::Tensors(list) => {
                let mut ids = Vec::with_capacity(list.len());
                for tensor in list {
                    ids.push(if tensor.storage == 0 {
                        NONE
                    } else {
                        self.known_value(op, i, tensor)?
                    });
                }
                Arg::Values(self.tables.ids(&ids))
            }
            ArgEvent::Bool(value) => Arg::Bool(*value),
            ArgEvent::Int(value) => Arg::Int(*value),
            ArgEvent::Float(value) => Arg::Float(*value),
            ArgEvent::Complex(re, im) => Arg::Complex(*re, *im),
            ArgEvent::Wrapped(inner) => {
                let inner = self.arg(op, i, inner)?;
                let range = self.push_args(&[inner]);
                Arg::Wrapped(range.start)
            }
            ArgEvent::Ints(list) => Arg::Ints(self.tables.dims(list)),
            ArgEvent::List(list) => {
                let mut items = Vec::with_capacity(list.len());
                for item in list {
                    items.push(self.arg(op, i, item)?);
                }
                Arg::List(self.push_args(&items))
            }
            ArgEvent::Str(text) => Arg::Str(self.tables.str(text)),
            ArgEvent::DType(dtype) => Arg::DType(*dtype),
            ArgEvent::Device(device) => Arg::Device(*device),
            ArgEvent::Layout(layout) => Arg::Layout(*layout),
            ArgEvent::MemoryFormat(format) => Arg::MemoryFormat(*format),
            ArgEvent::Other(kind) => {
                return Self::refuse(
                    op,
                    format!("argument {i} holds a {kind}, which a plan cannot hold"),
                    "leave this call outside the captured function",
                );
            }
        })
    }

    fn push_args(&mut self, args: &[Arg]) -> Range {
        let start = self.tables.plan.args.len() as u32;
        self.tables.plan.args.extend_from_slice(args);
        Range {
            start,
            len: args.len() as u32,
        }
    }

    fn collective(&mut self, op: &OpEvent<'_>, kind: CollectiveKind) -> Result<(), Refusal> {
        let ArgEvent::Tensor(input) = &op.args[0].value else {
            return self.local(op);
        };
        let [ArgEvent::Tensor(output)] = op.outs.as_slice() else {
            return self.local(op);
        };
        let text = |i: usize| match op.args.get(i).map(|arg| &arg.value) {
            Some(ArgEvent::Str(text)) => Some(*text),
            _ => None,
        };
        let ints = |i: usize| match op.args.get(i).map(|arg| &arg.value) {
            Some(ArgEvent::Ints(list)) => list.to_vec(),
            _ => Vec::new(),
        };
        let Some(group) = text(op.args.len() - 1) else {
            return self.local(op);
        };
        let reduce = match kind {
            CollectiveKind::AllReduce | CollectiveKind::ReduceScatter => {
                match text(1).and_then(parse_reduce) {
                    Some(reduce) => Some(reduce),
                    None => return self.local(op),
                }
            }
            _ => None,
        };
        let root = match (kind, op.args.get(1).map(|arg| &arg.value)) {
            (CollectiveKind::Broadcast, Some(ArgEvent::Int(root))) => *root as u32,
            _ => 0,
        };
        let (output_splits, input_splits) = match kind {
            CollectiveKind::AllToAll => (ints(1), ints(2)),
            _ => (Vec::new(), Vec::new()),
        };
        let input = self.known_value(op, 0, input)?;
        let instr = self.next_instr();
        let output = match self.geometry(output) {
            None => self.fresh(output, instr, false),
            Some(_) => self.known_value(op, 0, output)?,
        };
        let collective = Collective {
            kind,
            reduce,
            group: self.tables.group(group),
            root,
            input,
            output,
            input_splits: self.tables.dims(&input_splits),
            output_splits: self.tables.dims(&output_splits),
        };
        self.push_instr(Instr::Collective(collective), op.source);
        self.pending.insert(output, ());
        Ok(())
    }

    fn wait(&mut self, op: &OpEvent<'_>) -> Result<(), Refusal> {
        let Some(ArgEvent::Tensor(tensor)) = op.args.first().map(|arg| &arg.value) else {
            return Ok(());
        };
        let root = self.roots[&tensor.storage].value;
        let waited = [Some(root), self.value(tensor, op.source)]
            .into_iter()
            .flatten()
            .find(|v| self.pending.remove(v).is_some());
        match waited {
            Some(value) => {
                self.push_instr(Instr::Wait { value }, op.source);
                Ok(())
            }
            // A second wait, or a collective that runs through its functional op.
            None if self.made_by_functional_op(root) => self.local(op),
            None => Ok(()),
        }
    }

    fn made_by_functional_op(&self, root: ValueId) -> bool {
        match self.tables.plan.values[root as usize].def {
            Def::Instr(instr) => match self.tables.plan.instrs.get(instr as usize) {
                Some(Instr::Local { op, .. }) => {
                    self.tables.plan.str(*op).starts_with("_c10d_functional")
                }
                _ => false,
            },
            Def::Binding(_) | Def::Constant(_) => false,
        }
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
        let slot = slot.unwrap_or_else(|| {
            self.rng_slots += 1;
            self.rng_slots - 1
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

    /// A global op begins: what follows until [`Recorder::global_end`] is what
    /// it became.
    pub fn global_begin(&mut self, op: &str, inputs: &[Option<SpecEvent>], source: &str) {
        let inputs: Vec<u32> = inputs
            .iter()
            .map(|spec| self.tables.optional_spec(spec.as_ref()))
            .collect();
        let strategy = Strategy {
            op: self.tables.str(op),
            source: self.tables.str(source),
            inputs: self.tables.ids(&inputs),
            outputs: Range::default(),
            instrs: Range {
                start: self.next_instr(),
                len: 0,
            },
            redistributions: Range {
                start: self.tables.plan.redistributions.len() as u32,
                len: 0,
            },
        };
        let index = self.tables.plan.strategies.len() as u32;
        self.tables.plan.strategies.push(strategy);
        self.open_global.push((index, self.next_instr()));
    }

    /// The innermost global op has run.
    pub fn global_end(&mut self, outputs: &[Option<SpecEvent>]) {
        let Some((index, start)) = self.open_global.pop() else {
            return;
        };
        let outputs: Vec<u32> = outputs
            .iter()
            .map(|spec| self.tables.optional_spec(spec.as_ref()))
            .collect();
        let outputs = self.tables.ids(&outputs);
        let end = self.next_instr();
        let redistributions = self.tables.plan.redistributions.len() as u32;
        let strategy = &mut self.tables.plan.strategies[index as usize];
        strategy.outputs = outputs;
        strategy.instrs = Range {
            start,
            len: end - start,
        };
        strategy.redistributions.len = redistributions - strategy.redistributions.start;
    }

    /// A redistribution begins.
    pub fn redistribute_begin(&mut self, from: &SpecEvent, to: &SpecEvent, source: &str) {
        let entry = Redistribution {
            from: self.tables.spec(from),
            to: self.tables.spec(to),
            source: self.tables.str(source),
            bytes: 0,
            instrs: Range {
                start: self.next_instr(),
                len: 0,
            },
        };
        self.open_redistribution
            .push(self.tables.plan.redistributions.len() as u32);
        self.tables.plan.redistributions.push(entry);
    }

    /// The innermost redistribution has run.
    pub fn redistribute_end(&mut self) {
        let Some(index) = self.open_redistribution.pop() else {
            return;
        };
        let end = self.next_instr();
        let start = self.tables.plan.redistributions[index as usize]
            .instrs
            .start;
        let bytes = (start..end)
            .map(|i| finish::collective_bytes(&self.tables.plan, i))
            .sum();
        let entry = &mut self.tables.plan.redistributions[index as usize];
        entry.instrs.len = end - start;
        entry.bytes = bytes;
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

    /// Names a tensor of the result. `Err` when the plan does not make it.
    pub fn output(
        &mut self,
        path: &str,
        tensor: &TensorEvent<'_>,
        spec: Option<&SpecEvent>,
        requires_grad: bool,
    ) -> Result<(), Refusal> {
        let value = self.result(path, tensor)?;
        let path = self.tables.str(path);
        let spec = self.tables.optional_spec(spec);
        self.tables.plan.outputs.push(Output {
            path,
            value,
            spec,
            requires_grad,
        });
        Ok(())
    }

    /// Says what the step left in the `.grad` of a tensor: a new gradient, or
    /// `None` in place of one.
    pub fn grad(
        &mut self,
        path: &str,
        gradient: Option<(&TensorEvent<'_>, Option<&SpecEvent>)>,
    ) -> Result<(), Refusal> {
        let (value, spec) = match gradient {
            None => (NONE, NONE),
            Some((tensor, spec)) => (self.result(path, tensor)?, self.tables.optional_spec(spec)),
        };
        let path = self.tables.str(path);
        self.tables
            .plan
            .grads
            .push(GradResult { path, value, spec });
        Ok(())
    }

    fn result(&mut self, path: &str, tensor: &TensorEvent<'_>) -> Result<ValueId, Refusal> {
        if tensor.opaque {
            return Err(Refusal::step(
                format!("leaves {path}, which is not a plain strided tensor"),
                "return strided tensors",
            ));
        }
        if !self.roots.contains_key(&tensor.storage) {
            self.bind(tensor.storage);
        }
        self.value(tensor, "").ok_or_else(|| {
            Refusal::step(
                format!(
                    "leaves a tensor in {path} ({}) that no recorded op made",
                    tensor.describe()
                ),
                "return tensors that the step computes with torch ops",
            )
        })
    }

    /// Storages that the step made, with the op that made each: whichever of
    /// them is alive after the call, and is no result, was kept somewhere.
    pub fn made(&self) -> Vec<(u64, String)> {
        let plan = &self.tables.plan;
        let mut kept: Vec<ValueId> = plan
            .outputs
            .iter()
            .map(|o| plan.values[o.value as usize].root)
            .collect();
        kept.extend(
            plan.grads
                .iter()
                .filter(|g| g.value != NONE)
                .map(|g| plan.values[g.value as usize].root),
        );
        self.roots
            .iter()
            .filter(|(_, root)| root.binding.is_none() && !kept.contains(&root.value))
            .map(|(&storage, root)| (storage, self.describe_maker(root.value)))
            .collect()
    }

    fn describe_maker(&self, value: ValueId) -> String {
        let plan = &self.tables.plan;
        let entry = &plan.values[value as usize];
        let shape = format!("{}{:?}", entry.dtype, plan.dims(entry.shape));
        match entry.def {
            Def::Instr(instr) => {
                let source = plan.str(self.sources[instr as usize]);
                let name = match plan.instrs[instr as usize] {
                    Instr::Local { op, .. } => plan.str(op),
                    _ => "a collective",
                };
                format!("{shape} made by {name} at {source}")
            }
            Def::Binding(_) | Def::Constant(_) => shape,
        }
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
        self.tables.plan.result = result.to_owned();
        self.tables.plan.rng_slots = self.rng_slots;
        let sources: Vec<String> = self
            .sources
            .iter()
            .map(|&id| self.tables.plan.str(id).to_owned())
            .collect();
        finish::finish(self.tables.plan, sources)
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
    let args = op
        .args
        .iter()
        .flat_map(|arg: &Argument<'_>| tensors(&arg.value));
    args.chain(op.outs.iter().flat_map(tensors))
        .any(|t| t.device.kind == 14)
}

fn is_wrapper(op: &OpEvent<'_>) -> bool {
    op.name == "_c10d_functional::_wrap_tensor_autograd"
}

fn other<'a>(arg: &ArgEvent<'a>) -> Option<&'a str> {
    match arg {
        ArgEvent::Other(kind) => Some(kind),
        ArgEvent::Wrapped(inner) => other(inner),
        ArgEvent::List(list) => list.iter().find_map(other),
        _ => None,
    }
}

fn collective_kind(op: &OpEvent<'_>) -> Option<CollectiveKind> {
    Some(match op.name {
        "_c10d_functional::all_reduce" | "_c10d_functional::all_reduce_" => {
            CollectiveKind::AllReduce
        }
        "_c10d_functional::all_gather_into_tensor" => CollectiveKind::AllGather,
        "_c10d_functional::reduce_scatter_tensor" => CollectiveKind::ReduceScatter,
        "_c10d_functional::all_to_all_single" => CollectiveKind::AllToAll,
        "_c10d_functional::broadcast" | "_c10d_functional::broadcast_" => CollectiveKind::Broadcast,
        _ => return None,
    })
}

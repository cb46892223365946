//! Local ops: their arguments and results.

use rote_plans::{Arg, Instr, NONE, Range, ValueId};

use rote_passes::ops::ALLOCATORS;

use super::{Recorder, tensors};
use crate::event::{ArgEvent, OpEvent, TensorEvent};
use crate::refusal::Refusal;

impl Recorder {
    /// The value of argument `i`, a tensor that the plan knows.
    pub(super) fn known_value(
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
                    "argument {i} ({}) starts inside an element, or is no plain view of its base",
                    tensor.describe()
                ),
                "make a contiguous copy of the argument (contiguous() in PyTorch)",
            ),
        }
    }

    /// Records an op as it is.
    pub(super) fn local(&mut self, op: &OpEvent<'_>) -> Result<(), Refusal> {
        let mut args = Vec::with_capacity(op.args.len());
        let mut writes = Vec::new();
        for (i, arg) in op.args.iter().enumerate() {
            args.push(self.arg(op, i, &arg.value)?);
            if arg.written {
                for tensor in tensors(&arg.value) {
                    writes.push(self.known_value(op, i, tensor)?);
                }
            }
        }
        let args = self.push_args(&args);
        let mut outs = Vec::new();
        for out in &op.outs {
            match out {
                ArgEvent::Tensor(tensor) => outs.push(self.out(op, tensor)?),
                ArgEvent::Tensors(list) if op.outs.len() == 1 => {
                    for tensor in list {
                        outs.push(self.out(op, tensor)?);
                    }
                }
                ArgEvent::Tensors(_) => {
                    return Self::refuse(
                        op,
                        "returns a list among other results",
                        "call the op outside the captured function",
                    );
                }
                _ => outs.push(NONE),
            }
        }
        let instr = Instr::Local {
            op: self.tables.str(op.name),
            overload: self.tables.str(op.overload),
            args,
            outs: self.tables.ids(&outs),
            writes: self.tables.ids(&writes),
            seeded: op.seeded,
            grad: op.grad,
        };
        self.push_instr(instr, op.source);
        Ok(())
    }

    /// The id under which the next instruction keeps a result. Results on known
    /// storages are views, bound where they are first needed, unless only the op
    /// can make them.
    fn out(&mut self, op: &OpEvent<'_>, tensor: &TensorEvent<'_>) -> Result<ValueId, Refusal> {
        if tensor.storage == 0 && !tensor.opaque {
            return Ok(NONE);
        }
        if tensor.opaque || tensor.dtype.bytes().is_none() {
            return Self::refuse(
                op,
                format!(
                    "makes a tensor ({}) that is not a plain strided tensor",
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
            None => {
                let uninitialized = ALLOCATORS.contains(&op.name);
                Ok(self.fresh(tensor, self.next_instr(), uninitialized))
            }
            Some((root, geometry))
                if tensor.marks.can_view(root.elements.marks)
                    || self.geometries.contains_key(&geometry) =>
            {
                Ok(NONE)
            }
            Some((_, geometry)) => Ok(self.push_view(tensor, geometry)),
        }
    }

    /// Nested arguments go into the pool before the argument that holds them.
    pub(super) fn arg(
        &mut self,
        op: &OpEvent<'_>,
        i: usize,
        arg: &ArgEvent<'_>,
    ) -> Result<Arg, Refusal> {
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
                    "call the op outside the captured function",
                );
            }
        })
    }

    pub(super) fn push_args(&mut self, args: &[Arg]) -> Range {
        let start = self.tables.plan.args.len() as u32;
        self.tables.plan.args.extend_from_slice(args);
        Range {
            start,
            len: args.len() as u32,
        }
    }
}

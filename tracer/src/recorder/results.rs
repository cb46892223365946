//! What a step leaves: its result, gradients, and the tensors that it made.

use rote_plans::{Def, GradResult, Instr, NONE, Output, ValueId};

use super::Recorder;
use crate::event::{SpecEvent, TensorEvent};
use crate::refusal::Refusal;

impl Recorder {
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
        let gone = self.gone(path);
        self.tables.plan.grads.push(GradResult {
            path,
            value,
            spec,
            gone,
        });
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
        if tensor.numel() > 0
            && self
                .roots
                .get(&tensor.storage)
                .is_some_and(|r| r.uninitialized)
        {
            return Err(Refusal::step(
                format!(
                    "leaves a tensor in {path} ({}) that comes from an allocation (empty) to which no recorded op wrote: \
                     something else wrote it (in Python a raw kernel launch, numpy or ctypes), or nothing did",
                    tensor.describe()
                ),
                "fill the tensor by an op (torch.zeros), or make the kernel that writes it an op \
                 (torch.library.custom_op in PyTorch)",
            ));
        }
        self.value(tensor, "").ok_or_else(|| {
            Refusal::step(
                format!(
                    "leaves a tensor in {path} ({}) that no recorded op made",
                    tensor.describe()
                ),
                "return tensors that the step computes by ops",
            )
        })
    }

    /// Whether a result, or a gradient that the step leaves, lies in a root.
    pub(super) fn is_result(&self, root: ValueId) -> bool {
        self.roots_of_results().any(|kept| kept == root)
    }

    fn roots_of_results(&self) -> impl Iterator<Item = ValueId> {
        let plan = &self.tables.plan;
        let results = plan.outputs.iter().map(|output| output.value);
        let grads = plan.grads.iter().map(|grad| grad.value);
        let values = results.chain(grads.filter(|value| *value != NONE));
        values.map(|value| plan.values[value as usize].root)
    }

    /// Storages that the step made, with the op that made each: whichever of
    /// them is alive after the call, and is no result, was kept somewhere.
    pub fn made(&self) -> Vec<(u64, String)> {
        let kept: Vec<ValueId> = self.roots_of_results().collect();
        self.roots
            .iter()
            .filter(|(storage, root)| {
                root.binding.is_none()
                    && !kept.contains(&root.value)
                    && !self.buckets.contains_key(*storage)
            })
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
                    _ if self.pending.contains(&value) => "a collective that was never waited for",
                    _ => "a collective",
                };
                format!("{shape} made by {name} at {source}")
            }
            Def::Binding(_) | Def::Constant(_) => shape,
        }
    }
}

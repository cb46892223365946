//! Collectives, and the waits for them.

use rote_plans::{Collective, CollectiveKind, Def, Instr, ReduceOp, ValueId};

use super::Recorder;
use crate::event::{ArgEvent, OpEvent, TensorEvent};
use crate::refusal::Refusal;
use crate::tables::parse_reduce;

/// The collective that an op is, as far as its arguments tell.
struct Call<'e, 'a> {
    kind: CollectiveKind,
    input: &'e TensorEvent<'a>,
    output: &'e TensorEvent<'a>,
    reduce: Option<ReduceOp>,
    group: &'a str,
    root: u32,
    input_splits: &'a [i64],
    output_splits: &'a [i64],
}

impl<'e, 'a> Call<'e, 'a> {
    /// `None` for other ops, and for collectives in a form that a plan has no
    /// instruction for: these are local ops to it.
    fn of(op: &'e OpEvent<'a>) -> Option<Self> {
        let kind = match op.name {
            "_c10d_functional::all_reduce" | "_c10d_functional::all_reduce_" => {
                CollectiveKind::AllReduce
            }
            "_c10d_functional::all_gather_into_tensor" => CollectiveKind::AllGather,
            "_c10d_functional::reduce_scatter_tensor" => CollectiveKind::ReduceScatter,
            "_c10d_functional::all_to_all_single" => CollectiveKind::AllToAll,
            "_c10d_functional::broadcast" | "_c10d_functional::broadcast_" => {
                CollectiveKind::Broadcast
            }
            _ => return None,
        };
        let arg = |i: usize| op.args.get(i).map(|arg| &arg.value);
        let text = |i| match arg(i) {
            Some(ArgEvent::Str(text)) => Some(*text),
            _ => None,
        };
        let ints = |i| match arg(i) {
            Some(ArgEvent::Ints(list)) => *list,
            _ => &[],
        };
        let Some(ArgEvent::Tensor(input)) = arg(0) else {
            return None;
        };
        let [ArgEvent::Tensor(output)] = op.outs.as_slice() else {
            return None;
        };
        let (input_splits, output_splits) = match kind {
            CollectiveKind::AllToAll => (ints(2), ints(1)),
            _ => (&[][..], &[][..]),
        };
        Some(Call {
            kind,
            input,
            output,
            reduce: match kind {
                CollectiveKind::AllReduce | CollectiveKind::ReduceScatter => {
                    Some(text(1).and_then(parse_reduce)?)
                }
                _ => None,
            },
            group: text(op.args.len() - 1)?,
            root: match (kind, arg(1)) {
                (CollectiveKind::Broadcast, Some(ArgEvent::Int(root))) => *root as u32,
                _ => 0,
            },
            input_splits,
            output_splits,
        })
    }
}

impl Recorder {
    /// Records a collective. False when the op is none.
    pub(super) fn collective(&mut self, op: &OpEvent<'_>) -> Result<bool, Refusal> {
        let Some(call) = Call::of(op) else {
            return Ok(false);
        };
        let input = self.known_value(op, 0, call.input)?;
        let output = if self.roots.contains_key(&call.output.storage) {
            self.known_value(op, 0, call.output)?
        } else {
            self.fresh(call.output, self.next_instr(), false)
        };
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
        self.push_instr(Instr::Collective(collective), op.source);
        self.pending.insert(output);
        Ok(true)
    }

    /// Records a wait for a collective.
    pub(super) fn wait(&mut self, op: &OpEvent<'_>) -> Result<(), Refusal> {
        let Some(ArgEvent::Tensor(tensor)) = op.args.first().map(|arg| &arg.value) else {
            return Ok(());
        };
        let Some(root) = self.roots.get(&tensor.storage).map(|root| root.value) else {
            return Ok(());
        };
        let waited = [Some(root), self.value(tensor, op.source)]
            .into_iter()
            .flatten()
            .find(|value| self.pending.remove(value));
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
}

//! Answers about data that the host asks for: `bool(mask.all())`, `found_inf.item()`, `torch.equal(a, b)`.
//!
//! A plan cannot hold what the host does with an answer, but a replay does the same for the same answer. So a
//! check stands in the place of the question ([`CHECK_NUMBER`], [`CHECK_EQUAL`]). It ends a replay that finds
//! another answer, and the call is made again: with a plan recorded under that answer, or eagerly. So nothing
//! that lasts may come before a check. One that comes later is moved to the front of the plan, with the ops that
//! its answer needs, if these need nothing that lasts. Otherwise the question is refused.

use hashbrown::HashSet;
use rote_passes::liveness::{for_each_out, for_each_value, for_each_written};
use rote_passes::reorder;
use rote_plans::{
    CHECK_EQUAL, CHECK_NUMBER, DType, Def, Instr, NONE, Plan, ValueId, is_check, keeps_to_arguments,
};

use super::{Recorder, tensors};
use crate::event::{ArgEvent, Argument, OpEvent, TensorEvent};
use crate::refusal::Refusal;

/// The check that a plan holds in the place of a question, if there is one.
fn check_of<'a>(op: &OpEvent<'a>) -> Option<OpEvent<'a>> {
    let [answer] = op.outs.as_slice() else {
        return None;
    };
    let (name, answer) = match (op.name, op.args.as_slice(), answer) {
        ("aten::_local_scalar_dense", [asked], _) => {
            let ArgEvent::Tensor(tensor) = &asked.value else {
                return None;
            };
            (CHECK_NUMBER, ArgEvent::Int(bits(tensor.dtype, answer)?))
        }
        ("aten::equal", [_, _], ArgEvent::Bool(_)) => (CHECK_EQUAL, answer.clone()),
        _ => return None,
    };
    let mut args = op.args.clone();
    args.push(Argument {
        value: answer,
        written: false,
    });
    Some(OpEvent {
        name,
        overload: "",
        args,
        outs: Vec::new(),
        data_dependent: false,
        ..op.clone()
    })
}

/// A number of a dtype as checks hold it.
fn bits(dtype: DType, number: &ArgEvent<'_>) -> Option<i64> {
    match *number {
        ArgEvent::Bool(value) if dtype == DType::BOOL => Some(i64::from(value)),
        ArgEvent::Int(value)
            if matches!(
                dtype,
                DType::U8 | DType::I8 | DType::I16 | DType::I32 | DType::I64
            ) =>
        {
            Some(value)
        }
        ArgEvent::Float(value)
            if matches!(dtype, DType::F16 | DType::BF16 | DType::F32 | DType::F64) =>
        {
            Some(value.to_bits() as i64)
        }
        _ => None,
    }
}

/// Whether an op gives the host nothing but an answer about the data of its arguments.
pub(super) fn asks(op: &OpEvent<'_>) -> bool {
    matches!(
        op.name,
        "aten::_local_scalar_dense" | "aten::equal" | "aten::is_nonzero"
    )
}

impl Recorder {
    /// Lets plans check answers that the host asks for. The framework must have the ops [`CHECK_NUMBER`] and
    /// [`CHECK_EQUAL`]. Without them such questions are refused.
    pub fn let_host_ask(&mut self) {
        self.may_ask = true;
    }

    /// Whether the host has asked for data, and has got an answer that the plan checks.
    pub fn asks(&self) -> bool {
        has_checks(&self.tables.plan)
    }

    /// Puts a check in the place of a question.
    pub(super) fn question_of_data(&mut self, op: &OpEvent<'_>) -> Result<(), Refusal> {
        let check = check_of(op).filter(|_| self.may_ask);
        let Some(check) = check else {
            return self.host_read(op, None);
        };
        self.check_tensors(op)?;
        if self.may_be_on_its_way(op) {
            return self.host_read(op, None);
        }
        self.local(&check)?;
        if let Some(lasting) = self.first_lasting {
            let at = self.len() - 1;
            if ahead(&self.tables.plan, at).is_none() {
                self.tables.plan.instrs.pop();
                self.sources.pop();
                return self.host_read(op, Some(lasting as usize));
            }
            self.ahead.push(at);
        }
        Ok(())
    }

    /// Whether an op reads memory of the host that another device may still write: the step waits for that, and a
    /// replay would not.
    fn may_be_on_its_way(&self, op: &OpEvent<'_>) -> bool {
        let plan = &self.tables.plan;
        let written = |binding: u32| plan.bindings[binding as usize].written;
        let made = |t: &TensorEvent<'_>| match self.roots.get(&t.storage) {
            Some(root) => root.binding.is_none_or(written),
            None => false,
        };
        let mut asked = op.args.iter().flat_map(|arg| tensors(&arg.value));
        asked.any(|t| t.device.is_cpu() && made(t))
            && plan.values.iter().any(|value| !value.device.is_cpu())
    }

    /// Refuses a question of data. `lasting`: the instruction after which a replay cannot begin anew.
    pub(super) fn host_read(
        &self,
        op: &OpEvent<'_>,
        lasting: Option<usize>,
    ) -> Result<(), Refusal> {
        let after = lasting.map_or(String::new(), |at| {
            let plan = &self.tables.plan;
            let source = self.sources.get(at).map_or("", |&line| plan.str(line));
            let place = if source.is_empty() {
                String::new()
            } else {
                format!(" at {source}")
            };
            let did = match &plan.instrs[at] {
                Instr::Local { op, .. } if keeps_to_arguments(plan.str(*op)) => {
                    format!(
                        "{}{place} has written a tensor that outlives the call",
                        plan.str(*op)
                    )
                }
                Instr::Local { op, .. } => format!("{}{place} has run", plan.str(*op)),
                _ => format!("a collective{place} was sent"),
            };
            format!(", after {did}, so that a replay that finds another value could not begin anew")
        });
        Self::refuse(
            op,
            format!(
                "reads a tensor on the host (in Python .item(), float(), bool(), print()): a plan cannot hold the host's \
                 use of the value{after}"
            ),
            "return the tensor and read it outside the captured function, or decide on the device (torch.where in \
             PyTorch); an optimizer of your own can compute with its step counter as a tensor",
        )
    }

    /// Moves checks that must come first to the front, with what they need.
    pub(super) fn put_checks_first(&mut self) {
        let plan = &mut self.tables.plan;
        let mut moved = vec![false; plan.instrs.len()];
        for &check in &self.ahead {
            // What was recorded since lies behind the check, and changes nothing of the answer.
            for at in ahead(plan, check).unwrap_or_default() {
                moved[at] = true;
            }
        }
        let (front, rest): (Vec<usize>, Vec<usize>) = (0..moved.len()).partition(|&at| moved[at]);
        if front.is_empty() {
            return;
        }
        for grad in &mut plan.grads {
            while moved.get(grad.gone as usize) == Some(&true) {
                grad.gone += 1; // its turn is that of the next one that stays
            }
            if grad.gone as usize == moved.len() {
                grad.gone = NONE;
            }
        }
        let order: Vec<usize> = front.into_iter().chain(rest).collect();
        reorder(plan, &order);
        self.sources = order.iter().map(|&at| self.sources[at]).collect();
    }
}

/// The instructions that a check needs, with itself, if these can run before all others: they make results from
/// their arguments and draw no random numbers, nothing before them writes a tensor that outlives the call where
/// they read, and none of the others reads what they write in place.
fn ahead(plan: &Plan, check: usize) -> Option<Vec<usize>> {
    let root = |value: ValueId| plan.values[value as usize].root;
    let is_bound = |root: ValueId| matches!(plan.values[root as usize].def, Def::Binding(_));
    let mut needed = vec![check];
    let (mut values, mut roots) = (HashSet::new(), HashSet::new());
    let mut written = HashSet::new(); // in place, behind the instruction that is looked at
    for_each_value(plan, &plan.instrs[check], |value| {
        values.insert(value);
        roots.insert(root(value));
    });
    for at in (0..check).rev() {
        let instr = &plan.instrs[at];
        let mut is_needed = false;
        for_each_out(plan, instr, |out| is_needed |= values.contains(&out));
        let mut writes = Vec::new();
        for_each_written(plan, instr, |root| writes.push(root));
        is_needed |= writes.iter().any(|root| roots.contains(root));
        match instr {
            Instr::View { out, .. } => is_needed |= values.contains(out),
            Instr::Wait { value } => is_needed |= roots.contains(&root(*value)),
            _ => {}
        }
        if !is_needed {
            let mut disturbs = false;
            for_each_value(plan, instr, |value| {
                disturbs |= written.contains(&root(value));
            });
            if disturbs && !matches!(instr, Instr::View { .. }) {
                return None;
            }
            continue;
        }
        let moves = match instr {
            Instr::Local { op, seeded, .. } => {
                !seeded
                    && keeps_to_arguments(plan.str(*op))
                    && !writes.iter().any(|&root| is_bound(root))
            }
            Instr::View { .. } => true,
            _ => false,
        };
        if !moves {
            return None;
        }
        written.extend(writes);
        needed.push(at);
        for_each_value(plan, instr, |value| {
            values.insert(value);
            roots.insert(root(value));
        });
    }
    needed.reverse();
    Some(needed)
}

/// Whether the step of a plan asks for data on the host.
pub fn has_checks(plan: &Plan) -> bool {
    plan.instrs.iter().any(|instr| match instr {
        Instr::Local { op, .. } => is_check(plan.str(*op)),
        _ => false,
    })
}

/// Whether nothing that lasts comes before a check in a plan: [`super::failing`] says what does.
pub fn checks_come_first(plan: &Plan) -> bool {
    let mut lasts = false;
    plan.instrs.iter().all(|instr| {
        let fits = match instr {
            Instr::Local { op, .. } => !lasts || !is_check(plan.str(*op)),
            _ => true,
        };
        lasts |= super::failing::lasts(plan, instr);
        fits
    })
}

//! In-place updates of small tensors, one after another, as one op on lists.
//!
//! On CUDA a `_foreach_` op launches one kernel for many tensors; on the CPU it is a
//! loop over the very ops that it takes the place of, and a loop that was called
//! directly anyway (`replay` calls in-place ops without boxing), so nothing is won
//! there. The pass is off unless it is named: it has not run on a GPU, and named it
//! takes every device alike, so that it is tested on the CPU.
//!
//! Updates of one kind are joined where the first of them stands, and what is left
//! (copies into a bucket, say, whose sources are made one by one) where the last does.
//! Between an update and that place nothing touches what it writes, and nothing
//! writes what it reads; and no tensor of the list that is written overlaps another
//! of the list, read or written, so that they may run in any order and at once. Each
//! element is then computed from the same numbers as before.
//!
//! By the same expression, too: the table lists ops of which both kernels round once
//! per element, whatever the compiler contracts. Those that multiply and add
//! (`addcmul_`, `addcdiv_`, `lerp_`, `add_` with a factor) are not listed: where the
//! two kernels round in between is up to the compiler. Nor is division by a number,
//! which the kernel for one tensor does by the reciprocal (`BinaryDivTrueKernel.cu`).
//! Lists that do not suit the kernel (strides, devices) go through the loop in PyTorch
//! itself (`can_use_fast_route`, `ForeachUtils.h`).

use hashbrown::HashMap;
use rote_plans::schedule::Ops;
use rote_plans::{Arg, Def, Instr, Kind, Marks, NONE, Plan, Range, ValueId};

use super::effects::root;
use super::{Done, Pass, Program, Stage, emit};
use crate::liveness::{follow, for_each_out, for_each_value};

pub(super) const PASS: Pass = Pass {
    name: "foreach",
    about: "update lists of small tensors by one op (for CUDA; on the CPU it gains nothing)",
    by_default: false,
    alters_collectives: false,
    keeps_bits: true,
    needs: &[],
    stage: Stage::Instructions,
    apply,
};

/// The most bytes of a tensor: what is larger occupies a device by itself.
const MAX_BYTES: u64 = 1 << 20;
/// The most tensors of a list.
const MAX_TENSORS: usize = 512;
/// How many instructions an update moves up at most.
const WINDOW: usize = 4096;

/// What follows the tensor that is written among the arguments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Operands {
    None,
    /// A tensor of the same shape and element type.
    Tensor,
    /// A number, wrapped in a tensor or not.
    Number,
}

/// Op, overload, what it takes, the op on lists, its overload.
type Row = (
    &'static str,
    &'static str,
    Operands,
    &'static str,
    &'static str,
);

/// Kernels: `ForeachBinaryOpList.cu` (`std::plus`, `std::minus`, `std::multiplies`,
/// `std::divides` and a plain copy in the type that the kernels for one tensor in
/// `BinaryMulKernel.cu`, `BinaryDivTrueKernel.cu`, `CUDALoops.cuh` and `Copy.cu`
/// compute in), `ForeachBinaryOpScalar.cu`, `ForeachUnaryOp.cu` (`std::sqrt`, which
/// IEEE 754 rounds, and `std::negate`); loops: `ForeachOpsKernels.cpp`.
#[rustfmt::skip]
const OPS: &[Row] = &[
    ("aten::copy_", "", Operands::Tensor, "aten::_foreach_copy_", ""),
    ("aten::add_", "Tensor", Operands::Tensor, "aten::_foreach_add_", "List"),
    ("aten::sub_", "Tensor", Operands::Tensor, "aten::_foreach_sub_", "List"),
    ("aten::mul_", "Tensor", Operands::Tensor, "aten::_foreach_mul_", "List"),
    ("aten::div_", "Tensor", Operands::Tensor, "aten::_foreach_div_", "List"),
    ("aten::mul_", "Tensor", Operands::Number, "aten::_foreach_mul_", "Scalar"),
    ("aten::mul_", "Scalar", Operands::Number, "aten::_foreach_mul_", "Scalar"),
    ("aten::sqrt_", "", Operands::None, "aten::_foreach_sqrt_", ""),
    ("aten::neg_", "", Operands::None, "aten::_foreach_neg_", ""),
];

/// Floats: integers and complex numbers take ways of their own in some of the kernels.
const DTYPES: &[&str] = &["f16", "bf16", "f32", "f64"];

/// One update.
struct Update {
    at: usize,
    target: ValueId,
    source: Option<ValueId>,
}

/// Updates of one kind, in order.
struct List {
    row: &'static Row,
    /// The elements of all of them, and what else they are given.
    elements: Kind,
    rest: Vec<Arg>,
    grad: bool,
    updates: Vec<Update>,
}

/// For what collectives make, by its root, what they send.
type Sent = HashMap<ValueId, Vec<ValueId>>;

fn sent(plan: &Plan) -> Sent {
    let mut sent = Sent::new();
    for instr in &plan.instrs {
        if let Instr::Collective(c) = instr {
            sent.entry(root(plan, c.output)).or_default().push(c.input);
        }
    }
    sent
}

fn apply(program: &mut Program, ops: &dyn Ops) -> Done {
    let plan = &mut program.plan;
    let (mut updates, mut joint) = (0, 0);
    for (find, last) in [(up as fn(&Plan) -> Vec<List>, false), (down, true)] {
        let mut lists = find(plan);
        lists.retain(|list| ops.has(list.row.3, list.row.4));
        updates += lists.iter().map(|list| list.updates.len()).sum::<usize>();
        joint += lists.len();
        if !lists.is_empty() {
            rewrite(plan, &lists, last);
        }
    }
    Done {
        changed: updates,
        what: format!("{updates} updates become {joint}"),
    }
}

/// Lists of two updates and more, each of which can move up to the first.
fn up(plan: &Plan) -> Vec<List> {
    let sent = sent(plan);
    let mut lists: Vec<List> = Vec::new();
    // Where each instruction stands once those before it have moved.
    let mut place: Vec<usize> = (0..plan.instrs.len()).collect();
    for (i, instr) in plan.instrs.iter().enumerate() {
        let Some(new) = update(plan, i, instr) else {
            continue;
        };
        let own = &new.updates[0];
        let free = |first: usize| {
            let between = (first + 1..i).filter(|at| place[*at] > first);
            let mut between = between.map(|at| &plan.instrs[at]);
            let made = |value: ValueId| match plan.values[value as usize].def {
                Def::Instr(at) => place[at as usize] < first,
                Def::Binding(_) | Def::Constant(_) => true,
            };
            let operands = [Some(own.target), own.source];
            i - first <= WINDOW
                && operands.into_iter().flatten().all(made)
                && !between.any(|instr| disturbs(plan, &sent, instr, own))
        };
        match lists
            .iter_mut()
            .rfind(|list| list.takes(plan, &new) && free(list.updates[0].at))
        {
            Some(list) => {
                place[i] = list.updates[0].at;
                list.updates.extend(new.updates);
            }
            None => lists.push(new),
        }
    }
    lists.retain(|list| list.updates.len() > 1);
    lists
}

/// Lists of two updates and more, each of which can move down to the last.
fn down(plan: &Plan) -> Vec<List> {
    let sent = sent(plan);
    let (mut open, mut found) = (Vec::<List>::new(), Vec::new());
    for (i, instr) in plan.instrs.iter().enumerate() {
        let mut new = update(plan, i, instr);
        let joined = open.iter().position(|list| {
            let joins = |new: &List| list.takes(plan, new);
            new.as_ref().is_some_and(joins)
        });
        let mut left = Vec::with_capacity(open.len() + 1);
        for (nth, mut list) in open.into_iter().enumerate() {
            if Some(nth) == joined {
                list.updates
                    .extend(new.take().into_iter().flat_map(|new| new.updates));
                left.push(list);
            } else if list
                .updates
                .iter()
                .any(|update| disturbs(plan, &sent, instr, update))
            {
                found.push(list);
            } else {
                left.push(list);
            }
        }
        left.extend(new);
        open = left;
    }
    found.extend(open);
    found.retain(|list| list.updates.len() > 1);
    found
}

impl List {
    /// Whether an update, the only one of another list, can be one of this list.
    fn takes(&self, plan: &Plan, new: &List) -> bool {
        let kind = |list: &List| (list.row, list.elements);
        let apart = |old: &Update, new: &Update| {
            let sources = [old.source, new.source];
            let over = |a: ValueId, b: Option<ValueId>| b.is_some_and(|b| overlap(plan, a, b));
            !overlap(plan, old.target, new.target)
                && !over(new.target, sources[0])
                && !over(old.target, sources[1])
        };
        kind(self) == kind(new)
            && self.rest == new.rest
            && self.grad == new.grad
            && self.updates.len() < MAX_TENSORS
            && self.updates.iter().all(|old| apart(old, &new.updates[0]))
    }
}

/// The list of one update that an instruction is.
fn update(plan: &Plan, at: usize, instr: &Instr) -> Option<List> {
    let Instr::Local {
        op,
        overload,
        args,
        outs,
        writes,
        seeded: false,
        grad,
    } = instr
    else {
        return None;
    };
    let args = &plan.args[args.indices()];
    let (Some(Arg::Value(target)), [written]) = (args.first(), plan.ids(*writes)) else {
        return None;
    };
    let mut results = plan.ids(*outs).iter();
    if written != target || !results.all(|out| [NONE, *target].contains(out)) {
        return None;
    }
    let (name, overload) = (plan.str(*op), plan.str(*overload));
    let rows = OPS.iter().filter(|row| (row.0, row.1) == (name, overload));
    let mut matches = rows.filter_map(|row| Some((row, operands(plan, row.2, args)?)));
    let (row, (source, rest)) = matches.next()?;
    let value = &plan.values[*target as usize];
    let meta = plan.meta(*target);
    let like = |source: ValueId| {
        let source = plan.meta(source);
        (source.kind, source.shape) == (meta.kind, meta.shape)
    };
    let numel: i64 = plan.dims(value.shape).iter().product();
    let fits = meta.kind.marks == Marks::NONE
        && source.is_none_or(like)
        && numel.unsigned_abs() * value.dtype.bytes()? <= MAX_BYTES
        && value
            .dtype
            .name()
            .is_some_and(|name| DTYPES.contains(&name));
    fits.then(|| List {
        row,
        elements: meta.kind,
        rest,
        grad: *grad,
        updates: vec![Update {
            at,
            target: *target,
            source,
        }],
    })
}

/// The tensor that an update reads, and what else the op on lists is given.
fn operands(plan: &Plan, takes: Operands, args: &[Arg]) -> Option<(Option<ValueId>, Vec<Arg>)> {
    match (takes, &args[1..]) {
        (Operands::None, []) => Some((None, Vec::new())),
        // Not blocking or blocking copies; sums without a factor.
        (Operands::Tensor, [Arg::Value(source), rest @ ..]) => {
            let plain = match rest {
                [] | [Arg::Bool(_)] | [Arg::Int(1)] => true,
                [Arg::Float(factor)] => *factor == 1.0,
                _ => false,
            };
            plain.then(|| (Some(*source), rest.to_vec()))
        }
        (Operands::Number, [Arg::Wrapped(number)]) => {
            Some((None, vec![plan.args[*number as usize]]))
        }
        (Operands::Number, [number @ (Arg::Int(_) | Arg::Float(_) | Arg::Scalar(_))]) => {
            Some((None, vec![*number]))
        }
        _ => None,
    }
}

/// Whether an update cannot change places with an instruction.
fn disturbs(plan: &Plan, sent: &Sent, instr: &Instr, update: &Update) -> bool {
    let operands = [Some(update.target), update.source];
    let mut found = false;
    match instr {
        // A view says where to look, and looks at nothing.
        Instr::View { .. } => return false,
        Instr::Wait { value } => {
            // Until then what is received is written, and what is sent is read.
            let waited = root(plan, *value);
            let inputs = sent.get(&waited).into_iter().flatten();
            let mut operands = operands.into_iter().flatten();
            return operands.any(|operand| root(plan, operand) == waited)
                || inputs
                    .into_iter()
                    .any(|input| overlap(plan, *input, update.target));
        }
        _ => {}
    }
    for_each_value(plan, instr, |value| {
        found |= overlap(plan, value, update.target)
    });
    let mut write = |value: ValueId| {
        let mut operands = operands.into_iter().flatten();
        found |= operands.any(|operand| overlap(plan, value, operand));
    };
    for_each_out(plan, instr, &mut write);
    match instr {
        Instr::Local { writes, .. } => plan.ids(*writes).iter().for_each(|value| write(*value)),
        Instr::Collective(c) => write(c.output),
        _ => {}
    }
    found
}

/// Whether two values may look at the same bytes.
fn overlap(plan: &Plan, a: ValueId, b: ValueId) -> bool {
    let extent = |value: ValueId| {
        let value = &plan.values[value as usize];
        let width = value.dtype.bytes().unwrap_or(1) as i64;
        let sizes = plan.dims(value.shape).iter().zip(plan.dims(value.strides));
        let last: i64 = sizes.map(|(size, stride)| (size - 1) * stride).sum();
        value.offset * width..(value.offset + last + 1) * width
    };
    let (one, other) = (extent(a), extent(b));
    root(plan, a) == root(plan, b) && one.start < other.end && other.start < one.end
}

/// Puts one op in the place of each list: where its first update stands, or its last.
fn rewrite(plan: &mut Plan, lists: &[List], last: bool) {
    let old = std::mem::take(&mut plan.instrs);
    let mut place = vec![None; old.len()];
    for list in lists {
        let at = if last { list.updates.len() - 1 } else { 0 };
        for (nth, update) in list.updates.iter().enumerate() {
            place[update.at] = Some((nth == at).then_some(list));
        }
    }
    let (mut instrs, mut moved) = (Vec::with_capacity(old.len()), Vec::new());
    for (instr, place) in old.into_iter().zip(place) {
        moved.push(instrs.len() as u32);
        match place {
            None => instrs.push(instr),
            Some(None) => {}
            Some(Some(list)) => instrs.push(joint(plan, list)),
        }
    }
    moved.push(instrs.len() as u32);
    plan.instrs = instrs;
    follow(plan, &moved);
    emit::define(plan);
}

/// One op in the place of a list of updates.
fn joint(plan: &mut Plan, list: &List) -> Instr {
    let targets: Vec<ValueId> = list.updates.iter().map(|update| update.target).collect();
    let sources: Vec<ValueId> = list
        .updates
        .iter()
        .filter_map(|update| update.source)
        .collect();
    let mut args = vec![values(plan, &targets)];
    if list.row.2 == Operands::Tensor {
        args.push(values(plan, &sources));
    }
    args.extend(&list.rest);
    let mut joint = emit::overloaded(plan, list.row.3, list.row.4, &args, &[], &targets);
    if let Instr::Local { grad, .. } = &mut joint {
        *grad = list.grad;
    }
    joint
}

fn values(plan: &mut Plan, ids: &[ValueId]) -> Arg {
    let start = plan.ids.len() as u32;
    plan.ids.extend_from_slice(ids);
    Arg::Values(Range {
        start,
        len: ids.len() as u32,
    })
}

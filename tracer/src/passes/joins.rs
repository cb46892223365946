//! Evenly spaced pieces of one tensor are joined by one strided copy.
//!
//! `cat` copies its pieces one by one and checks each against the result. Pieces
//! of one shape whose offsets in one root grow by the same step are a view of the
//! root with one dim more, and the joined tensor seen with the joined dim split is
//! of the same shape: one `copy_` between the two moves the same elements to the
//! same places. All pieces are read before anything else is written, as before.

use rote_plans::{Arg, Def, Instr, NONE, Plan, Range, Value, ValueId};

use super::effects::{is_function, outs};
use super::{Done, Pass, Program, Stage};

pub(super) const PASS: Pass = Pass {
    name: "joins",
    about: "join evenly spaced pieces of a tensor by one copy",
    by_default: true,
    stage: Stage::Instructions,
    apply,
};

/// Fewer pieces are joined as fast by `cat`.
const LEAST: usize = 4;

fn apply(program: &mut Program) -> Done {
    let plan = &mut program.plan;
    let (mut instrs, mut moved) = (Vec::with_capacity(plan.instrs.len()), Vec::new());
    let old = std::mem::take(&mut plan.instrs);
    let mut pieces = 0;
    for instr in old {
        moved.push(instrs.len() as u32);
        match join(plan, &instr) {
            Some(join) => {
                pieces += join.pieces;
                emit(plan, &join, instrs.len() as u32, &mut instrs);
            }
            None => instrs.push(instr),
        }
    }
    moved.push(instrs.len() as u32);
    let joined = instrs.len() + 1 - moved.len();
    let known = plan.values.len() - 2 * (joined / 3);
    for value in &mut plan.values[..known] {
        if let Def::Instr(instr) = &mut value.def {
            *instr = moved[*instr as usize];
        }
    }
    let shift = |range: &mut Range| {
        let (start, end) = (moved[range.start as usize], moved[range.indices().end]);
        *range = Range {
            start,
            len: end - start,
        };
    };
    (plan.strategies.iter_mut()).for_each(|s| shift(&mut s.instrs));
    (plan.redistributions.iter_mut()).for_each(|r| shift(&mut r.instrs));
    plan.instrs = instrs;
    Done {
        changed: joined / 3,
        what: format!("{} copies join {pieces} pieces", joined / 3),
    }
}

/// A `cat` that one copy can do.
struct Join {
    first: ValueId,
    out: ValueId,
    pieces: usize,
    /// The shape of both views, and their strides.
    shape: Vec<i64>,
    from: Vec<i64>,
    to: Vec<i64>,
}

fn join(plan: &Plan, instr: &Instr) -> Option<Join> {
    let Instr::Local { op, args, .. } = instr else {
        return None;
    };
    if plan.str(*op) != "aten::cat" || !is_function(plan, instr) {
        return None;
    }
    let [Arg::Values(pieces), Arg::Int(dim)] = plan.args[args.indices()] else {
        return None;
    };
    let [out] = *outs(plan, instr).as_slice() else {
        return None;
    };
    let pieces = plan.ids(pieces);
    if pieces.len() < LEAST || pieces.contains(&NONE) {
        return None;
    }
    let value = |v: ValueId| &plan.values[v as usize];
    let (head, second, result) = (value(pieces[0]), value(pieces[1]), value(out));
    let (size, stride) = (plan.dims(head.shape), plan.dims(head.strides));
    let dim = usize::try_from(if dim < 0 {
        dim + size.len() as i64
    } else {
        dim
    })
    .ok()?;
    let step = second.offset - head.offset;
    let even = pieces.iter().enumerate().all(|(at, piece)| {
        let piece = value(*piece);
        (piece.root, piece.dtype) == (head.root, head.dtype)
            && plan.dims(piece.shape) == size
            && plan.dims(piece.strides) == stride
            && piece.offset == head.offset + at as i64 * step
    });
    let same = (result.dtype, result.device) == (head.dtype, head.device);
    let fresh = result.root == out && result.offset == 0;
    if !even || !same || !fresh || dim >= size.len() || step <= 0 {
        return None;
    }
    let with = |list: &[i64], new: i64| {
        let mut list = list.to_vec();
        list.insert(dim, new);
        list
    };
    let to = plan.dims(result.strides);
    Some(Join {
        first: pieces[0],
        out,
        pieces: pieces.len(),
        shape: with(size, pieces.len() as i64),
        from: with(stride, step),
        to: with(to, to[dim] * size[dim]),
    })
}

/// The instructions in the place of a `cat`: allocate, view both, copy.
fn emit(plan: &mut Plan, join: &Join, at: u32, instrs: &mut Vec<Instr>) {
    let result = plan.values[join.out as usize];
    let head = plan.values[join.first as usize];
    let shape = dims(plan, &join.shape);
    let (from, to) = (dims(plan, &join.from), dims(plan, &join.to));
    let view = |plan: &mut Plan, root, strides, offset, instr| {
        plan.values.push(Value {
            def: Def::Instr(instr),
            root,
            shape,
            strides,
            offset,
            storage_bytes: 0,
            last_use: NONE,
            ..result
        });
        plan.values.len() as ValueId - 1
    };
    let source = view(plan, head.root, from, head.offset, at + 1);
    let target = view(plan, join.out, to, 0, at + 2);
    let allocated = [
        Arg::Ints(result.shape),
        Arg::Ints(result.strides),
        Arg::DType(result.dtype),
        Arg::None,
        Arg::Device(result.device),
        Arg::None,
    ];
    let copied = [Arg::Value(target), Arg::Value(source), Arg::Bool(false)];
    let empty = local(plan, "aten::empty_strided", &allocated, &[join.out], &[]);
    let copy = local(plan, "aten::copy_", &copied, &[NONE], &[target]);
    instrs.extend([
        empty,
        Instr::View {
            base: head.root,
            out: source,
        },
        Instr::View {
            base: join.out,
            out: target,
        },
        copy,
    ]);
}

fn local(plan: &mut Plan, op: &str, args: &[Arg], outs: &[u32], writes: &[u32]) -> Instr {
    let mut text = |wanted: &str| {
        let known = plan.strings.iter().position(|text| text == wanted);
        known.unwrap_or_else(|| {
            plan.strings.push(wanted.to_owned());
            plan.strings.len() - 1
        }) as u32
    };
    let (op, overload) = (text(op), text(""));
    let range = |start: usize, len: usize| Range {
        start: start as u32,
        len: len as u32,
    };
    let args_range = range(plan.args.len(), args.len());
    plan.args.extend_from_slice(args);
    let mut ids = |ids: &[u32]| {
        let range = range(plan.ids.len(), ids.len());
        plan.ids.extend_from_slice(ids);
        range
    };
    Instr::Local {
        op,
        overload,
        args: args_range,
        outs: ids(outs),
        writes: ids(writes),
        seeded: false,
    }
}

fn dims(plan: &mut Plan, dims: &[i64]) -> Range {
    let start = plan.dims.len() as u32;
    plan.dims.extend_from_slice(dims);
    Range {
        start,
        len: dims.len() as u32,
    }
}

//! Evenly spaced pieces of one tensor are joined by one strided copy.
//!
//! `cat` copies its pieces one by one and checks each against the result. Pieces
//! of one shape whose offsets in one root grow by the same step are a view of the
//! root with one dim more, and the joined tensor seen with the joined dim split is
//! of the same shape: one `copy_` between the two moves the same elements to the
//! same places. All pieces are read before anything else is written, as before.

use rote_plans::schedule::Ops;
use rote_plans::{Arg, Instr, NONE, Plan, Region, ValueId};

use super::effects::{is_function, outs};
use super::{Done, Pass, Program, Stage, emit};
use crate::liveness::follow;

pub(super) const PASS: Pass = Pass {
    name: "joins",
    about: "join evenly spaced pieces of a tensor by one copy",
    by_default: true,
    alters_collectives: false,
    keeps_bits: true,
    needs: emit::COPY,
    stage: Stage::Instructions,
    apply,
};

/// Fewer pieces are joined as fast by `cat`.
const LEAST: usize = 4;
/// Instructions in the place of a `cat`: allocate, view both, copy.
const EMITTED: u32 = 4;

fn apply(program: &mut Program, _ops: &dyn Ops) -> Done {
    let plan = &mut program.plan;
    let joins: Vec<_> = plan.instrs.iter().map(|instr| join(plan, instr)).collect();
    let mut moved = vec![0];
    for join in &joins {
        let one = moved[moved.len() - 1];
        moved.push(one + if join.is_some() { EMITTED } else { 1 });
    }
    follow(plan, &moved);
    let (mut changed, mut pieces) = (0, 0);
    let mut instrs = Vec::with_capacity(plan.instrs.len());
    for (instr, join) in std::mem::take(&mut plan.instrs).into_iter().zip(joins) {
        match join {
            Some(join) => {
                changed += 1;
                pieces += join.pieces;
                emit_join(plan, &join, &mut instrs);
            }
            None => instrs.push(instr),
        }
    }
    plan.instrs = instrs;
    emit::define(plan);
    Done {
        changed,
        what: format!("{changed} copies join {pieces} pieces"),
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
    let dims = plan.dims(plan.values[out as usize].shape).len();
    let dim = usize::try_from(if dim < 0 { dim + dims as i64 } else { dim }).ok()?;
    if pieces.len() < LEAST || pieces.contains(&NONE) {
        return None;
    }
    let (head, result) = (plan.region(pieces[0]), plan.region(out));
    let (size, stride) = (head.meta.shape, head.meta.strides);
    let step = plan.region(pieces[1]).offset - head.offset;
    let even = pieces.iter().zip(0..).all(|(piece, at): (_, i64)| {
        let expected = Region {
            offset: head.offset + at * step,
            ..head
        };
        plan.region(*piece) == expected
    });
    let same = result.meta.kind == head.meta.kind;
    let fresh = (result.root, result.offset) == (out, 0);
    if !even || !same || !fresh || dim >= size.len() || step <= 0 {
        return None;
    }
    let with = |list: &[i64], new: i64| {
        let mut list = list.to_vec();
        list.insert(dim, new);
        list
    };
    let to = result.meta.strides;
    Some(Join {
        first: pieces[0],
        out,
        pieces: pieces.len(),
        shape: with(size, pieces.len() as i64),
        from: with(stride, step),
        to: with(to, to[dim] * size[dim]),
    })
}

/// The instructions in the place of a `cat`.
fn emit_join(plan: &mut Plan, join: &Join, instrs: &mut Vec<Instr>) {
    let offset = plan.values[join.first as usize].offset;
    let source = emit::piece(plan, join.first, &join.shape, &join.from, offset);
    let target = emit::piece(plan, join.out, &join.shape, &join.to, 0);
    instrs.extend([
        emit::allocate(plan, join.out),
        emit::view(plan, source),
        emit::view(plan, target),
        emit::copy(plan, target, source),
    ]);
}

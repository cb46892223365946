//! Small collectives of one kind become one.
//!
//! A collective costs some ten to a hundred microseconds before it moves a byte,
//! and a step has many small ones: gradients of norms and biases, of replicated
//! parameters, gathers of small shards. Members of a bucket have the kind, the
//! reduction, the group, the element type and the device in common. One scan over
//! the program keeps one open bucket for each such key. A bucket ends at its
//! *deadline*: the first instruction that looks at a member's result, waits for
//! it apart; so no member depends on another. What a member sends is copied into
//! the bucket where the member was, so nothing that happens to its input later
//! matters; the collective starts where the last member was, and is waited for at
//! the deadline. There each result becomes a view of the bucket, or, where the
//! layout or its life does not allow one (gathered rows; what outlives the run;
//! reductions in place), is copied out.
//!
//! ```text
//! %3 = all_reduce(%1)      %b = empty; copy_(%b[0..], %1)
//! wait %3             >
//! %4 = all_reduce(%2)      copy_(%b[64..], %2); %b = all_reduce(%b)
//! wait %4
//! mul(%3, %4)              wait %b; %3 = view %b; %4 = view %b; mul(%3, %4)
//! ```
//!
//! An all-reduce of pieces laid one after another is the pieces' all-reduces one
//! after another, element by element. Buckets of the other kinds are rows, one per
//! rank, of the rows that the members would have had. Every piece starts as
//! aligned as an allocation, so kernels take the same paths on it.
//!
//! What bits may change: where in its message an element lies can decide in which
//! order a backend reduces what the ranks sent. Where that order does not matter, the
//! pass `buckets` keeps every bit: gathers, integers, and sums, means and products of
//! two ranks, which commute. The other reductions of floats (sums of more ranks, which
//! round differently, minima and maxima, of which zeros have two) go together in a pass
//! of their own, `sums`, which runs only where it is named.
//!
//! Both change the number and the order of collectives, on every rank alike, since all
//! that decides (order, shapes, dependences) is the same on ranks that run the same
//! program; ranks agree on it before they replay.

use hashbrown::{HashMap, HashSet};
use rote_plans::schedule::Ops;
use rote_plans::{
    Collective, CollectiveKind, DType, Instr, Kind, Marks, NONE, Plan, ReduceOp, ValueId,
};

use super::effects::{anchored, for_each_written, outlives, root};
use super::{Done, Pass, Program, Stage, emit};
use crate::liveness::{follow, for_each_out, for_each_value};

pub(super) const PASS: Pass = Pass {
    name: "buckets",
    about: "run small collectives of one kind as one",
    by_default: false,
    alters_collectives: true,
    keeps_bits: true,
    needs: emit::COPY,
    stage: Stage::Instructions,
    apply: |program, ops| apply(program, ops, exact),
};

pub(super) const SUMS: Pass = Pass {
    name: "sums",
    about: "merge the other reductions of floats (sums over more than two ranks may round differently)",
    by_default: false,
    alters_collectives: true,
    keeps_bits: false,
    needs: emit::COPY,
    stage: Stage::Instructions,
    apply: |program, ops| apply(program, ops, |plan, key| !exact(plan, key)),
};

/// The most bytes that a member sends or receives, whichever is more. Copying them
/// in and out takes some 20 us on a CPU: less than one collective between processes
/// saves, and it leaves bandwidth-bound collectives alone.
const MEMBER_BYTES: u64 = 128 << 10;
/// The most bytes of a bucket: memory that is not given back before the last
/// result is used, and a size at which bandwidth counts, not the number of messages.
const BUCKET_BYTES: i64 = 4 << 20;

/// What members of a bucket have in common.
type Key = (CollectiveKind, Option<ReduceOp>, u32, Kind);

/// A collective in a bucket.
#[derive(Clone, Copy, Debug)]
struct Member {
    at: usize,
    input: ValueId,
    output: ValueId,
    /// Where its piece starts in each row of the bucket, in elements.
    offset: i64,
}

/// Collectives that can be one.
#[derive(Clone, Debug)]
struct Bucket {
    key: Key,
    members: Vec<Member>,
    /// Elements of a row, gaps between pieces included.
    row: i64,
    /// The first instruction that looks at a result; after the last one, if none does.
    deadline: usize,
    /// Whether a later collective can still be a member.
    open: bool,
}

fn apply(program: &mut Program, ops: &dyn Ops, takes: fn(&Plan, Key) -> bool) -> Done {
    let plan = &mut program.plan;
    let found = find(plan, ops, takes);
    let members: usize = found.iter().map(|bucket| bucket.members.len()).sum();
    let what = format!("{members} collectives become {}", found.len());
    if !found.is_empty() {
        program.carries = rewrite(plan, &found, &program.carries);
    }
    Done {
        changed: members,
        what,
    }
}

// -- which collectives go together ---------------------------------------------

/// Buckets of two members and more, by one scan.
fn find(plan: &Plan, ops: &dyn Ops, takes: fn(&Plan, Key) -> bool) -> Vec<Bucket> {
    let (end, anchored) = (plan.instrs.len(), anchored(plan));
    let mut buckets: Vec<Bucket> = Vec::new();
    // For each root, the last bucket that a result on it is in, and the result.
    let mut results: Vec<Option<(usize, ValueId)>> = vec![None; plan.values.len()];
    for (i, instr) in plan.instrs.iter().enumerate() {
        let mut due = Vec::new();
        match instr {
            Instr::Wait { value } => due
                .extend(results[root(plan, *value) as usize].filter(|(_, result)| result != value)),
            _ if acts(plan, instr) => due.extend((0..buckets.len()).map(|at| (at, NONE))),
            _ => looks_at(plan, instr, |root| due.extend(results[root as usize])),
        }
        for (at, _) in due {
            let bucket: &mut Bucket = &mut buckets[at];
            bucket.deadline = bucket.deadline.min(i);
            bucket.open = false;
        }
        let Instr::Collective(c) = instr else {
            continue;
        };
        let Some((key, elements)) =
            candidate(plan, ops, &anchored, i, c).filter(|(key, _)| takes(plan, *key))
        else {
            continue;
        };
        let gap = gap(key, ops);
        let elements = (elements + gap - 1) / gap * gap;
        let limit = BUCKET_BYTES / width(key.3.dtype) / rows(plan, key);
        let last = buckets.iter().rposition(|bucket| bucket.key == key);
        let at = match last {
            Some(at) if buckets[at].open && buckets[at].row + elements <= limit => at,
            _ => {
                buckets.push(Bucket {
                    key,
                    members: Vec::new(),
                    row: 0,
                    deadline: end,
                    open: true,
                });
                buckets.len() - 1
            }
        };
        let bucket = &mut buckets[at];
        bucket.members.push(Member {
            at: i,
            input: c.input,
            output: c.output,
            offset: bucket.row,
        });
        bucket.row += elements;
        results[root(plan, c.output) as usize] = Some((at, c.output));
    }
    buckets.retain(|bucket| bucket.members.len() > 1);
    buckets
}

/// The key of a collective that can be in a bucket, and the elements of its piece.
fn candidate(
    plan: &Plan,
    ops: &dyn Ops,
    anchored: &[bool],
    at: usize,
    c: &Collective,
) -> Option<(Key, i64)> {
    let value = |v: ValueId| &plan.values[v as usize];
    let (input, output) = (value(c.input), value(c.output));
    let elements = plan.kind(c.input);
    let key = (c.kind, c.reduce, c.group, elements);
    let width = input.dtype.bytes()?;
    let same = plan.kind(c.output) == elements && elements.marks == Marks::NONE;
    if !same || alignment(key, ops) % width != 0 {
        return None;
    }
    let (sent, received) = (plan.dims(input.shape), plan.dims(output.shape));
    let (more, less) = match c.kind {
        CollectiveKind::AllReduce => (sent, received),
        CollectiveKind::AllGather => (received, sent),
        CollectiveKind::ReduceScatter => (sent, received),
        CollectiveKind::AllToAll | CollectiveKind::Broadcast => return None,
    };
    let of_rows = match (more, less) {
        ([all, more @ ..], [one, less @ ..]) => more == less && *all == one * rows(plan, key),
        (more, less) => more == less && rows(plan, key) == 1,
    };
    let numel = |shape: &[i64]| shape.iter().product::<i64>();
    let bytes = numel(more).unsigned_abs() * width;
    let in_place = c.input == c.output;
    let whole = output.root == c.output
        && output.offset == 0
        && output.storage_bytes == numel(received).unsigned_abs() * width;
    let fits = of_rows
        && bytes > 0
        && bytes <= MEMBER_BYTES
        && emit::is_contiguous(received, plan.dims(output.strides))
        && !anchored[root(plan, c.output) as usize]
        && (if in_place {
            c.kind == CollectiveKind::AllReduce
        } else {
            whole
        })
        && is_waited_for(plan, at, c.output);
    fits.then(|| (key, numel(less)))
}

/// Whether nothing looks at a result before it is waited for.
fn is_waited_for(plan: &Plan, started: usize, output: ValueId) -> bool {
    let own = root(plan, output);
    for instr in &plan.instrs[started + 1..] {
        let mut looked = false;
        looks_at(plan, instr, |root| looked |= root == own);
        if looked {
            return matches!(instr, Instr::Wait { value } if *value == output);
        }
    }
    true
}

/// Calls `visit` with the roots of what an instruction reads, writes or makes.
/// Views only say where to look.
fn looks_at(plan: &Plan, instr: &Instr, mut visit: impl FnMut(ValueId)) {
    if matches!(instr, Instr::View { .. }) {
        return;
    }
    for_each_value(plan, instr, |value| visit(root(plan, value)));
    for_each_out(plan, instr, |value| visit(root(plan, value)));
    for_each_written(plan, instr, visit);
}

/// Whether an op may do more than to read and write its arguments, such as
/// communicate.
fn acts(plan: &Plan, instr: &Instr) -> bool {
    matches!(instr, Instr::Local { op, .. } if {
        let name = plan.str(*op);
        !name.starts_with("aten::") && !name.starts_with("prims::")
    })
}

/// Whether a collective gives the same bits wherever in a message an element lies.
fn exact(plan: &Plan, key: Key) -> bool {
    let (kind, reduce, group, elements) = key;
    let whole = (elements.dtype)
        .name()
        .is_some_and(|name| name.starts_with(['i', 'u', 'b']) && name != "bf16");
    let commutes = matches!(
        reduce,
        Some(ReduceOp::Sum | ReduceOp::Avg | ReduceOp::Product)
    );
    let pair = plan.groups[group as usize].ranks.len <= 2;
    kind == CollectiveKind::AllGather || whole || commutes && pair
}

/// Rows of the larger side of a bucket.
fn rows(plan: &Plan, key: Key) -> i64 {
    match key.0 {
        CollectiveKind::AllReduce => 1,
        _ => i64::from(plan.groups[key.2 as usize].ranks.len).max(1),
    }
}

fn width(dtype: DType) -> i64 {
    dtype.bytes().unwrap_or(1) as i64
}

/// What each piece starts at a multiple of, in bytes: as an allocation does.
fn alignment(key: Key, ops: &dyn Ops) -> u64 {
    ops.alignment(key.3.device)
}

/// The same in elements.
fn gap(key: Key, ops: &dyn Ops) -> i64 {
    alignment(key, ops) as i64 / width(key.3.dtype)
}

// -- what takes their place ---------------------------------------------------------

/// A bucket while the program is rewritten.
#[derive(Default)]
struct Filling {
    /// The storages that are sent and received, once there is a member.
    storages: Option<(ValueId, ValueId)>,
    /// Which recorded collectives it carries out.
    carries: Vec<u32>,
    /// Where each member's input was copied to.
    pieces: Vec<ValueId>,
    /// Views of results that are not there yet.
    views: Vec<ValueId>,
}

/// Puts buckets in the place of their members. `carried`: which recorded collectives
/// each one carries out; returns the same of those that are left.
fn rewrite(plan: &mut Plan, buckets: &[Bucket], carried: &[Vec<u32>]) -> Vec<Vec<u32>> {
    let outlives = outlives(plan);
    let mut members = HashMap::new();
    for (at, bucket) in buckets.iter().enumerate() {
        members.extend((0..bucket.members.len()).map(|nth| (bucket.members[nth].at, (at, nth))));
    }
    let mut filling: Vec<Filling> = buckets.iter().map(|_| Filling::default()).collect();
    // Results that are under way, and their buckets.
    let mut pending: HashMap<ValueId, usize> = HashMap::new();
    // Results that come out of buckets: what waits for one waits for its bucket, which was done by then.
    let mut bucketed: HashSet<ValueId> = HashSet::new();
    let old = std::mem::take(&mut plan.instrs);
    let mut carried = carried.iter();
    let mut left = Vec::new();
    let mut moved = Vec::with_capacity(old.len() + 1);
    let mut instrs = Vec::with_capacity(old.len());
    for i in 0..=old.len() {
        moved.push(instrs.len() as u32);
        for (at, bucket) in buckets
            .iter()
            .enumerate()
            .filter(|(_, bucket)| bucket.deadline == i)
        {
            pending.retain(|_, of| *of != at);
            empty(plan, bucket, &filling[at], &outlives, &mut instrs);
        }
        let Some(instr) = old.get(i) else {
            break;
        };
        match instr {
            Instr::Collective(c) => {
                let carries = carried.next().cloned().unwrap_or_default();
                match members.get(&i) {
                    Some(&(at, nth)) => {
                        filling[at].carries.extend(carries);
                        fill(plan, &buckets[at], nth, c, &mut filling[at], &mut instrs);
                        pending.insert(c.output, at);
                        bucketed.insert(c.output);
                        if nth + 1 == buckets[at].members.len() {
                            left.push(std::mem::take(&mut filling[at].carries));
                        }
                    }
                    None => {
                        bucketed.remove(&c.output);
                        instrs.push(*instr);
                        left.push(carries);
                    }
                }
            }
            Instr::Wait { value } if bucketed.contains(value) => {}
            Instr::View { out, .. } => match pending.get(&root(plan, *out)) {
                // A reduction in place: the storage is there all the time.
                Some(at)
                    if !buckets[*at]
                        .members
                        .iter()
                        .any(|m| m.input == root(plan, *out)) =>
                {
                    filling[*at].views.push(*out);
                }
                _ => instrs.push(emit::view(plan, *out)),
            },
            _ => instrs.push(*instr),
        }
    }
    plan.instrs = instrs;
    follow(plan, &moved);
    emit::define(plan);
    left
}

/// Copies what a member sends into the bucket, which the first one allocates and the
/// last one starts.
fn fill(
    plan: &mut Plan,
    bucket: &Bucket,
    nth: usize,
    collective: &Collective,
    filling: &mut Filling,
    instrs: &mut Vec<Instr>,
) {
    let member = bucket.members[nth];
    let (ranks, row) = (rows(plan, bucket.key), bucket.row);
    let (sent, received) = *filling.storages.get_or_insert_with(|| {
        // Flat, as backends that look at more than the number of elements want it.
        let mut flat = |elements: i64| emit::storage(plan, member.input, &[elements]);
        let (sent, received) = match bucket.key.0 {
            CollectiveKind::AllGather => (flat(row), flat(ranks * row)),
            CollectiveKind::ReduceScatter => (flat(ranks * row), flat(row)),
            _ => {
                let both = flat(row);
                (both, both)
            }
        };
        instrs.push(emit::allocate(plan, sent));
        (sent, received)
    });
    let shape = plan.dims(plan.values[member.input as usize].shape).to_vec();
    let (source, shape, strides) = if bucket.key.0 == CollectiveKind::ReduceScatter {
        let input = plan.values[member.input as usize];
        let (by_row, strides) = split(&shape, plan.dims(input.strides), ranks);
        let source = emit::piece(plan, member.input, &by_row, &strides, input.offset);
        instrs.push(emit::view(plan, source));
        let strides = spread(&by_row, row);
        (source, by_row, strides)
    } else {
        let strides = emit::contiguous(&shape);
        (member.input, shape, strides)
    };
    let piece = emit::piece(plan, sent, &shape, &strides, member.offset);
    instrs.extend([emit::view(plan, piece), emit::copy(plan, piece, source)]);
    filling.pieces.push(piece);
    if nth + 1 == bucket.members.len() {
        instrs.push(Instr::Collective(Collective {
            input: sent,
            output: received,
            ..*collective
        }));
    }
}

/// Waits for a bucket, and gives its members their results.
fn empty(
    plan: &mut Plan,
    bucket: &Bucket,
    filling: &Filling,
    outlives: &[bool],
    instrs: &mut Vec<Instr>,
) {
    let Some((_, received)) = filling.storages else {
        return;
    };
    let ranks = rows(plan, bucket.key);
    instrs.push(Instr::Wait { value: received });
    for (member, piece) in bucket.members.iter().zip(&filling.pieces) {
        let output = member.output;
        let meta = plan.values[output as usize];
        let (shape, strides) = (
            plan.dims(meta.shape).to_vec(),
            plan.dims(meta.strides).to_vec(),
        );
        if member.input == output {
            instrs.push(emit::copy(plan, output, *piece));
        } else if bucket.key.0 == CollectiveKind::AllGather {
            let (by_row, strides) = split(&shape, &strides, ranks);
            let to = emit::piece(plan, output, &by_row, &strides, 0);
            let strides = spread(&by_row, bucket.row);
            let from = emit::piece(plan, received, &by_row, &strides, member.offset);
            instrs.extend([
                emit::allocate(plan, output),
                emit::view(plan, to),
                emit::view(plan, from),
                emit::copy(plan, to, from),
            ]);
        } else if outlives[output as usize] {
            let from = emit::piece(plan, received, &shape, &strides, member.offset);
            instrs.extend([
                emit::allocate(plan, output),
                emit::view(plan, from),
                emit::copy(plan, output, from),
            ]);
        } else {
            lay(plan, output, received, member.offset * width(meta.dtype));
            instrs.push(emit::view(plan, output));
        }
    }
    for view in &filling.views {
        instrs.push(emit::view(plan, *view));
    }
}

/// Lets a root, and what looks at its storage, look at the storage of another from
/// this byte on.
fn lay(plan: &mut Plan, output: ValueId, on: ValueId, byte: i64) {
    for value in plan.values.iter_mut().filter(|value| value.root == output) {
        value.root = on;
        value.offset += byte / width(value.dtype);
    }
    plan.values[output as usize].storage_bytes = 0;
}

/// The first dim split into ranks and what each has of it.
fn split(shape: &[i64], strides: &[i64], ranks: i64) -> (Vec<i64>, Vec<i64>) {
    let each = shape[0] / ranks;
    let mut by_row = vec![ranks, each];
    by_row.extend(&shape[1..]);
    let mut steps = vec![each * strides[0]];
    steps.extend(strides);
    (by_row, steps)
}

/// Strides of contiguous pieces, one in each row of a bucket.
fn spread(by_row: &[i64], row: i64) -> Vec<i64> {
    let mut strides = emit::contiguous(by_row);
    strides[0] = row;
    strides
}

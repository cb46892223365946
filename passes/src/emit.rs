//! Instructions and values that passes add, and the recorder where it rewrites a plan.

use hashbrown::HashSet;
use rote_plans::{Arg, Def, Instr, NONE, Plan, Range, Value, ValueId};

use super::effects::{outs, root, text};

/// The ops of [`allocate`] and [`copy`].
pub const COPY: &[(&str, &str)] = &[(EMPTY, ""), (COPY_, "")];
const EMPTY: &str = "aten::empty_strided";
const COPY_: &str = "aten::copy_";

/// A list of integers in the pool.
pub fn dims(plan: &mut Plan, dims: &[i64]) -> Range {
    let start = plan.dims.len() as u32;
    plan.dims.extend_from_slice(dims);
    Range {
        start,
        len: dims.len() as u32,
    }
}

/// The strides of a contiguous tensor.
pub fn contiguous(shape: &[i64]) -> Vec<i64> {
    let mut strides = vec![1; shape.len()];
    for i in (1..shape.len()).rev() {
        strides[i - 1] = strides[i] * shape[i].max(1);
    }
    strides
}

/// Whether strides are those of a contiguous tensor; where a dim has one element they
/// do not matter.
pub fn is_contiguous(shape: &[i64], strides: &[i64]) -> bool {
    let mut dims = shape.iter().zip(strides).zip(contiguous(shape));
    dims.all(|((size, stride), expected)| *size == 1 || *stride == expected)
}

/// A new value on the storage of another, of its element type; [`view`] makes it.
/// `offset` is counted in elements from where the root's data starts.
pub fn piece(
    plan: &mut Plan,
    like: ValueId,
    shape: &[i64],
    strides: &[i64],
    offset: i64,
) -> ValueId {
    let (shape, strides) = (dims(plan, shape), dims(plan, strides));
    let value = Value {
        def: Def::Instr(0),
        shape,
        strides,
        offset,
        storage_bytes: 0,
        last_use: NONE,
        ..plan.values[like as usize]
    };
    plan.values.push(value);
    plan.values.len() as ValueId - 1
}

/// A new contiguous value on a storage of its own, of the element type and on
/// the device of another.
pub fn storage(plan: &mut Plan, like: ValueId, shape: &[i64]) -> ValueId {
    let value = plan.values.len() as ValueId;
    let strides = contiguous(shape);
    piece(plan, like, shape, &strides, 0);
    let width = plan.values[like as usize].dtype.bytes().unwrap_or(0);
    let made = &mut plan.values[value as usize];
    made.root = value;
    made.storage_bytes = shape.iter().product::<i64>().unsigned_abs() * width;
    value
}

/// Allocates a root.
pub fn allocate(plan: &mut Plan, value: ValueId) -> Instr {
    let meta = plan.values[value as usize];
    let args = [
        Arg::Ints(meta.shape),
        Arg::Ints(meta.strides),
        Arg::DType(meta.dtype),
        Arg::None,
        Arg::Device(meta.device),
        Arg::None,
    ];
    local(plan, EMPTY, &args, &[value], &[])
}

/// Looks at the storage of a value's root.
pub fn view(plan: &Plan, out: ValueId) -> Instr {
    Instr::View {
        base: root(plan, out),
        out,
    }
}

/// Copies the elements of one value to another of the same shape.
pub fn copy(plan: &mut Plan, to: ValueId, from: ValueId) -> Instr {
    let args = [Arg::Value(to), Arg::Value(from), Arg::Bool(false)];
    local(plan, COPY_, &args, &[NONE], &[to])
}

/// An op without an overload name. `writes`: those of the arguments that it writes.
fn local(plan: &mut Plan, op: &str, args: &[Arg], outs: &[u32], writes: &[u32]) -> Instr {
    let (op, overload) = (text(plan, op), text(plan, ""));
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
        grad: false,
    }
}

/// Says of every value which instruction makes it: the first that has it among
/// its results.
pub fn define(plan: &mut Plan) {
    let mut defined = HashSet::new();
    for i in 0..plan.instrs.len() {
        for out in outs(plan, &plan.instrs[i]) {
            let def = &mut plan.values[out as usize].def;
            if matches!(def, Def::Instr(_)) && defined.insert(out) {
                *def = Def::Instr(i as u32);
            }
        }
    }
}

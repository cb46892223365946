//! Running an op on whole tensors, and lookups on a shard's part of a table.

use crate::samples::Values;
use rote_propagation::{Arg, Lookup, Query};

use super::draw::{Rng, whole};
use super::host::{HostTensor, Numbers};
use super::kernels::{Kernels, Ran, Value};

/// Counts indices from a shard's first row; says which lie outside of it.
pub(super) fn look_up(indices: &mut HostTensor, lookup: Lookup) -> HostTensor {
    let mut outside = indices.clone();
    if let (Numbers::Whole(x), Numbers::Whole(out)) = (&mut indices.numbers, &mut outside.numbers) {
        for (x, out) in x.iter_mut().zip(out) {
            let local = x.wrapping_sub(lookup.from as i64);
            let inside = (0..lookup.rows as i64).contains(&local);
            *x = if inside { local } else { 0 };
            *out = i64::from(!inside);
        }
    }
    outside
}

/// Zeroes what was looked up outside of the shard.
pub(super) fn clear(output: &mut HostTensor, outside: &HostTensor, dim: usize) {
    let shape = &output.meta.shape;
    let inner_dims = dim + outside.meta.shape.len();
    let inner = shape.iter().skip(inner_dims).product::<u64>() as usize;
    let count = outside.len();
    let Numbers::Whole(outside) = &outside.numbers else {
        return;
    };
    let at = |i: usize| count > 0 && outside[i / inner.max(1) % count] != 0;
    match &mut output.numbers {
        Numbers::Real(x) => (0..x.len()).filter(|i| at(*i)).for_each(|i| x[i] = 0.0),
        Numbers::Complex(x) => (0..x.len())
            .filter(|i| at(*i))
            .for_each(|i| x[i] = [0.0; 2]),
        Numbers::Whole(x) => (0..x.len()).filter(|i| at(*i)).for_each(|i| x[i] = 0),
    }
}

/// Whether an op that may draw random numbers does so with these arguments: the
/// same call gives other results. Few elements may agree by chance.
pub(super) fn draws(
    op: &str,
    args: &[Arg],
    values: &[Values],
    kernels: &mut dyn Kernels,
    outputs: usize,
) -> bool {
    let mut run = || -> Option<Vec<HostTensor>> {
        let ran = try_once(op, args, values, kernels).ok()?;
        Some(ran.outputs.into_iter().flatten().take(outputs).collect())
    };
    let Some(first) = run() else { return true };
    let elements: usize = first.iter().map(HostTensor::len).sum();
    elements < 16 || (0..3).any(|_| run().as_ref() != Some(&first))
}

pub(super) fn try_once(
    op: &str,
    args: &[Arg],
    values: &[Values],
    kernels: &mut dyn Kernels,
) -> Result<Ran, String> {
    let mut rng = Rng::new(&[0]);
    let query = Query { op, args };
    let metas: Vec<_> = query.inputs().filter_map(|(_, s)| s.meta.clone()).collect();
    if metas.len() != values.len() {
        return Err(format!(
            "{} tensors, values for {}",
            metas.len(),
            values.len()
        ));
    }
    let wholes: Option<Vec<_>> = (metas.iter().zip(values))
        .map(|(meta, values)| whole(meta, *values, &mut rng, false))
        .collect();
    let wholes = wholes.ok_or("no arithmetic for these dtypes")?;
    run_whole(op, args, &wholes, kernels)
}

/// Runs an op with tensors in place of those among its arguments.
pub(super) fn run_whole(
    op: &str,
    args: &[Arg],
    tensors: &[HostTensor],
    kernels: &mut dyn Kernels,
) -> Result<Ran, String> {
    let mut rest = tensors.iter();
    let values: Vec<Value<'_>> = (args.iter())
        .map(|arg| {
            Ok(match arg {
                Arg::Complex(..) | Arg::Complexes(_) => {
                    return Err("complex numbers among the arguments".to_owned());
                }
                Arg::Tensor(_) => rest.next().map_or(Value::None, Value::Tensor),
                Arg::Tensors(list) => {
                    let entries = list.iter().map(|e| e.as_ref().and_then(|_| rest.next()));
                    Value::Tensors(entries.collect())
                }
                Arg::Int(n) => Value::Int(*n),
                Arg::Ints(n) => Value::Ints(n),
                Arg::Bool(b) => Value::Bool(*b),
                Arg::Float(x) => Value::Float(*x),
                Arg::Floats(x) => Value::Floats(x),
                Arg::Text(text) => Value::Text(text),
                Arg::DType(dtype) => Value::DType(*dtype),
                Arg::None => Value::None,
            })
        })
        .collect::<Result<_, String>>()?;
    kernels.run(op, &values)
}

//! Pooling and its gradients: windows over the last dims, every batch entry
//! and channel on its own (`_ops/_math_ops.py`; sizes as in
//! `aten/src/ATen/native/Pool.h`).

use super::super::error::PropagationError;
use super::super::promote::{Class, class};
use super::super::rule::{Need, Query, Rule};
use super::super::spec::TensorMeta;
use super::einsum::{self, Operand, Output};
use rote_plans::DType;

/// An op that pools over this many dims.
#[derive(Clone, Copy, Debug)]
pub(in super::super) struct Kind {
    dims: usize,
    form: Form,
}

#[derive(Clone, Copy, Debug)]
enum Form {
    /// `(self, kernel_size, stride, padding, ceil_mode, ..)`
    Average,
    /// `(self, kernel_size, stride, padding, dilation, ceil_mode)`: values and
    /// indices within a channel.
    Maximum,
    /// `(self, output_size)`
    AdaptiveAverage,
    /// `(self, output_size)`: values and indices.
    AdaptiveMaximum,
    /// `(self, kernel_size, output_size, random_samples)`: values and indices.
    Fractional,
    /// `(self, indices, output_size, ..)`
    Unpool,
    /// A gradient: `(grad_output, self, ..)`, so many arguments at most, with indices
    /// at a position.
    Backward { most: usize, indices: Option<usize> },
}

const fn pool(dims: usize, form: Form) -> Kind {
    Kind { dims, form }
}

const fn backward(dims: usize, most: usize, indices: Option<usize>) -> Kind {
    pool(dims, Form::Backward { most, indices })
}

#[rustfmt::skip]
pub(super) const OPS: &[(&str, Kind)] = &[
    ("aten::avg_pool1d", pool(1, Form::Average)),
    ("aten::avg_pool2d", pool(2, Form::Average)),
    ("aten::avg_pool3d", pool(3, Form::Average)),
    ("aten::max_pool1d_with_indices", pool(1, Form::Maximum)),
    ("aten::max_pool2d_with_indices", pool(2, Form::Maximum)),
    ("aten::max_pool3d_with_indices", pool(3, Form::Maximum)),
    ("aten::adaptive_avg_pool1d", pool(1, Form::AdaptiveAverage)),
    ("aten::_adaptive_avg_pool2d", pool(2, Form::AdaptiveAverage)),
    ("aten::_adaptive_avg_pool3d", pool(3, Form::AdaptiveAverage)),
    ("aten::adaptive_max_pool1d", pool(1, Form::AdaptiveMaximum)),
    ("aten::adaptive_max_pool2d", pool(2, Form::AdaptiveMaximum)),
    ("aten::adaptive_max_pool3d", pool(3, Form::AdaptiveMaximum)),
    ("aten::fractional_max_pool2d", pool(2, Form::Fractional)),
    ("aten::fractional_max_pool3d", pool(3, Form::Fractional)),
    ("aten::max_unpool2d", pool(2, Form::Unpool)),
    ("aten::max_unpool3d", pool(3, Form::Unpool)),
    ("aten::avg_pool2d_backward", backward(2, 8, None)),
    ("aten::avg_pool3d_backward", backward(3, 8, None)),
    ("aten::_adaptive_avg_pool2d_backward", backward(2, 2, None)),
    ("aten::_adaptive_avg_pool3d_backward", backward(3, 2, None)),
    ("aten::adaptive_max_pool2d_backward", backward(2, 3, Some(2))),
    ("aten::adaptive_max_pool3d_backward", backward(3, 3, Some(2))),
    ("aten::max_pool2d_with_indices_backward", backward(2, 8, Some(7))),
    ("aten::max_pool3d_with_indices_backward", backward(3, 8, Some(7))),
];

pub(super) fn rule(kind: Kind, query: &Query<'_>) -> Result<Rule, PropagationError> {
    let Kind { dims: count, form } = kind;
    let first = query.tensor(0)?;
    // Places have no letters; an input of one entry has no batch.
    let dims = match first.shape.len().checked_sub(count) {
        Some(2) => &"nc..."[..count + 2],
        Some(1) => &"c..."[..count + 1],
        _ => {
            let expected = format!("a tensor of {} or {} dims", count + 1, count + 2);
            return Err(query.wrong(0, expected, first.to_string()));
        }
    };
    let lead = first.shape.len() - count;
    let mut inputs = vec![Operand::new(0, first, dims)];
    let (most, places): (usize, Vec<u64>) = match form {
        Form::Average => (7, windows(query, &first.shape[lead..], None)?),
        Form::Maximum => (6, windows(query, &first.shape[lead..], Some(4))?),
        Form::AdaptiveAverage | Form::AdaptiveMaximum => (2, sizes(query, 1, count)?),
        Form::Unpool => {
            inputs.push(Operand::new(1, query.tensor(1)?, dims));
            (5, sizes(query, 2, count)?)
        }
        Form::Fractional => {
            let samples = if lead == 2 { "nc." } else { ".c." };
            inputs.push(Operand::new(3, query.tensor(3)?, samples));
            (4, fractions(query, &first.shape[lead..])?)
        }
        Form::Backward { most, indices } => {
            let input = query.tensor(1)?;
            inputs.push(Operand::new(1, input, dims));
            if let Some(at) = indices {
                let indices = query.tensor(at)?;
                if indices.shape != first.shape {
                    let expected = format!("indices of shape {:?}", first.shape);
                    return Err(query.wrong(at, expected, indices.to_string()));
                }
                inputs.push(Operand::new(at, indices, dims));
            }
            let places = input.shape.get(lead..).unwrap_or_default();
            (most, places.to_vec())
        }
    };
    query.arity(inputs.len(), most)?;
    einsum::check(query, &inputs)?;
    let mut shape = first.shape[..lead].to_vec();
    shape.extend(places);
    let values = TensorMeta {
        dtype: first.dtype,
        shape,
    };
    let mut outputs = vec![Output::new(values.clone(), dims)];
    if let Form::Maximum | Form::AdaptiveMaximum | Form::Fractional = form {
        let mut indices = values;
        indices.dtype = DType::I64;
        outputs.push(Output::new(indices, dims));
    }
    let linear: &[usize] = match form {
        Form::Maximum | Form::AdaptiveMaximum | Form::Fractional => &[],
        // A mean of integers is rounded.
        _ if class(first.dtype) < Class::Float => &[],
        _ => &[0],
    };
    // An empty batch is pooled, a tensor without channels is refused.
    let letters = [("n", Need::Nothing), ("c", Need::Filled)];
    let letters = letters.into_iter().filter(|(l, _)| dims.contains(l));
    Ok(einsum::rule(outputs, &inputs, letters, linear))
}

/// One size for each dim.
pub(super) fn sizes(
    query: &Query<'_>,
    i: usize,
    count: usize,
) -> Result<Vec<u64>, PropagationError> {
    let given = query.list(i)?;
    let sizes: Option<Vec<u64>> = given.iter().map(|n| u64::try_from(*n).ok()).collect();
    match sizes {
        Some(sizes) if sizes.len() == count => Ok(sizes),
        _ => Err(query.wrong(i, format!("{count} sizes"), format!("{given:?}"))),
    }
}

/// The output's sizes, for which the kernels must fit.
fn fractions(query: &Query<'_>, places: &[u64]) -> Result<Vec<u64>, PropagationError> {
    let (kernel, wanted) = (
        sizes(query, 1, places.len())?,
        sizes(query, 2, places.len())?,
    );
    // The kernels of three dims also leave one place free.
    let free = u64::from(places.len() == 3);
    for ((kernel, wanted), size) in kernel.iter().zip(&wanted).zip(places) {
        let reach = wanted.saturating_add(*kernel).saturating_add(free);
        if *kernel == 0 || *wanted == 0 || reach - 1 > *size {
            let expected = format!("kernels and sizes that fit {places:?}");
            return Err(query.wrong(2, expected, format!("{kernel} and {wanted}")));
        }
    }
    Ok(wanted)
}

/// How many windows fit along each dim: kernel, stride and padding stand at 1 to
/// 3, then the dilation if there is one, then whether to round up.
fn windows(
    query: &Query<'_>,
    places: &[u64],
    dilation: Option<usize>,
) -> Result<Vec<u64>, PropagationError> {
    let per_dim = |i: usize, least: i64, default: &[i64]| {
        let given = query.ints(i)?.filter(|g| !g.is_empty());
        let found = given.unwrap_or(default).to_vec();
        let fits = found.len() == 1 || found.len() == places.len();
        if !fits || found.iter().any(|n| *n < least) {
            let expected = format!("1 or {} numbers from {least}", places.len());
            return Err(query.wrong(i, expected, format!("{found:?}")));
        }
        Ok((0..places.len())
            .map(|d| found[d % found.len()])
            .collect::<Vec<i64>>())
    };
    let kernel = per_dim(1, 1, &[])?;
    let stride = per_dim(2, 1, &kernel)?;
    let padding = per_dim(3, 0, &[0])?;
    let apart = dilation.map_or_else(|| Ok(vec![1; places.len()]), |i| per_dim(i, 1, &[1]))?;
    let up = query.flag(dilation.map_or(4, |i| i + 1))?;
    let mut windows = Vec::with_capacity(places.len());
    for (d, size) in places.iter().enumerate() {
        let [kernel, stride, padding, apart] =
            [kernel[d], stride[d], padding[d], apart[d]].map(i128::from);
        let reach = apart * (kernel - 1) + 1;
        if padding > reach / 2 {
            let expected = format!("at most half of the kernel, {}", reach / 2);
            return Err(query.wrong(3, expected, padding.to_string()));
        }
        let size = i128::from(*size);
        let last = size + 2 * padding - reach + if up { stride - 1 } else { 0 };
        let mut count = last.div_euclid(stride) + 1;
        // A window must not start in the padding at the end.
        if up && (count - 1) * stride >= size + padding {
            count -= 1;
        }
        let count = u64::try_from(count).ok().filter(|n| *n > 0 && *n < 1 << 58);
        windows.push(count.ok_or_else(|| {
            query.wrong(
                1,
                format!("a kernel that fits a dim of {size}"),
                kernel.to_string(),
            )
        })?);
    }
    Ok(windows)
}

#[cfg(test)]
mod tests {
    use super::windows;
    use crate::{Arg, Query};

    /// Sizes that torch 2.15 gives.
    #[test]
    fn as_many_windows_as_in_torch() {
        for (kernel, stride, padding, dilation, up, size, expected) in [
            (3, 2, 1, 1, false, 7, 4),
            (3, 2, 0, 1, true, 8, 4),
            (2, 2, 1, 1, true, 7, 4),
            (2, 3, 1, 1, true, 5, 2),
            (3, 1, 1, 2, false, 6, 4),
            (3, 3, 0, 1, false, 8, 2),
        ] {
            let list = |n: i64| Arg::Ints(vec![n]);
            let args = [
                Arg::None,
                list(kernel),
                list(stride),
                list(padding),
                list(dilation),
                Arg::Bool(up),
            ];
            let query = Query {
                op: "aten::max_pool1d_with_indices",
                args: &args,
            };
            assert_eq!(windows(&query, &[size], Some(4)), Ok(vec![expected]));
        }
    }
}

//! Convolutions and their gradients, from their einsum equation.
//!
//! Batch and output channels are free, input channels are contracted. Channels
//! of several groups stay whole: a shard would need a number of groups of its
//! own. Where windows neither overlap nor leave gaps, places are independent
//! too (`_ops/_conv_ops.py`, which shards the last dim of the plain form only).

use super::super::error::PropagationError;
use super::super::rule::{Need, Query, Rule};
use super::super::spec::TensorMeta;
use super::einsum::{self, Operand, Output};

#[derive(Clone, Copy, Debug)]
pub(in super::super) enum Kind {
    /// `(input, weight, bias, ..)`
    Forward,
    /// `(grad_output, input, weight, bias_sizes, .., output_mask)`: gradients of
    /// input, weight and bias as far as the mask wants them. The sizes of the
    /// bias are those of the local one.
    Backward,
}

pub(super) const OPS: &[(&str, Kind)] = &[
    ("aten::convolution", Kind::Forward),
    ("aten::convolution_backward", Kind::Backward),
];

/// The letters of up to three dims of places; `i` and `o` are channels.
const INPUT: &str = "nixyz";
const OUTPUT: &str = "noxyz";
/// Kernel dims are whole.
const WEIGHT: &str = "oi...";
const TRANSPOSED: &str = "io...";

pub(super) fn rule(kind: Kind, query: &Query<'_>) -> Result<Rule, PropagationError> {
    let windows = Windows::read(kind, query)?;
    let ndim = windows.ndim();
    let (input, weight) = (windows.input, windows.weight);
    let output = windows.output(query)?;
    let weight_dims = &match windows.transposed {
        true => TRANSPOSED,
        false => WEIGHT,
    }[..ndim];
    let letters = windows.letters(&output);
    Ok(match kind {
        Kind::Forward => {
            query.arity(9, 9)?;
            let mut inputs = vec![
                Operand::new(0, input, &INPUT[..ndim]),
                Operand::new(1, weight, weight_dims),
            ];
            if let Some(bias) = query.optional_tensor(2)? {
                if bias.shape != output.shape[1..2] {
                    let expected = format!("a tensor of {} numbers", output.shape[1]);
                    return Err(query.wrong(2, expected, bias.to_string()));
                }
                let mut bias = Operand::new(2, bias, "o");
                bias.added = true;
                inputs.push(bias);
            }
            let outputs = vec![Output::new(output, &OUTPUT[..ndim])];
            einsum::rule(outputs, &inputs, letters, &[0, 1])
        }
        Kind::Backward => {
            query.arity(11, 11)?;
            let grad = query.tensor(0)?;
            if grad.shape != output.shape {
                let expected = format!("the convolution's output {output}");
                return Err(query.wrong(0, expected, grad.to_string()));
            }
            let mask = query.list(10)?;
            if mask.len() != 3 {
                return Err(query.wrong(10, "3 truth values", format!("{mask:?}")));
            }
            let bias = TensorMeta {
                dtype: grad.dtype,
                shape: output.shape[1..2].to_vec(),
            };
            let made = [
                (input.clone(), &INPUT[..ndim], [0, 2].as_slice()),
                (weight.clone(), weight_dims, &[0, 1]),
                (bias, "o", &[0]),
            ];
            let wanted = made.into_iter().zip(mask).filter(|(_, m)| **m != 0);
            let outputs = wanted.map(|((meta, dims, of), _)| Output {
                meta,
                dims,
                of: Some(of),
            });
            let inputs = [
                Operand::new(0, grad, &OUTPUT[..ndim]),
                Operand::new(1, input, &INPUT[..ndim]),
                Operand::new(2, weight, weight_dims),
            ];
            einsum::rule(outputs.collect(), &inputs, letters, &[0, 1, 2])
        }
    })
}

/// A convolution's tensors and the places of its windows.
struct Windows<'a> {
    input: &'a TensorMeta,
    weight: &'a TensorMeta,
    /// Where the stride stands among the arguments.
    at: usize,
    stride: Vec<i64>,
    padding: Vec<i64>,
    dilation: Vec<i64>,
    transposed: bool,
    more: Vec<i64>,
    groups: u64,
}

impl<'a> Windows<'a> {
    fn read(kind: Kind, query: &Query<'a>) -> Result<Self, PropagationError> {
        let (first, at) = match kind {
            Kind::Forward => (0, 3),
            Kind::Backward => (1, 4),
        };
        let (input, weight) = (query.tensor(first)?, query.tensor(first + 1)?);
        let ndim = input.shape.len();
        if !(3..=5).contains(&ndim) {
            let expected = "a tensor of 3 to 5 dims";
            return Err(query.wrong(first, expected, input.to_string()));
        }
        if weight.shape.len() != ndim {
            let expected = format!("a tensor of {ndim} dims");
            return Err(query.wrong(first + 1, expected, weight.to_string()));
        }
        let per_dim = |i: usize, least: i64| -> Result<Vec<i64>, PropagationError> {
            let given = query.list(i)?;
            let fits = given.len() == 1 || given.len() == ndim - 2;
            if !fits || given.iter().any(|n| *n < least) {
                let expected = format!("1 or {} numbers from {least}", ndim - 2);
                return Err(query.wrong(i, expected, format!("{given:?}")));
            }
            Ok((0..ndim - 2).map(|d| given[d % given.len()]).collect())
        };
        let groups = query.int(at + 5, None)?;
        let windows = Windows {
            input,
            weight,
            at,
            stride: per_dim(at, 1)?,
            padding: per_dim(at + 1, 0)?,
            dilation: per_dim(at + 2, 1)?,
            transposed: query.flag(at + 3)?,
            more: per_dim(at + 4, 0)?,
            groups: u64::try_from(groups).unwrap_or(0),
        };
        let per_group = if windows.transposed { 0 } else { 1 };
        let channels = match windows.transposed {
            true => Some(weight.shape[per_group]),
            false => weight.shape[per_group].checked_mul(windows.groups),
        };
        if channels != Some(input.shape[1]) {
            let expected = format!(
                "a weight for {} channels of {groups} groups",
                input.shape[1]
            );
            return Err(query.wrong(first + 1, expected, weight.to_string()));
        }
        if windows.groups == 0 || weight.shape[0] % windows.groups != 0 {
            let expected = format!("a number that divides {}", weight.shape[0]);
            return Err(query.wrong(at + 5, expected, groups.to_string()));
        }
        Ok(windows)
    }

    fn ndim(&self) -> usize {
        self.input.shape.len()
    }

    /// `torch/_meta_registrations.py`, `calc_conv_nd_return_shape`.
    fn output(&self, query: &Query<'_>) -> Result<TensorMeta, PropagationError> {
        let channels = match self.transposed {
            true => self.weight.shape[1].saturating_mul(self.groups),
            false => self.weight.shape[0],
        };
        let mut shape = vec![self.input.shape[0], channels];
        for dim in 0..self.ndim() - 2 {
            let wide = |n: u64| i128::from(n);
            let (size, kernel) = (
                wide(self.input.shape[dim + 2]),
                wide(self.weight.shape[dim + 2]),
            );
            let [stride, padding, dilation, more] =
                [&self.stride, &self.padding, &self.dilation, &self.more]
                    .map(|p| i128::from(p[dim]));
            let reach = dilation * (kernel - 1);
            let places = match self.transposed {
                true => (size - 1) * stride - 2 * padding + reach + more + 1,
                false => (size + 2 * padding - reach - 1).div_euclid(stride) + 1,
            };
            let places = u64::try_from(places)
                .ok()
                .filter(|n| *n > 0 && *n < 1 << 58);
            shape.push(places.ok_or_else(|| {
                let expected = "windows that fit the input";
                query.wrong(self.at, expected, format!("a kernel of {kernel} on {size}"))
            })?);
        }
        Ok(TensorMeta {
            dtype: self.input.dtype,
            shape,
        })
    }

    /// The letters that may be sharded.
    fn letters(&self, output: &TensorMeta) -> Vec<(&'static str, Need)> {
        let mut letters = vec![("n", Need::Filled)];
        if self.groups == 1 {
            letters.extend([("o", Need::Filled), ("i", Need::Filled)]);
        }
        for dim in 0..self.ndim() - 2 {
            let kernel = self.weight.shape[dim + 2];
            let apart = u64::try_from(self.stride[dim]) == Ok(kernel)
                && (self.padding[dim], self.dilation[dim], self.more[dim]) == (0, 1, 0);
            let (few, many) = match self.transposed {
                true => (self.input.shape[dim + 2], output.shape[dim + 2]),
                false => (output.shape[dim + 2], self.input.shape[dim + 2]),
            };
            // A shard must end where a window does.
            if apart && few > 0 && few.checked_mul(kernel) == Some(many) {
                letters.push((&INPUT[dim + 2..dim + 3], Need::Divides(few)));
            }
        }
        letters
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::rule::{Arg, Query};
    use super::super::super::spec::Mesh;
    use super::{Kind, rule};

    /// Sizes that torch 2.15 gives.
    #[test]
    fn outputs_have_the_sizes_of_torch() {
        let mesh = Mesh::parse("2");
        for (args, shape) in [
            (
                "f32[2,4,7,9] f32[6,4,3,2] none [2,1] [1,0] [1,2] false [0,0] 1",
                "f32[2,6,4,7]",
            ),
            (
                "f32[2,4,9] f32[6,2,3] none [2] [0] [1] false [0] 2",
                "f32[2,6,4]",
            ),
            (
                "f32[2,4,5,6] f32[4,3,3,3] none [2,3] [1,0] [1,1] true [1,2] 1",
                "f32[2,3,10,20]",
            ),
            (
                "f32[2,4,5] f32[4,3,2] none [2] [0] [1] true [0] 2",
                "f32[2,6,10]",
            ),
        ] {
            let args = args
                .split(' ')
                .map(|a| Arg::parse(a, mesh.as_ref().ok()?).ok());
            let args: Option<Vec<Arg>> = args.collect();
            let op = "aten::convolution";
            let found = args.and_then(|args| rule(Kind::Forward, &Query { op, args: &args }).ok());
            assert_eq!(
                found.map(|r| r.outputs[0].to_string()).as_deref(),
                Some(shape)
            );
        }
    }
}

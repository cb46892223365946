//! Upsampling and sampling at grids, with their gradients
//! (`_ops/_math_ops.py`).

use super::super::error::PropagationError;
use super::super::rule::{Need, Query, Rule};
use super::super::spec::TensorMeta;
use super::MOVED;
use super::einsum::{self, Operand, Output};
use super::pool::sizes;

#[derive(Clone, Copy, Debug)]
pub(in super::super) enum Kind {
    /// `(self, output_size, ..)`: new sizes of the last dims.
    Up { dims: usize, copies: bool },
    /// `(grad_output, output_size, input_size, ..)`. The input's size is that of
    /// the local one.
    UpBackward { dims: usize },
    /// `(input, grid, interpolation_mode, padding_mode, align_corners)`
    Sample { dims: usize },
    /// `(grad_output, input, grid, interpolation_mode, padding_mode,
    /// align_corners, output_mask)`: the gradient of the grid is always made.
    SampleBackward { dims: usize },
}

const fn nearest(dims: usize) -> Kind {
    Kind::Up { dims, copies: true }
}

const fn blend(dims: usize) -> Kind {
    Kind::Up {
        dims,
        copies: false,
    }
}

const fn backward(dims: usize) -> Kind {
    Kind::UpBackward { dims }
}

#[rustfmt::skip]
pub(super) const OPS: &[(&str, Kind)] = &[
    ("aten::upsample_nearest1d", nearest(1)),
    ("aten::upsample_nearest2d", nearest(2)),
    ("aten::upsample_nearest3d", nearest(3)),
    ("aten::_upsample_nearest_exact1d", nearest(1)),
    ("aten::_upsample_nearest_exact2d", nearest(2)),
    ("aten::_upsample_nearest_exact3d", nearest(3)),
    ("aten::upsample_linear1d", blend(1)),
    ("aten::upsample_bilinear2d", blend(2)),
    ("aten::upsample_bicubic2d", blend(2)),
    ("aten::upsample_trilinear3d", blend(3)),
    ("aten::_upsample_bilinear2d_aa", blend(2)),
    ("aten::_upsample_bicubic2d_aa", blend(2)),
    ("aten::_upsample_lanczos2d_aa", blend(2)),
    ("aten::upsample_nearest1d_backward", backward(1)),
    ("aten::upsample_nearest2d_backward", backward(2)),
    ("aten::upsample_nearest3d_backward", backward(3)),
    ("aten::_upsample_nearest_exact1d_backward", backward(1)),
    ("aten::_upsample_nearest_exact2d_backward", backward(2)),
    ("aten::_upsample_nearest_exact3d_backward", backward(3)),
    ("aten::upsample_linear1d_backward", backward(1)),
    ("aten::upsample_bilinear2d_backward", backward(2)),
    ("aten::upsample_bicubic2d_backward", backward(2)),
    ("aten::upsample_trilinear3d_backward", backward(3)),
    ("aten::_upsample_bilinear2d_aa_backward", backward(2)),
    ("aten::_upsample_bicubic2d_aa_backward", backward(2)),
    ("aten::_upsample_lanczos2d_aa_backward", backward(2)),
    ("aten::grid_sampler_2d", Kind::Sample { dims: 2 }),
    ("aten::grid_sampler_3d", Kind::Sample { dims: 3 }),
    ("aten::grid_sampler_2d_backward", Kind::SampleBackward { dims: 2 }),
    ("aten::grid_sampler_3d_backward", Kind::SampleBackward { dims: 3 }),
];

pub(super) fn rule(kind: Kind, query: &Query<'_>) -> Result<Rule, PropagationError> {
    match kind {
        Kind::Up { dims, copies } => {
            query.arity(2, 3 + dims)?;
            let input = ranked(query, 0, 2 + dims)?;
            let mut shape = input.shape[..2].to_vec();
            shape.extend(sizes(query, 1, dims)?);
            let output = TensorMeta {
                dtype: input.dtype,
                shape,
            };
            // Integers are rounded, which is not linear.
            let rule = scaled(input, output, dims, !copies && !input.dtype.is_integer());
            Ok(match copies {
                true => moved(rule),
                false => rule,
            })
        }
        Kind::UpBackward { dims } => {
            query.arity(3, 4 + dims)?;
            let grad = ranked(query, 0, 2 + dims)?;
            let (from, to) = (sizes(query, 1, dims)?, sizes(query, 2, 2 + dims)?);
            if grad.shape[2..] != from || grad.shape[..2] != to[..2] {
                let expected = format!("a tensor of the output's size, {:?} {from:?}", &to[..2]);
                return Err(query.wrong(0, expected, grad.to_string()));
            }
            let output = TensorMeta {
                dtype: grad.dtype,
                shape: to,
            };
            Ok(scaled(grad, output, dims, true))
        }
        Kind::Sample { dims } => {
            query.arity(5, 5)?;
            let (input, grid) = (query.tensor(0)?, query.tensor(1)?);
            let inputs = [
                Operand::new(0, input, in_dims(dims)),
                Operand::new(1, grid, grid_dims(dims)),
            ];
            check(query, &inputs, dims)?;
            let mut shape = input.shape[..2].to_vec();
            shape.extend(&grid.shape[1..=dims]);
            let output = TensorMeta {
                dtype: input.dtype,
                shape,
            };
            let outputs = vec![Output::new(output, out_dims(dims))];
            Ok(einsum::rule(outputs, &inputs, letters(dims), &[0]))
        }
        Kind::SampleBackward { dims } => {
            query.arity(7, 7)?;
            let (grad, input, grid) = (query.tensor(0)?, query.tensor(1)?, query.tensor(2)?);
            let inputs = [
                Operand::new(1, input, in_dims(dims)),
                Operand::new(2, grid, grid_dims(dims)),
                Operand::new(0, grad, out_dims(dims)),
            ];
            check(query, &inputs, dims)?;
            let [input_operand, grid_operand, grad_operand] = inputs;
            let inputs = [grad_operand, input_operand, grid_operand];
            let mut outputs = Vec::with_capacity(2);
            let mask = query.list(6)?;
            if mask.len() != 2 {
                return Err(query.wrong(6, "2 truth values", format!("{mask:?}")));
            }
            if mask[0] != 0 {
                outputs.push(Output {
                    meta: input.clone(),
                    dims: in_dims(dims),
                    of: Some(&[0, 2]),
                });
            }
            outputs.push(Output::new(grid.clone(), grid_dims(dims)));
            Ok(einsum::rule(outputs, &inputs, letters(dims), &[0, 1]))
        }
    }
}

/// A change of the places' number: batch and channels are apart.
fn scaled(input: &TensorMeta, output: TensorMeta, dims: usize, linear: bool) -> Rule {
    let dims = &"nc..."[..2 + dims];
    let inputs = [Operand::new(0, input, dims)];
    let letters = [("n", Need::Filled), ("c", Need::Filled)];
    let linear: &[usize] = if linear { &[0] } else { &[] };
    einsum::rule(vec![Output::new(output, dims)], &inputs, letters, linear)
}

fn moved(mut rule: Rule) -> Rule {
    rule.pass(&MOVED);
    rule
}

fn ranked<'a>(
    query: &Query<'a>,
    i: usize,
    ndim: usize,
) -> Result<&'a TensorMeta, PropagationError> {
    let meta = query.tensor(i)?;
    if meta.shape.len() == ndim {
        return Ok(meta);
    }
    Err(query.wrong(i, format!("a tensor of {ndim} dims"), meta.to_string()))
}

fn in_dims(dims: usize) -> &'static str {
    &"nc..."[..2 + dims]
}

fn out_dims(dims: usize) -> &'static str {
    &"ncxyz"[..2 + dims]
}

fn grid_dims(dims: usize) -> &'static str {
    match dims {
        2 => "nxy.",
        _ => "nxyz.",
    }
}

/// Places of the grid are sampled each on its own.
fn letters(dims: usize) -> impl Iterator<Item = (&'static str, Need)> {
    let all = ["n", "c", "x", "y", "z"].into_iter().take(2 + dims);
    all.map(|letter| (letter, Need::Filled))
}

fn check(query: &Query<'_>, inputs: &[Operand<'_>], dims: usize) -> Result<(), PropagationError> {
    einsum::check(query, inputs)?;
    let (grid, coordinates) = (&inputs[1], inputs[1].meta.shape[1 + dims]);
    if coordinates == dims as u64 {
        return Ok(());
    }
    let expected = format!("a last dim of {dims} coordinates");
    Err(query.wrong(grid.argument, expected, grid.meta.to_string()))
}

//! Matrix products, from their einsum equation.
//!
//! Per letter: a batch letter shards all three tensors, a contracted one both
//! inputs and leaves a partial sum, a free one its input and the output. The
//! product is linear in each input, so one partial input passes while the other
//! is replicated (`_ops/_matrix_ops.py`, `gen_single_dim_einsum_strategies`).

use super::super::error::PropagationError;
use super::super::placement::PartialOp;
use super::super::rule::{Query, R, Rule, partial, shard};
use super::super::spec::TensorMeta;

/// A product of two tensors: their letters and the output's.
#[derive(Clone, Copy, Debug)]
pub(in super::super) struct Product {
    lhs: &'static str,
    rhs: &'static str,
    out: &'static str,
    /// The first argument is added to the product.
    bias: bool,
}

const fn product(lhs: &'static str, rhs: &'static str, out: &'static str, bias: bool) -> Product {
    Product {
        lhs,
        rhs,
        out,
        bias,
    }
}

pub(super) const OPS: &[(&str, Product)] = &[
    ("aten::mm", product("mk", "kn", "mn", false)),
    ("aten::addmm", product("mk", "kn", "mn", true)),
    ("aten::bmm", product("bmk", "bkn", "bmn", false)),
    ("aten::baddbmm", product("bmk", "bkn", "bmn", true)),
    ("aten::mv", product("mk", "k", "m", false)),
    ("aten::dot", product("k", "k", "", false)),
];

pub(super) fn rule(p: Product, query: &Query<'_>) -> Result<Rule, PropagationError> {
    let first = usize::from(p.bias);
    // beta and alpha do not matter: a partial bias and product scale alike.
    query.arity(2 + first, if p.bias { 5 } else { 2 })?;
    let (lhs, rhs) = (query.tensor(first)?, query.tensor(first + 1)?);
    let sizes = [(first, lhs, p.lhs), (first + 1, rhs, p.rhs)];
    for (i, meta, letters) in sizes {
        if meta.shape.len() != letters.len() {
            let expected = format!("a tensor of {} dims", letters.len());
            return Err(query.wrong(i, expected, meta.to_string()));
        }
    }
    let size = |letter: char| {
        sizes
            .iter()
            .find_map(|(_, meta, letters)| letters.find(letter).map(|at| meta.shape[at]))
            .unwrap_or(1)
    };
    for (at, letter) in p.rhs.chars().enumerate() {
        if rhs.shape[at] != size(letter) {
            let expected = format!(
                "dim {at} of size {}, as argument {first} has it",
                size(letter)
            );
            return Err(query.wrong(first + 1, expected, rhs.to_string()));
        }
    }
    let output = TensorMeta {
        dtype: lhs.dtype,
        shape: p.out.chars().map(size).collect(),
    };
    // For each output dim, the bias dim that it comes from.
    let mut from_bias = [None; 3];
    if p.bias {
        let bias = query.tensor(0)?;
        let lead = output.shape.len().checked_sub(bias.shape.len());
        let fits = lead.is_some_and(|lead| {
            (bias.shape.iter().zip(&output.shape[lead..])).all(|(b, o)| b == o || *b == 1)
        });
        let (Some(lead), true) = (lead, fits) else {
            let expected = format!("a tensor that broadcasts to {output}");
            return Err(query.wrong(0, expected, bias.to_string()));
        };
        for (at, size) in bias.shape.iter().enumerate() {
            from_bias[lead + at] = (*size != 1).then_some(at);
        }
    }
    let mut rule = Rule::new(vec![output], 2 + first);
    let mut add = |output, inputs: [_; 2], bias| {
        let [lhs, rhs] = inputs;
        if p.bias {
            rule.add([output, bias, lhs, rhs]);
        } else {
            rule.add([output, lhs, rhs]);
        }
    };
    for letter in ['b', 'm', 'n'] {
        if let Some(dim) = p.out.find(letter) {
            let bias = from_bias[dim].map_or(R, shard);
            let inputs = [p.lhs, p.rhs].map(|letters| letters.find(letter).map_or(R, shard));
            add(shard(dim), inputs, bias);
        }
    }
    if let (Some(l), Some(r)) = (p.lhs.find('k'), p.rhs.find('k')) {
        let sum = partial(PartialOp::Sum);
        add(sum, [shard(l), shard(r)], sum);
    }
    for op in [PartialOp::Sum, PartialOp::Avg] {
        let p = partial(op);
        add(p, [p, R], p);
        add(p, [R, p], p);
    }
    Ok(rule)
}

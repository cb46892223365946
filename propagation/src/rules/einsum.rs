//! The einsum rule: ops whose tensors' dims have letters.
//!
//! What an op computes along a letter is the same for every index of it: batch
//! dims, free dims and contracted dims are the letters that all tensors, some
//! and only inputs have. Sharding a letter shards the tensors that have it and
//! replicates the other inputs; an output without it is a sum over it, partial
//! if one of the inputs that it comes from has it. Where an op is linear in an
//! input, that one may be partial while the others are replicated
//! (`_ops/_matrix_ops.py`, `gen_single_dim_einsum_strategies`).

use super::super::error::PropagationError;
use super::super::placement::PartialOp;
use super::super::rule::{Need, Query, R, Rule, Slot, partial, shard};
use super::super::spec::TensorMeta;

/// A tensor among the arguments.
#[derive(Clone, Copy, Debug)]
pub(super) struct Operand<'a> {
    pub(super) argument: usize,
    pub(super) meta: &'a TensorMeta,
    /// A letter per dim, `.` for one that is compared with no other.
    pub(super) dims: &'a str,
    /// It is added to the first output, and so partial where that is.
    pub(super) added: bool,
}

/// A tensor that the op makes.
#[derive(Clone, Debug)]
pub(super) struct Output<'a> {
    pub(super) meta: TensorMeta,
    /// A letter per dim; letters that no tensor shards may be left out at the
    /// end.
    pub(super) dims: &'a str,
    /// The inputs that it comes from, by position among them; `None` for all.
    pub(super) of: Option<&'a [usize]>,
}

impl<'a> Operand<'a> {
    pub(super) fn new(argument: usize, meta: &'a TensorMeta, dims: &'a str) -> Self {
        Operand {
            argument,
            meta,
            dims,
            added: false,
        }
    }

    fn slot(&self, letters: &str, need: Need) -> Slot {
        let dim = self.dims.find(|l| letters.contains(l));
        dim.map_or(R, |dim| Slot::Shard(dim as u32, need))
    }
}

impl<'a> Output<'a> {
    /// An output that comes from all inputs.
    pub(super) fn new(meta: TensorMeta, dims: &'a str) -> Self {
        Output {
            meta,
            dims,
            of: None,
        }
    }

    fn comes_from(&self, input: usize) -> bool {
        self.of.is_none_or(|of| of.contains(&input))
    }
}

/// Checks that the tensors have the dims that their letters say, of one size
/// per letter.
pub(super) fn check(query: &Query<'_>, inputs: &[Operand<'_>]) -> Result<(), PropagationError> {
    for (i, input) in inputs.iter().enumerate() {
        if input.meta.shape.len() != input.dims.len() {
            let expected = format!("a tensor of {} dims", input.dims.len());
            return Err(query.wrong(input.argument, expected, input.meta.to_string()));
        }
        for (dim, letter) in input.dims.chars().enumerate().filter(|l| l.1 != '.') {
            let first = (inputs[..i].iter())
                .find_map(|other| Some((other, other.dims.find(letter)?)))
                .filter(|(other, at)| other.meta.shape[*at] != input.meta.shape[dim]);
            if let Some((other, at)) = first {
                let (size, argument) = (other.meta.shape[at], other.argument);
                let expected = format!("dim {dim} of size {size}, as argument {argument} has it");
                return Err(query.wrong(input.argument, expected, input.meta.to_string()));
            }
        }
    }
    Ok(())
}

/// The rule for the letters that may be sharded, each with what its shards
/// need, and for the inputs that the op is linear in. Letters that are sharded
/// together stand together.
pub(super) fn rule<'l>(
    outputs: Vec<Output<'_>>,
    inputs: &[Operand<'_>],
    letters: impl IntoIterator<Item = (&'l str, Need)>,
    linear: &[usize],
) -> Rule {
    let metas = outputs.iter().map(|o| o.meta.clone()).collect();
    let mut rule = Rule::new(metas, inputs.len());
    let mut slots = Vec::with_capacity(outputs.len() + inputs.len());
    let sum = partial(PartialOp::Sum);
    for (letters, need) in letters {
        slots.clear();
        let sharded = |letter: char| letters.contains(letter);
        slots.extend(outputs.iter().map(|output| {
            if let Some(dim) = output.dims.find(sharded) {
                return shard(dim);
            }
            let mut sources = (inputs.iter().enumerate())
                .filter(|(i, input)| !input.added && output.comes_from(*i));
            match sources.any(|(_, input)| input.dims.contains(sharded)) {
                true => sum,
                false => R,
            }
        }));
        let first = slots.first().copied();
        slots.extend(inputs.iter().map(|input| match first {
            Some(first) if input.added && first == sum => sum,
            _ => input.slot(letters, need),
        }));
        rule.add(slots.iter().copied());
    }
    for op in [PartialOp::Sum, PartialOp::Avg] {
        let partial = partial(op);
        for at in linear {
            slots.clear();
            let made = outputs.iter().map(|o| match o.comes_from(*at) {
                true => partial,
                false => R,
            });
            slots.extend(made);
            let first = slots.first().copied().unwrap_or(R);
            slots.extend(inputs.iter().enumerate().map(|(i, input)| {
                match (i == *at, input.added) {
                    (true, _) => partial,
                    (false, true) => first,
                    (false, false) => R,
                }
            }));
            rule.add(slots.iter().copied());
        }
    }
    rule
}

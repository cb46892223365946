//! Fused attention and its gradients, from their einsum equations.
//!
//! Batch, heads and, where no causal mask counts them, rows of the query are
//! computed apart; the rest follows from the letters, as which gradients are
//! sums over rows (`_ops/_matrix_ops.py`; shapes as in
//! `torch/_meta_registrations.py`).

use super::super::error::PropagationError;
use super::super::rule::{Need, Query, Rule};
use super::super::spec::TensorMeta;
use super::einsum::{self, Operand, Output};
use rote_plans::DType;

/// The arguments in schema order, and the outputs.
///
/// Tensors have a letter per dim: batch `n`, heads `h` of the query and `g` of
/// key and value, rows `q` of the query and `k` of the key, features `e` and
/// `f`, rows `p` padded to a multiple of 32, `1` for a dim of that size. After
/// `?` the tensor may be absent, after `+` it may broadcast too; `*` is one
/// that all ranks hold alike. Of the other arguments only those that matter
/// here have names.
#[derive(Clone, Copy, Debug)]
pub(in super::super) struct Equation {
    arguments: &'static str,
    outputs: &'static str,
}

const fn eq(arguments: &'static str, outputs: &'static str) -> Equation {
    Equation { arguments, outputs }
}

#[rustfmt::skip]
pub(super) const OPS: &[(&str, Equation)] = &[
    ("aten::_scaled_dot_product_flash_attention", eq(
        "nhqe ngke ngkf _ causal debug _",
        "nhqf nhq seed debug")),
    ("aten::_scaled_dot_product_flash_attention_backward", eq(
        "nhqf nhqe ngke ngkf nhqf nhq ?* ?* _ _ _ causal ?* ?* _",
        "nhqe ngke ngkf")),
    ("aten::_scaled_dot_product_efficient_attention", eq(
        "nhqe nhke nhkf ?nhqk sums _ causal _",
        "nhqf nhp")),
    ("aten::_scaled_dot_product_efficient_attention_backward", eq(
        "nhqf nhqe nhke nhkf ?nhqk nhqf nhp ?* ?* _ wanted causal _",
        "nhqe nhke nhkf nhqk")),
    ("aten::_scaled_dot_product_cudnn_attention", eq(
        "nhqe ngke ngkf ?nhqk sums _ causal _ _",
        "nhqf nhq1")),
    ("aten::_scaled_dot_product_cudnn_attention_backward", eq(
        "nhqf nhqe ngke ngkf nhqf nhq1 ?* ?* ?nhqk ?* ?* _ _ _ causal _",
        "nhqe ngke ngkf")),
    ("aten::_scaled_dot_product_flash_attention_for_cpu", eq(
        "nhqe nhke nhkf _ causal +nhqk _",
        "nhqf nhq")),
    ("aten::_scaled_dot_product_flash_attention_for_cpu_backward", eq(
        "nhqf nhqe nhke nhkf nhqf nhq _ causal +nhqk _",
        "nhqe nhke nhkf")),
];

pub(super) fn rule(equation: Equation, query: &Query<'_>) -> Result<Rule, PropagationError> {
    let words: Vec<&str> = equation.arguments.split(' ').collect();
    let last = words.iter().rposition(|w| w.starts_with('n'));
    query.arity(last.map_or(0, |at| at + 1), words.len())?;
    let at = |name: &str| words.iter().position(|w| *w == name);
    let flag = |name: &str| at(name).map_or(Ok(false), |i| query.flag(i));
    let (causal, debug) = (flag("causal")?, flag("debug")?);

    let mask = at("+nhqk").map_or(Ok(None), |i| query.optional_tensor(i))?;
    let mask_dims = mask.map_or(String::new(), |mask| broadcast("nhqk", mask));
    let mut inputs = Vec::with_capacity(words.len());
    for (i, word) in words.iter().enumerate() {
        let dims = match *word {
            "+nhqk" => mask_dims.as_str(),
            word => word.trim_start_matches('?'),
        };
        let meta = match word.chars().next() {
            Some('n') => Some(query.tensor(i)?),
            Some('?' | '+') => query.optional_tensor(i)?,
            _ => None,
        };
        inputs.extend(meta.map(|meta| Operand::new(i, meta, dims)));
    }
    let named: Vec<_> = (inputs.iter().copied()).filter(|i| i.dims != "*").collect();
    einsum::check(query, &named)?;
    let sizes = Sizes {
        inputs: &named,
        sums: at("sums").map_or(Ok(true), |i| query.flag(i))?,
        debug,
    };
    let (heads, shared) = (sizes.of('h'), sizes.of('g'));
    if at("ngke").is_some() && (shared == 0 || heads % shared != 0) {
        let expected = format!("a number of heads that divides {heads}");
        return Err(query.wrong(at("ngke").unwrap_or(0), expected, shared.to_string()));
    }

    let gradients = words[1] == "nhqe";
    let wanted = at("wanted").map_or(Ok(None), |i| query.ints(i))?;
    let outputs = (equation.outputs.split(' '))
        .filter(|word| {
            *word != "nhqk" || sizes.bias() && wanted.is_none_or(|w| w.get(3) != Some(&0))
        })
        .map(|word| {
            let (meta, dims) = sizes.output(word);
            let of: Option<&[usize]> = match word {
                "seed" | "debug" if dims.is_empty() => Some(&[]),
                // The sums over a row do not depend on the values.
                "nhq" | "nhq1" | "nhp" => Some(&[0, 1]),
                _ => None,
            };
            Output { meta, dims, of }
        })
        .collect();
    let heads_shard = match shared {
        1 if heads > 1 => ("h", Need::Filled),
        // Key and value shards must hold the heads that the query's need.
        1.. if shared != heads => ("hg", Need::Divides(shared)),
        _ => ("hg", Need::Filled),
    };
    let mut letters = vec![heads_shard, ("n", Need::Filled)];
    let padded = (inputs.iter().map(|i| i.dims)).chain(equation.outputs.split(' '));
    if !causal && !debug && !padded.into_iter().any(|dims| dims == "nhp") {
        letters.push(("q", Need::Filled));
    }
    // Linear in the values, and the gradients in that of the output.
    let linear = [if gradients { 0 } else { 2 }];
    Ok(einsum::rule(outputs, &inputs, letters, &linear))
}

/// The letters of a mask: those of its trailing dims, none for size 1.
fn broadcast(letters: &str, mask: &TensorMeta) -> String {
    let lead = letters.len().saturating_sub(mask.shape.len());
    let named = letters[lead..].chars().zip(&mask.shape);
    let mut dims: String = named.map(|(l, n)| if *n == 1 { '.' } else { l }).collect();
    // Too many dims: the check of the letters says so.
    if mask.shape.len() > letters.len() {
        dims = letters.to_owned();
    }
    dims
}

/// What the letters stand for.
struct Sizes<'a> {
    inputs: &'a [Operand<'a>],
    /// Whether the sums over rows are wanted.
    sums: bool,
    /// Whether the weights are wanted for debugging.
    debug: bool,
}

impl Sizes<'_> {
    fn of(&self, letter: char) -> u64 {
        let held = |i: &Operand<'_>| i.dims.find(letter).map(|at| i.meta.shape[at]);
        match letter {
            '1' => 1,
            'p' if !self.sums => 0,
            'p' => self.of('q').div_ceil(32).saturating_mul(32),
            _ => self.inputs.iter().find_map(held).unwrap_or(0),
        }
    }

    /// Whether there is a bias, which has a gradient.
    fn bias(&self) -> bool {
        self.inputs.iter().any(|i| i.dims == "nhqk")
    }

    fn output(&self, word: &'static str) -> (TensorMeta, &'static str) {
        let asked = self.inputs.iter().find(|i| i.dims == "nhqe");
        let own = asked.map_or(DType::F32, |i| i.meta.dtype);
        let (dtype, shape, dims) = match word {
            // Seed and offset of the random numbers, as one tensor.
            "seed" => (DType::U64, vec![2], ""),
            "debug" if self.debug => {
                let (rows, keys) = (self.of('q'), self.of('k'));
                let block = if self.of('e') > 64 { 128 } else { 256 };
                let columns = match keys {
                    0..=128 => 128,
                    129..=256 => 256,
                    _ => rows.div_ceil(block),
                };
                (own, vec![self.of('n'), self.of('h'), rows, columns], "nhq.")
            }
            "debug" => (own, vec![0], ""),
            "nhq" | "nhq1" | "nhp" => {
                let wide = if own == DType::F64 { own } else { DType::F32 };
                (wide, word.chars().map(|l| self.of(l)).collect(), word)
            }
            _ => (own, word.chars().map(|l| self.of(l)).collect(), word),
        };
        (TensorMeta { dtype, shape }, dims)
    }
}

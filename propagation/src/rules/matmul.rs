//! Matrix products, from their einsum equation.

use super::super::error::PropagationError;
use super::super::promote::{Class, class};
use super::super::rule::{Arg, Need, Query, Rule};
use super::super::spec::TensorMeta;
use super::einsum::{self, Operand, Output};
use rote_plans::DType;

#[derive(Clone, Copy, Debug)]
pub(in super::super) enum Kind {
    /// A product of two tensors: their letters and the output's.
    Product {
        lhs: &'static str,
        rhs: &'static str,
        out: &'static str,
        /// The first argument is added to the product.
        bias: bool,
    },
    /// A product of matrices in low precision, each with its scale.
    Scaled,
    /// Products of the groups that offsets cut one dim into.
    Grouped,
}

const fn product(lhs: &'static str, rhs: &'static str, out: &'static str, bias: bool) -> Kind {
    Kind::Product {
        lhs,
        rhs,
        out,
        bias,
    }
}

pub(super) const OPS: &[(&str, Kind)] = &[
    ("aten::mm", product("mk", "kn", "mn", false)),
    ("aten::addmm", product("mk", "kn", "mn", true)),
    ("aten::bmm", product("bmk", "bkn", "bmn", false)),
    ("aten::baddbmm", product("bmk", "bkn", "bmn", true)),
    ("aten::mv", product("mk", "k", "m", false)),
    ("aten::addmv", product("mk", "k", "m", true)),
    ("aten::dot", product("k", "k", "", false)),
    ("aten::vdot", product("k", "k", "", false)),
    ("aten::addr", product("m", "n", "mn", true)),
    ("aten::addbmm", product("bmk", "bkn", "mn", true)),
    ("aten::_scaled_mm", Kind::Scaled),
    ("aten::_grouped_mm", Kind::Grouped),
];

pub(super) fn rule(kind: Kind, query: &Query<'_>) -> Result<Rule, PropagationError> {
    match kind {
        Kind::Product {
            lhs,
            rhs,
            out,
            bias,
        } => {
            // beta and alpha do not matter: a partial bias and product scale alike.
            let first = usize::from(bias);
            query.arity(2 + first, if bias { 5 } else { 2 })?;
            let factors = [
                Operand::new(first, query.tensor(first)?, lhs),
                Operand::new(first + 1, query.tensor(first + 1)?, rhs),
            ];
            let output = multiplied(query, &factors, out)?;
            if !bias {
                return Ok(multiply(output, &factors, out));
            }
            let added = query.tensor(0)?;
            let dims = broadcast(query, added, &output, out)?;
            let mut bias = Operand::new(0, added, &dims);
            bias.added = true;
            let [lhs, rhs] = factors;
            let inputs = [bias, lhs, rhs];
            // Times a fraction, integers are rounded: each part of a sum too.
            let fraction =
                |at: usize| matches!(query.args.get(at), Some(Arg::Float(x)) if x.fract() != 0.0);
            if class(output.dtype) < Class::Float && (fraction(3) || fraction(4)) {
                let letters = ["b", "m", "n"]
                    .into_iter()
                    .filter(|letter| out.contains(letter));
                let letters = letters.map(|letter| (letter, need(&inputs, out)));
                return Ok(einsum::rule(
                    vec![Output::new(output, out)],
                    &inputs,
                    letters,
                    &[],
                ));
            }
            Ok(multiply(output, &inputs, out))
        }
        Kind::Scaled => scaled(query),
        Kind::Grouped => grouped(query),
    }
}

/// The meta of a product.
fn multiplied(
    query: &Query<'_>,
    factors: &[Operand<'_>; 2],
    out: &str,
) -> Result<TensorMeta, PropagationError> {
    einsum::check(query, factors)?;
    let size = |letter: char| {
        let held = factors.iter();
        held.filter_map(|f| f.dims.find(letter).map(|at| f.meta.shape[at]))
            .next()
    };
    Ok(TensorMeta {
        dtype: factors[0].meta.dtype,
        shape: out.chars().filter_map(size).collect(),
    })
}

fn multiply(output: TensorMeta, inputs: &[Operand<'_>], out: &str) -> Rule {
    let first = inputs.len() - 2;
    let held = |letter: &&str| inputs[first..].iter().any(|i| i.dims.contains(*letter));
    let letters = ["b", "k", "m", "n"].into_iter().filter(held);
    einsum::rule(
        vec![Output::new(output, out)],
        inputs,
        letters.map(|letter| (letter, need(inputs, out))),
        &[first, first + 1],
    )
}

/// What shards of a product need: of an empty matrix, addmv returns a single added
/// element as it is.
fn need(inputs: &[Operand<'_>], out: &str) -> Need {
    match out == "m" && inputs.iter().any(|i| i.added && !i.dims.contains('m')) {
        true => Need::Filled,
        false => Need::Nothing,
    }
}

/// The letters of a tensor that broadcasts to the output; a dim of size 1 has
/// none.
fn broadcast(
    query: &Query<'_>,
    added: &TensorMeta,
    output: &TensorMeta,
    out: &str,
) -> Result<String, PropagationError> {
    let lead = output.shape.len().checked_sub(added.shape.len());
    let fits = lead.is_some_and(|lead| {
        (added.shape.iter().zip(&output.shape[lead..])).all(|(b, o)| b == o || *b == 1)
    });
    let (Some(lead), true) = (lead, fits) else {
        let expected = format!("a tensor that broadcasts to {output}");
        return Err(query.wrong(0, expected, added.to_string()));
    };
    let letters = out[lead..].chars().zip(&added.shape);
    Ok(letters
        .map(|(letter, size)| if *size == 1 { '.' } else { letter })
        .collect())
}

/// The dtype at a position, or a default.
fn dtype(query: &Query<'_>, i: usize, default: DType) -> Result<DType, PropagationError> {
    match query.args.get(i) {
        None | Some(Arg::None) => Ok(default),
        Some(Arg::DType(dtype)) => Ok(*dtype),
        Some(_) => Err(query.wrong(i, "an element type", "something else")),
    }
}

/// `_scaled_mm(a, b, scale_a, scale_b, bias, scale_result, out_dtype, fast)`. A
/// scale is one number, or has a row or block of rows for each number.
fn scaled(query: &Query<'_>) -> Result<Rule, PropagationError> {
    query.arity(4, 8)?;
    let factors = [
        Operand::new(0, query.tensor(0)?, "mk"),
        Operand::new(1, query.tensor(1)?, "kn"),
    ];
    let mut output = multiplied(query, &factors, "mn")?;
    output.dtype = dtype(query, 6, output.dtype)?;
    let scales = [query.tensor(2)?, query.tensor(3)?];
    let mut names = [String::new(), String::new()];
    // What the shards of each letter must divide, besides the kernels' 16.
    let mut letters = ["k", "m", "n"].map(|letter| {
        let size = sized(&factors, letter);
        let aligned = (size > 0 && size % 16 == 0).then_some(size / 16);
        (letter, aligned, true)
    });
    for ((factor, scale), name) in factors.iter().zip(scales).zip(&mut names) {
        let (of, count) = (factor.meta, scale.shape.iter().product::<u64>());
        let whole = count == 1;
        for (letter, divide, may) in &mut letters {
            let Some(dim) = factor.dims.find(*letter) else {
                continue;
            };
            match scale.shape.get(dim) {
                _ if whole => {}
                Some(n) if scale.shape.len() == 2 && (*n == 1 || *n == of.shape[dim]) => {}
                Some(n) if scale.shape.len() == 2 && *n > 0 && of.shape[dim] % n == 0 => {
                    *divide = Some(divide.map_or(*n, |d| gcd(d, *n)));
                }
                // Blocks in an order of their own.
                _ => *may = false,
            }
        }
        let dims = factor.dims.chars().zip(&scale.shape);
        *name = match scale.shape.len() {
            2 => dims.map(|(l, n)| if *n == 1 { '.' } else { l }).collect(),
            ndim => ".".repeat(ndim),
        };
    }
    let mut inputs = factors.to_vec();
    for (i, (scale, name)) in scales.into_iter().zip(&names).enumerate() {
        inputs.push(Operand::new(2 + i, scale, name));
    }
    if let Some(bias) = query.optional_tensor(4)? {
        let mut bias = Operand::new(4, bias, "n");
        einsum::check(query, &[factors[1], bias])?;
        bias.added = true;
        inputs.push(bias);
    }
    if let Some(result) = query.optional_tensor(5)? {
        inputs.push(Operand::new(5, result, ""));
    }
    let letters = (letters.into_iter()).filter(|(_, _, may)| *may);
    let letters = letters.map(|(letter, divide, _)| {
        let need = divide.map_or(Need::Nothing, Need::Divides);
        (letter, need)
    });
    let outputs = vec![Output::new(output, "mn")];
    Ok(einsum::rule(outputs, &inputs, letters, &[0, 1]))
}

/// The size of a letter.
fn sized(inputs: &[Operand<'_>], letter: &str) -> u64 {
    let held = |i: &Operand<'_>| i.dims.find(letter).map(|at| i.meta.shape[at]);
    inputs.iter().find_map(held).unwrap_or(0)
}

/// `_grouped_mm(a, b, offs, bias, out_dtype)`. Where one factor has a dim for
/// the groups and the other has not, or neither has, offsets cut a dim of the
/// latter: that one and the groups stay whole.
fn grouped(query: &Query<'_>) -> Result<Rule, PropagationError> {
    query.arity(2, 5)?;
    let (lhs, rhs) = (query.tensor(0)?, query.tensor(1)?);
    let (left, right, out, shared): (_, _, _, &[&str]) = match (lhs.shape.len(), rhs.shape.len()) {
        (2, 2) => ("mk", "kn", "gmn", &["m", "n"]),
        (2, _) => ("mk", "gkn", "mn", &["n", "k"]),
        (3, 2) => ("gmk", "kn", "mn", &["m", "k"]),
        _ => ("gmk", "gkn", "gmn", &["g", "m", "n", "k"]),
    };
    let mut inputs = vec![Operand::new(0, lhs, left), Operand::new(1, rhs, right)];
    let offsets = query.optional_tensor(2)?;
    if let Some(offsets) = offsets {
        inputs.push(Operand::new(2, offsets, "g"));
    }
    if offsets.is_some() == shared.contains(&"g") {
        let expected = "offsets, unless both factors have a dim for the groups";
        return Err(query.wrong(
            2,
            expected,
            if offsets.is_some() { "offsets" } else { "none" },
        ));
    }
    if query.optional_tensor(3)?.is_some() {
        return Err(query.wrong(3, "none, as bias is not supported by the op", "a tensor"));
    }
    einsum::check(query, &inputs)?;
    let output = TensorMeta {
        dtype: dtype(query, 4, lhs.dtype)?,
        shape: (0..out.len())
            .map(|i| sized(&inputs, &out[i..=i]))
            .collect(),
    };
    // Rows must be whole multiples of 16 bytes, whichever dim is contiguous.
    let align = (16 / lhs.dtype.bytes().unwrap_or(1)).max(1);
    let letters = shared.iter().map(|letter| {
        let size = sized(&inputs, letter);
        let need = match *letter != "g" && size > 0 && size % align == 0 {
            true => Need::Divides(size / align),
            false => Need::Filled,
        };
        (*letter, need)
    });
    let outputs = vec![Output::new(output, out)];
    Ok(einsum::rule(outputs, &inputs, letters, &[0, 1]))
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

//! The notation of an op's arguments: tensors as `f32[64,32] @ S(0),R`, lists of
//! tensors in braces, numbers, `1+2j`, `[1,2]`, `true`, dtypes, `'words'`, `none`.

use rote_plans::DType;

use super::error::PropagationError;
use super::rule::Arg;
use super::spec::{Mesh, Spec};

impl Arg {
    /// Reads one argument. Tensors of a list stand in braces, separated by
    /// semicolons: `{f32[4] @ S(0); none; f32[4] @ R}`. Words stand in quotes:
    /// `'mean'`.
    ///
    /// # Errors
    ///
    /// [`PropagationError::Notation`] for anything else.
    pub fn parse(text: &str, mesh: &Mesh) -> Result<Arg, PropagationError> {
        let text = text.trim();
        if let Some(list) = inside(text, '{', '}') {
            let specs = list.split(';').map(str::trim).filter(|t| !t.is_empty());
            let one = |t| match t {
                "none" => Ok(None),
                t => Spec::parse(t, mesh).map(Some),
            };
            return Ok(Arg::Tensors(specs.map(one).collect::<Result<_, _>>()?));
        }
        if let Some(list) = inside(text, '[', ']') {
            return numbers(text, list);
        }
        if let Some(word) = inside(text, '\'', '\'') {
            return Ok(Arg::Text(word.into()));
        }
        Ok(match text {
            "none" | "None" => Arg::None,
            "true" | "True" => Arg::Bool(true),
            "false" | "False" => Arg::Bool(false),
            _ => {
                if let Ok(n) = text.parse::<i64>() {
                    Arg::Int(n)
                } else if let Some(dtype) = DType::from_name(text) {
                    Arg::DType(dtype)
                } else if let Ok(x) = text.parse::<f64>() {
                    Arg::Float(x)
                } else if let Some((re, im)) = complex(text) {
                    Arg::Complex(re, im)
                } else if text.contains('[') || text.starts_with('?') {
                    Arg::Tensor(Spec::parse(text, mesh)?)
                } else {
                    let expected = "a tensor such as f32[64,32] @ S(0),R, a number, [1,2], \
                                    true, a dtype, 'a word' or none";
                    return Err(PropagationError::notation(text, expected));
                }
            }
        })
    }
}

impl Arg {
    /// Reads an argument whose tensors may say their strides, behind the shape:
    /// `f32[64,32]{1,64} @ S(0)`. Returns the strides of each tensor, contiguous
    /// where none are given, and whether any are.
    ///
    /// # Errors
    ///
    /// [`PropagationError::Notation`] as [`Arg::parse`], and for strides that are
    /// not one number per dim.
    pub fn parse_with_strides(
        text: &str,
        mesh: &Mesh,
    ) -> Result<(Arg, Vec<Vec<i64>>, bool), PropagationError> {
        if !text.contains("]{") {
            let arg = Arg::parse(text, mesh)?;
            let strides = specs(&arg).map(contiguous).collect();
            return Ok((arg, strides, false));
        }
        let mut plain = String::new();
        let mut given = Vec::new();
        let list = inside(text.trim(), '{', '}');
        for (i, tensor) in list.unwrap_or(text).split(';').enumerate() {
            let semicolon = if i == 0 { "" } else { ";" };
            let (before, rest) = match tensor.split_once("]{") {
                Some((before, rest)) => (before, Some(rest)),
                None => (tensor, None),
            };
            plain += semicolon;
            plain += before;
            if let Some(rest) = rest {
                let wrong = || PropagationError::notation(tensor, "strides such as {32,1}");
                let (numbers, behind) = rest.split_once('}').ok_or_else(wrong)?;
                let numbers = numbers.split(',').map(str::trim).filter(|n| !n.is_empty());
                let numbers = numbers.map(|n| n.parse().ok().filter(|n| *n >= 0));
                let strides: Vec<i64> = numbers.collect::<Option<_>>().ok_or_else(wrong)?;
                plain += "]";
                plain += behind;
                given.push(Some(strides));
            } else if !matches!(tensor.trim(), "" | "none") {
                given.push(None);
            }
        }
        let arg = match list {
            Some(_) => Arg::parse(&format!("{{{plain}}}"), mesh)?,
            None => Arg::parse(&plain, mesh)?,
        };
        let mut strides = Vec::new();
        for (spec, given) in specs(&arg).zip(given) {
            let given = given.unwrap_or_else(|| contiguous(spec));
            let ndim = spec.meta.as_ref().map_or(given.len(), |m| m.shape.len());
            if given.len() != ndim {
                let expected = format!("{ndim} strides, one per dim");
                return Err(PropagationError::notation(text, expected));
            }
            strides.push(given);
        }
        Ok((arg, strides, true))
    }
}

/// The tensors that an argument has.
fn specs(arg: &Arg) -> impl Iterator<Item = &Spec> {
    let list = match arg {
        Arg::Tensors(list) => list.as_slice(),
        _ => &[],
    };
    let one = match arg {
        Arg::Tensor(spec) => Some(spec),
        _ => None,
    };
    one.into_iter().chain(list.iter().flatten())
}

fn contiguous(spec: &Spec) -> Vec<i64> {
    let shape = spec.meta.as_ref().map_or(&[][..], |m| &m.shape);
    super::strides::contiguous(shape)
}

fn inside(text: &str, open: char, close: char) -> Option<&str> {
    text.strip_prefix(open)?.strip_suffix(close)
}

/// Reads `1+2j`, `-2j` or `1e-3-2.5e1j`.
fn complex(text: &str) -> Option<(f64, f64)> {
    let body = text.strip_suffix('j')?;
    // The last sign that is none of an exponent begins the imaginary part.
    let mut signs = body.char_indices().rev();
    let at = signs
        .find(|(at, c)| matches!(c, '+' | '-') && *at > 0 && !body[..*at].ends_with(['e', 'E']));
    let (re, im) = body.split_at(at.map_or(0, |found| found.0));
    let re = if re.is_empty() { 0.0 } else { re.parse().ok()? };
    Some((re, im.parse().ok()?))
}

/// A list of integers or truth values; of floats as soon as one is written so, and of
/// complex numbers.
fn numbers(text: &str, list: &str) -> Result<Arg, PropagationError> {
    let items = || list.split(',').map(str::trim).filter(|t| !t.is_empty());
    let integer = |t: &str| match t {
        "true" => Some(1),
        "false" => Some(0),
        t => t.parse().ok(),
    };
    if let Some(list) = items().map(integer).collect() {
        return Ok(Arg::Ints(list));
    }
    let float = |t: &str| match t {
        "true" => Some(1.0),
        "false" => Some(0.0),
        t => t.parse().ok(),
    };
    if let Some(list) = items().map(float).collect() {
        return Ok(Arg::Floats(list));
    }
    let number = |t: &str| complex(t).or_else(|| Some((float(t)?, 0.0)));
    let list: Option<Vec<(f64, f64)>> = items().map(number).collect();
    list.map(Arg::Complexes)
        .ok_or_else(|| PropagationError::notation(text, "a list of numbers"))
}

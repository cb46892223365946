//! The notation of an op's arguments: tensors as `f32[64,32] @ S(0),R`, lists of
//! tensors in braces, numbers, `[1,2]`, `true`, dtypes, `'words'`, `none`.

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

fn inside(text: &str, open: char, close: char) -> Option<&str> {
    text.strip_prefix(open)?.strip_suffix(close)
}

/// A list of integers or truth values; of floats as soon as one is written so.
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
    let floats: Option<Vec<f64>> = items().map(|t| t.parse().ok()).collect();
    floats
        .map(Arg::Floats)
        .ok_or_else(|| PropagationError::notation(text, "a list of numbers"))
}

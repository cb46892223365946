//! The notation of an op's arguments: tensors as `f32[64,32] @ S(0),R`, lists of
//! tensors in braces, numbers, `[1,2]`, `true`, dtypes, `none`.

use rote_plans::DType;

use super::error::PropagationError;
use super::rule::Arg;
use super::spec::{Mesh, Spec};

impl Arg {
    /// Reads one argument. Tensors of a list stand in braces, separated by
    /// semicolons: `{f32[4] @ S(0); f32[4] @ R}`.
    ///
    /// # Errors
    ///
    /// [`PropagationError::Notation`] for anything else.
    pub fn parse(text: &str, mesh: &Mesh) -> Result<Arg, PropagationError> {
        let text = text.trim();
        if let Some(list) = text.strip_prefix('{').and_then(|t| t.strip_suffix('}')) {
            let specs = list.split(';').filter(|t| !t.trim().is_empty());
            return Ok(Arg::Tensors(
                specs
                    .map(|t| Spec::parse(t, mesh))
                    .collect::<Result<_, _>>()?,
            ));
        }
        if let Some(list) = text.strip_prefix('[').and_then(|t| t.strip_suffix(']')) {
            let items = list.split(',').filter(|t| !t.trim().is_empty());
            let number = |t: &str| match t.trim() {
                "true" => Ok(1),
                "false" => Ok(0),
                t => t
                    .parse()
                    .map_err(|_| PropagationError::notation(text, "a list of integers")),
            };
            return Ok(Arg::Ints(items.map(number).collect::<Result<_, _>>()?));
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
                                    true, a dtype or none";
                    return Err(PropagationError::notation(text, expected));
                }
            }
        })
    }
}

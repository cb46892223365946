//! Placement combinations of an op's inputs and outputs, as people write them.

use std::fmt;

use super::error::PropagationError;
use super::placement::Placement;
use super::spec::{split_top, written};

/// A placement combination, written as `S(0),R -> S(0)` on a mesh of one dim and
/// as `S(0),R; R,S(1) -> S(0),S(1)` on others.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Combination {
    /// Placements of each input, one per mesh dim.
    pub inputs: Vec<Vec<Placement>>,
    /// Placements of each output, one per mesh dim.
    pub outputs: Vec<Vec<Placement>>,
}

impl Combination {
    /// Reads the notation, on a mesh of so many dims.
    ///
    /// # Errors
    ///
    /// [`PropagationError::Notation`] for anything else.
    pub fn parse(text: &str, dims: usize) -> Result<Self, PropagationError> {
        let wrong = || PropagationError::Notation {
            expected: format!(
                "placements on {dims} mesh dims, such as S(0),R -> S(0), or S(0),R; R,R -> S(0),R"
            ),
            found: text.chars().take(80).collect(),
        };
        let (inputs, outputs) = text.split_once("->").ok_or_else(wrong)?;
        let tensors = |side: &str| -> Result<Vec<Vec<Placement>>, PropagationError> {
            let each: Vec<&str> = match (dims, side.trim()) {
                (_, "") => return Ok(Vec::new()),
                (1, side) => side.split(';').flat_map(split_top).collect(),
                (_, side) => side.split(';').collect(),
            };
            let mut all = Vec::new();
            for tensor in each {
                let placements = split_top(tensor).into_iter().map(Placement::parse);
                let placements = placements.collect::<Result<Vec<_>, _>>()?;
                if placements.len() != dims {
                    return Err(wrong());
                }
                all.push(placements);
            }
            Ok(all)
        };
        Ok(Combination {
            inputs: tensors(inputs)?,
            outputs: tensors(outputs)?,
        })
    }
}

impl fmt::Display for Combination {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let side = |side: &[Vec<Placement>]| {
            let each: Vec<_> = side.iter().map(|p| written(p)).collect();
            let between = if side.iter().all(|p| p.len() == 1) {
                ","
            } else {
                "; "
            };
            each.join(between)
        };
        write!(f, "{} -> {}", side(&self.inputs), side(&self.outputs))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use super::*;

    #[test]
    fn what_is_printed_reads_back() {
        for (dims, text) in [
            (1, "S(0),R -> S(0)"),
            (1, "_S(0,2),P(sum) -> R,R"),
            (1, " -> R"),
            (2, "S(0),R; R,_S(1,2) -> S(0),P(max)"),
        ] {
            assert_eq!(Combination::parse(text, dims).unwrap().to_string(), text);
        }
        for text in ["S(0)", "S(0) -> x", "S(0),R; R -> R,R"] {
            assert!(Combination::parse(text, 2).is_err(), "{text}");
        }
    }
}

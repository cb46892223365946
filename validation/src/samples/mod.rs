//! Samples: a few calls of every op that has a rule, as tables of text.
//!
//! A line is an op and its arguments in schema order, in the notation of `rote
//! propagate` but without blanks inside an argument; defaults at the end may be
//! left out, and `#` starts a comment. After a tensor stands what its values
//! must be:
//!
//! | written | values |
//! |---|---|
//! | `f32[8,4]` | normal floats of mixed sign, integers 1 to 4, random truth values |
//! | `i64[3]<8` | integers from 0 up to 8, not reached |
//! | `f32[8]>0` | positive floats |
//! | `f32[8]:unit` | floats between 0 and 1 |
//! | `f32[8]:sorted` | ascending along the last dim |
//! | `i64[8]:perm` | a permutation along the last dim |
//! | `f32[4,4]:spd` | symmetric positive definite matrices |
//! | `f32[4,4]:lower`, `:upper` | triangular matrices, well conditioned |

use rote_propagation::{Arg, Mesh, PropagationError};

/// The tables by family of ops.
const TABLES: &[(&str, &str)] = &[
    ("create", include_str!("create.txt")),
    ("each", include_str!("each.txt")),
    ("einsum", include_str!("einsum.txt")),
    ("index", include_str!("index.txt")),
    ("linalg", include_str!("linalg.txt")),
    ("nn", include_str!("nn.txt")),
    ("nn_beyond", include_str!("nn_beyond.txt")),
    ("nn_cuda", include_str!("nn_cuda.txt")),
    ("normalize", include_str!("normalize.txt")),
    ("pieces", include_str!("pieces.txt")),
    ("pointwise", include_str!("pointwise.txt")),
    ("pointwise_in_place", include_str!("pointwise_in_place.txt")),
    ("random", include_str!("random.txt")),
    ("rearrange", include_str!("rearrange.txt")),
    ("reduction", include_str!("reduction.txt")),
    ("statistics", include_str!("statistics.txt")),
    ("value", include_str!("value.txt")),
    ("view", include_str!("view.txt")),
];

/// What the values of a tensor must be, for the op to make sense.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Values {
    /// Normal floats of mixed sign, integers 1 to 4, random truth values.
    Any,
    /// Integers from 0 up to a bound, not reached.
    Below(i64),
    /// Positive floats.
    Positive,
    /// Floats between 0 and 1.
    Unit,
    /// Ascending along the last dim.
    Sorted,
    /// A permutation along the last dim.
    Permutation,
    /// Symmetric positive definite matrices.
    PositiveDefinite,
    /// Lower triangular matrices, well conditioned.
    Lower,
    /// Upper triangular matrices, well conditioned.
    Upper,
}

const WORDS: [(&str, Values); 7] = [
    (">0", Values::Positive),
    (":unit", Values::Unit),
    (":sorted", Values::Sorted),
    (":perm", Values::Permutation),
    (":spd", Values::PositiveDefinite),
    (":lower", Values::Lower),
    (":upper", Values::Upper),
];

impl Values {
    /// What stands for it after a tensor.
    fn suffix(&self) -> String {
        match self {
            Values::Below(bound) => format!("<{bound}"),
            other => {
                let word = WORDS.iter().find(|w| w.1 == *other);
                word.map_or("", |w| w.0).to_owned()
            }
        }
    }
}

/// One call of an op.
#[derive(Clone, Debug, PartialEq)]
pub struct Sample {
    /// The table it stands in.
    pub family: &'static str,
    /// Its line there, from 1.
    pub line: usize,
    /// The op.
    pub op: String,
    /// The arguments as written, without what the values must be.
    pub args: Vec<String>,
    /// What the values of each tensor must be: the tensors among the arguments
    /// in order, those of lists one by one, absent ones left out.
    pub values: Vec<Values>,
}

impl Sample {
    /// The arguments, every tensor replicated on the mesh.
    ///
    /// # Errors
    ///
    /// [`PropagationError::Notation`] when one cannot be read.
    pub fn replicated(&self, mesh: &Mesh) -> Result<Vec<Arg>, PropagationError> {
        self.args.iter().map(|a| Arg::parse(a, mesh)).collect()
    }

    /// Reads one call: an op and its arguments, as a line of the tables.
    ///
    /// # Errors
    ///
    /// A call that cannot be read.
    pub fn read(text: &str) -> Result<Self, String> {
        Sample::parse("call", 1, text).unwrap_or_else(|| Err("no op is named".into()))
    }

    /// The arguments as a line of the tables has them.
    pub fn written(&self) -> String {
        let mut values = self.values.iter();
        let mut one = |text: &str| -> String {
            let tensor = text.ends_with(']') && !text.starts_with(['[', '\'']);
            let kind = tensor.then(|| values.next()).flatten();
            format!("{text}{}", kind.map_or_else(String::new, Values::suffix))
        };
        let each = self.args.iter().map(|arg| match arg.strip_prefix('{') {
            Some(list) => {
                let list = list.trim_end_matches('}').split(';');
                let entries: Vec<_> = list.map(|e| one(e.trim())).collect();
                format!("{{{}}}", entries.join(";"))
            }
            None => one(arg),
        });
        each.collect::<Vec<_>>().join(" ")
    }

    fn parse(family: &'static str, line: usize, text: &str) -> Option<Result<Self, String>> {
        let text = text.split('#').next()?;
        let mut words = words(text).into_iter();
        let op = words.next()?;
        let (mut args, mut values) = (Vec::new(), Vec::new());
        for word in words {
            match argument(&word, &mut values) {
                Ok(arg) => args.push(arg),
                Err(error) => return Some(Err(format!("{family}.txt:{line}: {error}"))),
            }
        }
        Some(Ok(Sample {
            family,
            line,
            op,
            args,
            values,
        }))
    }
}

/// The words of a line. A list of tensors in braces is one word.
fn words(text: &str) -> Vec<String> {
    let mut words: Vec<String> = Vec::new();
    let mut in_list = false;
    for part in text.split_whitespace() {
        match words.last_mut() {
            Some(list) if in_list => list.push_str(part),
            _ => words.push(part.to_owned()),
        }
        in_list = (in_list || part.starts_with('{')) && !part.ends_with('}');
    }
    words
}

/// An argument without what its values must be, which is appended to `values`.
fn argument(word: &str, values: &mut Vec<Values>) -> Result<String, String> {
    if let Some(list) = word.strip_prefix('{').and_then(|w| w.strip_suffix('}')) {
        let entries = list.split(';').filter(|t| !t.is_empty());
        let entries: Result<Vec<_>, _> = entries.map(|t| argument(t, values)).collect();
        return Ok(format!("{{{}}}", entries?.join("; ")));
    }
    let tensor = word
        .split_once('[')
        .is_some_and(|(dtype, _)| !dtype.is_empty());
    let quoted = word.starts_with('\'');
    if !tensor || quoted {
        return Ok(word.to_owned());
    }
    let end = word.rfind(']').map_or(word.len(), |at| at + 1);
    let (meta, suffix) = word.split_at(end);
    let kind = match suffix {
        "" => Some(Values::Any),
        _ => match suffix.strip_prefix('<') {
            Some(bound) => bound.parse().ok().map(Values::Below),
            None => WORDS.iter().find(|w| w.0 == suffix).map(|w| w.1),
        },
    };
    values.push(kind.ok_or_else(|| format!("unknown values {suffix:?} after {meta}"))?);
    Ok(meta.to_owned())
}

/// Every sample, in the order of the tables.
///
/// # Errors
///
/// A line that cannot be read, with its place.
pub fn all() -> Result<Vec<Sample>, String> {
    let lines = TABLES.iter().flat_map(|(family, table)| {
        let lines = table.lines().enumerate();
        lines.filter_map(|(at, text)| Sample::parse(family, at + 1, text))
    });
    lines.collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use super::*;
    use rote_propagation::{Query, Topology, propagate, standard_rules};

    #[test]
    fn a_line_gives_arguments_and_values() {
        let text = "aten::x f32[8,4]>0 1 {none; i64[3]<4} [1,2] 'a[b]' # comment";
        let sample = Sample::parse("t", 1, text).unwrap().unwrap();
        assert_eq!(sample.op, "aten::x");
        assert_eq!(
            sample.args,
            ["f32[8,4]", "1", "{none; i64[3]}", "[1,2]", "'a[b]'"]
        );
        assert_eq!(sample.values, [Values::Positive, Values::Below(4)]);
        assert_eq!(
            sample.written(),
            "f32[8,4]>0 1 {none;i64[3]<4} [1,2] 'a[b]'"
        );
        assert!(Sample::parse("t", 1, "  # nothing").is_none());
        assert!(
            Sample::parse("t", 1, "aten::x f32[2]:odd")
                .unwrap()
                .is_err()
        );
    }

    #[test]
    fn every_line_propagates() {
        let mesh = Mesh::parse("2").unwrap();
        let topology = Topology::one_node(&mesh);
        for sample in all().unwrap() {
            let args = sample.replicated(&mesh).unwrap();
            let query = Query {
                op: &sample.op,
                args: &args,
            };
            let found = propagate(standard_rules().unwrap(), &query, &mesh, &topology);
            let at = format!("{}.txt:{}: {found:?}", sample.family, sample.line);
            assert!(found.is_ok_and(|f| f.cost_us == 0.0), "{at}");
        }
    }

    #[test]
    fn every_rule_has_two_samples() {
        let rules = standard_rules().unwrap();
        let samples = all().unwrap();
        let bases: Vec<_> = (samples.iter())
            .filter_map(|s| Some(rules.base(&s.op)?.0))
            .collect();
        for op in rules.ops() {
            let count = bases.iter().filter(|b| *b == op).count();
            assert!(count >= 2, "{op} has {count} samples");
        }
    }

    #[test]
    fn every_line_is_a_call() {
        let mesh = Mesh::parse("2").unwrap();
        for sample in all().unwrap() {
            let args = sample.replicated(&mesh);
            assert!(
                args.is_ok(),
                "{}.txt:{}: {args:?}",
                sample.family,
                sample.line
            );
        }
    }
}

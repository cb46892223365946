//! What kinds of arguments an op takes: PyTorch's schemas of all overloads that
//! have a rule, in `schemas.txt`.
//!
//! Arguments that say where or how a result is stored (`layout`, `device`,
//! `pin_memory`, `memory_format`, ..) are checked like others, and are then left
//! out: no placement depends on them, so rules do not see them.

use std::sync::OnceLock;

use hashbrown::HashMap;

use super::error::PropagationError;
use super::rule::{Arg, Query};
use super::spec::split_top;

static TEXT: &str = include_str!("schemas.txt");

/// The arguments that an overload takes, in order.
#[derive(Debug)]
pub(super) struct Schema {
    parameters: Vec<Parameter>,
    /// How many have no default and may not be none, or stand before one such.
    least: usize,
}

#[derive(Debug)]
struct Parameter {
    name: &'static str,
    /// As PyTorch writes it, without `?`: `Tensor`, `int[2]`.
    written: &'static str,
    kind: Kind,
    optional: bool,
    has_default: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Tensor,
    Tensors,
    /// Some of them may be absent.
    MaybeTensors,
    Int,
    Ints,
    Bool,
    Bools,
    Float,
    Floats,
    Scalar,
    Scalars,
    Text,
    DType,
    Layout,
    Device,
    MemoryFormat,
    Generator,
}

const KINDS: &[(&str, Kind)] = &[
    ("Tensor", Kind::Tensor),
    ("Tensor[]", Kind::Tensors),
    ("Tensor?[]", Kind::MaybeTensors),
    ("int", Kind::Int),
    ("int[]", Kind::Ints),
    ("bool", Kind::Bool),
    ("bool[]", Kind::Bools),
    ("float", Kind::Float),
    ("float[]", Kind::Floats),
    ("Scalar", Kind::Scalar),
    ("Scalar[]", Kind::Scalars),
    ("str", Kind::Text),
    ("ScalarType", Kind::DType),
    ("Layout", Kind::Layout),
    ("Device", Kind::Device),
    ("MemoryFormat", Kind::MemoryFormat),
    ("Generator", Kind::Generator),
];

/// Truth values that say how a result is stored, or when it is there.
const STORAGE: [&str; 3] = ["pin_memory", "non_blocking", "copy"];

/// PyTorch's memory formats, by their numbers (`c10/core/MemoryFormat.h`).
pub const MEMORY_FORMATS: [&str; 4] = [
    "contiguous_format",
    "preserve_format",
    "channels_last",
    "channels_last_3d",
];

impl Schema {
    /// The schema of an overload.
    pub(super) fn of(op: &str) -> Option<&'static Schema> {
        static ALL: OnceLock<HashMap<&'static str, Schema>> = OnceLock::new();
        let lines = || TEXT.lines().filter(|line| !line.starts_with('#'));
        let all = ALL.get_or_init(|| lines().filter_map(parsed).collect());
        all.get(op.strip_suffix(".default").unwrap_or(op))
    }

    /// Checks the number of arguments and the kind of each.
    pub(super) fn check(&self, query: &Query<'_>) -> Result<(), PropagationError> {
        query.arity(self.least, self.parameters.len())?;
        for (at, (parameter, arg)) in self.parameters.iter().zip(query.args).enumerate() {
            if !parameter.takes(arg) {
                let expected = format!("{}, {}", parameter.name, parameter.described());
                return Err(query.wrong(at, expected, query.found(at)));
            }
        }
        Ok(())
    }

    /// How many arguments are left without those at the end that only say how a
    /// result is stored.
    pub(super) fn without_storage(&self, given: usize) -> usize {
        let given = given.min(self.parameters.len());
        let kept = self.parameters[..given]
            .iter()
            .rposition(|p| !p.is_storage());
        kept.map_or(0, |last| last + 1)
    }
}

impl Parameter {
    fn is_storage(&self) -> bool {
        match self.kind {
            Kind::Layout | Kind::Device | Kind::MemoryFormat | Kind::Generator => true,
            Kind::Bool => STORAGE.contains(&self.name),
            _ => false,
        }
    }

    fn takes(&self, arg: &Arg) -> bool {
        match (self.kind, arg) {
            // What is not given is the default; gradients take undefined tensors.
            (Kind::Tensor, Arg::None) => true,
            (_, Arg::None) => self.optional || self.has_default,
            // A number counts as a tensor without dims.
            (Kind::Tensor, Arg::Tensor(_) | Arg::Int(_) | Arg::Float(_) | Arg::Bool(_))
            | (Kind::Tensor, Arg::Complex(..))
            | (Kind::MaybeTensors, Arg::Tensors(_))
            | (Kind::Int, Arg::Int(_))
            | (Kind::Ints, Arg::Ints(_))
            | (Kind::Bool, Arg::Bool(_) | Arg::Int(0 | 1))
            | (Kind::Float, Arg::Float(_) | Arg::Int(_))
            | (Kind::Floats, Arg::Floats(_) | Arg::Ints(_))
            | (Kind::Scalar, Arg::Int(_) | Arg::Float(_) | Arg::Bool(_) | Arg::Complex(..))
            | (Kind::Scalars, Arg::Ints(_) | Arg::Floats(_) | Arg::Complexes(_))
            | (Kind::Text | Kind::Generator, Arg::Text(_))
            | (Kind::DType, Arg::DType(_)) => true,
            (Kind::Tensors, Arg::Tensors(list)) => list.iter().all(Option::is_some),
            // A list of fixed length may be a single number.
            (Kind::Ints | Kind::Floats, Arg::Int(_)) | (Kind::Floats, Arg::Float(_)) => {
                self.fixed()
            }
            (Kind::Bools, Arg::Ints(list)) => list.iter().all(|n| matches!(n, 0 | 1)),
            (Kind::Layout, Arg::Text(word)) => word == "strided",
            (Kind::Device, Arg::Text(word)) => is_device(word),
            (Kind::MemoryFormat, Arg::Text(word)) => MEMORY_FORMATS.contains(&word.as_str()),
            _ => false,
        }
    }

    /// Whether it is a list whose length is written.
    fn fixed(&self) -> bool {
        let length = self.written.split_once('[').map_or("", |found| found.1);
        length.starts_with(|c: char| c.is_ascii_digit())
    }

    fn described(&self) -> &'static str {
        match self.kind {
            Kind::Tensor => "a tensor",
            Kind::Tensors => "a list of tensors",
            Kind::MaybeTensors => "a list of tensors, some of them absent",
            Kind::Int => "an integer",
            Kind::Ints => "a list of integers",
            Kind::Bool => "true or false",
            Kind::Bools => "a list of truth values",
            Kind::Float => "a number",
            Kind::Floats | Kind::Scalars => "a list of numbers",
            Kind::Scalar => "a number",
            Kind::Text => "a word in quotes",
            Kind::DType => "an element type",
            Kind::Layout => "'strided'",
            Kind::Device => "a device such as 'cuda:0'",
            Kind::MemoryFormat => "a memory format such as 'channels_last'",
            Kind::Generator => "a generator",
        }
    }
}

fn is_device(word: &str) -> bool {
    let (kind, index) = word.split_once(':').unwrap_or((word, "0"));
    let kind_fits = !kind.is_empty() && kind.chars().all(|c| c.is_ascii_lowercase());
    kind_fits && index.parse::<u8>().is_ok()
}

/// Reads `aten::sum.dim_IntList(Tensor self, int[1]? dim, *, bool keepdim=False)`.
fn parsed(line: &'static str) -> Option<(&'static str, Schema)> {
    let (name, rest) = line.split_once('(')?;
    let inside = rest.strip_suffix(')')?;
    let parameters: Vec<Parameter> = (split_top(inside).into_iter())
        .filter(|part| !part.is_empty() && *part != "*")
        .map(parameter)
        .collect::<Option<_>>()?;
    // One that may be none may be left out at the end.
    let given = |p: &Parameter| !p.has_default && !p.optional;
    let last = parameters.iter().rposition(given);
    Some((
        name,
        Schema {
            least: last.map_or(0, |last| last + 1),
            parameters,
        },
    ))
}

/// Reads `int[1]? dim=None`.
fn parameter(text: &'static str) -> Option<Parameter> {
    let (written, name) = text.split_once(' ')?;
    let (name, default) = match name.split_once('=') {
        Some((name, _)) => (name, true),
        None => (name, false),
    };
    let optional = written.ends_with('?');
    let written = written.strip_suffix('?').unwrap_or(written);
    let plain: String = written.chars().filter(|c| !c.is_ascii_digit()).collect();
    let kind = KINDS.iter().find(|row| row.0 == plain)?.1;
    Some(Parameter {
        name,
        written,
        kind,
        optional,
        has_default: default,
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use super::super::spec::Mesh;
    use super::*;

    /// What the check says of arguments; empty if nothing.
    fn said(op: &str, args: &[&str]) -> String {
        let mesh = Mesh::parse("2").unwrap();
        let args: Vec<_> = args.iter().map(|a| Arg::parse(a, &mesh).unwrap()).collect();
        let query = Query { op, args: &args };
        match Schema::of(op).unwrap().check(&query) {
            Ok(()) => String::new(),
            Err(error) => error.to_string(),
        }
    }

    #[test]
    fn every_line_is_read() {
        let lines = TEXT.lines().filter(|line| !line.starts_with('#'));
        for line in lines {
            assert!(parsed(line).is_some(), "{line}");
        }
    }

    #[test]
    fn arguments_of_the_schema_are_taken() {
        for (op, args) in [
            ("aten::add.Tensor", vec!["f32[4]", "f32[4]"]),
            ("aten::add.Tensor", vec!["f32[4]", "2", "1+2j"]),
            (
                "aten::sum.dim_IntList",
                vec!["f32[4]", "[0]", "none", "f64"],
            ),
            ("aten::sum.dim_IntList", vec!["f32[4]", "0"]),
            ("aten::index.Tensor", vec!["f32[4]", "{none; i64[2]}"]),
            (
                "aten::zeros",
                vec!["[2]", "f32", "'strided'", "'cuda:1'", "false"],
            ),
        ] {
            assert_eq!(said(op, &args), "", "{op} {args:?}");
        }
    }

    #[test]
    fn other_arguments_are_errors() {
        for (op, args, message) in [
            (
                "aten::sum",
                vec!["f32[4]", "[0]"],
                "aten::sum: argument 1: expected dtype, an element type, found [0]",
            ),
            (
                "aten::relu",
                vec!["f32[4]", "1"],
                "aten::relu: expected 1 arguments, found 2",
            ),
            (
                "aten::add.Tensor",
                vec!["f32[4]", "'two'"],
                "aten::add.Tensor: argument 1: expected other, a tensor, found \"two\"",
            ),
            (
                "aten::cat",
                vec!["{f32[4]; none}"],
                "aten::cat: argument 0: expected tensors, a list of tensors, found a list with an \
                 absent tensor",
            ),
            (
                "aten::zeros",
                vec!["[2]", "none", "'sparse_coo'"],
                "aten::zeros: argument 2: expected layout, 'strided', found \"sparse_coo\"",
            ),
        ] {
            assert_eq!(said(op, &args), message);
        }
    }

    #[test]
    fn how_a_result_is_stored_does_not_matter() {
        let kept = |op, given| Schema::of(op).unwrap().without_storage(given);
        assert_eq!(kept("aten::_to_copy", 7), 2);
        assert_eq!(kept("aten::zeros", 5), 2);
        assert_eq!(kept("aten::empty_like", 3), 2);
        assert_eq!(kept("aten::sum", 2), 2);
    }
}

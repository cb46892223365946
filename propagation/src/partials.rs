//! Partials that callers bring: other ways to combine what the ranks hold, next to
//! sums, extrema and the others.
//!
//! A kind of partials has a name, and says which collective reduces one; its
//! placements are told apart by parameters. They pass through ops that only move
//! elements, whatever these are. They are written as `P(LogSumExp)` and
//! `P(LogSumExp,2)`.

use std::fmt;
use std::sync::{PoisonError, RwLock};

use rote_plans::ReduceOp;

use super::error::PropagationError;
use super::names::{Named, Names};
use super::placement::PartialOp;
use super::sharding::{are_parameters, check_name};

/// Combines what the ranks hold, element by element: takes the parameters, and as many
/// numbers of each rank. Says what is wrong if it cannot.
pub type Combine = dyn Fn(&str, &[&[f64]]) -> Result<Vec<f64>, String> + Send + Sync;

/// What is known of a kind.
struct How {
    /// What a collective costs as much as.
    reduction: ReduceOp,
    combine: Option<Box<Combine>>,
}

type Kind = Named<How>;

static KINDS: Names<How> = Names::new();

/// The partials of these kinds, by number: kind and parameters.
static PARTIALS: RwLock<Vec<(&'static Kind, &'static str)>> = RwLock::new(Vec::new());

/// A registered partial.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PartialId(u32);

/// Makes partials of a name known. `reduction`: what a collective costs as much as.
/// `combine`: what such a collective gives, in whichever order it takes the ranks; without,
/// the truth table cannot judge what passes them.
///
/// # Errors
///
/// [`PropagationError::Sharding`] when the name is taken or no name.
pub fn register_partials(
    name: &str,
    reduction: ReduceOp,
    combine: Option<Box<Combine>>,
) -> Result<(), PropagationError> {
    check_name(name)?;
    let how = How { reduction, combine };
    KINDS.register(name, how, |name| !PartialOp::is_name(name))
}

/// Forgets partials: their name is free again. Returns whether there were some.
pub fn forget_partials(name: &str) -> bool {
    KINDS.forget(name)
}

impl PartialId {
    /// In rules, whichever the inputs have.
    pub(super) const ANY: PartialId = PartialId(u32::MAX);

    /// The partial of a registered name with these parameters.
    pub fn named(name: &str, parameters: &str) -> Option<Self> {
        let kind = KINDS.named(name)?;
        if !are_parameters(parameters) {
            return None;
        }
        let mut all = PARTIALS.write().unwrap_or_else(PoisonError::into_inner);
        let same = |one: &(&'static Kind, &str)| std::ptr::eq(one.0, kind) && one.1 == parameters;
        let at = all.iter().position(same).unwrap_or_else(|| {
            all.push((kind, Box::leak(parameters.into())));
            all.len() - 1
        });
        Some(PartialId(at as u32))
    }

    /// The partial with a number that [`PartialId::number`] gave.
    pub fn numbered(number: u32) -> Option<Self> {
        let all = PARTIALS.read().unwrap_or_else(PoisonError::into_inner);
        ((number as usize) < all.len()).then_some(PartialId(number))
    }

    /// Its number in this process.
    pub fn number(self) -> u32 {
        self.0
    }

    pub(super) fn reduction(self) -> ReduceOp {
        self.registered()
            .map_or(ReduceOp::Sum, |one| one.0.is.reduction)
    }

    /// Whether it is known how parts combine.
    pub fn combines(self) -> bool {
        self.registered()
            .is_some_and(|one| one.0.is.combine.is_some())
    }

    /// What parts combine to, element by element: as many numbers of each rank.
    ///
    /// # Errors
    ///
    /// Why they cannot be combined.
    pub fn combined(self, parts: &[&[f64]]) -> Result<Vec<f64>, String> {
        let found = self.registered().and_then(|(kind, parameters)| {
            let combine = kind.is.combine.as_ref()?;
            Some(combine(parameters, parts))
        });
        let found =
            found.ok_or_else(|| format!("nothing says how parts of P({self}) combine"))??;
        let counts = (parts.first().map_or(0, |part| part.len()), found.len());
        match counts.0 == counts.1 {
            true => Ok(found),
            false => Err(format!(
                "parts of P({self}): expected {} numbers when they are combined, found {}",
                counts.0, counts.1
            )),
        }
    }

    fn registered(self) -> Option<(&'static Kind, &'static str)> {
        let all = PARTIALS.read().unwrap_or_else(PoisonError::into_inner);
        all.get(self.0 as usize).copied()
    }
}

impl fmt::Display for PartialId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.registered() {
            None => f.write_str("registered"),
            Some((kind, "")) => f.write_str(&kind.name),
            Some((kind, parameters)) => write!(f, "{},{parameters}", kind.name),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use super::*;
    use crate::{Arg, Mesh, Placement, Query, Topology, propagate, standard_rules, written};

    fn placed(op: &str, args: &[&str]) -> String {
        let mesh = Mesh::parse("2").unwrap();
        let args: Vec<_> = args.iter().map(|a| Arg::parse(a, &mesh).unwrap()).collect();
        let query = Query { op, args: &args };
        let topology = Topology::one_node(&mesh);
        let found = propagate(standard_rules().unwrap(), &query, &mesh, &topology).unwrap();
        let inputs: Vec<_> = found.inputs.iter().map(|i| written(&i.to)).collect();
        format!(
            "{} -> {}",
            inputs.join(" "),
            written(&found.outputs[0].placements)
        )
    }

    #[test]
    fn a_partial_is_known_by_its_parameters() {
        register_partials("Logs", ReduceOp::Max, None).unwrap();
        for text in ["P(Logs)", "P(Logs,2)", "P(Logs,2,[1,3])"] {
            let placement = Placement::parse(text).unwrap();
            assert_eq!(placement.to_string(), text);
            assert_eq!(
                placement,
                Placement::parse(&text.replace(',', ", ")).unwrap()
            );
        }
        let two = PartialId::named("Logs", "2").unwrap();
        assert_eq!(PartialId::numbered(two.number()), Some(two));
        assert_ne!(PartialId::named("Logs", ""), Some(two));
        assert_eq!(two.reduction(), ReduceOp::Max);
        for text in ["P(Logs,x)", "P(Log)", "Logs(0)", "P(registered)"] {
            assert!(Placement::parse(text).is_err(), "{text}");
        }
        for name in ["Logs", "sum", "normal", "a b"] {
            assert!(
                register_partials(name, ReduceOp::Sum, None).is_err(),
                "{name}"
            );
        }
        assert!(forget_partials("Logs") && !forget_partials("Logs"));
        assert!(Placement::parse("P(Logs)").is_err());
        register_partials("Logs", ReduceOp::Sum, None).unwrap();
        assert_ne!(PartialId::named("Logs", "2"), Some(two));
    }

    #[test]
    fn they_pass_what_moves_elements_and_mix_with_none() {
        register_partials("Own", ReduceOp::Sum, None).unwrap();
        for (op, args, expected) in [
            ("aten::t", &["f32[4,6] @ P(Own)"][..], "P(Own) -> P(Own)"),
            ("aten::t", &["f32[4,6] @ P(Own,2)"], "P(Own,2) -> P(Own,2)"),
            (
                "aten::cat",
                &["{f32[4] @ P(Own); f32[4] @ P(Own)}"],
                "P(Own) P(Own) -> P(Own)",
            ),
            (
                "aten::cat",
                &["{f32[4] @ P(Own); f32[4] @ P(Own,2)}"],
                "R R -> R",
            ),
            ("aten::cat", &["{f32[4] @ P(Own); f32[4] @ R}"], "R R -> R"),
            ("aten::neg", &["f32[4] @ P(Own)"], "R -> R"),
            (
                "aten::constant_pad_nd",
                &["f32[4,6] @ P(Own)", "[-1,-1]"],
                "P(Own) -> P(Own)",
            ),
            ("aten::zeros_like", &["f32[4,6] @ P(Own)"], "P(Own) -> R"),
            ("aten::detach", &["f32[4] @ P(Own)"], "P(Own) -> P(Own)"),
            ("aten::empty_like", &["f32[4] @ P(Own)"], "P(Own) -> R"),
            (
                "aten::new_empty",
                &["f32[4] @ P(Own)", "[4]"],
                "P(Own) -> R",
            ),
        ] {
            assert_eq!(placed(op, args), expected, "{op} {args:?}");
        }
        for (op, args) in [
            ("aten::constant_pad_nd", &["f32[4,6] @ P(Own)", "[1,1]"][..]),
            ("aten::triu", &["f32[4,6] @ P(Own)"]),
            ("aten::diag", &["f32[4] @ P(Own)"]),
            ("aten::diag_embed", &["f32[4] @ P(Own)"]),
            ("aten::clone", &["f32[4] @ P(Own)"]),
            ("aten::_to_copy", &["f32[4] @ P(Own)", "f32"]),
            ("aten::_to_copy", &["f32[4] @ P(Own)", "f64"]),
            ("aten::sum", &["f32[4] @ P(Own)"]),
            ("aten::mul.Scalar", &["f32[4] @ P(Own)", "1"]),
        ] {
            let found = placed(op, args);
            assert!(!found.contains("Own"), "{op} {args:?}: {found}");
        }
    }
}

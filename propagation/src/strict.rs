//! Refusing what a partial input would hide: a reduction that nobody asked for.

use super::each::Each;
use super::error::PropagationError;
use super::fill::Filled;
use super::placement::Placement;
use super::registry::Registry;
use super::rule::Query;
use super::search::{Checked, check, check_specs};
use super::spec::Mesh;

/// Checks that no partial input has to be reduced because of the op: that on
/// every mesh dim a strategy takes all partial inputs as they are. A reduction
/// that only the placement of another input makes worthwhile is no error.
///
/// # Errors
///
/// [`PropagationError::Argument`] with the first input that no strategy takes,
/// alone or together with the partial inputs before it; otherwise as
/// [`super::propagate`].
pub fn check_partials(
    rules: &Registry,
    query: &Query<'_>,
    mesh: &Mesh,
) -> Result<(), PropagationError> {
    if let Some(each) = Each::of(query.op, rules) {
        let check = |entry: &Query<'_>| check_one(entry, &check_specs(rules, entry, mesh)?, mesh);
        return each.try_each(rules, query, check).map(|_| ());
    }
    check_one(query, &check(rules, query, mesh)?, mesh)
}

fn check_one(
    query: &Query<'_>,
    checked: &Checked<'_>,
    mesh: &Mesh,
) -> Result<(), PropagationError> {
    let filled = Filled::new(query, &checked.rule, &checked.inputs, mesh.sizes())?;
    let mut fits = filled.every();
    for (input, (argument, spec)) in query.inputs().enumerate() {
        let takes = filled.masks(input, &filled.sources[input]);
        for (m, placement) in spec.placements.iter().enumerate() {
            if !matches!(placement, Placement::Partial(_)) {
                continue;
            }
            let others = fits[m] != filled.every()[m];
            fits[m] &= takes[m];
            if fits[m] == 0 {
                let name = &mesh.names()[m];
                let expected = if others && takes[m] != 0 {
                    format!("no second partial on mesh dim {name}, as the op is not linear in both")
                } else {
                    format!("no partial on mesh dim {name} that has to be reduced before the op")
                };
                return Err(query.wrong(argument, expected, spec.to_string()));
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use super::super::{Arg, standard_rules};
    use super::*;

    fn said(op: &str, args: &[&str]) -> String {
        let mesh = Mesh::parse("dp=2,tp=2").unwrap();
        let args: Vec<_> = args.iter().map(|a| Arg::parse(a, &mesh).unwrap()).collect();
        match check_partials(standard_rules().unwrap(), &Query { op, args: &args }, &mesh) {
            Ok(()) => String::new(),
            Err(error) => error.to_string(),
        }
    }

    #[test]
    fn a_partial_into_a_nonlinear_op_is_an_error() {
        for (op, args, message) in [
            (
                "aten::gelu",
                vec!["f32[4] @ R,P(sum)"],
                "aten::gelu: argument 0: expected no partial on mesh dim tp that has to be \
                 reduced before the op, found f32[4] @ R,P(sum)",
            ),
            (
                "aten::relu",
                vec!["f32[4] @ P(sum),P(max)"],
                "aten::relu: argument 0: expected no partial on mesh dim dp that has to be \
                 reduced before the op, found f32[4] @ P(sum),P(max)",
            ),
            (
                "aten::mul.Tensor",
                vec!["f32[4] @ P(sum),R", "f32[4] @ P(sum),R"],
                "aten::mul.Tensor: argument 1: expected no second partial on mesh dim dp, as the \
                 op is not linear in both, found f32[4] @ P(sum),R",
            ),
            (
                "aten::div.Tensor",
                vec!["f32[4] @ R,R", "f32[4] @ P(sum),R"],
                "aten::div.Tensor: argument 1: expected no partial on mesh dim dp that has to be \
                 reduced before the op, found f32[4] @ P(sum),R",
            ),
        ] {
            assert_eq!(said(op, &args), message);
        }
    }

    #[test]
    fn a_partial_into_a_linear_op_is_none() {
        for (op, args) in [
            ("aten::relu", vec!["f32[4] @ P(max),S(0)"]),
            (
                "aten::add.Tensor",
                vec!["f32[4] @ P(sum),R", "f32[4] @ P(sum),R"],
            ),
            (
                "aten::add.Tensor",
                vec!["f32[4] @ P(sum),R", "f32[4] @ S(0),R"],
            ),
            (
                "aten::mul.Tensor",
                vec!["f32[4] @ P(sum),R", "f32[4] @ R,P(sum)"],
            ),
            ("aten::mm", vec!["f32[4,4] @ P(sum),R", "f32[4,4] @ S(1),R"]),
            ("aten::gelu", vec!["f32[4] @ S(0),R"]),
        ] {
            assert_eq!(said(op, &args), "", "{op} {args:?}");
        }
    }
}

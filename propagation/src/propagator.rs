//! A propagator: registry, mesh, links and options together, with a cache of
//! what was decided.

use std::sync::Arc;

use super::cache::Cache;
use super::cost::Topology;
use super::error::PropagationError;
use super::registry::Registry;
use super::rule::Query;
use super::search::{Propagation, propagate};
use super::spec::Mesh;
use super::strict::check_partials;

/// How many decisions are kept, if nothing else is said.
const KEPT: usize = 4096;

/// Answers questions about one mesh and remembers the answers.
///
/// ```
/// use rote_propagation::{Arg, Mesh, Propagator, Query, Topology, standard_rules};
/// # fn main() -> Result<(), rote_propagation::PropagationError> {
/// let mesh = Mesh::parse("tp=2")?;
/// let args = [Arg::parse("f32[8,4] @ S(1)", &mesh)?, Arg::parse("f32[4,8] @ S(0)", &mesh)?];
/// let topology = Topology::one_node(&mesh);
/// let mut propagator = Propagator::new(standard_rules()?, mesh, topology);
/// let decision = propagator.propagate(&Query { op: "aten::mm", args: &args })?;
/// assert_eq!(decision.outputs[0].to_string(), "f32[8,8] @ P(sum)");
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Propagator<'r> {
    rules: &'r Registry,
    mesh: Mesh,
    topology: Topology,
    strict: bool,
    cache: Cache,
}

impl<'r> Propagator<'r> {
    /// A propagator that keeps up to 4,096 decisions.
    pub fn new(rules: &'r Registry, mesh: Mesh, topology: Topology) -> Self {
        Propagator {
            rules,
            mesh,
            topology,
            strict: false,
            cache: Cache::new(KEPT),
        }
    }

    /// Makes it an error when a partial input has to be reduced because of the
    /// op ([`check_partials`]).
    pub fn strict(mut self) -> Self {
        self.strict = true;
        // What was kept was not checked.
        self.cache.clear();
        self
    }

    /// Keeps up to `limit` decisions instead, at least one.
    #[cfg(test)]
    pub fn keeping(mut self, limit: usize) -> Self {
        self.cache = Cache::new(limit);
        self
    }

    /// How many decisions are kept now.
    pub fn kept(&self) -> usize {
        self.cache.len()
    }

    /// The mesh that questions are about.
    pub fn mesh(&self) -> &Mesh {
        &self.mesh
    }

    /// The cheapest way to run an op, from the cache if the same was asked
    /// before: same op, arguments, metas and placements.
    ///
    /// # Errors
    ///
    /// As [`propagate`], and as [`check_partials`] if strict. Errors are not
    /// kept.
    pub fn propagate(&mut self, query: &Query<'_>) -> Result<&Arc<Propagation>, PropagationError> {
        let hash = self.cache.hash(query);
        let at = match self.cache.find(hash, query) {
            Some(at) => at,
            None => {
                if self.strict {
                    check_partials(self.rules, query, &self.mesh)?;
                }
                let decision = propagate(self.rules, query, &self.mesh, &self.topology)?;
                self.cache.keep(hash, query, decision)
            }
        };
        Ok(self.cache.decision(at))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use super::super::{Arg, standard_rules};
    use super::*;

    fn ask(propagator: &mut Propagator<'_>, op: &str, args: &[&str]) -> Arc<Propagation> {
        let mesh = propagator.mesh().clone();
        let args: Vec<_> = args.iter().map(|a| Arg::parse(a, &mesh).unwrap()).collect();
        let query = Query { op, args: &args };
        let fresh = propagate(propagator.rules, &query, &mesh, &propagator.topology).unwrap();
        let found = Arc::clone(propagator.propagate(&query).unwrap());
        assert_eq!(*found, fresh, "{op} {args:?}");
        found
    }

    fn propagator(on: &str) -> Propagator<'static> {
        let mesh = Mesh::parse(on).unwrap();
        let topology = Topology::one_node(&mesh);
        Propagator::new(standard_rules().unwrap(), mesh, topology)
    }

    #[test]
    fn the_same_question_has_the_same_answer_object() {
        let mut p = propagator("2,2");
        let args = ["f32[8,4] @ S(0),R", "f32[4,8] @ S(0),S(1)"];
        let first = ask(&mut p, "aten::mm", &args);
        assert!(Arc::ptr_eq(&first, &ask(&mut p, "aten::mm", &args)));
        assert_eq!(p.kept(), 1);
    }

    #[test]
    fn what_differs_anywhere_is_another_question() {
        let mut p = propagator("2");
        let questions: &[(&str, &[&str])] = &[
            ("aten::sum.dim_IntList", &["f32[8,4] @ S(0)", "[0]"]),
            ("aten::sum.dim_IntList", &["f32[8,4] @ S(0)", "[1]"]),
            ("aten::sum.dim_IntList", &["f32[8,4] @ S(1)", "[0]"]),
            ("aten::sum.dim_IntList", &["f32[8,4] @ _S(0,2)", "[0]"]),
            ("aten::sum.dim_IntList", &["f32[4,8] @ S(0)", "[0]"]),
            ("aten::sum.dim_IntList", &["f64[8,4] @ S(0)", "[0]"]),
            ("aten::sum.dim_IntList", &["f32[8,4] @ S(0)", "[0]", "true"]),
            ("aten::sum.dim_IntList", &["f32[8,4] @ S(0)", "[0]", "none"]),
            ("aten::amax", &["f32[8,4] @ S(0)", "[0]"]),
            ("aten::cat", &["{f32[8] @ S(0); f32[4] @ S(0)}"]),
            ("aten::cat", &["{f32[4] @ S(0); f32[8] @ S(0)}"]),
            ("aten::relu", &["f32[8,4] @ P(max)"]),
            ("aten::relu", &["f32[8,4] @ P(min)"]),
            ("aten::mul.Scalar", &["f32[4]", "0.0"]),
            ("aten::mul.Scalar", &["f32[4]", "-0.0"]),
            ("aten::mul.Scalar", &["f32[4]", "0"]),
            ("aten::mul.Scalar", &["f32[4]", "nan"]),
        ];
        for _ in 0..3 {
            for (op, args) in questions {
                ask(&mut p, op, args);
            }
        }
        assert_eq!(p.kept(), questions.len());
    }

    #[test]
    fn a_full_cache_drops_what_was_not_asked_for_again() {
        let mut p = propagator("2").keeping(8);
        let often = ask(&mut p, "aten::relu", &["f32[1]"]);
        for n in 2..200 {
            ask(&mut p, "aten::relu", &[&format!("f32[{n}]")]);
            let again = ask(&mut p, "aten::relu", &["f32[1]"]);
            assert!(Arc::ptr_eq(&often, &again), "{n}");
            assert!(p.kept() <= 8);
        }
    }

    #[test]
    fn a_strict_propagator_reduces_nothing_silently() {
        let mut p = propagator("2");
        let args = [Arg::parse("f32[4] @ P(sum)", p.mesh()).unwrap()];
        let query = Query {
            op: "aten::gelu",
            args: &args,
        };
        assert_eq!(p.propagate(&query).unwrap().inputs[0].steps.len(), 1);
        let error = p.strict().propagate(&query).unwrap_err();
        assert!(error.to_string().starts_with("aten::gelu: argument 0: "));
    }

    #[test]
    fn errors_are_not_kept() {
        let mut p = propagator("2");
        let args = [Arg::parse("f32[4] @ S(1)", p.mesh()).unwrap()];
        let query = Query {
            op: "aten::relu",
            args: &args,
        };
        assert!(p.propagate(&query).is_err() && p.propagate(&query).is_err());
        assert_eq!(p.kept(), 0);
    }
}

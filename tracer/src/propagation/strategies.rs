//! Every placement combination that the rules claim for an op on a mesh, without
//! search or cost: what the truth table holds against arithmetic.

use super::combination::Combination;
use super::error::PropagationError;
use super::fill::Filled;
use super::placement::{PartialOp, Placement};
use super::registry::Registry;
use super::rule::Query;
use super::search::check;
use super::spec::{Mesh, Spec};

/// The most combinations that are listed.
const LIMIT: usize = 200_000;

/// What the rules say of one op.
#[derive(Clone, Debug, PartialEq)]
pub struct Claims {
    /// The outputs, replicated.
    pub outputs: Vec<Spec>,
    /// The inputs that the op writes, each with the output that it becomes and
    /// must lie as.
    pub written: Vec<(usize, usize)>,
    /// The combinations, each once, in the order of the rules.
    pub strategies: Vec<Combination>,
    /// How many combinations of strategies, one per mesh dim, are not among
    /// them because a shard lacks what one of its strategies needs.
    pub unfit: usize,
}

/// The combinations that the rules claim, with plain shards and with strided
/// ones of the given split factors, and norm partials of order 2.5 where a rule
/// takes any and the mesh has one dim. The placements of the inputs do not matter.
///
/// # Errors
///
/// As [`super::propagate`], and [`PropagationError::TooLarge`] for more than
/// 200,000 combinations.
pub fn claims(
    rules: &Registry,
    query: &Query<'_>,
    mesh: &Mesh,
    split_factors: &[u32],
) -> Result<Claims, PropagationError> {
    let checked = check(rules, query, mesh)?;
    let dims = mesh.sizes().len();
    let mut types = vec![0];
    types.extend_from_slice(split_factors);
    // What holds for norms of any order is tried with one, alone: most partials
    // beside it have negative parts.
    let order = PartialOp::of_norm(2.5).filter(|_| dims == 1);
    let orders: Vec<_> = (order.into_iter())
        .filter_map(|op| match op {
            PartialOp::Norm(order) => Some(order),
            _ => None,
        })
        .collect();
    let (inputs, sizes) = (&checked.inputs, mesh.sizes());
    let filled = Filled::with_types(query, &checked.rule, inputs, sizes, &types, &orders)?;
    let total = filled.rows().checked_pow(dims as u32).unwrap_or(usize::MAX);
    if total > LIMIT {
        return Err(PropagationError::TooLarge {
            op: query.op.into(),
            what: "combinations of strategies",
            limit: LIMIT,
            found: total,
        });
    }
    let written: Vec<_> = (checked.written.iter())
        .filter_map(|w| Some((w.input, w.output?)))
        .collect();
    let mut claims = Claims {
        outputs: (checked.rule.outputs.iter())
            .map(|meta| Spec {
                meta: Some(meta.clone()),
                placements: vec![Placement::Replicate; dims],
            })
            .collect(),
        written,
        strategies: Vec::new(),
        unfit: 0,
    };
    let mut known = hashbrown::HashSet::new();
    for number in 0..total {
        let mut left = number;
        let mut rows = vec![0; dims];
        for row in rows.iter_mut().rev() {
            *row = left % filled.rows();
            left /= filled.rows();
        }
        let Some(targets) = filled.targets(&rows) else {
            claims.unfit += 1;
            continue;
        };
        let outputs = filled.outputs(&rows).into_iter();
        let strategy = Combination {
            inputs: targets.iter().map(|t| filled.shown(t)).collect(),
            outputs: outputs.map(|o| o.placements).collect(),
        };
        let mut written = claims.written.iter();
        let stays = written.all(|(i, o)| strategy.inputs[*i] == strategy.outputs[*o]);
        if stays && known.insert(strategy.clone()) {
            claims.strategies.push(strategy);
        }
    }
    Ok(claims)
}

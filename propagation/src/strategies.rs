//! Every placement combination that the rules claim for an op on a mesh, without
//! search or cost: what the truth table holds against arithmetic.

use super::combination::Combination;
use super::cost::Topology;
use super::each::Each;
use super::error::PropagationError;
use super::family::unless_faulty;
use super::fill::Filled;
use super::placement::{PartialOp, Placement};
use super::registry::Registry;
use super::rule::{Arg, Query};
use super::search::{check, propagate};
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
    /// Whether these are only some of the combinations: those that propagation
    /// chooses for an op on lists, whose entries go their own ways.
    pub some: bool,
    /// How many combinations of strategies, one per mesh dim, are not among
    /// them because a shard lacks what one of its strategies needs.
    pub unfit: usize,
}

/// The combinations that the rules claim, with plain shards and with those of the
/// types of some placements, whatever these split, and norm partials of order 2.5
/// where a rule takes any and the mesh has one dim. The placements of the inputs do
/// not matter.
///
/// # Errors
///
/// As [`super::propagate`], and [`PropagationError::TooLarge`] for more than
/// 200,000 combinations.
pub fn claims(
    rules: &Registry,
    query: &Query<'_>,
    mesh: &Mesh,
    types: &[Placement],
) -> Result<Claims, PropagationError> {
    unless_faulty(|| claimed(rules, query, mesh, types))
}

fn claimed(
    rules: &Registry,
    query: &Query<'_>,
    mesh: &Mesh,
    types: &[Placement],
) -> Result<Claims, PropagationError> {
    if Each::of(query.op, rules).is_some() {
        return asked(rules, query, mesh);
    }
    let mut checked = check(rules, query, mesh)?;
    rules.bar(&mut checked.rule, query.op, types.iter());
    let dims = mesh.sizes().len();
    let mut types = types.to_vec();
    types.push(Placement::Shard { dim: 0 });
    // What holds for norms of any order is tried with one, alone: most partials
    // beside it have negative parts.
    let order = PartialOp::of_norm(2.5).filter(|_| dims == 1);
    types.extend(order.map(Placement::Partial));
    let (inputs, sizes) = (&checked.inputs, mesh.sizes());
    let filled = Filled::with_types(query, &checked.rule, inputs, sizes, &types)?;
    let total = filled.combinations(query.op, dims, LIMIT)?;
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
        some: false,
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

/// What propagation chooses for an op on lists whose tensors lie in one way on
/// one mesh dim: all of them, those of one argument, or a single one; the others
/// are replicated.
fn asked(rules: &Registry, query: &Query<'_>, mesh: &Mesh) -> Result<Claims, PropagationError> {
    use PartialOp::{Avg, Max, Min, Sum};
    let topology = Topology::one_node(mesh);
    let dims = mesh.sizes().len();
    let tensors: Vec<(usize, &Spec)> = query.inputs().collect();
    let mut kinds: Vec<Placement> = (0..4).map(|dim| Placement::Shard { dim }).collect();
    kinds.extend([Sum, Avg, Max, Min].map(Placement::Partial));
    let mut groups: Vec<Vec<usize>> = vec![Vec::new(), (0..tensors.len()).collect()];
    for argument in 0..query.args.len() {
        let own = tensors.iter().enumerate().filter(|(_, t)| t.0 == argument);
        groups.push(own.map(|(i, _)| i).collect());
    }
    groups.extend((0..tensors.len()).map(|i| vec![i]));
    let mut claims: Option<Claims> = None;
    for group in &groups {
        for (kind, m) in kinds.iter().flat_map(|k| (0..dims).map(move |m| (k, m))) {
            let mut specs: Vec<Spec> = tensors.iter().map(|t| t.1.clone()).collect();
            for (i, spec) in specs.iter_mut().enumerate() {
                spec.placements = vec![Placement::Replicate; dims];
                let ndim = spec.meta.as_ref().map_or(0, |m| m.shape.len());
                let lies = kind.sharded().is_none_or(|s| (s.0 as usize) < ndim);
                if group.contains(&i) && lies {
                    spec.placements[m] = *kind;
                }
            }
            let mut specs = specs.into_iter();
            let mut next = |old: &Spec| specs.next().unwrap_or_else(|| old.clone());
            let args: Vec<Arg> = (query.args.iter())
                .map(|arg| match arg {
                    Arg::Tensor(spec) => Arg::Tensor(next(spec)),
                    Arg::Tensors(list) => {
                        Arg::Tensors(list.iter().map(|s| s.as_ref().map(&mut next)).collect())
                    }
                    other => other.clone(),
                })
                .collect();
            let question = Query {
                op: query.op,
                args: &args,
            };
            let found = match propagate(rules, &question, mesh, &topology) {
                Ok(found) => found,
                // Some lie so that the op cannot write them; all replicated is
                // asked first.
                Err(_) if claims.is_some() => continue,
                Err(error) => return Err(error),
            };
            let combination = Combination {
                inputs: found.inputs.into_iter().map(|i| i.to).collect(),
                outputs: found.outputs.iter().map(|o| o.placements.clone()).collect(),
            };
            let claims = claims.get_or_insert_with(|| Claims {
                outputs: found.outputs,
                written: Vec::new(),
                strategies: Vec::new(),
                some: true,
                unfit: 0,
            });
            if !claims.strategies.contains(&combination) {
                claims.strategies.push(combination);
            }
        }
    }
    claims.ok_or_else(|| query.wrong(0, "a list of tensors", "none"))
}

//! A second opinion on a plan: for each global op that tensors were redistributed
//! for, the bytes that the cheapest strategy by [`rote_propagation`] would have moved.
//!
//! Bytes are those that a rank sends ([`Kind::sent`]). The framework's side counts the
//! collectives of the plan. The side of the cheapest strategy counts the steps of its
//! redistributions. The user asked for redistributions outside of global ops; these are
//! not judged. Each op is judged alone: if its outputs get other placements, the next op
//! may move more.

use hashbrown::HashMap;
use rote_plans::instr::{ArchivedArg, ArchivedCollectiveKind, ArchivedInstr};
use rote_plans::pool::ArchivedRange;
use rote_plans::strategy::{ArchivedRedistribution, ArchivedStrategy};
use rote_plans::value::ArchivedValue;
use rote_plans::{ArchivedPlan, NONE, describe};

use rote_propagation::{
    Arg, Kind, Mesh, Propagation, PropagationError, Query, Topology, propagate, standard_rules,
};

/// What was moved for a global op, and what need have been.
#[derive(Clone, Debug)]
pub struct Opinion {
    /// The op with its overload.
    pub op: String,
    /// The user's source line, `file:line`, or empty.
    pub source: String,
    /// How often the step runs it so.
    pub times: u64,
    /// What was moved for it, each time.
    pub moved: Vec<Moved>,
    /// Where its outputs came to lie, as in `S(0),R`; `-` for a plain tensor.
    pub outputs: Vec<String>,
    /// The mesh.
    pub mesh: String,
    /// The names of its dims.
    pub mesh_dims: Vec<String>,
    /// The cheapest strategy.
    pub cheapest: Result<Propagation, NoOpinion>,
}

/// A redistribution that sent something.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Moved {
    /// The placements before, as in `S(0),R`.
    pub from: String,
    /// The placements after.
    pub to: String,
    /// Bytes that a rank sent.
    pub bytes: u64,
}

/// Why there is no second opinion on an op.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum NoOpinion {
    /// The recorder was not told the op's arguments.
    #[error("its arguments were not recorded")]
    Arguments,
    /// Its tensors lie on more than one mesh.
    #[error("its tensors lie on several meshes")]
    Meshes,
    /// Propagation does not answer.
    #[error(transparent)]
    Propagation(#[from] PropagationError),
}

impl Opinion {
    /// Bytes that a rank sent for it, each time.
    pub fn bytes(&self) -> u64 {
        let moved = self.moved.iter();
        moved.fold(0, |sum, m| sum.saturating_add(m.bytes))
    }

    /// Bytes that a rank would have sent by the cheapest strategy.
    pub fn cheapest_bytes(&self) -> Option<u64> {
        self.cheapest.as_ref().ok().map(Propagation::bytes)
    }

    /// Bytes that a rank would have sent less, each time; `None` where there is
    /// no opinion.
    pub fn saved(&self) -> Option<u64> {
        Some(self.bytes().saturating_sub(self.cheapest_bytes()?))
    }
}

/// The opinions on a plan, those that save most first, alike ones as one. Ops
/// that nothing was sent for are left out.
pub fn opinions(plan: &ArchivedPlan) -> Vec<Opinion> {
    let mut found: Vec<Opinion> = Vec::new();
    let mut known: HashMap<_, usize> = HashMap::new();
    for (strategy, redistributions) in redistributed(plan) {
        let moved: Vec<Moved> = redistributions
            .iter()
            .map(|r| Moved {
                from: describe::placements(plan, r.from.to_native()).to_string(),
                to: describe::placements(plan, r.to.to_native()).to_string(),
                bytes: sent(plan, r),
            })
            .filter(|moved| moved.bytes != 0)
            .collect();
        let Some(first) = redistributions.first().filter(|_| !moved.is_empty()) else {
            continue;
        };
        let mesh = plan.specs[first.from.to_native() as usize].mesh.to_native();
        let outputs: Vec<String> = ids(plan, strategy.outputs)
            .map(|id| describe::placements(plan, id).to_string())
            .collect();
        let (op, source) = (strategy.op.to_native(), strategy.source.to_native());
        let args: Vec<u32> = ids(plan, strategy.args).collect();
        let key = (op, source, mesh, args, moved.clone(), outputs.clone());
        if let Some(at) = known.get(&key) {
            found[*at].times += 1;
            continue;
        }
        known.insert(key, found.len());
        let asked = mesh_of(plan, mesh);
        let names = asked.as_ref().map_or(&[][..], Mesh::names).to_vec();
        let shown = asked
            .as_ref()
            .map_or_else(|_| String::new(), Mesh::to_string);
        let cheapest = asked
            .map_err(NoOpinion::from)
            .and_then(|asked| cheapest(plan, strategy, &asked, mesh));
        found.push(Opinion {
            op: plan.str(op).to_owned(),
            source: plan.str(source).to_owned(),
            times: 1,
            moved,
            outputs,
            mesh: shown,
            mesh_dims: names,
            cheapest,
        });
    }
    let whole = |o: &Opinion| o.saved().unwrap_or(0).saturating_mul(o.times);
    found.sort_by_key(|o| std::cmp::Reverse(whole(o)));
    found
}

/// The global ops that were redistributed for, each with what is its own and
/// not that of an op inside it.
fn redistributed(
    plan: &ArchivedPlan,
) -> impl Iterator<Item = (&ArchivedStrategy, Vec<&ArchivedRedistribution>)> {
    // Of two ops that both hold it, the inner one begins later.
    let mut owners: Vec<Option<usize>> = vec![None; plan.redistributions.len()];
    for (i, strategy) in plan.strategies.iter().enumerate() {
        owners[strategy.redistributions.indices()].fill(Some(i));
    }
    (plan.strategies.iter().enumerate()).map(move |(i, strategy)| {
        let own = strategy.redistributions.indices();
        let own = own.filter(|r| owners[*r] == Some(i));
        (strategy, own.map(|r| &plan.redistributions[r]).collect())
    })
}

fn ids(plan: &ArchivedPlan, range: ArchivedRange) -> impl Iterator<Item = u32> {
    plan.ids[range.indices()].iter().map(|id| id.to_native())
}

fn mesh_of(plan: &ArchivedPlan, mesh: u32) -> Result<Mesh, PropagationError> {
    let mesh = &plan.meshes[mesh as usize];
    let names: Vec<&str> = ids(plan, mesh.dim_names).map(|id| plan.str(id)).collect();
    let sizes = plan.dims[mesh.shape.indices()].iter();
    let dims: Vec<(String, u32)> = sizes
        .enumerate()
        .map(|(i, size)| {
            let name = names
                .get(i)
                .map_or_else(|| format!("dim{i}"), |n| (*n).to_owned());
            (name, u32::try_from(size.to_native()).unwrap_or(0))
        })
        .collect();
    let dims: Vec<(&str, u32)> = dims.iter().map(|(name, n)| (name.as_str(), *n)).collect();
    Mesh::new(&dims)
}

fn cheapest(
    plan: &ArchivedPlan,
    strategy: &ArchivedStrategy,
    asked: &Mesh,
    mesh: u32,
) -> Result<Propagation, NoOpinion> {
    if strategy.args.len == 0 {
        return Err(NoOpinion::Arguments);
    }
    let mut inputs = ids(plan, strategy.inputs).filter(|spec| *spec != NONE);
    if inputs.any(|spec| plan.specs[spec as usize].mesh != mesh) {
        return Err(NoOpinion::Meshes);
    }
    let args = ids(plan, strategy.args)
        .map(|arg| Arg::parse(plan.str(arg), asked))
        .collect::<Result<Vec<_>, _>>()?;
    let op = plan.str(strategy.op.to_native());
    let query = Query { op, args: &args };
    let found = propagate(standard_rules()?, &query, asked, &Topology::one_node(asked))?;
    Ok(found)
}

/// Bytes that a rank sent for a redistribution.
fn sent(plan: &ArchivedPlan, redistribution: &ArchivedRedistribution) -> u64 {
    let mut sum = 0_u64;
    for instr in &plan.instrs[redistribution.instrs.indices()] {
        sum = sum.saturating_add(match instr {
            ArchivedInstr::Collective(c) => {
                let group = &plan.groups[c.group.to_native() as usize];
                let input = &plan.values[c.input.to_native() as usize];
                let bytes = describe::tensor_bytes(plan, input);
                let ranks = group.ranks.len.to_native();
                match c.kind {
                    ArchivedCollectiveKind::AllGather => Kind::AllGather.sent(bytes, ranks),
                    ArchivedCollectiveKind::AllReduce => Kind::AllReduce.sent(bytes, ranks),
                    ArchivedCollectiveKind::ReduceScatter => Kind::ReduceScatter.sent(bytes, ranks),
                    ArchivedCollectiveKind::AllToAll => Kind::AllToAll.sent(bytes, ranks),
                    ArchivedCollectiveKind::Broadcast => bytes, // handed on once
                }
            }
            ArchivedInstr::Local { op, args, outs, .. }
                if plan.str(op.to_native()) == "_dtensor::shard_dim_alltoall" =>
            {
                all_to_all(plan, *args, *outs).unwrap_or(0)
            }
            _ => 0,
        });
    }
    sum
}

/// Bytes that a rank sent by DTensor's all-to-all, which is a local op to a plan:
/// it gathers one dim and splits another, so the dim that it gathers grows by as
/// many times as there are ranks.
fn all_to_all(plan: &ArchivedPlan, args: ArchivedRange, outs: ArchivedRange) -> Option<u64> {
    let [ArchivedArg::Value(input), ArchivedArg::Int(gathered), ..] = &plan.args[args.indices()]
    else {
        return None;
    };
    let input = &plan.values[input.to_native() as usize];
    let output = plan.values.get(ids(plan, outs).next()? as usize)?;
    let size = |value: &ArchivedValue| {
        let sizes = &plan.dims[value.shape.indices()];
        Some(
            sizes
                .get(usize::try_from(gathered.to_native()).ok()?)?
                .to_native(),
        )
    };
    let ranks = u32::try_from(size(output)?.checked_div(size(input)?)?).ok()?;
    Some(Kind::AllToAll.sent(describe::tensor_bytes(plan, input), ranks))
}

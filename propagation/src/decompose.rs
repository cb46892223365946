//! Ops without a rule: propagated through a small graph of ops that have one.
//!
//! On one mesh dim, a combination of input placements is a strategy of the whole
//! if every op inside takes its inputs in their placements. Combinations that would
//! redistribute inside are dropped. The result is a rule like any other, and is
//! expanded to a mesh like any other (`_ops/single_dim_strategy.py` and
//! `_decompositions.py` of `torch/distributed/tensor` do the same). Tensors that
//! are made inside are replicated.

use super::error::PropagationError;
use super::placement::Placement;
use super::registry::Registry;
use super::rule::{Arg, Need, Query, R, Rule, Slot};
use super::spec::{Spec, TensorMeta};

/// How an op is made of others: fills the graph and gives its outputs.
pub type Decomposition = fn(&mut Builder<'_>) -> Result<Vec<Value>, PropagationError>;

/// A tensor of a graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Value(usize);

/// An argument of an op inside a graph.
#[derive(Clone, Debug)]
pub enum Part {
    /// A tensor.
    Value(Value),
    /// Anything else.
    Arg(Arg),
}

impl From<Value> for Part {
    fn from(value: Value) -> Self {
        Part::Value(value)
    }
}

impl<T: Into<Arg>> From<T> for Part {
    fn from(arg: T) -> Self {
        Part::Arg(arg.into())
    }
}

macro_rules! args {
    ($($from:ty => $variant:ident),*) => {
        $(impl From<$from> for Arg {
            fn from(value: $from) -> Self {
                Arg::$variant(value)
            }
        })*
    };
}

args!(i64 => Int, f64 => Float, bool => Bool, Vec<i64> => Ints);

/// An op of a graph: its rule, its tensors and the first of its outputs.
#[derive(Clone, Debug)]
struct Node {
    rule: Rule,
    inputs: Vec<usize>,
    first: usize,
}

/// The graph of one op while it is made, with the metas of all tensors.
pub struct Builder<'r> {
    /// The question that is decomposed.
    pub query: &'r Query<'r>,
    rules: &'r Registry,
    metas: Vec<TensorMeta>,
    /// The argument of each input.
    arguments: Vec<usize>,
    nodes: Vec<Node>,
    /// What every shard of an input needs.
    need: Need,
}

/// More combinations than any decomposition has.
const MAX_STEPS: usize = 100_000;

impl<'r> Builder<'r> {
    fn new(rules: &'r Registry, query: &'r Query<'r>) -> Result<Self, PropagationError> {
        let (mut metas, mut arguments) = (Vec::new(), Vec::new());
        for (argument, spec) in query.inputs() {
            let meta = spec.meta.clone().ok_or_else(|| {
                query.wrong(
                    argument,
                    "a tensor whose meta is known",
                    "a tensor without meta",
                )
            })?;
            metas.push(meta);
            arguments.push(argument);
        }
        Ok(Builder {
            query,
            rules,
            metas,
            arguments,
            nodes: Vec::new(),
            need: Need::Nothing,
        })
    }

    /// The tensor at a position of the arguments.
    pub fn input(&self, argument: usize) -> Result<Value, PropagationError> {
        self.query.tensor(argument)?;
        let at = self.arguments.iter().position(|a| *a == argument);
        at.map(Value)
            .ok_or_else(|| self.query.wrong(argument, "a tensor", "none"))
    }

    /// The tensor at a position of the arguments, if there is one.
    pub fn optional(&self, argument: usize) -> Result<Option<Value>, PropagationError> {
        match self.query.optional_tensor(argument)? {
            Some(_) => self.input(argument).map(Some),
            None => Ok(None),
        }
    }

    /// The tensors of the list at a position of the arguments.
    pub fn list(&self, argument: usize) -> Result<Vec<Value>, PropagationError> {
        self.query.tensors(argument)?;
        let all = 0..self.arguments.len();
        Ok(all
            .filter(|i| self.arguments[*i] == argument)
            .map(Value)
            .collect())
    }

    /// Says that the op's kernel takes no tensor without elements, whatever the
    /// ops inside take.
    pub fn refuses_empty(&mut self) {
        self.need = Need::Filled;
    }

    /// What is known of a tensor.
    pub fn meta(&self, value: Value) -> &TensorMeta {
        &self.metas[value.0]
    }

    /// The number of dims of a tensor.
    pub fn ndim(&self, value: Value) -> usize {
        self.meta(value).shape.len()
    }

    /// Adds an op that has a rule; gives its first output.
    ///
    /// # Errors
    ///
    /// As the op's rule; [`PropagationError::UnknownOp`] when it has none.
    pub fn op<const N: usize>(
        &mut self,
        op: &str,
        parts: [Part; N],
    ) -> Result<Value, PropagationError> {
        Ok(self.all(op, parts)?[0])
    }

    /// Adds an op that has a rule; gives all its outputs.
    ///
    /// # Errors
    ///
    /// As [`Builder::op`].
    pub fn all<const N: usize>(
        &mut self,
        op: &str,
        parts: [Part; N],
    ) -> Result<Vec<Value>, PropagationError> {
        let (mut args, mut inputs) = (Vec::with_capacity(N), Vec::new());
        for part in parts {
            args.push(match part {
                Part::Arg(arg) => arg,
                Part::Value(value) => {
                    inputs.push(value.0);
                    Arg::Tensor(Spec {
                        meta: Some(self.meta(value).clone()),
                        placements: Vec::new(),
                    })
                }
            });
        }
        let inside = format!("{} inside {}", op, self.query.op);
        let rule = self.rules.own_rule(&Query { op, args: &args });
        let rule = rule.map_err(|error| error.asked_of(&inside))?;
        if rule.inputs() != inputs.len() || rule.outputs.is_empty() || !rule.written().is_empty() {
            return Err(PropagationError::UnknownOp { op: inside });
        }
        let first = self.metas.len();
        self.metas.extend(rule.outputs.iter().cloned());
        self.nodes.push(Node {
            rule,
            inputs,
            first,
        });
        Ok((first..self.metas.len()).map(Value).collect())
    }
}

impl Registry {
    /// Adds the decomposition of one op, for when it has no rule.
    ///
    /// # Errors
    ///
    /// [`PropagationError::Duplicate`] when the op has a decomposition.
    pub fn register_decomposition(
        &mut self,
        op: &str,
        decomposition: Decomposition,
    ) -> Result<(), PropagationError> {
        if self.decompositions.contains_key(op) {
            return Err(PropagationError::Duplicate { op: op.into() });
        }
        self.decompositions.insert(op.into(), decomposition);
        Ok(())
    }

    /// The names with a decomposition, sorted.
    pub fn decomposed(&self) -> Vec<&str> {
        let mut ops: Vec<_> = self.decompositions.keys().map(String::as_str).collect();
        ops.sort_unstable();
        ops
    }
}

/// The rule that a decomposition amounts to.
pub(super) fn rule(
    rules: &Registry,
    query: &Query<'_>,
    decomposition: Decomposition,
) -> Result<Rule, PropagationError> {
    let mut builder = Builder::new(rules, query)?;
    let outputs = decomposition(&mut builder)?;
    let inputs = builder.arguments.len();
    if let [node] = builder.nodes.as_slice() {
        // Another name: all that its rule says.
        let same = |o: (usize, &Value)| o.1.0 == node.first + o.0;
        if node.inputs.iter().copied().eq(0..inputs)
            && outputs.len() == node.rule.outputs.len()
            && outputs.iter().enumerate().all(same)
        {
            return Ok(node.rule.clone());
        }
    }
    let mut found = Found {
        nodes: &builder.nodes,
        all: Vec::new(),
        steps: 0,
    };
    let mut assigned = Assigned {
        values: vec![None; builder.metas.len()],
        needs: Vec::new(),
        strategies: vec![0; builder.nodes.len()],
    };
    found.assign(builder.nodes.len(), &mut assigned);
    if found.steps > MAX_STEPS {
        return Err(PropagationError::TooLarge {
            op: query.op.into(),
            what: "combinations of placements inside a decomposition",
            limit: MAX_STEPS,
            found: found.steps,
        });
    }
    found.all.sort_by(|a, b| a.strategies.cmp(&b.strategies));
    let metas = outputs.iter().map(|o| builder.metas[o.0].clone()).collect();
    let mut rule = Rule::new(metas, inputs);
    let mut known = vec![vec![R; outputs.len() + inputs]];
    for assigned in &found.all {
        let Some(needs) = input_needs(assigned, &found.all, &builder.metas, inputs) else {
            continue;
        };
        let slot = |at: usize| match assigned.values[at] {
            Some(Lies::Sharded(dim)) => {
                let need = needs
                    .iter()
                    .find(|n| n.0 == at)
                    .map_or(builder.need, |n| n.1);
                Slot::Shard(dim, need)
            }
            Some(Lies::Fixed(placement)) => Slot::Fixed(placement),
            None => R,
        };
        let slots: Vec<_> = outputs
            .iter()
            .map(|o| o.0)
            .chain(0..inputs)
            .map(slot)
            .collect();
        if !known.contains(&slots) {
            rule.add(slots.iter().copied());
            known.push(slots);
        }
    }
    Ok(rule)
}

/// How one tensor of a graph lies; all shards of a strategy are of one type.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Lies {
    Sharded(u32),
    Fixed(Placement),
}

/// How every tensor of a graph lies, and what its shards need.
#[derive(Clone, Debug)]
struct Assigned {
    values: Vec<Option<Lies>>,
    needs: Vec<(usize, u32, Need)>,
    /// Which strategy of each op.
    strategies: Vec<usize>,
}

/// The combinations under which every op takes its tensors as they lie.
struct Found<'b> {
    nodes: &'b [Node],
    all: Vec<Assigned>,
    steps: usize,
}

impl Found<'_> {
    /// Assigns the first `left` ops, from the last one on: how its result lies is then
    /// known of almost every op, and few of its strategies fit.
    fn assign(&mut self, left: usize, assigned: &mut Assigned) {
        let Some(at) = left.checked_sub(1) else {
            self.all.push(assigned.clone());
            return;
        };
        let node = &self.nodes[at];
        for (number, (outputs, inputs)) in node.rule.strategies().enumerate() {
            self.steps += 1;
            if self.steps > MAX_STEPS {
                return;
            }
            let made = node.first..node.first + outputs.len();
            let into = || made.clone().chain(node.inputs.iter().copied());
            let mut slots = into().zip(outputs.iter().chain(inputs));
            if !slots.all(|(value, slot)| assigned.takes(value, slot)) {
                continue;
            }
            let before = assigned.clone();
            let mut slots = into().zip(outputs.iter().chain(inputs));
            if slots.all(|(value, slot)| assigned.put(value, slot)) {
                assigned.strategies[at] = number;
                self.assign(at, assigned);
            }
            *assigned = before;
        }
    }
}

impl Assigned {
    /// Whether a tensor lies as a strategy of an op inside says, or not in any way yet.
    fn takes(&self, value: usize, slot: &Slot) -> bool {
        match (self.values[value], lies(slot)) {
            (_, None) => false,
            (None, _) => true,
            (known, lies) => known == lies,
        }
    }

    /// Whether a tensor can lie as a strategy of an op inside says.
    fn put(&mut self, value: usize, slot: &Slot) -> bool {
        let Some(lies) = lies(slot) else {
            return false;
        };
        if let Slot::Shard(dim, need) = *slot {
            if need != Need::Nothing {
                self.needs.push((value, dim, need));
            }
        }
        *self.values[value].get_or_insert(lies) == lies
    }
}

/// How a tensor lies that fills a slot; `None` for a shard type of its own, which the
/// others would not share.
fn lies(slot: &Slot) -> Option<Lies> {
    match *slot {
        Slot::Shard(dim, _) => Some(Lies::Sharded(dim)),
        Slot::Fixed(placement) if placement.sharded().is_none() => Some(Lies::Fixed(placement)),
        Slot::Fixed(_) | Slot::Plain(..) | Slot::Flattened { .. } => None,
    }
}

/// What the shards of the inputs need, so that those inside have what they need;
/// `None` when that cannot be said of the inputs.
///
/// A need is about how many ranks share a dim, on all mesh dims together. It
/// passes from a dim inside to the dim of an input that is sharded whenever the
/// former is: then at least as many ranks share the latter. Elements for every
/// rank also need the same number of ranks and the same size.
fn input_needs(
    assigned: &Assigned,
    all: &[Assigned],
    metas: &[TensorMeta],
    inputs: usize,
) -> Option<Vec<(usize, Need)>> {
    let mut needs: Vec<(usize, Need)> = Vec::new();
    for (value, dim, need) in &assigned.needs {
        let inside = Some(Lies::Sharded(*dim));
        let carries = |input: &usize| {
            let Some(Lies::Sharded(own)) = assigned.values[*input] else {
                return false;
            };
            let outside = Some(Lies::Sharded(own));
            let same = metas[*input].shape[own as usize] == metas[*value].shape[*dim as usize];
            all.iter().all(|a| {
                let (inside, outside) = (a.values[*value] == inside, a.values[*input] == outside);
                match need {
                    Need::Filled => inside == outside && same,
                    _ => outside || !inside,
                }
            })
        };
        let input = (0..inputs).find(carries)?;
        match needs.iter().find(|n| n.0 == input) {
            Some(known) if known.1 != *need => return None,
            Some(_) => {}
            None => needs.push((input, *need)),
        }
    }
    Some(needs)
}

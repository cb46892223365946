//! The registry of rules: which rule an op's name stands for, and how in-place
//! and `out=` forms follow from the functional one.

use std::fmt;
use std::sync::Arc;

use hashbrown::HashMap;

use super::decompose::{self, Decomposition};
use super::decompositions;
use super::each::Each;
use super::error::PropagationError;
use super::forms::{self, Form};
use super::placement::Placement;
use super::rule::{Arg, Query, Rule, RuleFn};
use super::rules;
use super::schema::Schema;
use super::spec::TensorMeta;
use super::strides::Ways;

/// A tensor that is written, and so stays where it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Written {
    /// Which of the tensors among the arguments, in order.
    pub(super) input: usize,
    /// The argument that it stands in.
    pub(super) argument: usize,
    /// The output that it becomes, if it is returned.
    pub(super) output: Option<usize>,
}

/// More outputs than any op with an `out=` form has.
const MAX_OUTS: usize = 8;

/// The rules by op name.
#[derive(Clone, Debug, Default)]
pub struct Registry {
    rules: HashMap<String, Maker>,
    /// For ops without a rule.
    pub(super) decompositions: HashMap<String, Decomposition>,
    changes: Vec<Change>,
    /// How outputs lie.
    pub(super) strides: Ways,
}

/// One strategy put in place of another.
#[derive(Clone, Debug)]
struct Change {
    op: String,
    from: String,
    to: String,
}

/// How the rule of an op is made from its arguments, by a caller's own function.
pub type OwnRule = dyn Fn(&Query<'_>) -> Result<Rule, PropagationError> + Send + Sync;

#[derive(Clone)]
enum Maker {
    Table(rules::Family),
    Function(RuleFn),
    Own(Arc<OwnRule>),
    Decomposition(Decomposition),
}

impl fmt::Debug for Maker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Maker::Table(family) => f.debug_tuple("Table").field(family).finish(),
            Maker::Function(_) => f.write_str("Function"),
            Maker::Own(_) => f.write_str("Own"),
            Maker::Decomposition(_) => f.write_str("Decomposition"),
        }
    }
}

impl Registry {
    /// A registry with Rote's own rules.
    ///
    /// # Errors
    ///
    /// [`PropagationError::Duplicate`] when a table names an op twice.
    pub fn standard() -> Result<Self, PropagationError> {
        let mut registry = Registry {
            strides: Ways::standard(),
            ..Registry::default()
        };
        for (op, family) in rules::all() {
            registry.insert(op, Maker::Table(family))?;
        }
        for (op, family) in rules::element_wise() {
            registry.insert(&op, Maker::Table(family))?;
        }
        for (op, decomposition) in decompositions::ALL {
            registry.register_decomposition(op, *decomposition)?;
        }
        Ok(registry)
    }

    /// Adds the rule of one op.
    ///
    /// # Errors
    ///
    /// [`PropagationError::Duplicate`] when the op has a rule.
    pub fn register(&mut self, op: &str, rule: RuleFn) -> Result<(), PropagationError> {
        self.insert(op, Maker::Function(rule))
    }

    /// Puts a rule of the caller's own in the place of the op's rule, if it has one.
    /// In-place and `out=` forms that have rules of their own keep them.
    pub fn replace(&mut self, op: &str, rule: Arc<OwnRule>) {
        self.rules.insert(op.into(), Maker::Own(rule));
    }

    /// Puts another strategy in place of one of an op's, both written as `S(0),R
    /// -> S(0)`, without needs: a wrong rule, to see that it is found.
    pub fn change(&mut self, op: &str, from: &str, to: &str) {
        self.changes.push(Change {
            op: op.into(),
            from: from.into(),
            to: to.into(),
        });
    }

    /// The rule of an op for these arguments, and the tensors that it writes.
    pub(super) fn rule(&self, query: &Query<'_>) -> Result<(Rule, Vec<Written>), PropagationError> {
        let (mut rule, written) = self.unchanged(query)?;
        for change in self.changes.iter().filter(|c| c.op == query.op) {
            rule.replace(&change.from, &change.to)?;
        }
        rule.leave_out_complex_extrema(query);
        Ok((rule, written))
    }

    /// Checks arguments against the schema of the op, if it has one: an op whose
    /// rule a caller registered may have none.
    pub(super) fn takes(&self, query: &Query<'_>) -> Result<(), PropagationError> {
        self.schema(query.op).map_or(Ok(()), |s| s.check(query))
    }

    fn schema(&self, op: &str) -> Option<&'static Schema> {
        // A name without its overload stands for the op whose rule answers.
        Schema::of(op).or_else(|| match self.base_of_one(op)? {
            (base, Form::Functional) => Schema::of(&base),
            _ => None,
        })
    }

    /// A question without the arguments at its end that only say how the result is
    /// stored.
    fn without_storage<'a>(&self, query: &Query<'a>) -> Query<'a> {
        let given = query.args.len();
        let kept = self
            .schema(query.op)
            .map_or(given, |s| s.without_storage(given));
        Query {
            op: query.op,
            args: &query.args[..kept],
        }
    }

    /// The rule of a functional op, if it has one of its own.
    pub(super) fn own_rule(&self, query: &Query<'_>) -> Result<Rule, PropagationError> {
        match self.rules.get(query.op) {
            Some(maker) => maker.rule(self, query),
            None => Err(PropagationError::UnknownOp {
                op: query.op.into(),
            }),
        }
    }

    fn insert(&mut self, op: &str, maker: Maker) -> Result<(), PropagationError> {
        if self.rules.contains_key(op) {
            return Err(PropagationError::Duplicate { op: op.into() });
        }
        self.rules.insert(op.into(), maker);
        Ok(())
    }

    /// The registered names, sorted. In-place and `out=` forms follow from
    /// them.
    pub fn ops(&self) -> Vec<&str> {
        let mut ops: Vec<_> = self.rules.keys().map(String::as_str).collect();
        ops.sort_unstable();
        ops
    }

    /// The registered op whose rule answers for a name, and its family.
    pub fn matched(&self, op: &str) -> Option<(String, String)> {
        let (base, _) = self.base(op)?;
        let family = match self.rules.get(&base) {
            Some(Maker::Table(family)) => family.name(),
            Some(Maker::Function(_) | Maker::Own(_)) => "registered".into(),
            Some(Maker::Decomposition(_)) | None => "decomposition".into(),
        };
        Some((base, family))
    }

    fn unchanged(&self, query: &Query<'_>) -> Result<(Rule, Vec<Written>), PropagationError> {
        let (maker, form) = self
            .find(query.op)
            .ok_or_else(|| PropagationError::UnknownOp {
                op: query.op.into(),
            })?;
        let read = self.without_storage(query);
        let (mut rule, mut written) = match form {
            Form::Functional | Form::Each => (maker.rule(self, &read)?, Vec::new()),
            Form::InPlace => in_place(maker.rule(self, &read)?, query)?,
            Form::Out => out(self, &maker, query)?,
        };
        written.extend(rule.writings(query));
        let placements = query.inputs().flat_map(|(_, spec)| &spec.placements);
        self.bar(&mut rule, query.op, placements);
        Ok((rule, written))
    }

    /// Bars the registered shardings among some placements that may not fill the rule of an op.
    pub(super) fn bar<'p>(
        &self,
        rule: &mut Rule,
        op: &str,
        placements: impl Iterator<Item = &'p Placement>,
    ) {
        rule.bar(op, placements, || self.matched(op).unwrap_or_default());
    }

    fn find(&self, op: &str) -> Option<(Maker, Form)> {
        if let Some(maker) = self.rules.get(op) {
            return Some((maker.clone(), Form::Functional));
        }
        let (base, form) = self.base_of_one(op)?;
        let decomposition = || self.decompositions.get(&base).copied();
        let maker = self.rules.get(&base).cloned();
        let maker = maker.or_else(|| decomposition().map(Maker::Decomposition));
        Some((maker?, form))
    }

    /// The registered op that a name stands for, and as which form of it.
    pub fn base(&self, op: &str) -> Option<(String, Form)> {
        if let Some(each) = Each::of(op, self) {
            return self.base_of_one(&each.op).map(|b| (b.0, Form::Each));
        }
        self.base_of_one(op)
    }

    /// Whether an op draws random numbers, so that two runs differ. Attention
    /// does where its dropout is not 0, which its name does not say.
    pub fn draws(&self, op: &str) -> bool {
        self.base(op).is_some_and(|base| rules::draws(&base.0))
    }

    /// As [`Registry::base`], of an op that is no list op, or of one entry.
    pub(super) fn base_of_one(&self, op: &str) -> Option<(String, Form)> {
        let bases = forms::bases(op);
        let rule = bases.iter().find(|b| self.rules.contains_key(&b.0));
        let decomposed = |b: &&(String, Form)| self.decompositions.contains_key(&b.0);
        rule.or_else(|| bases.iter().find(decomposed)).cloned()
    }
}

impl Maker {
    fn rule(&self, rules: &Registry, query: &Query<'_>) -> Result<Rule, PropagationError> {
        match self {
            Maker::Table(family) => family.rule(query),
            Maker::Function(make) => make(query),
            Maker::Own(make) => make(query),
            Maker::Decomposition(make) => decompose::rule(rules, query, *make),
        }
    }
}

impl Rule {
    /// Bars the registered shardings among some placements that may not fill the rule, which is that of
    /// an op of a family.
    pub(super) fn bar<'p>(
        &mut self,
        op: &str,
        placements: impl Iterator<Item = &'p Placement>,
        of: impl FnOnce() -> (String, String),
    ) {
        let mut shardings = placements.filter_map(|p| p.registered()).peekable();
        if shardings.peek().is_none() {
            return;
        }
        let (base, family) = of();
        for sharding in shardings {
            if self.takes(sharding) && !sharding.sharding().fills_as(&family, &base, op) {
                self.bars.push(sharding);
            }
        }
    }

    /// The tensors that the rule says are written.
    pub(super) fn writings(&self, query: &Query<'_>) -> Vec<Written> {
        let one = |(input, output): &(usize, Option<usize>)| Written {
            input: *input,
            argument: query.inputs().nth(*input).map_or(0, |found| found.0),
            output: *output,
        };
        self.written().iter().map(one).collect()
    }
}

/// The first argument's tensors are the first outputs, and keep shape and dtype.
fn in_place(mut rule: Rule, query: &Query<'_>) -> Result<(Rule, Vec<Written>), PropagationError> {
    let tensors = query.inputs().take_while(|(argument, _)| *argument == 0);
    let mut written = Vec::with_capacity(1);
    for ((argument, spec), (output, meta)) in tensors.zip(rule.outputs.iter_mut().enumerate()) {
        if let Some(own) = &spec.meta {
            // Views in place (`t_`, `squeeze_`) change the shape alone.
            let elements = |m: &TensorMeta| m.shape.iter().product::<u64>();
            if elements(own) != elements(meta) {
                let expected = format!("a tensor of the result's shape {:?}", meta.shape);
                return Err(query.wrong(argument, expected, own.to_string()));
            }
            meta.dtype = own.dtype;
        }
        written.push(Written {
            input: output,
            argument,
            output: Some(output),
        });
    }
    Ok((rule, written))
}

/// The last arguments are tensors to write, as many as there are outputs.
fn out(
    rules: &Registry,
    maker: &Maker,
    query: &Query<'_>,
) -> Result<(Rule, Vec<Written>), PropagationError> {
    let mut first_error = None;
    for outs in 1..=query.args.len().min(MAX_OUTS) {
        let (rest, last) = query.args.split_at(query.args.len() - outs);
        if !matches!(last[0], Arg::Tensor(_)) {
            break;
        }
        let rest_query = rules.without_storage(&Query {
            op: query.op,
            args: rest,
        });
        let made = maker.rule(rules, &rest_query);
        match made {
            Ok(mut rule) if rule.outputs.len() == outs => {
                let (inputs, arguments) = (rule.inputs(), rest.len());
                rule.keep_dtypes_of(last);
                rule.add_outs();
                let written = |output| Written {
                    input: inputs + output,
                    argument: arguments + output,
                    output: Some(output),
                };
                return Ok((rule, (0..outs).map(written).collect()));
            }
            Ok(_) => {}
            Err(error) => first_error = first_error.or(Some(error)),
        }
    }
    Err(first_error.unwrap_or_else(|| {
        let last = query.args.len().saturating_sub(1);
        query.wrong(last, "a tensor for out= per output", query.found(last))
    }))
}

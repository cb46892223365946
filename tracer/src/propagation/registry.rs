//! The registry of rules: which rule an op's name stands for, and how in-place
//! and `out=` forms follow from the functional one.

use hashbrown::HashMap;

use super::error::PropagationError;
use super::rule::{Arg, Query, Rule, RuleFn};
use super::rules;
use super::spec::TensorMeta;

/// Which form of an op a name stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// It makes new tensors, or views.
    Functional,
    /// It writes its first argument, a tensor or a list of tensors.
    InPlace,
    /// It writes its last arguments, one per output.
    Out,
}

/// A tensor that is written, and so stays where it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Written {
    /// Which of the tensors among the arguments, in order.
    pub(super) input: usize,
    /// The argument that it stands in.
    pub(super) argument: usize,
    /// The output that it becomes.
    pub(super) output: usize,
}

/// `out=` overloads whose names do not say which op they are a form of.
#[rustfmt::skip]
const OUT: &[(&str, &str)] = &[
    ("aten::_linalg_det.result", "aten::_linalg_det"),
    ("aten::_linalg_eigh.eigenvalues", "aten::_linalg_eigh"),
    ("aten::_linalg_slogdet.sign", "aten::_linalg_slogdet"),
    ("aten::_linalg_solve_ex.result", "aten::_linalg_solve_ex"),
    ("aten::_linalg_svd.U", "aten::_linalg_svd"),
    ("aten::all.all_out", "aten::all"),
    ("aten::all.out", "aten::all.dim"),
    ("aten::any.all_out", "aten::any"),
    ("aten::any.out", "aten::any.dim"),
    ("aten::geqrf.a", "aten::geqrf"),
    ("aten::kthvalue.values", "aten::kthvalue"),
    ("aten::linalg_cholesky_ex.L", "aten::linalg_cholesky_ex"),
    ("aten::linalg_inv_ex.inverse", "aten::linalg_inv_ex"),
    ("aten::max.dim_max", "aten::max.dim"),
    ("aten::max.out", "aten::max.other"),
    ("aten::max.unary_out", "aten::max"),
    ("aten::mean.dtype_out", "aten::mean"),
    ("aten::mean.out", "aten::mean.dim"),
    ("aten::median.dim_values", "aten::median.dim"),
    ("aten::min.dim_min", "aten::min.dim"),
    ("aten::min.out", "aten::min.other"),
    ("aten::min.unary_out", "aten::min"),
    ("aten::mode.values", "aten::mode"),
    ("aten::nanmedian.dim_values", "aten::nanmedian.dim"),
    ("aten::prod.int_out", "aten::prod.dim_int"),
    ("aten::sort.values", "aten::sort"),
    ("aten::sort.values_stable", "aten::sort.stable"),
    ("aten::sum.IntList_out", "aten::sum.dim_IntList"),
    ("aten::topk.values", "aten::topk"),
    ("aten::triangular_solve.X", "aten::triangular_solve"),
];

/// More outputs than any op with an `out=` form has.
const MAX_OUTS: usize = 8;

/// The rules by op name.
#[derive(Clone, Debug, Default)]
pub struct Registry {
    rules: HashMap<String, Maker>,
}

#[derive(Clone, Copy, Debug)]
enum Maker {
    Table(rules::Family),
    Function(RuleFn),
}

impl Registry {
    /// A registry with Rote's own rules.
    ///
    /// # Errors
    ///
    /// [`PropagationError::Duplicate`] when a table names an op twice.
    pub fn standard() -> Result<Self, PropagationError> {
        let mut registry = Registry::default();
        for (op, family) in rules::all() {
            registry.insert(op, Maker::Table(family))?;
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

    /// The rule of an op for these arguments, and the tensors that it writes.
    pub(super) fn rule(&self, query: &Query<'_>) -> Result<(Rule, Vec<Written>), PropagationError> {
        let (maker, form) = self
            .find(query.op)
            .ok_or_else(|| PropagationError::UnknownOp {
                op: query.op.into(),
            })?;
        match form {
            Form::Functional => Ok((maker.rule(query)?, Vec::new())),
            Form::InPlace => in_place(maker.rule(query)?, query),
            Form::Out => out(maker, query),
        }
    }

    fn find(&self, op: &str) -> Option<(Maker, Form)> {
        let functional = op.strip_suffix(".default").unwrap_or(op);
        if let Some(maker) = self.rules.get(functional) {
            return Some((*maker, Form::Functional));
        }
        if let Some((_, base)) = OUT.iter().find(|o| o.0 == op) {
            return self.rules.get(*base).map(|m| (*m, Form::Out));
        }
        let (name, overload) = functional.split_once('.').unwrap_or((functional, ""));
        let tries = |name: &str, overloads: &[&str]| {
            overloads.iter().find_map(|overload| {
                let key = match *overload {
                    "" => name.to_owned(),
                    overload => format!("{name}.{overload}"),
                };
                self.rules.get(&key).copied()
            })
        };
        if let Some(base) = name.strip_suffix('_').filter(|n| !n.ends_with(':')) {
            return tries(base, &[overload]).map(|m| (m, Form::InPlace));
        }
        if let Some(overload) = overload.strip_suffix("out") {
            let overload = overload.trim_end_matches('_');
            let overloads = [overload, "Tensor", "dim", "dim_IntList"];
            return tries(name, &overloads).map(|m| (m, Form::Out));
        }
        if overload.is_empty() {
            return tries(name, &["Tensor", "int"]).map(|m| (m, Form::Functional));
        }
        None
    }
}

impl Maker {
    fn rule(self, query: &Query<'_>) -> Result<Rule, PropagationError> {
        match self {
            Maker::Table(family) => family.rule(query),
            Maker::Function(make) => make(query),
        }
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
            output,
        });
    }
    Ok((rule, written))
}

/// The last arguments are tensors to write, as many as there are outputs.
fn out(maker: Maker, query: &Query<'_>) -> Result<(Rule, Vec<Written>), PropagationError> {
    let mut first_error = None;
    for outs in 1..=query.args.len().min(MAX_OUTS) {
        let (rest, last) = query.args.split_at(query.args.len() - outs);
        if !matches!(last[0], Arg::Tensor(_)) {
            break;
        }
        let made = maker.rule(&Query {
            op: query.op,
            args: rest,
        });
        match made {
            Ok(mut rule) if rule.outputs.len() == outs => {
                let (inputs, arguments) = (rule.inputs(), rest.len());
                rule.add_outs();
                let written = |output| Written {
                    input: inputs + output,
                    argument: arguments + output,
                    output,
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

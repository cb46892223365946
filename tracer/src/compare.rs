//! What differs between two recordings of one step.
//!
//! A step is recorded twice in a row. Host state (a step counter, a schedule)
//! appears as a difference between the recordings. A difference that a
//! hyperparameter explains is bound to it. Any other difference is refused.

use hashbrown::HashSet;
use rote_plans::{
    Arg, Binding, DType, Def, GradResult, Instr, Kind, Meta, Output, Placement, Plan, Region,
    ValueId, is_check, result,
};

use crate::recorder::OF_FIXED_SHAPE;
use crate::refusal::Refusal;
use crate::scalars::{AS_WRITTEN, TracedFloats};

/// What a recording has made of one run of a step.
#[derive(Clone, Debug)]
pub struct Trace {
    /// The plan, with every number as it was in this run.
    pub plan: Plan,
    /// The user's source line of each instruction; empty for a plan from a file.
    pub sources: Vec<String>,
    /// Floats computed from hyperparameters.
    pub floats: TracedFloats,
}

/// Where a number among op arguments may come from: one of its sources.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Source {
    /// Index into the plan's argument pool.
    pub arg: u32,
    /// Index into its traced floats, or [`AS_WRITTEN`].
    pub float: u32,
}

/// An answer about data that the step got: what the check of it expects.
#[derive(Clone, Copy, Debug)]
pub struct Answer<'a> {
    /// Where the step asked; empty in a plan from a file.
    pub source: &'a str,
    /// The element type of what was read. Of tensors that were compared, [`DType::BOOL`].
    pub dtype: DType,
    /// The number as [`rote_plans::CHECK_NUMBER`] takes it, or 1 if the tensors were equal.
    pub bits: i64,
    /// The shape that a result had, if it depends on data.
    pub shape: Option<&'a [i64]>,
    /// The op that made that result.
    op: &'a str,
}

impl PartialEq for Answer<'_> {
    /// Up to an answer that differs, the step asks the same.
    fn eq(&self, other: &Self) -> bool {
        (self.dtype, self.bits, self.shape) == (other.dtype, other.bits, other.shape)
    }
}

impl std::fmt::Display for Answer<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if let Some(shape) = self.shape {
            return write!(f, "{shape:?}");
        }
        match self.dtype {
            DType::BOOL => write!(f, "{}", self.bits != 0),
            DType::F16 | DType::BF16 | DType::F32 | DType::F64 => {
                write!(f, "{:?}", f64::from_bits(self.bits as u64))
            }
            _ => write!(f, "{}", self.bits),
        }
    }
}

/// A check that has failed in a replay.
#[derive(Clone, Debug)]
pub struct Failed {
    /// Which of the recording's checks it was, counted from 0.
    pub check: usize,
    /// What it has found, if that is known: see [`Answer::is`].
    pub found: Option<Vec<i64>>,
}

impl Answer<'_> {
    /// Whether a check of this answer finds it in a number or the dimensions of a shape.
    fn is(&self, found: &[i64]) -> bool {
        match self.shape {
            Some(shape) => shape == found,
            None => [self.bits] == *found,
        }
    }
}

impl Trace {
    /// Whether a replay of this recording would end as one of another recording has: the step asks the same up to the
    /// check that failed there, and this recording has an answer that was not found.
    pub fn fails_as(&self, other: &Trace, failed: &Failed) -> bool {
        let Some(found) = &failed.found else {
            return false;
        };
        let (mut ours, mut theirs) = (self.answers(), other.answers());
        let same_before = (ours.by_ref().take(failed.check)).eq(theirs.by_ref().take(failed.check));
        match (ours.next(), theirs.next()) {
            (Some(ours), Some(theirs)) if same_before => {
                (ours.source, ours.dtype) == (theirs.source, theirs.dtype) && !ours.is(found)
            }
            _ => false,
        }
    }

    /// The answers about data that the step got, in order.
    pub fn answers(&self) -> impl Iterator<Item = Answer<'_>> {
        let plan = &self.plan;
        plan.instrs.iter().enumerate().filter_map(|(at, instr)| {
            let Instr::Local { op, args, .. } = instr else {
                return None;
            };
            if !is_check(plan.str(*op)) {
                return None;
            }
            let (asked, answer) = plan.args[args.indices()].split_first()?;
            let (mut shape, mut op) = (None, "");
            let (dtype, bits) = match (asked, answer.last()?) {
                (Arg::Value(value), Arg::Int(bits)) => (plan.values[*value as usize].dtype, *bits),
                (_, Arg::Bool(equal)) => (DType::BOOL, i64::from(*equal)),
                (Arg::Value(value), Arg::Ints(dims)) => {
                    shape = Some(plan.dims(*dims));
                    op = made_by(plan, *value);
                    (DType::I64, 0)
                }
                _ => return None,
            };
            let source = self.sources.get(at).map_or("", String::as_str);
            Some(Answer {
                source,
                dtype,
                bits,
                shape,
                op,
            })
        })
    }

    /// If a number that the step read from a tensor was another one in another recording: why the step cannot be
    /// replayed if the number changes at every call. A boolean has two values, of which each makes a plan.
    pub fn changing_number(&self, other: &Trace) -> Option<Refusal> {
        let (ours, theirs) = (self.answers().zip(other.answers())).find(|(a, b)| a != b)?;
        if ours.dtype == DType::BOOL {
            return None;
        }
        if ours.shape.is_some() {
            return Some(Refusal::op(
                ours.op,
                ours.source,
                format!(
                    "makes a result whose shape depends on tensor data, and was another one in each of the last recordings \
                     ({theirs}, then {ours}): each shape needs a plan of its own"
                ),
                OF_FIXED_SHAPE,
            ));
        }
        Some(Refusal::op(
            "aten::_local_scalar_dense",
            ours.source,
            format!(
                "reads a number on the host (in Python .item(), float(), print()), which was {theirs} in one call and \
                 {ours} in the next: a plan holds the host's use of one value"
            ),
            "return the tensor and read it outside the captured function, or decide on the device (torch.where in \
             PyTorch)",
        ))
    }

    /// Whether the step decided as in another recording: it got the same answers about data, and comparisons of followed
    /// floats had the same outcomes. Not where that follows floats and this one does not: of a plan from a file none is
    /// known.
    pub fn decides_as(&self, other: &Trace) -> bool {
        self.answers().eq(other.answers())
            && self.floats.is_empty() == other.floats.is_empty()
            && self.floats.decides_as(&other.floats)
    }

    /// Whether what is known of another recording says nothing of this one: the step decided otherwise by followed
    /// floats, or wrote numbers to tensors that came about otherwise.
    pub fn is_other_than(&self, other: &Trace) -> bool {
        !other.decides_as(self)
            || (!other.floats.is_empty() && self.floats.is_unproven(&other.floats))
    }

    /// Every source of every number that a hyperparameter may explain, as far as
    /// one recording can tell.
    pub fn sources(&self) -> Vec<Source> {
        let mut sources = Vec::new();
        let floats = self.floats.by_value();
        for (arg, value) in (0_u32..).zip(&self.plan.args) {
            let Arg::Float(value) = value else {
                continue;
            };
            let found = sources.len();
            let floats = floats.get(&value.to_bits()).into_iter().flatten();
            sources.extend(floats.map(|&float| Source { arg, float }));
            if sources.len() > found {
                let float = AS_WRITTEN;
                sources.push(Source { arg, float });
            }
        }
        sources
    }
}

/// Compares two recordings, of the first of which the sources of numbers are
/// known. Comes back: the sources that fit both, of numbers that a hyperparameter may
/// explain. A number that differs and has no source, and anything else that
/// differs, is a refusal that names the op.
pub fn compare(a: &Trace, known: &[Source], b: &Trace) -> Result<Vec<Source>, Refusal> {
    let same_args = same_bits(&a.plan.args, &b.plan.args);
    let aligned = a.floats.aligned(&b.floats);
    let fitting = |source: &Source| {
        let float = |plan: &Plan| match plan.args.get(source.arg as usize) {
            Some(Arg::Float(value)) => Some(*value),
            _ => None,
        };
        let (x, y) = (float(&a.plan)?, float(&b.plan)?);
        if source.float == AS_WRITTEN {
            return (x.to_bits() == y.to_bits()).then_some(*source);
        }
        let float = aligned[source.float as usize].filter(|&float| b.floats.has_value(float, y))?;
        Some(Source { float, ..*source })
    };
    // What a plan from a file computes was proven when it was made.
    if !a.floats.is_empty() && b.floats.is_unproven(&a.floats) {
        return Err(Refusal::step(
            "writes a number to a tensor, and reads it again, that was the same in two calls: whether it changes with \
             the tensors that the step reads cannot be told",
            "keep the number in a tensor, and compute with tensors",
        ));
    }
    let mut sources: Vec<Source> = known.iter().filter_map(fitting).collect();
    let traced: HashSet<u32> = sources
        .iter()
        .filter(|source| source.float != AS_WRITTEN)
        .map(|source| source.arg)
        .collect();
    sources.retain(|source| traced.contains(&source.arg));
    sources.sort_unstable();
    if let Some(refusal) = strange(a, b, &aligned) {
        return Err(refusal);
    }
    if same_args && a.plan == b.plan {
        return Ok(sources); // the usual case, quickly
    }
    let is_bound = |arg: u32| traced.contains(&arg);
    for (i, (x, y)) in a.plan.instrs.iter().zip(&b.plan.instrs).enumerate() {
        let (left, right) = (render(&a.plan, x, &is_bound), render(&b.plan, y, &is_bound));
        if left != right {
            return Err(differs(a, i, x, &left, &right));
        }
    }
    if a.plan.instrs.len() != b.plan.instrs.len() {
        return Err(Refusal::step(
            format!(
                "ran {} instructions in one call and {} in the next",
                a.plan.instrs.len(),
                b.plan.instrs.len()
            ),
            "pass the value that decides it as an argument of the captured function, so that it is guarded",
        ));
    }
    if a.plan.result != b.plan.result {
        return Err(Refusal::step(
            result::difference(&a.plan.result, &b.plan.result),
            "return tensors, and put tensors into attributes; other values there must not change between calls",
        ));
    }
    if let Some(what) = tables_differ(&a.plan, &b.plan) {
        return Err(Refusal::step(
            format!("left different {what} in two calls in a row"),
            "make the step read, write and return the same tensors at every call",
        ));
    }
    Ok(sources)
}

/// The op that makes a value.
fn made_by(plan: &Plan, value: ValueId) -> &str {
    let instr = match plan.values[value as usize].def {
        Def::Instr(at) => plan.instrs.get(at as usize),
        _ => None,
    };
    match instr {
        Some(Instr::Local { op, .. }) => plan.str(*op),
        _ => "",
    }
}

/// A number may come from a float that came about otherwise in the other recording: then none of the sources that
/// fit both needs to be the one.
fn strange(a: &Trace, b: &Trace, aligned: &[Option<u32>]) -> Option<Refusal> {
    let there: HashSet<u32> = aligned.iter().flatten().copied().collect();
    let alone = |floats: &TracedFloats, is_aligned: &dyn Fn(u32) -> bool| -> HashSet<u64> {
        let alone = |list: &Vec<u32>| list.iter().any(|&float| !is_aligned(float));
        let found = floats.by_value();
        let found = found.iter().filter(|(_, list)| alone(list));
        found.map(|(bits, _)| *bits).collect()
    };
    let only_a = alone(&a.floats, &|float| aligned[float as usize].is_some());
    let only_b = alone(&b.floats, &|float| there.contains(&float));
    if only_a.is_empty() || only_b.is_empty() {
        return None;
    }
    let both = |pair: (&Arg, &Arg)| match pair {
        (Arg::Float(x), Arg::Float(y)) => {
            only_a.contains(&x.to_bits()) && only_b.contains(&y.to_bits())
        }
        _ => false,
    };
    let found = a.plan.args.iter().zip(&b.plan.args).position(both)? as u32;
    let holds = |instr: &Instr| match instr {
        Instr::Local { args, .. } => args
            .indices()
            .any(|arg| holds_arg(&a.plan, arg as u32, found)),
        _ => false,
    };
    let instr = a.plan.instrs.iter().position(holds).unwrap_or(0);
    let text = |plan: &Plan| {
        let instr = plan.instrs.get(instr);
        instr.map_or(String::new(), |instr| render(plan, instr, &|_| false))
    };
    let x = a.plan.instrs.get(instr)?; // there is an argument, so there is an instruction
    Some(differs(a, instr, x, &text(&a.plan), &text(&b.plan)))
}

/// Whether an argument is one in the pool, or holds it.
fn holds_arg(plan: &Plan, arg: u32, found: u32) -> bool {
    arg == found
        || match plan.args[arg as usize] {
            Arg::Wrapped(inner) => holds_arg(plan, inner, found),
            Arg::List(list) => list
                .indices()
                .any(|inner| holds_arg(plan, inner as u32, found)),
            _ => false,
        }
}

/// The first instruction that two plans do not share, and what it is in each; empty
/// where one has ended.
pub fn first_difference(a: &Plan, b: &Plan) -> Option<(usize, String, String)> {
    let text = |plan: &Plan, at: usize| {
        let instr = plan.instrs.get(at);
        instr.map_or(String::new(), |instr| render(plan, instr, &|_| false))
    };
    (0..a.instrs.len().max(b.instrs.len()))
        .map(|at| (at, text(a, at), text(b, at)))
        .find(|(_, x, y)| x != y)
}

fn differs(a: &Trace, instr: usize, x: &Instr, left: &str, right: &str) -> Refusal {
    let op = match x {
        Instr::Local { op, .. } => a.plan.str(*op).to_owned(),
        Instr::Collective(c) => format!("{:?}", c.kind),
        other => format!("{other:?}")
            .split(' ')
            .next()
            .unwrap_or_default()
            .to_owned(),
    };
    Refusal::op(
        &op,
        a.sources.get(instr).map_or("", String::as_str),
        format!(
            "differs between two calls in a row: `{left}` and then `{right}`: a number that the host computes anew \
             (a step counter, a schedule) would be frozen"
        ),
        "keep the number in a tensor, pass it as an argument if it has few values, or let the plan follow it (in \
         PyTorch a number in param_groups)",
    )
}

/// Whether floats are the same bit for bit: 0.0 equals -0.0 otherwise.
fn same_bits(a: &[Arg], b: &[Arg]) -> bool {
    a.iter().zip(b).all(|pair| match pair {
        (Arg::Float(x), Arg::Float(y)) => x.to_bits() == y.to_bits(),
        (Arg::Complex(x, u), Arg::Complex(y, v)) => {
            x.to_bits() == y.to_bits() && u.to_bits() == v.to_bits()
        }
        _ => true,
    })
}

/// An instruction as text, complete enough that equal text means equal effect.
fn render(plan: &Plan, instr: &Instr, is_bound: &impl Fn(u32) -> bool) -> String {
    use std::fmt::Write as _;
    let mut out = String::new();
    match instr {
        Instr::Local {
            op,
            overload,
            args,
            outs,
            writes,
            seeded,
            grad,
        } => {
            let _ = write!(out, "{}", plan.str(*op));
            if *overload != u32::MAX && !plan.str(*overload).is_empty() {
                let _ = write!(out, ".{}", plan.str(*overload));
            }
            out.push('(');
            for (i, index) in args.indices().enumerate() {
                if i > 0 {
                    out.push_str(", ");
                }
                render_arg(plan, index as u32, is_bound, &mut out);
            }
            let _ = write!(out, ") -> {:?}", plan.ids(*outs));
            let _ = write!(out, " writes {:?}", plan.ids(*writes));
            out.push_str(if *seeded { " random" } else { "" });
            out.push_str(if *grad { " with gradients enabled" } else { "" });
            for &id in plan.ids(*outs).iter().filter(|&&id| id != u32::MAX) {
                let _ = write!(out, " {}", region(plan, id));
            }
        }
        Instr::View { base, out: view } => {
            let _ = write!(out, "view of {base} as {view}: {}", region(plan, *view));
        }
        Instr::Collective(c) => {
            let _ = write!(
                out,
                "{:?} {:?} group {} root {} {} -> {} splits {:?} {:?}",
                c.kind,
                c.reduce,
                plan.str(plan.groups[c.group as usize].name),
                c.root,
                c.input,
                c.output,
                plan.dims(c.input_splits),
                plan.dims(c.output_splits)
            );
        }
        other => {
            let _ = write!(out, "{other:?}");
        }
    }
    out
}

/// A value as text, complete enough that equal text means an equal tensor.
fn region(plan: &Plan, value: ValueId) -> String {
    let Region {
        meta,
        root: _,
        offset,
    } = plan.region(value);
    let Meta {
        kind,
        shape,
        strides,
    } = meta;
    let Kind {
        dtype,
        device,
        marks,
    } = kind;
    format!("{dtype}{shape:?} strides {strides:?} offset {offset} {marks} on {device}")
}

fn render_arg(plan: &Plan, index: u32, is_bound: &impl Fn(u32) -> bool, out: &mut String) {
    use std::fmt::Write as _;
    match plan.args[index as usize] {
        Arg::None => out.push_str("None"),
        Arg::Value(value) => {
            let _ = write!(out, "%{value}");
        }
        Arg::Values(range) => {
            let _ = write!(out, "%{:?}", plan.ids(range));
        }
        Arg::Float(_) if is_bound(index) => out.push_str("<bound>"),
        Arg::Float(value) => {
            let _ = write!(out, "{value:?}");
            if value.is_nan() {
                let _ = write!(out, "/{:x}", value.to_bits());
            }
        }
        Arg::Wrapped(inner) => render_arg(plan, inner, is_bound, out),
        Arg::Ints(range) => {
            let _ = write!(out, "{:?}", plan.dims(range));
        }
        Arg::List(range) => {
            out.push('[');
            for (i, inner) in range.indices().enumerate() {
                if i > 0 {
                    out.push_str(", ");
                }
                render_arg(plan, inner as u32, is_bound, out);
            }
            out.push(']');
        }
        Arg::Str(text) => {
            let _ = write!(out, "{:?}", plan.str(text));
        }
        other => {
            let _ = write!(out, "{other:?}");
        }
    }
}

fn tables_differ(a: &Plan, b: &Plan) -> Option<&'static str> {
    let bindings = |plan: &Plan| -> Vec<_> {
        let row = |x: &Binding| {
            let (path, spec) = (plan.str(x.path).to_owned(), spec_text(plan, x.spec));
            (
                x.kind,
                path,
                region(plan, x.value),
                spec,
                x.written,
                x.anchor,
            )
        };
        plan.bindings.iter().map(row).collect()
    };
    let outputs = |plan: &Plan| -> Vec<_> {
        let row = |x: &Output| {
            let (path, spec) = (plan.str(x.path).to_owned(), spec_text(plan, x.spec));
            (path, x.value, spec, x.requires_grad)
        };
        plan.outputs.iter().map(row).collect()
    };
    let grads = |plan: &Plan| -> Vec<_> {
        let row = |x: &GradResult| {
            let (path, spec) = (plan.str(x.path).to_owned(), spec_text(plan, x.spec));
            (path, x.value, spec)
        };
        plan.grads.iter().map(row).collect()
    };
    if bindings(a) != bindings(b) {
        return Some("bindings (tensors of the state that are read or written)");
    }
    if outputs(a) != outputs(b) {
        return Some("results");
    }
    if grads(a) != grads(b) {
        return Some("gradients");
    }
    (a.rng_slots != b.rng_slots).then_some("generator states")
}

/// A spec as text, so that equal text means an equal spec: the same number may
/// stand for different ones in two plans.
fn spec_text(plan: &Plan, index: u32) -> String {
    let Some(spec) = plan.specs.get(index as usize) else {
        return String::new();
    };
    let mesh = &plan.meshes[spec.mesh as usize];
    let names: Vec<&str> = plan
        .ids(mesh.dim_names)
        .iter()
        .map(|&id| plan.str(id))
        .collect();
    let placements: Vec<String> = plan.placements[spec.placements.indices()]
        .iter()
        .map(|placement| match placement {
            Placement::Other { text } => plan.str(*text).to_owned(),
            known => format!("{known:?}"),
        })
        .collect();
    format!(
        "{} {:?} {names:?} {:?} {placements:?} {:?} {:?}",
        plan.str(mesh.device_type),
        plan.dims(mesh.shape),
        plan.dims(mesh.ranks),
        plan.dims(spec.shape),
        plan.dims(spec.strides)
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::{ArgEvent, OpEvent};
    use crate::sample::*;
    use crate::scalars::Origin;

    /// A step that multiplies its argument by a number.
    fn scaled(by: f64, floats: TracedFloats) -> Trace {
        let (x, y) = (tensor(1, &[4]), tensor(2, &[4]));
        let mut mul = op("aten::mul", &[&x], &[&y]);
        mul.args.push(read(ArgEvent::Float(by)));
        recording(&[mul], &[&x], &[&y], floats)
    }

    fn recording(
        ops: &[OpEvent<'_>],
        args: &[&Tensor],
        outputs: &[&Tensor],
        floats: TracedFloats,
    ) -> Trace {
        let mut recorder = recorder(args);
        record(&mut recorder, ops);
        let (plan, sources) = finish(recorder, outputs);
        Trace {
            plan,
            sources,
            floats,
        }
    }

    /// `-lr`, as an optimizer computes it.
    fn negated(lr: f64) -> TracedFloats {
        let mut floats = TracedFloats::default();
        let read = floats
            .add(Origin::Read("opt.lr".to_owned()), lr)
            .expect("known");
        floats.add(Origin::Neg(read), -lr).expect("known");
        floats
    }

    fn compare(a: &Trace, b: &Trace) -> Result<Vec<Source>, Refusal> {
        super::compare(a, &a.sources(), b)
    }

    #[test]
    fn equal_recordings_bind_nothing() {
        let (a, b) = (scaled(0.5, negated(0.1)), scaled(0.5, negated(0.1)));
        assert_eq!(compare(&a, &b), Ok(vec![]));
    }

    #[test]
    fn a_float_that_a_hyperparameter_explains_is_bound() {
        let (a, b) = (scaled(-0.1, negated(0.1)), scaled(-0.2, negated(0.2)));
        assert_eq!(compare(&a, &b), Ok(vec![Source { arg: 1, float: 1 }]));
        assert_eq!(a.plan.args[1], Arg::Float(-0.1));
        // Zeros of either sign are equal, and not the same.
        let (a, b) = (scaled(-0.0, negated(0.0)), scaled(0.0, negated(-0.0)));
        assert_eq!(compare(&a, &b), Ok(vec![Source { arg: 1, float: 1 }]));
    }

    #[test]
    fn a_number_keeps_every_source_that_fits_both() {
        let two = |lr: f64, other: f64| {
            let mut floats = TracedFloats::default();
            for (path, value) in [("opt.lr", lr), ("opt.other", other)] {
                let read = Origin::Read(path.to_owned());
                floats.add(read, value).expect("known");
            }
            floats
        };
        let sources = |floats: &[u32]| -> Result<Vec<Source>, Refusal> {
            Ok(floats
                .iter()
                .map(|&float| Source { arg: 1, float })
                .collect())
        };
        let (a, b) = (scaled(0.1, two(0.1, 0.1)), scaled(0.2, two(0.2, 0.2)));
        assert_eq!(compare(&a, &b), sources(&[0, 1]), "either hyperparameter");
        // A third recording tells them apart.
        let both = compare(&a, &b).expect("equal");
        let c = scaled(0.4, two(0.3, 0.4));
        assert_eq!(super::compare(&b, &both, &c), sources(&[1]));
        // Equal in both, it may be what is written.
        let (a, b) = (scaled(0.1, two(0.1, 0.1)), scaled(0.1, two(0.1, 0.2)));
        assert_eq!(compare(&a, &b), sources(&[0, AS_WRITTEN]));
        assert_eq!(compare(&b, &scaled(0.1, two(0.3, 0.2))), Ok(vec![]));
    }

    #[test]
    fn a_number_that_may_come_from_a_float_of_another_making_is_refused() {
        // `lr` and `lr * t`, where `t` is a counter that nobody follows, are equal by chance in both runs.
        let two = |lr: f64, t: f64| {
            let mut floats = TracedFloats::default();
            let read = Origin::Read("opt.lr".to_owned());
            let lr_read = floats.add(read, lr).expect("known");
            let t_const = floats.add(Origin::Const(t.to_bits()), t).expect("known");
            floats
                .add(Origin::Mul(lr_read, t_const), lr * t)
                .expect("known");
            floats
        };
        let (a, b) = (scaled(0.0, two(0.0, 1.0)), scaled(-0.0, two(-0.0, 2.0)));
        let refusal = compare(&a, &b).expect_err("either may be meant");
        assert_eq!(refusal.op, "aten::mul");
        // In another order they came about alike.
        let mut other = TracedFloats::default();
        for (path, value) in [("opt.beta", 0.9), ("opt.lr", 0.2)] {
            let read = Origin::Read(path.to_owned());
            other.add(read, value).expect("known");
        }
        other.add(Origin::Neg(1), -0.2).expect("known");
        let (a, b) = (scaled(-0.1, negated(0.1)), scaled(-0.2, other));
        assert_eq!(compare(&a, &b), Ok(vec![Source { arg: 1, float: 2 }]));
    }

    #[test]
    fn a_float_that_nothing_explains_is_refused_with_both_values() {
        for (floats, later) in [
            (TracedFloats::default(), TracedFloats::default()),
            (negated(0.1), negated(0.3)), // -0.2 is not the second -lr
        ] {
            let refusal =
                compare(&scaled(-0.1, floats), &scaled(-0.2, later)).expect_err("refused");
            assert_eq!(refusal.op, "aten::mul");
            assert_eq!(refusal.source_line, "train.py:1");
            assert!(refusal.reason.contains("-0.1") && refusal.reason.contains("-0.2"));
        }
    }

    #[test]
    fn floats_are_compared_by_their_bits() {
        let step = |by| scaled(by, TracedFloats::default());
        assert!(compare(&step(f64::NAN), &step(f64::NAN)).is_ok());
        assert!(compare(&step(0.0), &step(-0.0)).is_err());
        assert!(compare(&step(1.0), &step(1.0 + f64::EPSILON)).is_err());
        let other_nan = f64::from_bits(f64::NAN.to_bits() ^ 1);
        assert!(compare(&step(f64::NAN), &step(other_nan)).is_err());
    }

    #[test]
    fn another_number_of_instructions_is_refused() {
        let (x, y, z) = (tensor(1, &[4]), tensor(2, &[4]), tensor(3, &[4]));
        let step = |ops: &[OpEvent<'_>], out: &Tensor| {
            recording(ops, &[&x], &[out], TracedFloats::default())
        };
        let once = [op("aten::relu", &[&x], &[&y])];
        let twice = [
            op("aten::relu", &[&x], &[&y]),
            op("aten::exp", &[&x], &[&z]),
        ];
        let refusal = compare(&step(&once, &y), &step(&twice, &y)).expect_err("refused");
        // The second plan frees what it does not return.
        assert!(
            refusal.reason.contains("1 instructions in one call and 3"),
            "{refusal}"
        );
    }

    #[test]
    fn another_op_is_refused_by_name() {
        let (x, y) = (tensor(1, &[4]), tensor(2, &[4]));
        let step = |name| {
            recording(
                &[op(name, &[&x], &[&y])],
                &[&x],
                &[&y],
                TracedFloats::default(),
            )
        };
        let refusal = compare(&step("aten::relu"), &step("aten::exp")).expect_err("refused");
        assert!(refusal.reason.contains("aten::relu") && refusal.reason.contains("aten::exp"));
    }

    #[test]
    fn a_plan_from_a_file_has_no_source_lines_to_name() {
        let mut stored = scaled(0.1, TracedFloats::default());
        stored.sources.clear();
        let refusal = compare(&stored, &scaled(0.2, TracedFloats::default())).expect_err("refused");
        assert_eq!(refusal.source_line, "");
    }

    #[test]
    fn results_that_differ_in_their_placements_are_refused() {
        let step = |placement: &str| {
            let (x, y) = (tensor(1, &[4]), tensor(2, &[4]));
            let mut recorder = recorder(&[&x]);
            record(&mut recorder, &[op("aten::relu", &[&x], &[&y])]);
            let spec = spec(placement);
            recorder
                .output("result", &y.event(), Some(&spec), false)
                .expect("known");
            let (plan, sources) = finish(recorder, &[]);
            let floats = TracedFloats::default();
            Trace {
                plan,
                sources,
                floats,
            }
        };
        assert_eq!(compare(&step("S(0)"), &step("S(0)")), Ok(vec![]));
        for (a, b) in [("S(0)", "R"), ("S(0)", "S(1)"), ("Mine(1)", "Mine(2)")] {
            let refusal = compare(&step(a), &step(b)).expect_err("refused");
            assert!(refusal.reason.contains("different results"), "{refusal}");
        }
    }

    #[test]
    fn writing_to_another_tensor_of_the_state_is_refused() {
        let (x, w) = (tensor(1, &[4]), tensor(2, &[4]));
        let step = |target: &Tensor, from: &Tensor| {
            let mut recorder = recorder(&[&x, &w]);
            let both = op("aten::sym_size", &[&x, &w], &[]); // binds them in this order
            record(
                &mut recorder,
                &[both, in_place("aten::copy_", target, &[from])],
            );
            let (plan, sources) = finish(recorder, &[]);
            let floats = TracedFloats::default();
            Trace {
                plan,
                sources,
                floats,
            }
        };
        assert!(compare(&step(&x, &w), &step(&x, &w)).is_ok());
        assert!(compare(&step(&x, &w), &step(&w, &x)).is_err());
    }
}

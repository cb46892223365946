//! Answers about data that the host asks for: `bool(mask.all())`, `found_inf.item()`, `torch.equal(a, b)`.
//!
//! A plan cannot hold what the host does with an answer, but a replay does the same for the same answer. So a
//! check stands in the place of the question ([`CHECK_NUMBER`], [`CHECK_EQUAL`]). It ends a replay that finds
//! another answer, and the call is made again: with a plan recorded under that answer, or eagerly. So nothing
//! that lasts may come before a check. One that comes later is moved to the front of the plan, with the ops that
//! its answer needs, if these need nothing that lasts. Or else what lasts is put off: the plan writes to a copy of a
//! tensor until the last check has passed (`shadows.rs`). Where all ranks replay a call and tell each other the outcome
//! of each check, all of them begin anew together: then only collectives may come before a check. Otherwise the
//! question is refused.

use hashbrown::HashSet;
use rote_passes::liveness::{for_each_out, for_each_value, for_each_written};
use rote_passes::reorder;
use rote_plans::{
    CHECK_EQUAL, CHECK_NUMBER, CHECK_SHAPE, DType, Instr, NONE, Plan, ValueId, is_check,
    keeps_to_arguments,
};

use super::checks::{OF_FIXED_SHAPE, indexes_by_integers};
use super::{Recorder, shadows, tensors};
use crate::event::{ArgEvent, Argument, OpEvent, TensorEvent};
use crate::refusal::Refusal;

/// The check that a plan holds in the place of a question, if there is one.
fn check_of<'a>(op: &OpEvent<'a>) -> Option<OpEvent<'a>> {
    let [answer] = op.outs.as_slice() else {
        return None;
    };
    let (name, answer) = match (op.name, op.args.as_slice(), answer) {
        ("aten::_local_scalar_dense", [asked], _) => {
            let ArgEvent::Tensor(tensor) = &asked.value else {
                return None;
            };
            (CHECK_NUMBER, ArgEvent::Int(bits(tensor.dtype, answer)?))
        }
        ("aten::equal", [_, _], ArgEvent::Bool(_)) => (CHECK_EQUAL, answer.clone()),
        _ => return None,
    };
    let mut args = op.args.clone();
    args.push(Argument {
        value: answer,
        written: false,
    });
    Some(OpEvent {
        name,
        overload: "",
        args,
        outs: Vec::new(),
        data_dependent: false,
        ..op.clone()
    })
}

/// A number of a dtype as checks hold it.
fn bits(dtype: DType, number: &ArgEvent<'_>) -> Option<i64> {
    match *number {
        ArgEvent::Bool(value) if dtype == DType::BOOL => Some(i64::from(value)),
        ArgEvent::Int(value)
            if matches!(
                dtype,
                DType::U8 | DType::I8 | DType::I16 | DType::I32 | DType::I64
            ) =>
        {
            Some(value)
        }
        ArgEvent::Float(value)
            if matches!(dtype, DType::F16 | DType::BF16 | DType::F32 | DType::F64) =>
        {
            Some(value.to_bits() as i64)
        }
        _ => None,
    }
}

/// Ops of which the shapes of results depend on data, and nothing else that the host learns: a check of the shapes makes
/// sure of all of it.
const SHAPED_BY_DATA: &[&str] = &[
    "aten::_unique",
    "aten::_unique2",
    "aten::bincount",
    "aten::index",
    "aten::masked_select",
    "aten::nonzero",
    "aten::repeat_interleave",
    "aten::unique_consecutive",
    "aten::unique_dim",
    "aten::unique_dim_consecutive",
];

/// Whether an op gives the host nothing but an answer about the data of its arguments.
pub(super) fn asks(op: &OpEvent<'_>) -> bool {
    matches!(
        op.name,
        "aten::_local_scalar_dense" | "aten::equal" | "aten::is_nonzero"
    )
}

impl Recorder {
    /// Lets plans check answers that the host asks for. The framework must have the ops [`CHECK_NUMBER`] and
    /// [`CHECK_EQUAL`]. Without them such questions are refused.
    pub fn let_host_ask(&mut self) {
        self.may_ask = true;
    }

    /// Lets plans check answers behind collectives: the ranks agree about each call, and about each check.
    pub fn let_ranks_agree(&mut self) {
        self.ranks_agree = true;
    }

    /// Whether the host has asked for data, and has got an answer that the plan checks.
    pub fn asks(&self) -> bool {
        has_checks(&self.tables.plan)
    }

    /// Whether a plan can hold an op of which the shapes of results depend on the data of its arguments.
    pub(super) fn may_check_shapes(&self, op: &OpEvent<'_>) -> bool {
        let gives_new = op.args.iter().all(|arg| !arg.written); // no `out=`
        let is_shaped = gives_new && SHAPED_BY_DATA.contains(&op.name);
        self.may_ask && is_shaped && !self.may_be_on_its_way(op)
    }

    /// Puts checks behind an op, of the shapes of its results: Python, and all recorded ops behind it, go by them.
    pub(super) fn check_shapes(&mut self, op: &OpEvent<'_>) -> Result<(), Refusal> {
        if !op.data_dependent || indexes_by_integers(op) || !self.may_check_shapes(op) {
            return Ok(());
        }
        for result in op.outs.iter().flat_map(tensors).filter(|t| t.storage != 0) {
            let argument = |value, written| Argument { value, written };
            let sizes = ArgEvent::Ints(result.sizes);
            let check = OpEvent {
                name: CHECK_SHAPE,
                overload: "",
                args: vec![
                    argument(ArgEvent::Tensor(*result), true),
                    argument(sizes, false),
                ],
                outs: Vec::new(),
                data_dependent: false,
                ..op.clone()
            };
            self.put_check(op, &check)?;
        }
        Ok(())
    }

    /// Puts a check in the place of a question.
    pub(super) fn question_of_data(&mut self, op: &OpEvent<'_>) -> Result<(), Refusal> {
        let check = check_of(op).filter(|_| self.may_ask);
        let Some(check) = check else {
            return Err(self.host_read(op, None));
        };
        self.check_tensors(op)?;
        if self.may_be_on_its_way(op) {
            return Err(self.host_read(op, None));
        }
        self.put_check(op, &check)
    }

    /// Records a check for an op, if a replay can begin anew there.
    fn put_check(&mut self, op: &OpEvent<'_>, check: &OpEvent<'_>) -> Result<(), Refusal> {
        self.local(check)?;
        if let Some(lasting) = self.first_lasting {
            let at = self.len() - 1;
            if ahead(&self.tables.plan, at).is_some() {
                self.ahead.push(at);
                return Ok(());
            }
            let only_collectives = self.first_final.is_none() && self.unwaited() == 0;
            if !(self.ranks_agree && only_collectives) {
                let lasting = match self.ranks_agree {
                    true => self.first_final.unwrap_or(lasting),
                    false => lasting,
                };
                let refusal = self.host_read(op, Some(lasting as usize));
                if self.unwaited() == 0 && self.shadowed(at).is_some() {
                    self.unless_shadowed.get_or_insert(refusal);
                    return Ok(());
                }
                self.tables.plan.instrs.pop();
                self.sources.pop();
                return Err(refusal);
            }
        }
        Ok(())
    }

    /// Whether an op reads memory of the host that another device may still write: the step waits for that, and a
    /// replay would not.
    fn may_be_on_its_way(&self, op: &OpEvent<'_>) -> bool {
        let plan = &self.tables.plan;
        let written = |binding: u32| plan.bindings[binding as usize].written;
        let made = |t: &TensorEvent<'_>| match self.roots.get(&t.storage) {
            Some(root) => root.binding.is_none_or(written),
            None => false,
        };
        let mut asked = op.args.iter().flat_map(|arg| tensors(&arg.value));
        asked.any(|t| t.device.is_cpu() && made(t))
            && plan.values.iter().any(|value| !value.device.is_cpu())
    }

    /// The refusal of a question of data. `lasting`: the instruction after which a replay cannot begin anew.
    pub(super) fn host_read(&self, op: &OpEvent<'_>, lasting: Option<usize>) -> Refusal {
        let after = lasting.map_or(String::new(), |at| {
            let plan = &self.tables.plan;
            let source = self.sources.get(at).map_or("", |&line| plan.str(line));
            let place = if source.is_empty() {
                String::new()
            } else {
                format!(" at {source}")
            };
            let did = match &plan.instrs[at] {
                Instr::Local { op, .. } if keeps_to_arguments(plan.str(*op)) => {
                    format!(
                        "{}{place} has written a tensor that outlives the call",
                        plan.str(*op)
                    )
                }
                Instr::Local { op, .. } => format!("{}{place} has run", plan.str(*op)),
                _ => format!("a collective{place} was sent"),
            };
            format!(", after {did}, so that a replay that finds another value could not begin anew")
        });
        let sent = lasting.is_some_and(|at| {
            matches!(
                self.tables.plan.instrs[at],
                Instr::Collective(_) | Instr::Wait { .. }
            )
        });
        let agreeing = sent && !self.ranks_agree && self.first_final.is_none();
        let remedy = match agreeing {
            true => {
                "pass agree=True to rote.capture, if all ranks call the step equally often: they then agree about the value"
            }
            false => {
                "return the tensor and read it outside the captured function, or decide on the device (torch.where in \
                 PyTorch); an optimizer of your own can compute with its step counter as a tensor"
            }
        };
        if SHAPED_BY_DATA.contains(&op.name) {
            let reason = format!("makes a result whose shape depends on tensor data{after}");
            let remedy = if agreeing { remedy } else { OF_FIXED_SHAPE };
            return Refusal::op(op.name, op.source, reason, remedy);
        }
        Refusal::op(
            op.name,
            op.source,
            format!(
                "reads a tensor on the host (in Python .item(), float(), bool(), print()): a plan cannot hold the host's \
                 use of the value{after}"
            ),
            remedy,
        )
    }

    /// The tensors that the plan has to write to copies of, so that a check can stand where it does, or an op can raise.
    fn shadowed(&self, at: usize) -> Option<Vec<ValueId>> {
        shadows::shadowed(&self.tables.plan, at, self.ranks_agree)
    }

    /// The step handles errors of the op that was recorded last, and has done what lasts: a replay must be able to begin
    /// anew there. Comes back: whether a plan can put that off, as ahead of a check.
    pub fn put_off_until_last(&mut self, refusal: &Refusal) -> bool {
        let at = self.len() - 1;
        if !self.may_ask || self.ranks_agree || self.unwaited() != 0 || self.shadowed(at).is_none()
        {
            return false;
        }
        self.handled.push(at);
        self.unless_shadowed.get_or_insert(refusal.clone());
        true
    }

    /// The last place where a replay must be able to begin anew: a check, or an op of which the step handles errors.
    fn last_place(&self, counts: impl Fn(usize) -> bool) -> Option<usize> {
        let plan = &self.tables.plan;
        let is_check = |&at: &usize| checks(plan, &plan.instrs[at]) && counts(at);
        let check = (0..plan.instrs.len()).rev().find(is_check);
        check.max(self.handled.iter().max().copied())
    }

    /// Why the step can't be replayed, if it writes tensors ahead of such a place and does more with them than a plan can
    /// put off until that has passed.
    pub fn late_check(&self) -> Option<Refusal> {
        let refusal = self.unless_shadowed.as_ref()?;
        let last = self.last_place(|at| !self.ahead.contains(&at))?;
        match self.shadowed(last) {
            Some(_) => None,
            None => Some(refusal.clone()),
        }
    }

    /// Puts writes of tensors off until the last check has passed, and the last op of which the step handles errors.
    pub(super) fn write_behind_checks(&mut self) {
        let last = self.last_place(|_| true);
        let Some(last) = last.filter(|_| self.unless_shadowed.is_some()) else {
            return;
        };
        if let Some(found) = self.shadowed(last) {
            shadows::shadow(&mut self.tables.plan, &mut self.sources, last, &found);
        }
    }

    /// Moves checks that must come first to the front, with what they need.
    pub(super) fn put_checks_first(&mut self) {
        let plan = &mut self.tables.plan;
        let mut moved = vec![false; plan.instrs.len()];
        for &check in &self.ahead {
            // What was recorded since lies behind the check, and changes nothing of the answer.
            for at in ahead(plan, check).unwrap_or_default() {
                moved[at] = true;
            }
        }
        let (front, rest): (Vec<usize>, Vec<usize>) = (0..moved.len()).partition(|&at| moved[at]);
        if front.is_empty() {
            return;
        }
        for grad in &mut plan.grads {
            while moved.get(grad.gone as usize) == Some(&true) {
                grad.gone += 1; // its turn is that of the next one that stays
            }
            if grad.gone as usize == moved.len() {
                grad.gone = NONE;
            }
        }
        let order: Vec<usize> = front.into_iter().chain(rest).collect();
        reorder(plan, &order);
        self.sources = order.iter().map(|&at| self.sources[at]).collect();
        for at in &mut self.handled {
            *at = order.iter().position(|old| old == at).unwrap_or(*at);
        }
    }
}

/// The instructions that a check needs, with itself, if these can run before all others: they make results from
/// their arguments and draw no random numbers, nothing before them writes a tensor that outlives the call where
/// they read, and none of the others reads what they write in place.
fn ahead(plan: &Plan, check: usize) -> Option<Vec<usize>> {
    let root = |value: ValueId| plan.values[value as usize].root;
    let mut needed = vec![check];
    let (mut values, mut roots) = (HashSet::new(), HashSet::new());
    let mut written = HashSet::new(); // in place, behind the instruction that is looked at
    for_each_value(plan, &plan.instrs[check], |value| {
        values.insert(value);
        roots.insert(root(value));
    });
    for at in (0..check).rev() {
        let instr = &plan.instrs[at];
        let mut is_needed = false;
        for_each_out(plan, instr, |out| is_needed |= values.contains(&out));
        let mut writes = Vec::new();
        for_each_written(plan, instr, |root| writes.push(root));
        is_needed |= writes.iter().any(|root| roots.contains(root));
        match instr {
            Instr::View { out, .. } => is_needed |= values.contains(out),
            Instr::Wait { value } => is_needed |= roots.contains(&root(*value)),
            _ => {}
        }
        if !is_needed {
            let mut disturbs = false;
            for_each_value(plan, instr, |value| {
                disturbs |= written.contains(&root(value));
            });
            if disturbs && !matches!(instr, Instr::View { .. }) {
                return None;
            }
            continue;
        }
        let moves = match instr {
            Instr::Local { op, seeded, .. } => {
                !seeded
                    && keeps_to_arguments(plan.str(*op))
                    && !writes.iter().any(|&root| plan.is_bound(root))
            }
            Instr::View { .. } => true,
            _ => false,
        };
        if !moves {
            return None;
        }
        written.extend(writes);
        needed.push(at);
        for_each_value(plan, instr, |value| {
            values.insert(value);
            roots.insert(root(value));
        });
    }
    needed.reverse();
    Some(needed)
}

/// Whether the step of a plan asks for data on the host.
pub fn has_checks(plan: &Plan) -> bool {
    plan.instrs.iter().any(|instr| checks(plan, instr))
}

/// Whether nothing that lasts comes before a check in a plan: [`super::failing`] says what does.
pub fn checks_come_first(plan: &Plan) -> bool {
    let mut lasts = false;
    no_check_behind(plan, |instr| {
        lasts |= super::failing::lasts(plan, instr);
        lasts
    })
}

/// Whether all ranks can begin a call of a plan anew at each of its checks: nothing comes before one but what changes
/// nothing, and collectives between tensors of the step's own, each of which the step has waited for.
pub fn checks_can_agree(plan: &Plan) -> bool {
    let (mut is_final, mut under_way) = (false, 0_i64);
    no_check_behind(plan, |instr| {
        is_final |= super::failing::is_final(plan, instr);
        under_way += i64::from(matches!(instr, Instr::Collective(_)));
        under_way -= i64::from(matches!(instr, Instr::Wait { .. }));
        is_final || under_way != 0
    })
}

/// Whether a plan has no check behind an instruction after which, as `closes` says, none may come.
fn no_check_behind(plan: &Plan, mut closes: impl FnMut(&Instr) -> bool) -> bool {
    let mut closed = false;
    plan.instrs.iter().all(|instr| {
        let fits = !(closed && checks(plan, instr));
        closed = closes(instr);
        fits
    })
}

fn checks(plan: &Plan, instr: &Instr) -> bool {
    matches!(instr, Instr::Local { op, .. } if is_check(plan.str(*op)))
}

#[cfg(test)]
mod tests {
    use rote_plans::BindingKind;

    use super::*;
    use crate::sample::*;

    /// The question for the number in a tensor of `f32`.
    fn item(tensor: &Tensor, number: f64) -> OpEvent<'_> {
        let mut event = op("aten::_local_scalar_dense", &[tensor], &[]);
        event.outs.push(ArgEvent::Float(number));
        event.data_dependent = true;
        event
    }

    fn asking(args: &[&Tensor]) -> Recorder {
        let mut recorder = recorder(args);
        recorder.let_host_ask();
        recorder
    }

    #[test]
    fn a_check_stands_where_the_host_asks() {
        let (x, sum, y) = (tensor(1, &[4]), tensor(2, &[]), tensor(3, &[4]));
        let mut recorder = asking(&[&x]);
        assert!(!recorder.asks());
        let mut equal = op("aten::equal", &[&x, &y], &[]);
        equal.outs.push(ArgEvent::Bool(true));
        let ops = [
            op("aten::sum", &[&x], &[&sum]),
            item(&sum, 2.0),
            op("aten::relu", &[&x], &[&y]),
            equal,
        ];
        record(&mut recorder, &ops);
        assert!(recorder.asks() && !recorder.may_raise());
        let (plan, _) = finish(recorder, &[&y]);
        let two = 2.0_f64.to_bits();
        let check = format!("check_number %1 Int({two})");
        let rest = ["free %1", "relu %0 > %2", "check_equal %0 %2 Bool(true)"];
        assert_eq!(program(&plan)[..2], ["sum %0 > %1", &check]);
        assert_eq!(program(&plan)[2..], rest);
        assert!(checks_come_first(&plan) && has_checks(&plan));
    }

    /// An op whose result has as many rows as the data says.
    fn shaped<'a>(of: &'a Tensor, result: &'a Tensor) -> OpEvent<'a> {
        let mut event = op("aten::nonzero", &[of], &[result]);
        event.data_dependent = true;
        event
    }

    #[test]
    fn a_check_stands_behind_a_shape_that_depends_on_data() {
        let (x, found, y) = (tensor(1, &[4]), tensor(2, &[3, 1]), tensor(3, &[3, 1]));
        let mut recorder = asking(&[&x]);
        record(
            &mut recorder,
            &[shaped(&x, &found), op("aten::relu", &[&found], &[&y])],
        );
        assert!(recorder.asks());
        let (plan, _) = finish(recorder, &[&y]);
        let lines = program(&plan);
        assert_eq!(lines[0], "nonzero %0 > %1", "{lines:?}");
        assert!(lines[1].starts_with("check_shape %1 "), "{lines:?}");
        assert!(checks_come_first(&plan));
        // Whoever reads the result stays behind the check, which says that it writes.
        let mut written = Vec::new();
        for_each_written(&plan, &plan.instrs[1], |root| written.push(root));
        assert_eq!(written, [1]);
    }

    #[test]
    fn shapes_behind_what_lasts_are_refused() {
        let (x, state, found) = (tensor(1, &[4]), tensor(2, &[LARGE]), tensor(3, &[3, 1]));
        let mut recorder = asking(&[&x, &state]);
        record(&mut recorder, &[in_place("aten::add_", &state, &[&x])]);
        let late = refusal(&mut recorder, &shaped(&state, &found));
        assert!(
            late.reason
                .contains("shape depends on tensor data, after aten::add_"),
            "{late}"
        );
        // What does not depend on it moves ahead of it.
        let mut recorder = asking(&[&x, &state]);
        let ops = [in_place("aten::add_", &state, &[&x]), shaped(&x, &found)];
        record(&mut recorder, &ops);
        let lines = program(&finish(recorder, &[&found]).0);
        assert!(
            lines[0].starts_with("nonzero") && lines[1].starts_with("check_shape"),
            "{lines:?}"
        );
        // Without checks, such an op is refused.
        refusal(&mut crate::sample::recorder(&[&x]), &shaped(&x, &found));
    }

    /// Elements of a state that is too large for a plan to copy it.
    const LARGE: i64 = 1 << 25;

    #[test]
    fn nothing_that_lasts_may_come_before() {
        let (x, state, sum) = (tensor(1, &[4]), tensor(2, &[LARGE]), tensor(3, &[]));
        let (sent, mine) = (tensor(4, &[]), tensor(5, &[]));
        let all_reduce = |out| {
            collective(
                "_c10d_functional::all_reduce",
                &sum,
                vec![ArgEvent::Str("sum")],
                out,
            )
        };
        let custom = op("mine::log", &[&x], &[&mine]);
        for (before, what) in [
            (
                in_place("aten::add_", &state, &[&sum]),
                "aten::add_ at train.py:1 has written",
            ),
            (all_reduce(&sent), "a collective at train.py:1 was sent"),
            (custom, "mine::log at train.py:1 has run"),
        ] {
            // The value depends on what lasts, or may be read before it.
            for (asked, depends) in [(&state, true), (&sent, true), (&mine, true), (&sum, false)] {
                let mut recorder = asking(&[&x, &state]);
                let made = before.args.iter().chain([&read(before.outs[0].clone())]).any(|arg| {
                    matches!(&arg.value, ArgEvent::Tensor(t) if t.storage == asked.event().storage)
                });
                if depends && !made {
                    continue;
                }
                record(
                    &mut recorder,
                    &[op("aten::sum", &[&x], &[&sum]), before.clone()],
                );
                let result = recorder.op(&item(asked, 1.0));
                if depends {
                    let refusal = result.expect_err("it is too late");
                    assert!(refusal.reason.contains(what), "{refusal}");
                    assert!(!recorder.asks());
                    continue;
                }
                result.expect("it is recorded");
                let (plan, sources) = finish(recorder, &[]);
                assert!(checks_come_first(&plan), "{:?}", program(&plan));
                let names = program(&plan);
                assert!(names[0].starts_with("sum") && names[1].starts_with("check_number"));
                assert_eq!(sources.len(), names.len());
            }
        }
    }

    #[test]
    fn what_moves_ahead_changes_nothing_for_the_rest() {
        let (x, state) = (tensor(1, &[4]), tensor(2, &[LARGE]));
        let (sum, work, out) = (tensor(3, &[]), tensor(4, &[4]), tensor(5, &[4]));
        let late = in_place("aten::add_", &state, &[&x]);
        // The value comes of a tensor that is written in place after something else has read it.
        let mut recorder = asking(&[&x, &state]);
        let ops = [
            op("aten::relu", &[&x], &[&work]),
            op("aten::neg", &[&work], &[&out]),
            late.clone(),
            in_place("aten::mul_", &work, &[&x]),
            op("aten::sum", &[&work], &[&sum]),
        ];
        record(&mut recorder, &ops);
        recorder
            .op(&item(&sum, 1.0))
            .expect_err("neg would read what mul_ has written");
        // Nothing else has read it: all of it moves.
        let mut recorder = asking(&[&x, &state]);
        record(
            &mut recorder,
            &[ops[0].clone(), late.clone(), ops[3].clone(), ops[4].clone()],
        );
        recorder.op(&item(&sum, 1.0)).expect("it is recorded");
        record(&mut recorder, &[op("aten::neg", &[&work], &[&out])]);
        let (plan, _) = finish(recorder, &[&out]);
        let names: Vec<String> = program(&plan)
            .iter()
            .map(|line| line.split(' ').next().unwrap_or("").to_owned())
            .collect();
        assert_eq!(
            names,
            [
                "relu",
                "mul_",
                "sum",
                "check_number",
                "free",
                "add_",
                "neg",
                "free"
            ]
        );
        let mut recorder = asking(&[&x, &state]);
        let mut random = op("aten::rand_like", &[&x], &[&work]);
        random.seeded = true;
        record(&mut recorder, &[late.clone(), random, ops[4].clone()]);
        recorder
            .op(&item(&sum, 1.0))
            .expect_err("the generator would move at another time");
        // What the state held before it was written can be read first, what it holds afterwards cannot.
        let mut recorder = asking(&[&x, &state]);
        record(
            &mut recorder,
            &[late.clone(), op("aten::sum", &[&state], &[&sum])],
        );
        recorder
            .op(&item(&sum, 1.0))
            .expect_err("it depends on the write");
        let mut recorder = asking(&[&x, &state]);
        record(&mut recorder, &[op("aten::sum", &[&state], &[&sum]), late]);
        recorder
            .op(&item(&sum, 1.0))
            .expect("it was read before the write");
        assert!(checks_come_first(&finish(recorder, &[]).0));
    }

    /// A small state is written through a copy; the last check lets the copy go back, and the state is itself from then
    /// on.
    #[test]
    fn writes_are_put_off_until_the_last_check() {
        let (x, state, sum, out) = (
            tensor(1, &[4]),
            tensor(2, &[4]),
            tensor(3, &[]),
            tensor(4, &[2]),
        );
        let half = state.view(&[2], &[1], 2);
        let mut recorder = asking(&[&x, &state]);
        let ops = [
            op("aten::slice", &[&state], &[&half]),
            in_place("aten::add_", &half, &[&out]),
            op("aten::sum", &[&state], &[&sum]),
        ];
        record(&mut recorder, &[op("aten::relu", &[&x], &[&out])]);
        record(&mut recorder, &ops);
        recorder.op(&item(&sum, 1.0)).expect("it is put off");
        recorder.op(&item(&sum, 1.0)).expect("it is put off");
        let later = tensor(5, &[4]);
        record(&mut recorder, &[op("aten::neg", &[&state], &[&later])]);
        recorder
            .output("result[0]", &later.event(), None, false)
            .expect("it is known");
        assert!(recorder.late_check().is_none());
        let (plan, sources) = finish(recorder, &[]);
        assert!(checks_come_first(&plan), "{:?}", program(&plan));
        assert_eq!(sources.len(), plan.instrs.len());
        let lines = program(&plan);
        let at = |name: &str| {
            (0..lines.len())
                .filter(|&at| lines[at].starts_with(name))
                .collect::<Vec<_>>()
        };
        let (copies, checks) = (at("copy_"), at("check_number"));
        assert_eq!((copies.len(), checks.len()), (2, 2), "{lines:?}");
        assert!(copies[0] < at("add_")[0] && checks[1] < copies[1] && copies[1] < at("neg")[0]);
        let state = plan.bindings.iter().find(|binding| binding.written);
        let state = state.expect("the state is bound").value;
        for (at, instr) in plan.instrs.iter().enumerate() {
            let mut sees = false;
            for_each_value(&plan, instr, |value| {
                sees |= plan.values[value as usize].root == state;
            });
            let itself = copies.contains(&at) || lines[at].starts_with("neg");
            assert_eq!(sees, itself, "{}", lines[at]);
        }
    }

    /// Behind the check, views that were made before it are views of the state itself: they are written, and returned.
    #[test]
    fn views_are_of_the_state_again_behind_the_last_check() {
        let (x, state, sum) = (tensor(1, &[4]), tensor(2, &[4]), tensor(3, &[]));
        let (first, part) = (state.view(&[2], &[1], 0), state.view(&[2], &[1], 2));
        let mut recorder = asking(&[&x, &state]);
        let ops = [
            op("aten::slice", &[&state], &[&first]),
            op("aten::slice", &[&state], &[&part]),
            in_place("aten::add_", &state, &[&x]),
            op("aten::sum", &[&state], &[&sum]),
        ];
        record(&mut recorder, &ops);
        recorder.op(&item(&sum, 1.0)).expect("it is put off");
        record(&mut recorder, &[in_place("aten::mul_", &part, &[&part])]);
        for (name, result) in [("result[0]", &state), ("result[1]", &first)] {
            recorder
                .output(name, &result.event(), None, false)
                .expect("it is known");
        }
        assert!(recorder.late_check().is_none());
        let (plan, _) = finish(recorder, &[]);
        assert!(checks_come_first(&plan), "{:?}", program(&plan));
        let lines = program(&plan);
        let root = |value: ValueId| plan.values[value as usize].root;
        let bound = plan.bindings.iter().find(|binding| binding.written);
        let bound = bound.expect("the state is bound").value;
        let written = |name: &str| {
            let at = lines.iter().position(|line| line.starts_with(name));
            let mut found = Vec::new();
            for_each_written(&plan, &plan.instrs[at.expect("it is there")], |root| {
                found.push(root)
            });
            found
        };
        assert_ne!(written("add_"), [bound], "{lines:?}");
        assert_eq!(written("mul_"), [bound], "{lines:?}");
        assert!(
            plan.outputs
                .iter()
                .all(|output| root(output.value) == bound),
            "{lines:?}"
        );
    }

    #[test]
    fn answers_that_no_check_can_tell_are_refused() {
        let x = tensor(1, &[]);
        for answer in [
            ArgEvent::Complex(1.0, 0.0),
            ArgEvent::Int(1),
            ArgEvent::None,
        ] {
            let mut event = item(&x, 1.0);
            event.outs[0] = answer;
            refusal(&mut asking(&[&x]), &event);
        }
        refusal(&mut asking(&[]), &item(&x, 1.0)); // no tensor of the step
        let far = tensor(2, &[]);
        let mut event = far.event();
        event.device.kind = 1;
        let mut recorder = asking(&[]);
        recorder.name_tensor(BindingKind::Arg, "args[0]", &event, None, None);
        let mut copy = op("aten::_to_copy", &[], &[&x]);
        copy.args = vec![read(ArgEvent::Tensor(event))];
        record(&mut recorder, &[copy]);
        let refusal = refusal(&mut recorder, &item(&x, 1.0));
        assert!(
            refusal.reason.contains("on the host"),
            "the copy may not be done: {refusal}"
        );
    }
}

//! Rules that a script states when it is asked, in JSON: what the truth table judges
//! besides Rote's own rules.
//!
//! A question is an op with its arguments, tensors without placements:
//! `{"op": "my::op", "args": [{"tensor": "f64[8,4]"}, 1, {"float": "0.5"}]}`. The answer
//! has the op's results and its strategies on one mesh dim, where a number stands for a
//! sharding placeholder of that dim:
//! `{"outputs": ["f64[8,4]"], "strategies": [[0, 0], ["P(sum)", "P(sum)"]], "written": []}`.
//! `written` lists inputs that the op writes, each with the result that it becomes, or
//! null. With `"added": true`, the strategies are added to Rote's rule, which says the rest.
//! An answer `{"error": "..."}` says why there is no rule.

use std::sync::Arc;

use rote_propagation::rule::{Need, Slot};
use rote_propagation::{
    Arg, Mesh, Placement, PropagationError, Query, Registry, Rule, Spec, TensorMeta, rule_with,
    standard_rules, stated,
};
use serde_json::{Value as Json, json};

/// Answers a question about an op.
pub type Ask = dyn Fn(&str) -> Result<String, String> + Send + Sync;

/// Puts rules that `ask` states in the place of those of ops.
pub(crate) fn put<'a>(rules: &mut Registry, ops: impl Iterator<Item = &'a str>, ask: &Arc<Ask>) {
    for op in ops {
        let ask = Arc::clone(ask);
        rules.replace(op, Arc::new(move |query| rule(&*ask, query)));
    }
}

/// The rule of an op with these arguments.
fn rule(ask: &Ask, query: &Query<'_>) -> Result<Rule, PropagationError> {
    let wrong = |reason: String| PropagationError::OwnRule {
        op: query.op.into(),
        reason,
    };
    let args: Result<Vec<Json>, String> = query.args.iter().map(argument).collect();
    let question = json!({"op": query.op, "args": args.map_err(wrong)?});
    let answer = ask(&question.to_string()).map_err(wrong)?;
    let answer: Json = serde_json::from_str(&answer).map_err(|e| wrong(e.to_string()))?;
    if let Some(error) = answer.get("error").and_then(Json::as_str) {
        return Err(wrong(error.to_owned()));
    }
    let unreadable = || wrong(format!("the answer cannot be read: {answer}"));
    let list = |key: &str| {
        answer
            .get(key)
            .and_then(Json::as_array)
            .ok_or_else(unreadable)
    };
    let outputs = list("outputs")?.iter();
    let outputs: Option<Vec<TensorMeta>> = outputs.map(meta).collect();
    let strategies = list("strategies")?.iter();
    let strategies: Option<Vec<Vec<Slot>>> = strategies
        .map(|strategy| strategy.as_array()?.iter().map(slot).collect())
        .collect();
    let strategies = strategies.ok_or_else(unreadable)?;
    if answer.get("added").and_then(Json::as_bool) == Some(true) {
        return rule_with(standard_rules()?, query, strategies, false);
    }
    let outputs = outputs.ok_or_else(unreadable)?;
    let (tensors, results) = (query.inputs().count(), outputs.len());
    let mut rule = stated::rule(query, outputs, strategies)?;
    for written in list("written")? {
        let place = |at: usize, limit: usize| {
            let place = written.get(at).and_then(Json::as_u64)?;
            usize::try_from(place).ok().filter(|place| *place < limit)
        };
        let input = place(0, tensors).ok_or_else(unreadable)?;
        match written.get(1).is_some_and(Json::is_null) {
            true => rule.writes(input),
            false => rule.returns(input, place(1, results).ok_or_else(unreadable)?),
        }
    }
    Ok(rule)
}

/// An argument as a question has it.
fn argument(arg: &Arg) -> Result<Json, String> {
    let tensor = |spec: &Spec| spec.meta.as_ref().map(|meta| json!(meta.to_string()));
    let float = |x: &f64| json!({"float": x.to_string()});
    Ok(match arg {
        Arg::Tensor(spec) => json!({"tensor": tensor(spec)}),
        Arg::Tensors(list) => {
            let list = list.iter().map(|spec| spec.as_ref().and_then(tensor));
            json!({"tensors": list.collect::<Vec<_>>()})
        }
        Arg::Int(n) => json!(n),
        Arg::Ints(n) => json!(n),
        Arg::Bool(b) => json!(b),
        Arg::Float(x) => float(x),
        Arg::Floats(x) => Json::Array(x.iter().map(float).collect()),
        Arg::Text(text) => json!(text),
        Arg::DType(dtype) => json!({"dtype": dtype.to_string()}),
        Arg::None => Json::Null,
        Arg::Complex(..) | Arg::Complexes(_) => {
            return Err("complex numbers among the arguments".to_owned());
        }
    })
}

fn meta(text: &Json) -> Option<TensorMeta> {
    let mesh = Mesh::parse("1").ok()?;
    Spec::parse(text.as_str()?, &mesh).ok()?.meta
}

fn slot(written: &Json) -> Option<Slot> {
    if let Some(dim) = written.as_u64() {
        return Some(Slot::Shard(u32::try_from(dim).ok()?, Need::Nothing));
    }
    Some(match Placement::parse(written.as_str()?).ok()? {
        Placement::Shard { dim } => Slot::Plain(dim, Need::Nothing),
        placement => Slot::Fixed(placement),
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use super::*;

    fn asked(answer: &'static str) -> Result<Rule, String> {
        let mesh = Mesh::parse("2").unwrap();
        let args = ["f64[8,4]", "0.5", "{f32[2]; none}", "bf16"];
        let args: Vec<Arg> = args.iter().map(|a| Arg::parse(a, &mesh).unwrap()).collect();
        let ask = move |question: &str| {
            let expected = json!({"op": "my::op", "args": [
                {"tensor": "f64[8,4]"}, {"float": "0.5"}, {"tensors": ["f32[2]", null]},
                {"dtype": "bf16"},
            ]});
            assert_eq!(serde_json::from_str::<Json>(question).unwrap(), expected);
            Ok(answer.to_owned())
        };
        let query = Query {
            op: "my::op",
            args: &args,
        };
        rule(&ask, &query).map_err(|error| error.to_string())
    }

    #[test]
    fn an_answer_becomes_a_rule() {
        let found = asked(
            r#"{"outputs": ["f64[8]"], "strategies": [[0, 0, "R"], ["P(sum)", "S(1)", "R"]],
                "written": [[1, null]]}"#,
        );
        let shown = format!("{:?}", found.unwrap().strategies().collect::<Vec<_>>());
        for part in ["Shard(0, Filled)", "Plain(1, Filled)", "Partial(Sum)"] {
            assert!(shown.contains(part), "{part} in {shown}");
        }
    }

    #[test]
    fn an_answer_that_is_no_rule_is_refused() {
        for (answer, reason) in [
            (r#"{"error": "no such op"}"#, "my::op: no such op"),
            ("{", "my::op: EOF while parsing an object"),
            ("{}", "cannot be read"),
            (
                r#"{"outputs": ["x"], "strategies": [], "written": []}"#,
                "cannot be read",
            ),
            (
                r#"{"outputs": [], "strategies": [["S"]], "written": []}"#,
                "cannot be read",
            ),
            (
                r#"{"outputs": [], "strategies": [], "written": [[2, null]]}"#,
                "cannot be read",
            ),
            (
                r#"{"outputs": [], "strategies": [], "written": [[0, 0]]}"#,
                "cannot be read",
            ),
            (
                r#"{"outputs": [], "strategies": [["R"]], "written": []}"#,
                "expected 2 placements",
            ),
            (
                r#"{"outputs": [], "strategies": [[2, "R"]], "written": []}"#,
                "found dim 2",
            ),
        ] {
            let found = asked(answer).unwrap_err();
            assert!(found.contains(reason), "{answer}: {found}");
        }
    }
}

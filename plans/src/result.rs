//! How the result structures of two recordings differ, in words (docs/plan-format.md).

use serde_json::Value;

/// What a step has done in one call and in the next with the first part that differs: what it has returned, or put into
/// an attribute.
pub fn difference(one: &str, next: &str) -> String {
    let parsed = |text| serde_json::from_str::<Value>(text).unwrap_or_default();
    let (one, next) = (without_views(parsed(one)), without_views(parsed(next)));
    let (ones, nexts) = (parts(&one), parts(&next));
    let differing = ones.iter().zip(&nexts).find(|(one, next)| one != next);
    match differing {
        Some((one, next)) => match (kept(one), kept(next)) {
            (Some((path, one)), Some((other, next))) if path == other => {
                format!(
                    "put {} into {path} in one call and {} in the next",
                    text(one),
                    text(next)
                )
            }
            _ => format!(
                "returned {} in one call and {} in the next",
                text(one),
                text(next)
            ),
        },
        None => {
            let more = ones.get(nexts.len()).or(nexts.get(ones.len()));
            match more.and_then(|act| kept(act)) {
                Some((path, _)) => format!("set {path} in one of two calls in a row only"),
                None => format!("returned {one} in one call and {next} in the next"),
            }
        }
    }
}

fn without_views(node: Value) -> Value {
    match &node["views"][0] {
        Value::Null => node,
        inner => inner.clone(),
    }
}

/// The result, and what a replay does after it.
fn parts(node: &Value) -> Vec<&Value> {
    match node["after"].as_array() {
        Some(parts) => parts.iter().collect(),
        None => vec![node],
    }
}

/// The path of an attribute that an act sets, and the node of the value.
fn kept(act: &Value) -> Option<(&str, &Value)> {
    let [path, value] = act["tuple"].as_array()?.as_slice() else {
        return None;
    };
    Some((path["c"].as_str()?, value["list"].get(0)?))
}

fn text(node: &Value) -> String {
    match node.get("c") {
        Some(constant) => constant.to_string(),
        None => node.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::difference;

    #[test]
    fn says_what_differs() {
        for (one, next, expected) in [
            (
                r#"{"c":1}"#,
                r#"{"c":2}"#,
                "returned 1 in one call and 2 in the next",
            ),
            (
                r#"{"views":[{"after":[{"t":0},{"tuple":[{"c":"self.t"},{"list":[{"c":1.5}]}]}]}]}"#,
                r#"{"after":[{"t":0},{"tuple":[{"c":"self.t"},{"list":[{"c":2.5}]}]}]}"#,
                "put 1.5 into self.t in one call and 2.5 in the next",
            ),
            (
                r#"{"after":[{"t":0},{"tuple":[{"c":"self.t"},{"list":[{"t":1}]}]}]}"#,
                r#"{"t":0}"#,
                "set self.t in one of two calls in a row only",
            ),
            (
                r#"{"after":[{"t":0},{"tuple":[{"c":"n"},{"c":1}]}]}"#,
                r#"{"after":[{"t":0},{"tuple":[{"c":"n"},{"c":2}]}]}"#,
                r#"returned {"tuple":[{"c":"n"},{"c":1}]} in one call and {"tuple":[{"c":"n"},{"c":2}]} in the next"#,
            ),
        ] {
            assert_eq!(difference(one, next), expected);
        }
    }
}

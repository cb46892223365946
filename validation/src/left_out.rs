//! Rules that are true and that the tables leave out on purpose, from
//! `left_out.txt`.

use rote_propagation::Combination;

const LIST: &str = include_str!("left_out.txt");

/// Why a rule that is true is left out; `None` when nobody said so.
pub(super) fn reason(op: &str, combination: &Combination) -> Option<&'static str> {
    let text = combination.to_string();
    lines().find_map(|(ops, combinations, reason)| {
        (fits(ops, op) && fits(combinations, &text)).then_some(reason)
    })
}

/// The lines of the list: ops, combinations, reason.
fn lines() -> impl Iterator<Item = (&'static str, &'static str, &'static str)> {
    let lines = LIST
        .lines()
        .filter(|l| !l.trim().is_empty() && !l.starts_with('#'));
    lines.filter_map(|line| {
        let mut parts = line.splitn(3, '|').map(str::trim);
        Some((parts.next()?, parts.next()?, parts.next()?))
    })
}

/// Whether one of some patterns, separated by blanks outside of parentheses and
/// arrows, fits: `*` stands for any text. Combinations are one pattern.
fn fits(patterns: &str, text: &str) -> bool {
    let whole = patterns.contains("->");
    let mut all = patterns.split_whitespace();
    if whole {
        glob(patterns, text)
    } else {
        all.any(|p| glob(p, text))
    }
}

fn glob(pattern: &str, text: &str) -> bool {
    let mut parts = pattern.split('*');
    let Some(mut rest) = text.strip_prefix(parts.next().unwrap_or_default()) else {
        return false;
    };
    let parts: Vec<&str> = parts.collect();
    for (i, part) in parts.iter().enumerate() {
        if i + 1 == parts.len() {
            return rest.ends_with(part);
        }
        match rest.find(part) {
            Some(at) => rest = &rest[at + part.len()..],
            None => return false,
        }
    }
    rest.is_empty()
}

#[cfg(test)]
mod tests {
    use super::{glob, lines};

    #[test]
    fn patterns_fit() {
        assert!(glob("a*c", "abc") && glob("*", "") && glob("a", "a") && glob("*b*", "abc"));
        assert!(!glob("a", "ab") && !glob("a*d", "abc") && !glob("*x*", "abc"));
    }

    #[test]
    fn every_line_has_a_reason() {
        assert!(lines().all(|(ops, _, reason)| !ops.is_empty() && !reason.is_empty()));
    }
}

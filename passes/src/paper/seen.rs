//! What can be told of a program's runs, and how those of two programs differ.

use std::collections::BTreeMap;

use hashbrown::HashMap;

use super::super::Selection;
use super::{Symbol, UNDEFINED};

/// What can be told of a program's runs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    /// Collectives in order.
    pub sent: Vec<(String, Symbol)>,
    /// Every element of every collective, and what becomes of it.
    pub elements: Vec<Symbol>,
    /// Ops outside of ATen and random numbers, in order.
    pub acts: Vec<(String, Symbol)>,
    /// For each binding, the first byte that anything looks at, counted from its data, and one past the last.
    pub looks: BTreeMap<usize, (i64, i64)>,
    /// Bytes of bindings after each run, results, and results kept from earlier runs.
    pub bytes: Vec<(String, Vec<Symbol>)>,
    /// The most bytes held at once: the arena, and what was made and not yet dropped.
    pub most: u64,
}

/// Which collectives must be the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Collectives {
    /// All of them, in the same order.
    AsRecorded,
    /// What is sent, in any messages.
    Regrouped,
}

impl Collectives {
    /// What these passes may change.
    pub fn of(passes: Selection) -> Self {
        match passes.alters_collectives() {
            true => Self::Regrouped,
            false => Self::AsRecorded,
        }
    }

    fn difference(self, recorded: &Seen, found: &Seen) -> Option<String> {
        if self == Self::AsRecorded {
            let (expected, found) = (&recorded.sent, &found.sent);
            return (expected != found).then(|| format!("sent {found:?}, expected {expected:?}"));
        }
        let counted = |seen: &Seen| {
            let mut counts: HashMap<Symbol, usize> = HashMap::new();
            for element in &seen.elements {
                *counts.entry(*element).or_default() += 1;
            }
            counts
        };
        let (recorded, mut found) = (counted(recorded), counted(found));
        for (element, count) in recorded {
            let left = found.remove(&element).unwrap_or(0);
            if left != count {
                return Some(format!(
                    "an element was sent {count} times, and is {left} times"
                ));
            }
        }
        (!found.is_empty()).then(|| "sends what was not sent".to_owned())
    }
}

impl Seen {
    /// The first difference. What was recorded as undefined may be anything.
    pub fn difference(&self, other: &Seen, collectives: Collectives) -> Option<String> {
        if let Some(difference) = collectives.difference(self, other) {
            return Some(difference);
        }
        if self.acts != other.acts {
            return Some(format!("did {:?}, expected {:?}", other.acts, self.acts));
        }
        for (binding, (from, to)) in &other.looks {
            let recorded = self.looks.get(binding);
            if recorded.is_none_or(|(first, last)| from < first || to > last) {
                return Some(format!(
                    "looks at bytes {from} to {to} of binding {binding}, expected {recorded:?}"
                ));
            }
        }
        let pairs = self.bytes.iter().zip(&other.bytes);
        let mut wrong = pairs.filter(|((_, a), (_, b))| {
            a.len() != b.len() || a.iter().zip(b).any(|(a, b)| *a != UNDEFINED && a != b)
        });
        if self.bytes.len() != other.bytes.len() {
            return Some("other results".to_owned());
        }
        wrong.next().map(|(a, _)| a.0.clone())
    }
}

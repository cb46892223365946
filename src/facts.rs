//! The facts behind a recording: their names and their values.

use rote_plans::GuardKind;
use rote_replay::frontend::Facts;
use rote_replay::{Frontend, ReplayError};

/// One named fact of a table.
#[derive(Clone, Debug)]
pub struct Entry {
    /// First word.
    pub start: usize,
    /// How many words.
    pub width: usize,
    /// What kind of guard it is.
    pub kind: GuardKind,
    /// What it looks at.
    pub subject: String,
    /// What it saw, as text that holds in another process too.
    pub text: String,
    /// A hyperparameter of an optimizer: it may become a scalar binding.
    pub hyperparameter: bool,
    /// A gradient: the step itself changes it.
    pub gradient: bool,
    /// It is about several names of its subject: the text of a word says which one differs.
    pub names: bool,
    /// What each of its words says of the subject, as `.meta`; none where there is nothing to tell apart.
    pub parts: &'static [&'static str],
}

impl Entry {
    /// What the word at `index` looks at.
    fn part(&self, index: usize) -> String {
        format!("{}{}", self.subject, self.part_of(index))
    }

    /// What the word at `index` says of the subject.
    fn part_of(&self, index: usize) -> &'static str {
        self.parts.get(index - self.start).copied().unwrap_or("")
    }
}

/// A table of facts with their names.
#[derive(Debug)]
pub struct NamedFacts<F: Frontend> {
    table: F::Facts,
    /// The facts, by first word.
    pub entries: Vec<Entry>,
    /// What the facts were when the recording began.
    pub expected: Vec<u64>,
}

/// A fact to add to a table.
#[derive(Clone, Copy, Debug)]
pub struct NewFact<'a> {
    /// What kind of guard it is.
    pub kind: GuardKind,
    /// What it looks at.
    pub subject: &'a str,
    /// What it sees now, as text that holds in another process too; empty for
    /// what a plan file does not tell.
    pub text: &'a str,
    /// Whether it is a hyperparameter of an optimizer.
    pub hyperparameter: bool,
    /// Whether it is about gradients, which steps make.
    pub gradient: bool,
    /// Whether it is about several names of its subject: the text of a word says which one differs.
    pub names: bool,
    /// What each of its words says of the subject, as `.meta`; none where there is nothing to tell apart.
    pub parts: &'static [&'static str],
}

impl<F: Frontend> NamedFacts<F> {
    /// No facts.
    pub fn new(frontend: &F) -> Self {
        NamedFacts {
            table: frontend.facts(),
            entries: Vec::new(),
            expected: Vec::new(),
        }
    }

    /// Adds a fact. `add` adds it to the frontend's facts, and tells its first word and how many it has.
    pub fn add(
        &mut self,
        fact: NewFact<'_>,
        add: impl FnOnce(&mut F::Facts) -> Result<(usize, usize), ReplayError>,
    ) -> Result<(), ReplayError> {
        let (start, width) = add(&mut self.table)?;
        self.entries.push(Entry {
            start,
            width,
            kind: fact.kind,
            subject: fact.subject.to_owned(),
            text: fact.text.to_owned(),
            hyperparameter: fact.hyperparameter,
            gradient: fact.gradient,
            names: fact.names,
            parts: fact.parts,
        });
        Ok(())
    }

    /// Reads every fact as what a plan will expect.
    pub fn settle(&mut self, frontend: &F) -> Result<(), ReplayError> {
        self.table.hold()?;
        self.table.read(frontend)?;
        self.expected = self.table.words().to_vec();
        Ok(())
    }

    /// Reads facts that were added after [`NamedFacts::settle`]: what a step turned
    /// out to use.
    pub fn settle_added(&mut self, frontend: &F) -> Result<(), ReplayError> {
        self.table.read(frontend)?;
        let found = self.table.words();
        self.expected
            .extend_from_slice(&found[self.expected.len()..]);
        Ok(())
    }

    /// Whether these facts, just settled, are those of an equal function, told in the same order. Of the facts that `own`
    /// marks, the words that name objects may be others.
    pub fn are_as_of(&self, other: &Self, own: &[bool]) -> bool {
        let same = |(a, b): (&Entry, &Entry)| {
            a.start == b.start && a.width == b.width && a.kind == b.kind && a.subject == b.subject
        };
        let is_equal = |(entry, own): (&Entry, &bool)| {
            (entry.start..entry.start + entry.width).all(|word| {
                let names_an_object = *own && entry.part_of(word).is_empty();
                names_an_object || self.expected[word] == other.expected[word]
            })
        };
        self.entries.len() == other.entries.len()
            && self.entries.len() == own.len()
            && self.entries.iter().zip(&other.entries).all(same)
            && self.expected.len() == other.expected.len()
            && self.entries.iter().zip(own).all(is_equal)
    }

    /// The first fact that no longer holds; `free` hyperparameters may change.
    /// Values that are equal by content are accepted.
    pub fn difference(
        &mut self,
        frontend: &F,
        free: &[String],
    ) -> Result<Option<String>, ReplayError> {
        self.table.read(frontend)?;
        let found = self.table.words();
        let mut from = 0;
        while let Some(offset) =
            rote_replay::first_difference(&self.expected[from..], &found[from..])
        {
            let word = from + offset;
            let at = self.entries.partition_point(|entry| entry.start <= word) - 1;
            let entry = &self.entries[at];
            let free = entry.hyperparameter && free.contains(&entry.subject);
            if !free && !self.table.same(word) {
                let part = entry.part(word);
                return Ok(Some(match entry.names {
                    true => format!("{part}.{}", self.table.text(word, false)),
                    false => part,
                }));
            }
            from = word + 1;
        }
        Ok(None)
    }

    /// Whether there is a fact about a subject, and it still holds.
    pub fn holds_of(&mut self, frontend: &F, subject: &str) -> Result<bool, ReplayError> {
        let Some(entry) = self.entries.iter().find(|entry| entry.subject == subject) else {
            return Ok(false);
        };
        self.table.read(frontend)?;
        let found = self.table.words();
        let mut words = entry.start..entry.start + entry.width;
        Ok(words.all(|word| self.expected[word] == found[word] || self.table.same(word)))
    }

    /// Every fact that changed since the recording began, gradients apart.
    pub fn changes(&mut self, frontend: &F) -> Result<Vec<String>, ReplayError> {
        self.table.read(frontend)?;
        let found = self.table.words();
        let mut changed = Vec::new();
        for entry in &self.entries {
            if entry.gradient {
                continue;
            }
            let differs = (entry.start..entry.start + entry.width)
                .any(|word| self.expected[word] != found[word] && !self.table.same(word));
            if differs {
                let (before, now) = (
                    self.table.text(entry.start, true),
                    self.table.text(entry.start, false),
                );
                let change = if before.is_empty() || before == now {
                    entry.subject.clone()
                } else {
                    format!("{} ({before} -> {now})", entry.subject)
                };
                changed.push(change);
            }
        }
        Ok(changed)
    }

    /// What the word at `word` sees: when it was held, and at the last read. Different values have different texts.
    pub fn values(&self, word: usize) -> [String; 2] {
        let [was, now] = [true, false].map(|held| self.table.text(word, held));
        if was != now {
            return [was, now];
        }
        let words = [self.expected[word], self.table.words()[word]];
        words.map(|word| format!("{now} {word:x}"))
    }

    /// The names of all hyperparameters.
    pub fn hyperparameters(&self) -> Vec<String> {
        self.entries
            .iter()
            .filter(|entry| entry.hyperparameter)
            .map(|entry| entry.subject.clone())
            .collect()
    }

    /// A hyperparameter's value now.
    pub fn float(&self, path: &str) -> Result<f64, ReplayError> {
        match self
            .entries
            .iter()
            .find(|entry| entry.hyperparameter && entry.subject == path)
        {
            Some(entry) => self.table.float(entry.start),
            None => Err(ReplayError::Bind(format!(
                "hyperparameter {path} is not in the state"
            ))),
        }
    }

    /// The word of a hyperparameter, to read it at every replay.
    pub fn float_word(&self, path: &str) -> Option<usize> {
        self.entries
            .iter()
            .find(|entry| entry.hyperparameter && entry.subject == path)
            .map(|entry| entry.start)
    }

    /// The float behind a word, now.
    pub fn float_at(&self, word: usize) -> Result<f64, ReplayError> {
        self.table.float(word)
    }
}

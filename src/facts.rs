//! The facts behind a recording: how each of them is called, and what it was.

use rote_plans::GuardKind;
use rote_replay::ReplayError;
use rote_replay::aten::sys::{Fact, Object as PyObject};
use rote_replay::aten::{Call, FactKind, FactTable};

/// What surrounds a call, in the order in which the bridge reads it (`modes.h`).
pub const MODES: [&str; 12] = [
    "around",
    "grad_mode",
    "inference_mode",
    "autocast",
    "deterministic",
    "default_dtype",
    "backends",
    "default_device",
    "autograd",
    "dispatch_keys",
    "threads",
    "default process group",
];

/// Index of the word that is not 0 while something around a call sees or
/// changes its ops: `modes.h`, `Around`.
pub const AROUND_WORD: usize = 1;

/// Modes whose words say the same in every process of one version of PyTorch,
/// and that no other guard tells as text.
pub const PORTABLE_MODES: [&str; 5] = [
    "backends",
    "default_device",
    "autograd",
    "dispatch_keys",
    "threads",
];

/// Properties of a leaf, as `abi.h` numbers them.
const FIELDS: [&str; 17] = [
    "structure",
    "type",
    "dtype",
    "device",
    "requires_grad",
    "shape",
    "strides",
    "alias",
    "mesh",
    "placements",
    "shape",
    "strides",
    "",
    "grad",
    "grad_fn",
    "layout",
    "attributes",
];

/// What the word at `index` of a call's facts is called.
pub fn call_subject(index: usize, fact: Option<&Fact>, leaves: &[String]) -> String {
    if index == 0 {
        return "args structure".to_owned();
    }
    if let Some(mode) = MODES.get(index - 1) {
        return (*mode).to_owned();
    }
    let Some(fact) = fact else {
        return "args structure".to_owned();
    };
    let leaf = leaves
        .get(fact.leaf as usize)
        .map_or("args", String::as_str);
    match FIELDS.get(fact.field as usize).copied().unwrap_or("?") {
        "" => leaf.to_owned(),
        field => format!("{leaf}.{field}"),
    }
}

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
}

/// What the words of a fact about a tensor say after the first two, which are
/// its address (`facts.h`, `kTensorMeta`).
const TENSOR_PARTS: [&str; 6] = [
    "",
    "",
    ".meta",
    ".requires_grad or hooks",
    ".placements",
    ".attributes",
];

impl Entry {
    /// What the word at `index` looks at.
    fn part(&self, index: usize) -> String {
        let part = if self.width == TENSOR_PARTS.len() {
            TENSOR_PARTS[index - self.start]
        } else {
            ""
        };
        format!("{}{part}", self.subject)
    }
}

/// A table of facts with their names.
#[derive(Debug)]
pub struct Facts {
    table: FactTable,
    /// The facts, by first word.
    pub entries: Vec<Entry>,
    /// What the facts were when the recording began.
    pub expected: Vec<u64>,
    found: Vec<u64>,
}

/// A fact to add to a table.
#[derive(Clone, Copy, Debug)]
pub struct NewFact<'a> {
    /// What the bridge reads.
    pub reads: FactKind,
    /// What kind of guard it is.
    pub kind: GuardKind,
    /// What it looks at.
    pub subject: &'a str,
    /// What it sees now, as text that holds in another process too; empty for
    /// what a plan file does not tell.
    pub text: &'a str,
    /// Whether it is a hyperparameter of an optimizer.
    pub hyperparameter: bool,
}

impl Facts {
    /// No facts.
    #[allow(clippy::new_without_default, reason = "it needs a loaded bridge")]
    pub fn new() -> Self {
        Facts {
            table: FactTable::new(),
            entries: Vec::new(),
            expected: Vec::new(),
            found: Vec::new(),
        }
    }

    /// Adds a fact.
    ///
    /// # Safety
    /// As [`FactTable::add`].
    pub unsafe fn add(
        &mut self,
        fact: NewFact<'_>,
        container: PyObject,
        key: PyObject,
    ) -> Result<(), ReplayError> {
        // SAFETY: the caller vouches for the objects.
        let (start, width) = unsafe { self.table.add(fact.reads, container, key)? };
        self.entries.push(Entry {
            start,
            width,
            kind: fact.kind,
            subject: fact.subject.to_owned(),
            text: fact.text.to_owned(),
            hyperparameter: fact.hyperparameter,
            gradient: fact.reads.is_of_gradients(),
        });
        Ok(())
    }

    /// Reads every fact as what a plan will expect.
    pub fn settle(&mut self, call: &Call) -> Result<(), ReplayError> {
        self.table.hold()?;
        let mut words = std::mem::take(&mut self.expected);
        self.table.read(call, &mut words)?;
        self.expected = words;
        Ok(())
    }

    /// Reads facts that were added after [`Facts::settle`]: what a step turned
    /// out to use.
    pub fn settle_added(&mut self, call: &Call) -> Result<(), ReplayError> {
        let mut found = std::mem::take(&mut self.found);
        let read = self.table.read(call, &mut found);
        self.found = found;
        read?;
        self.expected
            .extend_from_slice(&self.found[self.expected.len()..]);
        Ok(())
    }

    /// The first fact that no longer holds; `free` hyperparameters may change.
    /// Values that are equal by content are accepted.
    pub fn difference(
        &mut self,
        call: &Call,
        free: &[String],
    ) -> Result<Option<String>, ReplayError> {
        let mut found = std::mem::take(&mut self.found);
        let read = self.table.read(call, &mut found);
        self.found = found;
        read?;
        let mut from = 0;
        while let Some(offset) =
            rote_replay::first_difference(&self.expected[from..], &self.found[from..])
        {
            let word = from + offset;
            let at = self.entries.partition_point(|entry| entry.start <= word) - 1;
            let entry = &self.entries[at];
            let free = entry.hyperparameter && free.contains(&entry.subject);
            if !free && !self.table.same(word) {
                return Ok(Some(entry.part(word)));
            }
            from = word + 1;
        }
        Ok(None)
    }

    /// Every fact that changed since the recording began, gradients apart.
    pub fn changes(&mut self, call: &Call) -> Result<Vec<String>, ReplayError> {
        let mut found = std::mem::take(&mut self.found);
        let read = self.table.read(call, &mut found);
        self.found = found;
        read?;
        let mut changed = Vec::new();
        for entry in &self.entries {
            if entry.gradient {
                continue;
            }
            let differs = (entry.start..entry.start + entry.width)
                .any(|word| self.expected[word] != self.found[word] && !self.table.same(word));
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

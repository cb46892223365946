//! Values that outlive calls, as words that are read at every call.

use std::cell::{Cell, RefCell};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::rc::Rc;

use rote::replay::ReplayError;
use rote::replay::frontend::Facts;

use super::{Plain, fake::Tensor, storage};

/// A value that a step can reach.
#[derive(Clone, Debug)]
pub enum Fact {
    Float(Rc<Cell<f64>>),
    /// Told by its address: equal texts may lie at several.
    Text(Rc<RefCell<Rc<str>>>),
    /// Which tensor it is, and how that looks at its memory.
    Tensor(Rc<RefCell<Tensor>>),
    /// Whether it has a gradient.
    Grad(Rc<RefCell<Tensor>>),
}

/// What a fact saw, which keeps its addresses from others.
#[derive(Clone, Debug)]
enum Seen {
    Float(f64),
    Text(Rc<str>),
    Tensor(Tensor),
    Grad(bool),
}

impl Fact {
    /// What each of its words says.
    pub fn parts(&self) -> &'static [&'static str] {
        match self {
            Fact::Tensor(_) => &[".storage", ".view"],
            _ => &[],
        }
    }

    fn width(&self) -> usize {
        self.parts().len().max(1)
    }

    fn seen(&self) -> Seen {
        match self {
            Fact::Float(float) => Seen::Float(float.get()),
            Fact::Text(text) => Seen::Text(text.borrow().clone()),
            Fact::Tensor(tensor) => Seen::Tensor(tensor.borrow().clone()),
            Fact::Grad(tensor) => Seen::Grad(tensor.borrow().grad.borrow().is_some()),
        }
    }
}

impl Seen {
    fn words(&self, words: &mut Vec<u64>) {
        match self {
            Seen::Float(float) => words.push(float.to_bits()),
            Seen::Text(text) => words.push(text.as_ptr().addr() as u64),
            Seen::Grad(there) => words.push(u64::from(*there)),
            Seen::Tensor(tensor) => {
                let mut look = DefaultHasher::new();
                (&tensor.shape, &tensor.strides, tensor.offset).hash(&mut look);
                words.extend([storage(tensor), look.finish()]);
            }
        }
    }

    fn text(&self) -> String {
        match self {
            Seen::Float(float) => float.to_string(),
            Seen::Text(text) => text.to_string(),
            Seen::Tensor(_) | Seen::Grad(_) => String::new(),
        }
    }
}

/// Facts of one recording.
#[derive(Debug, Default)]
pub struct FactList {
    facts: Vec<Fact>,
    /// Which fact each word is of.
    words: Vec<usize>,
    held: Vec<Seen>,
    seen: Vec<u64>,
}

impl FactList {
    /// Adds a fact: its first word, and how many it has.
    pub fn add(&mut self, fact: Fact) -> (usize, usize) {
        let (start, width) = (self.words.len(), fact.width());
        self.words
            .extend(std::iter::repeat_n(self.facts.len(), width));
        self.facts.push(fact);
        (start, width)
    }
}

impl Facts<Plain> for FactList {
    fn read(&mut self, _: &Plain) -> Result<(), ReplayError> {
        self.seen.clear();
        self.facts
            .iter()
            .for_each(|fact| fact.seen().words(&mut self.seen));
        Ok(())
    }

    fn words(&self) -> &[u64] {
        &self.seen
    }

    fn hold(&mut self) -> Result<(), ReplayError> {
        self.held = self.facts.iter().map(Fact::seen).collect();
        Ok(())
    }

    fn same(&self, word: usize) -> bool {
        let fact = self.words[word];
        match (self.held.get(fact), self.facts[fact].seen()) {
            (Some(Seen::Text(held)), Seen::Text(now)) => *held == now,
            _ => false,
        }
    }

    fn text(&self, word: usize, held: bool) -> String {
        let fact = self.words[word];
        match held {
            true => self.held.get(fact).map(Seen::text).unwrap_or_default(),
            false => self.facts[fact].seen().text(),
        }
    }

    fn float(&self, word: usize) -> Result<f64, ReplayError> {
        match &self.facts[self.words[word]] {
            Fact::Float(float) => Ok(float.get()),
            other => Err(ReplayError::Bridge(format!("{other:?} is no float"))),
        }
    }
}

//! A framework in plain Rust for sessions, without Python: the fake of `replay/tests/fake/` with arguments, facts, and
//! threads as ranks.
//!
//! | file | subject |
//! |---|---|
//! | `mod` | calls, and what a session asks of a framework |
//! | `facts` | values that outlive calls |
//! | `eager` | ops as a step calls them, recorded or not |
//! | `captured` | a captured step beside its eager twin |
//! | `ranks` | threads that exchange through a table |
//! | `said` | what sessions log |

#![allow(dead_code, reason = "each test file takes what it needs")]

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::ffi::CStr;
use std::rc::{Rc, Weak};

use rote::plans::schedule::Ops;
use rote::plans::{Anchor, DType, Device, Marks, Plan};
use rote::replay::frontend::{CallFacts, Describe, Frontend, Part, WordSubject};
use rote::replay::{Backend, BoundPlan, ReplayError};
use rote::tracer::TensorEvent;

pub mod captured;
pub mod eager;
pub mod facts;
#[path = "../../replay/tests/fake/mod.rs"]
pub mod fake;
pub mod ranks;
pub mod said;

use facts::FactList;
use fake::{Fake, Machine, Tensor};
use ranks::Rank;

/// The name of the process group of all ranks.
pub const WORLD: &CStr = c"world";
pub const CPU: Device = Device { kind: 0, index: -1 };
pub const F32: DType = DType(6);

/// An argument of a call.
#[derive(Clone, Debug)]
pub enum Argument {
    Tensor(Tensor),
    Number(f64),
    Text(Rc<str>),
}

/// An argument as it is passed: a tensor, or another one.
#[derive(Clone, Copy, Debug)]
pub enum Leaf<'a> {
    Tensor(&'a Tensor),
    Other(&'a Argument),
}

impl Argument {
    pub fn leaf(&self) -> Leaf<'_> {
        match self {
            Argument::Tensor(tensor) => Leaf::Tensor(tensor),
            other => Leaf::Other(other),
        }
    }
}

impl<'a> Leaf<'a> {
    fn tensor(self) -> Result<&'a Tensor, ReplayError> {
        match self {
            Leaf::Tensor(tensor) => Ok(tensor),
            Leaf::Other(other) => Err(ReplayError::Bridge(format!("{other:?} is no tensor"))),
        }
    }
}

/// The identity of a tensor's memory, for as long as something refers to it.
pub fn storage(tensor: &Tensor) -> u64 {
    Rc::as_ptr(&tensor.memory).cast::<Cell<f32>>().addr() as u64
}

/// What words are about, by [`WordSubject::field`].
const FIELDS: [&str; 6] = [".kind", ".shape", ".stride", ".sharing", "", ".length"];

/// The framework, as one session sees it.
#[derive(Debug)]
pub struct Plain {
    pub machine: Rc<Machine>,
    /// This process among the ranks, if there are several.
    pub rank: Option<Rank>,
    /// Whether something sees each op.
    pub watched: Rc<Cell<bool>>,
    /// Whether arguments cannot be read.
    pub unreadable: Rc<Cell<bool>>,
    arguments: Rc<[Argument]>,
    state: Vec<u64>,
    words: Vec<u64>,
    subjects: Vec<WordSubject>,
    world: u64,
}

impl Plain {
    pub fn new(machine: Rc<Machine>, rank: Option<Rank>) -> Self {
        Plain {
            machine,
            rank,
            watched: Rc::default(),
            unreadable: Rc::default(),
            arguments: Rc::new([]),
            state: Vec::new(),
            words: Vec::new(),
            subjects: Vec::new(),
            world: 0,
        }
    }

    /// Which earlier argument has the same memory, or else which tensor of the state.
    fn sharing(&self, leaf: usize, of: &Tensor) -> u64 {
        let earlier = self.arguments[..leaf].iter().position(
            |other| matches!(other, Argument::Tensor(other) if storage(other) == storage(of)),
        );
        let state = || self.state.iter().position(|state| *state == storage(of));
        match earlier {
            Some(earlier) => 1 + earlier as u64,
            None => state().map_or(0, |state| (1 << 32) + state as u64),
        }
    }

    fn add(&mut self, leaf: usize, field: u32, words: impl IntoIterator<Item = u64>) {
        let leaf = leaf as u32;
        let before = self.words.len();
        self.words.extend(words);
        let subject = WordSubject { leaf, field };
        let added = self.words.len() - before;
        self.subjects.extend(std::iter::repeat_n(subject, added));
    }

    fn texts(&self) -> Vec<Rc<str>> {
        let texts = self.arguments.iter().filter_map(|argument| match argument {
            Argument::Text(text) => Some(text.clone()),
            _ => None,
        });
        texts.collect()
    }
}

impl Frontend for Plain {
    type Args = Rc<[Argument]>;
    type Ref<'a> = Leaf<'a>;
    /// The texts, of which words tell the length only.
    type Held = Vec<Rc<str>>;
    type Facts = FactList;
    type Describer = Storages;
    type Program = Fake;
    type Results = Vec<Tensor>;
    type Exception = String;
    type Group = Rank;

    fn collect(&mut self, args: Rc<[Argument]>) -> Result<(), ReplayError> {
        self.arguments = args;
        match self.unreadable.get() {
            true => Err(ReplayError::Bridge("nothing can be read".to_owned())),
            false => self.recollect(),
        }
    }

    fn recollect(&mut self) -> Result<(), ReplayError> {
        self.words.clear();
        self.subjects.clear();
        let arguments = self.arguments.clone();
        self.add(usize::MAX, 0, [arguments.len() as u64]);
        self.add(usize::MAX, 1, [self.world]);
        for (leaf, argument) in arguments.iter().enumerate() {
            match argument {
                Argument::Tensor(tensor) => {
                    let bits =
                        |dims: &[i64]| -> Vec<u64> { dims.iter().map(|dim| *dim as u64).collect() };
                    self.add(leaf, 0, [2 + tensor.shape.len() as u64]);
                    self.add(leaf, 1, bits(&tensor.shape));
                    self.add(leaf, 2, bits(&tensor.strides));
                    self.add(leaf, 3, [self.sharing(leaf, tensor)]);
                }
                Argument::Number(number) => {
                    self.add(leaf, 0, [0]);
                    self.add(leaf, 4, [number.to_bits()]);
                }
                Argument::Text(text) => {
                    self.add(leaf, 0, [1]);
                    self.add(leaf, 5, [text.len() as u64]);
                }
            }
        }
        Ok(())
    }

    fn words(&self) -> &[u64] {
        &self.words
    }

    fn subjects(&self) -> &[WordSubject] {
        &self.subjects
    }

    fn last(&self) -> Result<CallFacts<Vec<Rc<str>>>, ReplayError> {
        Ok(CallFacts {
            words: self.words.clone(),
            subjects: self.subjects.clone(),
            held: self.texts(),
        })
    }

    fn held_difference(&self, earlier: &Vec<Rc<str>>) -> Result<Option<usize>, ReplayError> {
        let differs = self.texts().iter().zip(earlier).position(|(a, b)| a != b);
        let lengths = self.subjects.iter().enumerate();
        let mut lengths = lengths.filter(|(_, subject)| subject.field == 5);
        Ok(differs.and_then(|text| Some(lengths.nth(text)?.0)))
    }

    fn leaf(&self, leaf: u32) -> Option<Leaf<'_>> {
        self.arguments.get(leaf as usize).map(Argument::leaf)
    }

    fn place(&self, tensor: Leaf<'_>, _closely: bool) -> Result<Anchor, ReplayError> {
        let tensor = tensor.tensor()?;
        Ok(Anchor {
            start: tensor.offset * 4,
            bytes: tensor.memory.len() as u64 * 4,
            base: 0,
        })
    }

    fn add_state<'a>(
        &mut self,
        state: impl Iterator<Item = (u64, Leaf<'a>)>,
    ) -> Result<(), ReplayError> {
        for (storage, _) in state {
            if !self.state.contains(&storage) {
                self.state.push(storage);
            }
        }
        Ok(())
    }

    fn is_watched(&self) -> bool {
        self.watched.get()
    }

    fn word(&self, index: usize, subject: Option<&WordSubject>, leaves: &[String]) -> String {
        let named = subject.and_then(|subject| {
            let field = FIELDS[subject.field as usize];
            Some(format!("{}{field}", leaves.get(subject.leaf as usize)?))
        });
        let whole = ["the number of arguments", "the process group"];
        named.unwrap_or_else(|| whole[index.min(1)].to_owned())
    }

    fn facts(&self) -> FactList {
        FactList::default()
    }

    fn describer(&self) -> Storages {
        Storages::default()
    }

    fn ops(&self) -> &dyn Ops {
        &*self.machine
    }

    fn program(&self, _plan: &Plan) -> Result<Fake, ReplayError> {
        Ok(Fake::on(self.machine.clone()))
    }

    fn hold(&self, tensor: Leaf<'_>) -> Tensor {
        match tensor {
            Leaf::Tensor(tensor) => tensor.clone(),
            Leaf::Other(other) => unreachable!("{other:?} is no tensor"),
        }
    }

    fn same(a: Leaf<'_>, b: Leaf<'_>) -> bool {
        match (a, b) {
            (Leaf::Tensor(a), Leaf::Tensor(b)) => std::ptr::eq(a, b),
            (Leaf::Other(a), Leaf::Other(b)) => std::ptr::eq(a, b),
            _ => false,
        }
    }

    fn borrow(tensor: &Tensor) -> Leaf<'_> {
        Leaf::Tensor(tensor)
    }

    fn put(
        &self,
        program: &Fake,
        slot: u32,
        tensor: Leaf<'_>,
        part: Part,
    ) -> Result<(), ReplayError> {
        let tensor = tensor.tensor()?;
        let found = match part {
            Part::Tensor | Part::Memory => Some(tensor.clone()),
            Part::Grad => tensor.grad.borrow().clone(),
        };
        let found = found.ok_or_else(|| ReplayError::Bridge("there is no gradient".to_owned()))?;
        program.put(slot, found);
        Ok(())
    }

    fn results(&self, bound: &BoundPlan<Fake>) -> Result<Vec<Tensor>, ReplayError> {
        let slots = bound.results().iter();
        let tensors = slots.map(|&(slot, fresh)| bound.program().output(slot, fresh));
        tensors.collect()
    }

    fn generator(&self, _device: Device) -> Result<u64, ReplayError> {
        Ok(self.machine.generator.get())
    }

    fn enter_world(&mut self, number: u64) {
        self.world = number;
    }

    fn group(&self, name: &CStr) -> Result<Option<Rank>, ReplayError> {
        Ok(self.rank.clone().filter(|_| name == WORLD))
    }
}

/// Storages that a recording has met: while it knows one, no other gets its address.
#[derive(Debug, Default)]
pub struct Storages(RefCell<HashMap<u64, Weak<[Cell<f32>]>>>);

impl Storages {
    /// Describes a tensor, which may lie anywhere.
    pub fn meet<'a>(&self, tensor: &'a Tensor) -> TensorEvent<'a> {
        let known = Rc::downgrade(&tensor.memory);
        self.0.borrow_mut().insert(storage(tensor), known);
        TensorEvent {
            storage: storage(tensor),
            dtype: F32,
            device: CPU,
            sizes: &tensor.shape,
            strides: &tensor.strides,
            offset: tensor.offset,
            storage_bytes: tensor.memory.len() as u64 * 4,
            marks: Marks::NONE,
            opaque: false,
        }
    }
}

impl Describe<Plain> for Storages {
    fn tensor<'a, 'r: 'a>(&'a mut self, tensor: Leaf<'r>) -> Result<TensorEvent<'a>, ReplayError> {
        Ok(self.meet(tensor.tensor()?))
    }

    fn is_alive(&self, storage: u64) -> bool {
        let known = self.0.borrow();
        known
            .get(&storage)
            .is_some_and(|memory| memory.strong_count() > 0)
    }
}

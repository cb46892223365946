//! Calls: their leaves, and facts by name.
//!
//! A framework declares its facts once: words, which must not change, and numbers, which a plan may use. It passes
//! their values with each call. A leaf is a tensor or a word.

use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::rc::Rc;
use std::sync::{Mutex, PoisonError};
use std::thread::ThreadId;

use hashbrown::HashMap;
use rote_plans::schedule::Ops;
use rote_plans::{Anchor, Device, GuardKind, Plan};
use rote_replay::agreement::Ranks;
use rote_replay::frontend::{self, CallFacts, Describe, Frontend, Part, WordSubject};
use rote_replay::{Backend, BoundPlan, ReplayError};
use rote_tracer::TensorEvent;

use crate::program::{CallbackProgram, number};
use crate::storages::Storages;
use crate::table::{Framework, Leaf};
use crate::tensor::{Described, Tensor};

/// The arguments of a call.
#[derive(Clone, Copy, Debug)]
pub struct Arguments {
    leaves: (*const Leaf, usize),
    words: (*const u64, usize),
    numbers: (*const f64, usize),
}

impl Arguments {
    /// Arguments of the caller's.
    ///
    /// # Safety
    /// The lists, and what the leaves point at, must be live until the session that is given them handles another
    /// call, or until the recording of this one ends.
    pub unsafe fn new(leaves: &[Leaf], words: &[u64], numbers: &[f64]) -> Self {
        Arguments {
            leaves: (leaves.as_ptr(), leaves.len()),
            words: (words.as_ptr(), words.len()),
            numbers: (numbers.as_ptr(), numbers.len()),
        }
    }
}

/// A leaf of a call that is recorded.
#[derive(Clone, Debug)]
pub struct NamedLeaf {
    /// Its name.
    pub name: String,
    /// The spec of a distributed tensor, as text.
    pub spec: Option<String>,
    /// Whether it stays where it is from call to call.
    pub state: bool,
    /// The tensor, if it is one.
    pub tensor: Option<Tensor>,
    /// What it is, as text that means the same in every process.
    pub shown: String,
}

/// A fact that every call tells the value of.
#[derive(Clone, Debug)]
pub struct Fact {
    /// What it is about.
    pub kind: GuardKind,
    /// Its name.
    pub name: String,
    /// Whether it is a number, not a word.
    pub number: bool,
}

/// The values of facts: words, then the bits of numbers.
#[derive(Debug, Default)]
struct Values {
    words: Vec<u64>,
    numbers: Vec<f64>,
}

/// A framework of function pointers, and the call that a session handles now.
#[derive(Debug)]
pub struct Callbacks {
    framework: Rc<Framework>,
    arguments: Option<Arguments>,
    facts: Vec<Fact>,
    values: Rc<RefCell<Values>>,
    leaves: Vec<Option<Tensor>>,
    words: Vec<u64>,
    subjects: Vec<WordSubject>,
    /// The storages of the last call.
    storages: Storages,
    /// Storages of the state, numbered.
    state: HashMap<u64, u64>,
    /// What was wrong with the last call.
    problem: Option<String>,
}

/// What a word of a leaf is.
const FIELDS: [&str; 11] = [
    "kind", "dtype", "device", "shape", "strides", "alias", "", "shape", "memory", "name", "spec",
];
const KIND: u32 = 0;
const DTYPE: u32 = 1;
const DEVICE: u32 = 2;
const SHAPE: u32 = 3;
const STRIDES: u32 = 4;
const ALIAS: u32 = 5;
const WORD: u32 = 6;
const DIMS: u32 = 7;
const MEMORY: u32 = 8;
const NAME: u32 = 9;
const SPEC: u32 = 10;

impl Callbacks {
    /// For a new session.
    pub fn new(framework: Framework) -> Self {
        enter(&framework);
        Callbacks {
            framework: Rc::new(framework),
            arguments: None,
            facts: Vec::new(),
            values: Rc::default(),
            leaves: Vec::new(),
            words: Vec::new(),
            subjects: Vec::new(),
            storages: Storages::default(),
            state: HashMap::new(),
            problem: None,
        }
    }

    /// Says that every call tells a fact.
    ///
    /// # Errors
    ///
    /// Where another fact has the name, or a call was made before.
    pub fn declare(&mut self, fact: Fact) -> Result<(), String> {
        if !self.words.is_empty() {
            return Err(format!(
                "{} is declared after a call was made: declare every fact before the first call",
                fact.name
            ));
        }
        if self.facts.iter().any(|known| known.name == fact.name) {
            return Err(format!("a fact named {} is declared already", fact.name));
        }
        self.facts.push(fact);
        Ok(())
    }

    /// The facts that were declared, each with its value now as text that means the same in every process.
    pub fn facts_in_words(&self) -> Vec<(Fact, String)> {
        let values = self.values.borrow();
        let (mut words, mut numbers) = (values.words.iter(), values.numbers.iter());
        let facts = self.facts.iter().map(|fact| {
            let text = match fact.number {
                true => numbers.next().map(|number| format!("{number:?}")),
                false => words.next().map(|word| format!("{word:x}")),
            };
            (fact.clone(), text.unwrap_or_default())
        });
        facts.collect()
    }

    /// The leaves of the last call, to name them in a recording.
    pub fn named(&self) -> Vec<NamedLeaf> {
        let leaves = self.given().iter().zip(&self.leaves).enumerate();
        let named = leaves.map(|(at, (leaf, tensor))| {
            let shown = match tensor {
                None => format!("{:x}", leaf.word),
                Some(tensor) => {
                    let event = tensor.event();
                    let place = self.shared_with(at);
                    format!(
                        "{} strides {:?} on {}{place}",
                        event.describe(),
                        event.strides,
                        event.device
                    )
                }
            };
            NamedLeaf {
                // SAFETY: live, by `Arguments::new`.
                name: unsafe { name_of(leaf, at) },
                // SAFETY: as above.
                spec: unsafe { text(leaf.spec) },
                state: leaf.state != 0,
                tensor: tensor.clone(),
                shown,
            }
        });
        named.collect()
    }

    /// With which earlier leaf a leaf shares memory, and how far behind it the leaf begins, as text.
    fn shared_with(&self, at: usize) -> String {
        let place_of = |at: usize| {
            let leaf: &Option<Tensor> = &self.leaves[at];
            leaf.as_ref()
                .map(|tensor| (tensor.0.storage, tensor.0.start))
        };
        let shared = (0..at).find_map(|before| {
            let ((storage, start), (own, own_start)) = place_of(before).zip(place_of(at))?;
            (storage == own).then(|| (before, own_start.wrapping_sub(start)))
        });
        match shared {
            Some((before, bytes)) => format!(" in the memory of leaf {before}, {bytes} bytes on"),
            None => String::new(),
        }
    }

    /// A tensor of the state or of an argument's, as it was described.
    ///
    /// # Errors
    ///
    /// What is wrong with the description.
    ///
    /// # Safety
    /// What it points at must be live, and the memory for as long as the tensor is used.
    pub unsafe fn tensor(&self, leaf: &Leaf) -> Result<Tensor, String> {
        let Some(tensor) = std::ptr::NonNull::new(leaf.tensor.cast_mut()) else {
            return Err("is null".to_owned());
        };
        // SAFETY: the caller vouches for it.
        unsafe {
            Tensor::borrowed(&Described {
                tensor: *tensor.as_ref(),
                storage: leaf.storage,
                start: leaf.start,
                bytes: leaf.bytes,
            })
        }
    }

    fn given(&self) -> &[Leaf] {
        let leaves = self.arguments.map(|arguments| arguments.leaves);
        // SAFETY: live, by `Arguments::new`.
        leaves.map_or(&[], |leaves| unsafe { list(leaves) })
    }

    fn say(&mut self, leaf: usize, field: u32, word: u64) {
        self.words.push(word);
        self.subjects.push(WordSubject {
            leaf: leaf as u32,
            field,
        });
    }

    /// Reads a leaf that is a tensor.
    fn read(&mut self, at: usize, leaf: &Leaf, tensor: &Tensor) -> Result<(), String> {
        let event = tensor.event();
        self.say(at, KIND, 1 + u64::from(leaf.state));
        if leaf.state != 0 {
            self.say(at, MEMORY, number(tensor.0.data));
        }
        self.say(at, DTYPE, event.dtype.0.into());
        let device = event.device;
        self.say(
            at,
            DEVICE,
            u64::from(device.kind) << 8 | u64::from(device.index as u8),
        );
        self.say(at, DIMS, event.sizes.len() as u64);
        for &size in event.sizes {
            self.say(at, SHAPE, size as u64);
        }
        for &stride in event.strides {
            self.say(at, STRIDES, stride as u64);
        }
        // Which tensor has the same memory, and where in it this one lies. Each leaf's own number tells that none has.
        let (storage, start) = (event.storage, tensor.0.start);
        let first = self.storages.add(at, tensor)?;
        let shared = match (self.state.get(&storage), first) {
            (Some(state), _) => Some(*state),
            (None, Some(first)) => Some(first as u64),
            (None, None) => None,
        };
        let in_state = u64::from(self.state.contains_key(&storage));
        self.say(
            at,
            ALIAS,
            shared.map_or(0, |shared| 2 * shared + in_state + 1),
        );
        self.say(at, ALIAS, shared.map_or(0, |_| start as u64));
        Ok(())
    }
}

fn no_call() -> ReplayError {
    ReplayError::Bridge("no call is handled".to_owned())
}

/// # Safety
/// `text` must be null or a C string.
unsafe fn text(text: *const c_char) -> Option<String> {
    if text.is_null() {
        return None;
    }
    // SAFETY: the caller vouches for the string.
    let text = unsafe { CStr::from_ptr(text) };
    text.to_str().ok().map(str::to_owned)
}

/// A word for a text: 0 for none.
///
/// # Safety
/// `text` must be null or a C string.
unsafe fn text_word(text: *const c_char) -> u64 {
    if text.is_null() {
        return 0;
    }
    // SAFETY: the caller vouches for the string.
    let text = unsafe { CStr::from_ptr(text) };
    let mut hasher = DefaultHasher::new();
    text.to_bytes().hash(&mut hasher);
    hasher.finish() | 1
}

/// The name of the leaf at a place.
///
/// # Safety
/// Its name must be null or a C string.
unsafe fn name_of(leaf: &Leaf, at: usize) -> String {
    // SAFETY: the caller vouches for the name.
    let name = unsafe { text(leaf.name) };
    name.unwrap_or_else(|| format!("args[{at}]"))
}

impl Callbacks {
    /// What was wrong with the last call, if it could not be read; given out once.
    pub fn take_problem(&mut self) -> Option<String> {
        self.problem.take()
    }

    fn read_all(&mut self, args: Arguments) -> Result<(), ReplayError> {
        // SAFETY: live, by `Arguments::new`.
        let (leaves, words, numbers) =
            unsafe { (list(args.leaves), list(args.words), list(args.numbers)) };
        let declared = |number: bool| {
            self.facts
                .iter()
                .filter(|fact| fact.number == number)
                .count()
        };
        for (what, found, declared) in [
            ("words", words.len(), declared(false)),
            ("numbers", numbers.len(), declared(true)),
        ] {
            if found != declared {
                return Err(ReplayError::Bridge(format!(
                    "the call passes {found} {what}, expected {declared}, as many as were declared"
                )));
            }
        }
        {
            let mut values = self.values.borrow_mut();
            values.words.clear();
            values.words.extend_from_slice(words);
            values.numbers.clear();
            values.numbers.extend_from_slice(numbers);
        }
        self.words.clear();
        self.subjects.clear();
        self.leaves.clear();
        self.storages.clear();
        self.words.push(leaves.len() as u64);
        self.subjects.push(WordSubject {
            leaf: u32::MAX,
            field: KIND,
        });
        let wrong = |at: usize, problem: String| {
            // SAFETY: live, by `Arguments::new`.
            let name = unsafe { name_of(&leaves[at], at) };
            ReplayError::Bridge(format!("{name} (leaf {at}) {problem}"))
        };
        for (at, leaf) in leaves.iter().enumerate() {
            // SAFETY: live, by `Arguments::new`.
            let (name, spec) = unsafe { (text_word(leaf.name), text_word(leaf.spec)) };
            self.say(at, NAME, name);
            self.say(at, SPEC, spec);
            if leaf.tensor.is_null() {
                self.say(at, KIND, 0);
                self.say(at, WORD, leaf.word);
                self.leaves.push(None);
                continue;
            }
            // SAFETY: live, by `Arguments::new`.
            let tensor = unsafe { self.tensor(leaf) }.map_err(|problem| wrong(at, problem))?;
            (self.read(at, leaf, &tensor)).map_err(|problem| wrong(at, problem))?;
            self.leaves.push(Some(tensor));
        }
        match self.storages.overlapping() {
            Some(at) => Err(wrong(
                at,
                "overlaps with another tensor that names another storage: give tensors that share memory the same `storage`"
                    .to_owned(),
            )),
            None => Ok(()),
        }
    }
}

impl Frontend for Callbacks {
    type Args = Arguments;
    type Ref<'a> = &'a Tensor;
    type Held = ();
    type Facts = Facts;
    type Describer = Describer;
    type Program = CallbackProgram;
    /// Outputs, then gradients.
    type Results = Vec<Tensor>;
    type Exception = ();
    type Group = Group;

    fn collect(&mut self, args: Arguments) -> Result<(), ReplayError> {
        // Those of an earlier call may be gone.
        self.arguments = None;
        let read = self.read_all(args);
        self.arguments = read.is_ok().then_some(args);
        self.problem = read.as_ref().err().map(ToString::to_string);
        read
    }

    fn recollect(&mut self) -> Result<(), ReplayError> {
        match self.arguments {
            Some(arguments) => self.collect(arguments),
            None => Err(no_call()),
        }
    }

    fn words(&self) -> &[u64] {
        &self.words
    }

    fn subjects(&self) -> &[WordSubject] {
        &self.subjects
    }

    fn last(&self) -> Result<CallFacts<()>, ReplayError> {
        if self.arguments.is_none() {
            return Err(no_call());
        }
        Ok(CallFacts {
            words: self.words.clone(),
            subjects: self.subjects.clone(),
            held: (),
        })
    }

    fn held_difference(&self, (): &()) -> Result<Option<usize>, ReplayError> {
        Ok(None)
    }

    fn leaf(&self, leaf: u32) -> Option<&Tensor> {
        self.leaves.get(leaf as usize)?.as_ref()
    }

    fn place(&self, tensor: &Tensor, _closely: bool) -> Result<Anchor, ReplayError> {
        Ok(Anchor {
            start: tensor.0.start,
            bytes: tensor.0.storage_bytes,
            base: 0,
        })
    }

    fn add_state<'a>(
        &mut self,
        state: impl Iterator<Item = (u64, &'a Tensor)>,
    ) -> Result<(), ReplayError> {
        for (storage, _) in state {
            let known = self.state.len() as u64;
            self.state.entry(storage).or_insert(known);
        }
        Ok(())
    }

    fn word(&self, _index: usize, subject: Option<&WordSubject>, leaves: &[String]) -> String {
        let Some(subject) = subject.filter(|subject| subject.leaf != u32::MAX) else {
            return "number of arguments".to_owned();
        };
        subject.name(&FIELDS, leaves)
    }

    fn facts(&self) -> Facts {
        Facts {
            values: Rc::clone(&self.values),
            places: Vec::new(),
            held: Vec::new(),
            seen: Vec::new(),
        }
    }

    fn describer(&self) -> Describer {
        Describer(Rc::clone(&self.framework))
    }

    fn ops(&self) -> &dyn Ops {
        &*self.framework
    }

    fn program(&self, plan: &Plan) -> Result<CallbackProgram, ReplayError> {
        CallbackProgram::of(&self.framework, plan)
    }

    fn hold(&self, tensor: &Tensor) -> Tensor {
        tensor.clone()
    }

    fn same(a: &Tensor, b: &Tensor) -> bool {
        Rc::ptr_eq(&a.0, &b.0)
    }

    fn borrow(tensor: &Tensor) -> &Tensor {
        tensor
    }

    fn put(
        &self,
        program: &CallbackProgram,
        slot: u32,
        tensor: &Tensor,
        part: Part,
    ) -> Result<(), ReplayError> {
        program.put(slot, tensor, part)
    }

    fn results(&self, bound: &BoundPlan<CallbackProgram>) -> Result<Vec<Tensor>, ReplayError> {
        let results = bound.results().iter();
        let results = results.map(|&(slot, fresh)| bound.program().output(slot, fresh));
        results.collect()
    }

    fn generator(&self, device: Device) -> Result<u64, ReplayError> {
        let generator = self.framework.generator.ok_or_else(|| {
            ReplayError::Bridge("the step draws random numbers, and `generator` is null".to_owned())
        })?;
        let mut state = 0;
        // SAFETY: the framework vouches for its functions.
        let status = unsafe {
            generator(
                self.framework.context,
                device.kind.into(),
                device.index.into(),
                &mut state,
            )
        };
        (self.framework.check("generator", status)).map_err(ReplayError::Bridge)?;
        Ok(state)
    }

    fn group(&self, name: &CStr) -> Result<Option<Group>, ReplayError> {
        let Some(ranks) = self.framework.ranks else {
            return Ok(None);
        };
        // SAFETY: the framework vouches for its functions.
        let ranks = unsafe { ranks(self.framework.context, name.as_ptr()) } as usize;
        Ok((ranks > 0).then(|| Group {
            number: numbered(&self.framework, name),
            framework: Rc::clone(&self.framework),
            name: name.to_owned(),
            ranks,
        }))
    }
}

/// # Safety
/// `start` must point at `n` entries, or `n` be 0.
unsafe fn list<'a, T>((start, n): (*const T, usize)) -> &'a [T] {
    match n {
        0 => &[],
        // SAFETY: the caller vouches for the list.
        n => unsafe { std::slice::from_raw_parts(start, n) },
    }
}

/// The values of facts that a plan was recorded under.
#[derive(Debug)]
pub struct Facts {
    values: Rc<RefCell<Values>>,
    /// Which word (or which number, and true) each fact is.
    places: Vec<(usize, bool)>,
    held: Vec<u64>,
    seen: Vec<u64>,
}

impl Facts {
    /// Adds the word or number of a place among those that calls tell. Returns its first word and how many it has.
    pub fn add(&mut self, place: usize, number: bool) -> (usize, usize) {
        self.places.push((place, number));
        (self.places.len() - 1, 1)
    }

    fn values(&self) -> impl Iterator<Item = u64> {
        self.places.iter().map(|&place| self.value(place))
    }

    fn value(&self, (place, number): (usize, bool)) -> u64 {
        let values = self.values.borrow();
        match number {
            true => values
                .numbers
                .get(place)
                .map_or(0, |number| number.to_bits()),
            false => values.words.get(place).copied().unwrap_or_default(),
        }
    }
}

impl frontend::Facts<Callbacks> for Facts {
    fn read(&mut self, _: &Callbacks) -> Result<(), ReplayError> {
        let mut seen = std::mem::take(&mut self.seen);
        seen.clear();
        seen.extend(self.values());
        self.seen = seen;
        Ok(())
    }

    fn words(&self) -> &[u64] {
        &self.seen
    }

    fn hold(&mut self) -> Result<(), ReplayError> {
        self.held = self.values().collect();
        Ok(())
    }

    fn same(&self, _word: usize) -> bool {
        false
    }

    fn text(&self, word: usize, held: bool) -> String {
        let Some(&place) = self.places.get(word) else {
            return String::new();
        };
        let value = match held {
            true => self.held.get(word).copied().unwrap_or_default(),
            false => self.value(place),
        };
        match place.1 {
            true => format!("{:?}", f64::from_bits(value)),
            false => format!("{value:x}"),
        }
    }

    fn float(&self, word: usize) -> Result<f64, ReplayError> {
        match self.places.get(word) {
            Some(&(place, true)) => Ok(f64::from_bits(self.value((place, true)))),
            _ => Err(ReplayError::Bridge("the fact is no number".to_owned())),
        }
    }
}

/// Describes tensors to the recorder.
#[derive(Debug)]
pub struct Describer(Rc<Framework>);

impl Describe<Callbacks> for Describer {
    fn tensor<'a, 'r: 'a>(
        &'a mut self,
        tensor: &'r Tensor,
    ) -> Result<TensorEvent<'a>, ReplayError> {
        Ok(tensor.event())
    }

    fn is_alive(&self, storage: u64) -> bool {
        // SAFETY: the framework vouches for its functions.
        let alive =
            |alive: unsafe extern "C" fn(_, _) -> _| unsafe { alive(self.0.context, storage) != 0 };
        self.0.is_alive.is_none_or(alive)
    }
}

/// A process group of a framework.
#[derive(Debug)]
pub struct Group {
    number: u64,
    framework: Rc<Framework>,
    name: CString,
    ranks: usize,
}

/// A rank of a job: the address of its framework's context, and its thread.
type Rank = (usize, ThreadId);

fn rank_of(framework: &Framework) -> Rank {
    (framework.context.addr(), std::thread::current().id())
}

/// The process groups of this process. Ranks may be threads: each has sessions of its own.
#[derive(Default)]
struct Groups {
    /// How many groups were numbered so far.
    numbered: u64,
    /// The number of each group, by its rank and its name.
    known: Vec<(Rank, CString, u64)>,
    /// How many sessions each rank has: without any, another framework may get its address.
    sessions: HashMap<Rank, usize>,
}

static GROUPS: Mutex<Option<Groups>> = Mutex::new(None);

fn groups<T>(body: impl FnOnce(&mut Groups) -> T) -> T {
    let mut groups = GROUPS.lock().unwrap_or_else(PoisonError::into_inner);
    body(groups.get_or_insert_default())
}

fn enter(framework: &Framework) {
    groups(|groups| *groups.sessions.entry(rank_of(framework)).or_insert(0) += 1);
}

fn leave(framework: &Framework) {
    let rank = rank_of(framework);
    groups(|groups| {
        let left = groups
            .sessions
            .get(&rank)
            .map_or(0, |sessions| sessions - 1);
        if left > 0 {
            groups.sessions.insert(rank, left);
        } else {
            groups.sessions.remove(&rank);
            groups.known.retain(|known| known.0 != rank);
        }
    });
}

fn numbered(framework: &Framework, name: &CStr) -> u64 {
    let rank = rank_of(framework);
    groups(|groups| {
        let is_it = |known: &&(Rank, CString, u64)| known.0 == rank && *known.1 == *name;
        if let Some(known) = groups.known.iter().find(is_it) {
            return known.2;
        }
        groups.numbered += 1;
        let number = groups.numbered;
        groups.known.push((rank, name.to_owned(), number));
        number
    })
}

impl Drop for Callbacks {
    fn drop(&mut self) {
        leave(&self.framework);
    }
}

impl Ranks for Group {
    fn number(&self) -> u64 {
        self.number
    }

    fn gather(&self, ours: &[u8]) -> Result<Vec<u8>, ReplayError> {
        let gather = (self.framework.gather)
            .ok_or_else(|| ReplayError::Bridge("`gather` is null".to_owned()))?;
        let mut all = vec![0; ours.len() * self.ranks];
        // SAFETY: the framework vouches for its functions, and for as many ranks as it has said.
        let status = unsafe {
            gather(
                self.framework.context,
                self.name.as_ptr(),
                ours.as_ptr(),
                ours.len() as u64,
                all.as_mut_ptr(),
            )
        };
        (self.framework.check("gather", status)).map_err(ReplayError::Bridge)?;
        Ok(all)
    }
}

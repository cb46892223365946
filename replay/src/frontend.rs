//! What a session asks of a framework: how calls look, what guards read, and the tensors that they exchange.
//!
//! A [`Frontend`] is made for each session and reads its calls. The session keeps words and compares them, and does not
//! know what they stand for. When a word differs, the session asks the frontend for its name. So guards cost one pass
//! over flat memory. Each framework chooses what it guards.
//!
//! Tensors come in two forms. A [`Frontend::Ref`] belongs to the caller and is valid during the call that passes it. It may
//! be a bare pointer, because its maker knows that the tensor is alive. A tensor that outlives the call is held
//! ([`Frontend::hold`]). No method here takes a pointer, so that the sessions above are safe code.
//!
//! The framework reports a step op by op, as events of [`rote_tracer`]. Only a [`Describe`] knows how a framework's tensors
//! become such events.
//!
//! PyTorch's frontend is `backends/aten/src/frontend.rs`. `tests/plain/` has one in plain Rust, with which the sessions are
//! tested without Python.

use std::ffi::CStr;
use std::fmt::Debug;

use rote_plans::schedule::Ops;
use rote_plans::{Anchor, Device, Plan};
use rote_tracer::TensorEvent;

use crate::agreement::Ranks;
use crate::backend::{Backend, Program};
use crate::bind::BoundPlan;
use crate::executor::ReplayError;
use crate::guard::first_difference;

/// What a word of a call is about.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WordSubject {
    /// Which leaf of the arguments.
    pub leaf: u32,
    /// Which property of it, as the frontend numbers them.
    pub field: u32,
}

impl WordSubject {
    /// What its word is called: the leaf's name with that of the field, which is empty where the leaf itself is meant.
    pub fn name(&self, fields: &[&str], leaves: &[String]) -> String {
        let leaf = (leaves.get(self.leaf as usize)).map_or("args", String::as_str);
        match fields.get(self.field as usize).copied().unwrap_or("?") {
            "" => leaf.to_owned(),
            field => format!("{leaf}.{field}"),
        }
    }
}

/// What of a tensor is put into a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Part {
    /// Its local tensor.
    Tensor = 0,
    /// That of its gradient.
    Grad = 1,
    /// The memory of its local tensor, for good.
    Memory = 2,
}

/// How often a step has written a tensor.
#[derive(Clone, Copy, Debug)]
pub struct Counted<R> {
    /// The tensor.
    pub tensor: R,
    /// Whether its gradient is meant.
    pub grad: bool,
    /// Times for the tensor itself, and for the local tensor of a distributed one.
    pub times: [u32; 2],
}

/// The facts of one call, to compare later ones with.
#[derive(Debug)]
pub struct CallFacts<H> {
    /// The facts.
    pub words: Vec<u64>,
    /// What each of them is about.
    pub subjects: Vec<WordSubject>,
    /// What the words stand for, where they name it by an address: held, so that nothing else gets the address.
    pub held: H,
}

/// A tensor of a framework, held.
pub type TensorOf<F> = <<F as Frontend>::Program as Backend>::Tensor;

/// A framework, as one session sees it, and the call that it handles now.
pub trait Frontend: Debug + Sized {
    /// Whether the framework itself waits for a collective before anything uses its memory. Where it does not, a step
    /// that uses the memory too early, or never waits, is refused.
    const WAITS: bool = false;

    /// Whether programs can run the ops [`rote_plans::CHECK_NUMBER`], [`rote_plans::CHECK_EQUAL`] and
    /// [`rote_plans::CHECK_SHAPE`].
    const CHECKS: bool = false;

    /// The arguments of a call. Making them promises that they stay until the session's next call, or until
    /// its recording ends.
    type Args;
    /// A tensor, or another leaf, that the caller has. Of a leaf that is no tensor only [`Frontend::same`] is asked.
    type Ref<'a>: Copy;
    /// What [`Frontend::last`] holds.
    type Held: Debug;
    /// Facts about what outlives calls.
    type Facts: Facts<Self>;
    /// Describes tensors to the recorder.
    type Describer: Describe<Self>;
    /// Runs plans.
    type Program: Program + Debug;
    /// What a replay gives back.
    type Results: Debug;
    /// What the framework itself raises.
    type Exception: Debug;
    /// A process group.
    type Group: Ranks;

    /// Reads the arguments of a call.
    fn collect(&mut self, args: Self::Args) -> Result<(), ReplayError>;
    /// Reads the last arguments again.
    fn recollect(&mut self) -> Result<(), ReplayError>;
    /// The words of the last call.
    fn words(&self) -> &[u64];
    /// What each word of the last call is about.
    fn subjects(&self) -> &[WordSubject];
    /// The facts of the last call, held.
    fn last(&self) -> Result<CallFacts<Self::Held>, ReplayError>;
    /// Of a call with the words of an earlier one: the first word that stands for another value.
    fn held_difference(&self, earlier: &Self::Held) -> Result<Option<usize>, ReplayError>;
    /// A leaf of the last call, if there is one of this number.
    fn leaf(&self, leaf: u32) -> Option<Self::Ref<'_>>;
    /// Where a tensor lies in its storage. `closely`: with a number for what it is a view of.
    fn place(&self, tensor: Self::Ref<'_>, closely: bool) -> Result<Anchor, ReplayError>;
    /// Adds storages of the state with their tensors, to tell arguments that share their memory.
    fn add_state<'a>(
        &mut self,
        state: impl Iterator<Item = (u64, Self::Ref<'a>)>,
    ) -> Result<(), ReplayError>;

    /// Whether something around the last call sees or changes its ops, so that none may be left out.
    fn is_watched(&self) -> bool {
        false
    }
    /// What a word is called, in a call with leaves of these names.
    fn word(&self, index: usize, subject: Option<&WordSubject>, leaves: &[String]) -> String;
    /// What surrounds the last call and no other guard tells as text: names and values that mean the same in
    /// another process.
    fn surroundings(&self) -> Vec<(&'static str, String)> {
        Vec::new()
    }

    /// An empty table of facts.
    fn facts(&self) -> Self::Facts;
    /// Describes what one recording meets.
    fn describer(&self) -> Self::Describer;
    /// The ops that programs can run, for passes to ask.
    fn ops(&self) -> &dyn Ops;
    /// Slots for the values of a plan.
    fn program(&self, plan: &Plan) -> Result<Self::Program, ReplayError>;

    /// Holds a tensor.
    fn hold(&self, tensor: Self::Ref<'_>) -> TensorOf<Self>;
    /// Whether two are the same object.
    fn same(a: Self::Ref<'_>, b: Self::Ref<'_>) -> bool;
    /// A held tensor, to pass it.
    fn borrow(tensor: &TensorOf<Self>) -> Self::Ref<'_>;
    /// The number in a tensor of one element on the host, `f32` or `f64`; `None` if it is not one, or if the framework
    /// does not tell. It is read while nothing writes to the tensor.
    fn number(&self, _tensor: Self::Ref<'_>) -> Option<f64> {
        None
    }
    /// Puts what a tensor has into a slot.
    fn put(
        &self,
        program: &Self::Program,
        slot: u32,
        tensor: Self::Ref<'_>,
        part: Part,
    ) -> Result<(), ReplayError>;
    /// Gives a tensor the sizes and strides that a run which failed has left in its slot.
    fn leave_shape(
        &self,
        _program: &Self::Program,
        _slot: u32,
        _tensor: Self::Ref<'_>,
    ) -> Result<(), ReplayError> {
        Ok(())
    }
    /// Counts writes, where the framework counts them itself.
    fn count<'a>(
        &self,
        _written: impl Iterator<Item = Counted<Self::Ref<'a>>>,
    ) -> Result<(), ReplayError> {
        Ok(())
    }
    /// Outputs, then gradients.
    fn results(&self, bound: &BoundPlan<Self::Program>) -> Result<Self::Results, ReplayError>;
    /// What the framework raised in the last run that failed, given out once.
    fn exception(&self, _program: &Self::Program) -> Option<Self::Exception> {
        None
    }

    /// A number for the state of a device's default generator: another one for another state.
    fn generator(&self, device: Device) -> Result<u64, ReplayError>;

    /// Says which default process group there is, by a number: another one for another group.
    fn enter_world(&mut self, _number: u64) {}
    /// The process group of this name, if this process is in one.
    fn group(&self, name: &CStr) -> Result<Option<Self::Group>, ReplayError>;
    /// Says with which ranks the checks of the replays that follow compare their outcomes: a check then ends the replay
    /// of all ranks, or of none. None: each rank decides alone.
    fn compare_checks(&self, _group: Option<&Self::Group>) -> Result<(), ReplayError> {
        Ok(())
    }
    /// What the check that has ended the last replay has found in place of the recorded answer, if that is known: the
    /// number as [`rote_plans::CHECK_NUMBER`] takes it, 0 or 1 of a comparison, or a shape.
    fn found_answer(&self) -> Option<Vec<i64>> {
        None
    }
    /// Calls `body`, which waits for other ranks: whoever holds a lock that another thread may need lets go of it here.
    fn unlocked<T>(&self, body: impl FnOnce() -> T) -> Result<T, ReplayError> {
        Ok(body())
    }

    /// The first word of the last call in which it differs from an earlier one.
    fn difference(&self, earlier: &CallFacts<Self::Held>) -> Result<Option<usize>, ReplayError> {
        match first_difference(&earlier.words, self.words()) {
            None => self.held_difference(&earlier.held),
            word => Ok(word),
        }
    }
}

/// Facts about what outlives calls, as words that are read at every call.
pub trait Facts<F: Frontend>: Debug {
    /// Reads every fact, of the call that the frontend has collected.
    fn read(&mut self, frontend: &F) -> Result<(), ReplayError>;
    /// What the last read found.
    fn words(&self) -> &[u64];
    /// Holds what the facts see now, to compare it by content later.
    fn hold(&mut self) -> Result<(), ReplayError>;
    /// Whether the value behind a word that differs equals the held one.
    fn same(&self, word: usize) -> bool;
    /// What a word sees, as text: when it was held, or now. Empty where there is none.
    fn text(&self, word: usize, held: bool) -> String;
    /// The float behind a word, now.
    fn float(&self, word: usize) -> Result<f64, ReplayError>;
}

/// Describes a framework's tensors to the recorder, while one step is recorded.
pub trait Describe<F: Frontend>: Debug {
    /// Describes a tensor: its local tensor, if it is a distributed one. What is told may lie in the tensor or here.
    fn tensor<'a, 'r: 'a>(&'a mut self, tensor: F::Ref<'r>)
    -> Result<TensorEvent<'a>, ReplayError>;
    /// Whether anything still holds a storage that was described.
    fn is_alive(&self, storage: u64) -> bool;
}

//! The traits that a framework implements so that plans run on its tensors.
//!
//! A plan is bound once: each op, view and collective gets a number from the backend, and a run is a loop over these
//! numbers ([`Executor`](crate::Executor)). Nothing is looked up by name, converted or allocated in between. Calls are
//! resolved at compile time. A backend of functions that do nothing costs some 3 ns an op
//! (`backends/aten/benches/executor.rs`).
//!
//! Tensors lie in numbered slots, one for each value of the plan. The backend owns the slots. A run never
//! hands a tensor to this crate, so that each framework keeps its own type, reference counts and streams.
//!
//! [`Communicator`] is a trait of its own, since kernels and collectives may come from different libraries. [`Program`]
//! is the two together, over the same slots.
//!
//! Methods with `&mut self` bind, those with `&self` run. A run uses only numbers that binding
//! returned: only [`BoundPlan::bind`](crate::BoundPlan::bind) makes steps.
//!
//! `replay/tests/fake/` is a framework in plain Rust, and `replay/tests/binding.rs` runs plans on it.

use std::ffi::CStr;
use std::fmt::Debug;

use rote_plans::schedule::Into;
use rote_plans::{Arg, Collective, Device, Plan, RngAction};

use crate::executor::ReplayError;

/// A local op of a plan, to be bound.
#[derive(Clone, Copy, Debug)]
pub struct LocalOp<'a> {
    /// Its name, for example `aten::add`.
    pub name: &'a str,
    /// Which of the ops of that name, for example `Tensor`; empty for the default one.
    pub overload: &'a str,
    /// Its arguments, in the order of its schema.
    pub args: &'a [Arg],
    /// The slots of its results, [`rote_plans::NONE`] for a result that nothing uses.
    pub outs: &'a [u32],
    /// How it writes results that lie in the arena; they do not if none.
    pub into: Option<Into>,
    /// Whether autograd sees it while it runs.
    pub grad: bool,
}

/// A number among an op's arguments that is set before each run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NumberSite {
    /// The op, as [`Backend::bind_op`] numbered it.
    pub op: u32,
    /// The place among its arguments.
    pub arg: u32,
    /// The place in the list that the argument is, if it is one.
    pub element: Option<u32>,
    /// Which of the plan's scalars it is.
    pub scalar: u32,
}

/// Kernels of one framework, and the tensors of one bound plan. Errors of a run are the framework's own words.
pub trait Backend {
    /// A tensor as it is handed out, and held.
    type Tensor: Debug;

    /// Allocates the memory in which some results lie in every run.
    fn bind_arena(&mut self, bytes: u64, device: Device) -> Result<(), ReplayError>;
    /// Gives a value its place in the arena, in bytes from the start.
    fn bind_place(&mut self, plan: &Plan, value: u32, offset: u64) -> Result<(), ReplayError>;
    /// Says that runs draw from the default generator of a device.
    fn bind_generator(&mut self, _device: Device) -> Result<(), ReplayError> {
        Ok(())
    }
    /// Finds an op and prepares its call.
    ///
    /// # Errors
    ///
    /// [`ReplayError`] if there is no such op, or it does not take these arguments.
    fn bind_op(&mut self, plan: &Plan, op: &LocalOp<'_>) -> Result<u32, ReplayError>;
    /// Prepares the view `out` of `base`: dtype, sizes, strides and offset are those of the value `out`.
    fn bind_view(&mut self, plan: &Plan, base: u32, out: u32) -> Result<u32, ReplayError>;
    /// Sets a number among an op's arguments, until it is set again.
    fn set_number(&mut self, site: &NumberSite, value: f64) -> Result<(), ReplayError>;
    /// Whether an op of this name does nothing but what its schema says: it keeps nothing itself, so that a call of it
    /// may be made again.
    fn is_own(&self, name: &str) -> bool;

    /// Runs an op.
    fn local(&self, op: u32) -> Result<(), String>;
    /// Makes a view.
    fn view(&self, view: u32) -> Result<(), String>;
    /// Saves a generator's state in a slot for such, or restores it.
    fn rng(&self, action: RngAction, device: Device, slot: u32) -> Result<(), String>;
    /// Empties a slot.
    fn free(&self, value: u32) -> Result<(), String>;

    /// Says that slots hold the same tensors from now on, whatever runs.
    fn fix(&self, _values: &[u32]) -> Result<(), ReplayError> {
        Ok(())
    }
    /// Empties slots.
    fn clear(&self, values: &[u32]) -> Result<(), ReplayError>;
    /// The tensor in a slot, to hand out. `fresh`: nothing else refers to it; else an alias is handed out.
    fn output(&self, value: u32, fresh: bool) -> Result<Self::Tensor, ReplayError>;
    /// The tensor in a slot, to look at; none if the slot is empty.
    fn shown(&self, value: u32) -> Option<Self::Tensor> {
        self.output(value, false).ok()
    }
}

/// Moves tensors between ranks.
pub trait Communicator {
    /// Prepares a collective of a process group. A run makes the tensor in the slot of its output, unless one is
    /// there: that of its input, or one in the arena.
    ///
    /// # Errors
    ///
    /// [`ReplayError`] if this process is in no such group.
    fn bind_collective(&mut self, plan: &Plan, collective: &Collective)
    -> Result<u32, ReplayError>;

    /// Starts a collective.
    fn start(&self, collective: u32) -> Result<(), String>;
    /// Waits for the collective that writes `value`.
    fn wait(&self, value: u32) -> Result<(), String>;
}

/// What a bound plan runs on: a backend, its communicator, and what surrounds a run.
pub trait Program: Backend + Communicator {
    /// Calls `steps`, which are a whole run: whoever holds a lock that kernels need lets go of it here.
    fn under_way(
        &self,
        mut steps: impl FnMut() -> Result<(), ReplayError>,
    ) -> Result<(), ReplayError> {
        steps()
    }

    /// Calls `body` in the midst of a run, as if there were none: locks are held again.
    fn aside(&self, body: &mut dyn FnMut()) -> Result<(), ReplayError> {
        body();
        Ok(())
    }

    /// Begins to watch what runs allocate. What comes back tells, at each call, the most bytes allocated at once since
    /// the call before it; none if that can't be watched now.
    fn watch(&self) -> Result<Option<impl FnMut() -> u64>, ReplayError> {
        Ok(None::<fn() -> u64>)
    }

    /// After a run that failed: puts generators back where they stood before it. False, and nothing is done, if what
    /// ended it is no error that programs handle, as an interrupt from the keyboard.
    fn undo(&self) -> Result<bool, ReplayError>;

    /// Whether a collective of a run that failed may still use the program's memory.
    fn lost(&self) -> bool {
        false
    }

    /// Whether an op of a run that failed has made another result than the plan says: the program must not run again.
    fn differs(&self) -> bool {
        false
    }

    /// Whether a profiler listens to the run that is about to begin.
    fn listened(&self) -> bool {
        false
    }

    /// Begins a range of the time line that a profiler shows, inside of those that are open.
    fn begin_range(&self, _name: &CStr) -> Result<(), ReplayError> {
        Ok(())
    }

    /// Ends the range that was begun last.
    fn end_range(&self) -> Result<(), ReplayError> {
        Ok(())
    }
}

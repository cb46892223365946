//! The executor: a loop over a dense array of steps.

use rote_plans::RngAction;

use crate::backend::{Backend, Communicator};

/// Why a replay stopped.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReplayError {
    /// The plan cannot be bound to this process.
    #[error("cannot bind the plan: {0}")]
    Bind(String),
    /// An instruction failed, with the backend's words.
    #[error("instruction {step} failed: {message}")]
    Step {
        /// Index of the step.
        step: usize,
        /// What the backend said.
        message: String,
    },
    /// The bridge to a framework could not be loaded or failed.
    #[error("{0}")]
    Bridge(String),
}

/// One step of a bound plan. Numbers are the backend's own, given out when the
/// plan was bound.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Run a local op.
    Local(u32),
    /// Make a view.
    View(u32),
    /// Start a collective.
    Start(u32),
    /// Wait for the collective that writes a value.
    Wait(u32),
    /// Save or restore a generator.
    Rng(u32),
    /// Drop a value.
    Free(u32),
}

/// A plan's steps, bound to a backend's numbers.
#[derive(Clone, Debug, Default)]
pub struct Executor {
    /// The program. Numbers are those that the backend gave out: nobody else makes steps.
    pub(crate) steps: Vec<Step>,
    /// What each [`Step::Rng`] does.
    pub(crate) rng: Vec<(RngAction, rote_plans::Device, u32)>,
}

impl Executor {
    /// Runs every step in order; stops at the first that fails.
    pub fn run(
        &self,
        backend: &impl Backend,
        communicator: &impl Communicator,
    ) -> Result<(), ReplayError> {
        self.run_observed(backend, communicator, |_| {})
    }

    /// Runs every step in order, like [`Executor::run`], and says which one is
    /// next before each.
    pub fn run_observed(
        &self,
        backend: &impl Backend,
        communicator: &impl Communicator,
        mut next: impl FnMut(usize),
    ) -> Result<(), ReplayError> {
        for (i, step) in self.steps.iter().enumerate() {
            next(i);
            let done = match *step {
                Step::Local(op) => backend.local(op),
                Step::View(view) => backend.view(view),
                Step::Free(value) => backend.free(value),
                Step::Start(collective) => communicator.start(collective),
                Step::Wait(value) => communicator.wait(value),
                Step::Rng(rng) => {
                    let (action, device, slot) = self.rng[rng as usize];
                    backend.rng(action, device, slot)
                }
            };
            if let Err(message) = done {
                return Err(ReplayError::Step { step: i, message });
            }
        }
        Ok(())
    }
}

//! Collectives: sums over whatever network there is.

use std::fmt::Debug;

use rote_plans::{Collective, Plan};
use rote_replay::{Communicator, ReplayError};

use super::{Fake, Tensor};

/// Sums what the ranks send.
pub trait Network: Debug {
    fn sum(&self, ours: &[f32]) -> Result<Vec<f32>, String>;
}

impl Communicator for Fake {
    fn bind_collective(&mut self, plan: &Plan, c: &Collective) -> Result<u32, ReplayError> {
        self.bind_move(plan, c.input, c.output)
    }

    fn start(&self, collective: u32) -> Result<(), String> {
        let (input, output, look) = &self.moves[collective as usize];
        let sum = self.machine.sum(&self.get(*input)?)?;
        let mut slots = self.slots.borrow_mut();
        slots
            .entry(*output)
            .or_insert_with(|| Tensor::empty(&look.shape));
        self.started.borrow_mut().insert(*output, sum);
        Ok(())
    }

    fn wait(&self, value: u32) -> Result<(), String> {
        let sum = self.started.borrow_mut().remove(&value);
        let sum = sum.ok_or_else(|| format!("no collective writes slot {value}"))?;
        self.get(value)?.write(&sum);
        self.machine.ran("wait")
    }
}

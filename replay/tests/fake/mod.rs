//! A framework in plain Rust: what it brings so that plans run on its tensors.
//!
//! `machine` has the kernels, `network` the collectives, `op` the arguments of an op, `tensor` memory and views.

#![allow(dead_code, reason = "each user takes what it needs")]

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;

use rote_plans::{Device, Plan, RngAction};
use rote_replay::{Backend, LocalOp, NumberSite, Program, ReplayError};

pub mod machine;
pub mod network;
mod op;
mod tensor;

pub use machine::Machine;
use op::Op;
pub use tensor::Tensor;

/// One plan, with a slot for each of its values.
#[derive(Debug, Default)]
pub struct Fake {
    pub machine: Rc<Machine>,
    pub slots: RefCell<HashMap<u32, Tensor>>,
    ops: Vec<Op>,
    /// Of each view and collective: the slot it reads, the slot it fills, and how that looks.
    moves: Vec<(u32, u32, Tensor)>,
    arena: Tensor,
    /// Sums that nobody has waited for, by the slot that they go to.
    started: RefCell<HashMap<u32, Vec<f32>>>,
    saved: RefCell<HashMap<u32, u64>>,
    /// Where the generator stood before the run.
    before: Cell<u64>,
}

impl Fake {
    pub fn on(machine: Rc<Machine>) -> Self {
        let slots = RefCell::default();
        Fake {
            machine,
            slots,
            ..Fake::default()
        }
    }

    pub fn put(&self, value: u32, tensor: Tensor) {
        self.slots.borrow_mut().insert(value, tensor);
    }

    fn empty(&self, value: u32) {
        self.slots.borrow_mut().remove(&value);
    }

    fn get(&self, value: u32) -> Result<Tensor, String> {
        let found = self.slots.borrow().get(&value).cloned();
        found.ok_or_else(|| format!("slot {value} is empty"))
    }

    fn bind_move(&mut self, plan: &Plan, from: u32, to: u32) -> Result<u32, ReplayError> {
        let look = Tensor::default().seen(plan, to, 0);
        self.moves.push((from, to, look));
        Ok(self.moves.len() as u32 - 1)
    }
}

impl Backend for Fake {
    type Tensor = Tensor;

    fn bind_arena(&mut self, bytes: u64, _: Device) -> Result<(), ReplayError> {
        self.arena = Tensor::empty(&[bytes as i64 / 4]);
        Ok(())
    }

    fn bind_place(&mut self, plan: &Plan, id: u32, offset: u64) -> Result<(), ReplayError> {
        self.put(id, self.arena.seen(plan, id, offset as i64 / 4));
        Ok(())
    }

    fn bind_op(&mut self, plan: &Plan, op: &LocalOp<'_>) -> Result<u32, ReplayError> {
        if !machine::OPS.contains(&op.name) {
            return Err(ReplayError::Bind(format!("there is no op {}", op.name)));
        }
        self.ops.push(Op::of(plan, op));
        Ok(self.ops.len() as u32 - 1)
    }

    fn bind_view(&mut self, plan: &Plan, base: u32, out: u32) -> Result<u32, ReplayError> {
        self.bind_move(plan, base, out)
    }

    fn set_number(&mut self, site: &NumberSite, value: f64) -> Result<(), ReplayError> {
        self.ops[site.op as usize].set(site, value);
        Ok(())
    }

    fn is_own(&self, name: &str) -> bool {
        name.starts_with("aten::")
    }

    fn local(&self, op: u32) -> Result<(), String> {
        let op = &self.ops[op as usize];
        let tensors: Result<Vec<_>, _> = op.tensors.iter().map(|&slot| self.get(slot)).collect();
        let numbers: Vec<f64> = op.numbers.iter().map(|(_, number)| *number).collect();
        let made = self.machine.run(&op.name, &tensors?, &numbers);
        match made.inspect_err(|_| self.empty(op.out))? {
            Some(made) if op.in_arena => self.get(op.out)?.write(&made.elements()),
            Some(made) => self.put(op.out, made),
            None => {}
        }
        Ok(())
    }

    fn view(&self, view: u32) -> Result<(), String> {
        let (base, out, look) = &self.moves[view as usize];
        self.put(
            *out,
            self.get(*base)?
                .view(&look.shape, &look.strides, look.offset),
        );
        self.machine.ran("view")
    }

    fn rng(&self, action: RngAction, _: Device, slot: u32) -> Result<(), String> {
        let (generator, mut saved) = (&self.machine.generator, self.saved.borrow_mut());
        match action {
            RngAction::Save => _ = saved.insert(slot, generator.get()),
            RngAction::Restore => generator.set(saved[&slot]),
        }
        self.machine.ran(&format!("{action:?}"))
    }

    fn free(&self, value: u32) -> Result<(), String> {
        self.empty(value);
        self.machine.ran("free")
    }

    fn clear(&self, values: &[u32]) -> Result<(), ReplayError> {
        let mut slots = self.slots.borrow_mut();
        slots.retain(|value, _| !values.contains(value));
        Ok(())
    }

    fn output(&self, value: u32, _fresh: bool) -> Result<Tensor, ReplayError> {
        self.get(value).map_err(ReplayError::Bridge)
    }
}

impl Program for Fake {
    fn under_way(
        &self,
        mut run: impl FnMut() -> Result<(), ReplayError>,
    ) -> Result<(), ReplayError> {
        self.before.set(self.machine.generator.get());
        run()
    }

    fn watch(&self) -> Result<Option<impl FnMut() -> u64>, ReplayError> {
        Ok(Some(|| self.machine.made.take()))
    }

    fn undo(&self) -> Result<bool, ReplayError> {
        self.machine.generator.set(self.before.get());
        Ok(true)
    }
}

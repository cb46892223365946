//! A framework in plain Rust: tensors of `f32`, and the program that runs plans on them.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;

use rote_plans::instr::{ArchivedArg, ArchivedCollective};
use rote_plans::{ArchivedPlan, Device, RngAction};
use rote_replay::{Backend, Communicator, LocalOp, NumberSite, Program, ReplayError};

pub mod machine;
pub mod tensor;

pub use machine::Machine;
pub use tensor::Tensor;

/// An op of a plan.
#[derive(Debug, Default)]
struct Op {
    name: String,
    tensors: Vec<u32>,
    /// Its numbers, by argument and place in the list that it is.
    numbers: Vec<((u32, Option<u32>), f64)>,
    out: u32,
    in_arena: bool,
}

impl Op {
    fn take(&mut self, plan: &ArchivedPlan, at: (u32, Option<u32>), arg: &ArchivedArg) {
        let mut number = |element, number| self.numbers.push(((at.0, element), number));
        match arg {
            ArchivedArg::Value(value) => self.tensors.push(value.to_native()),
            ArchivedArg::Int(int) => number(at.1, int.to_native() as f64),
            ArchivedArg::Float(float) => number(at.1, float.to_native()),
            ArchivedArg::Scalar(_) => number(at.1, f64::NAN),
            ArchivedArg::Ints(ints) => (0..)
                .zip(&plan.dims[ints.indices()])
                .for_each(|(i, int)| number(Some(i), int.to_native() as f64)),
            ArchivedArg::Wrapped(inner) => {
                self.take(plan, at, &plan.args[inner.to_native() as usize]);
            }
            ArchivedArg::List(list) => (0..)
                .zip(&plan.args[list.indices()])
                .for_each(|(i, arg)| self.take(plan, (at.0, Some(i)), arg)),
            _ => {}
        }
    }
}

/// A plan's tensors and ops.
#[derive(Debug, Default)]
pub struct Fake {
    pub machine: Rc<Machine>,
    pub slots: RefCell<HashMap<u32, Tensor>>,
    ops: Vec<Op>,
    views: Vec<(u32, u32, Tensor)>,
    collectives: Vec<(u32, u32, Tensor)>,
    arena: Option<Tensor>,
    /// Sums that nobody has waited for, by the slot that they go to.
    under_way: RefCell<HashMap<u32, Vec<f32>>>,
    saved: RefCell<HashMap<u32, u64>>,
    /// Where the generator stood before the run.
    before: Cell<u64>,
}

impl Fake {
    pub fn on(machine: Rc<Machine>) -> Self {
        Fake {
            machine,
            ..Fake::default()
        }
    }

    pub fn put(&self, value: u32, tensor: Tensor) {
        self.slots.borrow_mut().insert(value, tensor);
    }

    fn get(&self, value: u32) -> Result<Tensor, String> {
        let found = self.slots.borrow().get(&value).cloned();
        found.ok_or_else(|| format!("slot {value} is empty"))
    }
}

impl Backend for Fake {
    type Tensor = Tensor;

    fn bind_arena(&mut self, bytes: u64, _: Device) -> Result<(), ReplayError> {
        let elements = vec![f32::NAN; bytes as usize / 4];
        self.arena = Some(Tensor::new(elements, &[bytes as i64 / 4]));
        Ok(())
    }

    fn bind_place(&mut self, plan: &ArchivedPlan, id: u32, offset: u64) -> Result<(), ReplayError> {
        let arena = self.arena.as_ref();
        let arena = arena.ok_or_else(|| ReplayError::Bind("no arena".to_owned()))?;
        self.put(id, arena.seen(plan, id, offset as i64 / 4));
        Ok(())
    }

    fn bind_op(&mut self, plan: &ArchivedPlan, op: &LocalOp<'_>) -> Result<u32, ReplayError> {
        if !machine::OPS.contains(&op.name) {
            return Err(ReplayError::Bind(format!("there is no op {}", op.name)));
        }
        let mut bound = Op {
            name: op.name.to_owned(),
            out: op.outs[0],
            in_arena: op.into.is_some(),
            ..Op::default()
        };
        let args = (0..).zip(op.args);
        args.for_each(|(at, arg)| bound.take(plan, (at, None), arg));
        self.ops.push(bound);
        Ok(self.ops.len() as u32 - 1)
    }

    fn bind_view(&mut self, plan: &ArchivedPlan, base: u32, out: u32) -> Result<u32, ReplayError> {
        let look = Tensor::new(Vec::new(), &[]).seen(plan, out, 0);
        self.views.push((base, out, look));
        Ok(self.views.len() as u32 - 1)
    }

    fn set_number(&mut self, site: &NumberSite, value: f64) -> Result<(), ReplayError> {
        let numbers = self.ops[site.op as usize].numbers.iter_mut();
        let numbers = numbers.filter(|(at, _)| *at == (site.arg, site.element));
        numbers.for_each(|(_, number)| *number = value);
        Ok(())
    }

    fn is_own(&self, name: &str) -> bool {
        name.starts_with("aten::")
    }

    fn local(&self, op: u32) -> Result<(), String> {
        let op = &self.ops[op as usize];
        let tensors: Result<Vec<_>, _> = op.tensors.iter().map(|&slot| self.get(slot)).collect();
        let numbers: Vec<f64> = op.numbers.iter().map(|(_, number)| *number).collect();
        match self.machine.run(&op.name, &tensors?, &numbers)? {
            Some(made) if op.in_arena => self.get(op.out)?.write(&made.elements()),
            Some(made) => self.put(op.out, made),
            None => {}
        }
        Ok(())
    }

    fn view(&self, view: u32) -> Result<(), String> {
        let (base, out, look) = &self.views[view as usize];
        let base = self.get(*base)?;
        let offset = base.offset + look.offset;
        self.put(*out, base.view(&look.shape, &look.strides, offset));
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
        self.slots.borrow_mut().remove(&value);
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

impl Communicator for Fake {
    fn bind_collective(
        &mut self,
        plan: &ArchivedPlan,
        c: &ArchivedCollective,
    ) -> Result<u32, ReplayError> {
        let (input, output) = (c.input.to_native(), c.output.to_native());
        let look = Tensor::new(Vec::new(), &[]).seen(plan, output, 0);
        self.collectives.push((input, output, look));
        Ok(self.collectives.len() as u32 - 1)
    }

    fn start(&self, collective: u32) -> Result<(), String> {
        let (input, output, look) = &self.collectives[collective as usize];
        let sum = self.machine.sum(&self.get(*input)?)?;
        let made = || Tensor::new(vec![f32::NAN; sum.len()], &look.shape);
        self.slots.borrow_mut().entry(*output).or_insert_with(made);
        self.under_way.borrow_mut().insert(*output, sum);
        Ok(())
    }

    fn wait(&self, value: u32) -> Result<(), String> {
        let sum = self.under_way.borrow_mut().remove(&value);
        let sum = sum.ok_or_else(|| format!("no collective writes slot {value}"))?;
        self.get(value)?.write(&sum);
        self.machine.ran("wait")
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

    fn undo(&self) -> Result<bool, ReplayError> {
        self.machine.generator.set(self.before.get());
        Ok(true)
    }
}

//! A framework in plain Rust: tensors of `f64`, a few ops, and a world of two ranks of which the
//! other one always sends what this one does.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;

use rote_plans::instr::{ArchivedArg, ArchivedCollective};
use rote_plans::{ArchivedPlan, Device, RngAction};
use rote_replay::{Backend, Communicator, LocalOp, NumberSite, Program, ReplayError};

/// Some elements of shared memory, in order.
#[derive(Clone, Debug)]
pub struct Tensor {
    memory: Rc<[Cell<f64>]>,
    pub places: Vec<usize>,
    columns: usize,
}

impl Tensor {
    pub fn new(elements: Vec<f64>, columns: usize) -> Self {
        let places = (0..elements.len()).collect();
        let memory = elements.into_iter().map(Cell::new).collect();
        Tensor {
            memory,
            places,
            columns,
        }
    }

    pub fn elements(&self) -> Vec<f64> {
        self.places
            .iter()
            .map(|&at| self.memory[at].get())
            .collect()
    }

    fn write(&self, elements: &[f64]) {
        self.places
            .iter()
            .zip(elements)
            .for_each(|(&at, element)| self.memory[at].set(*element));
    }

    /// How a value of a plan looks at this memory.
    fn seen(&self, plan: &ArchivedPlan, value: u32, first: usize) -> Self {
        let value = &plan.values[value as usize];
        let mut places = vec![first + value.offset.to_native() as usize];
        let strides = &plan.dims[value.strides.indices()];
        for (size, stride) in plan.dims[value.shape.indices()].iter().zip(strides) {
            let (size, stride) = (size.to_native() as usize, stride.to_native() as usize);
            let along = |place: usize| (0..size).map(move |i| place + i * stride);
            places = places.into_iter().flat_map(along).collect();
        }
        let columns = plan.dims[value.shape.indices()]
            .last()
            .map_or(1, |size| size.to_native() as usize);
        Tensor {
            memory: self.memory.clone(),
            places,
            columns,
        }
    }
}

/// An op: its name, its tensors, its numbers by their places, its result and whether that lies in the arena.
type Op = (
    String,
    Vec<u32>,
    HashMap<(u32, Option<u32>), f64>,
    u32,
    bool,
);

/// The framework, with the tensors of one plan.
#[derive(Debug, Default)]
pub struct Fake {
    pub slots: RefCell<HashMap<u32, Tensor>>,
    pub generator: Cell<u64>,
    /// What ran, in order.
    pub log: RefCell<Vec<String>>,
    /// The op that fails.
    pub failing: Cell<&'static str>,
    saved: Cell<u64>,
    started: Cell<Option<u32>>,
    ops: Vec<Op>,
    views: Vec<(u32, u32, Tensor)>,
    collectives: Vec<(u32, u32)>,
    arena: Option<Tensor>,
}

impl Fake {
    pub fn put(&self, value: u32, tensor: Tensor) {
        self.slots.borrow_mut().insert(value, tensor);
    }

    fn get(&self, value: u32) -> Result<Tensor, String> {
        self.slots
            .borrow()
            .get(&value)
            .cloned()
            .ok_or_else(|| format!("slot {value} is empty"))
    }

    fn ran(&self, what: &str) -> Result<(), String> {
        self.log.borrow_mut().push(what.to_owned());
        if what == self.failing.get() {
            Err("out of memory".to_owned())
        } else {
            Ok(())
        }
    }
}

impl Backend for Fake {
    type Tensor = Tensor;

    fn bind_arena(&mut self, bytes: u64, _: Device) -> Result<(), ReplayError> {
        self.arena = Some(Tensor::new(vec![f64::NAN; bytes as usize / 4], 1));
        Ok(())
    }

    fn bind_place(
        &mut self,
        plan: &ArchivedPlan,
        value: u32,
        offset: u64,
    ) -> Result<(), ReplayError> {
        let arena = self
            .arena
            .as_ref()
            .ok_or_else(|| ReplayError::Bind("no arena".to_owned()))?;
        self.put(value, arena.seen(plan, value, offset as usize / 4));
        Ok(())
    }

    fn bind_op(&mut self, plan: &ArchivedPlan, op: &LocalOp<'_>) -> Result<u32, ReplayError> {
        if ![
            "aten::mm",
            "aten::add",
            "aten::mul_",
            "test::every_argument",
        ]
        .contains(&op.name)
        {
            return Err(ReplayError::Bind(format!("there is no op {}", op.name)));
        }
        let (mut tensors, mut numbers) = (Vec::new(), HashMap::new());
        for (place, arg) in (0..).zip(op.args) {
            match arg {
                ArchivedArg::Value(value) => tensors.push(value.to_native()),
                ArchivedArg::Int(int) => _ = numbers.insert((place, None), int.to_native() as f64),
                ArchivedArg::Wrapped(inner) => {
                    if let ArchivedArg::Float(float) = &plan.args[inner.to_native() as usize] {
                        numbers.insert((place, None), float.to_native());
                    }
                }
                _ => {}
            }
        }
        self.ops.push((
            op.name.to_owned(),
            tensors,
            numbers,
            op.outs[0],
            op.into.is_some(),
        ));
        Ok(self.ops.len() as u32 - 1)
    }

    fn bind_view(&mut self, plan: &ArchivedPlan, base: u32, out: u32) -> Result<u32, ReplayError> {
        self.views
            .push((base, out, Tensor::new(Vec::new(), 1).seen(plan, out, 0)));
        Ok(self.views.len() as u32 - 1)
    }

    fn set_number(&mut self, site: &NumberSite, value: f64) -> Result<(), ReplayError> {
        self.ops[site.op as usize]
            .2
            .insert((site.arg, site.element), value);
        Ok(())
    }

    fn is_own(&self, name: &str) -> bool {
        name.starts_with("aten::")
    }

    fn local(&self, op: u32) -> Result<(), String> {
        let (name, tensors, numbers, out, in_arena) = &self.ops[op as usize];
        self.ran(name)?;
        let tensors: Vec<Tensor> = tensors
            .iter()
            .map(|&t| self.get(t))
            .collect::<Result<_, _>>()?;
        let elements: Vec<Vec<f64>> = tensors.iter().map(Tensor::elements).collect();
        let made = match (name.as_str(), &elements[..]) {
            ("aten::mm", [a, b]) => {
                let (k, m) = (tensors[0].columns, tensors[1].columns);
                let cell = |at: usize| (0..k).map(|i| a[at / m * k + i] * b[i * m + at % m]).sum();
                Tensor::new((0..a.len() / k * m).map(cell).collect(), m)
            }
            ("aten::add", [a, b]) => {
                let sum = a.iter().zip(b).map(|(a, b)| a + numbers[&(2, None)] * b);
                Tensor::new(sum.collect(), tensors[0].columns)
            }
            ("aten::mul_", [a]) => {
                tensors[0].write(
                    &a.iter()
                        .map(|a| a * numbers[&(1, None)])
                        .collect::<Vec<_>>(),
                );
                return Ok(());
            }
            _ => Tensor::new(vec![numbers[&(5, Some(1))]], 1),
        };
        if *in_arena {
            self.get(*out)?.write(&made.elements())
        } else {
            self.put(*out, made)
        }
        Ok(())
    }

    fn view(&self, view: u32) -> Result<(), String> {
        let (base, out, seen) = &self.views[view as usize];
        self.put(
            *out,
            Tensor {
                memory: self.get(*base)?.memory,
                ..seen.clone()
            },
        );
        self.ran("view")
    }

    fn rng(&self, action: RngAction, _: Device, _slot: u32) -> Result<(), String> {
        match action {
            RngAction::Save => self.saved.set(self.generator.get()),
            RngAction::Restore => self.generator.set(self.saved.get()),
        }
        self.ran(&format!("{action:?}"))
    }

    fn free(&self, value: u32) -> Result<(), String> {
        self.slots.borrow_mut().remove(&value);
        self.ran("free")
    }

    fn clear(&self, values: &[u32]) -> Result<(), ReplayError> {
        self.slots
            .borrow_mut()
            .retain(|value, _| !values.contains(value));
        Ok(())
    }

    fn output(&self, value: u32, _fresh: bool) -> Result<Tensor, ReplayError> {
        self.get(value).map_err(ReplayError::Bridge)
    }
}

impl Communicator for Fake {
    fn bind_collective(
        &mut self,
        _: &ArchivedPlan,
        c: &ArchivedCollective,
    ) -> Result<u32, ReplayError> {
        self.collectives
            .push((c.input.to_native(), c.output.to_native()));
        Ok(self.collectives.len() as u32 - 1)
    }

    fn start(&self, collective: u32) -> Result<(), String> {
        let (input, output) = self.collectives[collective as usize];
        let sum: Vec<f64> = self
            .get(input)?
            .elements()
            .iter()
            .map(|mine| mine + mine)
            .collect();
        self.get(output)?.write(&sum);
        self.started.set(Some(output));
        self.ran("all_reduce")
    }

    fn wait(&self, value: u32) -> Result<(), String> {
        assert_eq!(self.started.take(), Some(value), "nothing else was started");
        self.ran("wait")
    }
}

impl Program for Fake {
    fn undo(&self) -> Result<bool, ReplayError> {
        Ok(true)
    }
}

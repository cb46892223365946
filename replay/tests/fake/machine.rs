//! What eager steps and plans run on: kernels, one generator, and a network.

use std::cell::{Cell, RefCell};

use rote_plans::Device;
use rote_plans::schedule::{Into, Ops};

use super::Tensor;
use super::network::Network;

/// The ops that there are.
pub const OPS: [&str; 8] = [
    "aten::mm",
    "aten::add",
    "aten::add_",
    "aten::mul_",
    "aten::copy_",
    "aten::empty_strided",
    "aten::rand_like",
    "test::every_argument",
];

/// Without a network, there are two ranks, of which the other one sends what this one does.
#[derive(Debug, Default)]
pub struct Machine {
    pub generator: Cell<u64>,
    /// Bytes of what ops have made.
    pub made: Cell<u64>,
    /// What ran, in order.
    pub log: RefCell<Vec<String>>,
    /// What fails when it runs next: each entry once.
    pub failing: RefCell<Vec<&'static str>>,
    pub network: Option<Box<dyn Network>>,
}

impl Ops for Machine {
    fn has(&self, name: &str, _overload: &str) -> bool {
        OPS.contains(&name)
    }

    fn writes_into(&self, name: &str, _overload: &str) -> Option<Into> {
        (!name.ends_with('_')).then_some(Into::Overload("out"))
    }

    fn copies_inputs(&self) -> bool {
        true
    }

    fn gathers_in_place(&self) -> bool {
        false
    }

    fn alignment(&self, _device: Device) -> u64 {
        64
    }
}

impl Machine {
    pub fn ran(&self, what: &str) -> Result<(), String> {
        self.log.borrow_mut().push(what.to_owned());
        let mut failing = self.failing.borrow_mut();
        match failing.iter().position(|failing| *failing == what) {
            Some(at) => Err(format!("{}: out of memory", failing.remove(at))),
            None => Ok(()),
        }
    }

    fn draw(&self) -> f32 {
        let next = self.generator.get().wrapping_mul(6364136223846793005);
        self.generator.set(next.wrapping_add(1442695040888963407));
        (self.generator.get() >> 40) as f32
    }

    /// The sum of what all ranks send.
    pub fn sum(&self, sent: &Tensor) -> Result<Vec<f32>, String> {
        let ours = sent.elements();
        self.ran("all_reduce")?;
        match &self.network {
            Some(network) => network.sum(&ours),
            None => Ok(ours.iter().map(|ours| ours + ours).collect()),
        }
    }

    /// Runs an op: what it makes, if it does not write in place.
    pub fn run(
        &self,
        name: &str,
        tensors: &[Tensor],
        numbers: &[f64],
    ) -> Result<Option<Tensor>, String> {
        self.ran(name)?;
        let elements: Vec<Vec<f32>> = tensors.iter().map(Tensor::elements).collect();
        let mut shape = tensors
            .first()
            .map_or(Vec::new(), |first| first.shape.clone());
        let made = match (name, &elements[..], numbers) {
            ("aten::mm", [a, b], _) => {
                let (inner, columns) = (shape[1] as usize, tensors[1].shape[1] as usize);
                shape[1] = columns as i64;
                let products = |row: usize, column: usize| {
                    (0..inner).map(move |i| a[row * inner + i] * b[i * columns + column])
                };
                let cells = (0..a.len() / inner * columns).map(|at| (at / columns, at % columns));
                cells
                    .map(|(row, column)| products(row, column).sum())
                    .collect()
            }
            ("aten::add" | "aten::add_", [a, b], [times]) => {
                let pairs = a.iter().zip(b);
                pairs.map(|(a, b)| a + *times as f32 * b).collect()
            }
            ("aten::mul_", [a], [by]) => a.iter().map(|a| a * *by as f32).collect(),
            ("aten::copy_", [_, from], _) => from.clone(),
            ("aten::rand_like", [a], _) => a.iter().map(|_| self.draw()).collect(),
            ("aten::empty_strided", [], sizes_and_strides) => {
                let sizes = &sizes_and_strides[..sizes_and_strides.len() / 2];
                shape = sizes.iter().map(|size| *size as i64).collect();
                Tensor::empty(&shape).elements()
            }
            ("test::every_argument", _, [.., number, _]) => {
                shape.clear();
                vec![*number as f32]
            }
            _ => return Err(format!("{name} does not take these arguments")),
        };
        if name.ends_with('_') {
            tensors[0].write(&made);
            return Ok(None);
        }
        self.made.set(self.made.get() + 4 * made.len() as u64);
        Ok(Some(Tensor::new(made, &shape)))
    }
}

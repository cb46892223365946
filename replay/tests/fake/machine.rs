//! What eager steps and plans run on: kernels, one generator, and a network.

use std::cell::{Cell, RefCell};
use std::fmt::Debug;

use super::Tensor;

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

/// Sums what the ranks send.
pub trait Network: Debug {
    fn sum(&self, ours: &[f32]) -> Result<Vec<f32>, String>;
}

/// Without a network, there are two ranks, of which the other one sends what this one does.
#[derive(Debug, Default)]
pub struct Machine {
    pub generator: Cell<u64>,
    /// What ran, in order.
    pub log: RefCell<Vec<String>>,
    /// What fails when it runs next: each entry once.
    pub failing: RefCell<Vec<&'static str>>,
    pub network: Option<Box<dyn Network>>,
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
        let sum = |a: &[f32], b: &[f32], times: f64| -> Vec<f32> {
            let pairs = a.iter().zip(b);
            pairs.map(|(a, b)| a + times as f32 * b).collect()
        };
        let (written, made) = match (name, &elements[..], numbers) {
            ("aten::mm", [a, b], _) => {
                let [n, k, m] = [
                    tensors[0].shape[0],
                    tensors[0].shape[1],
                    tensors[1].shape[1],
                ];
                let (inner, columns) = (k as usize, m as usize);
                let term =
                    |at: usize, i| a[at / columns * inner + i] * b[i * columns + at % columns];
                let cell = |at: usize| (0..inner).map(|i| term(at, i)).sum();
                let product = (0..(n * m) as usize).map(cell).collect();
                return Ok(Some(Tensor::new(product, &[n, m])));
            }
            ("aten::add", [a, b], [times]) => (None, sum(a, b, *times)),
            ("aten::add_", [a, b], [times]) => (Some(0), sum(a, b, *times)),
            ("aten::mul_", [a], [by]) => (Some(0), a.iter().map(|a| a * *by as f32).collect()),
            ("aten::copy_", [_, from], _) => (Some(0), from.clone()),
            ("aten::rand_like", [a], _) => (None, a.iter().map(|_| self.draw()).collect()),
            ("aten::empty_strided", [], dims) => {
                let shape: Vec<i64> = dims[..dims.len() / 2].iter().map(|d| *d as i64).collect();
                let count = shape.iter().product::<i64>() as usize;
                return Ok(Some(Tensor::new(vec![f32::NAN; count], &shape)));
            }
            ("test::every_argument", _, [.., number, _]) => {
                return Ok(Some(Tensor::new(vec![*number as f32], &[])));
            }
            _ => return Err(format!("{name} does not take these arguments")),
        };
        match written {
            Some(written) => tensors[written as usize].write(&made),
            None => return Ok(Some(Tensor::new(made, &tensors[0].shape))),
        }
        Ok(None)
    }
}

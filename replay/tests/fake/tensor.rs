//! Tensors that share memory.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use rote_plans::Plan;

/// Some elements of shared memory, and their gradient.
#[derive(Clone, Debug)]
pub struct Tensor {
    pub memory: Rc<[Cell<f32>]>,
    pub shape: Vec<i64>,
    pub strides: Vec<i64>,
    /// Where the first element lies in the memory.
    pub offset: i64,
    pub grad: Rc<RefCell<Option<Tensor>>>,
}

impl Default for Tensor {
    fn default() -> Self {
        Tensor::empty(&[0])
    }
}

impl Tensor {
    pub fn new(elements: Vec<f32>, shape: &[i64]) -> Self {
        let after = |dim| shape[dim + 1..].iter().product();
        Tensor {
            memory: elements.into_iter().map(Cell::new).collect(),
            shape: shape.to_vec(),
            strides: (0..shape.len()).map(after).collect(),
            offset: 0,
            grad: Rc::default(),
        }
    }

    pub fn empty(shape: &[i64]) -> Self {
        let count = shape.iter().product::<i64>() as usize;
        Tensor::new(vec![f32::NAN; count], shape)
    }

    /// The same memory, looked at from here on.
    pub fn view(&self, shape: &[i64], strides: &[i64], offset: i64) -> Self {
        Tensor {
            memory: self.memory.clone(),
            shape: shape.to_vec(),
            strides: strides.to_vec(),
            offset: self.offset + offset,
            grad: Rc::default(),
        }
    }

    /// How a value of a plan looks at this memory, that many elements on.
    pub fn seen(&self, plan: &Plan, value: u32, on: i64) -> Self {
        let value = &plan.values[value as usize];
        let (shape, strides) = (plan.dims(value.shape), plan.dims(value.strides));
        self.view(shape, strides, on + value.offset)
    }

    fn cells(&self) -> impl Iterator<Item = &Cell<f32>> {
        let mut places = vec![self.offset];
        for (&size, &stride) in self.shape.iter().zip(&self.strides) {
            let along = |place: i64| (0..size).map(move |i| place + i * stride);
            places = places.into_iter().flat_map(along).collect();
        }
        places.into_iter().map(|at| &self.memory[at as usize])
    }

    pub fn elements(&self) -> Vec<f32> {
        self.cells().map(Cell::get).collect()
    }

    pub fn write(&self, elements: &[f32]) {
        let cells = self.cells().zip(elements);
        cells.for_each(|(cell, element)| cell.set(*element));
    }
}

//! Events for the recorder: ops as they run, on plain local tensors.

use rote_plans::value::reach;
use rote_plans::{DType, Device, Kind, Marks};

/// A local tensor as a framework shows it.
#[derive(Clone, Copy, Debug)]
pub struct TensorEvent<'a> {
    /// Identity of its storage; equal for tensors that share memory, never
    /// used twice in a recording. 0: no tensor.
    pub storage: u64,
    /// Element type.
    pub dtype: DType,
    /// Device.
    pub device: Device,
    /// Shape in elements.
    pub sizes: &'a [i64],
    /// Strides in elements.
    pub strides: &'a [i64],
    /// Offset from the start of the storage, in elements of this dtype.
    pub offset: i64,
    /// Size of the storage in bytes.
    pub storage_bytes: u64,
    /// What the framework marks it as.
    pub marks: Marks,
    /// Whether it has no strided storage at all (sparse and such).
    pub opaque: bool,
}

impl TensorEvent<'_> {
    /// What elements it has.
    pub fn kind(&self) -> Kind {
        // Destructured so that a new field cannot be left out.
        let TensorEvent {
            storage: _,
            dtype,
            device,
            sizes: _,
            strides: _,
            offset: _,
            storage_bytes: _,
            marks,
            opaque: _,
        } = *self;
        Kind {
            dtype,
            device,
            marks,
        }
    }

    /// The bytes of its storage that it reaches, `None` without elements.
    pub fn reach(&self) -> Option<(i128, i128)> {
        let dims = self.sizes.iter().copied().zip(self.strides.iter().copied());
        reach(self.dtype.bytes()?, self.offset, dims)
    }

    /// Number of elements, or the largest one of an impossible shape.
    pub fn numel(&self) -> i64 {
        (self.sizes.iter()).fold(1, |numel: i64, size| numel.saturating_mul(*size))
    }

    /// What makes no sense about the description, if anything: a framework's
    /// own tensors need no such check.
    pub fn problem(&self) -> Option<String> {
        if self.opaque || self.storage == 0 {
            return None;
        }
        if self.sizes.len() != self.strides.len() {
            return Some(format!(
                "has {} sizes and {} strides",
                self.sizes.len(),
                self.strides.len()
            ));
        }
        let counted = self
            .sizes
            .iter()
            .try_fold(1_i64, |numel, &size| numel.checked_mul(size));
        if counted.is_none() || self.sizes.iter().any(|&size| size < 0) {
            return Some(format!("has the impossible shape {:?}", self.sizes));
        }
        let start = i64::try_from(self.dtype.bytes().unwrap_or(1))
            .ok()
            .and_then(|bytes| self.offset.checked_mul(bytes));
        if start.is_none_or(|start| start.unsigned_abs() > 1 << 62) {
            return Some(format!("has the impossible offset {}", self.offset));
        }
        let (from, to) = self.reach()?;
        (from < 0 || to > i128::from(self.storage_bytes)).then(|| {
            format!(
                "reaches bytes {from} to {to} of a storage of {} bytes",
                self.storage_bytes
            )
        })
    }

    /// Printed like `f32[4, 64]`.
    pub fn describe(&self) -> String {
        format!("{}{:?}", self.dtype, self.sizes)
    }
}

/// An argument or result of an op.
#[derive(Clone, Debug)]
pub enum ArgEvent<'a> {
    /// Nothing.
    None,
    /// A tensor.
    Tensor(TensorEvent<'a>),
    /// A list of tensors; storage 0 is an absent one.
    Tensors(Vec<TensorEvent<'a>>),
    /// A boolean.
    Bool(bool),
    /// An integer.
    Int(i64),
    /// A float.
    Float(f64),
    /// A complex number.
    Complex(f64, f64),
    /// A number where the schema wants a tensor.
    Wrapped(Box<ArgEvent<'a>>),
    /// A list of integers.
    Ints(&'a [i64]),
    /// A list of anything else.
    List(Vec<ArgEvent<'a>>),
    /// Text.
    Str(&'a str),
    /// An element type.
    DType(DType),
    /// A device.
    Device(Device),
    /// A layout number.
    Layout(i8),
    /// A memory format number.
    MemoryFormat(i8),
    /// Something that a plan cannot hold; its type.
    Other(&'a str),
}

/// An argument with what the schema says of it.
#[derive(Clone, Debug)]
pub struct Argument<'a> {
    /// The argument.
    pub value: ArgEvent<'a>,
    /// Whether the op writes to it.
    pub written: bool,
}

/// One op, after it ran.
#[derive(Clone, Debug)]
pub struct OpEvent<'a> {
    /// Name with namespace, for example `aten::mm`.
    pub name: &'a str,
    /// Overload, empty for the default one.
    pub overload: &'a str,
    /// Arguments in schema order, defaults filled in.
    pub args: Vec<Argument<'a>>,
    /// Results.
    pub outs: Vec<ArgEvent<'a>>,
    /// Whether it draws from a generator.
    pub seeded: bool,
    /// Whether it reads tensor data on the host, or its result's shape
    /// depends on data.
    pub data_dependent: bool,
    /// Whether it changes the meta of an argument in place.
    pub inplace_view: bool,
    /// Whether the framework hid it from those who watch ops.
    pub hidden: bool,
    /// Whether code of the framework's own called it, which waits for its collectives itself, and fills memory of its
    /// own in every step.
    pub internal: bool,
    /// Whether gradients were enabled while its kernel ran.
    pub grad: bool,
    /// The user's source line, or empty.
    pub source: &'a str,
}

/// A distributed tensor's spec, as a framework shows it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct SpecEvent {
    /// Device type of the mesh.
    pub device_type: String,
    /// Ranks per mesh dim.
    pub mesh_shape: Vec<i64>,
    /// Names of the mesh dims, empty when it has none.
    pub mesh_dim_names: Vec<String>,
    /// Global ranks in row-major order.
    pub ranks: Vec<i64>,
    /// One placement per mesh dim, in DTensor's short form: `R`, `S(0)`,
    /// `_S(0, 2)`, `P(sum)`.
    pub placements: Vec<String>,
    /// Global shape.
    pub shape: Vec<i64>,
    /// Global strides.
    pub strides: Vec<i64>,
}

#[cfg(test)]
mod tests {
    use crate::sample::{Tensor, tensor};

    #[test]
    fn elements_are_counted_without_overflow() {
        let huge = tensor(0, &[4]).view(&[i64::MAX, 3], &[1, 1], 0);
        assert_eq!(
            huge.event().problem(),
            None,
            "nothing is known of what has no storage"
        );
        assert_eq!(huge.event().numel(), i64::MAX);
    }

    #[test]
    fn a_description_must_fit_its_storage() {
        let x = tensor(1, &[4, 8]); // 128 bytes
        let problem = |tensor: &Tensor| tensor.event().problem().unwrap_or_default();
        for fits in [
            x.clone(),
            x.view(&[8, 4], &[1, 8], 0),
            x.view(&[8], &[1], 24),
            x.view(&[8], &[-1], 7),
            x.view(&[1 << 40], &[0], 31),       // expanded
            x.view(&[0, 1 << 40], &[1, 1], 99), // nothing to reach
            x.view(&[], &[], 31),
        ] {
            assert_eq!(problem(&fits), "");
        }
        for (wrong, says) in [
            (
                x.view(&[8], &[1], 25),
                "bytes 100 to 132 of a storage of 128",
            ),
            (x.view(&[8], &[-1], 6), "bytes -4 to 28"),
            (x.view(&[], &[], 32), "bytes 128 to 132"),
            (x.view(&[2], &[i64::MAX], 0), "of a storage of 128"),
            (x.view(&[4, 8], &[1], 0), "2 sizes and 1 strides"),
            (x.view(&[-1], &[1], 0), "impossible shape [-1]"),
            (x.view(&[0], &[1], i64::MAX), "impossible offset"),
            (x.view(&[0], &[1], i64::MIN / 4), "impossible offset"),
            (x.view(&[1 << 40, 1 << 40], &[0, 0], 0), "impossible shape"),
        ] {
            let problem = problem(&wrong);
            assert!(problem.contains(says), "{problem:?} says {says:?}");
        }
    }
}

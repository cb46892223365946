//! The storages that a plan knows, and the values that look at them.

use rote_plans::{Binding, BindingKind, DType, Def, Device, Instr, InstrId, NONE, Value, ValueId};

use super::Recorder;
use crate::event::{SpecEvent, TensorEvent};

/// A tensor that the plan may bind, should an op read or write it.
#[derive(Clone, Debug)]
pub(super) struct Candidate {
    kind: BindingKind,
    path: String,
    spec: Option<SpecEvent>,
    storage: u64,
    dtype: DType,
    device: Device,
    sizes: Vec<i64>,
    strides: Vec<i64>,
    offset: i64,
    lazy_bits: u8,
}

impl Candidate {
    fn event(&self) -> TensorEvent<'_> {
        TensorEvent {
            storage: self.storage,
            dtype: self.dtype,
            device: self.device,
            sizes: &self.sizes,
            strides: &self.strides,
            offset: self.offset,
            storage_bytes: 0, // the plan does not own it
            lazy_bits: self.lazy_bits,
            opaque: false,
        }
    }
}

/// A storage that the plan knows.
#[derive(Clone, Copy, Debug)]
pub(super) struct Root {
    pub(super) value: ValueId,
    /// Where the root's data starts in the storage, in bytes.
    start_bytes: i64,
    /// Size of the storage; 0 for a binding's.
    pub(super) storage_bytes: u64,
    pub(super) lazy_bits: u8,
    /// Allocated by an `empty`, and nothing has been written to it yet.
    pub(super) uninitialized: bool,
    /// Index of the binding, for storages that exist before the step.
    pub(super) binding: Option<u32>,
}

/// A way of looking at a root.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Geometry {
    pub(super) root: ValueId,
    dtype: DType,
    lazy_bits: u8,
    /// In elements of this dtype, from where the root's data starts.
    pub(super) offset: i64,
    sizes: Vec<i64>,
    strides: Vec<i64>,
}

impl Recorder {
    /// Names a tensor that exists before the step. The first name of a storage
    /// is the one that counts.
    pub fn name_tensor(
        &mut self,
        kind: BindingKind,
        path: &str,
        tensor: &TensorEvent<'_>,
        spec: Option<&SpecEvent>,
    ) {
        if tensor.opaque
            || tensor.storage == 0
            || tensor.dtype.bytes().is_none()
            || self.roots.contains_key(&tensor.storage)
        {
            return;
        }
        self.candidates
            .entry(tensor.storage)
            .or_insert_with(|| Candidate {
                kind,
                path: path.to_owned(),
                spec: spec.cloned(),
                storage: tensor.storage,
                dtype: tensor.dtype,
                device: tensor.device,
                sizes: tensor.sizes.to_vec(),
                strides: tensor.strides.to_vec(),
                offset: tensor.offset,
                lazy_bits: tensor.lazy_bits,
            });
    }

    /// Makes a candidate a binding. False when the storage has no name.
    pub(super) fn bind(&mut self, storage: u64) -> bool {
        let Some(candidate) = self.candidates.remove(&storage) else {
            return false;
        };
        let index = self.tables.plan.bindings.len() as u32;
        let value = self.root(&candidate.event(), Def::Binding(index), false);
        let path = self.tables.str(&candidate.path);
        let spec = self.tables.optional_spec(candidate.spec.as_ref());
        self.tables.plan.bindings.push(Binding {
            kind: candidate.kind,
            path,
            value,
            spec,
            written: false,
        });
        true
    }

    /// The value of a new storage, made by the instruction `instr`.
    pub(super) fn fresh(
        &mut self,
        tensor: &TensorEvent<'_>,
        instr: InstrId,
        uninitialized: bool,
    ) -> ValueId {
        self.root(tensor, Def::Instr(instr), uninitialized)
    }

    /// A value that is its own root.
    fn root(&mut self, tensor: &TensorEvent<'_>, def: Def, uninitialized: bool) -> ValueId {
        let id = self.tables.plan.values.len() as ValueId;
        let geometry = Geometry {
            root: id,
            dtype: tensor.dtype,
            lazy_bits: tensor.lazy_bits,
            offset: 0,
            sizes: tensor.sizes.to_vec(),
            strides: tensor.strides.to_vec(),
        };
        let root = Root {
            value: id,
            start_bytes: tensor.offset * tensor.dtype.bytes().unwrap_or(1) as i64,
            storage_bytes: tensor.storage_bytes,
            lazy_bits: tensor.lazy_bits,
            uninitialized,
            binding: match def {
                Def::Binding(binding) => Some(binding),
                Def::Instr(_) | Def::Constant(_) => None,
            },
        };
        self.roots.insert(tensor.storage, root);
        self.push_value(tensor, def, geometry, tensor.storage_bytes)
    }

    /// A value that looks at a root in a new way, defined by the next
    /// instruction.
    pub(super) fn push_view(&mut self, tensor: &TensorEvent<'_>, geometry: Geometry) -> ValueId {
        let def = Def::Instr(self.next_instr());
        self.push_value(tensor, def, geometry, 0)
    }

    fn push_value(
        &mut self,
        tensor: &TensorEvent<'_>,
        def: Def,
        geometry: Geometry,
        storage_bytes: u64,
    ) -> ValueId {
        let id = self.tables.plan.values.len() as ValueId;
        let shape = self.tables.dims(tensor.sizes);
        let strides = self.tables.dims(tensor.strides);
        self.tables.plan.values.push(Value {
            dtype: tensor.dtype,
            device: tensor.device,
            def,
            root: geometry.root,
            shape,
            strides,
            offset: geometry.offset,
            storage_bytes,
            last_use: NONE,
        });
        self.geometries.insert(geometry, id);
        id
    }

    /// Where `tensor` looks at its root.
    pub(super) fn geometry(&self, tensor: &TensorEvent<'_>) -> Option<(Root, Geometry)> {
        let root = *self.roots.get(&tensor.storage)?;
        let bytes = tensor.dtype.bytes()? as i64;
        let start = tensor.offset * bytes - root.start_bytes;
        (start % bytes == 0).then(|| {
            (
                root,
                Geometry {
                    root: root.value,
                    dtype: tensor.dtype,
                    lazy_bits: tensor.lazy_bits,
                    offset: start / bytes,
                    sizes: tensor.sizes.to_vec(),
                    strides: tensor.strides.to_vec(),
                },
            )
        })
    }

    /// The value of a known tensor, made by a view instruction if need be.
    pub(super) fn value(&mut self, tensor: &TensorEvent<'_>, source: &str) -> Option<ValueId> {
        let (root, geometry) = self.geometry(tensor)?;
        if let Some(&value) = self.geometries.get(&geometry) {
            return Some(value);
        }
        if root.lazy_bits != tensor.lazy_bits {
            return None; // only the op itself can make it
        }
        let out = self.push_view(tensor, geometry);
        let base = root.value;
        self.push_instr(Instr::View { base, out }, source);
        Some(out)
    }
}

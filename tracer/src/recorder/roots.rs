//! The storages that a plan knows, and the values that look at them.

use rote_plans::value::reach;
use rote_plans::{Anchor, Binding, BindingKind, Def, Instr, InstrId, Kind, NONE, Value, ValueId};

use super::Recorder;
use super::waits::Extent;
use crate::event::{SpecEvent, TensorEvent};

/// A tensor that the plan may bind, should an op read or write it.
#[derive(Clone, Debug)]
pub(super) struct Candidate {
    kind: BindingKind,
    path: String,
    spec: Option<SpecEvent>,
    storage: u64,
    elements: Kind,
    sizes: Vec<i64>,
    strides: Vec<i64>,
    offset: i64,
    named: Named,
}

/// What is known of a storage that has a name.
#[derive(Clone, Copy, Debug)]
pub(super) struct Named {
    /// Where the first tensor of that storage lies in it; of arguments only: other
    /// tensors are guarded where they lie.
    place: Option<Anchor>,
    /// The bytes of the storage that its named tensors reach.
    reach: Option<(i128, i128)>,
}

impl Named {
    fn extend(&mut self, reach: Option<(i128, i128)>) {
        self.reach = match (self.reach, reach) {
            (Some(a), Some(b)) => Some((a.0.min(b.0), a.1.max(b.1))),
            (a, b) => a.or(b),
        };
    }
}

impl Candidate {
    fn event(&self) -> TensorEvent<'_> {
        let Kind {
            dtype,
            device,
            marks,
        } = self.elements;
        TensorEvent {
            storage: self.storage,
            dtype,
            device,
            marks,
            sizes: &self.sizes,
            strides: &self.strides,
            offset: self.offset,
            storage_bytes: 0, // the plan does not own it
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
    pub(super) elements: Kind,
    /// Allocated by an `empty`, and nothing has been written to it yet.
    pub(super) uninitialized: bool,
    /// Index of the binding, for storages that exist before the step.
    pub(super) binding: Option<u32>,
}

/// A way of looking at a root.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Geometry {
    pub(super) root: ValueId,
    elements: Kind,
    /// In elements of this dtype, from where the root's data starts.
    pub(super) offset: i64,
    sizes: Vec<i64>,
    strides: Vec<i64>,
}

impl Geometry {
    /// The bytes of the root that it looks at.
    pub(super) fn extent(&self) -> Extent {
        let dims = self.sizes.iter().copied().zip(self.strides.iter().copied());
        reach(self.elements.dtype.bytes().unwrap_or(1), self.offset, dims)
    }
}

impl Recorder {
    /// Names a tensor that exists before the step. The first name of a storage
    /// is the one that counts. `place`: where an argument lies in its storage, of which
    /// the replays know no more than what the step turns out to depend on; `None` for
    /// tensors that are guarded where they lie.
    pub fn name_tensor(
        &mut self,
        kind: BindingKind,
        path: &str,
        tensor: &TensorEvent<'_>,
        spec: Option<&SpecEvent>,
        place: Option<Anchor>,
    ) {
        if tensor.opaque
            || tensor.storage == 0
            || tensor.dtype.bytes().is_none()
            || self.roots.contains_key(&tensor.storage)
        {
            return;
        }
        let candidate = self
            .candidates
            .entry(tensor.storage)
            .or_insert_with(|| Candidate {
                kind,
                path: path.to_owned(),
                spec: spec.cloned(),
                storage: tensor.storage,
                elements: tensor.kind(),
                sizes: tensor.sizes.to_vec(),
                strides: tensor.strides.to_vec(),
                offset: tensor.offset,
                named: Named { place, reach: None },
            });
        candidate.named.extend(tensor.reach());
    }

    /// The step depends on where in its storage a tensor lies: the plan is only for
    /// calls whose argument lies there.
    pub fn anchor(&mut self, storage: u64) {
        if !self.roots.contains_key(&storage) {
            self.bind(storage);
        }
        let binding = self.roots.get(&storage).and_then(|root| root.binding);
        if let Some(index) = binding {
            let place = self.named[index as usize].place;
            self.tables.plan.bindings[index as usize].anchor = place;
        }
    }

    /// Whether an op of the step made a storage.
    pub fn is_made(&self, storage: u64) -> bool {
        self.roots
            .get(&storage)
            .is_some_and(|root| root.binding.is_none())
    }

    /// Says how often the step has raised the version counters of a named tensor and of its
    /// local tensor, if the plan binds it.
    pub fn counted(&mut self, storage: u64, path: &str, times: [u32; 2]) {
        let plan = &mut self.tables.plan;
        let Some(at) = self.roots.get(&storage).and_then(|root| root.binding) else {
            return;
        };
        if plan.str(plan.bindings[at as usize].path) == path {
            plan.bindings[at as usize].counted = times;
        }
    }

    /// Whether a recorded op has written to a storage that exists before the step.
    pub fn has_written(&self, storage: u64) -> bool {
        let binding = self.roots.get(&storage).and_then(|root| root.binding);
        binding.is_some_and(|binding| self.tables.plan.bindings[binding as usize].written)
    }

    /// Anchors the arguments of whose storage the plan reaches more than the
    /// arguments themselves do: another argument of the same shape may have other
    /// neighbours.
    pub(super) fn anchor_neighbours(&mut self) {
        let plan = &self.tables.plan;
        let mut beyond = Vec::new();
        for (&storage, root) in &self.roots {
            let Some(index) = root.binding else {
                continue;
            };
            let named = self.named[index as usize].reach;
            let start = i128::from(root.start_bytes);
            let inside = plan.values.iter().zip(0..).all(|(value, id)| {
                if value.root != root.value {
                    return true;
                }
                let meta = plan.meta(id);
                let dims = meta.shape.iter().copied().zip(meta.strides.iter().copied());
                let width = meta.kind.dtype.bytes().unwrap_or(0);
                reach(width, value.offset, dims).is_none_or(|(from, to)| {
                    named.is_some_and(|all| all.0 <= from + start && to + start <= all.1)
                })
            });
            if !inside {
                beyond.push(storage);
            }
        }
        for storage in beyond {
            self.anchor(storage);
        }
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
            counted: [0; 2],
            anchor: None,
        });
        self.named.push(candidate.named);
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
            elements: tensor.kind(),
            offset: 0,
            sizes: tensor.sizes.to_vec(),
            strides: tensor.strides.to_vec(),
        };
        let root = Root {
            value: id,
            start_bytes: (tensor.offset).saturating_mul(tensor.dtype.bytes().unwrap_or(1) as i64),
            storage_bytes: tensor.storage_bytes,
            elements: tensor.kind(),
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
        let Kind {
            dtype,
            device,
            marks,
        } = geometry.elements;
        self.tables.plan.values.push(Value {
            dtype,
            device,
            marks,
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
        let start = (tensor.offset.checked_mul(bytes)?).checked_sub(root.start_bytes)?;
        (start % bytes == 0).then(|| {
            (
                root,
                Geometry {
                    root: root.value,
                    elements: tensor.kind(),
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
        if !tensor.marks.can_view(root.elements.marks) {
            return None; // only the op itself can make it
        }
        let out = self.push_view(tensor, geometry);
        let base = root.value;
        self.push_instr(Instr::View { base, out }, source);
        Some(out)
    }
}

//! The rules of every table but the program.

use rkyv::vec::ArchivedVec;

use super::fault::Fault;
use super::{Checker, DEVICE_END, DTYPE_END, SPAN, TOGETHER, at, defining_instr};
use crate::binding::{
    ArchivedBinding, ArchivedConstant, ArchivedGradResult, ArchivedGuard, ArchivedOutput,
    ArchivedScalar,
};
use crate::mesh::{ArchivedGroup, ArchivedMesh};
use crate::placement::{ArchivedPlacement, ArchivedSpec};
use crate::pool::{ArchivedRange, NONE};
use crate::strategy::{ArchivedRedistribution, ArchivedStrategy};
use crate::value::{
    ArchivedDType, ArchivedDef, ArchivedDevice, ArchivedValue, DType, Marks, reach,
};

impl Checker<'_> {
    pub(super) fn placements(&self, placements: &[ArchivedPlacement]) -> Result<(), Fault> {
        for (index, placement) in placements.iter().enumerate() {
            match placement {
                ArchivedPlacement::Replicate
                | ArchivedPlacement::Shard { .. }
                | ArchivedPlacement::Partial { .. } => {}
                ArchivedPlacement::StridedShard { split_factor, .. } => {
                    let factor = i64::from(split_factor.to_native());
                    self.number(factor, 1, 1 << 32, || {
                        at("placements", index, "split_factor")
                    })?;
                }
                ArchivedPlacement::Other { text } => {
                    self.text(text.to_native(), || at("placements", index, "text"))?;
                }
            }
        }
        Ok(())
    }

    pub(super) fn meshes(&self, meshes: &[ArchivedMesh]) -> Result<(), Fault> {
        for (index, mesh) in meshes.iter().enumerate() {
            let ArchivedMesh {
                device_type,
                shape,
                dim_names,
                ranks,
            } = mesh;
            self.text(device_type.to_native(), || {
                at("meshes", index, "device_type")
            })?;
            let mut room = 1_u64;
            for ranks in self.short(*shape, || at("meshes", index, "shape"))? {
                let ranks = ranks.to_native();
                self.number(ranks, 1, 1 << 32, || at("meshes", index, "shape"))?;
                room = room.saturating_mul(ranks as u64);
            }
            let names = || at("meshes", index, "dim_names");
            let dim_names = self.list(*dim_names, "ids", &self.plan.ids, names)?;
            if !dim_names.is_empty() {
                self.count(
                    dim_names.len(),
                    self.mesh_dims(mesh),
                    "one name per mesh dim",
                    names,
                )?;
            }
            for name in dim_names {
                self.text(name.to_native(), names)?;
            }
            let ranks = self.ranks(*ranks, "meshes", index)?;
            if ranks as u64 != room {
                let at = at("meshes", index, "ranks");
                return Err(Fault::MeshRanks {
                    at,
                    found: ranks,
                    expected: room,
                });
            }
        }
        Ok(())
    }

    pub(super) fn groups(&self, groups: &[ArchivedGroup]) -> Result<(), Fault> {
        for (index, group) in groups.iter().enumerate() {
            let ArchivedGroup { name, ranks, label } = group;
            self.text(name.to_native(), || at("groups", index, "name"))?;
            self.text(label.to_native(), || at("groups", index, "label"))?;
            self.ranks(*ranks, "groups", index)?;
            let rank = self.plan.fingerprint.rank.to_native();
            let mut members = self.plan.dims[ranks.indices()].iter();
            if !members.any(|member| member.to_native() == i64::from(rank)) {
                return Err(Fault::NotAMember {
                    at: at("groups", index, "ranks"),
                    rank,
                });
            }
        }
        Ok(())
    }

    /// How many ranks a list holds, all of them ranks of the world.
    fn ranks(
        &self,
        ranks: ArchivedRange,
        table: &'static str,
        index: usize,
    ) -> Result<usize, Fault> {
        let world_size = self.world_size;
        let ranks = self.list(ranks, "dims", &self.plan.dims, || at(table, index, "ranks"))?;
        for rank in ranks {
            let rank = rank.to_native();
            if rank < 0 || rank >= i64::from(world_size) {
                return Err(Fault::Rank {
                    at: at(table, index, "ranks"),
                    rank,
                    world_size,
                });
            }
        }
        Ok(ranks.len())
    }

    pub(super) fn specs(&self, specs: &[ArchivedSpec]) -> Result<(), Fault> {
        for (index, spec) in specs.iter().enumerate() {
            let ArchivedSpec {
                mesh,
                placements,
                shape,
                strides,
            } = spec;
            let (mesh, meshes) = (mesh.to_native(), &self.plan.meshes);
            self.id(mesh, "meshes", meshes.len(), || at("specs", index, "mesh"))?;
            let place = || at("specs", index, "placements");
            let table = &self.plan.placements;
            self.range(*placements, "placements", table.len(), place)?;
            let placements = &table[placements.indices()];
            let mesh_dims = self.mesh_dims(&meshes[mesh as usize]);
            self.count(
                placements.len(),
                mesh_dims,
                "one placement per mesh dim",
                place,
            )?;
            let dims = self.shape(*shape, *strides, "specs", index)? as i64;
            for placement in placements {
                if let ArchivedPlacement::Shard { dim }
                | ArchivedPlacement::StridedShard { dim, .. } = placement
                {
                    self.number(i64::from(dim.to_native()), 0, dims, place)?;
                }
            }
        }
        Ok(())
    }

    fn mesh_dims(&self, mesh: &ArchivedMesh) -> usize {
        mesh.shape.len.to_native() as usize
    }

    /// The number of dims of a tensor, its shape and strides checked.
    fn shape(
        &self,
        shape: ArchivedRange,
        strides: ArchivedRange,
        table: &'static str,
        index: usize,
    ) -> Result<usize, Fault> {
        let shape = self.short(shape, || at(table, index, "shape"))?;
        let place = || at(table, index, "strides");
        let strides = self.short(strides, place)?;
        self.count(
            strides.len(),
            shape.len(),
            "one per dim of the shape",
            place,
        )?;
        let mut elements = 1_i64;
        for size in shape {
            self.number(size.to_native(), 0, SPAN, || at(table, index, "shape"))?;
            let size = size.to_native().max(1);
            elements = (elements.checked_mul(size))
                .filter(|elements| *elements < SPAN)
                .ok_or_else(|| Fault::Elements {
                    at: at(table, index, "shape"),
                    most: SPAN,
                })?;
        }
        for stride in strides {
            self.number(stride.to_native(), -SPAN, SPAN, place)?;
        }
        Ok(shape.len())
    }

    pub(super) fn values(&self, values: &[ArchivedValue]) -> Result<(), Fault> {
        let mut together = 0;
        for (index, value) in values.iter().enumerate() {
            let ArchivedValue {
                dtype,
                device,
                marks,
                def,
                root,
                shape,
                strides,
                offset,
                storage_bytes,
                last_use,
            } = value;
            self.dtype(*dtype, "values", index)?;
            self.device(*device, "values", index)?;
            self.number(i64::from(marks.0), 0, Marks::END, || {
                at("values", index, "marks")
            })?;
            let id = index as u32;
            let defined_by = |table, len, entry: u32, value: Option<u32>| {
                self.id(entry, table, len, || at("values", index, "def"))?;
                if value == Some(id) {
                    return Ok(());
                }
                Err(Fault::Definition {
                    value: id,
                    def: at(table, entry as usize, ""),
                })
            };
            match *def {
                ArchivedDef::Binding(entry) => {
                    let (entry, table) = (entry.to_native(), &self.plan.bindings);
                    let value = table.get(entry as usize).map(|b| b.value.to_native());
                    defined_by("bindings", table.len(), entry, value)?;
                }
                ArchivedDef::Constant(entry) => {
                    let (entry, table) = (entry.to_native(), &self.plan.constants);
                    let value = table.get(entry as usize).map(|c| c.value.to_native());
                    defined_by("constants", table.len(), entry, value)?;
                }
                ArchivedDef::Instr(instr) => {
                    let len = self.plan.instrs.len();
                    self.id(instr.to_native(), "instrs", len, || {
                        at("values", index, "def")
                    })?;
                }
            }
            if last_use.to_native() != NONE {
                let len = self.plan.instrs.len();
                self.id(last_use.to_native(), "instrs", len, || {
                    at("values", index, "last_use")
                })?;
            }
            self.shape(*shape, *strides, "values", index)?;
            self.number(offset.to_native(), -SPAN, SPAN, || {
                at("values", index, "offset")
            })?;
            // Their shape was seen to be short and small.
            let elements: i64 = self.dims(value).map(|(size, _)| size).product();
            let width = DType(dtype.0).bytes().unwrap_or(1);
            together = storage_bytes
                .to_native()
                .checked_add(elements.unsigned_abs() * width)
                .and_then(|bytes| bytes.checked_add(together))
                .filter(|bytes| *bytes < TOGETHER)
                .ok_or_else(|| Fault::Bytes {
                    at: at("values", index, ""),
                    most: TOGETHER,
                })?;
            let root = root.to_native();
            let root_value = self.value(root, || at("values", index, "root"))?;
            if root != id {
                self.root(id, value, root, root_value)?;
            }
            self.extent(id, value, root_value)?;
        }
        Ok(())
    }

    /// The root of a view.
    fn root(
        &self,
        id: u32,
        value: &ArchivedValue,
        root: u32,
        root_value: &ArchivedValue,
    ) -> Result<(), Fault> {
        let found = root_value.root.to_native();
        if found != root {
            return Err(Fault::Root {
                value: id,
                root,
                found,
            });
        }
        match (defining_instr(root_value), defining_instr(value)) {
            (None, _) => Ok(()),
            (Some(root), Some(view)) if root <= view => Ok(()),
            (Some(_), _) => Err(Fault::RootLater { value: id, root }),
        }
    }

    /// A tensor stays inside its storage, where the plan knows its size, and near it
    /// elsewhere, even if it is empty.
    fn extent(&self, id: u32, value: &ArchivedValue, root: &ArchivedValue) -> Result<(), Fault> {
        let dims = self.dims(value).map(|(size, stride)| (size.max(1), stride));
        if let Some((from, to)) = reach(1, value.offset.to_native(), dims) {
            if from <= -i128::from(SPAN) || to > i128::from(SPAN) {
                return Err(Fault::Far {
                    value: id,
                    from,
                    to,
                    most: SPAN,
                });
            }
        }
        let bytes = root.storage_bytes.to_native();
        if bytes == 0 || defining_instr(root).is_none() {
            return Ok(());
        }
        let Some((from, to)) = self.reach(value) else {
            return Ok(());
        };
        if from < 0 || to > i128::from(bytes) {
            return Err(Fault::Extent {
                value: id,
                from,
                to,
                bytes,
            });
        }
        Ok(())
    }

    /// The bytes that a tensor reaches; `None` for an empty tensor or an unknown
    /// element type.
    fn reach(&self, value: &ArchivedValue) -> Option<(i128, i128)> {
        reach(
            DType(value.dtype.0).bytes()?,
            value.offset.to_native(),
            self.dims(value),
        )
    }

    /// Sizes and strides of a tensor.
    fn dims(&self, value: &ArchivedValue) -> impl Iterator<Item = (i64, i64)> {
        let native = |range: ArchivedRange| {
            let dims = self.plan.dims[range.indices()].iter();
            dims.map(|dim| dim.to_native())
        };
        native(value.shape).zip(native(value.strides))
    }

    pub(super) fn dtype(
        &self,
        dtype: ArchivedDType,
        table: &'static str,
        index: usize,
    ) -> Result<(), Fault> {
        self.number(i64::from(dtype.0), 0, DTYPE_END, || {
            at(table, index, "dtype")
        })
    }

    pub(super) fn device(
        &self,
        device: ArchivedDevice,
        table: &'static str,
        index: usize,
    ) -> Result<(), Fault> {
        let place = || at(table, index, "device");
        self.number(i64::from(device.kind), 0, DEVICE_END, place)?;
        self.number(i64::from(device.index), -1, 128, place)
    }

    pub(super) fn bindings(&self, bindings: &[ArchivedBinding]) -> Result<(), Fault> {
        for (index, binding) in bindings.iter().enumerate() {
            let ArchivedBinding {
                kind: _,
                path,
                value,
                spec,
                written: _,
                counted: _,
                anchor,
            } = binding;
            self.text(path.to_native(), || at("bindings", index, "path"))?;
            self.spec(spec.to_native(), || at("bindings", index, "spec"))?;
            if let Some(anchor) = anchor.as_ref() {
                let (start, bytes) = (anchor.start.to_native(), anchor.bytes.to_native());
                let end = i64::try_from(bytes).unwrap_or(i64::MAX).saturating_add(1);
                self.number(start, 0, end, || at("bindings", index, "anchor"))?;
            }
            let id = value.to_native();
            let value = self.outlives(id, "bindings", index)?;
            match value.def {
                ArchivedDef::Binding(binding) if binding.to_native() as usize == index => {}
                _ => {
                    return Err(Fault::Definition {
                        value: id,
                        def: at("bindings", index, ""),
                    });
                }
            }
        }
        Ok(())
    }

    /// A value that the run leaves behind, or finds.
    fn outlives(
        &self,
        id: u32,
        table: &'static str,
        index: usize,
    ) -> Result<&ArchivedValue, Fault> {
        let value = self.value(id, || at(table, index, "value"))?;
        match value.last_use.to_native() {
            NONE => Ok(value),
            last_use => {
                let at = at(table, index, "value");
                Err(Fault::Outlives {
                    at,
                    value: id,
                    last_use,
                })
            }
        }
    }

    pub(super) fn constants(&self, constants: &ArchivedVec<ArchivedConstant>) -> Result<(), Fault> {
        for (index, constant) in constants.iter().enumerate() {
            let ArchivedConstant { value, data } = constant;
            let place = || at("constants", index, "data");
            self.range(*data, "bytes", self.plan.bytes.len(), place)?;
            let id = value.to_native();
            let value = self.value(id, || at("constants", index, "value"))?;
            match value.def {
                ArchivedDef::Constant(constant) if constant.to_native() as usize == index => {}
                _ => {
                    return Err(Fault::Definition {
                        value: id,
                        def: at("constants", index, ""),
                    });
                }
            }
            let found = u64::from(data.len.to_native());
            if let Some((from, expected)) = self.reach(value) {
                if from < 0 || expected > i128::from(found) {
                    return Err(Fault::ConstantBytes {
                        at: place(),
                        found,
                        from,
                        expected,
                    });
                }
            }
        }
        Ok(())
    }

    pub(super) fn outputs(&self, outputs: &[ArchivedOutput]) -> Result<(), Fault> {
        for (index, output) in outputs.iter().enumerate() {
            let ArchivedOutput {
                path,
                value,
                spec,
                requires_grad: _,
            } = output;
            self.text(path.to_native(), || at("outputs", index, "path"))?;
            self.spec(spec.to_native(), || at("outputs", index, "spec"))?;
            self.outlives(value.to_native(), "outputs", index)?;
        }
        Ok(())
    }

    pub(super) fn grads(&self, grads: &[ArchivedGradResult]) -> Result<(), Fault> {
        for (index, grad) in grads.iter().enumerate() {
            let ArchivedGradResult {
                path,
                value,
                spec,
                gone: _, // nothing is looked up by it
            } = grad;
            self.text(path.to_native(), || at("grads", index, "path"))?;
            self.spec(spec.to_native(), || at("grads", index, "spec"))?;
            if value.to_native() != NONE {
                self.outlives(value.to_native(), "grads", index)?;
            }
        }
        Ok(())
    }

    pub(super) fn scalars(&self, scalars: &[ArchivedScalar]) -> Result<(), Fault> {
        for (index, scalar) in scalars.iter().enumerate() {
            let before = |operand: u32| match (operand as usize) < index {
                true => Ok(()),
                false => Err(Fault::ScalarOrder {
                    scalar: index,
                    operand,
                }),
            };
            match scalar {
                ArchivedScalar::Read { path } | ArchivedScalar::Tensor { path } => {
                    self.text(path.to_native(), || at("scalars", index, "path"))?;
                }
                ArchivedScalar::Const(_) => {}
                ArchivedScalar::Neg(a) | ArchivedScalar::Round(a) => before(a.to_native())?,
                ArchivedScalar::Add(a, b)
                | ArchivedScalar::Sub(a, b)
                | ArchivedScalar::Mul(a, b)
                | ArchivedScalar::Div(a, b)
                | ArchivedScalar::Pow(a, b)
                | ArchivedScalar::Same(a, b)
                | ArchivedScalar::Compared {
                    how: _,
                    a,
                    b,
                    holds: _,
                } => {
                    before(a.to_native())?;
                    before(b.to_native())?;
                }
            }
        }
        Ok(())
    }

    pub(super) fn guards(&self, guards: &[ArchivedGuard]) -> Result<(), Fault> {
        for (index, guard) in guards.iter().enumerate() {
            let ArchivedGuard {
                kind: _,
                subject,
                expected,
            } = guard;
            self.text(subject.to_native(), || at("guards", index, "subject"))?;
            self.text(expected.to_native(), || at("guards", index, "expected"))?;
        }
        Ok(())
    }

    pub(super) fn strategies(&self, strategies: &[ArchivedStrategy]) -> Result<(), Fault> {
        let plan = self.plan;
        for (index, strategy) in strategies.iter().enumerate() {
            let ArchivedStrategy {
                op,
                source,
                args,
                inputs,
                outputs,
                instrs,
                redistributions,
            } = strategy;
            self.text(op.to_native(), || at("strategies", index, "op"))?;
            self.text(source.to_native(), || at("strategies", index, "source"))?;
            let place = || at("strategies", index, "args");
            for arg in self.list(*args, "ids", &plan.ids, place)? {
                self.text(arg.to_native(), place)?;
            }
            for (specs, field) in [(inputs, "inputs"), (outputs, "outputs")] {
                let place = || at("strategies", index, field);
                for spec in self.list(*specs, "ids", &plan.ids, place)? {
                    self.spec(spec.to_native(), place)?;
                }
            }
            let place = || at("strategies", index, "instrs");
            self.list(*instrs, "instrs", &plan.instrs, place)?;
            let place = || at("strategies", index, "redistributions");
            self.list(
                *redistributions,
                "redistributions",
                &plan.redistributions,
                place,
            )?;
        }
        Ok(())
    }

    pub(super) fn redistributions(
        &self,
        redistributions: &[ArchivedRedistribution],
    ) -> Result<(), Fault> {
        let plan = self.plan;
        for (index, redistribution) in redistributions.iter().enumerate() {
            let ArchivedRedistribution {
                from,
                to,
                source,
                bytes: _,
                instrs,
            } = redistribution;
            let specs = plan.specs.len();
            self.id(from.to_native(), "specs", specs, || {
                at("redistributions", index, "from")
            })?;
            self.id(to.to_native(), "specs", specs, || {
                at("redistributions", index, "to")
            })?;
            self.text(source.to_native(), || {
                at("redistributions", index, "source")
            })?;
            let place = || at("redistributions", index, "instrs");
            self.list(*instrs, "instrs", &plan.instrs, place)?;
        }
        Ok(())
    }
}

//! Plans for tests and benches: a small one that uses every table, and one of
//! any size.

#![allow(dead_code, missing_docs, reason = "each user takes what it needs")]

use rote_plans::*;

/// Builds a plan table by table.
pub struct Builder {
    pub plan: Plan,
}

pub const F32: DType = DType::F32;
pub const CPU: Device = Device { kind: 0, index: -1 };

impl Builder {
    pub fn new(world_size: u32, rank: u32) -> Self {
        let fingerprint = Fingerprint {
            rote: "0.1.0".into(),
            framework: "torch 2.15.0".into(),
            world_size,
            rank,
        };
        let plan = Plan {
            fingerprint,
            function: "train.py:train_step".into(),
            ..Plan::default()
        };
        Builder { plan }
    }

    pub fn text(&mut self, text: &str) -> StrId {
        let strings = &mut self.plan.strings;
        let found = strings.iter().position(|s| s == text);
        found.unwrap_or_else(|| {
            strings.push(text.into());
            strings.len() - 1
        }) as StrId
    }

    pub fn dims(&mut self, dims: &[i64]) -> Range {
        let start = self.plan.dims.len() as u32;
        self.plan.dims.extend_from_slice(dims);
        Range {
            start,
            len: dims.len() as u32,
        }
    }

    pub fn ids(&mut self, ids: &[u32]) -> Range {
        let start = self.plan.ids.len() as u32;
        self.plan.ids.extend_from_slice(ids);
        Range {
            start,
            len: ids.len() as u32,
        }
    }

    pub fn args(&mut self, args: &[Arg]) -> Range {
        let start = self.plan.args.len() as u32;
        self.plan.args.extend_from_slice(args);
        Range {
            start,
            len: args.len() as u32,
        }
    }

    pub fn spec(&mut self, placements: &[Placement], shape: &[i64]) -> u32 {
        let start = self.plan.placements.len() as u32;
        self.plan.placements.extend_from_slice(placements);
        let placements = Range {
            start,
            len: placements.len() as u32,
        };
        let (strides, shape) = (self.dims(&contiguous(shape)), self.dims(shape));
        self.plan.specs.push(Spec {
            mesh: 0,
            placements,
            shape,
            strides,
        });
        self.plan.specs.len() as u32 - 1
    }

    /// A contiguous f32 tensor on storage of its own.
    pub fn value(&mut self, shape: &[i64], def: Def) -> ValueId {
        let id = self.plan.values.len() as ValueId;
        let storage_bytes = match def {
            Def::Instr(_) => 4 * shape.iter().product::<i64>() as u64,
            _ => 0,
        };
        let (strides, shape) = (self.dims(&contiguous(shape)), self.dims(shape));
        self.plan.values.push(Value {
            dtype: F32,
            device: CPU,
            marks: Marks::NONE,
            def,
            root: id,
            shape,
            strides,
            offset: 0,
            storage_bytes,
            last_use: NONE,
        });
        id
    }

    pub fn binding(&mut self, kind: BindingKind, path: &str, shape: &[i64], spec: u32) -> ValueId {
        let def = Def::Binding(self.plan.bindings.len() as u32);
        let value = self.value(shape, def);
        let path = self.text(path);
        let written = kind == BindingKind::State;
        self.plan.bindings.push(Binding {
            kind,
            path,
            value,
            spec,
            written,
            counted: [u32::from(written), 0],
            anchor: None,
        });
        value
    }

    pub fn next(&self) -> InstrId {
        self.plan.instrs.len() as InstrId
    }

    /// An op with one new result.
    pub fn op(&mut self, op: &str, args: &[Arg], shape: &[i64]) -> ValueId {
        let out = self.value(shape, Def::Instr(self.next()));
        self.local(op, args, &[out]);
        out
    }

    pub fn local(&mut self, op: &str, args: &[Arg], outs: &[ValueId]) {
        let written: Vec<ValueId> = match args.first() {
            Some(Arg::Value(first)) if op.ends_with('_') => vec![*first],
            _ => Vec::new(),
        };
        let grad = op == "aten::mm";
        let (op, overload) = (self.text(op), self.text(""));
        let (args, outs) = (self.args(args), self.ids(outs));
        let writes = self.ids(&written);
        self.plan.instrs.push(Instr::Local {
            op,
            overload,
            args,
            outs,
            writes,
            seeded: false,
            grad,
        });
    }

    /// The transpose of a matrix.
    pub fn transpose(&mut self, base: ValueId) -> ValueId {
        let out = self.plan.values.len() as ValueId;
        let Value {
            shape,
            strides,
            root,
            ..
        } = self.plan.values[base as usize];
        let reversed = |plan: &Plan, range| {
            let mut dims = plan.dims(range).to_vec();
            dims.reverse();
            dims
        };
        let shape = reversed(&self.plan, shape);
        let strides = reversed(&self.plan, strides);
        let (shape, strides) = (self.dims(&shape), self.dims(&strides));
        let def = Def::Instr(self.next());
        let storage_bytes = 0;
        let base_value = self.plan.values[base as usize];
        self.plan.values.push(Value {
            def,
            root,
            shape,
            strides,
            storage_bytes,
            ..base_value
        });
        self.plan.instrs.push(Instr::View { base, out });
        out
    }

    pub fn all_reduce(&mut self, group: u32, input: ValueId) {
        self.plan.instrs.push(Instr::Collective(Collective {
            kind: CollectiveKind::AllReduce,
            reduce: Some(ReduceOp::Sum),
            group,
            root: 0,
            input,
            output: input,
            input_splits: Range::default(),
            output_splits: Range::default(),
        }));
        self.plan.instrs.push(Instr::Wait { value: input });
    }

    /// The last instruction so far was the last use of the value: free it.
    pub fn free(&mut self, value: ValueId) {
        let last = self
            .plan
            .instrs
            .iter()
            .rposition(|i| !matches!(i, Instr::Free { .. }));
        self.plan.values[value as usize].last_use = last.unwrap_or(0) as u32;
        self.plan.instrs.push(Instr::Free { value });
    }
}

pub fn contiguous(shape: &[i64]) -> Vec<i64> {
    let mut strides = vec![1; shape.len()];
    for dim in (1..shape.len()).rev() {
        strides[dim - 1] = strides[dim] * shape[dim];
    }
    strides
}

/// Adds a one-dim mesh and its group.
pub fn tp(b: &mut Builder) {
    let world = i64::from(b.plan.fingerprint.world_size);
    let ranks: Vec<i64> = (0..world).collect();
    let (device_type, label, name) = (b.text("cpu"), b.text("tp"), b.text("7"));
    let dim_names = b.ids(&[label]);
    let (shape, ranks) = (b.dims(&[world]), b.dims(&ranks));
    b.plan.meshes.push(Mesh {
        device_type,
        shape,
        dim_names,
        ranks,
    });
    b.plan.groups.push(Group { name, ranks, label });
}

/// A row-parallel linear layer with dropout and a fused update: small, and
/// with something in every table.
pub fn small() -> Plan {
    let mut b = Builder::new(2, 1);
    tp(&mut b);
    let replicated = b.spec(&[Placement::Replicate], &[4, 8]);
    let text = b.text("Custom()");
    b.spec(&[Placement::Other { text }], &[4, 8]);
    let partial = b.spec(&[Placement::Partial { op: ReduceOp::Sum }], &[4, 8]);
    let strided = b.spec(
        &[Placement::StridedShard {
            dim: 0,
            split_factor: 2,
        }],
        &[8, 16],
    );
    let sharded = b.spec(&[Placement::Shard { dim: 1 }], &[8, 16]);
    let x = b.binding(BindingKind::Arg, "args[0]", &[4, 8], NONE);
    let w = b.binding(BindingKind::State, "model.weight", &[8, 8], sharded);
    let lr = b.text("opt.param_groups[0]['lr']");
    let steps = b.text("opt.state[0].step");
    b.plan.scalars = vec![
        Scalar::Read { path: lr },
        Scalar::Const(-1.0),
        Scalar::Mul(0, 1),
        Scalar::Tensor { path: steps },
        Scalar::Add(3, 1),
        Scalar::Round(4),
        Scalar::Compared {
            how: Comparison::Less,
            a: 5,
            b: 1,
            holds: false,
        },
    ];
    b.plan.rng_slots = 1;
    b.plan.instrs.push(Instr::Rng {
        action: RngAction::Save,
        device: CPU,
        slot: 0,
    });
    b.plan.instrs.push(Instr::Rng {
        action: RngAction::Restore,
        device: CPU,
        slot: 0,
    });
    let wt = b.transpose(w);
    let start = b.next();
    let y = b.op("aten::mm", &[Arg::Value(x), Arg::Value(wt)], &[4, 8]);
    b.all_reduce(0, y);
    b.plan.redistributions.push(Redistribution {
        from: partial,
        to: replicated,
        source: 0,
        bytes: 128,
        instrs: Range {
            start: start + 1,
            len: 2,
        },
    });
    let source = b.text("train.py:12");
    b.plan.redistributions[0].source = source;
    let op = b.text("aten::mm");
    let args = [b.text("f32[4,8] @ R"), b.text("f32[8,16] @ S(1)")];
    let args = b.ids(&args);
    let (inputs, outputs) = (b.ids(&[NONE, sharded]), b.ids(&[partial]));
    b.plan.strategies.push(Strategy {
        op,
        source,
        args,
        inputs,
        outputs,
        instrs: Range { start, len: 3 },
        redistributions: Range { start: 0, len: 1 },
    });
    let spare = b.op(
        "aten::add",
        &[Arg::Value(y), Arg::Value(y), Arg::Int(1)],
        &[4, 8],
    );
    b.free(spare);
    let two = b.args(&[Arg::Float(2.0)]).start;
    let list = b.args(&[Arg::Int(3), Arg::Scalar(2), Arg::Wrapped(two)]);
    let (ids, ints) = (b.ids(&[x, NONE, y]), b.dims(&[1, 2]));
    let mode = b.text("mean");
    let every = [
        Arg::None,
        Arg::Values(ids),
        Arg::Bool(true),
        Arg::Complex(1.0, -1.0),
        Arg::Ints(ints),
        Arg::List(list),
        Arg::Str(mode),
        Arg::DType(F32),
        Arg::Device(CPU),
        Arg::Layout(0),
        Arg::MemoryFormat(1),
    ];
    let loss = b.op("test::every_argument", &every, &[]);
    b.local("aten::mul_", &[Arg::Value(w), Arg::Wrapped(two)], &[w]);
    let constant = b.value(&[2], Def::Constant(0));
    b.plan.bytes = vec![0; 8];
    b.plan.constants.push(Constant {
        value: constant,
        data: Range { start: 0, len: 8 },
    });
    let (path, owner) = (b.text("result['loss']"), b.text("model.weight"));
    b.plan.outputs.push(Output {
        path,
        value: loss,
        spec: NONE,
        requires_grad: true,
    });
    b.plan.grads.push(GradResult {
        path: owner,
        value: y,
        spec: strided,
        gone: 0,
    });
    b.plan.grads.push(GradResult {
        path: owner,
        value: NONE,
        spec: NONE,
        gone: NONE,
    });
    let (subject, expected) = (b.text("args[0].shape"), b.text("(4, 8)"));
    b.plan.guards.push(Guard {
        kind: GuardKind::Argument,
        subject,
        expected,
    });
    b.plan.result =
        r#"{"dict":[[{"c":"loss"},{"t":0}],[{"c":1},{"tuple":[{"b":"args[0]"},{"f":"nan"},{"list":[]}]}]]}"#
            .into();
    b.plan
}

/// Some `ops` instructions as training steps have them: local ops of about
/// four arguments, views, frees and a few collectives.
pub fn large(ops: usize) -> Plan {
    let mut b = Builder::new(8, 3);
    tp(&mut b);
    let spec = b.spec(&[Placement::Shard { dim: 0 }], &[512, 64]);
    let weights: Vec<ValueId> = (0..32)
        .map(|layer| {
            let path = format!("model.layers.{layer}.weight");
            b.binding(BindingKind::State, &path, &[64, 64], spec)
        })
        .collect();
    let mut x = b.binding(BindingKind::Arg, "args[0]", &[64, 64], spec);
    let mut locals = 0;
    while locals < ops {
        let weight = weights[locals % weights.len()];
        let transposed = b.transpose(weight);
        let args = [
            Arg::Value(x),
            Arg::Value(x),
            Arg::Value(transposed),
            Arg::Scalar(0),
        ];
        let y = b.op("aten::addmm", &args, &[64, 64]);
        b.free(transposed);
        let bias = [
            Arg::Value(y),
            Arg::Value(weight),
            Arg::Int(1),
            Arg::Float(0.5),
        ];
        let z = b.op("aten::add", &bias, &[64, 64]);
        b.free(y);
        if x > weights.len() as u32 {
            b.free(x);
        }
        if locals % 32 == 0 {
            b.all_reduce(0, z);
        }
        let (op, source) = (b.text("aten::addmm"), b.text("train.py:12"));
        let (inputs, outputs) = (b.ids(&[spec, spec]), b.ids(&[spec]));
        let instrs = Range {
            start: b.next() - 4,
            len: 4,
        };
        let redistributions = Range::default();
        b.plan.strategies.push(Strategy {
            op,
            source,
            args: Range::default(),
            inputs,
            outputs,
            instrs,
            redistributions,
        });
        x = z;
        locals += 2;
    }
    let path = b.text("opt.param_groups[0]['lr']");
    b.plan.scalars.push(Scalar::Read { path });
    let path = b.text("result");
    b.plan.outputs.push(Output {
        path,
        value: x,
        spec,
        requires_grad: false,
    });
    b.plan.result = r#"{"t":0}"#.into();
    b.plan
}

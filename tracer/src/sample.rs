//! Tensors, ops and recordings for tests, and what must hold for every plan.

#![allow(missing_docs, reason = "for tests")]

use rote_plans::{Arg, BindingKind, DType, Device, Fingerprint, Instr, Marks, NONE, Plan, ValueId};

use crate::event::{ArgEvent, Argument, OpEvent, SpecEvent, TensorEvent};
use crate::recorder::Recorder;
use crate::refusal::Refusal;

pub const F32: DType = DType::F32;
pub const F64: DType = DType::F64;
pub const BOOL: DType = DType::BOOL;

/// A tensor that owns its shape.
#[derive(Clone, Debug)]
pub struct Tensor {
    pub storage: u64,
    pub dtype: DType,
    pub sizes: Vec<i64>,
    pub strides: Vec<i64>,
    pub offset: i64,
    pub storage_bytes: u64,
    pub marks: Marks,
    pub opaque: bool,
}

/// A contiguous f32 tensor that fills a storage.
pub fn tensor(storage: u64, sizes: &[i64]) -> Tensor {
    let mut strides = vec![1; sizes.len()];
    for i in (1..sizes.len()).rev() {
        strides[i - 1] = strides[i] * sizes[i];
    }
    Tensor {
        storage,
        dtype: F32,
        sizes: sizes.to_vec(),
        strides,
        offset: 0,
        storage_bytes: 4 * sizes.iter().product::<i64>() as u64,
        marks: Marks::NONE,
        opaque: false,
    }
}

impl Tensor {
    pub fn event(&self) -> TensorEvent<'_> {
        TensorEvent {
            storage: self.storage,
            dtype: self.dtype,
            device: Device { kind: 0, index: -1 },
            sizes: &self.sizes,
            strides: &self.strides,
            offset: self.offset,
            storage_bytes: self.storage_bytes,
            marks: self.marks,
            opaque: self.opaque,
        }
    }

    /// Another way of looking at the same storage.
    pub fn view(&self, sizes: &[i64], strides: &[i64], offset: i64) -> Tensor {
        Tensor {
            sizes: sizes.to_vec(),
            strides: strides.to_vec(),
            offset,
            ..self.clone()
        }
    }

    pub fn arg(&self) -> ArgEvent<'_> {
        ArgEvent::Tensor(self.event())
    }
}

pub fn read(value: ArgEvent<'_>) -> Argument<'_> {
    Argument {
        value,
        written: false,
    }
}

pub fn written(value: ArgEvent<'_>) -> Argument<'_> {
    Argument {
        value,
        written: true,
    }
}

/// An op that reads tensors and makes tensors.
pub fn op<'a>(name: &'a str, reads: &[&'a Tensor], outs: &[&'a Tensor]) -> OpEvent<'a> {
    OpEvent {
        name,
        overload: "",
        args: reads.iter().map(|tensor| read(tensor.arg())).collect(),
        outs: outs.iter().map(|tensor| tensor.arg()).collect(),
        seeded: false,
        data_dependent: false,
        inplace_view: false,
        hidden: false,
        internal: false,
        grad: false,
        source: "train.py:1",
    }
}

/// An op that writes to `target` and returns it.
pub fn in_place<'a>(name: &'a str, target: &'a Tensor, reads: &[&'a Tensor]) -> OpEvent<'a> {
    let mut event = op(name, reads, &[target]);
    event.args.insert(0, written(target.arg()));
    event
}

/// A collective over the group `tp`, with the arguments of its functional op.
pub fn collective<'a>(
    name: &'a str,
    input: &'a Tensor,
    middle: Vec<ArgEvent<'a>>,
    out: &'a Tensor,
) -> OpEvent<'a> {
    let mut event = op(name, &[input], &[out]);
    event.args.extend(middle.into_iter().map(read));
    event.args.push(read(ArgEvent::Str("tp")));
    event
}

pub fn wait(tensor: &Tensor) -> OpEvent<'_> {
    op("_c10d_functional::wait_tensor", &[tensor], &[tensor])
}

/// A spec on a 1-D mesh of 2 ranks.
pub fn spec(placement: &str) -> SpecEvent {
    SpecEvent {
        device_type: "cpu".to_owned(),
        mesh_shape: vec![2],
        mesh_dim_names: vec!["tp".to_owned()],
        ranks: vec![0, 1],
        placements: vec![placement.to_owned()],
        shape: vec![8, 8],
        strides: vec![8, 1],
    }
}

/// A recorder on rank 0 of 2, with these tensors as arguments `args[0]`, ...
pub fn recorder(args: &[&Tensor]) -> Recorder {
    let process = Fingerprint {
        rote: "0.1.0".to_owned(),
        framework: "test 1".to_owned(),
        world_size: 2,
        rank: 0,
    };
    let mut recorder = Recorder::new(process, "train.py:step");
    for (i, tensor) in args.iter().enumerate() {
        let path = format!("args[{i}]");
        recorder.name_tensor(BindingKind::Arg, &path, &tensor.event(), None, None);
    }
    recorder
}

/// Records ops that are not refused.
pub fn record(recorder: &mut Recorder, ops: &[OpEvent<'_>]) {
    for op in ops {
        recorder.op(op).expect("the op is recorded");
    }
}

/// The refusal of an op.
pub fn refusal(recorder: &mut Recorder, op: &OpEvent<'_>) -> Refusal {
    recorder.op(op).expect_err("the op is refused")
}

/// Names the result's tensors and ends the recording; the plan holds what every
/// plan must.
pub fn finish(mut recorder: Recorder, outputs: &[&Tensor]) -> (Plan, Vec<String>) {
    for (i, tensor) in outputs.iter().enumerate() {
        recorder
            .output(&format!("result[{i}]"), &tensor.event(), None, false)
            .expect("the output is known");
    }
    if !recorder.group_names().is_empty() {
        recorder.describe_group("tp", &[0, 1], "tp");
    }
    let (plan, sources) = recorder.finish("");
    plan.check().expect("the plan is valid");
    assert_eq!(plan.instrs.len(), sources.len());
    check_frees(&plan);
    (plan, sources)
}

/// What an instruction looks at: written independently of `finish.rs`.
pub fn touched(plan: &Plan, instr: &Instr) -> Vec<ValueId> {
    fn of_args(plan: &Plan, args: &[Arg], found: &mut Vec<ValueId>) {
        for arg in args {
            match *arg {
                Arg::Value(value) => found.push(value),
                Arg::Values(range) => found.extend(plan.ids(range)),
                Arg::List(range) => of_args(plan, &plan.args[range.indices()], found),
                _ => {}
            }
        }
    }
    let mut found = Vec::new();
    match *instr {
        Instr::Local { args, outs, .. } => {
            of_args(plan, &plan.args[args.indices()], &mut found);
            found.extend(plan.ids(outs));
        }
        Instr::View { base, out } => found.extend([base, out]),
        Instr::Collective(c) => found.extend([c.input, c.output]),
        Instr::Wait { value } => found.push(value),
        Instr::Rng { .. } | Instr::Free { .. } => {}
    }
    found.retain(|&value| value != NONE);
    found
}

/// Every value that does not outlive the run is freed once, with nothing but
/// frees between the last instruction that looks at it and its free.
fn check_frees(plan: &Plan) {
    let kept = |value: ValueId| {
        plan.bindings.iter().any(|b| b.value == value)
            || plan.outputs.iter().any(|o| o.value == value)
            || plan.grads.iter().any(|g| g.value == value)
    };
    for value in 0..plan.values.len() as ValueId {
        let last = plan
            .instrs
            .iter()
            .rposition(|instr| touched(plan, instr).contains(&value));
        let frees: Vec<usize> = (0..plan.instrs.len())
            .filter(|&i| plan.instrs[i] == Instr::Free { value })
            .collect();
        if kept(value) {
            assert!(frees.is_empty(), "%{value} outlives the run");
            continue;
        }
        let last = last.expect("every value is made somewhere");
        assert_eq!(frees.len(), 1, "%{value} is freed once");
        for between in &plan.instrs[last + 1..frees[0]] {
            assert!(
                matches!(between, Instr::Free { .. }),
                "%{value} lives too long"
            );
        }
    }
}

/// The program in few words, names without their namespace.
pub fn program(plan: &Plan) -> Vec<String> {
    let brief = |instr: &Instr| match *instr {
        Instr::Local { op, args, outs, .. } => {
            let name = plan.str(op).rsplit("::").next().unwrap_or_default();
            let mut words = vec![name.to_owned()];
            for arg in &plan.args[args.indices()] {
                words.push(match arg {
                    Arg::Value(value) => format!("%{value}"),
                    other => format!("{other:?}"),
                });
            }
            for &out in plan.ids(outs) {
                words.push(match out {
                    NONE => "> _".to_owned(),
                    out => format!("> %{out}"),
                });
            }
            words.join(" ")
        }
        Instr::View { base, out } => format!("view %{base} > %{out}"),
        Instr::Collective(c) => format!("{:?} %{} > %{}", c.kind, c.input, c.output),
        Instr::Wait { value } => format!("wait %{value}"),
        Instr::Rng { action, slot, .. } => format!("{action:?} {slot}"),
        Instr::Free { value } => format!("free %{value}"),
    };
    plan.instrs.iter().map(brief).collect()
}

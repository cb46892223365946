//! Any stream of ops through the C ABI that records programs without Python: every call returns a status,
//! and a plan that is written is a valid one that every pass takes.
//!
//! Pointers are live and lists as long as they say, as the header requires of callers; all else is any value.

#![no_main]

use std::ffi::{CString, c_char};
use std::path::Path;
use std::ptr;

use arbitrary::{Result, Unstructured};
use libfuzzer_sys::fuzz_target;
use rote_events::op::{Arg, Op, Payload, Tensor, tag};
use rote_plans::PlanFile;
use rote_aten_ops::AtenOps;
use rote_passes::{Selection, optimize};

#[path = "../../ffi/src/bridge.rs"]
mod bridge;
#[path = "../../ffi/src/log.rs"]
mod log;
#[path = "../../ffi/src/record.rs"]
mod record;
#[path = "../../ffi/src/recorder.rs"]
mod recorder;
#[path = "../../ffi/src/session.rs"]
mod session;
#[path = "../../ffi/src/spec.rs"]
mod spec;
#[path = "../../ffi/src/status.rs"]
mod status;

use recorder::{
    rote_recorder_finish, rote_recorder_free, rote_recorder_group, rote_recorder_name_tensor,
    rote_recorder_new, rote_recorder_op, rote_recorder_output,
};

/// Ops that the recorder or a pass treats in a way of its own, and some plain ones.
const OPS: [(&str, &str); 24] = [
    ("aten::mm", ""),
    ("aten::mul", "Tensor"),
    ("aten::mul", "Scalar"),
    ("aten::mul_", "Tensor"),
    ("aten::add_", "Tensor"),
    ("aten::copy_", ""),
    ("aten::cat", ""),
    ("aten::view", ""),
    ("aten::t", ""),
    ("aten::clone", ""),
    ("aten::detach", ""),
    ("aten::empty", "memory_format"),
    ("aten::zeros", ""),
    ("aten::fill_", "Scalar"),
    ("aten::item", ""),
    ("aten::_conj", ""),
    ("aten::split", "Tensor"),
    ("aten::resize_", ""),
    ("_c10d_functional::all_reduce", ""),
    ("_c10d_functional::all_gather_into_tensor", ""),
    ("_c10d_functional::reduce_scatter_tensor", ""),
    ("_c10d_functional::broadcast", ""),
    ("_c10d_functional::wait_tensor", ""),
    ("mine::op", ""),
];

/// Memory that descriptions point at; each part keeps its place when another comes.
#[derive(Default)]
struct Memory {
    texts: Vec<CString>,
    ints: Vec<Box<[i64]>>,
    tensors: Vec<Box<[Tensor]>>,
    args: Vec<Box<[Arg]>>,
}

impl Memory {
    fn text(&mut self, text: &[u8]) -> *const c_char {
        let end = text.iter().position(|byte| *byte == 0).unwrap_or(text.len());
        self.texts.push(CString::new(&text[..end]).expect("cut before the first zero"));
        self.texts.last().map_or(ptr::null(), |text| text.as_ptr())
    }

    /// Text of a list, any text, or null.
    fn word(&mut self, input: &mut Unstructured<'_>, known: &[&str]) -> Result<*const c_char> {
        Ok(match input.int_in_range(0..=9)? {
            0 => ptr::null(),
            1 => {
                let any: Vec<u8> = input.arbitrary()?;
                self.text(&any)
            }
            _ => self.text(input.choose(known)?.as_bytes()),
        })
    }

    fn ints(&mut self, ints: Vec<i64>) -> *const i64 {
        self.ints.push(ints.into());
        self.ints.last().map_or(ptr::null(), |ints| ints.as_ptr())
    }

    /// A tensor: mostly a small contiguous one, so that recordings come to an end.
    fn tensor(&mut self, input: &mut Unstructured<'_>) -> Result<Tensor> {
        let wild = input.ratio(1, 8)?;
        let ndim = input.int_in_range(0..=3)?;
        let mut sizes = Vec::new();
        for _ in 0..ndim {
            sizes.push(if wild { input.arbitrary()? } else { input.int_in_range(1..=4)? });
        }
        let mut strides = vec![1_i64; sizes.len()];
        for i in (1..sizes.len()).rev() {
            strides[i - 1] = strides[i].wrapping_mul(sizes[i]);
        }
        if wild {
            for stride in &mut strides {
                *stride = input.arbitrary()?;
            }
        }
        Ok(Tensor {
            storage: input.int_in_range(0..=9)?,
            sizes: self.ints(sizes),
            strides: self.ints(strides),
            offset: if wild { input.arbitrary()? } else { 0 },
            storage_bytes: if wild { input.arbitrary()? } else { 256 },
            ndim: ndim as u32,
            dtype: if wild { input.arbitrary()? } else { 6 },
            device_kind: if wild { input.arbitrary()? } else { 0 },
            device_index: -1,
            flags: if input.ratio(1, 4)? { input.arbitrary()? } else { 0 },
        })
    }

    fn tensors(&mut self, input: &mut Unstructured<'_>, n: usize) -> Result<*const Tensor> {
        let mut tensors = Vec::new();
        for _ in 0..n {
            tensors.push(self.tensor(input)?);
        }
        self.tensors.push(tensors.into());
        Ok(self.tensors.last().map_or(ptr::null(), |tensors| tensors.as_ptr()))
    }

    fn arg(&mut self, input: &mut Unstructured<'_>, depth: u32) -> Result<Arg> {
        let mut len = 0;
        let kind = if depth > 3 { tag::INT } else { input.int_in_range(0..=16)? };
        let payload = match kind {
            tag::TENSOR => Payload { tensors: self.tensors(input, 1)? },
            tag::TENSORS => {
                len = input.int_in_range(0..=3)?;
                Payload { tensors: self.tensors(input, len)? }
            }
            tag::FLOAT => Payload { f: input.arbitrary()? },
            tag::COMPLEX => Payload { c: [input.arbitrary()?, input.arbitrary()?] },
            tag::WRAPPED => Payload { list: self.args(input, 1, depth + 1)? },
            tag::LIST => {
                len = input.int_in_range(0..=3)?;
                Payload { list: self.args(input, len, depth + 1)? }
            }
            tag::INTS => {
                let ints: Vec<i64> = input.arbitrary()?;
                len = ints.len();
                Payload { ints: self.ints(ints) }
            }
            tag::STR | tag::OTHER => Payload {
                s: self.word(input, &["sum", "avg", "world", "other"])?,
            },
            _ => Payload { i: input.arbitrary()? },
        };
        Ok(Arg { tag: kind, written: input.ratio(1, 4)?.into(), len: len as u32, payload })
    }

    fn args(&mut self, input: &mut Unstructured<'_>, n: usize, depth: u32) -> Result<*const Arg> {
        let mut args = Vec::new();
        for _ in 0..n {
            args.push(self.arg(input, depth)?);
        }
        self.args.push(args.into());
        Ok(self.args.last().map_or(ptr::null(), |args| args.as_ptr()))
    }

    /// Mostly tensors, as ops take and give.
    fn operands(&mut self, input: &mut Unstructured<'_>, n: usize) -> Result<*const Arg> {
        let mut args = Vec::new();
        for _ in 0..n {
            args.push(if input.ratio(2, 3)? {
                let payload = Payload { tensors: self.tensors(input, 1)? };
                Arg { tag: tag::TENSOR, written: input.ratio(1, 4)?.into(), len: 0, payload }
            } else {
                self.arg(input, 0)?
            });
        }
        self.args.push(args.into());
        Ok(self.args.last().map_or(ptr::null(), |args| args.as_ptr()))
    }
}

const SPECS: [&str; 3] = ["", "cpu|2|tp|0,1|S(0)|4,4|4,1", "cpu|2,2|a,b|0,1,2,3|R;P(sum)|2|1"];

fn run(input: &mut Unstructured<'_>, path: &Path) -> Result<()> {
    let mut memory = Memory::default();
    let (function, framework) = (memory.text(b"step"), memory.text(b"fuzzed 1"));
    let target = memory.text(path.as_os_str().as_encoded_bytes());
    // SAFETY: `memory` outlives every call, and the recorder is freed once, at the end.
    unsafe {
        let recorder = rote_recorder_new(function, framework, 2, 0);
        assert!(!recorder.is_null());
        let done = events(input, recorder, &mut memory);
        let result = if matches!(input.ratio(1, 8), Ok(true)) {
            memory.word(input, &["{\"t\":0}", "{\"tuple\":[{\"t\":0}]}", "[]"]).unwrap_or(ptr::null())
        } else {
            ptr::null()
        };
        let status = rote_recorder_finish(recorder, result, target);
        rote_recorder_free(recorder);
        if status == 0 {
            let file = PlanFile::open(path).expect("what is written opens");
            let plan = file.to_plan();
            for passes in ["default", "all"] {
                let passes = Selection::parse(passes).expect("these names are known");
                optimize(plan.clone(), passes, &AtenOps).0.plan.check().expect("passes make valid plans");
            }
        }
        done
    }
}

/// # Safety
/// `recorder` must be one of `rote_recorder_new`.
unsafe fn events(input: &mut Unstructured<'_>, recorder: *mut recorder::RoteRecorder, memory: &mut Memory) -> Result<()> {
    for _ in 0..input.int_in_range(1..=24)? {
        // SAFETY: what the descriptions point at lives in `memory`.
        unsafe {
            match input.int_in_range(0..=9)? {
                0 | 1 => {
                    let path = memory.word(input, &["x", "w", "model.weight"])?;
                    let tensor = memory.tensors(input, 1)?;
                    let spec = memory.word(input, &SPECS)?;
                    rote_recorder_name_tensor(recorder, input.int_in_range(0..=3)?, path, tensor, spec);
                }
                2 => {
                    let path = memory.word(input, &["result[0]", "result"])?;
                    let tensor = memory.tensors(input, 1)?;
                    let spec = memory.word(input, &SPECS)?;
                    rote_recorder_output(recorder, path, tensor, spec);
                }
                3 => {
                    let name = memory.word(input, &["world", "other"])?;
                    let label = memory.word(input, &["mesh dim tp"])?;
                    let ranks: Vec<i64> = if input.arbitrary()? { vec![0, 1] } else { input.arbitrary()? };
                    let n = ranks.len() as u32;
                    rote_recorder_group(recorder, name, memory.ints(ranks), n, label);
                }
                _ => {
                    let (name, overload) = *input.choose(&OPS)?;
                    let name = if input.ratio(1, 16)? { memory.word(input, &[name])? } else { memory.text(name.as_bytes()) };
                    let overload = memory.text(overload.as_bytes());
                    let (nargs, nouts) = (input.int_in_range(0..=4)?, input.int_in_range(0..=2)?);
                    let op = Op {
                        name,
                        overload,
                        args: memory.operands(input, nargs)?,
                        outs: memory.operands(input, nouts)?,
                        nargs: nargs as u32,
                        nouts: nouts as u32,
                        flags: if input.ratio(1, 8)? { input.arbitrary()? } else { 0 },
                    };
                    rote_recorder_op(recorder, &op, memory.word(input, &["train.py:3"])?);
                }
            }
        }
    }
    Ok(())
}

fuzz_target!(|data: &[u8]| {
    thread_local! {
        // Plans are synced when they are written; in memory that takes no time.
        static FOLDER: tempfile::TempDir = tempfile::tempdir_in("/dev/shm")
            .or_else(|_| tempfile::tempdir())
            .expect("a folder for plans");
    }
    FOLDER.with(|folder| {
        // Input that ends early ends the stream of ops.
        let _ = run(&mut Unstructured::new(data), &folder.path().join("plan.rote"));
    });
});

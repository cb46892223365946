//! Recording ops of any program: no Python, no PyTorch.

use std::ffi::{c_char, c_int};

use rote::plans::{Anchor, BindingKind};
use rote::tracer::{Recorder, Refusal, TensorEvent};
use rote_events::events;
use rote_events::op::{Op, Tensor};

use crate::record::ROTE_REFUSED;
use crate::session::process;
use crate::spec;
use crate::status::{Answer, ROTE_OK, guarded, set_error, slice, text};

/// One run of a step, recorded op by op. It may be used by one thread at a time.
pub struct RoteRecorder {
    /// `None` once the recording is over.
    recorder: Option<Recorder>,
    outputs: usize,
    refusal: Option<Refusal>,
}

impl RoteRecorder {
    fn recorder(&mut self) -> Result<&mut Recorder, String> {
        let over = || "the recording is over".to_owned();
        self.recorder.as_mut().ok_or_else(over)
    }

    /// The status that a refusal comes back as; the first one counts.
    fn status(&mut self, result: Result<(), Refusal>) -> c_int {
        if let Err(refusal) = result {
            self.refusal.get_or_insert(refusal);
        }
        match &self.refusal {
            Some(refusal) => {
                set_error(&refusal.to_string());
                ROTE_REFUSED
            }
            None => ROTE_OK,
        }
    }
}

/// Runs `body` on a recorder.
///
/// # Safety
/// `recorder` must be null, or come from `rote_recorder_new` and not be in use
/// elsewhere.
unsafe fn with(
    recorder: *mut RoteRecorder,
    body: impl FnOnce(&mut RoteRecorder) -> Answer,
) -> c_int {
    // SAFETY: the caller vouches for the pointer.
    guarded(|| match unsafe { recorder.as_mut() } {
        Some(recorder) => body(recorder),
        None => Err("the recorder is null".into()),
    })
}

/// The tensor that a caller described.
///
/// # Safety
/// `tensor` must be null, or live with all that it points at.
unsafe fn tensor<'a>(tensor: *const Tensor, path: &str) -> Result<TensorEvent<'a>, String> {
    // SAFETY: the caller vouches for the description.
    unsafe {
        let tensor = tensor
            .as_ref()
            .ok_or_else(|| format!("the tensor {path} is null"))?;
        match events::tensor_problem(tensor) {
            Some(problem) => Err(format!("the tensor {path} {problem}")),
            None => Ok(events::tensor(tensor)),
        }
    }
}

/// Begins to record one run of `function`; returns null on failure. `framework` names the program that runs the
/// ops, and its version.
///
/// A recorder takes a stream of ops on local tensors. Every tensor that an op reads must be named before
/// (`rote_recorder_name_tensor`), or be the result of an op. Collectives are the ops of `_c10d_functional` by
/// name, each followed by its `_c10d_functional::wait_tensor`.
///
/// # Safety
/// The texts must be C strings.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_recorder_new(
    function: *const c_char,
    framework: *const c_char,
    world_size: u32,
    rank: u32,
) -> *mut RoteRecorder {
    let mut made = std::ptr::null_mut();
    guarded(|| {
        // SAFETY: the caller vouches for the texts.
        let (function, framework) = unsafe { (text(function)?, text(framework)?) };
        if rank >= world_size {
            return Err(format!("rank {rank} is not below the world size, {world_size}").into());
        }
        let process = process(framework, world_size, rank);
        made = Box::into_raw(Box::new(RoteRecorder {
            recorder: Some(Recorder::new(process, function)),
            outputs: 0,
            refusal: None,
        }));
        Ok(ROTE_OK)
    });
    made
}

/// Frees a recorder.
///
/// # Safety
/// `recorder` must come from `rote_recorder_new`, or be null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_recorder_free(recorder: *mut RoteRecorder) {
    if !recorder.is_null() {
        guarded(|| {
            // SAFETY: made by `rote_recorder_new`, freed once.
            drop(unsafe { Box::from_raw(recorder) });
            Ok(ROTE_OK)
        });
    }
}

/// Names a tensor that exists before the step. If two names are given to one storage, the first is used. `kind`
/// is a kind of binding (`ROTE_BINDING_ARG`, ...). `spec` has the form that `rote_record_spec` reads, or is
/// null for a plain tensor.
///
/// # Safety
/// Pointers must be null or live, texts C strings.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_recorder_name_tensor(
    recorder: *mut RoteRecorder,
    kind: u32,
    path: *const c_char,
    tensor: *const Tensor,
    spec: *const c_char,
) -> c_int {
    // SAFETY: the caller vouches for the pointers.
    unsafe {
        with(recorder, |recorder| {
            let (kind, path) = (BindingKind::try_from(kind)?, text(path)?);
            let (tensor, spec) = (self::tensor(tensor, path)?, spec::optional(text(spec)?)?);
            if tensor.storage == 0 {
                return Err(format!("the tensor {path} has no storage").into());
            }
            let width = tensor.dtype.bytes().unwrap_or(1) as i64;
            let place = (kind == BindingKind::Arg).then_some(Anchor {
                start: tensor.offset.saturating_mul(width),
                bytes: tensor.storage_bytes,
                base: 0,
            });
            recorder
                .recorder()?
                .name_tensor(kind, path, &tensor, spec.as_ref(), place);
            Ok(ROTE_OK)
        })
    }
}

/// Records an op that has run. `source` is the user's source line, `file:line`, or null. Returns `ROTE_REFUSED`
/// if a replay of the step cannot be proven right. `rote_last_error()` then names the op, the reason and the
/// remedy. The program runs on without Rote, and later calls of this recorder return the same.
///
/// # Safety
/// Pointers must be null or live, texts C strings, lists as long as they say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_recorder_op(
    recorder: *mut RoteRecorder,
    op: *const Op,
    source: *const c_char,
) -> c_int {
    // SAFETY: the caller vouches for the pointers.
    unsafe {
        with(recorder, |recorder| {
            let op = op.as_ref().ok_or("the op is null")?;
            if let Some(problem) = events::op_problem(op) {
                return Err(problem.into());
            }
            let event = events::op(op, text(source)?);
            let refused = recorder.refusal.is_some();
            let open = recorder.recorder()?;
            let result = if refused { Ok(()) } else { open.op(&event) };
            Ok(recorder.status(result))
        })
    }
}

/// Names a tensor of the result. To be called in the order of the result's leaves. Returns `ROTE_REFUSED` as
/// `rote_recorder_op` does.
///
/// # Safety
/// As `rote_recorder_name_tensor`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_recorder_output(
    recorder: *mut RoteRecorder,
    path: *const c_char,
    tensor: *const Tensor,
    spec: *const c_char,
) -> c_int {
    // SAFETY: the caller vouches for the pointers.
    unsafe {
        with(recorder, |recorder| {
            let path = text(path)?;
            let (tensor, spec) = (self::tensor(tensor, path)?, spec::optional(text(spec)?)?);
            let result = recorder
                .recorder()?
                .output(path, &tensor, spec.as_ref(), false);
            recorder.outputs += usize::from(result.is_ok());
            Ok(recorder.status(result))
        })
    }
}

/// Tells the `n` global ranks of a process group. `label` is a name for people. Every group that a recorded
/// collective names must be told.
///
/// # Safety
/// `ranks` must point at `n` entries, and the texts be C strings.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_recorder_group(
    recorder: *mut RoteRecorder,
    name: *const c_char,
    ranks: *const i64,
    n: u32,
    label: *const c_char,
) -> c_int {
    // SAFETY: the caller vouches for the pointers.
    unsafe {
        with(recorder, |recorder| {
            let (name, ranks, label) = (text(name)?, slice(ranks, n)?, text(label)?);
            recorder.recorder()?.describe_group(name, ranks, label);
            Ok(ROTE_OK)
        })
    }
}

/// Ends the recording and writes the plan to `path`, whole or not at all. `result` is the structure of the
/// result as JSON (docs/plan-format.md). If `result` is null, the result is a tuple of the outputs. If the
/// recording was refused, the function writes nothing and returns `ROTE_REFUSED`. Afterwards the recorder can
/// only be freed.
///
/// # Safety
/// `recorder` must come from `rote_recorder_new`, the texts be C strings.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_recorder_finish(
    recorder: *mut RoteRecorder,
    result: *const c_char,
    path: *const c_char,
) -> c_int {
    // SAFETY: the caller vouches for the pointers.
    unsafe {
        with(recorder, |recorder| {
            let (result, path) = (text(result)?, text(path)?);
            let result = match result {
                "" => {
                    let leaves = (0..recorder.outputs).map(|i| serde_json::json!({"t": i}));
                    serde_json::json!({"tuple": leaves.collect::<Vec<_>>()}).to_string()
                }
                result => result.to_owned(),
            };
            let status = recorder.status(Ok(()));
            recorder.recorder()?;
            if let (Some(ended), ROTE_OK) = (recorder.recorder.take(), status) {
                ended.finish(&result).0.write(path)?;
            }
            Ok(status)
        })
    }
}

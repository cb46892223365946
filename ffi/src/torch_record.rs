//! Recording a step of PyTorch, op by op.

use std::ffi::{CString, c_char, c_int, c_void};

use rote::facts::NewFact;
use rote::recording::{ActiveRecording, NewTensor};
use rote_aten::{Aten, Bridge, FactKind};

use crate::record::{
    NO_RECORDING, ROTE_MAY_RAISE, ROTE_MAY_RAISE_LATE, ROTE_REFUSED, binding_kind, guard_kind,
    optional,
};
use crate::session::{RoteSession, torch};
use crate::status::{Answer, ROTE_OK, give_text, guarded, object, text};
use crate::torch_session::borrowed;

/// Runs `body` on the recording in progress.
///
/// # Safety
/// As [`torch`].
unsafe fn record(
    session: *mut RoteSession,
    body: impl FnOnce(&Aten, &mut ActiveRecording<Aten>) -> Answer,
) -> c_int {
    guarded(|| {
        // SAFETY: the caller vouches for the session.
        let (aten, recording) = unsafe { torch(session)? }.active().ok_or(NO_RECORDING)?;
        body(aten, recording)
    })
}

/// Begins to record the call that `rote_session_call` was asked about last.
///
/// # Safety
/// `session` must come from `rote_session_new`; the GIL must be held.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_record_begin(session: *mut RoteSession) -> c_int {
    guarded(|| {
        // SAFETY: the caller vouches for the session.
        unsafe { torch(session)? }.begin()?;
        Ok(ROTE_OK)
    })
}

/// Names the next leaf of the arguments, in flattened order. Another `leaf` than the
/// library's own at that place refuses the recording.
///
/// # Safety
/// Pointers must be live, texts C strings, and the GIL held.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_record_leaf(
    session: *mut RoteSession,
    name: *const c_char,
    leaf: *mut c_void,
) -> c_int {
    guarded(|| {
        // SAFETY: the caller vouches for the session and what is passed.
        let (session, name) = unsafe { (torch(session)?, text(name)?) };
        // SAFETY: as above.
        let leaf = unsafe { borrowed(leaf, "leaf") };
        session.name_leaf(name, leaf.ok())?;
        Ok(ROTE_OK)
    })
}

/// Names a tensor that exists before the step. `kind` is a kind of binding
/// (`ROTE_BINDING_ARG`, ...), `object` what is bound at a replay, of a gradient
/// its owner; `local` is the local tensor, `spec` the number of its spec, or
/// `ROTE_NO_INDEX` for a plain tensor. `leaf` says which leaf of the arguments
/// `object` is; `ROTE_NO_INDEX` for state.
///
/// # Safety
/// Pointers must be live, texts C strings, and the GIL held.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_record_tensor(
    session: *mut RoteSession,
    kind: u32,
    path: *const c_char,
    object: *mut c_void,
    local: *mut c_void,
    spec: u32,
    leaf: u32,
) -> c_int {
    // SAFETY: the caller vouches for the session and what is passed.
    unsafe {
        record(session, |aten, recording| {
            let tensor = NewTensor {
                kind: binding_kind(kind)?,
                path: text(path)?,
                spec: optional(spec),
                leaf: optional(leaf),
            };
            recording.name_tensor(
                aten,
                tensor,
                borrowed(object, "object")?,
                borrowed(local, "local")?,
            )?;
            Ok(ROTE_OK)
        })
    }
}

/// The number of a kind of fact, by its name as in `dict_item` (`backends/aten/src/fact.rs` says
/// what each reads); `UINT32_MAX` if there is none.
///
/// # Safety
/// `name` must be a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_fact_kind(name: *const c_char) -> u32 {
    // SAFETY: the caller vouches for the text.
    let kind = unsafe { text(name) }.ok().and_then(FactKind::named);
    kind.map_or(u32::MAX, |kind| kind as u32)
}

/// Adds a fact that is checked at every call. `reads` is the number of what is read of
/// `container`, from [`rote_fact_kind`]; `key` is null where that takes none. `kind` is a kind of
/// guard (`ROTE_GUARD_HOST`, ...). `expected` is what it sees now, as text that holds in another
/// process too; an empty one keeps the fact out of the plan file. `hyperparameter`, if not 0, lets
/// the value become a scalar binding.
///
/// # Safety
/// Pointers must be live, texts C strings, and the GIL held.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_record_fact(
    session: *mut RoteSession,
    reads: u32,
    container: *mut c_void,
    key: *mut c_void,
    kind: u32,
    subject: *const c_char,
    expected: *const c_char,
    hyperparameter: c_int,
) -> c_int {
    // SAFETY: the caller vouches for the session and what is passed.
    unsafe {
        record(session, |_, recording| {
            let reads = FactKind::try_from(reads)?;
            let fact = NewFact {
                kind: guard_kind(kind)?,
                subject: text(subject)?,
                text: text(expected)?,
                hyperparameter: hyperparameter != 0,
                gradient: reads.is_of_gradients(),
                parts: reads.parts(),
            };
            let container = object(container, "container")?;
            (recording.facts).add(fact, |table| table.add(reads, container, key))?;
            Ok(ROTE_OK)
        })
    }
}

/// Records an op that has run, with plain local tensors. Returns
/// `ROTE_REFUSED` when the recording is refused.
///
/// # Safety
/// Pointers must be live, texts C strings, and the GIL held.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_record_op(
    session: *mut RoteSession,
    func: *mut c_void,
    args: *mut c_void,
    kwargs: *mut c_void,
    result: *mut c_void,
    source: *const c_char,
) -> c_int {
    // SAFETY: the caller vouches for the session and what is passed.
    unsafe {
        record(session, |aten, recording| {
            let (func, args) = (object(func, "func")?, object(args, "args")?);
            let objects = [func, args, kwargs, object(result, "result")?];
            let source = text(source)?;
            recording.op(aten, |describer| describer.op(objects, source))?;
            Ok(if recording.refusal().is_some() {
                ROTE_REFUSED
            } else {
                ROTE_OK
            })
        })
    }
}

/// Tells `listener`, a Python object, of the ops of this thread, and of threads that
/// work for it, until the call with null. Its methods: `ran(kind, tensor)` after an op
/// (kind 1: `wait_tensor`, 2: `lift_fresh`, with their result), in which
/// `rote_record_observed` records it; `draws()` before one that draws random numbers;
/// `begins(op, args)` and `ends(results)` around one on DTensors; `called(name)` when
/// one of `rote_record_tell_of` is called.
///
/// # Safety
/// `listener` must be null or live, and the GIL held.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_record_observe(listener: *mut c_void) -> c_int {
    guarded(|| {
        // SAFETY: the caller vouches for the object.
        unsafe { Bridge::get().observe(listener) }?;
        Ok(ROTE_OK)
    })
}

/// Has listeners told of calls of the composite op `name`.
///
/// # Safety
/// `name` must be a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_record_tell_of(name: *const c_char) -> c_int {
    guarded(|| {
        // SAFETY: the caller vouches for the text.
        let name = CString::new(unsafe { text(name) }?).map_err(|e| e.to_string())?;
        Bridge::get().observe_calls_of(&name)?;
        Ok(ROTE_OK)
    })
}

/// Tells the listener of the innermost call on DTensors under way, if it does not
/// know of it yet.
///
/// # Safety
/// The GIL must be held.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_record_global_call() -> c_int {
    guarded(|| {
        Bridge::get().observe_global_call()?;
        Ok(ROTE_OK)
    })
}

/// The first op of the last observed step that raised; empty if none did. A step that ends has
/// handled what it raised.
///
/// # Safety
/// The GIL must be held.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_record_raising() -> *const c_char {
    give_text(&Bridge::get().raising())
}

/// The op of another thread of Python that wrote what the last observed step used, or read what
/// it made; empty if there was none.
#[unsafe(no_mangle)]
pub extern "C" fn rote_record_others() -> *const c_char {
    give_text(&Bridge::get().others())
}

/// Records the op of which the listener has just been told. Returns `ROTE_REFUSED`
/// when the recording is refused, `ROTE_MAY_RAISE` when a replay of the op may raise for
/// other data, and `ROTE_MAY_RAISE_LATE` when a replay has by then done what lasts, so that
/// the call could not be made again.
///
/// # Safety
/// Pointers must be live, texts C strings, and the GIL held.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_record_observed(
    session: *mut RoteSession,
    source: *const c_char,
) -> c_int {
    // SAFETY: the caller vouches for the session and what is passed.
    unsafe {
        record(session, |aten, recording| {
            let source = text(source)?;
            recording.op(aten, |describer| describer.observed_op(source))?;
            let last = recording.last_op();
            Ok(if recording.refusal().is_some() {
                ROTE_REFUSED
            } else if last.may_raise_late() {
                ROTE_MAY_RAISE_LATE
            } else if last.may_raise() {
                ROTE_MAY_RAISE
            } else {
                ROTE_OK
            })
        })
    }
}

/// The step asks how a tensor lies in its storage: a plan is only for arguments that
/// lie there. `*named` is set to 1 when the storage exists before the step, else 0.
///
/// # Safety
/// Pointers must be live, `local` a tensor object, and the GIL held.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_record_anchor(
    session: *mut RoteSession,
    local: *mut c_void,
    named: *mut c_int,
) -> c_int {
    // SAFETY: the caller vouches for the session and what is passed.
    unsafe {
        record(session, |_, recording| {
            *named = c_int::from(recording.anchor(borrowed(local, "local")?)?);
            Ok(ROTE_OK)
        })
    }
}

/// Names a tensor of the result; call in the order of the result's leaves.
///
/// # Safety
/// Pointers must be live, texts C strings, and the GIL held.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_record_output(
    session: *mut RoteSession,
    path: *const c_char,
    local: *mut c_void,
    spec: u32,
    requires_grad: c_int,
) -> c_int {
    // SAFETY: the caller vouches for the session and what is passed.
    unsafe {
        record(session, |_, recording| {
            recording.output(
                text(path)?,
                borrowed(local, "local")?,
                optional(spec),
                requires_grad != 0,
            )?;
            Ok(ROTE_OK)
        })
    }
}

/// Says that the step left a new gradient in the `.grad` of the tensor at
/// `path`, or `None` when `local` is null.
///
/// # Safety
/// Pointers must be live, texts C strings, and the GIL held.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_record_grad(
    session: *mut RoteSession,
    path: *const c_char,
    local: *mut c_void,
    spec: u32,
) -> c_int {
    // SAFETY: the caller vouches for the session and what is passed.
    unsafe {
        record(session, |_, recording| {
            let local = match local.is_null() {
                true => None,
                false => Some(borrowed(local, "local")?),
            };
            recording.grad(text(path)?, local, optional(spec))?;
            Ok(ROTE_OK)
        })
    }
}

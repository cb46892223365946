//! Recording a step of PyTorch, op by op.

use std::ffi::{c_char, c_int, c_void};

use rote::facts::NewFact;
use rote::plans::{BindingKind, GuardKind};
use rote::recording::{ActiveRecording, NewTensor};
use rote_aten::sys::Sink;
use rote_aten::{Aten, Bridge, FactKind};

use crate::record::{
    NO_RECORDING, ROTE_MAY_RAISE, ROTE_MAY_RAISE_LATE, ROTE_NO_INDEX, ROTE_REFUSED, optional,
    rote_record_global_begin, rote_record_global_end,
};
use crate::session::{RoteSession, torch};
use crate::status::{Answer, ROTE_OK, guarded, object, out, slice, text};
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

/// Begins to record the call that was last passed to `rote_session_call`.
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

/// Names the next leaf of the arguments, in flattened order. If `leaf` is not the library's own leaf at that
/// place, the recording is refused.
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

/// Names a tensor that exists before the step. `kind` is a kind of binding (`ROTE_BINDING_ARG`, ...). `object`
/// is the object that a replay binds; for a gradient, it is the gradient's owner. `local` is the local tensor.
/// `spec` is the number of its spec, or `ROTE_NO_INDEX` for a plain tensor. `leaf` is the index of `object`
/// among the leaves of the arguments, or `ROTE_NO_INDEX` for state.
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
                kind: BindingKind::try_from(kind)?,
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

/// Says at which place, for example `closure['scaler']._scale`, the step can reach a storage that is no argument and not
/// in the state. If an op uses the storage, the refusal names the place. `storage` is the address of the storage.
///
/// # Safety
/// Pointers must be live, and texts C strings.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_record_reach(
    session: *mut RoteSession,
    place: *const c_char,
    storage: u64,
) -> c_int {
    // SAFETY: the caller vouches for the session and what is passed.
    unsafe {
        record(session, |_, recording| {
            recording.reaches(storage, text(place)?);
            Ok(ROTE_OK)
        })
    }
}

/// Records that code of the framework's own has resized a storage outside the dispatcher, from `before` bytes to `after`:
/// to 0, which gives its memory back, or from 0, which takes new memory. `storage` is the address of the storage. Returns
/// the same as `rote_record_observed`.
///
/// # Safety
/// Pointers must be live, and texts C strings.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_record_resized(
    session: *mut RoteSession,
    storage: u64,
    before: u64,
    after: u64,
    source: *const c_char,
) -> c_int {
    // SAFETY: the caller vouches for the session and what is passed.
    unsafe {
        record(session, |_, recording| {
            recording.resized(storage, [before, after], text(source)?);
            Ok(recorded(recording))
        })
    }
}

/// Ends a recording whose step has run unseen, after `rote_record_ready`: what was named and guarded is kept for the next
/// recording. `*number` is its number, for `rote_record_resume`, or `ROTE_NO_INDEX` where the step is refused.
///
/// # Safety
/// `session` must be this library's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_record_survey(session: *mut RoteSession, number: *mut u32) -> c_int {
    guarded(|| {
        // SAFETY: the caller vouches for the place.
        let number = unsafe { out(number, "number")? };
        // SAFETY: the caller vouches for the session.
        let session = unsafe { torch(session)? };
        number.set(session.survey()?.unwrap_or(ROTE_NO_INDEX));
        Ok(ROTE_OK)
    })
}

/// Records under the guards of a candidate, which `rote_record_finish` has numbered, or of a survey, which
/// `rote_record_survey` has numbered, if all of them hold for the call. Not of a candidate whose step has asked for data.
/// `*resumed` says whether that is so. Then the caller gives leaves, names and specs, but no facts and guards that the
/// other recording was given.
///
/// # Safety
/// `session` must be this library's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_record_resume(
    session: *mut RoteSession,
    number: u32,
    resumed: *mut c_int,
) -> c_int {
    guarded(|| {
        // SAFETY: the caller vouches for the place.
        let resumed = unsafe { out(resumed, "resumed")? };
        // SAFETY: the caller vouches for the session.
        let session = unsafe { torch(session)? };
        resumed.set(c_int::from(session.resume(number)?));
        Ok(ROTE_OK)
    })
}

/// Binds the plan of a variant of another session instead of recording, for a function that is equal to the one of that
/// session. To be called after `rote_record_ready`. Both sessions were told the same facts in the same order. `own[i]` is
/// not 0 for a fact about an object that each of the two functions has for itself, and whose content the caller has
/// compared. All other facts, the call and the tensors of the state must look as in the other session. If they do,
/// `*bound` is 1, `*number` is the number of the new variant, and the recording is over. Otherwise `*bound` is 0.
///
/// # Safety
/// Sessions must be this library's, `own` must have `count` entries, and the GIL be held.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_record_adopt(
    session: *mut RoteSession,
    other: *mut RoteSession,
    variant: u32,
    own: *const u8,
    count: u32,
    number: *mut u32,
    bound: *mut c_int,
) -> c_int {
    guarded(|| {
        // SAFETY: the caller vouches for the places and the array.
        let (number, bound, own) = unsafe {
            (
                out(number, "number")?,
                out(bound, "bound")?,
                slice(own, count)?,
            )
        };
        bound.set(0);
        if session == other {
            return Err("a session cannot take over its own plan".into());
        }
        // SAFETY: the caller vouches for the sessions, which are two.
        let (session, other) = unsafe { (torch(session)?, torch(other)?) };
        let own: Vec<bool> = own.iter().map(|own| *own != 0).collect();
        if session.adopt(other, variant, &own)? {
            bound.set(1);
            number.set(
                session
                    .variants()
                    .first()
                    .map_or(ROTE_NO_INDEX, |newest| newest.id),
            );
        }
        Ok(ROTE_OK)
    })
}

/// Whether nothing can confirm the recording that is about to run, but a later one: no candidate, no variant and no
/// stored plan. To be called after `rote_record_ready`.
///
/// # Safety
/// `session` must be this library's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_record_is_first(
    session: *mut RoteSession,
    first: *mut c_int,
) -> c_int {
    guarded(|| {
        // SAFETY: the caller vouches for the place.
        let first = unsafe { out(first, "first")? };
        // SAFETY: the caller vouches for the session.
        first.set(c_int::from(unsafe { torch(session)? }.is_first()));
        Ok(ROTE_OK)
    })
}

/// Adds facts that are checked at every call. `reads[i]` is the number of a kind of fact (`FactKind` in
/// backends/aten/src/fact_kind.rs). It says which part of `containers[i]` is read. `keys[i]` is null for kinds without a
/// key. `kinds[i]` is a kind of guard (`ROTE_GUARD_HOST`, ...). If `hyperparameters[i]` is not 0, the value may become a
/// scalar binding. `texts` holds two C strings for each fact, one after the other: its subject, and the present value
/// in a text that holds in another process too. If the latter is empty, the fact is not in the plan file.
///
/// # Safety
/// Arrays must have `count` entries, `texts` twice as many C strings, objects must be live, and the GIL held.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_record_facts(
    session: *mut RoteSession,
    count: u32,
    reads: *const u32,
    containers: *const *mut c_void,
    keys: *const *mut c_void,
    kinds: *const u32,
    hyperparameters: *const u8,
    mut texts: *const c_char,
) -> c_int {
    // SAFETY: the caller vouches for the session, the arrays and the strings.
    unsafe {
        record(session, |_, recording| {
            let (reads, kinds) = (slice(reads, count)?, slice(kinds, count)?);
            let (containers, keys) = (slice(containers, count)?, slice(keys, count)?);
            let hyperparameters = slice(hyperparameters, count)?;
            let mut next = || {
                let found = text(texts)?;
                if !texts.is_null() {
                    texts = texts.add(found.len() + 1);
                }
                Ok::<&str, String>(found)
            };
            for i in 0..count as usize {
                let of = FactKind::try_from(reads[i])?;
                let fact = NewFact {
                    kind: GuardKind::try_from(kinds[i])?,
                    subject: next()?,
                    text: next()?,
                    hyperparameter: hyperparameters[i] != 0,
                    gradient: of.is_of_gradients(),
                    names: of.is_of_names(),
                    parts: of.parts(),
                };
                let container = object(containers[i], "container")?;
                (recording.facts).add(fact, |table| table.add(of, container, keys[i]))?;
            }
            Ok(ROTE_OK)
        })
    }
}

/// Records an op that has run on plain local tensors. Returns `ROTE_REFUSED` if the recording is refused.
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

/// Records the ops of this thread, and of threads that work for it, until `observe_no_more` of the bridge's Python
/// module is called. `listener` is a Python object. Of its attributes, `refused` says that nothing is to be recorded any
/// more, and `detailed` that `ran` is to be told of every op, with its arguments and results. Its methods are
///
/// - `ran(kind, tensor)`: an op has run, and `rote_record_observed` can record it: kind 1 (`wait_tensor`) or 2
///   (`lift_fresh`), whose result is `tensor`;
/// - `recorded(status)`: recording an op has returned another status than `ROTE_OK`;
/// - `failed(problem)`: recording an op went wrong, as the text says;
/// - `draws()`: an op that draws random numbers is about to run;
/// - `called(name)`: an op is called that the bridge's `tell_of` has named;
/// - `set_otherwise(name)`: an op, or the end of the step, has met other settings than the step began with;
/// - `number_of(spec)`: returns the number of a spec, and keeps the spec;
/// - `is_users_own(code)`: returns whether code is the user's own, to which ops are ascribed.
///
/// # Safety
/// `listener` must be live, `session` live until observation ends, and the GIL held.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_record_observe(
    session: *mut RoteSession,
    listener: *mut c_void,
) -> c_int {
    /// # Safety
    /// As the function of the C ABI that it calls.
    unsafe extern "C" fn observed(session: *mut c_void, source: *const c_char) -> c_int {
        // SAFETY: the bridge passes on the session that it was given.
        unsafe { rote_record_observed(session.cast(), source) }
    }
    /// # Safety
    /// As the function of the C ABI that it calls.
    unsafe extern "C" fn global_begin(
        session: *mut c_void,
        op: *const c_char,
        inputs: *const u32,
        n: u32,
        source: *const c_char,
    ) -> c_int {
        // SAFETY: as above.
        unsafe { rote_record_global_begin(session.cast(), op, inputs, n, source) }
    }
    /// # Safety
    /// As the function of the C ABI that it calls.
    unsafe extern "C" fn global_end(session: *mut c_void, outputs: *const u32, n: u32) -> c_int {
        // SAFETY: as above.
        unsafe { rote_record_global_end(session.cast(), outputs, n) }
    }
    guarded(|| {
        let sink = Sink {
            session: session.cast(),
            observed,
            global_begin,
            global_end,
        };
        // SAFETY: the caller vouches for the object and the session.
        unsafe { Bridge::get().observe(object(listener, "listener")?, &sink) }?;
        Ok(ROTE_OK)
    })
}

/// Records the op that was just reported to the listener. Returns `ROTE_REFUSED` if the recording is refused.
/// Returns `ROTE_MAY_RAISE` if a replay of the op may raise for other data. Returns `ROTE_MAY_RAISE_LATE` if
/// the replay has by then changed something that cannot be undone, so that the call could not be made again.
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
            Ok(recorded(recording))
        })
    }
}

/// What is known of what was recorded last, as `rote_record_observed` returns it.
fn recorded(recording: &ActiveRecording<Aten>) -> c_int {
    let last = recording.last_op();
    if recording.refusal().is_some() {
        ROTE_REFUSED
    } else if last.may_raise_late() {
        ROTE_MAY_RAISE_LATE
    } else if last.may_raise() {
        ROTE_MAY_RAISE
    } else {
        ROTE_OK
    }
}

/// Records that the step has waited with `work`, the handle that an op of a process group returned. Waits a moment
/// until the thread that ran the collective has let go of the tensors. Returns the same as `rote_record_observed`.
///
/// # Safety
/// Pointers must be live, `work` a `torch.distributed.Work`, and the GIL held.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_record_waited(
    session: *mut RoteSession,
    work: *mut c_void,
    source: *const c_char,
) -> c_int {
    // SAFETY: the caller vouches for the session and what is passed.
    unsafe {
        record(session, |_, recording| {
            let handle = recording.describer().work(object(work, "work")?)?;
            recording.waited(handle, text(source)?);
            Ok(recorded(recording))
        })
    }
}

/// Says that the step has asked for a tensor's place in its storage. The plan then fits only arguments at that
/// place. `*named` becomes 1 if the storage exists before the step, else 0.
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

/// Follows the number in a tensor of one element, which the step reads. Sets `*value` to it, and `*index` to the number
/// of the float, or to `ROTE_NO_INDEX` if Rote cannot tell how the number came about: then the read is an op like any other, which the
/// recording refuses. By this call the caller promises that the step uses the number in no other way than
/// `rote_record_float`, `rote_record_compared` and `rote_record_pin` are told.
///
/// # Safety
/// Pointers must be live, and the GIL held.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_record_item(
    session: *mut RoteSession,
    tensor: *mut c_void,
    index: *mut u32,
    value: *mut f64,
) -> c_int {
    // SAFETY: the caller vouches for the session and what is passed.
    unsafe {
        record(session, |aten, recording| {
            let (index, value) = (out(index, "index")?, out(value, "value")?);
            let found = recording.item(aten, borrowed(tensor, "tensor")?)?;
            let (number, held) = found.unwrap_or((ROTE_NO_INDEX, 0.0));
            index.set(number);
            value.set(held);
            Ok(ROTE_OK)
        })
    }
}

/// Names a tensor of the result. To be called in the order of the result's leaves.
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

/// Says that the step left a new gradient in the `.grad` of the tensor at `path`, or `None` if `local` is null.
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

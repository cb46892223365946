//! Recording a step of a PyTorch program, op by op.

use std::ffi::{c_char, c_int, c_void};

use rote::Outcome;
use rote::plans::{BindingKind, Device, GuardKind, RngAction};
use rote::recording::ActiveRecording;
use rote::tracer::scalars::Origin;
use rote::tracer::{Refusal, SpecEvent};

use crate::session::{RoteSession, session};
use crate::status::{ROTE_OK, give_text, guarded, set_error, slice, text};

/// The recording has been refused: further ops need not be reported.
pub const ROTE_REFUSED: c_int = 1;

/// Stands for "no spec", "no leaf" or "no slot".
pub const ROTE_NO_INDEX: u32 = u32::MAX;

/// # Safety
/// As [`session`].
unsafe fn active<'a>(pointer: *mut RoteSession) -> Result<&'a mut ActiveRecording, String> {
    // SAFETY: the caller vouches for the session.
    unsafe { session(pointer)? }
        .active()
        .ok_or_else(|| "no recording is in progress".to_owned())
}

fn optional(index: u32) -> Option<u32> {
    (index != ROTE_NO_INDEX).then_some(index)
}

fn binding_kind(kind: u32) -> Result<BindingKind, String> {
    match kind {
        0 => Ok(BindingKind::Arg),
        1 => Ok(BindingKind::State),
        2 => Ok(BindingKind::Grad),
        _ => Err(format!("{kind} is no kind of binding")),
    }
}

fn guard_kind(kind: u32) -> Result<GuardKind, String> {
    match kind {
        0 => Ok(GuardKind::Structure),
        1 => Ok(GuardKind::Argument),
        2 => Ok(GuardKind::State),
        3 => Ok(GuardKind::Host),
        4 => Ok(GuardKind::Mode),
        5 => Ok(GuardKind::World),
        _ => Err(format!("{kind} is no kind of guard")),
    }
}

fn parse_spec(text: &str) -> Option<SpecEvent> {
    let mut parts = text.split('|');
    let dims = |text: &str| -> Option<Vec<i64>> {
        text.split(',')
            .filter(|part| !part.is_empty())
            .map(|part| part.parse().ok())
            .collect()
    };
    let list = |text: &str, by: char| -> Vec<String> {
        text.split(by)
            .filter(|part| !part.is_empty())
            .map(str::to_owned)
            .collect()
    };
    Some(SpecEvent {
        device_type: parts.next()?.to_owned(),
        mesh_shape: dims(parts.next()?)?,
        mesh_dim_names: list(parts.next()?, ','),
        ranks: dims(parts.next()?)?,
        placements: list(parts.next()?, ';'),
        shape: dims(parts.next()?)?,
        strides: dims(parts.next()?)?,
    })
}

macro_rules! recording_fn {
    ($(#[$doc:meta])* $name:ident($recording:ident $(, $arg:ident: $ty:ty)*) $body:block) => {
        $(#[$doc])*
        ///
        /// # Safety
        /// Pointers must be live, texts C strings, and the GIL held.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(session: *mut RoteSession $(, $arg: $ty)*) -> c_int {
            guarded(|| -> Result<c_int, String> {
                // SAFETY: the caller vouches for the session.
                let $recording = unsafe { active(session)? };
                $body
            })
        }
    };
}

/// Begins to record the call that `rote_session_call` was asked about last.
///
/// # Safety
/// `session` must come from `rote_session_new`; the GIL must be held.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_record_begin(session: *mut RoteSession) -> c_int {
    guarded(|| -> Result<c_int, String> {
        // SAFETY: the caller vouches for the session.
        unsafe { self::session(session)? }.begin();
        Ok(ROTE_OK)
    })
}

recording_fn! {
    /// Names the next leaf of the arguments, in flattened order.
    rote_record_leaf(recording, name: *const c_char) {
        // SAFETY: the caller vouches for the text.
        recording.leaves.push(unsafe { text(name)? }.to_owned());
        Ok(ROTE_OK)
    }
}

recording_fn! {
    /// Registers a spec, `device|mesh shape|dim names|ranks|placements|shape|strides`
    /// with commas inside and semicolons between placements.
    rote_record_spec(recording, spec: *const c_char, index: *mut u32) {
        // SAFETY: the caller vouches for the pointers.
        unsafe {
            let text = text(spec)?;
            let spec = parse_spec(text).ok_or_else(|| format!("{text} is not a spec"))?;
            *index = recording.spec(spec);
        }
        Ok(ROTE_OK)
    }
}

recording_fn! {
    /// Names a tensor that exists before the step. `kind`: 0 argument, 1 state,
    /// 2 gradient (then `object` and `leaf` are its owner's). `local` is the
    /// local tensor.
    rote_record_tensor(recording, kind: u32, path: *const c_char, object: *mut c_void, local: *mut c_void, spec: u32, leaf: u32) {
        // SAFETY: the caller vouches for the objects.
        unsafe {
            recording
                .name_tensor(binding_kind(kind)?, text(path)?, object, local, optional(spec), optional(leaf))
                .map_err(|error| error.to_string())?;
        }
        Ok(ROTE_OK)
    }
}

recording_fn! {
    /// Adds a fact that is checked at every call. `table_kind` is a kind of
    /// `facts.h`; an empty `expected` keeps it out of the plan file.
    rote_record_fact(recording, table_kind: u32, container: *mut c_void, key: *mut c_void, kind: u32, subject: *const c_char, expected: *const c_char, hyperparameter: c_int) {
        // SAFETY: the caller vouches for the objects.
        unsafe {
            recording
                .facts
                .add(table_kind, container, key, guard_kind(kind)?, text(subject)?, text(expected)?, hyperparameter != 0)
                .map_err(|error| error.to_string())?;
        }
        Ok(ROTE_OK)
    }
}

recording_fn! {
    /// Adds a guard that is known by its text: structure, arguments, modes, world.
    rote_record_guard(recording, kind: u32, subject: *const c_char, expected: *const c_char) {
        // SAFETY: the caller vouches for the texts.
        unsafe { recording.guard(guard_kind(kind)?, text(subject)?, text(expected)?) };
        Ok(ROTE_OK)
    }
}

recording_fn! {
    /// Watches a device's default generator.
    rote_record_generator(recording, device_kind: u32, device_index: i32) {
        let device = Device { kind: device_kind as u8, index: device_index as i8 };
        recording.watch_generator(device).map_err(|error| error.to_string())?;
        Ok(ROTE_OK)
    }
}

/// All names and facts are known; the step is about to run.
///
/// # Safety
/// `session` must come from `rote_session_new`; the GIL must be held.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_record_ready(session: *mut RoteSession) -> c_int {
    guarded(|| -> Result<c_int, String> {
        // SAFETY: the caller vouches for the session.
        unsafe { self::session(session)? }
            .ready()
            .map_err(|error| error.to_string())?;
        Ok(ROTE_OK)
    })
}

/// Binds a stored plan made under the same guards instead of recording:
/// `*bound` is 1 when there was one, and the recording is over.
///
/// # Safety
/// `session` must come from `rote_session_new`; the GIL must be held.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_record_trust(session: *mut RoteSession, bound: *mut c_int) -> c_int {
    guarded(|| -> Result<c_int, String> {
        // SAFETY: the caller vouches for the pointers.
        unsafe {
            *bound = c_int::from(
                self::session(session)?
                    .trust()
                    .map_err(|error| error.to_string())?,
            );
        }
        Ok(ROTE_OK)
    })
}

recording_fn! {
    /// Records an op that has run, with plain local tensors. Returns
    /// `ROTE_REFUSED` when the recording is refused.
    rote_record_op(recording, func: *mut c_void, args: *mut c_void, kwargs: *mut c_void, result: *mut c_void, source: *const c_char) {
        // SAFETY: the caller vouches for the objects.
        unsafe { recording.op(func, args, kwargs, result, text(source)?) }.map_err(|error| error.to_string())?;
        Ok(if recording.refusal().is_some() { ROTE_REFUSED } else { ROTE_OK })
    }
}

recording_fn! {
    /// An op that draws random numbers is about to run.
    rote_record_random(recording, source: *const c_char) {
        // SAFETY: the caller vouches for the text.
        recording.check_generators(unsafe { text(source)? }).map_err(|error| error.to_string())?;
        Ok(ROTE_OK)
    }
}

recording_fn! {
    /// Records that a generator's state was saved (`action` 0, `*slot` is set)
    /// or restored from `*slot` (1).
    rote_record_rng(recording, action: u32, device_kind: u32, device_index: i32, slot: *mut u32, source: *const c_char) {
        let device = Device { kind: device_kind as u8, index: device_index as i8 };
        // SAFETY: the caller vouches for the pointers.
        unsafe {
            let source = text(source)?;
            recording.check_generators_before_save(action, source).map_err(|error| error.to_string())?;
            let (action, known) = if action == 0 { (RngAction::Save, None) } else { (RngAction::Restore, Some(*slot)) };
            *slot = recording.rng(action, device, known, source).map_err(|error| error.to_string())?;
        }
        Ok(ROTE_OK)
    }
}

recording_fn! {
    /// A global op begins; `inputs` are specs of its tensor arguments.
    rote_record_global_begin(recording, op: *const c_char, inputs: *const u32, n: u32, source: *const c_char) {
        // SAFETY: the caller vouches for the pointers.
        unsafe { recording.global_begin(text(op)?, slice(inputs, n), text(source)?) };
        Ok(ROTE_OK)
    }
}

recording_fn! {
    /// The innermost global op has run; `outputs` are specs of its results.
    rote_record_global_end(recording, outputs: *const u32, n: u32) {
        // SAFETY: the caller vouches for the pointer.
        recording.global_end(unsafe { slice(outputs, n) });
        Ok(ROTE_OK)
    }
}

recording_fn! {
    /// A redistribution begins.
    rote_record_redistribute_begin(recording, from: u32, to: u32, source: *const c_char) {
        // SAFETY: the caller vouches for the text.
        recording.redistribute_begin(from, to, unsafe { text(source)? });
        Ok(ROTE_OK)
    }
}

recording_fn! {
    /// The innermost redistribution has run.
    rote_record_redistribute_end(recording) {
        recording.redistribute_end();
        Ok(ROTE_OK)
    }
}

recording_fn! {
    /// Follows a float: `kind` 0 read from `path`, 1 constant, 2 negation of
    /// `a`, 3 to 7 sum, difference, product, quotient and power of `a` and `b`.
    rote_record_float(recording, kind: u32, a: u32, b: u32, value: f64, path: *const c_char, index: *mut u32) {
        // SAFETY: the caller vouches for the pointers.
        unsafe {
            let origin = match kind {
                0 => Origin::Read(text(path)?.to_owned()),
                1 => Origin::Const(value.to_bits()),
                2 => Origin::Neg(a),
                3 => Origin::Add(a, b),
                4 => Origin::Sub(a, b),
                5 => Origin::Mul(a, b),
                6 => Origin::Div(a, b),
                7 => Origin::Pow(a, b),
                _ => return Err(format!("{kind} is no kind of float")),
            };
            *index = recording.float(origin, value);
        }
        Ok(ROTE_OK)
    }
}

recording_fn! {
    /// A followed float was compared or converted: what it depends on must not
    /// change.
    rote_record_pin(recording, index: u32) {
        recording.pin_float(index);
        Ok(ROTE_OK)
    }
}

recording_fn! {
    /// Says which global ranks a process group has and what people call it.
    rote_record_group(recording, name: *const c_char, ranks: *const i64, n: u32, label: *const c_char) {
        // SAFETY: the caller vouches for the pointers.
        unsafe { recording.describe_group(text(name)?, slice(ranks, n), text(label)?) };
        Ok(ROTE_OK)
    }
}

recording_fn! {
    /// Names a tensor of the result; call in the order of the result's leaves.
    rote_record_output(recording, path: *const c_char, local: *mut c_void, spec: u32, requires_grad: c_int) {
        // SAFETY: the caller vouches for the objects.
        unsafe {
            recording
                .output(text(path)?, local, optional(spec), requires_grad != 0)
                .map_err(|error| error.to_string())?;
        }
        Ok(ROTE_OK)
    }
}

recording_fn! {
    /// Says that the step left a new gradient in the `.grad` of the tensor at
    /// `path`, or `None` when `local` is null.
    rote_record_grad(recording, path: *const c_char, local: *mut c_void, spec: u32) {
        let local = (!local.is_null()).then_some(local);
        // SAFETY: the caller vouches for the objects.
        unsafe { recording.grad(text(path)?, local, optional(spec)) }.map_err(|error| error.to_string())?;
        Ok(ROTE_OK)
    }
}

recording_fn! {
    /// Refuses the recording for a reason that the framework's side has seen.
    rote_record_refuse(recording, op: *const c_char, source: *const c_char, reason: *const c_char, remedy: *const c_char) {
        // SAFETY: the caller vouches for the texts.
        unsafe { recording.refuse(Refusal::op(text(op)?, text(source)?, text(reason)?, text(remedy)?)) };
        Ok(ROTE_REFUSED)
    }
}

recording_fn! {
    /// How many tensors the step made, did not return, and something still
    /// holds.
    rote_record_survivors(recording, count: *mut u32) {
        // SAFETY: the caller vouches for the pointer.
        unsafe { *count = recording.survivors().len() as u32 };
        Ok(ROTE_OK)
    }
}

/// Names of the process groups that recorded collectives use, a line each; or
/// null on failure.
///
/// # Safety
/// `session` must come from `rote_session_new`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_record_groups(session: *mut RoteSession) -> *const c_char {
    // SAFETY: the caller vouches for the session.
    match unsafe { active(session) } {
        Ok(recording) => give_text(&recording.group_names().join("\n")),
        Err(error) => {
            set_error(&error);
            std::ptr::null()
        }
    }
}

/// The step failed: drops the recording.
///
/// # Safety
/// `session` must come from `rote_session_new`; the GIL must be held.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_record_abort(session: *mut RoteSession) -> c_int {
    guarded(|| -> Result<c_int, String> {
        // SAFETY: the caller vouches for the session.
        unsafe { self::session(session)? }.abort();
        Ok(ROTE_OK)
    })
}

/// Ends the recording. `result` is the structure of the result as JSON
/// (docs/plan-format.md). Returns what became of it as JSON with `outcome`
/// (`dropped`, `candidate`, `kept`, `adopted`, `refused`), and `variant` or
/// `reason`; null on failure.
///
/// # Safety
/// `session` must come from `rote_session_new`, `result` be a C string, and
/// the GIL held.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_record_finish(
    session: *mut RoteSession,
    result: *const c_char,
) -> *const c_char {
    let mut out = std::ptr::null();
    guarded(|| -> Result<c_int, String> {
        // SAFETY: the caller vouches for session and text.
        let outcome = unsafe { self::session(session)?.finish(text(result)?) }
            .map_err(|error| error.to_string())?;
        let json = match outcome {
            Outcome::Dropped(why) => serde_json::json!({"outcome": "dropped", "reason": why}),
            Outcome::Candidate => serde_json::json!({"outcome": "candidate"}),
            Outcome::Kept(variant) => serde_json::json!({"outcome": "kept", "variant": variant}),
            Outcome::Adopted(variant) => {
                serde_json::json!({"outcome": "adopted", "variant": variant})
            }
            Outcome::Refused(refusal) => {
                serde_json::json!({"outcome": "refused", "reason": refusal.to_string()})
            }
        };
        out = give_text(&json.to_string());
        Ok(ROTE_OK)
    });
    out
}

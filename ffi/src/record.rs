//! Recording a step of any framework: guards, strategies, numbers.

use std::ffi::{c_char, c_int};

use rote::Outcome;
use rote::plans::{BindingKind, GuardKind, RngAction};
use rote::tracer::Refusal;
use rote::tracer::scalars::Origin;

use crate::session::{RoteSession, told, with_session};
use crate::spec;
use crate::status::{ROTE_OK, device, guarded, out, slice, text};

/// The recording has been refused: further ops need not be reported.
pub const ROTE_REFUSED: c_int = 1;
/// Recorded; a replay of the op may raise for other data.
pub const ROTE_MAY_RAISE: c_int = 2;
/// Recorded; a replay of the op may raise, after it has done what lasts.
pub const ROTE_MAY_RAISE_LATE: c_int = 3;

/// Stands for "no spec", "no leaf" or "no slot".
pub const ROTE_NO_INDEX: u32 = u32::MAX;

/// Kind of binding: an argument of the captured function.
pub const ROTE_BINDING_ARG: u32 = 0;
/// Kind of binding: a tensor of the captured state.
pub const ROTE_BINDING_STATE: u32 = 1;
/// Kind of binding: the gradient of one of these.
pub const ROTE_BINDING_GRAD: u32 = 2;

/// Kind of followed float: a number of the step, by its name.
pub const ROTE_FLOAT_READ: u32 = 0;
/// Kind of followed float: a constant.
pub const ROTE_FLOAT_CONST: u32 = 1;
/// Kind of followed float: -a.
pub const ROTE_FLOAT_NEG: u32 = 2;
/// Kind of followed float: a + b.
pub const ROTE_FLOAT_ADD: u32 = 3;
/// Kind of followed float: a - b.
pub const ROTE_FLOAT_SUB: u32 = 4;
/// Kind of followed float: a * b.
pub const ROTE_FLOAT_MUL: u32 = 5;
/// Kind of followed float: a / b.
pub const ROTE_FLOAT_DIV: u32 = 6;
/// Kind of followed float: a to the power of b.
pub const ROTE_FLOAT_POW: u32 = 7;

/// Kind of guard: the pytree structure of the arguments.
pub const ROTE_GUARD_STRUCTURE: u32 = 0;
/// Kind of guard: meta of a tensor argument, or the value of another one.
pub const ROTE_GUARD_ARGUMENT: u32 = 1;
/// Kind of guard: a tensor of the state.
pub const ROTE_GUARD_STATE: u32 = 2;
/// Kind of guard: a Python value that the function can reach.
pub const ROTE_GUARD_HOST: u32 = 3;
/// Kind of guard: a global mode (grad mode, autocast, determinism, ...).
pub const ROTE_GUARD_MODE: u32 = 4;
/// Kind of guard: world size and group membership.
pub const ROTE_GUARD_WORLD: u32 = 5;

/// Does the same with the recording of any framework, in a function of the ABI.
macro_rules! record {
    ($pointer:expr, |$frontend:pat_param, $recording:ident| $body:expr) => {
        guarded(|| {
            with_session!($pointer, |session| {
                let ($frontend, $recording) = session.active().ok_or(NO_RECORDING)?;
                $body
            })
        })
    };
}

/// What a call says that needs a recording.
pub(crate) const NO_RECORDING: &str = "no recording is in progress";

pub(crate) fn optional(index: u32) -> Option<u32> {
    (index != ROTE_NO_INDEX).then_some(index)
}

pub(crate) fn binding_kind(kind: u32) -> Result<BindingKind, String> {
    match kind {
        ROTE_BINDING_ARG => Ok(BindingKind::Arg),
        ROTE_BINDING_STATE => Ok(BindingKind::State),
        ROTE_BINDING_GRAD => Ok(BindingKind::Grad),
        _ => Err(format!("{kind} is no kind of binding, expected 0 to 2")),
    }
}

pub(crate) fn guard_kind(kind: u32) -> Result<GuardKind, String> {
    match kind {
        ROTE_GUARD_STRUCTURE => Ok(GuardKind::Structure),
        ROTE_GUARD_ARGUMENT => Ok(GuardKind::Argument),
        ROTE_GUARD_STATE => Ok(GuardKind::State),
        ROTE_GUARD_HOST => Ok(GuardKind::Host),
        ROTE_GUARD_MODE => Ok(GuardKind::Mode),
        ROTE_GUARD_WORLD => Ok(GuardKind::World),
        _ => Err(format!("{kind} is no kind of guard, expected 0 to 5")),
    }
}

/// Registers a spec and sets `*index` to its number. A spec is
/// `device|mesh shape|dim names|ranks|placements|shape|strides`, with commas
/// inside and semicolons between placements, for example
/// `cpu|2,4|dp,tp|0,1,2,3,4,5,6,7|R;S(0)|64,32|32,1`. Placements are `R`, `S(dim)`,
/// `_S(dim, split factor)` and `P(sum)` or another reduction.
///
/// # Safety
/// Pointers must be live, and texts C strings.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_record_spec(
    session: *mut RoteSession,
    spec: *const c_char,
    index: *mut u32,
) -> c_int {
    // SAFETY: the caller vouches for the session and what is passed.
    unsafe {
        record!(session, |_, recording| {
            let index = out(index, "index")?;
            index.set(recording.spec(spec::parse(text(spec)?)?));
            Ok(ROTE_OK)
        })
    }
}

/// Says how often the step has written each of the first `n` tensors that were named, in the order
/// of their naming, as autograd counts it (how far its version counter has risen), and, of
/// a DTensor, its local tensor.
///
/// # Safety
/// Both lists must have `n` entries.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_record_written(
    session: *mut RoteSession,
    times: *const u32,
    local_times: *const u32,
    n: u32,
) -> c_int {
    // SAFETY: the caller vouches for session and lists.
    unsafe {
        record!(session, |_, recording| {
            let both = slice(times, n)?.iter().zip(slice(local_times, n)?);
            recording.written(both.map(|(&times, &local)| [times, local]));
            Ok(ROTE_OK)
        })
    }
}

/// Adds a guard that is known by its text: structure, arguments, modes, world.
/// `kind` is a kind of guard (`ROTE_GUARD_STRUCTURE`, ...).
///
/// # Safety
/// Pointers must be live, and texts C strings.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_record_guard(
    session: *mut RoteSession,
    kind: u32,
    subject: *const c_char,
    expected: *const c_char,
) -> c_int {
    // SAFETY: the caller vouches for the session and what is passed.
    unsafe {
        record!(session, |_, recording| {
            recording.guard(guard_kind(kind)?, text(subject)?, text(expected)?);
            Ok(ROTE_OK)
        })
    }
}

/// Watches a device's default generator. `device_kind` is PyTorch's
/// `DeviceType` number (0 cpu, 1 cuda), `device_index` -1 for the current one.
///
/// # Safety
/// Pointers must be live, and texts C strings.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_record_generator(
    session: *mut RoteSession,
    device_kind: u32,
    device_index: i32,
) -> c_int {
    record!(session, |frontend, recording| {
        recording.watch_generator(frontend, device(device_kind, device_index)?)?;
        Ok(ROTE_OK)
    })
}

/// All names and facts are known; the step is about to run.
///
/// # Safety
/// `session` must be this library's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_record_ready(session: *mut RoteSession) -> c_int {
    guarded(|| {
        with_session!(session, |session| {
            if !session.is_recording() {
                return Err(NO_RECORDING.into());
            }
            session.ready()?;
        });
        Ok(ROTE_OK)
    })
}

/// Binds a stored plan made under the same guards instead of recording:
/// `*bound` is 1 when there was one, `*variant` is its number, and the recording is
/// over; else 0.
///
/// # Safety
/// `session` must be this library's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_record_trust(
    session: *mut RoteSession,
    variant: *mut u32,
    bound: *mut c_int,
) -> c_int {
    guarded(|| {
        // SAFETY: the caller vouches for the places.
        let (variant, bound) = unsafe { (out(variant, "variant")?, out(bound, "bound")?) };
        with_session!(session, |session| {
            bound.set(c_int::from(session.trust()?));
            if let Some(newest) = session.variants().first() {
                variant.set(newest.id);
            }
        });
        Ok(ROTE_OK)
    })
}

/// Refuses the recording, since the step handles errors of the op that was recorded last, and
/// a replay could not. `handler`: where it does. Returns `ROTE_REFUSED`.
///
/// # Safety
/// Pointers must be live, and texts C strings.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_record_handled(
    session: *mut RoteSession,
    handler: *const c_char,
) -> c_int {
    // SAFETY: the caller vouches for the session and what is passed.
    unsafe {
        record!(session, |_, recording| {
            recording.handled(text(handler)?);
            Ok(ROTE_REFUSED)
        })
    }
}

/// The gradient that a tensor had before the step was gone when the op ran that was recorded
/// last: a replay that fails from there on leaves none. `path`: the tensor's.
///
/// # Safety
/// Pointers must be live, and texts C strings.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_record_grad_gone(
    session: *mut RoteSession,
    path: *const c_char,
) -> c_int {
    // SAFETY: the caller vouches for the session and what is passed.
    unsafe {
        record!(session, |_, recording| {
            recording.gradient_gone(text(path)?);
            Ok(ROTE_OK)
        })
    }
}

/// An op that draws random numbers is about to run.
///
/// # Safety
/// Pointers must be live, and texts C strings.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_record_random(
    session: *mut RoteSession,
    source: *const c_char,
) -> c_int {
    // SAFETY: the caller vouches for the session and what is passed.
    unsafe {
        record!(session, |frontend, recording| {
            recording.check_generators(frontend, text(source)?)?;
            Ok(ROTE_OK)
        })
    }
}

/// Records that a generator's state was saved (`action` 0, `*slot` is set) or
/// restored from `*slot` (`action` 1). The device is named as in
/// `rote_record_generator`.
///
/// # Safety
/// Pointers must be live, and texts C strings.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_record_rng(
    session: *mut RoteSession,
    action: u32,
    device_kind: u32,
    device_index: i32,
    slot: *mut u32,
    source: *const c_char,
) -> c_int {
    // SAFETY: the caller vouches for the session and what is passed.
    unsafe {
        record!(session, |frontend, recording| {
            let slot = out(slot, "slot")?;
            let (device, source) = (device(device_kind, device_index)?, text(source)?);
            let known = match action {
                0 => {
                    // A save must see the state that recorded draws have left.
                    recording.check_generators(frontend, source)?;
                    None
                }
                1 => Some(slot.get()),
                _ => return Err(format!("{action} is no generator action, expected 0 or 1").into()),
            };
            let action = if action == 0 {
                RngAction::Save
            } else {
                RngAction::Restore
            };
            slot.set(recording.rng(frontend, action, device, known, source)?);
            Ok(ROTE_OK)
        })
    }
}

/// A global op begins; `op` has its overload unless that is the default one
/// (`aten::sum.dim_IntList`, `aten::mm`), `inputs` are the numbers of the specs of its `n` tensor
/// arguments.
///
/// # Safety
/// Pointers must be live, and texts C strings.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_record_global_begin(
    session: *mut RoteSession,
    op: *const c_char,
    inputs: *const u32,
    n: u32,
    source: *const c_char,
) -> c_int {
    // SAFETY: the caller vouches for the session and what is passed.
    unsafe {
        record!(session, |_, recording| {
            recording.global_begin(text(op)?, slice(inputs, n)?, text(source)?);
            Ok(ROTE_OK)
        })
    }
}

/// Says all arguments of the innermost global op, in schema order, a line each,
/// in the notation of `rote propagate`: `f32[64,32] @ S(0),R`, `{f32[4] @ R; none}`,
/// `1`, `[1,2]`, `true`, `bf16`, `'text'`, `none`. Defaults at the end may be left
/// out. `rote_session_explain` then says whether what is redistributed for the
/// op need have been.
///
/// # Safety
/// Pointers must be live, and texts C strings.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_record_global_args(
    session: *mut RoteSession,
    args: *const c_char,
) -> c_int {
    // SAFETY: the caller vouches for the session and what is passed.
    unsafe {
        record!(session, |_, recording| {
            recording.global_args(text(args)?);
            Ok(ROTE_OK)
        })
    }
}

/// The innermost global op has run; `outputs` are the numbers of the specs of
/// its `n` tensor results.
///
/// # Safety
/// Pointers must be live, and texts C strings.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_record_global_end(
    session: *mut RoteSession,
    outputs: *const u32,
    n: u32,
) -> c_int {
    // SAFETY: the caller vouches for the session and what is passed.
    unsafe {
        record!(session, |_, recording| {
            recording.global_end(slice(outputs, n)?);
            Ok(ROTE_OK)
        })
    }
}

/// A redistribution between two registered specs begins.
///
/// # Safety
/// Pointers must be live, and texts C strings.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_record_redistribute_begin(
    session: *mut RoteSession,
    from: u32,
    to: u32,
    source: *const c_char,
) -> c_int {
    // SAFETY: the caller vouches for the session and what is passed.
    unsafe {
        record!(session, |_, recording| {
            recording.redistribute_begin(from, to, text(source)?);
            Ok(ROTE_OK)
        })
    }
}

/// The innermost redistribution has run.
///
/// # Safety
/// Pointers must be live, and texts C strings.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_record_redistribute_end(session: *mut RoteSession) -> c_int {
    record!(session, |_, recording| {
        recording.redistribute_end();
        Ok(ROTE_OK)
    })
}

/// Follows a float and sets `*index` to its number. `kind` (`ROTE_FLOAT_READ`, ...)
/// says how it follows from `path`, or from `a` and `b`, which are numbers of
/// followed floats. `value`: what it is now. Who follows a float promises that the
/// step does nothing with it but what it tells here: an op's number that equals it
/// in two recordings becomes what it computes.
///
/// # Safety
/// Pointers must be live, and texts C strings.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_record_float(
    session: *mut RoteSession,
    kind: u32,
    a: u32,
    b: u32,
    value: f64,
    path: *const c_char,
    index: *mut u32,
) -> c_int {
    // SAFETY: the caller vouches for the session and what is passed.
    unsafe {
        record!(session, |_, recording| {
            let index = out(index, "index")?;
            let origin = match kind {
                ROTE_FLOAT_READ => Origin::Read(text(path)?.to_owned()),
                ROTE_FLOAT_CONST => Origin::Const(value.to_bits()),
                ROTE_FLOAT_NEG => Origin::Neg(a),
                ROTE_FLOAT_ADD => Origin::Add(a, b),
                ROTE_FLOAT_SUB => Origin::Sub(a, b),
                ROTE_FLOAT_MUL => Origin::Mul(a, b),
                ROTE_FLOAT_DIV => Origin::Div(a, b),
                ROTE_FLOAT_POW => Origin::Pow(a, b),
                _ => return Err(format!("{kind} is no kind of float, expected 0 to 7").into()),
            };
            index.set(recording.float(origin, value)?);
            Ok(ROTE_OK)
        })
    }
}

/// A followed float was compared or converted: what it depends on must not
/// change.
///
/// # Safety
/// Pointers must be live, and texts C strings.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_record_pin(session: *mut RoteSession, index: u32) -> c_int {
    record!(session, |_, recording| {
        recording.pin_float(index)?;
        Ok(ROTE_OK)
    })
}

/// Says which global ranks a process group has and what people call it.
///
/// # Safety
/// Pointers must be live, and texts C strings.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_record_group(
    session: *mut RoteSession,
    name: *const c_char,
    ranks: *const i64,
    n: u32,
    label: *const c_char,
) -> c_int {
    // SAFETY: the caller vouches for the session and what is passed.
    unsafe {
        record!(session, |_, recording| {
            recording.describe_group(text(name)?, slice(ranks, n)?, text(label)?);
            Ok(ROTE_OK)
        })
    }
}

/// Refuses the recording for a reason that the framework's side has seen; the
/// first reason counts. Returns `ROTE_REFUSED`.
///
/// # Safety
/// Pointers must be live, and texts C strings.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_record_refuse(
    session: *mut RoteSession,
    op: *const c_char,
    source: *const c_char,
    reason: *const c_char,
    remedy: *const c_char,
) -> c_int {
    // SAFETY: the caller vouches for the session and what is passed.
    unsafe {
        record!(session, |_, recording| {
            recording.refuse(Refusal::op(
                text(op)?,
                text(source)?,
                text(reason)?,
                text(remedy)?,
            ));
            Ok(ROTE_REFUSED)
        })
    }
}

/// Sets `*count` to how many tensors the step made, did not return, and
/// something still holds.
///
/// # Safety
/// Pointers must be live, and texts C strings.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_record_survivors(
    session: *mut RoteSession,
    count: *mut u32,
) -> c_int {
    // SAFETY: the caller vouches for the session and what is passed.
    unsafe {
        record!(session, |_, recording| {
            let count = out(count, "count")?;
            count.set(recording.survivors().len() as u32);
            Ok(ROTE_OK)
        })
    }
}

/// Names of the process groups that recorded collectives use, a line each; or
/// null on failure.
///
/// # Safety
/// `session` must be this library's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_record_groups(session: *mut RoteSession) -> *const c_char {
    told(|| {
        with_session!(session, |session| {
            let (_, recording) = session.active().ok_or(NO_RECORDING)?;
            Ok(Some(recording.group_names().join("\n")))
        })
    })
}

/// How many local ops and waits are recorded.
///
/// # Safety
/// `session` must be this library's, and the place be valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_record_executed(session: *mut RoteSession, count: *mut u32) -> c_int {
    record!(session, |_, recording| {
        // SAFETY: the caller vouches for the place.
        let count = unsafe { out(count, "count")? };
        count.set(recording.executed() as u32);
        Ok(ROTE_OK)
    })
}

/// Ends the recording without a variant, and compares it with the plan of one. JSON:
/// `null`, or the first instruction that they do not share (`instr`), as it is in the
/// `plan` and `now`. `result` is as for `rote_record_finish`. Null on failure.
///
/// # Safety
/// `session` must be this library's, `result` a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_record_compare(
    session: *mut RoteSession,
    variant: u32,
    result: *const c_char,
) -> *const c_char {
    told(|| {
        // SAFETY: the caller vouches for the text.
        let result = unsafe { text(result)? };
        let difference = with_session!(session, |session| session.compare_with(variant, result)?);
        let json = difference.map(
            |(instr, plan, now)| serde_json::json!({"instr": instr, "plan": plan, "now": now}),
        );
        Ok(Some(serde_json::json!(json).to_string()))
    })
}

/// The step failed: drops the recording.
///
/// # Safety
/// `session` must be this library's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_record_abort(session: *mut RoteSession) -> c_int {
    guarded(|| {
        with_session!(session, |session| session.abort());
        Ok(ROTE_OK)
    })
}

/// Ends the recording. `result` is the structure of the result as JSON
/// (docs/plan-format.md). Returns what became of it as JSON with `outcome`
/// (`dropped`, `candidate`, `kept`, `adopted`, `refused`), `variant` or
/// `reason`, and `variants`, the numbers of all that can still be replayed; null on
/// failure.
///
/// # Safety
/// `session` must be this library's, `result` a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_record_finish(
    session: *mut RoteSession,
    result: *const c_char,
) -> *const c_char {
    told(|| {
        // SAFETY: the caller vouches for the text.
        let result = unsafe { text(result)? };
        let is_json = serde_json::from_str::<serde_json::Value>(result).is_ok();
        let (outcome, left): (Outcome, Vec<u32>) = with_session!(session, |session| {
            if session.is_recording() && !is_json {
                return Err(format!("the structure of the result is no JSON: {result:?}").into());
            }
            let outcome = session.finish(result)?;
            let variants = session.variants().iter();
            (outcome, variants.map(|variant| variant.id).collect())
        });
        let mut json = match outcome {
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
        json["variants"] = left.into();
        Ok(Some(json.to_string()))
    })
}

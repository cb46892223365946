//! Recording a step of any framework: guards, strategies, numbers.

use std::ffi::{c_char, c_int};

use rote::Outcome;
use rote::plans::{Comparison, GuardKind, RngAction};
use rote::tracer::Refusal;
use rote::tracer::scalars::Origin;

use crate::session::{RoteSession, text_or_null, with_session};
use crate::spec;
use crate::status::{ROTE_OK, device, guarded, out, slice, text};

/// The recording has been refused: further ops need not be reported.
pub const ROTE_REFUSED: c_int = 1;
/// The op is recorded. With other data, a replay of the op may raise.
pub const ROTE_MAY_RAISE: c_int = 2;
/// The op is recorded. With other data, a replay of the op may raise, after the replay has changed something
/// that cannot be undone.
pub const ROTE_MAY_RAISE_LATE: c_int = 3;

/// No index: there is no spec, no leaf or no slot.
pub const ROTE_NO_INDEX: u32 = u32::MAX;

/// Kind of followed float: a number that the step reads, named by `path`.
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

/// Runs `$body` with the recording of a session of any framework, in a function of the ABI.
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

/// The error of a call that needs a recording.
pub(crate) const NO_RECORDING: &str = "no recording is in progress";

pub(crate) fn optional(index: u32) -> Option<u32> {
    (index != ROTE_NO_INDEX).then_some(index)
}

/// Registers a spec and sets `*index` to its number. The text of a spec is `device|mesh shape|dim
/// names|ranks|placements|shape|strides`. Entries are separated by commas, placements by semicolons. An example
/// is `cpu|2,4|dp,tp|0,1,2,3,4,5,6,7|R;S(0)|64,32|32,1`. Placements are `R`, `S(dim)`, `_S(dim, split factor)`,
/// and `P(sum)` or another reduction.
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

/// Tells how often the step has written each of the first `n` tensors that were named, in the order in which
/// they were named. `times` counts as autograd does: how far the tensor's version counter has risen.
/// `local_times` counts the same for the local tensor of a DTensor.
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

/// Adds a guard that is a text: the structure of the arguments, an argument, a mode or the world. `kind` is a
/// kind of guard (`ROTE_GUARD_STRUCTURE`, ...). `subject` names the guarded thing. `expected` is its present
/// value.
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
            recording.guard(GuardKind::try_from(kind)?, text(subject)?, text(expected)?);
            Ok(ROTE_OK)
        })
    }
}

/// Watches a device's default random generator. `device_kind` is PyTorch's `DeviceType` number (0 cpu, 1 cuda).
/// `device_index` is -1 for the current device.
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

/// Says that all names and facts are known and the step is about to run.
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

/// Binds a stored plan instead of recording, if the store has one that was made under the same guards. Then
/// `*bound` is 1, `*variant` is the number of the variant, and the recording is over. Otherwise `*bound` is 0.
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

/// Says that the step handles errors of the op that was recorded last. A replay could not run the handler. If it could
/// not begin anew there either, the recording is refused. `handler` is the source line of the handler. Returns `ROTE_OK`
/// or `ROTE_REFUSED`.
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
            Ok(match recording.refusal() {
                Some(_) => ROTE_REFUSED,
                None => ROTE_OK,
            })
        })
    }
}

/// Says that the step has dropped the gradient that the tensor at `path` had before the step. It was gone when
/// the op ran that was recorded last. A replay that fails at that op or later leaves no such gradient.
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

/// Says that an op that draws random numbers is about to run.
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

/// Records that the step saved or restored a generator's state. `action` 0 is a save and sets `*slot`. `action`
/// 1 restores from `*slot`. The device is named as in `rote_record_generator`.
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
                _ => {
                    return Err(
                        format!("{action} is not a generator action: expected 0 or 1").into(),
                    );
                }
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

/// Says that a global op begins. `op` is its name, with the overload unless that is the default
/// (`aten::sum.dim_IntList`, `aten::mm`). `inputs` are the numbers of the specs of its `n` tensor arguments.
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

/// Tells all arguments of the innermost global op, in schema order, one in each line. They are written in the
/// notation of `rote propagate`: `f32[64,32] @ S(0),R`, `{f32[4] @ R; none}`, `1`, `[1,2]`, `true`, `bf16`,
/// `'text'`, `none`. Defaults at the end may be left out. `rote_session_explain` then says whether a cheaper
/// strategy would have redistributed less for the op.
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

/// Says that the innermost global op has run. `outputs` are the numbers of the specs of its `n` tensor results.
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

/// Says that a redistribution begins. `from` and `to` are the numbers of two registered specs.
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

/// Says that the innermost redistribution has run.
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

/// Follows a float and sets `*index` to its number. `kind` (`ROTE_FLOAT_READ`, ...) says how the float follows
/// from `path`, or from `a` and `b`, which are numbers of followed floats. `value` is the present value of the
/// float.
///
/// By this call the framework promises that the step uses the float in no other way than told here. If a number
/// among an op's arguments equals a followed float in two recordings, a replay computes that number from the
/// float.
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
                _ => {
                    return Err(
                        format!("{kind} is not a kind of followed float: expected 0 to 7").into(),
                    );
                }
            };
            if let Origin::Read(path) = &origin {
                let now = recording.facts.float(path);
                if let Some(now) = now.ok().filter(|now| now.to_bits() != value.to_bits()) {
                    return Err(format!("{path} is {now:?} in this call, not {value:?}").into());
                }
            }
            index.set(recording.float(origin, value)?);
            Ok(ROTE_OK)
        })
    }
}

/// Says that the step has decided by a comparison of two followed floats, `a` and `b`. `how` is the comparison
/// (`ROTE_COMPARE_EQUAL`, ...), and `holds` says whether it holds (not 0) or not (0). A replay finds the same, or the
/// plan does not apply to the call.
///
/// # Safety
/// Pointers must be live, and texts C strings.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_record_compared(
    session: *mut RoteSession,
    how: u32,
    a: u32,
    b: u32,
    holds: c_int,
) -> c_int {
    record!(session, |_, recording| {
        let how = Comparison::try_from(how)?;
        recording.compare_floats(how, a, b, holds != 0)?;
        Ok(ROTE_OK)
    })
}

/// Says that the step has converted a followed float, or looked at its value in another way than by
/// `rote_record_compared`. The values that the float depends on must then stay the same.
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

/// Tells the global ranks of a process group. `label` is a name for people.
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

/// Refuses the recording for a reason that the framework has seen. The first reason is the one that is
/// reported. Returns `ROTE_REFUSED`.
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

/// Sets `*count` to the number of tensors that the step made and did not return, and that are still held.
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

/// Returns the names of the process groups that recorded collectives use, one in each line; null on failure.
///
/// # Safety
/// `session` must be this library's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_record_groups(session: *mut RoteSession) -> *const c_char {
    text_or_null(|| {
        with_session!(session, |session| {
            let (_, recording) = session.active().ok_or(NO_RECORDING)?;
            Ok(Some(recording.group_names().join("\n")))
        })
    })
}

/// Returns the storages that ops of the step have met, that `rote_record_reach` has named and that belong to no tensor
/// with a name: their addresses in decimal, one in each line. Such a recording is refused in the end: the next one is to
/// name their tensors. Null on failure.
///
/// # Safety
/// `session` must be this library's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_record_met(session: *mut RoteSession) -> *const c_char {
    text_or_null(|| {
        with_session!(session, |session| {
            let (_, recording) = session.active().ok_or(NO_RECORDING)?;
            let met: Vec<String> = recording.met().iter().map(u64::to_string).collect();
            Ok(Some(met.join("\n")))
        })
    })
}

/// Sets `*count` to the number of local ops and waits that are recorded.
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

/// Ends the recording without making a variant, and compares it with the plan of `variant`. Returns JSON, or
/// null on failure. The JSON is `null` if both have the same instructions. Otherwise it names the first
/// instruction that differs (`instr`), as it is in the plan (`plan`) and in the recording (`now`). `result` is
/// as for `rote_record_finish`.
///
/// # Safety
/// `session` must be this library's, `result` a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_record_compare(
    session: *mut RoteSession,
    variant: u32,
    result: *const c_char,
) -> *const c_char {
    text_or_null(|| {
        // SAFETY: the caller vouches for the text.
        let result = unsafe { text(result)? };
        let difference = with_session!(session, |session| session.compare_with(variant, result)?);
        let json = difference.map(
            |(instr, plan, now)| serde_json::json!({"instr": instr, "plan": plan, "now": now}),
        );
        Ok(Some(serde_json::json!(json).to_string()))
    })
}

/// Drops the recording. To be called when the step has failed.
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

/// Ends the recording. `result` is the structure of the result as JSON (docs/plan-format.md). Returns JSON, or
/// null on failure. `outcome` is `dropped`, `candidate`, `kept`, `adopted` or `refused`. `variant`, `reason` or
/// `candidate` (its number, for `rote_record_resume`) belongs to the outcome. `variants` are the numbers of all
/// variants that can still be replayed.
///
/// # Safety
/// `session` must be this library's, `result` a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_record_finish(
    session: *mut RoteSession,
    result: *const c_char,
) -> *const c_char {
    text_or_null(|| {
        // SAFETY: the caller vouches for the text.
        let result = unsafe { text(result)? };
        let is_json = serde_json::from_str::<serde_json::Value>(result).is_ok();
        let (outcome, candidate, left): (Outcome, Option<u32>, Vec<u32>) =
            with_session!(session, |session| {
                if session.is_recording() && !is_json {
                    return Err(
                        format!("the structure of the result is not JSON: {result:?}").into(),
                    );
                }
                let outcome = session.finish(result)?;
                let variants = session.variants().iter();
                let left = variants.map(|variant| variant.id).collect();
                (outcome, session.newest_candidate(), left)
            });
        let mut json = match outcome {
            Outcome::Dropped(why) => serde_json::json!({"outcome": "dropped", "reason": why}),
            Outcome::Candidate => {
                serde_json::json!({"outcome": "candidate", "candidate": candidate})
            }
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

//! Recording a step of a PyTorch program, op by op.

use std::ffi::{CString, c_char, c_int, c_void};

use rote::Outcome;
use rote::facts::NewFact;
use rote::plans::{BindingKind, GuardKind, RngAction};
use rote::recording::{ActiveRecording, NewTensor};
use rote::tracer::Refusal;
use rote::tracer::scalars::Origin;
use rote_aten::{Aten, Bridge, FactKind};

use crate::session::{RoteSession, borrowed, session};
use crate::spec;
use crate::status::{
    Answer, ROTE_OK, device, give_text, guarded, object, out, set_error, slice, text,
};

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

/// # Safety
/// As [`session`].
unsafe fn active<'a>(
    pointer: *mut RoteSession,
) -> Result<(&'a Aten, &'a mut ActiveRecording<Aten>), String> {
    // SAFETY: the caller vouches for the session.
    unsafe { session(pointer)? }
        .active()
        .ok_or_else(|| "no recording is in progress".to_owned())
}

/// Runs `body` on the recording in progress.
///
/// # Safety
/// As [`session`].
unsafe fn record(
    session: *mut RoteSession,
    body: impl FnOnce(&mut ActiveRecording<Aten>) -> Answer,
) -> c_int {
    // SAFETY: the caller vouches for the session.
    unsafe { record_with(session, |_, recording| body(recording)) }
}

/// The same, with PyTorch.
///
/// # Safety
/// As [`session`].
unsafe fn record_with(
    session: *mut RoteSession,
    body: impl FnOnce(&Aten, &mut ActiveRecording<Aten>) -> Answer,
) -> c_int {
    guarded(|| {
        // SAFETY: the caller vouches for the session.
        let (aten, recording) = unsafe { active(session)? };
        body(aten, recording)
    })
}

fn optional(index: u32) -> Option<u32> {
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

fn guard_kind(kind: u32) -> Result<GuardKind, String> {
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

/// Begins to record the call that `rote_session_call` was asked about last.
///
/// # Safety
/// `session` must come from `rote_session_new`; the GIL must be held.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_record_begin(session: *mut RoteSession) -> c_int {
    guarded(|| {
        // SAFETY: the caller vouches for the session.
        unsafe { self::session(session)? }.begin()?;
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
        let (session, name) = unsafe { (self::session(session)?, text(name)?) };
        // SAFETY: as above.
        let leaf = unsafe { borrowed(leaf, "leaf") };
        session.name_leaf(name, leaf.ok())?;
        Ok(ROTE_OK)
    })
}

/// Registers a spec and sets `*index` to its number. A spec is
/// `device|mesh shape|dim names|ranks|placements|shape|strides`, with commas
/// inside and semicolons between placements, for example
/// `cpu|2,4|dp,tp|0,1,2,3,4,5,6,7|R;S(0)|64,32|32,1`. Placements are `R`, `S(dim)`,
/// `_S(dim, split factor)` and `P(sum)` or another reduction.
///
/// # Safety
/// Pointers must be live, texts C strings, and the GIL held.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_record_spec(
    session: *mut RoteSession,
    spec: *const c_char,
    index: *mut u32,
) -> c_int {
    // SAFETY: the caller vouches for the session and what is passed.
    unsafe {
        record(session, |recording| {
            let index = out(index, "index")?;
            index.set(recording.spec(spec::parse(text(spec)?)?));
            Ok(ROTE_OK)
        })
    }
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
        record_with(session, |aten, recording| {
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
        record(session, |recording| {
            let both = slice(times, n)?.iter().zip(slice(local_times, n)?);
            recording.written(both.map(|(&times, &local)| [times, local]));
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
        record(session, |recording| {
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

/// Adds a guard that is known by its text: structure, arguments, modes, world.
/// `kind` is a kind of guard (`ROTE_GUARD_STRUCTURE`, ...).
///
/// # Safety
/// Pointers must be live, texts C strings, and the GIL held.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_record_guard(
    session: *mut RoteSession,
    kind: u32,
    subject: *const c_char,
    expected: *const c_char,
) -> c_int {
    // SAFETY: the caller vouches for the session and what is passed.
    unsafe {
        record(session, |recording| {
            recording.guard(guard_kind(kind)?, text(subject)?, text(expected)?);
            Ok(ROTE_OK)
        })
    }
}

/// Watches a device's default generator. `device_kind` is PyTorch's
/// `DeviceType` number (0 cpu, 1 cuda), `device_index` -1 for the current one.
///
/// # Safety
/// Pointers must be live, texts C strings, and the GIL held.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_record_generator(
    session: *mut RoteSession,
    device_kind: u32,
    device_index: i32,
) -> c_int {
    // SAFETY: the caller vouches for the session and what is passed.
    unsafe {
        record_with(session, |aten, recording| {
            recording.watch_generator(aten, device(device_kind, device_index)?)?;
            Ok(ROTE_OK)
        })
    }
}

/// All names and facts are known; the step is about to run.
///
/// # Safety
/// `session` must come from `rote_session_new`; the GIL must be held.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_record_ready(session: *mut RoteSession) -> c_int {
    guarded(|| {
        // SAFETY: the caller vouches for the session.
        unsafe { self::session(session)? }.ready()?;
        Ok(ROTE_OK)
    })
}

/// Binds a stored plan made under the same guards instead of recording:
/// `*bound` is 1 when there was one, `*variant` is its number, and the recording is
/// over; else 0.
///
/// # Safety
/// `session` must come from `rote_session_new`; the GIL must be held.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_record_trust(
    session: *mut RoteSession,
    variant: *mut u32,
    bound: *mut c_int,
) -> c_int {
    guarded(|| {
        // SAFETY: the caller vouches for the pointers.
        let (session, variant, bound) = unsafe {
            (
                self::session(session)?,
                out(variant, "variant")?,
                out(bound, "bound")?,
            )
        };
        bound.set(c_int::from(session.trust()?));
        if let Some(newest) = session.variants().first() {
            variant.set(newest.id);
        }
        Ok(ROTE_OK)
    })
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
        record_with(session, |aten, recording| {
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
        record_with(session, |aten, recording| {
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

/// Refuses the recording, since the step handles errors of the op that was recorded last, and
/// a replay could not. `handler`: where it does. Returns `ROTE_REFUSED`.
///
/// # Safety
/// Pointers must be live, texts C strings, and the GIL held.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_record_handled(
    session: *mut RoteSession,
    handler: *const c_char,
) -> c_int {
    // SAFETY: the caller vouches for the session and what is passed.
    unsafe {
        record(session, |recording| {
            recording.handled(text(handler)?);
            Ok(ROTE_REFUSED)
        })
    }
}

/// The gradient that a tensor had before the step was gone when the op ran that was recorded
/// last: a replay that fails from there on leaves none. `path`: the tensor's.
///
/// # Safety
/// Pointers must be live, texts C strings, and the GIL held.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_record_grad_gone(
    session: *mut RoteSession,
    path: *const c_char,
) -> c_int {
    // SAFETY: the caller vouches for the session and what is passed.
    unsafe {
        record(session, |recording| {
            recording.gradient_gone(text(path)?);
            Ok(ROTE_OK)
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
        record(session, |recording| {
            *named = c_int::from(recording.anchor(borrowed(local, "local")?)?);
            Ok(ROTE_OK)
        })
    }
}

/// An op that draws random numbers is about to run.
///
/// # Safety
/// Pointers must be live, texts C strings, and the GIL held.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_record_random(
    session: *mut RoteSession,
    source: *const c_char,
) -> c_int {
    // SAFETY: the caller vouches for the session and what is passed.
    unsafe {
        record_with(session, |aten, recording| {
            recording.check_generators(aten, text(source)?)?;
            Ok(ROTE_OK)
        })
    }
}

/// Records that a generator's state was saved (`action` 0, `*slot` is set) or
/// restored from `*slot` (`action` 1). The device is named as in
/// `rote_record_generator`.
///
/// # Safety
/// Pointers must be live, texts C strings, and the GIL held.
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
        record_with(session, |aten, recording| {
            let slot = out(slot, "slot")?;
            let (device, source) = (device(device_kind, device_index)?, text(source)?);
            let known = match action {
                0 => {
                    // A save must see the state that recorded draws have left.
                    recording.check_generators(aten, source)?;
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
            slot.set(recording.rng(aten, action, device, known, source)?);
            Ok(ROTE_OK)
        })
    }
}

/// A global op begins; `op` has its overload unless that is the default one
/// (`aten::sum.dim_IntList`, `aten::mm`), `inputs` are the numbers of the specs of its `n` tensor
/// arguments.
///
/// # Safety
/// Pointers must be live, texts C strings, and the GIL held.
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
        record(session, |recording| {
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
/// Pointers must be live, texts C strings, and the GIL held.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_record_global_args(
    session: *mut RoteSession,
    args: *const c_char,
) -> c_int {
    // SAFETY: the caller vouches for the session and what is passed.
    unsafe {
        record(session, |recording| {
            recording.global_args(text(args)?);
            Ok(ROTE_OK)
        })
    }
}

/// The innermost global op has run; `outputs` are the numbers of the specs of
/// its `n` tensor results.
///
/// # Safety
/// Pointers must be live, texts C strings, and the GIL held.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_record_global_end(
    session: *mut RoteSession,
    outputs: *const u32,
    n: u32,
) -> c_int {
    // SAFETY: the caller vouches for the session and what is passed.
    unsafe {
        record(session, |recording| {
            recording.global_end(slice(outputs, n)?);
            Ok(ROTE_OK)
        })
    }
}

/// A redistribution between two registered specs begins.
///
/// # Safety
/// Pointers must be live, texts C strings, and the GIL held.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_record_redistribute_begin(
    session: *mut RoteSession,
    from: u32,
    to: u32,
    source: *const c_char,
) -> c_int {
    // SAFETY: the caller vouches for the session and what is passed.
    unsafe {
        record(session, |recording| {
            recording.redistribute_begin(from, to, text(source)?);
            Ok(ROTE_OK)
        })
    }
}

/// The innermost redistribution has run.
///
/// # Safety
/// Pointers must be live, texts C strings, and the GIL held.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_record_redistribute_end(session: *mut RoteSession) -> c_int {
    // SAFETY: the caller vouches for the session and what is passed.
    unsafe {
        record(session, |recording| {
            recording.redistribute_end();
            Ok(ROTE_OK)
        })
    }
}

/// Follows a float and sets `*index` to its number. `kind`: 0 read from
/// `path`, 1 constant, 2 negation of `a`, 3 to 7 sum, difference, product,
/// quotient and power of `a` and `b`, which are numbers of followed floats.
///
/// # Safety
/// Pointers must be live, texts C strings, and the GIL held.
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
        record(session, |recording| {
            let index = out(index, "index")?;
            let origin = match kind {
                0 => Origin::Read(text(path)?.to_owned()),
                1 => Origin::Const(value.to_bits()),
                2 => Origin::Neg(a),
                3 => Origin::Add(a, b),
                4 => Origin::Sub(a, b),
                5 => Origin::Mul(a, b),
                6 => Origin::Div(a, b),
                7 => Origin::Pow(a, b),
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
/// Pointers must be live, texts C strings, and the GIL held.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_record_pin(session: *mut RoteSession, index: u32) -> c_int {
    // SAFETY: the caller vouches for the session and what is passed.
    unsafe {
        record(session, |recording| {
            recording.pin_float(index)?;
            Ok(ROTE_OK)
        })
    }
}

/// Says which global ranks a process group has and what people call it.
///
/// # Safety
/// Pointers must be live, texts C strings, and the GIL held.
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
        record(session, |recording| {
            recording.describe_group(text(name)?, slice(ranks, n)?, text(label)?);
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
        record(session, |recording| {
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
        record(session, |recording| {
            let local = match local.is_null() {
                true => None,
                false => Some(borrowed(local, "local")?),
            };
            recording.grad(text(path)?, local, optional(spec))?;
            Ok(ROTE_OK)
        })
    }
}

/// Refuses the recording for a reason that the framework's side has seen; the
/// first reason counts. Returns `ROTE_REFUSED`.
///
/// # Safety
/// Pointers must be live, texts C strings, and the GIL held.
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
        record(session, |recording| {
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
/// Pointers must be live, texts C strings, and the GIL held.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_record_survivors(
    session: *mut RoteSession,
    count: *mut u32,
) -> c_int {
    // SAFETY: the caller vouches for the session and what is passed.
    unsafe {
        record(session, |recording| {
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
/// `session` must come from `rote_session_new`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_record_groups(session: *mut RoteSession) -> *const c_char {
    // SAFETY: the caller vouches for the session.
    match unsafe { active(session) } {
        Ok((_, recording)) => give_text(&recording.group_names().join("\n")),
        Err(error) => {
            set_error(&error);
            std::ptr::null()
        }
    }
}

/// How many local ops and waits are recorded.
///
/// # Safety
/// `session` must come from `rote_session_new`, and the place be valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_record_executed(session: *mut RoteSession, count: *mut u32) -> c_int {
    guarded(|| {
        // SAFETY: the caller vouches for session and place.
        unsafe {
            let count = out(count, "count")?;
            count.set(active(session)?.1.executed() as u32);
        }
        Ok(ROTE_OK)
    })
}

/// Ends the recording without a variant, and compares it with the plan of one. JSON:
/// `null`, or the first instruction that they do not share (`instr`), as it is in the
/// `plan` and `now`. `result` is as for `rote_record_finish`. Null on failure.
///
/// # Safety
/// `session` must come from `rote_session_new`, `result` must be a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_record_compare(
    session: *mut RoteSession,
    variant: u32,
    result: *const c_char,
) -> *const c_char {
    let mut answer = std::ptr::null();
    guarded(|| {
        // SAFETY: the caller vouches for session and text.
        let (session, result) = unsafe { (crate::session::session(session)?, text(result)?) };
        let difference = session.compare_with(variant, result)?;
        let json = difference.map(
            |(instr, plan, now)| serde_json::json!({"instr": instr, "plan": plan, "now": now}),
        );
        answer = give_text(&serde_json::json!(json).to_string());
        Ok(ROTE_OK)
    });
    answer
}

/// The step failed: drops the recording.
///
/// # Safety
/// `session` must come from `rote_session_new`; the GIL must be held.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_record_abort(session: *mut RoteSession) -> c_int {
    guarded(|| {
        // SAFETY: the caller vouches for the session.
        unsafe { self::session(session)? }.abort();
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
/// `session` must come from `rote_session_new`, `result` be a C string, and
/// the GIL held.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_record_finish(
    session: *mut RoteSession,
    result: *const c_char,
) -> *const c_char {
    let mut out = std::ptr::null();
    guarded(|| {
        // SAFETY: the caller vouches for the session.
        let session = unsafe { self::session(session)? };
        // SAFETY: the caller vouches for the text.
        let outcome = session.finish(unsafe { text(result)? })?;
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
        let left: Vec<u32> = session
            .variants()
            .iter()
            .map(|variant| variant.id)
            .collect();
        json["variants"] = left.into();
        out = give_text(&json.to_string());
        Ok(ROTE_OK)
    });
    out
}

//! Sessions of PyTorch: calls with Python objects.

use std::ffi::{c_char, c_int, c_void};

use rote::replay::Left;
use rote::{Next, Session, SessionError};
use rote_aten::{Args, Aten, Borrowed, Bridge, Object};

use crate::session::{
    IN_USE, ROTE_EAGER, ROTE_RECORD, ROTE_REPLAYED, RoteSession, Sessions, config, made, process,
    rote_session_free, running, torch,
};
use crate::status::{
    Answer, Out, ROTE_ERROR, ROTE_OK, give_text, guarded, object, out, set_error, set_exception,
    text,
};

/// The arguments of a call.
///
/// # Safety
/// As [`Args::new`], where they are not null.
unsafe fn arguments(args: *mut c_void, kwargs: *mut c_void) -> Result<Args, String> {
    let (args, kwargs) = (object(args, "args")?, object(kwargs, "kwargs")?);
    // SAFETY: the caller vouches for the objects.
    Ok(unsafe { Args::new(args, kwargs) })
}

/// An object that a caller passed as `name`, for the time of the call.
///
/// # Safety
/// As [`Borrowed::new`], where it is not null.
pub(crate) unsafe fn borrowed<'a>(object: *mut c_void, name: &str) -> Result<Borrowed<'a>, String> {
    // SAFETY: the caller vouches for the object.
    Ok(unsafe { Borrowed::new(self::object(object, name)?) })
}

/// Makes a session; returns null on failure. `framework` names the framework and its version (`torch 2.15.0`).
/// `plans` is the directory of the plan store. `passes` chooses the passes that run over a plan when it is
/// bound: `all`, `none`, `default`, or names separated by commas, with `-` before names to leave out. Null or
/// empty stands for the environment variable ROTE_PASSES, or for the default.
///
/// # Safety
/// The texts must be C strings; the bridge must be loaded.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_session_new(
    function: *const c_char,
    framework: *const c_char,
    world_size: u32,
    rank: u32,
    plans: *const c_char,
    max_variants: u32,
    passes: *const c_char,
) -> *mut RoteSession {
    let mut out = std::ptr::null_mut();
    guarded(|| {
        if !Bridge::is_loaded() {
            return Err("the bridge is not loaded: call rote_load_bridge first".into());
        }
        // SAFETY: the caller vouches for the texts.
        let (function, framework, plans, passes) = unsafe {
            (
                text(function)?,
                text(framework)?,
                text(plans)?,
                text(passes)?,
            )
        };
        let process = process(framework, world_size, rank);
        let config = config(function, process, plans, max_variants, passes)?;
        let session = Session::new(config, Aten::new())?;
        out = made(Sessions::Torch(Box::new(session)));
        Ok(ROTE_OK)
    });
    out
}

/// Puts a new Python object in `*owner` that owns the session: when Python lets go of it, the session is freed. Python's
/// garbage collector sees through it what the session holds, so that a captured function can go with an object that
/// holds the function and is in its reach.
///
/// # Safety
/// To be called once. `rote_session_free` must not be called afterwards. The place must be valid, and the GIL held.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_session_owner(
    session: *mut RoteSession,
    owner: *mut *mut c_void,
) -> c_int {
    /// # Safety
    /// As [`rote_session_free`].
    unsafe extern "C" fn free(session: *mut c_void) -> c_int {
        // SAFETY: the caller vouches for the session.
        unsafe { rote_session_free(session.cast()) }
    }
    guarded(|| {
        // SAFETY: the caller vouches for pointer and place.
        unsafe {
            let frontend = torch(session)?.frontend_mut();
            out(owner, "owner")?.set(frontend.owner(session.cast(), free)?.into_ptr());
        }
        Ok(ROTE_OK)
    })
}

/// Where a replay's results go.
struct Delivery {
    variant: Out<u32>,
    results: Out<*mut c_void>,
}

impl Delivery {
    /// # Safety
    /// The places must be null, or valid for as long as the result is used.
    unsafe fn to(variant: *mut u32, results: *mut *mut c_void) -> Result<Self, String> {
        // SAFETY: the caller vouches for the places.
        unsafe {
            Ok(Delivery {
                variant: out(variant, "variant")?,
                results: out(results, "results")?,
            })
        }
    }

    /// Handles a call, and delivers what becomes of it.
    fn answer(
        &self,
        session: &mut Session<Aten>,
        call: impl FnOnce(&mut Session<Aten>) -> Result<Next<Object>, SessionError>,
    ) -> Answer {
        match call(session) {
            Ok(next) => Ok(self.deliver(next)),
            Err(error) => {
                set_error(&error.to_string());
                set_exception(session.take_exception());
                Ok(ROTE_ERROR)
            }
        }
    }

    fn deliver(&self, next: Next<Object>) -> c_int {
        match next {
            Next::Replayed(id, results) => {
                self.variant.set(id);
                self.results.set(results.into_ptr());
                ROTE_REPLAYED
            }
            Next::Record => ROTE_RECORD,
            Next::Eager => ROTE_EAGER,
        }
    }
}

/// Lets the step read values on the host after collectives. The ranks of the group that `rote_session_agree_in` is
/// told next then agree about every call, and about these values.
///
/// # Safety
/// `session` must come from `rote_session_new`, and the GIL be held.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_session_let_ranks_agree(session: *mut RoteSession) -> c_int {
    guarded(|| {
        // SAFETY: the caller vouches for the pointer.
        unsafe { torch(session)? }.let_ranks_agree();
        Ok(ROTE_OK)
    })
}

/// Sets `*holds` to 1 if the call would be replayed now, and to 0 if not. The ranks do not agree about it.
///
/// # Safety
/// As `rote_session_call`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_session_holds(
    session: *mut RoteSession,
    args: *mut c_void,
    kwargs: *mut c_void,
    holds: *mut c_int,
) -> c_int {
    guarded(|| {
        // SAFETY: the caller vouches for session, objects and place.
        unsafe {
            let holds = out(holds, "holds")?;
            holds.set(match running(session)? {
                Some(running) => running.session.holds(arguments(args, kwargs)?)?.into(),
                None => 0,
            });
        }
        Ok(ROTE_OK)
    })
}

/// Takes a tensor object that an instruction has made or written in place, and the `context` that the caller
/// passed. `value` is the number of the tensor in the recorded plan, or 0xFFFFFFFF for a tensor that a pass has
/// added.
pub type RoteShowCallback =
    Option<unsafe extern "C" fn(context: *mut c_void, instr: u32, value: u32, tensor: *mut c_void)>;

/// Replays a call with a variant, without delivering results. Calls `show` for each tensor that an instruction
/// makes or writes. If `recorded` is not 0, the instructions are those of the recorded plan. Otherwise they are
/// those that passes have made of the plan.
///
/// # Safety
/// As `rote_session_call`; `show` must not unwind, nor call the session.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_session_show(
    session: *mut RoteSession,
    variant: u32,
    args: *mut c_void,
    kwargs: *mut c_void,
    recorded: c_int,
    show: RoteShowCallback,
    context: *mut c_void,
) -> c_int {
    guarded(|| {
        let show = show.ok_or("`show` is null")?;
        // SAFETY: the caller vouches for session, objects and callback.
        unsafe {
            let running = running(session)?.ok_or(IN_USE)?;
            let args = arguments(args, kwargs)?;
            let mut show =
                |instr, value, tensor: Object| show(context, instr, value, tensor.as_ptr());
            (running.session).show(variant, args, recorded != 0, &mut show)?;
        }
        Ok(ROTE_OK)
    })
}

/// Handles a call, and delivers what becomes of it.
///
/// # Safety
/// As `rote_session_call`.
unsafe fn handle(
    session: *mut RoteSession,
    (args, kwargs): (*mut c_void, *mut c_void),
    (variant, results): (*mut u32, *mut *mut c_void),
    call: fn(&mut Session<Aten>, Args) -> Result<Next<Object>, SessionError>,
) -> c_int {
    guarded(|| {
        // SAFETY: the caller vouches for session, objects and places.
        unsafe {
            let Some(running) = running(session)? else {
                return Ok(ROTE_EAGER);
            };
            let delivery = Delivery::to(variant, results)?;
            let args = arguments(args, kwargs)?;
            delivery.answer(running.session, |session| call(session, args))
        }
    })
}

/// Handles a call of the captured function. Returns `ROTE_REPLAYED`, `ROTE_RECORD` or `ROTE_EAGER`. With
/// `ROTE_REPLAYED`, `*variant` is set, and `*results` is a new list of the local outputs and then the local
/// gradients. A call that a kernel of a replay makes is `ROTE_EAGER`.
///
/// # Safety
/// `args` must be a tuple and `kwargs` a dict that live until the next call;
/// the GIL must be held.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_session_call(
    session: *mut RoteSession,
    args: *mut c_void,
    kwargs: *mut c_void,
    variant: *mut u32,
    results: *mut *mut c_void,
) -> c_int {
    // SAFETY: the caller vouches for session, objects and places.
    unsafe { handle(session, (args, kwargs), (variant, results), Session::call) }
}

/// Handles a call that is made within a captured function that runs eagerly. Another rank may replay the outer
/// function, and then does not make this call. So the ranks do not agree about it, and a replay keeps the
/// recorded collectives.
///
/// # Safety
/// As `rote_session_call`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_session_call_within(
    session: *mut RoteSession,
    args: *mut c_void,
    kwargs: *mut c_void,
    variant: *mut u32,
    results: *mut *mut c_void,
) -> c_int {
    // SAFETY: the caller vouches for session, objects and places.
    unsafe {
        handle(
            session,
            (args, kwargs),
            (variant, results),
            Session::call_within,
        )
    }
}

/// Replays the last call with the plan that `rote_record_trust` has bound.
///
/// # Safety
/// As `rote_session_call`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_session_replay_last(
    session: *mut RoteSession,
    variant: *mut u32,
    results: *mut *mut c_void,
) -> c_int {
    guarded(|| {
        // SAFETY: the caller vouches for session and places.
        unsafe {
            let running = running(session)?.ok_or(IN_USE)?;
            let delivery = Delivery::to(variant, results)?;
            delivery.answer(running.session, Session::replay_last)
        }
    })
}

/// Returns the gradients that a failed replay leaves, as JSON. They are the same as in eager. The JSON has the
/// `variant`, and two lists of places in the variant's `grads`: the gradients that were `made`, and those that
/// become None (`nothing`). `*tensors` is a new list of the gradients that were made. Returns null if no replay
/// has failed since the last call, or if the replay leaves no gradients. To be called after a call that failed.
///
/// # Safety
/// `session` must come from `rote_session_new`, the place be valid, and the GIL held.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_session_left(
    session: *mut RoteSession,
    tensors: *mut *mut c_void,
) -> *const c_char {
    // SAFETY: the caller vouches for session and place.
    let (session, tensors) = match unsafe { (torch(session), out(tensors, "tensors")) } {
        (Ok(session), Ok(tensors)) => (session, tensors),
        _ => return std::ptr::null(),
    };
    let Some((variant, left)) = session.take_left() else {
        return std::ptr::null();
    };
    let (mut made, mut nothing, mut objects) = (Vec::new(), Vec::new(), Vec::new());
    for (place, left) in left.into_iter().enumerate() {
        match left {
            Left::Made(tensor) => {
                made.push(place);
                objects.push(tensor);
            }
            Left::Nothing => nothing.push(place),
            Left::AsItWas => {}
        }
    }
    let Ok(list) = Object::list(objects.into_iter().map(Ok)) else {
        return std::ptr::null();
    };
    tensors.set(list.into_ptr());
    let json = serde_json::json!({"variant": variant, "made": made, "nothing": nothing});
    give_text(&json.to_string())
}

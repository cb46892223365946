//! Sessions: calls, statistics, explanations.

use std::ffi::{CString, c_char, c_int, c_void};
use std::path::PathBuf;

use rote::passes::Selection;
use rote::plans::describe;
use rote::plans::{Fingerprint, NONE};
use rote::replay::Left;
use rote::replay::agreement::Ranks;
use rote::shown::Fault;
use rote::{Config, Next, Session, SessionError};
use rote_aten::ranks::without_gil;
use rote_aten::{Args, Aten, Borrowed, Bridge, Group, Object};

use crate::spec;
use crate::status::{
    Answer, Out, ROTE_ERROR, ROTE_OK, give_text, guarded, object, out, set_error, set_exception,
    slice, text,
};

/// The call was replayed.
pub const ROTE_REPLAYED: c_int = 0;
/// Run the call eagerly and record it.
pub const ROTE_RECORD: c_int = 1;
/// Run the call eagerly.
pub const ROTE_EAGER: c_int = 2;

const NO_BRIDGE: &str = "the bridge is not loaded: call rote_load_bridge first";

/// One captured function. Used by one thread at a time, with the GIL held.
pub struct RoteSession {
    pub(crate) session: Session<Aten>,
}

/// The session behind a pointer.
///
/// # Safety
/// `session` must come from `rote_session_new` and not be in use elsewhere.
pub(crate) unsafe fn session<'a>(
    session: *mut RoteSession,
) -> Result<&'a mut Session<Aten>, String> {
    // SAFETY: the caller vouches for the pointer.
    match unsafe { session.as_mut() } {
        Some(session) => Ok(&mut session.session),
        None => Err("the session is null".to_owned()),
    }
}

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

/// A new session, or null on failure. `framework` names the framework and its
/// version (`torch 2.15.0`), `plans` the directory of the plan store. `passes`
/// chooses what runs over a plan when it is bound: `all`, `none`, `default`, or
/// names separated by commas, with `-` before those to leave out; null or empty
/// stands for the environment variable ROTE_PASSES, or the default.
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
            return Err(NO_BRIDGE.into());
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
        let config = Config {
            function: function.to_owned(),
            fingerprint: Fingerprint {
                rote: env!("CARGO_PKG_VERSION").to_owned(),
                framework: framework.to_owned(),
                world_size,
                rank,
            },
            plans: PathBuf::from(plans),
            max_variants: max_variants as usize,
            passes: chosen_passes(passes)?,
        };
        let session = Session::new(config, Aten::new())?;
        out = Box::into_raw(Box::new(RoteSession { session }));
        Ok(ROTE_OK)
    });
    out
}

fn chosen_passes(text: &str) -> Result<Selection, String> {
    let from_environment = std::env::var("ROTE_PASSES").unwrap_or_default();
    let text = if text.is_empty() {
        &from_environment
    } else {
        text
    };
    Selection::parse(text).map_err(|error| error.to_string())
}

/// Frees a session.
///
/// # Safety
/// `session` must come from `rote_session_new`, or be null, and the GIL must
/// be held.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_session_free(session: *mut RoteSession) {
    if !session.is_null() {
        guarded(|| {
            // SAFETY: made by `rote_session_new`, freed once.
            drop(unsafe { Box::from_raw(session) });
            Ok(ROTE_OK)
        });
    }
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

/// Says which process group is the default one from now on, by its name, and what
/// this process is in it. Null or an empty name: there is none. To be called before
/// the first call and whenever that changes, and before `rote_session_agree_in`.
///
/// # Safety
/// `group` must be null or a C string and the GIL held.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_session_world(
    session: *mut RoteSession,
    group: *const c_char,
    world_size: u32,
    rank: u32,
) -> c_int {
    guarded(|| {
        // SAFETY: the caller vouches for session and text.
        let (session, group) = unsafe { (self::session(session)?, text(group)?) };
        let name = CString::new(group).map_err(|error| error.to_string())?;
        session.enter_world((!group.is_empty()).then_some(&*name), world_size, rank)?;
        Ok(ROTE_OK)
    })
}

/// Names the process group that all ranks are of. When the session's passes
/// alter collectives, its ranks tell each other at every call whether they
/// replay it: `*agrees` is 1 then, and every rank must make the same calls in the
/// same order. Else, or when the group cannot carry that, which
/// `rote_session_notice` says, `*agrees` is 0. To be called before the first call.
///
/// # Safety
/// `group` must be a C string, the place valid, and the GIL held.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_session_agree_in(
    session: *mut RoteSession,
    group: *const c_char,
    agrees: *mut c_int,
) -> c_int {
    guarded(|| {
        // SAFETY: the caller vouches for session, text and place.
        unsafe {
            let session = self::session(session)?;
            let agrees = out(agrees, "agrees")?;
            let group = CString::new(text(group)?).map_err(|error| error.to_string())?;
            agrees.set(session.agree_in(&group)?.into());
        }
        Ok(ROTE_OK)
    })
}

/// Whether every rank replays the call that was handled last, as far as ranks
/// tell each other: 1 or 0.
///
/// # Safety
/// `session` must come from `rote_session_new`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_session_together(session: *mut RoteSession) -> c_int {
    guarded(|| {
        // SAFETY: the caller vouches for the session.
        Ok(unsafe { self::session(session)? }.together().into())
    })
}

/// Whether a call would be replayed, were it made now: `*holds` is 1 or 0. Nothing
/// is agreed with other ranks.
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
            let session = self::session(session)?;
            let holds = out(holds, "holds")?;
            holds.set(session.holds(arguments(args, kwargs)?)?.into());
        }
        Ok(ROTE_OK)
    })
}

/// Replays nothing any more: calls run eagerly, and are not recorded. `why` is
/// listed among the refusals. Where ranks agree about calls, each must do so at
/// the same one.
///
/// # Safety
/// `session` must come from `rote_session_new`, `why` must be a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_session_stop(session: *mut RoteSession, why: *const c_char) -> c_int {
    guarded(|| {
        // SAFETY: the caller vouches for session and text.
        unsafe { self::session(session)?.stop(text(why)?) };
        Ok(ROTE_OK)
    })
}

/// Takes what an instruction has made or written in place, as a tensor object, with
/// what the caller gave for it. `value`: its number in the recorded plan, or
/// 0xFFFFFFFF for what a pass has added.
pub type RoteShowCallback =
    Option<unsafe extern "C" fn(context: *mut c_void, instr: u32, value: u32, tensor: *mut c_void)>;

/// Replays a call with a variant, without results, and shows what each instruction
/// makes or writes: of the plan as `recorded`, or of what passes have made of it.
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
            let session = self::session(session)?;
            let args = arguments(args, kwargs)?;
            session.show(variant, args, recorded != 0, &mut |instr, value, tensor| {
                show(context, instr, value, tensor.as_ptr());
            })?;
        }
        Ok(ROTE_OK)
    })
}

/// A variant of a session. None, and the last error, when there is none.
///
/// # Safety
/// `session` must come from `rote_session_new`.
unsafe fn variant_of<'a>(
    session: *mut RoteSession,
    variant: u32,
) -> Option<&'a rote::variant::Variant<Aten>> {
    // SAFETY: the caller vouches for the session.
    let found = unsafe { self::session(session) }.ok();
    let found = found.and_then(|session| session.variant(variant));
    if found.is_none() {
        set_error("there is no such variant");
    }
    found
}

/// The instructions of a variant's recorded plan as JSON: for each its `text`, its
/// `source` line, the roots that it `reads`, how many `outs` it has, and what it has
/// `shown`: values and their roots. `counted`: whether it is a local op or a wait.
///
/// # Safety
/// `session` must come from `rote_session_new`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_session_program(
    session: *mut RoteSession,
    variant: u32,
) -> *const c_char {
    // SAFETY: the caller vouches for the session.
    match unsafe { variant_of(session, variant) } {
        Some(variant) => give_text(&rote::shown::program(variant).to_string()),
        None => std::ptr::null(),
    }
}

/// Makes a variant wrong at an instruction of its recorded plan, for tests of what
/// finds such faults: `number`, `swap`, `drop`, `offset`, `reduce`, `stale` or
/// the name of another op. In the plan, or where it is `bound` in what passes have made
/// of it. Returns 0, or 1 where there is no such fault at the instruction.
///
/// # Safety
/// `session` must come from `rote_session_new`, `fault` must be a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_session_plant(
    session: *mut RoteSession,
    variant: u32,
    instr: u32,
    bound: c_int,
    fault: *const c_char,
) -> c_int {
    guarded(|| {
        // SAFETY: the caller vouches for session and text.
        let (session, fault) = unsafe { (self::session(session)?, Fault::parse(text(fault)?)) };
        let done = fault.plant(session, variant, instr as usize, bound != 0)?;
        Ok(c_int::from(!done))
    })
}

/// Gathers `n` bytes of every rank of a process group in `all`, in the order of
/// ranks. `*gathered` is 0, and nothing was done, when there is no such group or it
/// has no backend for the CPU. Waits with the GIL released.
///
/// # Safety
/// `group` must be a C string, `ours` point at `n` bytes and `all` at `n` for each of
/// `ranks`, the place be valid, the bridge loaded, and the GIL held.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_gather(
    group: *const c_char,
    ours: *const u8,
    n: u32,
    ranks: u32,
    all: *mut u8,
    gathered: *mut c_int,
) -> c_int {
    guarded(|| {
        if !Bridge::is_loaded() {
            return Err(NO_BRIDGE.into());
        }
        // SAFETY: the caller vouches for text, bytes and places.
        let (group, ours, all, gathered) = unsafe {
            let group = CString::new(text(group)?).map_err(|error| error.to_string())?;
            (
                group,
                slice(ours, n)?,
                out(all, "all")?,
                out(gathered, "gathered")?,
            )
        };
        gathered.set(0);
        let Some(group) = Group::find(&group)?.filter(|group| group.cpu) else {
            return Ok(ROTE_OK);
        };
        if group.ranks != ranks as usize {
            return Err(format!("the group has {} ranks, not {ranks}", group.ranks).into());
        }
        let bytes = without_gil(|| group.gather(ours))??;
        all.fill(&bytes);
        gathered.set(1);
        Ok(ROTE_OK)
    })
}

/// Handles a call of the captured function: `ROTE_REPLAYED` (`*variant` and
/// `*results`, a new list of the local outputs and then the local gradients,
/// are set), `ROTE_RECORD` or `ROTE_EAGER`.
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
    guarded(|| {
        // SAFETY: the caller vouches for session, objects and places.
        unsafe {
            let session = self::session(session)?;
            let delivery = Delivery::to(variant, results)?;
            let args = arguments(args, kwargs)?;
            delivery.answer(session, |session| session.call(args))
        }
    })
}

/// The same for a call made from within a captured function that runs eagerly.
/// Another rank may replay that one, and not make this call: nothing is agreed,
/// and a replay keeps the recorded collectives.
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
    guarded(|| {
        // SAFETY: the caller vouches for session, objects and places.
        unsafe {
            let session = self::session(session)?;
            let delivery = Delivery::to(variant, results)?;
            let args = arguments(args, kwargs)?;
            delivery.answer(session, |session| session.call_within(args))
        }
    })
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
            let session = self::session(session)?;
            let delivery = Delivery::to(variant, results)?;
            delivery.answer(session, Session::replay_last)
        }
    })
}

/// What a replay that failed leaves of gradients, as eager would: JSON with the
/// `variant` and, as places in its list of `grads`, those `made`, and those that become
/// None (`nothing`); `*tensors` is a new list of the made ones. Null where no
/// replay has failed since the last call, or it leaves none. To be called after a call
/// that failed.
///
/// # Safety
/// `session` must come from `rote_session_new`, the place be valid, and the GIL held.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_session_left(
    session: *mut RoteSession,
    tensors: *mut *mut c_void,
) -> *const c_char {
    // SAFETY: the caller vouches for session and place.
    let (session, tensors) = match unsafe { (self::session(session), out(tensors, "tensors")) } {
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

/// Gives up a variant that has not been replayed yet, since the caller cannot
/// give back its results.
///
/// # Safety
/// `session` must come from `rote_session_new`, and the GIL must be held.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_session_give_up(session: *mut RoteSession, variant: u32) -> c_int {
    guarded(|| {
        // SAFETY: the caller vouches for the session.
        unsafe { self::session(session)? }.give_up(variant);
        Ok(ROTE_OK)
    })
}

/// Marks a tensor object as eager returns it after a step that went backward:
/// it requires grad, and its graph is used up.
///
/// # Safety
/// `tensor` must be a tensor object and the GIL held.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_mark_replayed(tensor: *mut c_void) -> c_int {
    guarded(|| {
        if !Bridge::is_loaded() {
            return Err(NO_BRIDGE.into());
        }
        // SAFETY: the caller vouches for the object.
        let tensor = unsafe { Object::hold(object(tensor, "tensor")?) };
        Bridge::get().mark_replayed(&tensor)?;
        Ok(ROTE_OK)
    })
}

/// Sets `*view` to a new tuple of what autograd knows of a tensor as a view: a number
/// for its version counter, whether others have that too, `how` it is a view (bits: 1
/// gradients go to its base, 2 tangents come from there, 4 its memory was written since it
/// was made, 8 it has a version counter of its own, 16 no other: it was made in inference mode;
/// the rest: how it was made), its base or `None`, whether it requires grad
/// other than by its base, and what makes it from its base again, where strides do not say it:
/// `None` where they do, `False` where nothing can.
///
/// # Safety
/// `tensor` must be a tensor object, the place valid, and the GIL held.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_view_of(tensor: *mut c_void, view: *mut *mut c_void) -> c_int {
    guarded(|| {
        if !Bridge::is_loaded() {
            return Err(NO_BRIDGE.into());
        }
        // SAFETY: the caller vouches for object and place.
        unsafe {
            let view = out(view, "view")?;
            let found = Bridge::get().view_of(object(tensor, "tensor")?)?;
            view.set(found.into_ptr());
        }
        Ok(ROTE_OK)
    })
}

/// Sets `*made` to a tensor on the memory of another, as one that was made in inference mode.
///
/// # Safety
/// `tensor` must be a tensor object, the place valid, and the GIL held.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_as_inference(tensor: *mut c_void, made: *mut *mut c_void) -> c_int {
    guarded(|| {
        if !Bridge::is_loaded() {
            return Err(NO_BRIDGE.into());
        }
        // SAFETY: the caller vouches for object and place.
        unsafe {
            let made = out(made, "made")?;
            let found = Bridge::get().as_inference(object(tensor, "tensor")?)?;
            made.set(found.into_ptr());
        }
        Ok(ROTE_OK)
    })
}

/// Makes a tensor object, which shares the memory of `base` and is no view yet, one to
/// autograd, or gives it the version counter of `base` if `how` is 0. `how` and `rebuild`:
/// as `rote_view_of` gives them.
///
/// # Safety
/// `tensor` and `base` must be tensor objects, `rebuild` an object, and the GIL held.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_make_view(
    tensor: *mut c_void,
    base: *mut c_void,
    how: u32,
    rebuild: *mut c_void,
) -> c_int {
    guarded(|| {
        if !Bridge::is_loaded() {
            return Err(NO_BRIDGE.into());
        }
        // SAFETY: the caller vouches for the objects.
        unsafe {
            let (tensor, base) = (object(tensor, "tensor")?, object(base, "base")?);
            Bridge::get().make_view(tensor, base, how, object(rebuild, "rebuild")?)?;
        }
        Ok(ROTE_OK)
    })
}

/// Sets `*hooks` to a new list of the Python functions in the hooks of the autograd node
/// that adds up a tensor's gradient; `None` stands for a hook of C++.
///
/// # Safety
/// `tensor` must be a tensor object, the place valid, and the GIL held.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_tensor_hooks(tensor: *mut c_void, hooks: *mut *mut c_void) -> c_int {
    guarded(|| {
        if !Bridge::is_loaded() {
            return Err(NO_BRIDGE.into());
        }
        // SAFETY: the caller vouches for object and place.
        unsafe {
            let hooks = out(hooks, "hooks")?;
            let found = Bridge::get().hooks(object(tensor, "tensor")?)?;
            hooks.set(found.into_ptr());
        }
        Ok(ROTE_OK)
    })
}

/// The session's counters as JSON, or null on failure.
///
/// # Safety
/// `session` must come from `rote_session_new`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_session_stats(session: *mut RoteSession) -> *const c_char {
    // SAFETY: the caller vouches for the session.
    let session = match unsafe { self::session(session) } {
        Ok(session) => session,
        Err(error) => {
            set_error(&error);
            return std::ptr::null();
        }
    };
    let stats = session.stats();
    let misses: serde_json::Map<String, serde_json::Value> = stats
        .guard_misses
        .iter()
        .map(|(subject, times)| (subject.clone(), (*times).into()))
        .collect();
    let json = serde_json::json!({
        "calls": stats.calls,
        "recordings": stats.recordings,
        "replays": stats.replays,
        "altered": stats.altered,
        "kept": stats.kept,
        "exchanges": stats.exchanges,
        "fallbacks": stats.fallbacks,
        "variants": session.variants().len(),
        "guard_misses": misses,
        "refusals": stats.refusals,
    });
    give_text(&json.to_string())
}

/// Something to warn the user of, once; null when there is nothing.
///
/// # Safety
/// `session` must come from `rote_session_new`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_session_notice(session: *mut RoteSession) -> *const c_char {
    // SAFETY: the caller vouches for the session.
    let notice = unsafe { self::session(session) }
        .ok()
        .and_then(|session| session.take_notice());
    notice.map_or(std::ptr::null(), |notice| give_text(&notice))
}

/// What was erased, by whom collectives were caused, guards, misses and
/// refusals, as text; or null on failure.
///
/// # Safety
/// `session` must come from `rote_session_new`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_session_explain(session: *mut RoteSession) -> *const c_char {
    // SAFETY: the caller vouches for the session.
    match unsafe { self::session(session) } {
        Ok(session) => give_text(&rote::explain::explain(session)),
        Err(error) => {
            set_error(&error);
            std::ptr::null()
        }
    }
}

/// A variant as JSON: its guard `key`, the structure of the `result`
/// (docs/plan-format.md), `outputs` (`path`, `spec`, `requires_grad`) and
/// `grads` (`path`, `spec`, `none`: whether `.grad` becomes `None`) in the order
/// of the replay's results, and instruction `counts` (`local`, `views`,
/// `collectives`). A spec has the form that `rote_record_spec` reads, and is
/// null for a plain tensor. Null when there is no such variant.
///
/// # Safety
/// `session` must come from `rote_session_new`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_session_variant(
    session: *mut RoteSession,
    variant: u32,
) -> *const c_char {
    // SAFETY: the caller vouches for the session.
    let Some(variant) = (unsafe { variant_of(session, variant) }) else {
        return std::ptr::null();
    };
    let plan = variant.file.plan();
    let counts = describe::instructions(plan);
    let outputs: Vec<_> = plan
        .outputs
        .iter()
        .map(|output| {
            serde_json::json!({
                "path": plan.str(output.path.to_native()),
                "spec": spec::write(plan, output.spec.to_native()),
                "requires_grad": output.requires_grad,
            })
        })
        .collect();
    let grads: Vec<_> = plan
        .grads
        .iter()
        .map(|grad| {
            serde_json::json!({
                "path": plan.str(grad.path.to_native()),
                "spec": spec::write(plan, grad.spec.to_native()),
                "none": grad.value == NONE,
            })
        })
        .collect();
    let json = serde_json::json!({
        "key": variant.key,
        "result": serde_json::from_str::<serde_json::Value>(&plan.result).unwrap_or_default(),
        "outputs": outputs,
        "grads": grads,
        "counts": {"local": counts.local, "views": counts.views, "collectives": counts.collectives},
    });
    give_text(&json.to_string())
}

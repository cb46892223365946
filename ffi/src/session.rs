//! Sessions of any framework: statistics, explanations, process groups.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::error::Error;
use std::ffi::{CString, c_char, c_int};
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::ThreadId;

use rote::passes::Selection;
use rote::plans::{ArchivedPlan, Fingerprint, NONE, describe};
use rote::{Config, Session, SessionError};
use rote_aten::Aten;
use rote_callbacks::{Callbacks, DlManagedTensor};

use crate::spec;
use crate::status::{ROTE_OK, give_text, guarded, out, text};

/// The call was replayed.
pub const ROTE_REPLAYED: c_int = 0;
/// Run the call eagerly and record it.
pub const ROTE_RECORD: c_int = 1;
/// Run the call eagerly.
pub const ROTE_EAGER: c_int = 2;

/// Why a call cannot use PyTorch's session.
pub(crate) const IN_USE: &str = "the session is in use: a kernel that it runs calls it";

/// One captured function. A session of PyTorch may be used by one thread at a time, with the GIL held. A
/// session of another framework may be used only by the thread that made it.
pub struct RoteSession {
    pub(crate) sessions: Sessions,
    /// The thread that a framework's session belongs to.
    thread: ThreadId,
    /// Whether a call of a framework's session is under way, or a call of PyTorch's that runs kernels.
    busy: Cell<bool>,
    /// What the last replay of a framework's session has given back, for as long as no other call is made.
    pub(crate) results: Vec<*mut DlManagedTensor>,
}

/// The session of a framework.
pub(crate) enum Sessions {
    Torch(Box<Session<Aten>>),
    Framework(Box<Session<Callbacks>>),
}

/// Addresses of the sessions that were made and not freed.
static LIVE: Mutex<BTreeSet<usize>> = Mutex::new(BTreeSet::new());

fn live() -> MutexGuard<'static, BTreeSet<usize>> {
    LIVE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A new session, for the caller.
pub(crate) fn made(sessions: Sessions) -> *mut RoteSession {
    let session = Box::into_raw(Box::new(RoteSession {
        sessions,
        thread: std::thread::current().id(),
        busy: Cell::new(false),
        results: Vec::new(),
    }));
    live().insert(session.addr());
    session
}

/// A session while one call of the library uses it.
pub(crate) struct Entered<'a> {
    session: &'a mut RoteSession,
    was_busy: bool,
}

impl Entered<'_> {
    pub(crate) fn sessions(&mut self) -> &mut Sessions {
        &mut self.session.sessions
    }

    /// The session of a framework of function pointers, and where its results are kept.
    pub(crate) fn framework(
        &mut self,
    ) -> Result<(&mut Session<Callbacks>, &mut Vec<*mut DlManagedTensor>), String> {
        match &mut self.session.sessions {
            Sessions::Framework(session) => Ok((session, &mut self.session.results)),
            Sessions::Torch(_) => {
                Err("the session is PyTorch's: rote_session_new made it".to_owned())
            }
        }
    }
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        self.session.busy.set(self.was_busy);
    }
}

/// Whether a caller may use a session now.
///
/// # Safety
/// `session` must be null or an address that the library gave out, and not in use elsewhere if it is PyTorch's.
unsafe fn usable(session: *mut RoteSession) -> Result<(), String> {
    if session.is_null() {
        return Err("the session is null".to_owned());
    }
    if !live().contains(&session.addr()) {
        return Err("the session was freed, or is none".to_owned());
    }
    // SAFETY: it is live. What is read does not change but by the thread that the session belongs to.
    let found = unsafe { &*session };
    let Sessions::Framework(_) = found.sessions else {
        return Ok(());
    };
    if found.thread != std::thread::current().id() {
        return Err("the session belongs to another thread, which has made it".to_owned());
    }
    match found.busy.get() {
        true => Err("the session is in use: a function of the framework calls it".to_owned()),
        false => Ok(()),
    }
}

/// The session behind a pointer.
///
/// # Safety
/// As [`usable`].
pub(crate) unsafe fn entered<'a>(session: *mut RoteSession) -> Result<Entered<'a>, String> {
    // SAFETY: the caller vouches for the pointer.
    unsafe {
        usable(session)?;
        let session = &mut *session;
        let was_busy = session.busy.replace(true);
        Ok(Entered { session, was_busy })
    }
}

/// PyTorch's session while it runs kernels. A kernel may be a function of Python, which may call anything.
pub(crate) struct Running<'a> {
    pub(crate) session: &'a mut Session<Aten>,
    busy: &'a Cell<bool>,
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.busy.set(false);
    }
}

/// PyTorch's session behind a pointer, to run kernels; none if it runs some already, one of which asks for it.
///
/// # Safety
/// As [`usable`].
pub(crate) unsafe fn running<'a>(session: *mut RoteSession) -> Result<Option<Running<'a>>, String> {
    // SAFETY: the caller vouches for the pointer.
    unsafe {
        usable(session)?;
        if (*session).busy.get() {
            return Ok(None);
        }
        let (session, busy) = (torch(session)?, &(*session).busy);
        busy.set(true);
        Ok(Some(Running { session, busy }))
    }
}

/// PyTorch's session behind a pointer.
///
/// # Safety
/// As [`usable`].
pub(crate) unsafe fn torch<'a>(session: *mut RoteSession) -> Result<&'a mut Session<Aten>, String> {
    // SAFETY: the caller vouches for the pointer.
    match unsafe {
        usable(session)?;
        if (*session).busy.get() {
            return Err(IN_USE.to_owned());
        }
        &mut (*session).sessions
    } {
        Sessions::Torch(session) => Ok(session),
        Sessions::Framework(_) => {
            Err("the session is not PyTorch's: rote_session_for made it".to_owned())
        }
    }
}

/// Runs `$body` with the session of any framework.
macro_rules! with_session {
    ($pointer:expr, |$session:ident| $body:expr) => {{
        // SAFETY: the caller vouches for the pointer.
        #[allow(unused_unsafe, reason = "some callers are within an unsafe block")]
        let mut entered = unsafe { crate::session::entered($pointer)? };
        match entered.sessions() {
            crate::session::Sessions::Torch($session) => $body,
            crate::session::Sessions::Framework($session) => $body,
        }
    }};
}
pub(crate) use with_session;

/// This process, as plans know it.
pub(crate) fn process(framework: &str, world_size: u32, rank: u32) -> Fingerprint {
    Fingerprint {
        rote: env!("CARGO_PKG_VERSION").to_owned(),
        framework: framework.to_owned(),
        world_size,
        rank,
    }
}

/// What a session is made of, from what a caller passed.
pub(crate) fn config(
    function: &str,
    fingerprint: Fingerprint,
    plans: &str,
    max_variants: u32,
    passes: &str,
) -> Result<Config, String> {
    Ok(Config {
        function: function.to_owned(),
        fingerprint,
        plans: PathBuf::from(plans),
        max_variants: max_variants as usize,
        passes: chosen_passes(passes)?,
    })
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

/// Frees a session. It is an error to free a session twice, or while a call uses it.
///
/// # Safety
/// `session` must come from this library, or be null. If it is PyTorch's, the GIL must be held.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_session_free(session: *mut RoteSession) -> c_int {
    guarded(|| {
        if session.is_null() {
            return Ok(ROTE_OK);
        }
        // SAFETY: the caller vouches for the pointer.
        unsafe { usable(session)? };
        live().remove(&session.addr());
        // SAFETY: made by `made`, freed once.
        drop(unsafe { Box::from_raw(session) });
        Ok(ROTE_OK)
    })
}

/// Names the process group that is the default from now on, with its world size and this process's rank in it.
/// A null or empty name says that there is no default group. To be called before the first call of the step,
/// before `rote_session_agree_in`, and whenever the group changes.
///
/// # Safety
/// `group` must be null or a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_session_world(
    session: *mut RoteSession,
    group: *const c_char,
    world_size: u32,
    rank: u32,
) -> c_int {
    guarded(|| {
        // SAFETY: the caller vouches for the text.
        let group = unsafe { text(group)? };
        let name = CString::new(group).map_err(|error| error.to_string())?;
        let name = (!group.is_empty()).then_some(&*name);
        with_session!(session, |session| session
            .enter_world(name, world_size, rank)?);
        Ok(ROTE_OK)
    })
}

/// Names the process group that contains all ranks. To be called before the first call of the step.
///
/// If the session's passes alter collectives, the ranks of the group tell each other at every call whether they
/// replay it. `*agrees` is then 1, and every rank must make the same calls in the same order. Otherwise
/// `*agrees` is 0. It is also 0 if the group cannot exchange these messages; `rote_session_notice` then says
/// why.
///
/// # Safety
/// `group` must be a C string, and the place valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_session_agree_in(
    session: *mut RoteSession,
    group: *const c_char,
    agrees: *mut c_int,
) -> c_int {
    guarded(|| {
        // SAFETY: the caller vouches for text and place.
        let (agrees, group) = unsafe { (out(agrees, "agrees")?, text(group)?) };
        let group = CString::new(group).map_err(|error| error.to_string())?;
        agrees.set(with_session!(session, |session| session.agree_in(&group)?).into());
        Ok(ROTE_OK)
    })
}

/// Stops the session: from now on calls run eagerly, and are not recorded. `why` is listed among the refusals.
/// If ranks agree about calls, all ranks must stop at the same call.
///
/// # Safety
/// `session` must be this library's, `why` a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_session_stop(session: *mut RoteSession, why: *const c_char) -> c_int {
    guarded(|| {
        // SAFETY: the caller vouches for the text.
        let why = unsafe { text(why)? };
        with_session!(session, |session| session.stop(why));
        Ok(ROTE_OK)
    })
}

/// Runs `body`, whose text is handed out; null where there is none, or it fails.
pub(crate) fn text_or_null(
    body: impl FnOnce() -> Result<Option<String>, Box<dyn Error>>,
) -> *const c_char {
    let mut answer = std::ptr::null();
    guarded(|| {
        if let Some(text) = body()? {
            answer = give_text(&text);
        }
        Ok(ROTE_OK)
    });
    answer
}

/// Returns the instructions of a variant's recorded plan as JSON. Each has its `text`, its `source` line, the
/// roots that it `reads`, the number of its results (`outs`), and the values that it has `shown`, with their
/// roots. `counted` says whether it is a local op or a wait.
///
/// # Safety
/// `session` must be this library's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_session_program(
    session: *mut RoteSession,
    variant: u32,
) -> *const c_char {
    text_or_null(|| {
        let program = with_session!(session, |session| {
            let variant = session.variant(variant).ok_or(SessionError::NoVariant)?;
            rote::shown::program(variant)
        });
        Ok(Some(program.to_string()))
    })
}

/// Removes a variant that has not been replayed yet. To be called if the caller cannot give back its results.
///
/// # Safety
/// `session` must be this library's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_session_give_up(session: *mut RoteSession, variant: u32) -> c_int {
    guarded(|| {
        with_session!(session, |session| session.give_up(variant));
        Ok(ROTE_OK)
    })
}

/// Returns the session's counters as JSON, or null on failure.
///
/// # Safety
/// `session` must be this library's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_session_stats(session: *mut RoteSession) -> *const c_char {
    text_or_null(|| {
        let json = with_session!(session, |session| {
            let stats = session.stats();
            serde_json::json!({
                "calls": stats.calls,
                "recordings": stats.recordings,
                "replays": stats.replays,
                "altered": stats.altered,
                "kept": stats.kept,
                "exchanges": stats.exchanges,
                "fallbacks": stats.fallbacks,
                "variants": session.variants().len(),
                "guard_misses": stats.guard_misses.iter().collect::<BTreeMap<_, _>>(),
                "refusals": stats.refusals,
            })
        });
        Ok(Some(json.to_string()))
    })
}

/// Returns a warning for the user, once for each warning; null if there is none.
///
/// # Safety
/// `session` must be this library's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_session_notice(session: *mut RoteSession) -> *const c_char {
    text_or_null(|| Ok(with_session!(session, |session| session.take_notice())))
}

/// Returns a report as text, or null on failure: the erased work, the collectives and their causes, the guards,
/// the misses and the refusals.
///
/// # Safety
/// `session` must be this library's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_session_explain(session: *mut RoteSession) -> *const c_char {
    text_or_null(|| {
        Ok(Some(with_session!(session, |session| {
            rote::explain::explain(session)
        })))
    })
}

/// Returns a variant as JSON, or null if there is no such variant. The JSON has
///
/// - `key`: the key of its guards;
/// - `result`: the structure of the result (docs/plan-format.md);
/// - `outputs`: `path`, `spec` and `requires_grad` of each, in the order of a replay's results;
/// - `grads`: `path`, `spec` and `none` of each, in the same order. `none` says that `.grad` becomes `None`;
/// - `counts`: the numbers of instructions (`local`, `views`, `collectives`).
///
/// A spec has the form that `rote_record_spec` reads. It is null for a plain tensor.
///
/// # Safety
/// `session` must be this library's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_session_variant(
    session: *mut RoteSession,
    variant: u32,
) -> *const c_char {
    text_or_null(|| {
        let json = with_session!(session, |session| {
            let variant = session.variant(variant).ok_or(SessionError::NoVariant)?;
            described(variant.file.plan(), &variant.key)
        });
        Ok(Some(json.to_string()))
    })
}

fn described(plan: &ArchivedPlan, key: &str) -> serde_json::Value {
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
    serde_json::json!({
        "key": key,
        "result": serde_json::from_str::<serde_json::Value>(&plan.result).unwrap_or_default(),
        "outputs": outputs,
        "grads": grads,
        "counts": {"local": counts.local, "views": counts.views, "collectives": counts.collectives},
    })
}

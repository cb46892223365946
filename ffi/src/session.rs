//! Sessions: calls, statistics, explanations.

use std::ffi::{c_char, c_int, c_void};
use std::path::PathBuf;

use rote::plans::describe;
use rote::plans::pool::ArchivedRange;
use rote::plans::{ArchivedPlan, Fingerprint, NONE};
use rote::replay::aten::{Bridge, Object};
use rote::{Config, Next, Session};

use crate::status::{ROTE_OK, give_text, guarded, set_error, text};

/// The call was replayed.
pub const ROTE_REPLAYED: c_int = 0;
/// Run the call eagerly and record it.
pub const ROTE_RECORD: c_int = 1;
/// Run the call eagerly.
pub const ROTE_EAGER: c_int = 2;

/// One captured function. Used by one thread at a time, with the GIL held.
pub struct RoteSession {
    pub(crate) session: Session,
}

/// The session behind a pointer.
///
/// # Safety
/// `session` must come from `rote_session_new` and not be in use elsewhere.
pub(crate) unsafe fn session<'a>(session: *mut RoteSession) -> Result<&'a mut Session, String> {
    // SAFETY: the caller vouches for the pointer.
    match unsafe { session.as_mut() } {
        Some(session) => Ok(&mut session.session),
        None => Err("the session is null".to_owned()),
    }
}

/// A new session, or null on failure. `framework` names the framework and its
/// version (`torch 2.15.0`), `plans` the directory of the plan store.
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
) -> *mut RoteSession {
    let mut out = std::ptr::null_mut();
    guarded(|| -> Result<c_int, String> {
        if !Bridge::is_loaded() {
            return Err("the bridge is not loaded: call rote_load_bridge first".to_owned());
        }
        // SAFETY: the caller vouches for the texts.
        let (function, framework, plans) =
            unsafe { (text(function)?, text(framework)?, text(plans)?) };
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
        };
        let session = Session::new(config).map_err(|error| error.to_string())?;
        out = Box::into_raw(Box::new(RoteSession { session }));
        Ok(ROTE_OK)
    });
    out
}

/// Frees a session.
///
/// # Safety
/// `session` must come from `rote_session_new`, or be null, and the GIL must
/// be held.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_session_free(session: *mut RoteSession) {
    if !session.is_null() {
        guarded(|| -> Result<c_int, String> {
            // SAFETY: made by `rote_session_new`, freed once.
            drop(unsafe { Box::from_raw(session) });
            Ok(ROTE_OK)
        });
    }
}

fn deliver(next: Next, variant: *mut u32, results: *mut *mut c_void) -> c_int {
    match next {
        Next::Replayed(id, objects) => {
            let list = Bridge::get().list(objects);
            // SAFETY: the caller of the ABI passed places to write to.
            unsafe {
                *variant = id;
                *results = list;
            }
            ROTE_REPLAYED
        }
        Next::Record => ROTE_RECORD,
        Next::Eager => ROTE_EAGER,
    }
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
    guarded(|| -> Result<c_int, String> {
        // SAFETY: the caller vouches for session and objects.
        let next = unsafe { self::session(session)?.call(args, kwargs) }
            .map_err(|error| error.to_string())?;
        Ok(deliver(next, variant, results))
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
    guarded(|| -> Result<c_int, String> {
        // SAFETY: the caller vouches for the session.
        let next =
            unsafe { self::session(session)?.replay_last() }.map_err(|error| error.to_string())?;
        Ok(deliver(next, variant, results))
    })
}

/// Marks a tensor object as eager returns it after a step that went backward:
/// it requires grad, and its graph is used up.
///
/// # Safety
/// `tensor` must be a tensor object and the GIL held.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_mark_replayed(tensor: *mut c_void) -> c_int {
    guarded(|| -> Result<c_int, String> {
        // SAFETY: the caller vouches for the object.
        let tensor = unsafe { Object::hold(tensor) };
        Bridge::get()
            .mark_replayed(&tensor)
            .map_err(|error| error.to_string())?;
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

/// What a variant gives back, as JSON: the file's `path`, the structure of the
/// `result`, `outputs` and `grads` with their specs, and instruction `counts`
/// (local ops, views, collectives). Null when there is no such variant.
///
/// # Safety
/// `session` must come from `rote_session_new`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_session_variant(
    session: *mut RoteSession,
    variant: u32,
) -> *const c_char {
    // SAFETY: the caller vouches for the session.
    let found = unsafe { self::session(session) }
        .ok()
        .and_then(|session| session.variant(variant));
    let Some(variant) = found else {
        set_error("there is no such variant");
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
                "spec": spec(plan, output.spec.to_native()),
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
                "spec": spec(plan, grad.spec.to_native()),
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

/// A spec in the form that `rote_record_spec` reads, or null for a plain tensor.
fn spec(plan: &ArchivedPlan, index: u32) -> serde_json::Value {
    if index == NONE {
        return serde_json::Value::Null;
    }
    let spec = &plan.specs[index as usize];
    let mesh = &plan.meshes[spec.mesh.to_native() as usize];
    let join = |range: ArchivedRange| {
        let dims = &plan.dims[range.indices()];
        dims.iter()
            .map(|dim| dim.to_native().to_string())
            .collect::<Vec<_>>()
            .join(",")
    };
    let names: Vec<&str> = plan.ids[mesh.dim_names.indices()]
        .iter()
        .map(|id| plan.str(id.to_native()))
        .collect();
    let placements: Vec<String> = plan.placements[spec.placements.indices()]
        .iter()
        .map(|placement| describe::placement(plan, *placement).to_string())
        .collect();
    serde_json::Value::String(format!(
        "{}|{}|{}|{}|{}|{}|{}",
        plan.str(mesh.device_type.to_native()),
        join(mesh.shape),
        names.join(","),
        join(mesh.ranks),
        placements.join(";"),
        join(spec.shape),
        join(spec.strides)
    ))
}

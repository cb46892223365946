//! Sessions of a framework of function pointers: no Python

use std::ffi::{c_char, c_int};

use std::collections::HashSet;

use rote::facts::NewFact;
use rote::plans::{BindingKind, GuardKind};
use rote::recording::{ActiveRecording, NewTensor};
use rote::tracer::{OpEvent, Refusal};
use rote::{Next, Session, SessionError};
use rote_callbacks::{
    Arguments, Callbacks, DlManagedTensor, Fact, Framework, Leaf, Tensor as Held,
};
use rote_events::events;
use rote_events::op::{Op, Tensor};

use crate::record::{NO_RECORDING, ROTE_REFUSED, optional};
use crate::session::{
    ROTE_EAGER, ROTE_RECORD, ROTE_REPLAYED, RoteSession, Sessions, config, entered, made, process,
};
use crate::spec;
use crate::status::{Answer, ROTE_OK, guarded, out, set_error, slice, text};

/// The version of this ABI. `rote_abi_version` tells that of the library.
pub const ROTE_ABI_VERSION: u32 = 1;

/// Returns the version of the library's ABI. A program compares it with `ROTE_ABI_VERSION` before it calls
/// anything else. May be called from any thread.
#[unsafe(no_mangle)]
pub extern "C" fn rote_abi_version() -> u32 {
    ROTE_ABI_VERSION
}

/// A call of the captured step: its arguments, and the facts that the session guards.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct RoteCall {
    /// The arguments and the state, always in one order.
    pub leaves: *const Leaf,
    /// How many.
    pub n_leaves: u32,
    /// The values of the declared words, in the order in which they were declared.
    pub words: *const u64,
    /// How many.
    pub n_words: u32,
    /// The values of the declared numbers, likewise.
    pub numbers: *const f64,
    /// How many.
    pub n_numbers: u32,
}

/// What a replay gives back.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct RoteResults {
    /// The variant that was replayed.
    pub variant: u32,
    /// How many tensors there are: outputs in the order in which they were recorded, then gradients.
    pub n: u32,
    /// The tensors. The list lives until the session's next call. Each tensor is the caller's, who calls its deleter
    /// once, on the thread of the session. A result that is a leaf of the call has the leaf's memory.
    pub tensors: *const *mut DlManagedTensor,
}

/// Makes a session of a framework; returns null on failure. The table is copied. `name` names the framework and
/// its version: the session does not use plans of another name. The other arguments are those of
/// `rote_session_new`:
///
/// - `function` names the captured step;
/// - `plans` is the directory of the plan store;
/// - `max_variants` is the largest number of variants that are kept;
/// - `passes` chooses the passes: `all`, `none`, `default`, or names separated by commas, with `-` before names
///   to leave out. Null or empty stands for the environment variable ROTE_PASSES, or for the default.
///
/// The session belongs to the thread that makes it. A call from another thread is an error.
///
/// # Safety
/// The table's functions must have their declared types. They must stay callable until the session is freed and
/// its last tensor is deleted. Texts must be C strings.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_session_for(
    framework: *const Framework,
    function: *const c_char,
    name: *const c_char,
    world_size: u32,
    rank: u32,
    plans: *const c_char,
    max_variants: u32,
    passes: *const c_char,
) -> *mut RoteSession {
    let mut session = std::ptr::null_mut();
    guarded(|| {
        if framework.is_null() {
            return Err("`framework` is null".into());
        }
        // SAFETY: the caller vouches for table and texts. The size is read first: an older table is shorter.
        let (framework, function, name, plans, passes) = unsafe {
            let size = (&raw const (*framework).size).read();
            if let Some(problem) = Framework::size_problem(size) {
                return Err(problem.into());
            }
            (
                *framework,
                text(function)?,
                text(name)?,
                text(plans)?,
                text(passes)?,
            )
        };
        if let Some(problem) = framework.problem() {
            return Err(problem.into());
        }
        if rank >= world_size {
            return Err(format!("rank {rank} is not below the world size, {world_size}").into());
        }
        let process = process(name, world_size, rank);
        let config = config(function, process, plans, max_variants, passes)?;
        let made_session = Session::new(config, Callbacks::new(framework))?;
        session = made(Sessions::Framework(Box::new(made_session)));
        Ok(ROTE_OK)
    });
    session
}

/// Runs `body` on the session of a framework.
///
/// # Safety
/// As [`entered`].
unsafe fn with(
    session: *mut RoteSession,
    body: impl FnOnce(&mut Session<Callbacks>, &mut Vec<*mut DlManagedTensor>) -> Answer,
) -> c_int {
    guarded(|| {
        // SAFETY: the caller vouches for the pointer.
        let mut entered = unsafe { entered(session)? };
        let (session, results) = entered.framework()?;
        body(session, results)
    })
}

/// Declares a fact. Every call of the step then tells its value. `kind` is a kind of guard (`ROTE_GUARD_HOST`,
/// ...). Facts are declared before the first call, on the session's thread.
///
/// If `number` is 0, the fact is a word. A word stands for a value that must not change, and must mean the same
/// in every process. Otherwise the fact is a number, which a plan may follow (`rote_record_float`). A plan
/// follows the number once two recordings have seen different values of it. Before that, another value costs a
/// recording.
///
/// # Safety
/// `session` must be this library's, `name` a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_session_fact(
    session: *mut RoteSession,
    kind: u32,
    name: *const c_char,
    number: c_int,
) -> c_int {
    // SAFETY: the caller vouches for session and text.
    unsafe {
        with(session, |session, _| {
            let fact = Fact {
                kind: GuardKind::try_from(kind)?,
                name: text(name)?.to_owned(),
                number: number != 0,
            };
            session.frontend_mut().declare(fact)?;
            Ok(ROTE_OK)
        })
    }
}

fn deliver(
    next: Next<Vec<Held>>,
    kept: &mut Vec<*mut DlManagedTensor>,
    place: *mut RoteResults,
) -> Answer {
    // SAFETY: the caller of the function that is answered vouches for the place.
    let place = unsafe { out(place, "results")? };
    kept.clear();
    let (variant, status) = match next {
        Next::Replayed(variant, tensors) => {
            kept.extend(tensors.into_iter().map(Held::into_raw));
            (variant, ROTE_REPLAYED)
        }
        Next::Record => (0, ROTE_RECORD),
        Next::Eager => (0, ROTE_EAGER),
    };
    place.set(RoteResults {
        variant,
        n: kept.len() as u32,
        tensors: kept.as_ptr(),
    });
    Ok(status)
}

/// Handles a call of the step, on the session's thread. Returns
///
/// - `ROTE_REPLAYED`: the step is done, and `*results` is set;
/// - `ROTE_RECORD`: run the step between `rote_record_call` and `rote_record_finish`;
/// - `ROTE_EAGER`: run the step as usual.
///
/// # Safety
/// `call` and everything that it points at must be live until the session's next call, or until the recording
/// of this call ends. `results` must be valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_session_step(
    session: *mut RoteSession,
    call: *const RoteCall,
    results: *mut RoteResults,
) -> c_int {
    // SAFETY: the caller vouches for session, call and place.
    unsafe {
        with(session, |session, kept| {
            let call = call.as_ref().ok_or("`call` is null")?;
            let leaves = slice(call.leaves, call.n_leaves)?;
            let words = slice(call.words, call.n_words)?;
            let arguments = Arguments::new(leaves, words, slice(call.numbers, call.n_numbers)?);
            out(results, "results")?;
            let next = session.call(arguments)?;
            if let Some(problem) = session.frontend_mut().take_problem() {
                return Err(problem.into()); // the call runs eagerly, but it is wrong
            }
            deliver(next, kept, results)
        })
    }
}

/// Replays the last call with the plan that `rote_record_trust` has bound. To be called on the session's
/// thread.
///
/// # Safety
/// As `rote_session_step`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_session_step_again(
    session: *mut RoteSession,
    results: *mut RoteResults,
) -> c_int {
    // SAFETY: the caller vouches for session and place.
    unsafe {
        with(session, |session, kept| {
            out(results, "results")?;
            if !session.take_trusted() {
                return Err("`rote_record_trust` has bound no plan for the last call".into());
            }
            deliver(session.replay_last()?, kept, results)
        })
    }
}

/// Begins to record the call that was last passed to `rote_session_step`, on the session's thread. It names and
/// guards the leaves of the call, and guards its facts. The next calls are
///
/// - `rote_record_float` for each number that the plan may follow, then `rote_record_ready`, perhaps
///   `rote_record_trust`;
/// - the step, with `rote_record_ran` after each op;
/// - `rote_record_group` for the process groups of its collectives;
/// - `rote_record_returned` and `rote_record_gradient` for its results;
/// - `rote_record_finish`, or `rote_record_abort` if the step fails.
///
/// # Safety
/// `session` must be this library's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_record_call(session: *mut RoteSession) -> c_int {
    // SAFETY: the caller vouches for the session.
    unsafe { with(session, |session, _| record_call(session)) }
}

fn record_call(session: &mut Session<Callbacks>) -> Answer {
    session.begin()?;
    let begun = name_all(session);
    if begun.is_err() {
        session.abort();
    }
    begun
}

fn name_all(session: &mut Session<Callbacks>) -> Answer {
    let (frontend, recording) = session.active().ok_or(NO_RECORDING)?;
    let leaves = frontend.named();
    let mut names = HashSet::new();
    if let Some(twice) = leaves.iter().find(|leaf| !names.insert(leaf.name.as_str())) {
        return Err(format!(
            "two leaves are named {}: give each leaf a name of its own (leaf N without a name is called args[N])",
            twice.name
        )
        .into());
    }
    let count = leaves.len().to_string();
    recording.guard(GuardKind::Structure, "number of arguments", &count);
    for (at, leaf) in (0..).zip(&leaves) {
        let (kind, guard) = match leaf.state {
            true => (BindingKind::State, GuardKind::State),
            false => (BindingKind::Arg, GuardKind::Argument),
        };
        let expected = match &leaf.spec {
            Some(spec) => format!("{} of {spec}", leaf.shown),
            None => leaf.shown.clone(),
        };
        recording.guard(guard, &leaf.name, &expected);
        recording.leaves.push(leaf.name.clone());
        let Some(tensor) = &leaf.tensor else { continue };
        let spec = match leaf.spec.as_deref() {
            Some(spec) => Some(recording.spec(spec::parse(spec)?)),
            None => None,
        };
        let new = NewTensor {
            kind,
            path: &leaf.name,
            spec,
            leaf: (!leaf.state).then_some(at),
        };
        recording.name_tensor(frontend, new, tensor, tensor)?;
    }
    let (mut words, mut numbers) = (0, 0);
    for (fact, shown) in frontend.facts_in_words() {
        let place = if fact.number {
            &mut numbers
        } else {
            &mut words
        };
        let at = std::mem::replace(place, *place + 1);
        let new = NewFact {
            kind: fact.kind,
            subject: &fact.name,
            text: &shown,
            hyperparameter: fact.number,
            gradient: false,
            names: false,
            parts: &[],
        };
        recording
            .facts
            .add(new, |facts| Ok(facts.add(at, fact.number)))?;
    }
    Ok(ROTE_OK)
}

/// Records an op that has run on plain local tensors. Returns `ROTE_REFUSED` if the recording is refused; the
/// last error is then the reason. To be called on the session's thread.
///
/// # Safety
/// The op and everything that it points at must be live. `source` must be null or a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_record_ran(
    session: *mut RoteSession,
    op: *const Op,
    source: *const c_char,
) -> c_int {
    // SAFETY: the caller vouches for session, op and text.
    unsafe {
        with(session, |session, _| {
            let (op, source) = (op.as_ref().ok_or("`op` is null")?, text(source)?);
            let (frontend, recording) = ready(session)?;
            let problem = match events::op_problem(op) {
                None => unwritten(&events::op(op, source)),
                problem => problem,
            };
            if let Some(problem) = problem {
                // A plan without the op would be another step.
                let remedy = "report the op as `rote.h` describes it";
                let reason = format!("reported an op wrongly: {problem}");
                recording.refuse(Refusal::op("", source, reason, remedy));
                return Err(problem.into());
            }
            recording.op(frontend, |_| Ok(events::op(op, source)))?;
            Ok(match recording.refusal() {
                Some(refusal) => {
                    set_error(&refusal.to_string());
                    ROTE_REFUSED
                }
                None => ROTE_OK,
            })
        })
    }
}

/// What is wrong with an in-place op of ATen of which no argument is told as written.
fn unwritten(op: &OpEvent<'_>) -> Option<String> {
    let in_place =
        op.name.starts_with("aten::") && op.name.ends_with('_') && !op.name.ends_with("__");
    let declared = op.args.iter().any(|arg| arg.written);
    (in_place && !declared).then(|| {
        format!(
            "{} writes its first argument: set `written` of the argument",
            op.name
        )
    })
}

/// The recording in progress, once its step may run.
fn ready(
    session: &mut Session<Callbacks>,
) -> Result<(&Callbacks, &mut ActiveRecording<Callbacks>), SessionError> {
    let is_ready = session.is_ready();
    let active = session.active().ok_or(SessionError::NoRecording)?;
    match is_ready {
        true => Ok(active),
        false => Err(SessionError::NotReady),
    }
}

/// A tensor that a caller described as the step has left it.
///
/// # Safety
/// It must be null, or live with all that it points at.
unsafe fn shown(tensor: *const Tensor, path: &str) -> Result<Held, String> {
    // SAFETY: the caller vouches for the description.
    unsafe {
        let tensor = tensor
            .as_ref()
            .ok_or_else(|| format!("the tensor {path} is null"))?;
        match events::tensor_problem(tensor) {
            Some(problem) => Err(format!("the tensor {path} {problem}")),
            None => Ok(Held::described_as(&events::tensor(tensor))),
        }
    }
}

/// Names a tensor that the step returns. To be called on the session's thread, in the order of the results.
/// `spec` is the number of the tensor's spec, or `ROTE_NO_INDEX`.
///
/// # Safety
/// The tensor and everything that it points at must be live. `path` must be a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_record_returned(
    session: *mut RoteSession,
    path: *const c_char,
    tensor: *const Tensor,
    spec: u32,
) -> c_int {
    // SAFETY: the caller vouches for session, tensor and text.
    unsafe {
        with(session, |session, _| {
            let path = text(path)?;
            let tensor = shown(tensor, path)?;
            let (_, recording) = ready(session)?;
            recording.output(path, &tensor, optional(spec), false)?;
            Ok(ROTE_OK)
        })
    }
}

/// Says that the step left a new gradient for the leaf at `path`, or no gradient if `tensor` is null. A replay
/// gives gradients back after its outputs. To be called on the session's thread.
///
/// # Safety
/// As `rote_record_returned`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_record_gradient(
    session: *mut RoteSession,
    path: *const c_char,
    tensor: *const Tensor,
    spec: u32,
) -> c_int {
    // SAFETY: the caller vouches for session, tensor and text.
    unsafe {
        with(session, |session, _| {
            let path = text(path)?;
            let tensor = match tensor.is_null() {
                true => None,
                false => Some(shown(tensor, path)?),
            };
            let (_, recording) = ready(session)?;
            if !recording.leaves.iter().any(|leaf| leaf == path) {
                return Err(format!("no leaf has the name {path}").into());
            }
            recording.grad(path, tensor.as_ref(), optional(spec))?;
            Ok(ROTE_OK)
        })
    }
}

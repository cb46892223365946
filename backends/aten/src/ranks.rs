//! The ranks of a process group, and exchanges of bytes among them.

use std::ffi::{CStr, CString, c_int, c_void};

use rote_replay::ReplayError;
use rote_replay::agreement::Ranks;

use crate::bridge::Bridge;

/// A process group of this process.
#[derive(Clone, Debug)]
pub struct Group {
    name: CString,
    /// Its number, which no other group ever has.
    pub number: u64,
    /// How many ranks it has.
    pub ranks: usize,
    /// Whether it has a backend for tensors on the CPU.
    pub cpu: bool,
}

impl Group {
    /// The group registered under a name, if there is one now.
    ///
    /// # Errors
    ///
    /// [`ReplayError::Bridge`] when PyTorch fails.
    pub fn find(name: &CStr) -> Result<Option<Self>, ReplayError> {
        let bridge = Bridge::get();
        let (mut number, mut ranks, mut cpu) = (0, 0, 0);
        // SAFETY: a C string; writes three numbers.
        bridge.check(unsafe {
            (bridge.functions().group)(name.as_ptr(), &mut number, &mut ranks, &mut cpu)
        })?;
        Ok((ranks > 0).then(|| Group {
            name: name.to_owned(),
            number,
            ranks: ranks as usize,
            cpu: cpu != 0,
        }))
    }
}

impl Ranks for Group {
    fn number(&self) -> u64 {
        self.number
    }

    fn why_silent(&self) -> Option<&'static str> {
        (!self.cpu).then_some(
            "the ranks agree through the CPU, and the default process group has no backend for the CPU; \
             init_process_group(\"cpu:gloo,cuda:nccl\") makes a group with one",
        )
    }

    fn gather(&self, ours: &[u8]) -> Result<Vec<u8>, ReplayError> {
        let mut all = vec![0; ours.len() * self.ranks];
        let bridge = Bridge::get();
        // SAFETY: pointer and length of a slice, and as many bytes for each rank
        // of the group with this number; the bridge takes no other group.
        bridge.check(unsafe {
            (bridge.functions().gather)(
                self.name.as_ptr(),
                self.number,
                ours.as_ptr(),
                ours.len() as u64,
                all.as_mut_ptr(),
            )
        })?;
        Ok(all)
    }
}

/// Lets the checks that this thread's replays run tell each other their outcomes over a group, or none.
///
/// # Errors
///
/// [`ReplayError::Bridge`] when the group is gone.
pub(crate) fn compare_checks(group: Option<&Group>) -> Result<(), ReplayError> {
    let bridge = Bridge::get();
    let (name, number) = group.map_or((std::ptr::null(), 0), |g| (g.name.as_ptr(), g.number));
    // SAFETY: a C string or null.
    bridge.check(unsafe { (bridge.functions().compare_checks)(name, number) })
}

/// What the last check of this thread that has ended a replay has found in place of the recorded answer, if it was this
/// rank's own.
pub(crate) fn found_answer() -> Option<Vec<i64>> {
    let mut n = 0;
    // SAFETY: the number is there for the call.
    let found = unsafe { (Bridge::get().functions().found_answer)(&raw mut n) };
    // SAFETY: so many integers of this thread's, which stay until its next check.
    (!found.is_null()).then(|| unsafe { std::slice::from_raw_parts(found, n as usize) }.to_vec())
}

/// Calls `body` with the GIL released.
///
/// # Errors
///
/// [`ReplayError::Bridge`] when the GIL cannot be released.
pub fn without_gil<T>(body: impl FnOnce() -> T) -> Result<T, ReplayError> {
    struct Context<F, T> {
        body: Option<F>,
        result: Option<T>,
    }
    /// # Safety
    /// `context` must be the `Context<F, T>` below, used by nobody else.
    unsafe extern "C" fn run<F: FnOnce() -> T, T>(context: *mut c_void) -> c_int {
        // SAFETY: the context below, which outlives the call.
        let context = unsafe { &mut *context.cast::<Context<F, T>>() };
        context.result = context.body.take().map(|body| body());
        0
    }
    fn function<F: FnOnce() -> T, T>(
        _: &Context<F, T>,
    ) -> unsafe extern "C" fn(*mut c_void) -> c_int {
        run::<F, T>
    }
    let bridge = Bridge::get();
    let mut context = Context {
        body: Some(body),
        result: None,
    };
    let run = function(&context);
    // SAFETY: `run` takes the context by this type. A panic in it ends the
    // process, as it would leave a C function.
    let status = unsafe { (bridge.functions().without_gil)(run, (&raw mut context).cast()) };
    bridge.check(status)?;
    context
        .result
        .ok_or_else(|| ReplayError::Bridge("the bridge did not call back".to_owned()))
}

//! Plans made wrong, for tests. No header declares this, and the shipped library has none of it.

use std::ffi::{c_char, c_int};

use rote::faults::Fault;

use crate::session::{RoteSession, with_session};
use crate::status::{guarded, text};

/// Makes a variant wrong at an instruction of its recorded plan. `fault` is `number`, `swap`, `drop`, `offset`,
/// `reduce`, `stale` or the name of another op. If `bound` is not 0, what passes have made of the plan is wrong.
/// Returns 0, or 1 if the instruction cannot have this fault.
///
/// # Safety
/// `session` must be this library's, `fault` a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_session_plant(
    session: *mut RoteSession,
    variant: u32,
    instr: u32,
    bound: c_int,
    fault: *const c_char,
) -> c_int {
    guarded(|| {
        // SAFETY: the caller vouches for the text.
        let fault = Fault::parse(unsafe { text(fault)? });
        let (instr, bound) = (instr as usize, bound != 0);
        let done = with_session!(session, |session| fault
            .plant(session, variant, instr, bound)?);
        Ok(c_int::from(!done))
    })
}

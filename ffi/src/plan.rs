//! Opening and describing plan files.

use std::ffi::{c_char, c_int};

use rote::plans::PlanFile;

use crate::status::{ROTE_OK, guarded, text};

/// Checks a plan file. Returns 0 if the file is whole and consistent.
///
/// # Safety
/// `path` must be a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_plan_check(path: *const c_char) -> c_int {
    guarded(|| {
        // SAFETY: the caller vouches for the text.
        let path = unsafe { text(path)? };
        PlanFile::open(path)?;
        Ok(ROTE_OK)
    })
}

//! The truth table of sharding rules.

use std::ffi::{c_char, c_int, c_void};

use rote::validation::answer;
use rote_aten::Bridge;
use rote_aten::kernels::Aten;

use crate::status::{ROTE_OK, c_string, guarded, text};

/// Takes a line of a report, and what the caller gave for it.
pub type RoteReportCallback =
    Option<unsafe extern "C" fn(context: *mut c_void, line: *const c_char)>;

/// Judges sharding rules by running local ops on pieces, with PyTorch's kernels:
/// the bridge must be loaded. `request` is a JSON object: `ops` (names, or
/// `all`), `mesh` (`2`, or `2,2`), `args` (of one op, as the samples write
/// them), `only` (one combination, `S(0),R -> S(0)`), `missing` (false: look for
/// wrong rules only). `report` is called with JSON objects: `{"start": op,
/// "number": 1, "total": 2}` before each op, its truth table after it.
///
/// # Safety
/// `request` must be a C string; `report` must not unwind; the GIL must be held.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_validate(
    request: *const c_char,
    report: RoteReportCallback,
    context: *mut c_void,
) -> c_int {
    guarded(|| {
        // SAFETY: the caller vouches for the text.
        let request = unsafe { text(request)? };
        let report = report.ok_or("`report` is null")?;
        if !Bridge::is_loaded() {
            return Err("the bridge to PyTorch is not loaded".into());
        }
        answer(request, &mut Aten, &mut |line| {
            let line = c_string(line);
            // SAFETY: the caller vouches for the callback; the text outlives it.
            unsafe { report(context, line.as_ptr()) };
        })?;
        Ok(ROTE_OK)
    })
}

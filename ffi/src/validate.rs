//! The truth table of sharding rules.

use std::ffi::{c_char, c_int, c_void};

use rote::validation::answer;
use rote_aten::Bridge;
use rote_aten::kernels::Aten;

use crate::question::{RoteRuleCallback, asking};
use crate::status::{ROTE_OK, c_string, guarded, text};

/// Takes a line of a report, and the `context` that the caller passed.
pub type RoteReportCallback =
    Option<unsafe extern "C" fn(context: *mut c_void, line: *const c_char)>;

/// Judges sharding rules by running local ops on pieces, with PyTorch's kernels. The bridge must be loaded.
/// `request` is a JSON object:
///
/// - `ops`: names of ops, or `all`;
/// - `mesh`: ranks per mesh dim (`2`, or `2,2`);
/// - `args`: arguments of one op, in the notation of the samples;
/// - `only`: one combination (`S(0),R -> S(0)`);
/// - `placements`: placements of registered kinds (`["RaggedShard(0,1,3)", "P(LogSumExp)"]`) by which placeholders are
///   filled, too;
/// - `missing`: false looks for wrong rules only;
/// - `own`: names of ops whose rule `rule` states, in the place of Rote's.
///
/// `rule` may be null if the request has no `own`.
///
/// `report` gets JSON objects: before each op `{"start": op, "number": 1, "total": 2}`, and after it the op's
/// truth table.
///
/// # Safety
/// `request` must be a C string; `report` and `rule` must not unwind; the GIL must be held.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_validate(
    request: *const c_char,
    report: RoteReportCallback,
    rule: RoteRuleCallback,
    context: *mut c_void,
) -> c_int {
    guarded(|| {
        // SAFETY: the caller vouches for the text.
        let request = unsafe { text(request)? };
        let report = report.ok_or("`report` is null")?;
        if !Bridge::is_loaded() {
            return Err("the bridge to PyTorch is not loaded".into());
        }
        // SAFETY: the caller vouches for the callback.
        let ask = unsafe { asking(rule, context) };
        answer(request, &mut Aten, ask, &mut |line| {
            let line = c_string(line);
            // SAFETY: the caller vouches for the callback; the text outlives it.
            unsafe { report(context, line.as_ptr()) };
        })?;
        Ok(ROTE_OK)
    })
}

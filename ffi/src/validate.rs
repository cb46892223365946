//! The truth table of sharding rules.

use std::ffi::{c_char, c_int, c_void};
use std::sync::Arc;
use std::sync::atomic::{AtomicPtr, Ordering};

use rote::own_rules::Ask;
use rote::validation::answer;
use rote_aten::Bridge;
use rote_aten::kernels::Aten;

use crate::status::{ROTE_OK, c_string, guarded, text};

/// Takes a line of a report, and the `context` that the caller passed.
pub type RoteReportCallback =
    Option<unsafe extern "C" fn(context: *mut c_void, line: *const c_char)>;

/// States the rule of an op, as JSON that lives until the next call: takes a question as JSON, and the `context` that the
/// caller passed.
pub type RoteRuleCallback =
    Option<unsafe extern "C" fn(context: *mut c_void, question: *const c_char) -> *const c_char>;

/// Judges sharding rules by running local ops on pieces, with PyTorch's kernels. The bridge must be loaded.
/// `request` is a JSON object:
///
/// - `ops`: names of ops, or `all`;
/// - `mesh`: ranks per mesh dim (`2`, or `2,2`);
/// - `args`: arguments of one op, in the notation of the samples;
/// - `only`: one combination (`S(0),R -> S(0)`);
/// - `missing`: false looks for wrong rules only;
/// - `own`: names of ops whose rule `rule` states, in the place of Rote's.
///
/// `rule` may be null if the request has no `own`. It gets `{"op": op, "args": [...]}`, where a tensor is
/// `{"tensor": "f64[8,4]"}`, a list of tensors `{"tensors": [...]}`, a float `{"float": "0.5"}` and a dtype
/// `{"dtype": "f32"}`. It returns `{"outputs": ["f64[8,4]"], "strategies": [[0, 0], ["P(sum)", "P(sum)"]],
/// "written": []}`: the results, strategies on one mesh dim (results, then tensor inputs; a number is a shard of this dim,
/// plain or strided), and the tensor inputs that the op writes, as pairs of input and result, or null. Or it returns
/// `{"error": "..."}`.
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
        let asked_with = AtomicPtr::new(context);
        let ask = rule.map(|rule| -> Arc<Ask> {
            Arc::new(move |question| {
                let question = c_string(question);
                // SAFETY: the caller vouches for the callback and its answer; the question outlives it.
                let answer =
                    unsafe { text(rule(asked_with.load(Ordering::Relaxed), question.as_ptr())) };
                answer.map(str::to_owned)
            })
        });
        answer(request, &mut Aten, ask, &mut |line| {
            let line = c_string(line);
            // SAFETY: the caller vouches for the callback; the text outlives it.
            unsafe { report(context, line.as_ptr()) };
        })?;
        Ok(ROTE_OK)
    })
}

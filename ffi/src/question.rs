//! Questions to propagation in JSON, and the rules that scripts state in JSON.

use std::ffi::{c_char, c_int, c_void};
use std::sync::Arc;
use std::sync::atomic::{AtomicPtr, Ordering};

use rote::own_rules::Ask;
use rote::question::answer;

use crate::session::text_or_null;
use crate::status::{c_string, text};

/// States the rule of an op, as JSON that lives until the next call: takes a question as JSON, and the `context` that the
/// caller passed.
///
/// The question is `{"op": op, "args": [...]}`, where a tensor is `{"tensor": "f64[8,4]"}`, a list of tensors
/// `{"tensors": [...]}`, a float `{"float": "0.5"}` and a dtype `{"dtype": "f32"}`. The answer is `{"outputs":
/// ["f64[8,4]"], "strategies": [[0, 0], ["P(sum)", "P(sum)"]], "written": []}`: the results, strategies on one mesh dim
/// (results, then tensor inputs; a number is a shard of this dim, plain or strided), and the tensor inputs that the op
/// writes, as pairs of input and result, or null. Or it is `{"error": "..."}`.
pub type RoteRuleCallback =
    Option<unsafe extern "C" fn(context: *mut c_void, question: *const c_char) -> *const c_char>;

/// Answers how an op runs on distributed tensors, as JSON; null on failure. `question` is a JSON object:
///
/// - `op`: such as `aten::mm`;
/// - `mesh`: such as `dp=8,tp=2`;
/// - `args`: the arguments in the notation of `rote propagate`;
/// - `links`: `[[us per hop, GiB/s], ...]`, one for each mesh dim;
/// - `coordinate`: the rank whose local shapes are told, the first one by default;
/// - `why`: true tells the reasons, too;
/// - `all`: true tells all candidates, cheapest first;
/// - `own`: names of ops whose rule `rule` states, in the place of Rote's.
///
/// `strict` other than 0 makes it an error if a partial has to be reduced before the op. `rule` may be null if the question
/// has no `own`. The answer is that of `rote propagate --json` (docs/propagation.md).
///
/// # Safety
/// `question` must be a C string; `rule` must not unwind.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_propagate_json(
    question: *const c_char,
    strict: c_int,
    rule: RoteRuleCallback,
    context: *mut c_void,
) -> *const c_char {
    text_or_null(|| {
        // SAFETY: the caller vouches for the text and the callback.
        let (question, ask) = unsafe { (text(question)?, asking(rule, context)) };
        Ok(Some(answer(question, strict != 0, ask)?.to_string()))
    })
}

/// The callback as a function of Rust.
///
/// # Safety
/// The callback must answer with null or a C string that lives until its next call, and must not unwind.
pub(crate) unsafe fn asking(rule: RoteRuleCallback, context: *mut c_void) -> Option<Arc<Ask>> {
    let context = AtomicPtr::new(context);
    rule.map(|rule| -> Arc<Ask> {
        Arc::new(move |question| {
            let question = c_string(question);
            // SAFETY: the caller vouches for the callback and its answer; the question outlives it.
            let answer = unsafe { text(rule(context.load(Ordering::Relaxed), question.as_ptr())) };
            answer.map(str::to_owned)
        })
    })
}

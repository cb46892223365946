//! Shardings that scripts register, whose pieces a callback lists.

use std::ffi::{c_char, c_int, c_void};
use std::sync::Arc;

use rote::own_rules::Ask;
use rote::propagation::{Run, Runs, ShardingId, Splits, forget_family, register_family};
use serde_json::{Value as Json, json};

use crate::question::asking;
use crate::status::{ROTE_OK, guarded, out, text};

/// Says what the ranks hold by a sharding, as JSON that lives until the next call: takes a question as JSON, and the
/// `context` that the caller passed.
///
/// The question is `{"parameters": "1,3", "size": 8, "ranks": 2}`. The answer is `{"ranks": [[[0, 1, 2]], [[2, 1, 6]]]}`:
/// for each rank the indices that it holds, in local order, as ranges `[start, step, count]`. Or it is `{"unfit": true}`
/// where no tensor can lie so, or `{"error": "..."}`. Or the question is `{"op": op, "base": base}`, and the answer
/// `{"fills": true}` if shards of this kind may fill the rule of `base`, which answers for `op`.
pub type RoteShardingCallback =
    Option<unsafe extern "C" fn(context: *mut c_void, question: *const c_char) -> *const c_char>;

/// Makes shardings of a name known, which have parameters: they are written as `RaggedShard(0,1,3)`, the tensor dim and
/// then the parameters. The name is a letter, then letters and digits. It is an error if the name is taken.
///
/// # Safety
/// `name` must be a C string. `callback` must not unwind, and must live with `context` until `rote_forget_shardings`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_register_shardings(
    name: *const c_char,
    callback: RoteShardingCallback,
    context: *mut c_void,
) -> c_int {
    guarded(|| {
        // SAFETY: the caller vouches for the text and the callback.
        let (name, ask) = unsafe { (text(name)?, asking(callback, context)) };
        let ask = ask.ok_or("`callback` is null")?;
        register_family(name, Listed { ask })?;
        Ok(ROTE_OK)
    })
}

/// Forgets the shardings of a name. It is an error if there are none.
///
/// # Safety
/// `name` must be a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_forget_shardings(name: *const c_char) -> c_int {
    guarded(|| {
        // SAFETY: the caller vouches for the text.
        let name = unsafe { text(name)? };
        match forget_family(name) {
            true => Ok(ROTE_OK),
            false => Err(format!("no shardings {name} are registered").into()),
        }
    })
}

/// The number of a sharding of a registered name, for `split_factor` of a `ROTE_REGISTERED_SHARD`. `parameters` are digits,
/// commas, signs and brackets. `number` becomes the same for the same parameters.
///
/// # Safety
/// `name` and `parameters` must be C strings, `number` valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_sharding(
    name: *const c_char,
    parameters: *const c_char,
    number: *mut u32,
) -> c_int {
    guarded(|| {
        // SAFETY: the caller vouches for all. No parameters are an empty text.
        let (name, parameters, number) =
            unsafe { (text(name)?, text(parameters)?, out(number, "number")?) };
        let found = ShardingId::named(name, Some(parameters));
        let found = found.ok_or_else(|| {
            format!("no sharding {name} with parameters {parameters:?} is registered")
        })?;
        number.set(found.number());
        Ok(ROTE_OK)
    })
}

/// A family whose pieces a callback lists.
struct Listed {
    ask: Arc<Ask>,
}

impl Listed {
    fn asked(&self, question: &Json) -> Result<Json, String> {
        let answer: Json = serde_json::from_str(&(self.ask)(&question.to_string())?)
            .map_err(|error| error.to_string())?;
        match answer.get("error").and_then(Json::as_str) {
            Some(error) => Err(error.to_owned()),
            None => Ok(answer),
        }
    }
}

impl Splits for Listed {
    fn runs(&self, parameters: &str, size: u64, ranks: u64) -> Result<Option<Runs>, String> {
        let question = json!({"parameters": parameters, "size": size, "ranks": ranks});
        let answer = self.asked(&question)?;
        if answer.get("unfit").and_then(Json::as_bool) == Some(true) {
            return Ok(None);
        }
        let run = |run: &Json| {
            Some(Run {
                start: run.get(0)?.as_u64()?,
                step: run.get(1)?.as_i64()?,
                count: run.get(2)?.as_u64()?,
            })
        };
        let ranks = answer.get("ranks").and_then(Json::as_array);
        let runs = ranks.and_then(|ranks| {
            (ranks.iter())
                .map(|runs| runs.as_array()?.iter().map(run).collect())
                .collect::<Option<Runs>>()
        });
        runs.map(Some)
            .ok_or_else(|| format!("the answer cannot be read: {:.200}", answer.to_string()))
    }

    fn fills(&self, base: &str, op: &str) -> Result<bool, String> {
        let answer = self.asked(&json!({"base": base, "op": op}))?;
        let fills = answer.get("fills").and_then(Json::as_bool);
        fills.ok_or_else(|| format!("the answer cannot be read: {:.200}", answer.to_string()))
    }
}

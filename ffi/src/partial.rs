//! Partials that scripts register.

use std::ffi::{c_char, c_int, c_void};
use std::sync::atomic::{AtomicPtr, Ordering};

use rote::plans::ReduceOp;
use rote::propagation::{Combine, PartialId, forget_partials, register_partials};

use crate::status::{ROTE_OK, c_string, guarded, out, text};

/// Combines what the ranks of a mesh dim hold of a partial, element by element, and in whichever order they come. Takes the
/// partial's parameters (`2`), `count` numbers of each of `ranks` ranks, one rank after the other, and where to write `count`
/// numbers. Returns null, or what is wrong, as a C string that lives until the next call.
pub type RoteCombineCallback = Option<
    unsafe extern "C" fn(
        context: *mut c_void,
        parameters: *const c_char,
        parts: *const f64,
        ranks: u32,
        count: u64,
        combined: *mut f64,
    ) -> *const c_char,
>;

/// Makes partials of a name known, which have parameters: they are written as `P(LogSumExp)` and `P(LogSumExp,2)`. To reduce
/// one costs as much as `reduction` (`ROTE_SUM`, ...). The name is a letter, then letters and digits. It is an error if the
/// name is taken. `rote_validate` can judge what passes them if `combine` is not null.
///
/// # Safety
/// `name` must be a C string. `combine` must not unwind, and must live with `context` until the process ends.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_register_partials(
    name: *const c_char,
    reduction: u8,
    combine: RoteCombineCallback,
    context: *mut c_void,
) -> c_int {
    guarded(|| {
        // SAFETY: the caller vouches for the text and the callback.
        let (name, combine) = unsafe { (text(name)?, combining(combine, context)) };
        let reduction = ReduceOp::ALL.get(usize::from(reduction)).copied();
        let reduction = reduction.ok_or("`reduction` is not the number of a reduction")?;
        register_partials(name, reduction, combine)?;
        Ok(ROTE_OK)
    })
}

/// The callback as a function of Rust.
///
/// # Safety
/// The callback must write all that it is asked for, answer with null or a C string that lives until its next call, and must
/// not unwind.
unsafe fn combining(combine: RoteCombineCallback, context: *mut c_void) -> Option<Box<Combine>> {
    let context = AtomicPtr::new(context);
    combine.map(|combine| -> Box<Combine> {
        Box::new(move |parameters, parts| {
            let count = parts.first().map_or(0, |part| part.len());
            let (parameters, flat) = (c_string(parameters), parts.concat());
            let mut combined = vec![0.0; count];
            // SAFETY: the caller vouches for the callback; what it reads and writes outlives it.
            let wrong = unsafe {
                combine(
                    context.load(Ordering::Relaxed),
                    parameters.as_ptr(),
                    flat.as_ptr(),
                    parts.len() as u32,
                    count as u64,
                    combined.as_mut_ptr(),
                )
            };
            if wrong.is_null() {
                return Ok(combined);
            }
            // SAFETY: the caller vouches for the text.
            Err(unsafe { text(wrong) }?.to_owned())
        })
    })
}

/// Forgets the partials of a name. It is an error if there are none.
///
/// # Safety
/// `name` must be a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_forget_partials(name: *const c_char) -> c_int {
    guarded(|| {
        // SAFETY: the caller vouches for the text.
        let name = unsafe { text(name)? };
        match forget_partials(name) {
            true => Ok(ROTE_OK),
            false => Err(format!("no partials {name} are registered").into()),
        }
    })
}

/// The number of a partial of a registered name, for `split_factor` of a `ROTE_REGISTERED_PARTIAL`. `parameters` are digits,
/// commas, signs and brackets. `number` becomes the same for the same parameters.
///
/// # Safety
/// `name` and `parameters` must be C strings, `number` valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_partial(
    name: *const c_char,
    parameters: *const c_char,
    number: *mut u32,
) -> c_int {
    guarded(|| {
        // SAFETY: the caller vouches for all. No parameters are an empty text.
        let (name, parameters, number) =
            unsafe { (text(name)?, text(parameters)?, out(number, "number")?) };
        let found = PartialId::named(name, parameters);
        let found = found.ok_or_else(|| {
            format!("no partial {name} with parameters {parameters:?} is registered")
        })?;
        number.set(found.number());
        Ok(ROTE_OK)
    })
}

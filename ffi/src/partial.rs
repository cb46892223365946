//! Partials that scripts register.

use std::ffi::{c_char, c_int};

use rote::plans::ReduceOp;
use rote::propagation::{PartialId, forget_partials, register_partials};

use crate::status::{ROTE_OK, guarded, out, text};

/// Makes partials of a name known, which have parameters: they are written as `P(LogSumExp)` and `P(LogSumExp,2)`. To reduce
/// one costs as much as `reduction` (`ROTE_SUM`, ...). The name is a letter, then letters and digits. It is an error if the
/// name is taken.
///
/// # Safety
/// `name` must be a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_register_partials(name: *const c_char, reduction: u8) -> c_int {
    guarded(|| {
        // SAFETY: the caller vouches for the text.
        let name = unsafe { text(name)? };
        let reduction = ReduceOp::ALL.get(usize::from(reduction)).copied();
        let reduction = reduction.ok_or("`reduction` is not the number of a reduction")?;
        register_partials(name, reduction)?;
        Ok(ROTE_OK)
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

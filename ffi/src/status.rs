//! Statuses, errors and text across the border.

use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char, c_int};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Success.
pub const ROTE_OK: c_int = 0;
/// Failure: `rote_last_error()` tells what happened.
pub const ROTE_ERROR: c_int = -1;

thread_local! {
    static LAST_ERROR: RefCell<CString> = RefCell::default();
    static TEXT: RefCell<CString> = RefCell::default();
}

/// A C string of `text`; zero bytes become spaces.
pub(crate) fn c_string(text: &str) -> CString {
    CString::new(text.replace('\0', " ")).unwrap_or_default()
}

pub(crate) fn set_error(message: &str) {
    LAST_ERROR.with(|last| *last.borrow_mut() = c_string(message));
}

/// Hands out text that lives until the thread's next call.
pub(crate) fn give_text(text: &str) -> *const c_char {
    TEXT.with(|slot| {
        *slot.borrow_mut() = c_string(text);
        slot.borrow().as_ptr()
    })
}

/// Runs `body`; errors and panics become a status and a message.
pub(crate) fn guarded<E: std::fmt::Display>(body: impl FnOnce() -> Result<c_int, E>) -> c_int {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(status)) => status,
        Ok(Err(error)) => {
            set_error(&error.to_string());
            ROTE_ERROR
        }
        Err(panic) => {
            let what = panic
                .downcast_ref::<&str>()
                .map(|text| (*text).to_owned())
                .or_else(|| panic.downcast_ref::<String>().cloned())
                .unwrap_or_default();
            set_error(&format!("internal error: {what}"));
            ROTE_ERROR
        }
    }
}

/// Text that a caller passed.
///
/// # Safety
/// `text` must be null or a C string that lives as long as the result is used.
pub(crate) unsafe fn text<'a>(text: *const c_char) -> Result<&'a str, String> {
    if text.is_null() {
        return Ok("");
    }
    // SAFETY: the caller vouches for the string.
    unsafe { CStr::from_ptr(text) }
        .to_str()
        .map_err(|_| "text is not UTF-8".to_owned())
}

/// Numbers that a caller passed.
///
/// # Safety
/// `start` must point at `len` entries, or `len` must be 0.
pub(crate) unsafe fn slice<'a, T>(start: *const T, len: u32) -> &'a [T] {
    if len == 0 || start.is_null() {
        return &[];
    }
    // SAFETY: the caller vouches for the array.
    unsafe { std::slice::from_raw_parts(start, len as usize) }
}

/// What the last failed call of this thread has to say.
#[unsafe(no_mangle)]
pub extern "C" fn rote_last_error() -> *const c_char {
    LAST_ERROR.with(|last| last.borrow().as_ptr())
}

/// The version of Rote, for example `0.1.0`.
#[unsafe(no_mangle)]
pub extern "C" fn rote_version() -> *const c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}

//! Statuses, errors and text across the border.

use std::cell::{Cell, RefCell};
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::NonNull;

use rote::plans::Device;
use rote_aten::Object;

/// Success.
pub const ROTE_OK: c_int = 0;
/// Failure: `rote_last_error()` returns the message.
pub const ROTE_ERROR: c_int = -1;

thread_local! {
    static LAST_ERROR: RefCell<CString> = RefCell::default();
    /// A reference to a Python object, or null.
    static LAST_EXCEPTION: Cell<*mut c_void> = const { Cell::new(std::ptr::null_mut()) };
    static TEXT: RefCell<CString> = RefCell::default();
}

/// A C string of `text`; zero bytes become spaces.
pub(crate) fn c_string(text: &str) -> CString {
    CString::new(text.replace('\0', " ")).unwrap_or_default()
}

pub(crate) fn set_error(message: &str) {
    set_exception(None);
    LAST_ERROR.with(|last| *last.borrow_mut() = c_string(message));
}

/// Keeps the exception behind the last error: to be called after it was set.
pub(crate) fn set_exception(exception: Option<Object>) {
    let new = exception.map_or(std::ptr::null_mut(), Object::into_ptr);
    let old = LAST_EXCEPTION.replace(new);
    if !old.is_null() {
        // SAFETY: a reference that `into_ptr` gave out, to be dropped once. Exceptions
        // come from functions that hold the GIL, and so do those that replace them.
        drop(unsafe { Object::own(old) });
    }
}

/// Hands out text that lives until the thread's next call.
pub(crate) fn give_text(text: &str) -> *const c_char {
    TEXT.with(|slot| {
        *slot.borrow_mut() = c_string(text);
        slot.borrow().as_ptr()
    })
}

/// What a function of the ABI has to answer: a status, or what went wrong.
pub(crate) type Answer = Result<c_int, Box<dyn std::error::Error>>;

/// Runs `body`; errors and panics become a status and a message.
pub(crate) fn guarded(body: impl FnOnce() -> Answer) -> c_int {
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
/// `start` must be null or point at `len` entries.
pub(crate) unsafe fn slice<'a, T>(start: *const T, len: u32) -> Result<&'a [T], String> {
    if len == 0 {
        return Ok(&[]);
    }
    if start.is_null() {
        return Err(format!("a list of {len} entries is null"));
    }
    // SAFETY: the caller vouches for the array.
    Ok(unsafe { std::slice::from_raw_parts(start, len as usize) })
}

/// A place of the caller's, to read from and write to.
pub(crate) struct Out<T>(NonNull<T>);

/// The place that a caller passed as `name`.
///
/// # Safety
/// `place` must be null, or valid for as long as the result is used.
pub(crate) unsafe fn out<T>(place: *mut T, name: &str) -> Result<Out<T>, String> {
    NonNull::new(place)
        .map(Out)
        .ok_or_else(|| format!("`{name}` is null"))
}

impl<T: Copy> Out<T> {
    /// Writes to the place.
    pub(crate) fn set(&self, value: T) {
        // SAFETY: not null, and valid as `out`'s caller vouched.
        unsafe { self.0.write(value) };
    }

    /// Reads what the caller has put there.
    pub(crate) fn get(&self) -> T {
        // SAFETY: as in `set`.
        unsafe { self.0.read() }
    }
}

/// An object that a caller passed as `name`.
pub(crate) fn object(object: *mut c_void, name: &str) -> Result<*mut c_void, String> {
    if object.is_null() {
        return Err(format!("`{name}` is null"));
    }
    Ok(object)
}

/// A device by PyTorch's `DeviceType` number and its index, or -1.
pub(crate) fn device(kind: u32, index: i32) -> Result<Device, String> {
    match (u8::try_from(kind), i8::try_from(index)) {
        (Ok(kind), Ok(index)) => Ok(Device { kind, index }),
        _ => Err(format!("{kind}:{index} is not a device")),
    }
}

/// Returns the message of this thread's last call that failed or was refused.
#[unsafe(no_mangle)]
pub extern "C" fn rote_last_error() -> *const c_char {
    LAST_ERROR.with(|last| last.borrow().as_ptr())
}

/// Returns the Python exception of this thread's last failure, as PyTorch's own bindings would raise it, or
/// null. The result is a new reference. Each exception is returned once.
#[unsafe(no_mangle)]
pub extern "C" fn rote_last_exception() -> *mut c_void {
    LAST_EXCEPTION.replace(std::ptr::null_mut())
}

/// Returns the version of Rote, for example `0.1.0`.
#[unsafe(no_mangle)]
pub extern "C" fn rote_version() -> *const c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}

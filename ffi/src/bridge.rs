//! The bridge to PyTorch: its C++ sources, and loading what was built of them.

use std::ffi::{c_char, c_int};
use std::path::Path;

use rote_aten::Bridge;
use rote_aten::sources::SOURCES;

use crate::status::{ROTE_OK, give_text, guarded, text};

/// Returns the number of source files of the bridge.
#[unsafe(no_mangle)]
pub extern "C" fn rote_bridge_source_count() -> u32 {
    SOURCES.len() as u32
}

/// Returns the name of source file `index`, or null. File 0 is the file to compile.
#[unsafe(no_mangle)]
pub extern "C" fn rote_bridge_source_name(index: u32) -> *const c_char {
    SOURCES
        .get(index as usize)
        .map_or(std::ptr::null(), |source| give_text(source.0))
}

/// Returns the text of source file `index`, or null.
#[unsafe(no_mangle)]
pub extern "C" fn rote_bridge_source_text(index: u32) -> *const c_char {
    SOURCES
        .get(index as usize)
        .map_or(std::ptr::null(), |source| give_text(source.1))
}

/// Loads the bridge that was built at `path`. To be called once per process, after Python has imported the bridge as
/// a module and called its `init`.
///
/// # Safety
/// `path` must be a C string. It must name a bridge that was built from this library's sources against the
/// torch of this process.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_load_bridge(path: *const c_char) -> c_int {
    guarded(|| {
        // SAFETY: the caller vouches for all of it.
        unsafe { Bridge::load(Path::new(text(path)?))? };
        Ok(ROTE_OK)
    })
}

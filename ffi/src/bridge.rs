//! The bridge to PyTorch: its C++ sources, and loading what was built of them.

use std::ffi::{c_char, c_int, c_void};
use std::path::Path;

use rote_aten::Bridge;

use crate::status::{ROTE_OK, give_text, guarded, text};

/// Sources of the bridge, `bridge.cpp` first. They are part of the library, so
/// that library and bridge always fit.
const SOURCES: &[(&str, &str)] = &[
    (
        "bridge.cpp",
        include_str!("../../backends/aten/bridge/bridge.cpp"),
    ),
    ("abi.h", include_str!("../../backends/aten/bridge/abi.h")),
    (
        "arguments.h",
        include_str!("../../backends/aten/bridge/arguments.h"),
    ),
    (
        "profile_hook.h",
        include_str!("../../backends/aten/bridge/profile_hook.h"),
    ),
    (
        "describe.h",
        include_str!("../../backends/aten/bridge/describe.h"),
    ),
    (
        "checks.h",
        include_str!("../../backends/aten/bridge/checks.h"),
    ),
    (
        "eager.h",
        include_str!("../../backends/aten/bridge/eager.h"),
    ),
    (
        "element_wise.h",
        include_str!("../../backends/aten/bridge/element_wise.h"),
    ),
    (
        "exceptions.h",
        include_str!("../../backends/aten/bridge/exceptions.h"),
    ),
    ("fact.h", include_str!("../../backends/aten/bridge/fact.h")),
    (
        "fact_table.h",
        include_str!("../../backends/aten/bridge/fact_table.h"),
    ),
    (
        "hooks.h",
        include_str!("../../backends/aten/bridge/hooks.h"),
    ),
    (
        "metadata.h",
        include_str!("../../backends/aten/bridge/metadata.h"),
    ),
    (
        "memory.h",
        include_str!("../../backends/aten/bridge/memory.h"),
    ),
    (
        "modes.h",
        include_str!("../../backends/aten/bridge/modes.h"),
    ),
    (
        "late_numbers.h",
        include_str!("../../backends/aten/bridge/late_numbers.h"),
    ),
    (
        "numbers.h",
        include_str!("../../backends/aten/bridge/numbers.h"),
    ),
    (
        "objects.h",
        include_str!("../../backends/aten/bridge/objects.h"),
    ),
    (
        "observe.h",
        include_str!("../../backends/aten/bridge/observe.h"),
    ),
    (
        "others.h",
        include_str!("../../backends/aten/bridge/others.h"),
    ),
    (
        "program.h",
        include_str!("../../backends/aten/bridge/program.h"),
    ),
    (
        "ranges.h",
        include_str!("../../backends/aten/bridge/ranges.h"),
    ),
    (
        "references.h",
        include_str!("../../backends/aten/bridge/references.h"),
    ),
    (
        "ranks.h",
        include_str!("../../backends/aten/bridge/ranks.h"),
    ),
    (
        "unboxed.h",
        include_str!("../../backends/aten/bridge/unboxed.h"),
    ),
    (
        "values.h",
        include_str!("../../backends/aten/bridge/values.h"),
    ),
    (
        "views.h",
        include_str!("../../backends/aten/bridge/views.h"),
    ),
    (
        "watch.h",
        include_str!("../../backends/aten/bridge/watch.h"),
    ),
    (
        "works.h",
        include_str!("../../backends/aten/bridge/works.h"),
    ),
];

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

/// Loads the bridge that was built at `path`. To be called once per process. `dtensor` and
/// `async_collective_tensor` are torch's classes of these names.
///
/// # Safety
/// `path` must be a C string. It must name a bridge that was built from this library's sources against the
/// torch of this process. The objects must be classes. The GIL must be held.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_load_bridge(
    path: *const c_char,
    dtensor: *mut c_void,
    async_collective_tensor: *mut c_void,
) -> c_int {
    guarded(|| {
        // SAFETY: the caller vouches for all of it.
        unsafe {
            let path = Path::new(text(path)?);
            Bridge::load(path, dtensor, async_collective_tensor)?;
        }
        Ok(ROTE_OK)
    })
}

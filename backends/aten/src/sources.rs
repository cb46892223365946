//! The C++ sources of the bridge. They are part of the library, so that library and bridge always fit.

macro_rules! sources {
    ($($name:literal)*) => {
        &[$(($name, include_str!(concat!("../bridge/", $name)))),*]
    };
}

/// The names and texts of the files. The first is the one to compile.
pub const SOURCES: &[(&str, &str)] = sources! {
    "bridge.cpp"
    "abi.h"
    "arguments.h"
    "checks.h"
    "describe.h"
    "eager.h"
    "element_wise.h"
    "exceptions.h"
    "fact.h"
    "fact_table.h"
    "hooks.h"
    "index_hook.h"
    "late_numbers.h"
    "memory.h"
    "metadata.h"
    "modes.h"
    "module.h"
    "numbers.h"
    "objects.h"
    "observe.h"
    "others.h"
    "placements.h"
    "profile_hook.h"
    "program.h"
    "propagate.h"
    "ranges.h"
    "ranks.h"
    "reducer.h"
    "references.h"
    "region.h"
    "scope.h"
    "unboxed.h"
    "values.h"
    "views.h"
    "watch.h"
    "works.h"
};

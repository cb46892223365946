//! The bridge's C ABI. `bridge/abi.h` is generated from here and from what is re-exported; `bridge/bridge.cpp` defines
//! the functions, and does not compile if it defines one with other types.

use std::ffi::{c_char, c_int, c_void};

pub use rote_events::op::{
    Arg, CONJ, DATA_DEPENDENT, GRAD, HIDDEN, INPLACE_VIEW, INTERNAL, NEG, NO_STORAGE, Op, Payload,
    SEEDED, Tensor, WRAPPED_NUMBER, ZERO_TENSOR, tag,
};

pub use rote_plans::Anchor;
pub use rote_replay::WordSubject;

/// Both sides must say the same number.
pub const ABI_VERSION: u32 = 20;

/// How the results of an op get to where they lie already.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Into {
    /// They do not: the op makes them.
    Slot,
    /// An overload of the op writes them.
    Overload,
    /// The op copies its first argument: `copy_` does.
    Copy,
}

/// A Python object, owned by Python.
pub type Object = *mut c_void;

/// Where what is observed of a step is recorded: a session, and functions of `rote.h` and `rote_torch.h`.
#[repr(C)]
pub struct Sink {
    /// The session.
    pub session: *mut c_void,
    /// `rote_record_observed`.
    pub observed: unsafe extern "C" fn(*mut c_void, *const c_char) -> c_int,
    /// `rote_record_global_begin`.
    pub global_begin:
        unsafe extern "C" fn(*mut c_void, *const c_char, *const u32, u32, *const c_char) -> c_int,
    /// `rote_record_global_end`.
    pub global_end: unsafe extern "C" fn(*mut c_void, *const u32, u32) -> c_int,
}

macro_rules! classes {
    ($($name:ident;)*) => {
        $(
            /// A class of the bridge.
            #[repr(C)]
            #[derive(Debug)]
            pub struct $name {
                _unknown: [u8; 0],
            }
        )*
    };
}

classes! {
    Call;
    Describer;
    FactTable;
    Held;
    Program;
    Watching;
}

macro_rules! functions {
    ($($name:ident: fn($($arg:ty),*) $(-> $ret:ty)?;)*) => {
        /// The bridge's functions, resolved once.
        #[allow(missing_docs)]
        pub struct Functions {
            $(pub $name: unsafe extern "C" fn($($arg),*) $(-> $ret)?,)*
        }

        impl Functions {
            /// Resolves every function of a loaded bridge.
            ///
            /// # Safety
            /// The library must be a bridge whose functions have these types,
            /// and must stay loaded as long as the functions are called.
            pub unsafe fn resolve(library: &libloading::Library) -> Result<Self, libloading::Error> {
                Ok(Functions {
                    $($name: {
                        let symbol = concat!("rote_bridge_", stringify!($name), "\0");
                        // SAFETY: the caller vouches for the types.
                        unsafe { *library.get(symbol.as_bytes())? }
                    },)*
                })
            }

            /// The functions of a bridge in Rust, which Miri finds by their names.
            #[cfg(miri)]
            pub(crate) fn linked() -> Self {
                unsafe extern "C" {
                    $(
                        #[link_name = concat!("rote_bridge_", stringify!($name))]
                        fn $name($(_: $arg),*) $(-> $ret)?;
                    )*
                }
                Functions { $($name,)* }
            }
        }
    };
}

functions! {
    abi: fn() -> u32;
    error: fn() -> *const c_char;
    describer_new: fn() -> *mut Describer;
    describer_free: fn(*mut Describer);
    describe_op: fn(*mut Describer, Object, Object, Object, Object, *mut *const Op) -> c_int;
    describe_observed: fn(*mut Describer, *mut *const Op) -> c_int;
    work: fn(*mut Describer, Object, *mut i64) -> c_int;
    observe: fn(Object, *const Sink) -> c_int;
    describe_tensor: fn(*mut Describer, Object, *mut *const Tensor) -> c_int;
    storage_alive: fn(*const Describer, u64) -> c_int;
    rng_digest: fn(u8, i8, *mut u64) -> c_int;
    call_new: fn() -> *mut Call;
    call_free: fn(*mut Call);
    call_state: fn(*mut Call, *const u64, *const u64, u32) -> c_int;
    call_world: fn(*mut Call, u64);
    call_owner: fn(*mut Call, *mut c_void, unsafe extern "C" fn(*mut c_void) -> c_int) -> Object;
    call_hold: fn(*mut Call) -> *mut Held;
    held_free: fn(*mut Held);
    held_difference: fn(*const Held, *const Call, *mut i64) -> c_int;
    call_collect: fn(*mut Call, Object, Object, *mut *const u64, *mut *const WordSubject, *mut u32) -> c_int;
    call_leaf: fn(*mut Call, u32) -> Object;
    tensor_place: fn(Object, c_int, *mut Anchor) -> c_int;
    number_in: fn(Object, *mut f64) -> c_int;
    table_new: fn(*mut Call) -> *mut FactTable;
    table_free: fn(*mut FactTable);
    table_add: fn(*mut FactTable, u32, Object, Object, *mut u32) -> c_int;
    table_read: fn(*const FactTable, *const Call, *mut u64, c_int) -> c_int;
    table_hold: fn(*mut FactTable) -> c_int;
    table_same: fn(*const FactTable, u32, *mut c_int) -> c_int;
    table_text: fn(*const FactTable, u32, c_int) -> *const c_char;
    read_float: fn(*const FactTable, u32, *mut f64) -> c_int;
    program_new: fn(u32, u32) -> *mut Program;
    program_free: fn(*mut Program);
    program_exception: fn(*mut Program) -> Object;
    program_lost: fn(*mut Program) -> c_int;
    program_op: fn(*mut Program, *const c_char, *const c_char, *const Arg, u32, *const i64, u32, u8, *const c_char, c_int, c_int, *mut u32) -> c_int;
    program_differs: fn(*mut Program) -> c_int;
    program_expect: fn(*mut Program, u32, u32, u8, u8, u8, i8, *const i64, *const i64, u32) -> c_int;
    program_draws: fn(*mut Program, u8, i8) -> c_int;
    program_undo: fn(*mut Program, *mut c_int) -> c_int;
    program_arena: fn(*mut Program, u64, u8, i8) -> c_int;
    program_place: fn(*mut Program, u32, u8, *const i64, *const i64, u32, u64, u64) -> c_int;
    program_fix: fn(*mut Program, *const u32, u32) -> c_int;
    program_view: fn(*mut Program, u32, u32, u8, u8, *const i64, *const i64, u32, i64, *mut u32) -> c_int;
    program_collective: fn(*mut Program, u32, i32, *const c_char, u32, u32, u32, *const i64, u32, *const i64, u32, *const i64, u32, *mut u32) -> c_int;
    program_put: fn(*mut Program, u32, Object, u32) -> c_int;
    program_leave_shape: fn(*mut Program, u32, Object) -> c_int;
    program_number: fn(*mut Program, u32, u32, i64, f64) -> c_int;
    program_clear: fn(*mut Program, *const u32, u32) -> c_int;
    written: fn(*const Object, *const u8, *const u32, *const u32, u32) -> c_int;
    program_output: fn(*mut Program, u32, c_int) -> Object;
    program_shown: fn(*mut Program, u32) -> Object;
    with_gil: fn(unsafe extern "C" fn(*mut c_void) -> c_int, *mut c_void) -> c_int;
    program_listened: fn(*mut Program) -> c_int;
    range_begin: fn(*mut Program, *const c_char) -> c_int;
    range_end: fn(*mut Program) -> c_int;
    run: fn(*mut Program, unsafe extern "C" fn(*mut c_void) -> c_int, *mut c_void) -> c_int;
    run_op: fn(*mut Program, u32) -> c_int;
    run_view: fn(*mut Program, u32) -> c_int;
    run_collective: fn(*mut Program, u32) -> c_int;
    run_wait: fn(*mut Program, u32) -> c_int;
    run_rng: fn(*mut Program, u32, u8, i8, u32) -> c_int;
    run_free: fn(*mut Program, u32) -> c_int;
    group: fn(*const c_char, *mut u64, *mut u32, *mut c_int) -> c_int;
    gather: fn(*const c_char, u64, *const u8, u64, *mut u8) -> c_int;
    compare_checks: fn(*const c_char, u64) -> c_int;
    found_answer: fn(*mut u64) -> *const i64;
    without_gil: fn(unsafe extern "C" fn(*mut c_void) -> c_int, *mut c_void) -> c_int;
    watch_new: fn(*mut *mut Watching) -> c_int;
    watch_free: fn(*mut Watching);
    watch_rise: fn(*mut Watching) -> i64;
    call_op: fn(*const c_char, *const c_char, *const Arg, u32, *mut *const Tensor, *mut u32, *mut u32) -> c_int;
    list_new: fn(u32) -> Object;
    list_set: fn(Object, u32, Object);
    incref: fn(Object);
    decref: fn(Object);
}

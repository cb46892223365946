//! What a framework passes: the table of its functions, and the leaves of its calls.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::mem::size_of;

use rote_events::op::Arg;
use rote_plans::Device;
use rote_plans::schedule::{Into, Ops};

use crate::dl::{DlManagedTensor, DlTensor};

/// `bind_op`: the framework cannot run the op so that it writes into given memory. The result is copied there.
pub const NO_INTO: c_int = 1;

/// A leaf of a call's arguments: a tensor, or a word that stands for another value.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Leaf {
    /// Its name, for example `batch`, which no other leaf has. Null: `args[0]`, by its place.
    pub name: *const c_char,
    /// The spec of a distributed tensor, in the form of `rote_record_spec`; null for a plain one.
    pub spec: *const c_char,
    /// The tensor; null for a leaf that is a word.
    pub tensor: *const DlTensor,
    /// A number for the memory that the tensor lies in: the same for tensors that share memory, here and in the
    /// `RoteTensor` of a recording. 0 stands for the tensor's address, with memory as far as the tensor reaches.
    pub storage: u64,
    /// The byte of that memory at which the tensor's first element lies.
    pub start: i64,
    /// Bytes of that memory.
    pub bytes: u64,
    /// What the leaf is, if it is no tensor: another word for another value, the same in every process.
    pub word: u64,
    /// 1 for a tensor that stays where it is from call to call, as weights do; else 0.
    pub state: u32,
}

/// A collective, to be bound.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Collective {
    /// Which one: `ROTE_ALL_REDUCE`, ...
    pub kind: u32,
    /// Of a reducing one `ROTE_SUM`, ...; else -1.
    pub reduce: i32,
    /// The process group's name.
    pub group: *const c_char,
    /// The source rank of a broadcast, counted in the group.
    pub root: u32,
    /// Number of entries in `input_splits`.
    pub n_input_splits: u32,
    /// All-to-all: rows of dim 0 that go to each rank; null for an even split.
    pub input_splits: *const i64,
    /// All-to-all: rows that come from each rank; null for an even split.
    pub output_splits: *const i64,
    /// Number of entries in `output_splits`.
    pub n_output_splits: u32,
}

/// The functions of a framework. A function returns 0, or another number if it fails; `error` then returns the message.
/// Functions must not unwind, and must not call the session that calls them. Rote calls them on the thread that calls
/// the session.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Framework {
    /// `sizeof` of this struct, so that both sides know which functions it has.
    pub size: u32,
    /// The alignment of memory that `allocate` returns, in bytes: a power of two, 64 or more. Rote gives results in
    /// that memory the same one. 0 stands for 64.
    pub alignment: u32,
    /// Passed to every function.
    pub context: *mut c_void,
    /// Whether the framework has an op, by ATen's name and overload: 1 or 0. With `into` not 0, whether the op can
    /// also write its results into tensors that `run_op` is given. Passes put no op into a plan that the
    /// framework lacks, and give results a fixed place only where the op can write there.
    pub has_op: Option<
        unsafe extern "C" fn(
            context: *mut c_void,
            name: *const c_char,
            overload: *const c_char,
            into: c_int,
        ) -> c_int,
    >,
    /// Finds an op, and prepares a call with these `n` arguments: `*op` is a number of the framework's own. A tensor
    /// among the arguments is a `ROTE_ARG_INPUT`: `i` is its place among the tensors that `run_op` is given; a list
    /// of tensors is `ROTE_ARG_INPUTS`, with such places. If `into` is not 0, `run_op` writes the results to given
    /// tensors. The result of an element-wise op may lie in the memory of an argument. If the op cannot write to
    /// given memory with these arguments, return `ROTE_NO_INTO`.
    pub bind_op: Option<
        unsafe extern "C" fn(
            context: *mut c_void,
            name: *const c_char,
            overload: *const c_char,
            args: *const Arg,
            n: u32,
            outs: u32,
            into: c_int,
            op: *mut u64,
        ) -> c_int,
    >,
    /// Runs an op. `made` has one entry for each result. Entries are null; the function stores new tensors there, which
    /// Rote deletes. The entry of a result that the op wrote in place stays null. `into` holds the tensors to write if
    /// the op was bound with `into`, and is null otherwise.
    pub run_op: Option<
        unsafe extern "C" fn(
            context: *mut c_void,
            op: u64,
            tensors: *const *const DlTensor,
            into: *const *const DlTensor,
            made: *mut *mut DlManagedTensor,
        ) -> c_int,
    >,
    /// Sets the number at a place among an op's arguments, `element` of a list there, or -1.
    pub set_number: Option<
        unsafe extern "C" fn(
            context: *mut c_void,
            op: u64,
            arg: u32,
            element: i64,
            value: f64,
        ) -> c_int,
    >,
    /// Forgets an op that was bound. May be null.
    pub forget_op: Option<unsafe extern "C" fn(context: *mut c_void, op: u64)>,
    /// Allocates memory on a device by PyTorch's number (0 cpu, 1 cuda) and index.
    pub allocate: Option<
        unsafe extern "C" fn(
            context: *mut c_void,
            bytes: u64,
            device_kind: u32,
            device_index: i32,
            memory: *mut *mut c_void,
        ) -> c_int,
    >,
    /// Gives memory of `allocate` back.
    pub release: Option<unsafe extern "C" fn(context: *mut c_void, memory: *mut c_void)>,
    /// Whether the framework still holds a storage that was described to a recording: 1 or 0.
    pub is_alive: Option<unsafe extern "C" fn(context: *mut c_void, storage: u64) -> c_int>,
    /// A number that differs for different states of a device's random generator. May be null if steps draw no random
    /// numbers.
    pub generator: Option<
        unsafe extern "C" fn(
            context: *mut c_void,
            device_kind: u32,
            device_index: i32,
            state: *mut u64,
        ) -> c_int,
    >,
    /// Saves a generator's state in a slot (`action` 0) or puts it back (1). Slots count from 0; a few are Rote's own,
    /// for the states from before a replay that may fail. A slot is written anew in each replay. Null together with
    /// `generator`.
    pub keep_generator: Option<
        unsafe extern "C" fn(
            context: *mut c_void,
            action: u32,
            device_kind: u32,
            device_index: i32,
            slot: u32,
        ) -> c_int,
    >,
    /// Prepares a collective: `*collective` is a number of the framework's own. Null where there is one rank.
    pub bind_collective: Option<
        unsafe extern "C" fn(
            context: *mut c_void,
            described: *const Collective,
            collective: *mut u64,
        ) -> c_int,
    >,
    /// Forgets a collective that was bound. May be null.
    pub forget_collective: Option<unsafe extern "C" fn(context: *mut c_void, collective: u64)>,
    /// Starts a collective. `output` may be `input`. The two structs are live during the call, their memory until
    /// `wait`.
    pub start: Option<
        unsafe extern "C" fn(
            context: *mut c_void,
            collective: u64,
            input: *const DlTensor,
            output: *const DlTensor,
        ) -> c_int,
    >,
    /// Waits until a collective that was started has ended.
    pub wait: Option<unsafe extern "C" fn(context: *mut c_void, collective: u64) -> c_int>,
    /// Puts the `n` bytes of every rank of a group into `all`, in the order of ranks. May be
    /// null if passes alter no collectives.
    pub gather: Option<
        unsafe extern "C" fn(
            context: *mut c_void,
            group: *const c_char,
            ours: *const u8,
            n: u64,
            all: *mut u8,
        ) -> c_int,
    >,
    /// How many ranks a group has; 0 for a group in which this process is not. Null together with `gather`.
    pub ranks: Option<unsafe extern "C" fn(context: *mut c_void, group: *const c_char) -> u32>,
    /// The message of the last failure. May be null.
    pub error: Option<unsafe extern "C" fn(context: *mut c_void) -> *const c_char>,
}

impl Framework {
    /// A table of this library's size, without functions.
    pub fn empty(context: *mut c_void) -> Self {
        Framework {
            size: size_of::<Framework>() as u32,
            alignment: 0,
            context,
            has_op: None,
            bind_op: None,
            run_op: None,
            set_number: None,
            forget_op: None,
            allocate: None,
            release: None,
            is_alive: None,
            generator: None,
            keep_generator: None,
            bind_collective: None,
            forget_collective: None,
            start: None,
            wait: None,
            gather: None,
            ranks: None,
            error: None,
        }
    }

    /// What is wrong with a table of so many bytes, if anything: to be asked before the table is read.
    pub fn size_problem(size: u32) -> Option<String> {
        let expected = size_of::<Framework>();
        (size as usize != expected).then(|| {
            format!(
                "the framework's table has {size} bytes, this library's has {expected}: both must be of one version \
                 of rote.h"
            )
        })
    }

    /// What is missing, if anything.
    pub fn problem(&self) -> Option<String> {
        if self.alignment != 0 && (self.alignment < 64 || !self.alignment.is_power_of_two()) {
            return Some(format!(
                "the framework's `alignment` is {}: it must be 0 or a power of two, 64 or more",
                self.alignment
            ));
        }
        let needed = [
            ("has_op", self.has_op.is_none()),
            ("bind_op", self.bind_op.is_none()),
            ("run_op", self.run_op.is_none()),
            ("set_number", self.set_number.is_none()),
            ("allocate", self.allocate.is_none()),
            ("release", self.release.is_none()),
            ("is_alive", self.is_alive.is_none()),
            (
                "keep_generator",
                self.generator.is_some() && self.keep_generator.is_none(),
            ),
            (
                "start",
                self.bind_collective.is_some() && self.start.is_none(),
            ),
            (
                "wait",
                self.bind_collective.is_some() && self.wait.is_none(),
            ),
            ("ranks", self.gather.is_some() && self.ranks.is_none()),
        ];
        let missing = needed.iter().find(|(_, missing)| *missing);
        missing.map(|(name, _)| format!("the framework's `{name}` is null"))
    }

    fn answers(&self, name: &str, overload: &str, into: bool) -> bool {
        let texts = CString::new(name).and_then(|name| Ok((name, CString::new(overload)?)));
        let (Some(has), Ok((name, overload))) = (self.has_op, texts) else {
            return false;
        };
        let into = c_int::from(into);
        // SAFETY: the framework vouches for its functions; the texts outlive the call.
        unsafe { has(self.context, name.as_ptr(), overload.as_ptr(), into) != 0 }
    }

    /// The result of a call, from its status.
    pub(crate) fn check(&self, what: &str, status: c_int) -> Result<(), String> {
        match status {
            0 => Ok(()),
            status => Err(self.failure(what, status)),
        }
    }

    #[cold]
    fn failure(&self, what: &str, status: c_int) -> String {
        let text = self.error.map_or(std::ptr::null(), |error| {
            // SAFETY: the framework vouches for its functions.
            unsafe { error(self.context) }
        });
        if text.is_null() {
            return format!("{what} returned {status}");
        }
        // SAFETY: the framework's error is a C string that lives until its next call.
        let text = unsafe { CStr::from_ptr(text) }.to_string_lossy();
        format!("{what}: {text}")
    }
}

impl Ops for Framework {
    fn has(&self, name: &str, overload: &str) -> bool {
        self.answers(name, overload, false)
    }

    /// `bind_op` is told whether to write into memory, not by which overload.
    fn writes_into(&self, name: &str, overload: &str) -> Option<Into> {
        let into = self.answers(name, overload, true);
        into.then_some(Into::Overload(""))
    }

    fn copies_inputs(&self) -> bool {
        false
    }

    fn gathers_in_place(&self) -> bool {
        false
    }

    fn alignment(&self, _device: Device) -> u64 {
        match self.alignment {
            0 => 64,
            alignment => alignment.into(),
        }
    }
}

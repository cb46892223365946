//! PyTorch as a session sees it: calls, leaves and tensors as Python objects.

use std::cell::RefCell;
use std::ffi::{CStr, c_int, c_void};

use rote_aten_ops::AtenOps;
use rote_plans::schedule::Ops;
use rote_plans::{Anchor, Device, Plan};
use rote_replay::frontend::{CallFacts, Counted, Frontend, Part, WordSubject};
use rote_replay::{BoundPlan, ReplayError};

use crate::bridge::{Borrowed, Bridge, Object};
use crate::describe::Describer;
use crate::fact_table::FactTable;
use crate::program::{self, AtenProgram};
use crate::ranks::{self, Group, without_gil};
use crate::sys;
use crate::words;

/// The arguments of a call.
#[derive(Clone, Copy, Debug)]
pub struct Args {
    args: sys::Object,
    kwargs: sys::Object,
}

impl Args {
    /// Arguments of the caller's.
    ///
    /// # Safety
    /// `args` must be a live tuple and `kwargs` a live dict, and the GIL held, until the session that is given them
    /// handles another call, or until the recording of this one ends.
    pub unsafe fn new(args: sys::Object, kwargs: sys::Object) -> Self {
        Args { args, kwargs }
    }
}

/// PyTorch, and the call that a session handles now. Used with the GIL held.
#[derive(Debug)]
pub struct Aten {
    call: *mut sys::Call,
    words: Vec<u64>,
    subjects: Vec<WordSubject>,
    arguments: Option<Args>,
    written: RefCell<Written>,
}

/// What the words of a call stand for.
#[derive(Debug)]
pub struct Held(*mut sys::Held);

impl Drop for Held {
    fn drop(&mut self) {
        // SAFETY: made by `Aten::last`, freed once; sessions are dropped with the GIL held.
        unsafe { (Bridge::get().functions().held_free)(self.0) };
    }
}

impl Aten {
    /// For a new session. The bridge must be loaded.
    #[allow(clippy::new_without_default, reason = "it needs a loaded bridge")]
    pub fn new() -> Self {
        // SAFETY: makes an object that `drop` frees.
        let call = unsafe { (Bridge::get().functions().call_new)() };
        Aten {
            call,
            words: Vec::new(),
            subjects: Vec::new(),
            arguments: None,
            written: RefCell::default(),
        }
    }

    /// A new Python object that owns the session: when it goes, it calls `free` with `session`. Through it, Python's
    /// garbage collector sees what the session holds.
    ///
    /// # Safety
    /// To be called once for each session; nothing else may free it. The GIL must be held.
    pub unsafe fn owner(
        &self,
        session: *mut c_void,
        free: unsafe extern "C" fn(*mut c_void) -> c_int,
    ) -> Result<Object, ReplayError> {
        let bridge = Bridge::get();
        // SAFETY: a collector of ours; the caller vouches for the session.
        let object = unsafe { (bridge.functions().call_owner)(self.call, session, free) };
        // SAFETY: a new reference, where it is not null.
        unsafe { Object::new(object) }.ok_or_else(|| ReplayError::Bridge(bridge.message()))
    }

    pub(crate) fn call(&self) -> *const sys::Call {
        self.call
    }
}

impl Drop for Aten {
    fn drop(&mut self) {
        // SAFETY: made by `new`, freed once.
        unsafe { (Bridge::get().functions().call_free)(self.call) };
    }
}

impl Frontend for Aten {
    const WAITS: bool = true;
    const CHECKS: bool = true;

    type Args = Args;
    type Ref<'a> = Borrowed<'a>;
    type Held = Held;
    type Facts = FactTable;
    type Describer = Describer;
    type Program = AtenProgram;
    /// A Python list.
    type Results = Object;
    /// A Python exception.
    type Exception = Object;
    type Group = Group;

    fn collect(&mut self, args: Args) -> Result<(), ReplayError> {
        self.arguments = Some(args);
        let bridge = Bridge::get();
        let (mut words, mut subjects, mut n) = (std::ptr::null(), std::ptr::null(), 0);
        // SAFETY: live objects, by `Args::new`.
        bridge.check(unsafe {
            (bridge.functions().call_collect)(
                self.call,
                args.args,
                args.kwargs,
                &mut words,
                &mut subjects,
                &mut n,
            )
        })?;
        // SAFETY: on success the arrays have `n` entries and live until the
        // next call; there is always at least the structure word.
        let (words, subjects) = unsafe {
            (
                std::slice::from_raw_parts(words, n as usize),
                std::slice::from_raw_parts(subjects, n as usize),
            )
        };
        self.words.clear();
        self.words.extend_from_slice(words);
        self.subjects.clear();
        self.subjects.extend_from_slice(subjects);
        Ok(())
    }

    fn recollect(&mut self) -> Result<(), ReplayError> {
        match self.arguments {
            Some(args) => self.collect(args),
            None => Err(ReplayError::Bridge("no call is handled".to_owned())),
        }
    }

    fn words(&self) -> &[u64] {
        &self.words
    }

    fn subjects(&self) -> &[WordSubject] {
        &self.subjects
    }

    fn last(&self) -> Result<CallFacts<Held>, ReplayError> {
        let bridge = Bridge::get();
        // SAFETY: the arguments are live while the call lasts; makes an object
        // that `drop` frees.
        let held = unsafe { (bridge.functions().call_hold)(self.call) };
        if held.is_null() {
            return Err(ReplayError::Bridge(bridge.message()));
        }
        Ok(CallFacts {
            words: self.words.clone(),
            subjects: self.subjects.clone(),
            held: Held(held),
        })
    }

    fn held_difference(&self, earlier: &Held) -> Result<Option<usize>, ReplayError> {
        let bridge = Bridge::get();
        let mut word = -1;
        // SAFETY: both are ours, and the arguments are live while the call lasts.
        bridge.check(unsafe {
            (bridge.functions().held_difference)(earlier.0, self.call, &mut word)
        })?;
        Ok(usize::try_from(word).ok())
    }

    fn leaf(&self, leaf: u32) -> Option<Borrowed<'_>> {
        // SAFETY: bounds are checked by the bridge; the caller's arguments are
        // live while the call lasts.
        let object = unsafe { (Bridge::get().functions().call_leaf)(self.call, leaf) };
        // SAFETY: as above.
        (!object.is_null()).then(|| unsafe { Borrowed::new(object) })
    }

    fn place(&self, tensor: Borrowed<'_>, closely: bool) -> Result<Anchor, ReplayError> {
        let bridge = Bridge::get();
        let mut found = Anchor::default();
        // SAFETY: a live tensor.
        bridge.check(unsafe {
            (bridge.functions().tensor_place)(tensor.as_ptr(), c_int::from(closely), &mut found)
        })?;
        Ok(found)
    }

    fn add_state<'a>(
        &mut self,
        state: impl Iterator<Item = (u64, Borrowed<'a>)>,
    ) -> Result<(), ReplayError> {
        let (storages, objects): (Vec<u64>, Vec<u64>) = state
            .map(|(storage, tensor)| (storage, tensor.as_ptr() as u64))
            .unzip();
        let n = storages.len() as u32;
        let bridge = Bridge::get();
        // SAFETY: pointers to `n` numbers each.
        bridge.check(unsafe {
            (bridge.functions().call_state)(self.call, storages.as_ptr(), objects.as_ptr(), n)
        })
    }

    fn is_watched(&self) -> bool {
        self.words.get(words::Mode::Around.word()) != Some(&0)
    }

    fn word(&self, index: usize, subject: Option<&WordSubject>, leaves: &[String]) -> String {
        words::name(index, subject, leaves)
    }

    fn surroundings(&self) -> Vec<(&'static str, String)> {
        words::portable(&self.words)
    }

    fn facts(&self) -> FactTable {
        FactTable::new(self.call)
    }

    fn describer(&self) -> Describer {
        Describer::new()
    }

    fn ops(&self) -> &dyn Ops {
        &AtenOps
    }

    fn program(&self, plan: &Plan) -> Result<AtenProgram, ReplayError> {
        AtenProgram::of(plan)
    }

    fn hold(&self, tensor: Borrowed<'_>) -> Object {
        tensor.hold()
    }

    fn same(a: Borrowed<'_>, b: Borrowed<'_>) -> bool {
        a.as_ptr() == b.as_ptr()
    }

    fn borrow(tensor: &Object) -> Borrowed<'_> {
        tensor.borrow()
    }

    fn number(&self, tensor: Borrowed<'_>) -> Option<f64> {
        let mut number = 0.0;
        // SAFETY: a live tensor.
        let found = unsafe { (Bridge::get().functions().number_in)(tensor.as_ptr(), &mut number) };
        (found == 1).then_some(number)
    }

    fn put(
        &self,
        program: &AtenProgram,
        slot: u32,
        tensor: Borrowed<'_>,
        part: Part,
    ) -> Result<(), ReplayError> {
        program.put(slot, tensor, part)
    }

    fn leave_shape(
        &self,
        program: &AtenProgram,
        slot: u32,
        tensor: Borrowed<'_>,
    ) -> Result<(), ReplayError> {
        program.leave_shape(slot, tensor)
    }

    fn count<'a>(
        &self,
        written: impl Iterator<Item = Counted<Borrowed<'a>>>,
    ) -> Result<(), ReplayError> {
        let mut all = self.written.borrow_mut();
        all.clear();
        for one in written {
            all.add(one.tensor, one.grad, one.times);
        }
        // SAFETY: tensors that are live while the iterator's are.
        unsafe { Bridge::get().written(&all) }
    }

    fn results(&self, bound: &BoundPlan<AtenProgram>) -> Result<Object, ReplayError> {
        program::results(bound)
    }

    fn exception(&self, program: &AtenProgram) -> Option<Object> {
        program.exception()
    }

    fn generator(&self, device: Device) -> Result<u64, ReplayError> {
        Bridge::get().rng_digest(device)
    }

    fn enter_world(&mut self, number: u64) {
        // SAFETY: a collector of ours.
        unsafe { (Bridge::get().functions().call_world)(self.call, number) }
    }

    fn group(&self, name: &CStr) -> Result<Option<Group>, ReplayError> {
        Group::find(name)
    }

    fn compare_checks(&self, group: Option<&Group>) -> Result<(), ReplayError> {
        ranks::compare_checks(group)
    }

    fn found_answer(&self) -> Option<Vec<i64>> {
        ranks::found_answer()
    }

    /// Releases the GIL.
    fn unlocked<T>(&self, body: impl FnOnce() -> T) -> Result<T, ReplayError> {
        without_gil(body)
    }
}

/// Tensors that a step has written, how often as autograd counts it, and how often the
/// local tensors of DTensors.
#[derive(Debug, Default)]
pub struct Written {
    pub(crate) tensors: Vec<sys::Object>,
    pub(crate) grads: Vec<u8>,
    pub(crate) times: Vec<u32>,
    pub(crate) local_times: Vec<u32>,
}

impl Written {
    /// Adds a tensor, or its `.grad`. `times`: it, and its local tensor.
    pub fn add(&mut self, tensor: Borrowed<'_>, grad: bool, times: [u32; 2]) {
        self.tensors.push(tensor.as_ptr());
        self.grads.push(grad.into());
        self.times.push(times[0]);
        self.local_times.push(times[1]);
    }

    /// Forgets all of them.
    pub fn clear(&mut self) {
        self.tensors.clear();
        self.grads.clear();
        self.times.clear();
        self.local_times.clear();
    }
}

//! The loaded bridge, and safe owners of what it makes.
//!
//! Everything here must be called with Python's GIL held, by the thread that
//! owns the session; a run of an [`AtenProgram`](super::AtenProgram) releases it while kernels run.

use std::ffi::{CStr, c_int, c_void};
use std::path::Path;
use std::sync::OnceLock;

use crate::executor::ReplayError;
use crate::guard::first_difference;

use super::fact::FactKind;
use super::sys::{self, Fact, Functions, Place};

/// A Python object, held by one reference.
#[derive(Debug)]
pub struct Object(sys::Object);

impl Object {
    /// Takes a reference to an object that Python owns.
    ///
    /// # Safety
    /// `object` must be a live Python object, and the GIL must be held now and
    /// whenever the result is dropped.
    pub unsafe fn hold(object: sys::Object) -> Self {
        // SAFETY: the caller vouches for the object and the GIL.
        unsafe { (Bridge::get().functions.incref)(object) };
        Object(object)
    }

    /// Takes over a reference.
    ///
    /// # Safety
    /// `object` must be a live Python object with a reference that is the caller's
    /// to give, and the GIL must be held whenever the result is dropped.
    pub unsafe fn own(object: sys::Object) -> Self {
        Object(object)
    }

    /// Takes over a reference that C has returned; none if it has returned null.
    ///
    /// # Safety
    /// As [`Object::own`], where it is not null.
    pub(super) unsafe fn new(object: sys::Object) -> Option<Self> {
        (!object.is_null()).then_some(Object(object))
    }

    /// Objects in a new Python list.
    pub fn list(
        objects: impl ExactSizeIterator<Item = Result<Object, ReplayError>>,
    ) -> Result<Object, ReplayError> {
        let bridge = Bridge::get();
        // SAFETY: a plain number; the result is a new reference or null, and what is
        // dropped below when an object fails may have empty places.
        let list = unsafe { Object::new((bridge.functions.list_new)(objects.len() as u32)) }
            .ok_or_else(|| ReplayError::Bridge("no memory for the results".to_owned()))?;
        for (place, object) in (0..).zip(objects) {
            // SAFETY: a place of the new list, which takes over the reference.
            unsafe { (bridge.functions.list_set)(list.0, place, object?.into_ptr()) };
        }
        Ok(list)
    }

    /// The pointer.
    pub fn as_ptr(&self) -> sys::Object {
        self.0
    }

    /// The pointer, and with it the reference.
    pub fn into_ptr(self) -> sys::Object {
        std::mem::ManuallyDrop::new(self).0
    }
}

impl Drop for Object {
    fn drop(&mut self) {
        // SAFETY: the reference is ours; sessions are dropped with the GIL held.
        unsafe { (Bridge::get().functions.decref)(self.0) };
    }
}

/// The bridge of this process.
pub struct Bridge {
    functions: Functions,
    #[cfg(not(miri))]
    _library: libloading::Library,
}

static BRIDGE: OnceLock<Bridge> = OnceLock::new();

impl Bridge {
    /// Loads the bridge, once per process, and tells it the classes it must
    /// know.
    ///
    /// # Safety
    /// `path` must be a bridge built from this version's sources against the
    /// torch of this process; the objects must be classes; the GIL is held.
    pub unsafe fn load(
        path: &Path,
        dtensor: sys::Object,
        async_collective_tensor: sys::Object,
    ) -> Result<(), ReplayError> {
        if BRIDGE.get().is_some() {
            return Ok(());
        }
        // SAFETY: the caller vouches for the file.
        let library = unsafe { libloading::Library::new(path) }.map_err(|error| {
            ReplayError::Bridge(format!(
                "cannot load the bridge {}: {error}",
                path.display()
            ))
        })?;
        // SAFETY: as above; the library is kept beside its functions.
        let functions = unsafe { Functions::resolve(&library) }.map_err(|error| {
            ReplayError::Bridge(format!("{} is not a bridge: {error}", path.display()))
        })?;
        // SAFETY: a function of the bridge, called as it is declared.
        let abi = unsafe { (functions.abi)() };
        if abi != sys::ABI_VERSION {
            return Err(ReplayError::Bridge(format!(
                "the bridge {} has ABI version {abi}, this library needs {}",
                path.display(),
                sys::ABI_VERSION
            )));
        }
        let bridge = Bridge {
            functions,
            #[cfg(not(miri))]
            _library: library,
        };
        // SAFETY: the caller vouches for the classes.
        bridge.check(unsafe { (bridge.functions.init)(dtensor, async_collective_tensor) })?;
        let _ = BRIDGE.set(bridge);
        Ok(())
    }

    /// Takes a bridge in Rust that is part of this program: Miri loads none.
    #[cfg(miri)]
    pub fn link() {
        let functions = Functions::linked();
        let _ = BRIDGE.set(Bridge { functions });
    }

    /// Whether the bridge is loaded.
    pub fn is_loaded() -> bool {
        BRIDGE.get().is_some()
    }

    /// The loaded bridge.
    ///
    /// # Panics
    /// When it is not loaded: nothing that needs it can exist before.
    #[inline]
    pub fn get() -> &'static Bridge {
        BRIDGE
            .get()
            .expect("the bridge is loaded before it is used")
    }

    pub(super) fn functions(&self) -> &Functions {
        &self.functions
    }

    pub(super) fn message(&self) -> String {
        // SAFETY: the bridge returns a text that lives until its next call.
        unsafe { CStr::from_ptr((self.functions.error)()) }
            .to_string_lossy()
            .into_owned()
    }

    pub(super) fn check(&self, status: c_int) -> Result<(), ReplayError> {
        if status == 0 {
            Ok(())
        } else {
            Err(ReplayError::Bridge(self.message()))
        }
    }

    /// The version of torch that the bridge was built against.
    pub fn torch_version(&self) -> String {
        // SAFETY: a constant text.
        unsafe { CStr::from_ptr((self.functions.torch)()) }
            .to_string_lossy()
            .into_owned()
    }

    /// A digest of the state of a device's default generator.
    pub fn rng_digest(&self, device: rote_plans::Device) -> Result<u64, ReplayError> {
        let mut digest = 0;
        // SAFETY: writes one word.
        self.check(unsafe { (self.functions.rng_digest)(device.kind, device.index, &mut digest) })?;
        Ok(digest)
    }

    /// Tells `listener`, a Python object, of the ops of this thread from now on;
    /// null: no longer.
    ///
    /// # Safety
    /// `listener` must be null or a live object.
    pub unsafe fn observe(&self, listener: sys::Object) -> Result<(), ReplayError> {
        // SAFETY: the caller vouches for the object.
        self.check(unsafe { (self.functions.observe)(listener) })
    }

    /// Tells the listener of the innermost call on DTensors under way.
    pub fn observe_global_call(&self) -> Result<(), ReplayError> {
        // SAFETY: takes nothing.
        self.check(unsafe { (self.functions.observe_global_call)() })
    }

    /// Has the listener told of calls of the composite op `name`.
    pub fn observe_calls_of(&self, name: &CStr) -> Result<(), ReplayError> {
        // SAFETY: the text lives through the call, which copies it.
        self.check(unsafe { (self.functions.observe_calls_of)(name.as_ptr()) })
    }

    /// The first op of the last observed step that raised; empty if none did.
    pub fn raising(&self) -> String {
        // SAFETY: the text lives until the bridge's next call.
        let text = unsafe { CStr::from_ptr((self.functions.raising)()) };
        text.to_string_lossy().into_owned()
    }

    /// The op of another thread of Python that wrote what the last recorded step used, or
    /// read what it made; empty if there was none.
    pub fn others(&self) -> String {
        // SAFETY: the text lives until the bridge's next call.
        let text = unsafe { CStr::from_ptr((self.functions.others)()) };
        text.to_string_lossy().into_owned()
    }

    /// A list of the Python functions in the hooks of the autograd node that adds up a
    /// tensor's gradient; `None` stands for a hook of C++.
    ///
    /// # Safety
    /// `tensor` must be a live tensor object.
    pub unsafe fn hooks(&self, tensor: sys::Object) -> Result<Object, ReplayError> {
        // SAFETY: the caller vouches for the tensor; the result is a new reference.
        let list = unsafe { (self.functions.hooks)(tensor) };
        if list.is_null() {
            return Err(ReplayError::Bridge(self.message()));
        }
        Ok(Object(list))
    }

    /// What autograd knows of a tensor as a view: a tuple, for Python.
    ///
    /// # Safety
    /// `tensor` must be a live tensor object.
    pub unsafe fn view_of(&self, tensor: sys::Object) -> Result<Object, ReplayError> {
        // SAFETY: the caller vouches for the tensor; the result is a new reference.
        let view = unsafe { (self.functions.view_of)(tensor) };
        if view.is_null() {
            return Err(ReplayError::Bridge(self.message()));
        }
        Ok(Object(view))
    }

    /// A tensor as one that was made in inference mode.
    ///
    /// # Safety
    /// `tensor` must be a live tensor object.
    pub unsafe fn as_inference(&self, tensor: sys::Object) -> Result<Object, ReplayError> {
        // SAFETY: the caller vouches for the tensor; the result is a new reference.
        let made = unsafe { (self.functions.as_inference)(tensor) };
        if made.is_null() {
            return Err(ReplayError::Bridge(self.message()));
        }
        Ok(Object(made))
    }

    /// Makes a tensor a view of another. `how` and `rebuild`: of [`Bridge::view_of`].
    ///
    /// # Safety
    /// `tensor` and `base` must be live tensor objects, `rebuild` a live object.
    pub unsafe fn make_view(
        &self,
        tensor: sys::Object,
        base: sys::Object,
        how: u32,
        rebuild: sys::Object,
    ) -> Result<(), ReplayError> {
        // SAFETY: the caller vouches for the objects.
        self.check(unsafe { (self.functions.make_view)(tensor, base, how, rebuild) })
    }

    /// Says how often tensors were written, as autograd counts it.
    ///
    /// # Safety
    /// The objects must be live tensors.
    pub unsafe fn written(&self, written: &Written) -> Result<(), ReplayError> {
        let n = written.tensors.len();
        let all = [
            written.grads.len(),
            written.times.len(),
            written.local_times.len(),
        ];
        if all != [n; 3] {
            return Err(ReplayError::Bridge("lists of different lengths".to_owned()));
        }
        // SAFETY: pointers to `n` entries each; the caller vouches for the objects.
        self.check(unsafe {
            (self.functions.written)(
                written.tensors.as_ptr(),
                written.grads.as_ptr(),
                written.times.as_ptr(),
                written.local_times.as_ptr(),
                n as u32,
            )
        })
    }

    /// Marks a returned tensor as one whose graph is used up.
    pub fn mark_replayed(&self, tensor: &Object) -> Result<(), ReplayError> {
        // SAFETY: a live object.
        self.check(unsafe { (self.functions.mark_replayed)(tensor.as_ptr()) })
    }
}

/// Describes ops and tensors while a step is recorded, and keeps the addresses
/// of storages unique.
#[derive(Debug)]
pub struct Recording(*mut c_void);

impl Recording {
    /// A new recording.
    #[allow(clippy::new_without_default, reason = "it needs a loaded bridge")]
    pub fn new() -> Self {
        // SAFETY: makes an object that `drop` frees.
        Recording(unsafe { (Bridge::get().functions.recording_new)() })
    }

    /// Describes an op that has run. What is described holds until the next call.
    ///
    /// # Safety
    /// The objects must be live: an `OpOverload`, a tuple, a dict or `None`,
    /// and the op's result.
    pub unsafe fn op(
        &mut self,
        func: sys::Object,
        args: sys::Object,
        kwargs: sys::Object,
        result: sys::Object,
    ) -> Result<&sys::Op, ReplayError> {
        let mut op = std::ptr::null();
        let bridge = Bridge::get();
        // SAFETY: the caller vouches for the objects.
        bridge.check(unsafe {
            (bridge.functions.describe_op)(self.0, func, args, kwargs, result, &mut op)
        })?;
        // SAFETY: on success the bridge points at its own description, which
        // lives until the next call on this recording.
        Ok(unsafe { &*op })
    }

    /// Describes the op that has just run under observation; see
    /// [`Bridge::observe`]. What is described holds until the next call.
    pub fn observed_op(&mut self) -> Result<&sys::Op, ReplayError> {
        let mut op = std::ptr::null();
        let bridge = Bridge::get();
        // SAFETY: `op` outlives the call.
        bridge.check(unsafe { (bridge.functions.describe_observed)(self.0, &mut op) })?;
        // SAFETY: as in `op`.
        Ok(unsafe { &*op })
    }

    /// Describes one tensor.
    ///
    /// # Safety
    /// `tensor` must be a live tensor object.
    pub unsafe fn tensor(&mut self, tensor: sys::Object) -> Result<&sys::Tensor, ReplayError> {
        let mut out = std::ptr::null();
        let bridge = Bridge::get();
        // SAFETY: the caller vouches for the object.
        bridge.check(unsafe { (bridge.functions.describe_tensor)(self.0, tensor, &mut out) })?;
        // SAFETY: as in `op`.
        Ok(unsafe { &*out })
    }

    /// Whether anything still holds a storage that was described.
    pub fn alive(&self, storage: u64) -> bool {
        // SAFETY: looks the address up, without following it.
        unsafe { (Bridge::get().functions.storage_alive)(self.0, storage) != 0 }
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        // SAFETY: made by `new`, freed once.
        unsafe { (Bridge::get().functions.recording_free)(self.0) };
    }
}

/// Collects the facts of a call's arguments.
#[derive(Debug)]
pub struct Call {
    call: *mut c_void,
    words: Vec<u64>,
    facts: Vec<Fact>,
    arguments: (sys::Object, sys::Object),
}

impl Call {
    /// A collector, to be used for every call of a session.
    #[allow(clippy::new_without_default, reason = "it needs a loaded bridge")]
    pub fn new() -> Self {
        // SAFETY: makes an object that `drop` frees.
        let call = unsafe { (Bridge::get().functions.call_new)() };
        Call {
            call,
            words: Vec::new(),
            facts: Vec::new(),
            arguments: (std::ptr::null_mut(), std::ptr::null_mut()),
        }
    }

    /// Adds storages of the state, and the tensor objects that have them, to see
    /// arguments that alias them.
    pub fn add_state(&mut self, storages: &[u64], objects: &[u64]) -> Result<(), ReplayError> {
        let n = storages.len().min(objects.len()) as u32;
        let bridge = Bridge::get();
        // SAFETY: pointers to at least `n` numbers each.
        bridge.check(unsafe {
            (bridge.functions.call_state)(self.call, storages.as_ptr(), objects.as_ptr(), n)
        })
    }

    /// Says which default process group there is, by a number.
    pub fn set_world(&mut self, world: u64) {
        // SAFETY: a collector of ours.
        unsafe { (Bridge::get().functions.call_world)(self.call, world) }
    }

    /// Flattens and reads the arguments.
    ///
    /// # Safety
    /// `args` must be a live tuple and `kwargs` a live dict.
    pub unsafe fn collect(
        &mut self,
        args: sys::Object,
        kwargs: sys::Object,
    ) -> Result<(), ReplayError> {
        self.arguments = (args, kwargs);
        let bridge = Bridge::get();
        let (mut words, mut facts, mut n) = (std::ptr::null(), std::ptr::null(), 0);
        // SAFETY: the caller vouches for the objects.
        bridge.check(unsafe {
            (bridge.functions.call_collect)(self.call, args, kwargs, &mut words, &mut facts, &mut n)
        })?;
        // SAFETY: on success the arrays have `n` entries and live until the
        // next call; there is always at least the structure word.
        let (words, facts) = unsafe {
            (
                std::slice::from_raw_parts(words, n as usize),
                std::slice::from_raw_parts(facts, n as usize),
            )
        };
        self.words.clear();
        self.words.extend_from_slice(words);
        self.facts.clear();
        self.facts.extend_from_slice(facts);
        Ok(())
    }

    /// Reads the last arguments again, which the caller still holds.
    pub fn recollect(&mut self) -> Result<(), ReplayError> {
        let (args, kwargs) = self.arguments;
        // SAFETY: the call that passed them is still under way.
        unsafe { self.collect(args, kwargs) }
    }

    /// The words of the last call.
    pub fn words(&self) -> &[u64] {
        &self.words
    }

    /// Where each word of the last call belongs.
    pub fn places(&self) -> &[Fact] {
        &self.facts
    }

    /// Where a leaf of the last collected arguments, a tensor, lies in its storage.
    /// `closely`: with a number for what it is a view of.
    pub fn place(&self, leaf: u32, closely: bool) -> Result<Place, ReplayError> {
        let object = self.leaf(leaf);
        if object.is_null() {
            return Err(ReplayError::Bridge(format!("there is no leaf {leaf}")));
        }
        // SAFETY: the caller's arguments are live while the call lasts.
        unsafe { place(object, closely) }
    }

    /// The facts of the last call, which the caller still makes, held.
    pub fn last(&self) -> Result<CallFacts, ReplayError> {
        let bridge = Bridge::get();
        // SAFETY: the arguments are live while the call lasts; makes an object
        // that `drop` frees.
        let held = unsafe { (bridge.functions.call_hold)(self.call) };
        if held.is_null() {
            return Err(ReplayError::Bridge(bridge.message()));
        }
        Ok(CallFacts {
            words: self.words.clone(),
            places: self.facts.clone(),
            held: Held(held),
        })
    }

    /// The first word of the last call in which it differs from an earlier one.
    pub fn difference(&self, earlier: &CallFacts) -> Result<Option<usize>, ReplayError> {
        if let Some(word) = first_difference(&earlier.words, &self.words) {
            return Ok(Some(word));
        }
        let bridge = Bridge::get();
        let mut word = -1;
        // SAFETY: both are ours, and the arguments are live while the call lasts.
        bridge.check(unsafe {
            (bridge.functions.held_difference)(earlier.held.0, self.call, &mut word)
        })?;
        Ok(usize::try_from(word).ok())
    }

    /// A leaf of the last collected arguments, or null.
    pub fn leaf(&self, leaf: u32) -> sys::Object {
        // SAFETY: bounds are checked by the bridge; the caller's arguments are
        // live while the call lasts.
        unsafe { (Bridge::get().functions.call_leaf)(self.call, leaf) }
    }
}

/// Where a tensor, local or distributed, lies in its storage.
///
/// # Safety
/// `tensor` must be a live tensor object, and the GIL held.
pub unsafe fn place(tensor: sys::Object, closely: bool) -> Result<Place, ReplayError> {
    let bridge = Bridge::get();
    let mut found = Place::default();
    // SAFETY: the caller vouches for the tensor.
    bridge.check(unsafe {
        (bridge.functions.tensor_place)(tensor, c_int::from(closely), &mut found)
    })?;
    Ok(found)
}

impl Drop for Call {
    fn drop(&mut self) {
        // SAFETY: made by `new`, freed once.
        unsafe { (Bridge::get().functions.call_free)(self.call) };
    }
}

/// The facts of one call, to compare later ones with. What they name by an
/// address is held, so that no other object gets it.
#[derive(Debug)]
pub struct CallFacts {
    /// The facts.
    pub words: Vec<u64>,
    /// Where each of them belongs.
    pub places: Vec<Fact>,
    held: Held,
}

/// What the words of a call stand for.
#[derive(Debug)]
struct Held(*mut c_void);

impl Drop for Held {
    fn drop(&mut self) {
        // SAFETY: made by `Call::last`, freed once; sessions are dropped with the GIL held.
        unsafe { (Bridge::get().functions.held_free)(self.0) };
    }
}

/// Reads facts about Python objects that outlive calls.
#[derive(Debug)]
pub struct FactTable {
    table: *mut c_void,
    words: usize,
}

impl FactTable {
    /// An empty table.
    #[allow(clippy::new_without_default, reason = "it needs a loaded bridge")]
    pub fn new() -> Self {
        // SAFETY: makes an object that `drop` frees.
        let table = unsafe { (Bridge::get().functions.table_new)() };
        FactTable { table, words: 0 }
    }

    /// Adds a fact of a kind that `facts.h` names; returns its first word and
    /// how many it has.
    ///
    /// # Safety
    /// The objects must be live and of the type that the kind asks for; `key`
    /// may be null.
    pub unsafe fn add(
        &mut self,
        kind: FactKind,
        container: sys::Object,
        key: sys::Object,
    ) -> Result<(usize, usize), ReplayError> {
        let bridge = Bridge::get();
        let mut width = 0;
        // SAFETY: the caller vouches for the objects.
        bridge.check(unsafe {
            (bridge.functions.table_add)(self.table, kind as u32, container, key, &mut width)
        })?;
        let start = self.words;
        self.words += width as usize;
        Ok((start, width as usize))
    }

    /// How many words there are.
    pub fn words(&self) -> usize {
        self.words
    }

    /// Reads every fact. `call` has collected the arguments of the call that is under way.
    pub fn read(&self, call: &Call, out: &mut Vec<u64>) -> Result<(), ReplayError> {
        out.resize(self.words, 0);
        let bridge = Bridge::get();
        // SAFETY: the bridge writes `words` words.
        bridge.check(unsafe {
            (bridge.functions.table_read)(self.table, call.call, out.as_mut_ptr())
        })
    }

    /// Holds what the facts see now, for comparing by content later.
    pub fn hold(&mut self) -> Result<(), ReplayError> {
        let bridge = Bridge::get();
        // SAFETY: a table of ours.
        bridge.check(unsafe { (bridge.functions.table_hold)(self.table) })
    }

    /// Whether the value behind a word equals the held one.
    pub fn same(&self, word: usize) -> bool {
        let bridge = Bridge::get();
        let mut same = 0;
        // SAFETY: a word of this table.
        let status = unsafe { (bridge.functions.table_same)(self.table, word as u32, &mut same) };
        status == 0 && same != 0
    }

    /// What a word sees, as text: when it was held, or now.
    pub fn text(&self, word: usize, held: bool) -> String {
        // SAFETY: a word of this table; the text lives until the bridge's next call.
        let text = unsafe {
            CStr::from_ptr((Bridge::get().functions.table_text)(
                self.table,
                word as u32,
                held as c_int,
            ))
        };
        text.to_string_lossy().into_owned()
    }

    /// The float behind a word, now.
    pub fn float(&self, word: usize) -> Result<f64, ReplayError> {
        let bridge = Bridge::get();
        let mut out = 0.0;
        // SAFETY: a word of this table; writes one float.
        let status = unsafe { (bridge.functions.read_float)(self.table, word as u32, &mut out) };
        bridge.check(status)?;
        Ok(out)
    }
}

impl Drop for FactTable {
    fn drop(&mut self) {
        // SAFETY: made by `new`, freed once.
        unsafe { (Bridge::get().functions.table_free)(self.table) };
    }
}

/// Tensors that a step has written, how often as autograd counts it, and how often the
/// local tensors of DTensors.
#[derive(Debug, Default)]
pub struct Written {
    tensors: Vec<sys::Object>,
    grads: Vec<u8>,
    times: Vec<u32>,
    local_times: Vec<u32>,
}

impl Written {
    /// Adds a tensor, or its `.grad`. `times`: it, and its local tensor.
    pub fn add(&mut self, tensor: sys::Object, grad: bool, times: [u32; 2]) {
        self.tensors.push(tensor);
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

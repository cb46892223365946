//! The loaded bridge, and safe owners of what it makes.
//!
//! Everything here must be called with Python's GIL held, by the thread that
//! owns the session; a run of an [`AtenProgram`](super::AtenProgram) releases it while kernels run.

use std::ffi::{CStr, c_int};
use std::marker::PhantomData;
use std::path::Path;
use std::sync::OnceLock;

use rote_replay::ReplayError;

use crate::frontend::Written;
use crate::sys::{self, Functions};

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
    pub(crate) unsafe fn new(object: sys::Object) -> Option<Self> {
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

    /// It, to pass it.
    pub fn borrow(&self) -> Borrowed<'_> {
        Borrowed(self.0, PhantomData)
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

/// A Python object that somebody else holds for `'a`, while the GIL is held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Borrowed<'a>(sys::Object, PhantomData<&'a Object>);

impl Borrowed<'_> {
    /// An object of the caller's.
    ///
    /// # Safety
    /// `object` must be a live Python object, and the GIL held, for as long as the result is used. Where a tensor is
    /// asked for, it must be one.
    pub unsafe fn new(object: sys::Object) -> Self {
        Borrowed(object, PhantomData)
    }

    /// The pointer.
    pub fn as_ptr(self) -> sys::Object {
        self.0
    }

    /// A reference of our own.
    pub fn hold(self) -> Object {
        // SAFETY: the object is live and the GIL held, by `new`.
        unsafe { Object::hold(self.0) }
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

    pub(crate) fn functions(&self) -> &Functions {
        &self.functions
    }

    pub(crate) fn message(&self) -> String {
        // SAFETY: the bridge returns a text that lives until its next call.
        unsafe { CStr::from_ptr((self.functions.error)()) }
            .to_string_lossy()
            .into_owned()
    }

    pub(crate) fn check(&self, status: c_int) -> Result<(), ReplayError> {
        if status == 0 {
            Ok(())
        } else {
            Err(ReplayError::Bridge(self.message()))
        }
    }

    /// A digest of the state of a device's default generator.
    pub fn rng_digest(&self, device: rote_plans::Device) -> Result<u64, ReplayError> {
        let mut digest = 0;
        // SAFETY: writes one word.
        self.check(unsafe { (self.functions.rng_digest)(device.kind, device.index, &mut digest) })?;
        Ok(digest)
    }

    /// Records the ops of this thread from now on, and tells `listener`, a Python object, of those that are not simply
    /// recorded; null: no longer.
    ///
    /// # Safety
    /// `listener` must be null or a live object, and the sink's session live until the bridge observes no longer.
    pub unsafe fn observe(
        &self,
        listener: sys::Object,
        sink: &sys::Sink,
    ) -> Result<(), ReplayError> {
        // SAFETY: the caller vouches for the object and the session. The sink is copied.
        self.check(unsafe { (self.functions.observe)(listener, sink) })
    }

    /// Records the innermost call on DTensors under way. Returns a new tuple of its arguments the first time,
    /// then None.
    pub fn observe_global_call(&self) -> Result<sys::Object, ReplayError> {
        let mut args = std::ptr::null_mut();
        // SAFETY: `args` outlives the call.
        self.check(unsafe { (self.functions.observe_global_call)(&mut args) })?;
        Ok(args)
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

    /// Begins to note which code Python runs, on all threads. False, and nothing is done, where another profiler
    /// listens.
    ///
    /// # Safety
    /// The GIL must be held.
    pub unsafe fn begin_calls(&self) -> bool {
        // SAFETY: the caller holds the GIL.
        unsafe { (self.functions.calls_begin)() != 0 }
    }

    /// Notes what the calling thread runs too: it was started after [`Bridge::begin_calls`].
    ///
    /// # Safety
    /// The GIL must be held.
    pub unsafe fn join_calls(&self) {
        // SAFETY: the caller holds the GIL.
        unsafe { (self.functions.calls_join)() }
    }

    /// A list of the code that has run since then; `None` of Python where not all of it was seen.
    ///
    /// # Safety
    /// The GIL must be held.
    pub unsafe fn end_calls(&self) -> Result<Object, ReplayError> {
        // SAFETY: the caller holds the GIL; the result is a new reference.
        let codes = unsafe { (self.functions.calls_end)() };
        if codes.is_null() {
            return Err(ReplayError::Bridge(self.message()));
        }
        Ok(Object(codes))
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

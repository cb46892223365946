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
    /// Loads the bridge, once per process.
    ///
    /// # Safety
    /// `path` must be a bridge built from this version's sources against the
    /// torch of this process.
    pub unsafe fn load(path: &Path) -> Result<(), ReplayError> {
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
    /// recorded, until Python calls the bridge's `observe_no_more`.
    ///
    /// # Safety
    /// `listener` must be a live object, and the sink's session live until the bridge observes no longer.
    pub unsafe fn observe(
        &self,
        listener: sys::Object,
        sink: &sys::Sink,
    ) -> Result<(), ReplayError> {
        // SAFETY: the caller vouches for the object and the session. The sink is copied.
        self.check(unsafe { (self.functions.observe)(listener, sink) })
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
}

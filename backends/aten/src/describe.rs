//! Descriptions of PyTorch's ops and tensors for a recording.

use rote_events::events;
use rote_replay::ReplayError;
use rote_replay::frontend::Describe;
use rote_tracer::{OpEvent, TensorEvent};

use crate::bridge::{Borrowed, Bridge};
use crate::frontend::Aten;
use crate::sys;

/// Describes ops and tensors while a step is recorded, and keeps the addresses
/// of storages unique.
#[derive(Debug)]
pub struct Describer(*mut sys::Describer);

impl Describer {
    /// Describes a new recording.
    #[allow(clippy::new_without_default, reason = "it needs a loaded bridge")]
    pub fn new() -> Self {
        // SAFETY: makes an object that `drop` frees.
        Describer(unsafe { (Bridge::get().functions().describer_new)() })
    }

    /// Describes an op that has run.
    ///
    /// # Safety
    /// The objects must be live, and the GIL held: an `OpOverload`, a tuple, a dict or `None`, and the op's result.
    pub unsafe fn op<'a>(
        &'a mut self,
        [func, args, kwargs, result]: [sys::Object; 4],
        source: &'a str,
    ) -> Result<OpEvent<'a>, ReplayError> {
        let mut op = std::ptr::null();
        let bridge = Bridge::get();
        // SAFETY: the caller vouches for the objects. On success the bridge points at its own
        // description, which lives until the next call on this recording.
        unsafe {
            bridge.check((bridge.functions().describe_op)(
                self.0, func, args, kwargs, result, &mut op,
            ))?;
            Ok(events::op(&*op, source))
        }
    }

    /// Describes the op that has just run under observation; see [`Bridge::observe`].
    pub fn observed_op<'a>(&'a mut self, source: &'a str) -> Result<OpEvent<'a>, ReplayError> {
        let mut op = std::ptr::null();
        let bridge = Bridge::get();
        // SAFETY: `op` outlives the call. What is described lives as in `op`.
        unsafe {
            bridge.check((bridge.functions().describe_observed)(self.0, &mut op))?;
            Ok(events::op(&*op, source))
        }
    }

    /// The number of the handle that a described op of a process group returned; 0 if none has returned it. Waits a
    /// moment until nobody but Python holds it.
    ///
    /// # Safety
    /// The object must be a live `torch.distributed.Work`, and the GIL held.
    pub unsafe fn work(&mut self, work: sys::Object) -> Result<i64, ReplayError> {
        let mut number = 0;
        let bridge = Bridge::get();
        // SAFETY: the caller vouches for the object; `number` outlives the call.
        unsafe { bridge.check((bridge.functions().work)(self.0, work, &mut number))? };
        Ok(number)
    }
}

impl Describe<Aten> for Describer {
    fn tensor<'a, 'r: 'a>(
        &'a mut self,
        tensor: Borrowed<'r>,
    ) -> Result<TensorEvent<'a>, ReplayError> {
        let mut out = std::ptr::null();
        let bridge = Bridge::get();
        // SAFETY: a live tensor. What is described lives as in `op`.
        unsafe {
            bridge.check((bridge.functions().describe_tensor)(
                self.0,
                tensor.as_ptr(),
                &mut out,
            ))?;
            Ok(events::tensor(&*out))
        }
    }

    fn is_alive(&self, storage: u64) -> bool {
        // SAFETY: looks the address up, without following it.
        unsafe { (Bridge::get().functions().storage_alive)(self.0, storage) != 0 }
    }
}

impl Drop for Describer {
    fn drop(&mut self) {
        // SAFETY: made by `new`, freed once.
        unsafe { (Bridge::get().functions().describer_free)(self.0) };
    }
}

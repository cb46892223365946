//! Held tensors, and who owns their memory.

use std::ffi::c_void;
use std::ptr::NonNull;
use std::rc::Rc;

use rote_plans::value::reach;
use rote_plans::{DType, Device};
use rote_tracer::TensorEvent;

use crate::dl::{self, DlManagedTensor, DlTensor};
use crate::table::Framework;
use rote_events::events::MAX_DIMS;

/// A tensor, held with its memory. Clones are the same tensor.
#[derive(Clone, Debug)]
pub struct Tensor(pub(crate) Rc<Held>);

/// What a [`Tensor`] is.
#[derive(Debug)]
pub(crate) struct Held {
    /// The address of the first element.
    pub(crate) data: *mut c_void,
    pub(crate) dtype: DType,
    pub(crate) device: Device,
    /// Sizes, then strides.
    pub(crate) dims: Rc<[i64]>,
    pub(crate) storage: u64,
    /// The byte of the storage at which the first element lies.
    pub(crate) start: i64,
    pub(crate) storage_bytes: u64,
    memory: Memory,
}

/// Whose memory a tensor is.
#[derive(Debug)]
enum Memory {
    /// The caller's, for as long as the call lasts.
    Borrowed,
    /// A tensor of the framework's.
    Managed(Managed),
    /// That of another tensor.
    Of(#[expect(dead_code, reason = "is held")] Tensor),
    /// Allocated by the framework for a plan.
    Block(#[expect(dead_code, reason = "is held")] Rc<Block>),
}

/// A tensor of the framework's that is deleted once.
#[derive(Debug)]
pub(crate) struct Managed(NonNull<DlManagedTensor>);

impl Managed {
    /// Takes over a tensor.
    ///
    /// # Safety
    /// It must be live, ours to delete, and the last that uses it.
    pub(crate) unsafe fn new(tensor: NonNull<DlManagedTensor>) -> Self {
        Managed(tensor)
    }

    pub(crate) fn tensor(&self) -> &DlTensor {
        // SAFETY: live until it is deleted.
        unsafe { &self.0.as_ref().dl_tensor }
    }

    fn into_raw(self) -> *mut DlManagedTensor {
        std::mem::ManuallyDrop::new(self).0.as_ptr()
    }
}

impl Drop for Managed {
    fn drop(&mut self) {
        // SAFETY: live, and deleted once.
        unsafe {
            if let Some(deleter) = self.0.as_ref().deleter {
                deleter(self.0.as_ptr());
            }
        }
    }
}

/// Memory that the framework has allocated for a plan.
#[derive(Debug)]
pub(crate) struct Block {
    framework: Rc<Framework>,
    pub(crate) memory: *mut c_void,
}

impl Block {
    pub(crate) fn new(
        framework: &Rc<Framework>,
        bytes: u64,
        device: Device,
    ) -> Result<Self, String> {
        let allocate = framework.allocate.ok_or("`allocate` is null")?;
        let mut memory = std::ptr::null_mut();
        // SAFETY: the framework vouches for its functions.
        let status = unsafe {
            allocate(
                framework.context,
                bytes.max(1),
                device.kind.into(),
                device.index.into(),
                &mut memory,
            )
        };
        framework.check("allocate", status)?;
        if memory.is_null() {
            return Err(format!("`allocate` gave no memory for {bytes} bytes"));
        }
        Ok(Block {
            framework: Rc::clone(framework),
            memory,
        })
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        if let Some(release) = self.framework.release {
            // SAFETY: memory of `allocate`, given back once.
            unsafe { release(self.framework.context, self.memory) };
        }
    }
}

/// A tensor that a program describes: a leaf of a call, or a tensor of the state.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Described {
    pub(crate) tensor: DlTensor,
    pub(crate) storage: u64,
    pub(crate) start: i64,
    pub(crate) bytes: u64,
}

/// Strides of a contiguous tensor, in elements.
pub(crate) fn contiguous(sizes: &[i64]) -> Vec<i64> {
    let mut strides = vec![1_i64; sizes.len()];
    for dim in (1..sizes.len()).rev() {
        strides[dim - 1] = strides[dim].saturating_mul(sizes[dim].max(1));
    }
    strides
}

/// Sizes and strides of a tensor.
///
/// # Safety
/// Shape and strides must be live, with `ndim` entries.
pub(crate) unsafe fn dims(tensor: &DlTensor) -> Result<Rc<[i64]>, String> {
    let ndim = usize::try_from(tensor.ndim)
        .ok()
        .filter(|&ndim| ndim <= MAX_DIMS);
    let ndim = ndim.ok_or_else(|| format!("has {} dims, expected 0 to {MAX_DIMS}", tensor.ndim))?;
    if ndim > 0 && tensor.shape.is_null() {
        return Err("has no shape".to_owned());
    }
    let list = |start: *const i64| match ndim {
        0 => &[][..],
        // SAFETY: the caller vouches for the lists.
        _ => unsafe { std::slice::from_raw_parts(start, ndim) },
    };
    let mut dims = list(tensor.shape).to_vec();
    if tensor.strides.is_null() {
        dims.extend(contiguous(&dims.clone()));
    } else {
        dims.extend(list(tensor.strides));
    }
    Ok(dims.into())
}

impl Tensor {
    /// A tensor as it was described, if what is said of it can be.
    ///
    /// # Safety
    /// What the description points at must be live.
    unsafe fn described(described: &Described, memory: Memory) -> Result<Self, String> {
        let tensor = &described.tensor;
        let dtype = dl::dtype(tensor.dtype).ok_or_else(|| {
            let dl::DlType { code, bits, lanes } = tensor.dtype;
            format!("has the element type {code}, {bits} bits, {lanes} lanes, which does not exist")
        })?;
        let device = dl::device(tensor.device).ok_or_else(|| {
            format!(
                "is on device type {}, expected 1 (cpu) or 2 (cuda)",
                tensor.device.device_type
            )
        })?;
        // SAFETY: the caller vouches for the lists.
        let dims = unsafe { dims(tensor)? };
        if tensor.data.is_null() && !dims[..dims.len() / 2].contains(&0) {
            return Err("has no memory".to_owned());
        }
        let data = tensor.data.wrapping_byte_add(tensor.byte_offset as usize);
        let element = dtype.bytes().unwrap_or(1);
        if data.addr() as u64 % element != 0 || described.start % element as i64 != 0 {
            return Err(format!("does not begin at a multiple of {element} bytes"));
        }
        let mut held = Held {
            data,
            dtype,
            device,
            dims,
            storage: described.storage,
            start: described.start,
            storage_bytes: described.bytes,
            memory,
        };
        if held.storage == 0 {
            // Its own memory, as far as it reaches.
            held.storage = held.data.addr() as u64;
            held.start = 0;
            let sizes = held.sizes().iter().copied();
            let all = reach(element, 0, sizes.zip(held.strides().iter().copied()));
            held.storage_bytes = all.map_or(0, |(_, to)| u64::try_from(to).unwrap_or(u64::MAX));
        }
        match held.event().problem() {
            Some(problem) => Err(problem),
            None => Ok(Tensor(Rc::new(held))),
        }
    }

    /// The caller's, for as long as its call lasts.
    ///
    /// # Safety
    /// The memory must be live for so long, and what the description points at now.
    pub(crate) unsafe fn borrowed(described: &Described) -> Result<Self, String> {
        // SAFETY: the caller vouches for it.
        unsafe { Tensor::described(described, Memory::Borrowed) }
    }

    /// What a plan made: a tensor of the framework's.
    pub(crate) fn made(managed: Managed, like: &Made<'_>) -> Self {
        like.tensor(Memory::Managed(managed))
    }

    /// What lies in memory that was allocated for a plan.
    pub(crate) fn in_block(block: &Rc<Block>, like: &Made<'_>) -> Self {
        like.tensor(Memory::Block(Rc::clone(block)))
    }

    /// A tensor in another one's memory.
    pub(crate) fn of(other: &Tensor, like: &Made<'_>) -> Self {
        like.tensor(Memory::Of(other.clone()))
    }

    /// A tensor of which only the looks are known, to tell a recording of it.
    pub fn described_as(event: &TensorEvent<'_>) -> Self {
        let element = event.dtype.bytes().unwrap_or(1) as i64;
        Tensor(Rc::new(Held {
            data: std::ptr::null_mut(),
            dtype: event.dtype,
            device: event.device,
            dims: [event.sizes, event.strides].concat().into(),
            storage: event.storage,
            start: event.offset.saturating_mul(element),
            storage_bytes: event.storage_bytes,
            memory: Memory::Borrowed,
        }))
    }

    /// As the recorder takes it.
    pub(crate) fn event(&self) -> TensorEvent<'_> {
        self.0.event()
    }

    /// The tensor as DLPack's, for whoever deletes it: the framework's own, if nothing else refers to it.
    pub fn into_raw(self) -> *mut DlManagedTensor {
        match Rc::try_unwrap(self.0) {
            Ok(Held {
                memory: Memory::Managed(managed),
                ..
            }) => managed.into_raw(),
            Ok(held) => lent(Tensor(Rc::new(held))),
            Err(shared) => lent(Tensor(shared)),
        }
    }
}

/// What is known of a tensor that a plan has made.
pub(crate) struct Made<'a> {
    pub(crate) data: *mut c_void,
    pub(crate) dtype: DType,
    pub(crate) device: Device,
    /// Sizes, then strides.
    pub(crate) dims: &'a [i64],
}

impl Made<'_> {
    fn tensor(&self, memory: Memory) -> Tensor {
        Tensor(Rc::new(Held {
            data: self.data,
            dtype: self.dtype,
            device: self.device,
            dims: self.dims.into(),
            storage: self.data.addr() as u64,
            start: 0,
            storage_bytes: 0,
            memory,
        }))
    }
}

impl Held {
    pub(crate) fn sizes(&self) -> &[i64] {
        &self.dims[..self.dims.len() / 2]
    }

    pub(crate) fn strides(&self) -> &[i64] {
        &self.dims[self.dims.len() / 2..]
    }

    fn event(&self) -> TensorEvent<'_> {
        TensorEvent {
            storage: self.storage,
            dtype: self.dtype,
            device: self.device,
            sizes: self.sizes(),
            strides: self.strides(),
            offset: self.start / self.dtype.bytes().unwrap_or(1) as i64,
            storage_bytes: self.storage_bytes,
            marks: rote_plans::Marks::NONE,
            opaque: false,
        }
    }
}

/// What a tensor of ours hands to others: the struct comes first, since they delete it by its address.
#[repr(C)]
struct Lent {
    managed: DlManagedTensor,
    /// Holds the memory, and sizes and strides.
    _tensor: Tensor,
}

/// A tensor that holds another one until it is deleted.
fn lent(tensor: Tensor) -> *mut DlManagedTensor {
    /// # Safety
    /// `managed` must come from `lent`, be deleted once, and on the thread that lent it.
    unsafe extern "C" fn delete(managed: *mut DlManagedTensor) {
        // SAFETY: the first field of a `Lent` that `lent` has boxed, deleted once.
        drop(unsafe { Box::from_raw(managed.cast::<Lent>()) });
    }
    let ndim = tensor.0.dims.len() / 2;
    let shape = Rc::as_ptr(&tensor.0.dims).cast::<i64>().cast_mut(); // to be read
    let dtype = dl::dl_type(tensor.0.dtype);
    let device = dl::dl_device(tensor.0.device);
    let dl_tensor = DlTensor {
        data: tensor.0.data,
        device: device.unwrap_or(dl::DlDevice {
            device_type: 1,
            device_id: 0,
        }),
        ndim: ndim as i32,
        dtype: dtype.unwrap_or(dl::DlType {
            code: 1,
            bits: 8,
            lanes: 1,
        }),
        shape,
        strides: shape.wrapping_add(ndim),
        byte_offset: 0,
    };
    let lent = Box::new(Lent {
        managed: DlManagedTensor {
            dl_tensor,
            manager_ctx: std::ptr::null_mut(),
            deleter: Some(delete),
        },
        _tensor: tensor,
    });
    Box::into_raw(lent).cast()
}

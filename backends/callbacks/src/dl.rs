//! DLPack's structs (github.com/dmlc/dlpack, `dlpack.h`), and their numbers for devices and element types.

use std::ffi::c_void;

use rote_plans::{DType, Device};

/// A device: DLPack's `DLDevice`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DlDevice {
    /// 1 cpu, 2 cuda.
    pub device_type: i32,
    /// Index of the device.
    pub device_id: i32,
}

/// An element type: DLPack's `DLDataType`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DlType {
    /// 0 int, 1 unsigned, 2 float, 4 bfloat, 5 complex, 6 bool.
    pub code: u8,
    /// Bits of an element.
    pub bits: u8,
    /// Always 1.
    pub lanes: u16,
}

/// A tensor whose memory belongs to another owner: DLPack's `DLTensor`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct DlTensor {
    /// The address of its memory.
    pub data: *mut c_void,
    /// The device of the memory.
    pub device: DlDevice,
    /// Number of dims.
    pub ndim: i32,
    /// Element type.
    pub dtype: DlType,
    /// Shape, `ndim` entries.
    pub shape: *mut i64,
    /// Strides in elements, `ndim` entries; null for a contiguous tensor.
    pub strides: *mut i64,
    /// Bytes from `data` to the first element.
    pub byte_offset: u64,
}

/// A tensor with its owner: DLPack's `DLManagedTensor`.
#[repr(C)]
#[derive(Debug)]
pub struct DlManagedTensor {
    /// The tensor.
    pub dl_tensor: DlTensor,
    /// A pointer for the owner's use.
    pub manager_ctx: *mut c_void,
    /// Called once with the struct, when the tensor is no longer used; may be null.
    pub deleter: Option<unsafe extern "C" fn(*mut DlManagedTensor)>,
}

/// Names of element types, with DLPack's code and bits.
const TYPES: [(&str, u8, u8); 18] = [
    ("i8", 0, 8),
    ("i16", 0, 16),
    ("i32", 0, 32),
    ("i64", 0, 64),
    ("u8", 1, 8),
    ("u16", 1, 16),
    ("u32", 1, 32),
    ("u64", 1, 64),
    ("f16", 2, 16),
    ("f32", 2, 32),
    ("f64", 2, 64),
    ("bf16", 4, 16),
    ("c32", 5, 32),
    ("c64", 5, 64),
    ("c128", 5, 128),
    ("bool", 6, 8),
    ("f8e4m3fn", 10, 8),
    ("f8e5m2", 12, 8),
];

/// DLPack's device types by PyTorch's numbers: `(DeviceType, DLDeviceType)`.
const DEVICES: [(u8, i32); 2] = [(Device::CPU, 1), (Device::CUDA, 2)];

/// An element type as DLPack numbers it, if it does.
pub fn dl_type(dtype: DType) -> Option<DlType> {
    let name = dtype.name()?;
    let &(_, code, bits) = TYPES.iter().find(|row| row.0 == name)?;
    Some(DlType {
        code,
        bits,
        lanes: 1,
    })
}

/// The element type that DLPack numbers so.
pub fn dtype(found: DlType) -> Option<DType> {
    let row = TYPES
        .iter()
        .find(|row| (row.1, row.2) == (found.code, found.bits))?;
    DType::from_name(row.0).filter(|_| found.lanes == 1)
}

/// A device as DLPack numbers it, if it does.
pub fn dl_device(device: Device) -> Option<DlDevice> {
    let &(_, device_type) = DEVICES.iter().find(|row| row.0 == device.kind)?;
    Some(DlDevice {
        device_type,
        device_id: i32::from(device.index.max(0)),
    })
}

/// The device that DLPack numbers so. The CPU has no index.
pub fn device(found: DlDevice) -> Option<Device> {
    let &(kind, _) = DEVICES.iter().find(|row| row.1 == found.device_type)?;
    let index = match kind {
        Device::CPU => -1,
        _ => i8::try_from(found.device_id).ok()?,
    };
    Some(Device { kind, index })
}

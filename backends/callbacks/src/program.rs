//! A bound plan's ops and slots.
//!
//! A slot is DLPack's struct with the sizes and strides of the plan, set when the plan is bound. A run sets only
//! addresses. Each op has a list of pointers to slots, made when the plan is bound. Results are compared with the
//! plan before anything looks at them, so that a view never leaves its memory.

use std::cell::{Cell, RefCell, UnsafeCell};
use std::ffi::{CString, c_int, c_void};
use std::ptr::NonNull;
use std::rc::Rc;

use rote_events::args::{Arguments, c_string};
use rote_plans::schedule::Into;
use rote_plans::{self as plans, DType, Device, NONE, Plan, RngAction, keeps_to_arguments};
use rote_replay::{Backend, Communicator, LocalOp, NumberSite, Part, Program, ReplayError};

use crate::dl::{self, DlManagedTensor, DlTensor};
use crate::table::{Collective, Framework, NO_INTO};
use crate::tensor::{Block, Made, Managed, Tensor};

/// A value of the plan. What every op touches lies in one cache line.
#[repr(C, align(64))]
struct Slot {
    /// Read by the framework, written by us while it does not run.
    tensor: UnsafeCell<DlTensor>,
    full: Cell<bool>,
    /// Whether the strides are those of a contiguous tensor, so that null stands for them.
    contiguous: bool,
    root: u32,
    /// Of a root: how many slots look at its memory.
    users: Cell<u32>,
    /// Of a root: its memory.
    memory: Cell<Memory>,
    storage_bytes: u64,
    /// Sizes, then strides; `tensor` points here.
    dims: Rc<[i64]>,
    dtype: DType,
    device: Device,
}

/// Sizes and strides, for people.
fn shown(dims: &[i64]) -> String {
    let (sizes, strides) = dims.split_at(dims.len() / 2);
    format!("{sizes:?} with strides {strides:?}")
}

impl std::fmt::Debug for Slot {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}{:?} on {}", self.dtype, self.dims, self.device)
    }
}

#[derive(Debug, Default)]
enum Memory {
    #[default]
    None,
    /// What an op has made.
    Made(Managed),
    /// What others may hold too.
    Held(Tensor),
}

/// An op, bound.
#[derive(Debug)]
struct Op {
    number: u64,
    name: Box<str>,
    /// The slots that it is given, and pointers to them.
    tensors: Box<[u32]>,
    pointers: Box<[*const DlTensor]>,
    /// The slots of results, and whether the op writes in place what is there.
    outs: Box<[(u32, bool)]>,
    /// Whether results lie in the arena, and how they get there.
    into: Placed,
    /// Pointers to the slots of results, where the op writes into them.
    places: Box<[*const DlTensor]>,
}

/// How the results of an op get where they are to lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Placed {
    /// They lie where the op puts them.
    Anywhere,
    /// The op writes them there.
    Written,
    /// They are copied there.
    Copied,
}

/// A plan's ops and slots, over the functions of a framework.
#[derive(Debug)]
pub struct CallbackProgram {
    framework: Rc<Framework>,
    ops: Vec<Op>,
    views: Vec<(u32, u32, isize)>,
    collectives: Vec<(u64, u32, u32)>,
    slots: Rc<[Slot]>,
    /// Of each value, the collective that writes it.
    writers: RefCell<Box<[Option<u64>]>>,
    /// Where ops put their results.
    made: Rc<[Cell<*mut DlManagedTensor>]>,
    arena: Option<(Rc<Block>, u64)>,
    /// Devices whose generators runs move.
    draws: Vec<Device>,
    /// How many slots for generators the plan has. The states from before a run lie in the next ones.
    generators: u32,
    /// Collectives that were started and not waited for.
    under_way: Cell<u32>,
    /// For each of them, the value that it writes, and the root of what it reads, which is held until the wait.
    reading: RefCell<Vec<(u32, u32)>>,
    /// Bytes of results since they were last asked for.
    allocated: Cell<u64>,
}

#[cold]
fn is_empty(slot: u32) -> String {
    format!("slot {slot} is empty")
}

fn bind_error(message: impl std::convert::Into<String>) -> ReplayError {
    ReplayError::Bind(message.into())
}

/// Copies elements from one tensor in host memory to another of the same sizes. A tensor is the address of its first
/// element, and its strides.
///
/// # Safety
/// Both tensors must be live and must have the given sizes and element size.
unsafe fn copy(
    from: (*mut c_void, *const i64),
    to: (*mut c_void, *const i64),
    sizes: &[i64],
    element: usize,
) {
    if sizes.contains(&0) {
        return;
    }
    let mut at = vec![0_i64; sizes.len()];
    loop {
        // SAFETY: `at` is below `sizes`, of which both lists have as many entries.
        let address = |(data, strides): (*mut c_void, *const i64)| unsafe {
            let index: i64 = at
                .iter()
                .enumerate()
                .map(|(d, i)| i * *strides.add(d))
                .sum();
            data.cast::<u8>().offset(index as isize * element as isize)
        };
        // SAFETY: as above.
        unsafe { std::ptr::copy(address(from), address(to), element) };
        let Some(dim) = (0..sizes.len()).rev().find(|&d| at[d] + 1 < sizes[d]) else {
            return;
        };
        at[dim] += 1;
        at[dim + 1..].fill(0);
    }
}

impl CallbackProgram {
    /// Slots for the values of a plan.
    ///
    /// # Errors
    ///
    /// [`ReplayError::Bind`] for element types and devices that DLPack does not have.
    pub fn of(framework: &Rc<Framework>, plan: &Plan) -> Result<Self, ReplayError> {
        let slots = plan.values.iter().map(|value| {
            let (dtype, device) = (value.dtype, value.device);
            let unknown = || bind_error(format!("DLPack has no {dtype} on {device}"));
            let sizes = plan.dims(value.shape);
            let strides = plan.dims(value.strides);
            let contiguous = crate::tensor::contiguous(sizes) == *strides;
            let dims: Rc<[i64]> = [sizes, strides].concat().into();
            let ndim = dims.len() / 2;
            let shape = Rc::as_ptr(&dims).cast::<i64>().cast_mut(); // nobody writes there
            Ok(Slot {
                tensor: UnsafeCell::new(DlTensor {
                    data: std::ptr::null_mut(),
                    device: dl::dl_device(device).ok_or_else(unknown)?,
                    ndim: ndim as i32,
                    dtype: dl::dl_type(dtype).ok_or_else(unknown)?,
                    shape,
                    strides: shape.wrapping_add(ndim),
                    byte_offset: 0,
                }),
                dims,
                dtype,
                device,
                root: value.root,
                storage_bytes: value.storage_bytes,
                contiguous,
                full: Cell::new(false),
                memory: Cell::default(),
                users: Cell::new(0),
            })
        });
        let slots: Vec<Slot> = slots.collect::<Result<_, ReplayError>>()?;
        let writers = vec![None; slots.len()];
        Ok(CallbackProgram {
            framework: Rc::clone(framework),
            ops: Vec::new(),
            views: Vec::new(),
            collectives: Vec::new(),
            slots: slots.into(),
            writers: RefCell::new(writers.into()),
            made: Rc::new([]),
            arena: None,
            draws: Vec::new(),
            generators: plan.rng_slots,
            under_way: Cell::new(0),
            reading: RefCell::default(),
            allocated: Cell::new(0),
        })
    }

    #[inline]
    fn slot(&self, slot: u32) -> &Slot {
        &self.slots[slot as usize]
    }

    #[inline]
    fn full(&self, slot: u32) -> Result<&Slot, String> {
        let found = self.slot(slot);
        match found.full.get() {
            true => Ok(found),
            false => Err(is_empty(slot)),
        }
    }

    /// Gives a root its memory, and fills its slot.
    #[inline]
    fn fill(&self, slot: u32, data: *mut c_void, memory: Memory) {
        self.empty(slot);
        let place = self.slot(slot);
        place.set_data(data);
        place.full.set(true);
        place.memory.set(memory);
        place.users.set(place.users.get() + 1);
    }

    /// Empties a slot. Memory that no slot looks at any more goes.
    #[inline]
    fn empty(&self, slot: u32) {
        let place = self.slot(slot);
        if !place.full.take() {
            return;
        }
        self.leave(place.root);
    }

    /// One user less of the memory of a root, which goes with the last one.
    #[inline]
    fn leave(&self, root: u32) {
        let root = self.slot(root);
        root.users.set(root.users.get() - 1);
        if root.users.get() == 0 {
            root.memory.take();
        }
    }

    /// Puts what a tensor has into a slot.
    pub(crate) fn put(&self, slot: u32, tensor: &Tensor, part: Part) -> Result<(), ReplayError> {
        if part == Part::Grad {
            return Err(bind_error(
                "the plan reads the gradient of a tensor: name gradients as tensors of the state",
            ));
        }
        let place = self.slot(slot);
        let held = &tensor.0;
        if (held.dtype, held.device) != (place.dtype, place.device) || *held.dims != *place.dims {
            return Err(bind_error(format!(
                "a tensor is {} {} on {}, the plan has {} {} on {}",
                held.dtype,
                shown(&held.dims),
                held.device,
                place.dtype,
                shown(&place.dims),
                place.device
            )));
        }
        self.fill(slot, held.data, Memory::Held(tensor.clone()));
        Ok(())
    }

    /// What an op has left: its results go into their slots, if they are what the plan has.
    #[inline]
    fn take(&self, op: &Op) -> Result<(), String> {
        let mut wrong = None;
        for (nth, (&(out, written), made)) in op.outs.iter().zip(self.made.iter()).enumerate() {
            let made = NonNull::new(made.replace(std::ptr::null_mut()));
            // SAFETY: a tensor that the framework gives away.
            let made = made.map(|made| unsafe { Managed::new(made) });
            if out == NONE {
                continue;
            }
            if let Err(what) = self.take_one(op, out, written, made) {
                wrong.get_or_insert_with(|| format!("{}: result {nth} {what}", op.name));
            }
        }
        wrong.map_or(Ok(()), Err)
    }

    #[inline]
    fn take_one(
        &self,
        op: &Op,
        out: u32,
        written: bool,
        made: Option<Managed>,
    ) -> Result<(), String> {
        let place = self.slot(out);
        let Some(made) = made else {
            return match written {
                true => Ok(()),
                false => Err("is null".to_owned()),
            };
        };
        let found = made.tensor();
        place.fits(found)?;
        let data = found.data.wrapping_byte_add(found.byte_offset as usize);
        if found.data.is_null() && !place.is_empty() {
            return Err("has no memory".to_owned());
        }
        if written {
            return match data == place.data() {
                true => Ok(()),
                false => Err("was not written to the given place".to_owned()),
            };
        }
        // SAFETY: pointers to slots of ours, which nobody writes meanwhile.
        let taken = |slot: &*const DlTensor| unsafe { (**slot).data } == data;
        if op.pointers.iter().any(taken) && !place.is_empty() {
            return Err("lies in the memory of an argument".to_owned());
        }
        if op.into == Placed::Copied {
            let sizes = &place.dims[..place.dims.len() / 2];
            let strides = match found.strides.is_null() {
                true => place.strides(),
                false => found.strides.cast_const(),
            };
            let element = place.dtype.bytes().unwrap_or(1) as usize;
            // SAFETY: the framework vouches for what it has made, which is as large as the place.
            unsafe {
                copy(
                    (data, strides),
                    (place.data(), place.strides()),
                    sizes,
                    element,
                )
            };
            return Ok(());
        }
        self.allocated
            .set(self.allocated.get() + place.storage_bytes);
        self.fill(out, data, Memory::Made(made));
        Ok(())
    }

    fn random(&self, action: RngAction, device: Device, slot: u32) -> Result<(), String> {
        let keep = (self.framework.keep_generator).ok_or("`keep_generator` is null")?;
        // SAFETY: the framework vouches for its functions.
        let status = unsafe {
            keep(
                self.framework.context,
                action as u32,
                device.kind.into(),
                device.index.into(),
                slot,
            )
        };
        self.framework.check("keep_generator", status)
    }
}

impl Slot {
    fn data(&self) -> *mut c_void {
        // SAFETY: nobody writes meanwhile: one thread, and the framework only reads.
        unsafe { (*self.tensor.get()).data }
    }

    fn set_data(&self, data: *mut c_void) {
        // SAFETY: nobody reads meanwhile.
        unsafe { (*self.tensor.get()).data = data };
    }

    fn strides(&self) -> *const i64 {
        self.dims[self.dims.len() / 2..].as_ptr()
    }

    /// Whether it has no elements.
    fn is_empty(&self) -> bool {
        self.dims[..self.dims.len() / 2].contains(&0)
    }

    fn made(&self) -> Made<'_> {
        Made {
            data: self.data(),
            dtype: self.dtype,
            device: self.device,
            dims: &self.dims,
        }
    }

    /// Whether a tensor looks as the plan has it.
    #[inline]
    fn fits(&self, found: &DlTensor) -> Result<(), String> {
        let (sizes, strides) = self.dims.split_at(self.dims.len() / 2);
        // SAFETY: as in `data`.
        let own = unsafe { &*self.tensor.get() };
        // Few entries: a loop is faster than a call of `memcmp`.
        let is = |start: *const i64, expected: &[i64]| {
            let mut all = expected.is_empty() || !start.is_null();
            for (at, size) in expected.iter().enumerate() {
                // SAFETY: the framework vouches for lists of `ndim` entries.
                all = all && unsafe { *start.add(at) } == *size;
            }
            all
        };
        let strided = || match found.strides.is_null() {
            true => self.contiguous,
            // Where there is one element or none, strides say nothing.
            false => is(found.strides, strides) || sizes.iter().all(|size| *size <= 1),
        };
        if found.ndim == own.ndim
            && found.dtype == own.dtype
            && found.device == own.device
            && is(found.shape, sizes)
            && strided()
        {
            return Ok(());
        }
        Err(self.misfit(found))
    }

    #[cold]
    fn misfit(&self, found: &DlTensor) -> String {
        // SAFETY: the framework vouches for lists of `ndim` entries.
        let dims = unsafe { crate::tensor::dims(found) };
        let dtype = dl::dtype(found.dtype).map_or("?".to_owned(), |dtype| dtype.to_string());
        let device = dl::device(found.device).map_or("?".to_owned(), |device| device.to_string());
        let dims = match &dims {
            Ok(dims) => shown(dims),
            Err(problem) => problem.clone(),
        };
        format!(
            "is {dtype} {dims} on {device}, the plan has {} {} on {}",
            self.dtype,
            shown(&self.dims),
            self.device
        )
    }
}

impl Backend for CallbackProgram {
    type Tensor = Tensor;

    fn bind_arena(&mut self, bytes: u64, device: Device) -> Result<(), ReplayError> {
        let block = Block::new(&self.framework, bytes, device).map_err(ReplayError::Bind)?;
        self.arena = Some((Rc::new(block), bytes));
        Ok(())
    }

    fn bind_place(&mut self, _: &Plan, value: u32, offset: u64) -> Result<(), ReplayError> {
        let (block, bytes) =
            (self.arena.as_ref()).ok_or_else(|| bind_error("there is no arena"))?;
        let place = self.slot(value);
        let end = offset.checked_add(place.storage_bytes);
        if end.is_none_or(|end| end > *bytes) {
            return Err(bind_error("a place ends beyond the arena"));
        }
        let data = block.memory.wrapping_byte_add(offset as usize);
        place.set_data(data);
        let tensor = Tensor::in_block(block, &place.made());
        self.fill(value, data, Memory::Held(tensor));
        Ok(())
    }

    fn bind_generator(&mut self, device: Device) -> Result<(), ReplayError> {
        if self.framework.keep_generator.is_none() {
            return Err(bind_error(
                "the plan draws random numbers, and the framework's `keep_generator` is null",
            ));
        }
        self.draws.push(device);
        Ok(())
    }

    fn bind_op(&mut self, plan: &Plan, op: &LocalOp<'_>) -> Result<u32, ReplayError> {
        let bind = self
            .framework
            .bind_op
            .ok_or_else(|| bind_error("`bind_op` is null"))?;
        let mut arguments = Arguments::default();
        let mut tensors: Vec<u32> = Vec::new();
        let mut place = |value: Option<u32>| match value {
            Some(value) => {
                tensors.push(value);
                tensors.len() as i64 - 1
            }
            None => -1,
        };
        let mut prepared = Vec::with_capacity(op.args.len());
        for &arg in op.args {
            prepared.push(arguments.arg(plan, arg, &mut place)?);
        }
        let (name, overload) = (c_string(op.name)?, c_string(op.overload)?);
        let mut number = 0;
        let mut bound = |into: bool| {
            // SAFETY: the framework vouches for its functions; what is passed outlives the call.
            unsafe {
                bind(
                    self.framework.context,
                    name.as_ptr(),
                    overload.as_ptr(),
                    prepared.as_ptr(),
                    prepared.len() as u32,
                    op.outs.len() as u32,
                    c_int::from(into),
                    &mut number,
                )
            }
        };
        let wanted = matches!(op.into, Some(Into::Overload(_) | Into::Copy));
        let mut status = bound(wanted);
        let mut into = match wanted {
            true => Placed::Written,
            false => Placed::Anywhere,
        };
        if wanted && status == NO_INTO {
            let mut outs = op.outs.iter().filter(|&&out| out != NONE);
            if outs.any(|&out| !self.slot(out).device.is_cpu()) {
                return Err(bind_error(format!(
                    "{}: the framework has no form that writes into given memory on a device",
                    op.name
                )));
            }
            into = Placed::Copied;
            status = bound(false);
        }
        (self
            .framework
            .check(&format!("bind_op of {}", op.name), status))
        .map_err(bind_error)?;
        let pointers = |slots: &[u32]| -> Box<[*const DlTensor]> {
            let slot = |&slot: &u32| match slot {
                NONE => std::ptr::null(),
                slot => self.slot(slot).tensor.get().cast_const(),
            };
            slots.iter().map(slot).collect()
        };
        let bound = Op {
            number,
            name: op.name.into(),
            pointers: pointers(&tensors),
            places: pointers(op.outs),
            outs: op
                .outs
                .iter()
                .map(|out| (*out, into == Placed::Written || tensors.contains(out)))
                .collect(),
            tensors: tensors.into(),
            into,
        };
        self.ops.push(bound);
        if self.made.len() < op.outs.len() {
            self.made = vec![Cell::new(std::ptr::null_mut()); op.outs.len()].into();
        }
        Ok(self.ops.len() as u32 - 1)
    }

    fn bind_view(&mut self, plan: &Plan, base: u32, out: u32) -> Result<u32, ReplayError> {
        let value = &plan.values[out as usize];
        let element = value.dtype.bytes().unwrap_or(1) as i64;
        if value.marks.0 != 0 {
            return Err(bind_error(
                "a view is conjugated or negated, which DLPack cannot tell",
            ));
        }
        let bytes = (value.offset.checked_mul(element))
            .and_then(|bytes| isize::try_from(bytes).ok())
            .ok_or_else(|| bind_error("a view's offset is too large"))?;
        self.views.push((base, out, bytes));
        Ok(self.views.len() as u32 - 1)
    }

    fn set_number(&mut self, site: &NumberSite, value: f64) -> Result<(), ReplayError> {
        let set = (self.framework.set_number).ok_or_else(|| bind_error("`set_number` is null"))?;
        let element = site.element.map_or(-1, i64::from);
        let op = self.ops[site.op as usize].number;
        // SAFETY: the framework vouches for its functions.
        let status = unsafe { set(self.framework.context, op, site.arg, element, value) };
        (self.framework.check("set_number", status)).map_err(ReplayError::Bind)
    }

    fn is_own(&self, name: &str) -> bool {
        keeps_to_arguments(name)
    }

    #[inline]
    fn local(&self, op: u32) -> Result<(), String> {
        let op = &self.ops[op as usize];
        if let Some(&slot) = op.tensors.iter().find(|&&slot| !self.slot(slot).full.get()) {
            return Err(is_empty(slot));
        }
        let made = self.made.as_ptr().cast::<*mut DlManagedTensor>().cast_mut();
        let into = match op.into {
            Placed::Written => op.places.as_ptr(),
            Placed::Anywhere | Placed::Copied => std::ptr::null(),
        };
        let Some(run) = self.framework.run_op else {
            return Err("`run_op` is null".to_owned());
        };
        // SAFETY: the framework vouches for its functions. It is given slots that are full, and a list that has a
        // place for each result.
        let status = unsafe {
            run(
                self.framework.context,
                op.number,
                op.pointers.as_ptr(),
                into,
                made,
            )
        };
        let taken = self.take(op);
        if status != 0 {
            return self.framework.check(&op.name, status);
        }
        taken
    }

    #[inline]
    fn view(&self, view: u32) -> Result<(), String> {
        let (base, out, bytes) = self.views[view as usize];
        let data = self.full(base)?.data();
        self.empty(out);
        let place = self.slot(out);
        place.set_data(data.wrapping_byte_offset(bytes));
        place.full.set(true);
        let root = self.slot(base);
        root.users.set(root.users.get() + 1);
        Ok(())
    }

    fn rng(&self, action: RngAction, device: Device, slot: u32) -> Result<(), String> {
        self.random(action, device, slot)
    }

    #[inline]
    fn free(&self, value: u32) -> Result<(), String> {
        self.empty(value);
        Ok(())
    }

    fn clear(&self, values: &[u32]) -> Result<(), ReplayError> {
        if self.lost() {
            return Ok(()); // a collective may still use the memory
        }
        for &value in values {
            self.empty(value);
        }
        Ok(())
    }

    fn output(&self, value: u32, _fresh: bool) -> Result<Tensor, ReplayError> {
        let place = self.full(value).map_err(ReplayError::Bridge)?;
        let root = self.slot(place.root);
        let held = match root.memory.take() {
            Memory::Made(made) => Tensor::made(made, &root.made()),
            Memory::Held(held) => held,
            Memory::None => return Err(ReplayError::Bridge(format!("slot {value} has no memory"))),
        };
        let result = match place.root == value {
            true => held.clone(),
            false => Tensor::of(&held, &place.made()),
        };
        root.memory.set(Memory::Held(held));
        Ok(result)
    }
}

impl Communicator for CallbackProgram {
    fn bind_collective(&mut self, plan: &Plan, c: &plans::Collective) -> Result<u32, ReplayError> {
        let bind = (self.framework.bind_collective)
            .ok_or_else(|| bind_error("the plan has collectives, and `bind_collective` is null"))?;
        let group = &plan.groups[c.group as usize];
        let group: CString = c_string(plan.str(group.name))?;
        let (input_splits, output_splits) = (plan.dims(c.input_splits), plan.dims(c.output_splits));
        let list = |list: &[i64]| match list {
            [] => std::ptr::null(),
            list => list.as_ptr(),
        };
        let described = Collective {
            kind: c.kind as u32,
            reduce: c.reduce.map_or(-1, |reduce| reduce as i32),
            group: group.as_ptr(),
            root: c.root,
            n_input_splits: input_splits.len() as u32,
            input_splits: list(input_splits),
            output_splits: list(output_splits),
            n_output_splits: output_splits.len() as u32,
        };
        let mut number = 0;
        // SAFETY: the framework vouches for its functions; what is passed outlives the call.
        let status = unsafe { bind(self.framework.context, &described, &mut number) };
        (self.framework.check("bind_collective", status)).map_err(ReplayError::Bind)?;
        self.collectives.push((number, c.input, c.output));
        Ok(self.collectives.len() as u32 - 1)
    }

    fn start(&self, collective: u32) -> Result<(), String> {
        let (number, read, written) = self.collectives[collective as usize];
        let (given, place) = (self.full(read)?, self.slot(written));
        if !place.full.get() {
            let bytes = place.storage_bytes;
            let block = Rc::new(Block::new(&self.framework, bytes, place.device)?);
            self.allocated.set(self.allocated.get() + bytes);
            place.set_data(block.memory);
            let tensor = Tensor::in_block(&block, &place.made());
            self.fill(written, block.memory, Memory::Held(tensor));
        }
        self.writers.borrow_mut()[written as usize] = Some(number);
        let start = self.framework.start.ok_or("`start` is null")?;
        let (input, output) = (given.tensor.get(), place.tensor.get());
        // SAFETY: the framework vouches for its functions, and is given full slots.
        let status = unsafe { start(self.framework.context, number, input, output) };
        self.framework.check("start", status)?;
        self.under_way.set(self.under_way.get() + 1);
        let read = self.slot(read).root;
        let users = &self.slot(read).users;
        users.set(users.get() + 1);
        self.reading.borrow_mut().push((written, read));
        Ok(())
    }

    fn wait(&self, value: u32) -> Result<(), String> {
        let writer = self.writers.borrow_mut()[value as usize].take();
        let number = writer.ok_or_else(|| format!("no collective writes slot {value}"))?;
        let wait = self.framework.wait.ok_or("`wait` is null")?;
        // SAFETY: the framework vouches for its functions.
        let status = unsafe { wait(self.framework.context, number) };
        self.framework.check("wait", status)?;
        self.under_way.set(self.under_way.get().saturating_sub(1));
        let mut reading = self.reading.borrow_mut();
        if let Some(at) = reading.iter().position(|(written, _)| *written == value) {
            let (_, read) = reading.swap_remove(at);
            self.leave(read);
        }
        Ok(())
    }
}

impl Program for CallbackProgram {
    fn under_way(
        &self,
        mut steps: impl FnMut() -> Result<(), ReplayError>,
    ) -> Result<(), ReplayError> {
        for (slot, &device) in (self.generators..).zip(&self.draws) {
            self.random(RngAction::Save, device, slot)
                .map_err(ReplayError::Bridge)?;
        }
        steps()
    }

    /// What ops have made; not what they allocate and give back meanwhile.
    fn watch(&self) -> Result<Option<impl FnMut() -> u64>, ReplayError> {
        Ok(Some(|| self.allocated.take()))
    }

    fn undo(&self) -> Result<bool, ReplayError> {
        for (slot, &device) in (self.generators..).zip(&self.draws) {
            self.random(RngAction::Restore, device, slot)
                .map_err(ReplayError::Bridge)?;
        }
        Ok(true)
    }

    fn lost(&self) -> bool {
        self.under_way.get() > 0
    }
}

impl Drop for CallbackProgram {
    fn drop(&mut self) {
        if let Some(forget) = self.framework.forget_op {
            for op in &self.ops {
                // SAFETY: the framework vouches for its functions.
                unsafe { forget(self.framework.context, op.number) };
            }
        }
        if let Some(forget) = self.framework.forget_collective.filter(|_| !self.lost()) {
            for (collective, _, _) in &self.collectives {
                // SAFETY: as above.
                unsafe { forget(self.framework.context, *collective) };
            }
        }
        if self.lost() {
            // A collective may still write there: the memory is never given back.
            for slot in self.slots.iter() {
                std::mem::forget(slot.memory.take());
            }
            std::mem::forget(self.arena.take());
        }
    }
}

/// A number for an address that is passed through.
pub(crate) fn number(address: *mut c_void) -> u64 {
    address.addr() as u64
}

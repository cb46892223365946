//! A bound plan's ops and slots on the bridge's side.
//!
//! Everything here must be called with Python's GIL held, by the thread that
//! owns the session; a run releases it while kernels run.

use std::ffi::{CStr, c_int, c_void};
use std::ptr;

use rote_plans::schedule::Into;
use rote_plans::{Collective, Device, NONE, Plan, RngAction, Schedule, keeps_to_arguments};

use rote_replay::{
    Backend, BoundPlan, Communicator, LocalOp, NumberSite, Part, Program, ReplayError,
};

use crate::bridge::{Borrowed, Bridge, Object};
use crate::sys;
use rote_events::args::{Arguments, c_string};

/// A plan's ops and slots on the bridge's side.
#[derive(Debug)]
pub struct AtenProgram(*mut sys::Program);

impl AtenProgram {
    /// A program with slots for the values of a plan.
    pub fn of(plan: &Plan) -> Result<Self, ReplayError> {
        let bridge = Bridge::get();
        let (values, rng_slots) = (plan.values.len() as u32, plan.rng_slots);
        // SAFETY: makes an object that `drop` frees.
        let program = unsafe { (bridge.functions().program_new)(values, rng_slots) };
        if program.is_null() {
            Err(ReplayError::Bridge(bridge.message()))
        } else {
            Ok(AtenProgram(program))
        }
    }

    /// What the first call that failed since the last time raised, as PyTorch's own
    /// bindings would raise it in Python.
    pub fn exception(&self) -> Option<Object> {
        // SAFETY: a program of ours; the result is a new reference or null.
        let object = unsafe { (Bridge::get().functions().program_exception)(self.0) };
        // SAFETY: a new reference or null.
        unsafe { Object::new(object) }
    }

    /// Binds what a tensor object has to a slot.
    pub fn put(&self, value: u32, tensor: Borrowed<'_>, part: Part) -> Result<(), ReplayError> {
        let bridge = Bridge::get();
        // SAFETY: a live tensor.
        bridge.check(unsafe {
            (bridge.functions().program_put)(self.0, value, tensor.as_ptr(), part as u32)
        })
    }

    /// Gives a tensor object the sizes and strides that a run which failed has left in
    /// its slot.
    pub fn leave_shape(&self, value: u32, tensor: Borrowed<'_>) -> Result<(), ReplayError> {
        let bridge = Bridge::get();
        // SAFETY: a live tensor.
        bridge.check(unsafe {
            (bridge.functions().program_leave_shape)(self.0, value, tensor.as_ptr())
        })
    }

    /// Says how the results of an op must look that only its kernel decides about.
    fn expect(&self, plan: &Plan, op: u32, outs: &[u32]) -> Result<(), ReplayError> {
        let bridge = Bridge::get();
        for (result, &out) in (0..).zip(outs).filter(|&(_, &out)| out != NONE) {
            let value = &plan.values[out as usize];
            let (shape, strides) = (plan.dims(value.shape), plan.dims(value.strides));
            // SAFETY: pointers and lengths of slices that outlive the call.
            bridge.check(unsafe {
                (bridge.functions().program_expect)(
                    self.0,
                    op,
                    result,
                    value.dtype.0,
                    value.marks.0,
                    value.device.kind,
                    value.device.index,
                    shape.as_ptr(),
                    strides.as_ptr(),
                    shape.len() as u32,
                )
            })?;
        }
        Ok(())
    }

    #[inline]
    fn done(status: c_int) -> Result<(), String> {
        if status == 0 {
            Ok(())
        } else {
            Err(Bridge::get().message())
        }
    }
}

/// Binds a plan to PyTorch.
///
/// # Errors
///
/// As [`BoundPlan::bind`].
pub fn bind(plan: &Plan, schedule: &Schedule) -> Result<BoundPlan<AtenProgram>, ReplayError> {
    BoundPlan::bind(AtenProgram::of(plan)?, plan, schedule)
}

/// Outputs, then gradients, as Python tensors in a new list.
pub fn results(bound: &BoundPlan<AtenProgram>) -> Result<Object, ReplayError> {
    let results = bound.results().iter();
    Object::list(results.map(|&(slot, fresh)| bound.program().output(slot, fresh)))
}

impl Drop for AtenProgram {
    fn drop(&mut self) {
        // SAFETY: made by `new`, freed once.
        unsafe { (Bridge::get().functions().program_free)(self.0) };
    }
}

/// Watches what this thread allocates.
struct Watch(*mut sys::Watching);

impl Watch {
    /// Starts watching, unless a profiler does.
    fn new() -> Result<Option<Self>, ReplayError> {
        let bridge = Bridge::get();
        let mut watch = std::ptr::null_mut();
        // SAFETY: makes an object that `drop` frees, on the same thread: the type
        // is not `Send`.
        bridge.check(unsafe { (bridge.functions().watch_new)(&mut watch) })?;
        Ok((!watch.is_null()).then_some(Watch(watch)))
    }

    /// The most bytes allocated at once since the last call, above those at that call.
    fn rise(&self) -> u64 {
        // SAFETY: made by `new`.
        let rise = unsafe { (Bridge::get().functions().watch_rise)(self.0) };
        rise.max(0).unsigned_abs()
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        // SAFETY: made by `new`, freed once.
        unsafe { (Bridge::get().functions().watch_free)(self.0) };
    }
}

impl Backend for AtenProgram {
    type Tensor = Object;

    fn bind_arena(&mut self, bytes: u64, device: Device) -> Result<(), ReplayError> {
        let bridge = Bridge::get();
        // SAFETY: plain numbers.
        bridge.check(unsafe {
            (bridge.functions().program_arena)(self.0, bytes, device.kind, device.index)
        })
    }

    fn bind_place(&mut self, plan: &Plan, id: u32, offset: u64) -> Result<(), ReplayError> {
        let bridge = Bridge::get();
        let value = &plan.values[id as usize];
        let (shape, strides) = (plan.dims(value.shape), plan.dims(value.strides));
        // SAFETY: pointers and lengths of slices that outlive the call; the
        // bridge checks the place.
        bridge.check(unsafe {
            (bridge.functions().program_place)(
                self.0,
                id,
                value.dtype.0,
                shape.as_ptr(),
                strides.as_ptr(),
                shape.len() as u32,
                offset,
                value.storage_bytes,
            )
        })
    }

    fn bind_generator(&mut self, device: Device) -> Result<(), ReplayError> {
        let bridge = Bridge::get();
        // SAFETY: a program of ours, and plain numbers.
        bridge
            .check(unsafe { (bridge.functions().program_draws)(self.0, device.kind, device.index) })
    }

    fn bind_op(&mut self, plan: &Plan, op: &LocalOp<'_>) -> Result<u32, ReplayError> {
        let bridge = Bridge::get();
        let mut arguments = Arguments::default();
        let mut prepared = Vec::with_capacity(op.args.len());
        for &arg in op.args {
            let slot = &mut |value: Option<u32>| value.map_or(-1, i64::from);
            prepared.push(arguments.arg(plan, arg, slot)?);
        }
        let out = |&out: &u32| if out == NONE { -1 } else { i64::from(out) };
        let outs: Vec<i64> = op.outs.iter().map(out).collect();
        let (name, overload) = (c_string(op.name)?, c_string(op.overload)?);
        let (how, other) = match op.into {
            Some(Into::Overload(other)) => (sys::Into::Overload, Some(c_string(other)?)),
            Some(Into::Copy) => (sys::Into::Copy, None),
            Some(Into::Nothing) | None => (sys::Into::Slot, None),
        };
        let own = self.is_own(op.name);
        let mut index = 0;
        // SAFETY: the arguments point into `arguments`, which outlives the call.
        bridge.check(unsafe {
            (bridge.functions().program_op)(
                self.0,
                name.as_ptr(),
                overload.as_ptr(),
                prepared.as_ptr(),
                prepared.len() as u32,
                outs.as_ptr(),
                outs.len() as u32,
                how as u8,
                other.as_ref().map_or(ptr::null(), |text| text.as_ptr()),
                i32::from(op.grad),
                i32::from(own),
                &mut index,
            )
        })?;
        if !own {
            self.expect(plan, index, op.outs)?;
        }
        Ok(index)
    }

    fn bind_view(&mut self, plan: &Plan, base: u32, out: u32) -> Result<u32, ReplayError> {
        let bridge = Bridge::get();
        let value = &plan.values[out as usize];
        let (shape, strides) = (plan.dims(value.shape), plan.dims(value.strides));
        let mut index = 0;
        // SAFETY: pointers and lengths of slices that outlive the call.
        bridge.check(unsafe {
            (bridge.functions().program_view)(
                self.0,
                base,
                out,
                value.dtype.0,
                value.marks.0,
                shape.as_ptr(),
                strides.as_ptr(),
                shape.len() as u32,
                value.offset,
                &mut index,
            )
        })?;
        Ok(index)
    }

    fn set_number(&mut self, site: &NumberSite, value: f64) -> Result<(), ReplayError> {
        let bridge = Bridge::get();
        let element = site.element.map_or(-1, i64::from);
        // SAFETY: plain numbers; the bridge checks them.
        bridge.check(unsafe {
            (bridge.functions().program_number)(self.0, site.op, site.arg, element, value)
        })
    }

    fn is_own(&self, name: &str) -> bool {
        keeps_to_arguments(name)
    }

    #[inline]
    fn local(&self, op: u32) -> Result<(), String> {
        // SAFETY: a plain number; the bridge checks it.
        Self::done(unsafe { (Bridge::get().functions().run_op)(self.0, op) })
    }

    #[inline]
    fn view(&self, view: u32) -> Result<(), String> {
        // SAFETY: a plain number; the bridge checks it.
        Self::done(unsafe { (Bridge::get().functions().run_view)(self.0, view) })
    }

    #[inline]
    fn rng(&self, action: RngAction, device: Device, slot: u32) -> Result<(), String> {
        // SAFETY: plain numbers; the bridge checks the slot.
        Self::done(unsafe {
            (Bridge::get().functions().run_rng)(
                self.0,
                action as u32,
                device.kind,
                device.index,
                slot,
            )
        })
    }

    #[inline]
    fn free(&self, value: u32) -> Result<(), String> {
        // SAFETY: the bridge checks the slot.
        Self::done(unsafe { (Bridge::get().functions().run_free)(self.0, value) })
    }

    fn fix(&self, values: &[u32]) -> Result<(), ReplayError> {
        let bridge = Bridge::get();
        // SAFETY: pointer and length of a slice.
        bridge.check(unsafe {
            (bridge.functions().program_fix)(self.0, values.as_ptr(), values.len() as u32)
        })
    }

    fn clear(&self, values: &[u32]) -> Result<(), ReplayError> {
        let bridge = Bridge::get();
        // SAFETY: pointer and length of a slice.
        bridge.check(unsafe {
            (bridge.functions().program_clear)(self.0, values.as_ptr(), values.len() as u32)
        })
    }

    fn output(&self, value: u32, fresh: bool) -> Result<Object, ReplayError> {
        let bridge = Bridge::get();
        // SAFETY: a slot of this program; the result is a new reference or null.
        let object =
            unsafe { (bridge.functions().program_output)(self.0, value, c_int::from(fresh)) };
        // SAFETY: as above.
        unsafe { Object::new(object) }.ok_or_else(|| ReplayError::Bridge(bridge.message()))
    }

    /// To be called with the GIL held.
    fn shown(&self, value: u32) -> Option<Object> {
        // SAFETY: a program of ours; the result is a new reference or null.
        unsafe { Object::new((Bridge::get().functions().program_shown)(self.0, value)) }
    }
}

/// The script's own process groups (c10d).
impl Communicator for AtenProgram {
    fn bind_collective(&mut self, plan: &Plan, c: &Collective) -> Result<u32, ReplayError> {
        let bridge = Bridge::get();
        let group = &plan.groups[c.group as usize];
        let group = c_string(plan.str(group.name))?;
        let shape = plan.dims(plan.values[c.output as usize].shape);
        let input_splits = plan.dims(c.input_splits);
        let output_splits = plan.dims(c.output_splits);
        let mut index = 0;
        // SAFETY: pointers and lengths of slices that outlive the call.
        bridge.check(unsafe {
            (bridge.functions().program_collective)(
                self.0,
                c.kind as u32,
                c.reduce.map_or(-1, |reduce| reduce as i32),
                group.as_ptr(),
                c.root,
                c.input,
                c.output,
                shape.as_ptr(),
                shape.len() as u32,
                input_splits.as_ptr(),
                input_splits.len() as u32,
                output_splits.as_ptr(),
                output_splits.len() as u32,
                &mut index,
            )
        })?;
        Ok(index)
    }

    #[inline]
    fn start(&self, collective: u32) -> Result<(), String> {
        // SAFETY: a plain number; the bridge checks it.
        Self::done(unsafe { (Bridge::get().functions().run_collective)(self.0, collective) })
    }

    #[inline]
    fn wait(&self, value: u32) -> Result<(), String> {
        // SAFETY: the bridge checks the slot.
        Self::done(unsafe { (Bridge::get().functions().run_wait)(self.0, value) })
    }
}

impl Program for AtenProgram {
    /// Releases the GIL.
    fn under_way(&self, steps: impl FnMut() -> Result<(), ReplayError>) -> Result<(), ReplayError> {
        struct Context<F> {
            steps: F,
            result: Result<(), ReplayError>,
        }
        /// # Safety
        /// `context` must be the `Context<F>` below, used by nobody else.
        unsafe extern "C" fn body<F>(context: *mut c_void) -> c_int
        where
            F: FnMut() -> Result<(), ReplayError>,
        {
            // SAFETY: the context below, which outlives the call.
            let context = unsafe { &mut *context.cast::<Context<F>>() };
            context.result = (context.steps)();
            c_int::from(context.result.is_err())
        }
        fn body_of<F: FnMut() -> Result<(), ReplayError>>(
            _: &Context<F>,
        ) -> unsafe extern "C" fn(*mut c_void) -> c_int {
            body::<F>
        }
        let bridge = Bridge::get();
        let mut context = Context {
            steps,
            result: Ok(()),
        };
        let body = body_of(&context);
        // SAFETY: `body` takes the context by this type and does not unwind:
        // the executor indexes only what binding has checked.
        let status = unsafe { (bridge.functions().run)(self.0, body, (&raw mut context).cast()) };
        context.result?;
        bridge.check(status)
    }

    /// Holds the GIL. A panic in `body` ends the process, as it would leave a C function.
    fn aside(&self, mut body: &mut dyn FnMut()) -> Result<(), ReplayError> {
        /// # Safety
        /// `context` must be the reference below, used by nobody else.
        unsafe extern "C" fn run(context: *mut c_void) -> c_int {
            // SAFETY: the reference below, which outlives the call.
            let body = unsafe { &mut *context.cast::<&mut dyn FnMut()>() };
            body();
            0
        }
        let bridge = Bridge::get();
        // SAFETY: `run` takes the context by this type.
        bridge.check(unsafe { (bridge.functions().with_gil)(run, (&raw mut body).cast()) })
    }

    fn undo(&self) -> Result<bool, ReplayError> {
        let bridge = Bridge::get();
        let mut done = 0;
        // SAFETY: a program of ours; writes one number.
        bridge.check(unsafe { (bridge.functions().program_undo)(self.0, &mut done) })?;
        Ok(done != 0)
    }

    fn lost(&self) -> bool {
        // SAFETY: a program of ours.
        unsafe { (Bridge::get().functions().program_lost)(self.0) != 0 }
    }

    fn differs(&self) -> bool {
        // SAFETY: a program of ours.
        unsafe { (Bridge::get().functions().program_differs)(self.0) != 0 }
    }

    /// None while a profiler watches what is allocated.
    fn watch(&self) -> Result<Option<impl FnMut() -> u64>, ReplayError> {
        Ok(Watch::new()?.map(|watch| move || watch.rise()))
    }

    /// Collectives show themselves if so.
    fn listened(&self) -> bool {
        // SAFETY: a program of ours.
        unsafe { (Bridge::get().functions().program_listened)(self.0) != 0 }
    }

    fn begin_range(&self, name: &CStr) -> Result<(), ReplayError> {
        let bridge = Bridge::get();
        // SAFETY: a text that outlives the call.
        bridge.check(unsafe { (bridge.functions().range_begin)(self.0, name.as_ptr()) })
    }

    fn end_range(&self) -> Result<(), ReplayError> {
        let bridge = Bridge::get();
        // SAFETY: a program of ours.
        bridge.check(unsafe { (bridge.functions().range_end)(self.0) })
    }
}

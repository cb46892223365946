//! Binds a plan: every op handle, constant argument, view and process group is
//! resolved once, so that running is a loop over numbers.
//!
//! Reads the archived plan where it lies in the mapped file. The file was
//! checked when it was opened, so indices hold.

use std::ffi::CString;

use rote_plans::binding::{ArchivedBindingKind, ArchivedScalar};
use rote_plans::instr::{ArchivedArg, ArchivedInstr, ArchivedRngAction};
use rote_plans::value::ArchivedDef;
use rote_plans::{ArchivedPlan, BindingKind, Device, NONE, RngAction, Scalar};

use crate::executor::{Executor, ReplayError, Step};

use super::bridge::{AtenProgram, Bridge};
use super::sys::{self, Payload, tag};

/// A number among an op's arguments that is set before each run.
#[derive(Clone, Copy, Debug)]
struct NumberSite {
    op: u32,
    arg: u32,
    element: Option<u32>,
    scalar: u32,
}

/// A plan, bound to this process.
#[derive(Debug)]
pub struct BoundPlan {
    program: AtenProgram,
    executor: Executor,
    numbers: Vec<NumberSite>,
    scalars: Vec<Scalar>,
    last_numbers: Vec<f64>,
    /// Slots to empty after a run: all but the state's.
    transient: Vec<u32>,
    /// Slots of bindings that the plan writes.
    written: Vec<u32>,
    /// Slots to hand out: outputs first, then gradients; and whether each is
    /// the slot's own tensor.
    results: Vec<(u32, bool)>,
    /// How many of the results are outputs.
    outputs: usize,
    marked: Vec<bool>,
    /// Kind and slot of each binding, in the plan's order.
    bindings: Vec<(BindingKind, u32)>,
}

/// Owns what the bridge's argument structs point at.
#[derive(Default)]
struct Arena {
    lists: Vec<Box<[sys::Arg]>>,
    ints: Vec<Box<[i64]>>,
    text: Vec<CString>,
}

fn bind_error(message: impl Into<String>) -> ReplayError {
    ReplayError::Bind(message.into())
}

fn c_string(text: &str) -> Result<CString, ReplayError> {
    CString::new(text).map_err(|_| bind_error(format!("text {text:?} holds a zero byte")))
}

fn simple(tag: u8, payload: Payload) -> sys::Arg {
    sys::Arg {
        tag,
        written: 0,
        len: 0,
        payload,
    }
}

fn integer(tag: u8, i: i64) -> sys::Arg {
    simple(tag, Payload { i })
}

fn ints_of(plan: &ArchivedPlan, range: rote_plans::pool::ArchivedRange) -> Box<[i64]> {
    plan.dims[range.indices()]
        .iter()
        .map(|dim| dim.to_native())
        .collect()
}

impl Arena {
    fn ints(&mut self, tag: u8, ints: Box<[i64]>) -> sys::Arg {
        let arg = sys::Arg {
            tag,
            written: 0,
            len: ints.len() as u32,
            payload: Payload {
                ints: ints.as_ptr(),
            },
        };
        self.ints.push(ints);
        arg
    }

    fn list(&mut self, tag: u8, list: Box<[sys::Arg]>) -> sys::Arg {
        let arg = sys::Arg {
            tag,
            written: 0,
            len: list.len() as u32,
            payload: Payload {
                list: list.as_ptr(),
            },
        };
        self.lists.push(list);
        arg
    }

    fn arg(&mut self, plan: &ArchivedPlan, arg: &ArchivedArg) -> Result<sys::Arg, ReplayError> {
        Ok(match arg {
            ArchivedArg::None => integer(tag::NONE, 0),
            ArchivedArg::Value(value) => integer(tag::VALUE, i64::from(value.to_native())),
            ArchivedArg::Values(range) => {
                let ids = plan.ids[range.indices()]
                    .iter()
                    .map(|id| {
                        if id.to_native() == NONE {
                            -1
                        } else {
                            i64::from(id.to_native())
                        }
                    })
                    .collect();
                self.ints(tag::VALUES, ids)
            }
            ArchivedArg::Bool(value) => integer(tag::BOOL, i64::from(*value)),
            ArchivedArg::Int(value) => integer(tag::INT, value.to_native()),
            ArchivedArg::Float(value) => simple(
                tag::FLOAT,
                Payload {
                    f: value.to_native(),
                },
            ),
            ArchivedArg::Complex(re, im) => simple(
                tag::COMPLEX,
                Payload {
                    c: [re.to_native(), im.to_native()],
                },
            ),
            ArchivedArg::Scalar(_) => simple(tag::FLOAT, Payload { f: 0.0 }),
            ArchivedArg::Wrapped(inner) => {
                let inner = self.arg(plan, &plan.args[inner.to_native() as usize])?;
                self.list(tag::WRAPPED, Box::new([inner]))
            }
            ArchivedArg::Ints(range) => self.ints(tag::INTS, ints_of(plan, *range)),
            ArchivedArg::List(range) => {
                let mut list = Vec::with_capacity(range.indices().len());
                for inner in &plan.args[range.indices()] {
                    list.push(self.arg(plan, inner)?);
                }
                self.list(tag::LIST, list.into())
            }
            ArchivedArg::Str(text) => {
                let text = c_string(plan.str(text.to_native()))?;
                let arg = simple(tag::STR, Payload { s: text.as_ptr() });
                self.text.push(text);
                arg
            }
            ArchivedArg::DType(dtype) => integer(tag::DTYPE, i64::from(dtype.0)),
            ArchivedArg::Device(device) => integer(
                tag::DEVICE,
                i64::from(device.kind) << 8 | i64::from(device.index as u8),
            ),
            ArchivedArg::Layout(layout) => integer(tag::LAYOUT, i64::from(*layout)),
            ArchivedArg::MemoryFormat(format) => integer(tag::MEMORY_FORMAT, i64::from(*format)),
        })
    }
}

/// The places of bound numbers in one argument.
fn number_sites(
    plan: &ArchivedPlan,
    op: u32,
    arg_index: u32,
    arg: &ArchivedArg,
    sites: &mut Vec<NumberSite>,
) {
    let mut site = |element, scalar: u32| {
        sites.push(NumberSite {
            op,
            arg: arg_index,
            element,
            scalar,
        })
    };
    match arg {
        ArchivedArg::Scalar(scalar) => site(None, scalar.to_native()),
        ArchivedArg::Wrapped(inner) => {
            if let ArchivedArg::Scalar(scalar) = &plan.args[inner.to_native() as usize] {
                site(None, scalar.to_native());
            }
        }
        ArchivedArg::List(range) => {
            for (element, inner) in plan.args[range.indices()].iter().enumerate() {
                if let ArchivedArg::Scalar(scalar) = inner {
                    site(Some(element as u32), scalar.to_native());
                }
            }
        }
        _ => {}
    }
}

fn native_scalar(scalar: &ArchivedScalar) -> Scalar {
    match scalar {
        ArchivedScalar::Read { path } => Scalar::Read {
            path: path.to_native(),
        },
        ArchivedScalar::Const(value) => Scalar::Const(value.to_native()),
        ArchivedScalar::Neg(a) => Scalar::Neg(a.to_native()),
        ArchivedScalar::Add(a, b) => Scalar::Add(a.to_native(), b.to_native()),
        ArchivedScalar::Sub(a, b) => Scalar::Sub(a.to_native(), b.to_native()),
        ArchivedScalar::Mul(a, b) => Scalar::Mul(a.to_native(), b.to_native()),
        ArchivedScalar::Div(a, b) => Scalar::Div(a.to_native(), b.to_native()),
        ArchivedScalar::Pow(a, b) => Scalar::Pow(a.to_native(), b.to_native()),
    }
}

impl BoundPlan {
    /// Binds a plan. The bridge must be loaded.
    pub fn bind(plan: &ArchivedPlan) -> Result<Self, ReplayError> {
        let bridge = Bridge::get();
        let program = AtenProgram::new(plan.values.len() as u32, plan.rng_slots.to_native())?;
        let mut executor = Executor::default();
        let mut numbers = Vec::new();
        for instr in plan.instrs.iter() {
            let step = match instr {
                ArchivedInstr::Local {
                    op,
                    overload,
                    args,
                    outs,
                    ..
                } => {
                    let mut arena = Arena::default();
                    let mut prepared = Vec::with_capacity(args.indices().len());
                    for arg in &plan.args[args.indices()] {
                        prepared.push(arena.arg(plan, arg)?);
                    }
                    let outs: Vec<i64> = plan.ids[outs.indices()]
                        .iter()
                        .map(|id| {
                            if id.to_native() == NONE {
                                -1
                            } else {
                                i64::from(id.to_native())
                            }
                        })
                        .collect();
                    let name = c_string(plan.str(op.to_native()))?;
                    let overload = c_string(plan.str(overload.to_native()))?;
                    let mut index = 0;
                    // SAFETY: the arguments point into `arena`, which outlives the call.
                    bridge.check(unsafe {
                        (bridge.functions().program_op)(
                            program.0,
                            name.as_ptr(),
                            overload.as_ptr(),
                            prepared.as_ptr(),
                            prepared.len() as u32,
                            outs.as_ptr(),
                            outs.len() as u32,
                            &mut index,
                        )
                    })?;
                    for (i, arg) in plan.args[args.indices()].iter().enumerate() {
                        number_sites(plan, index, i as u32, arg, &mut numbers);
                    }
                    Step::Local(index)
                }
                ArchivedInstr::View { base, out } => {
                    let value = &plan.values[out.to_native() as usize];
                    if value.root.to_native() != base.to_native() {
                        return Err(bind_error(format!("view {out} is not based on its root")));
                    }
                    let shape = ints_of(plan, value.shape);
                    let strides = ints_of(plan, value.strides);
                    let mut index = 0;
                    // SAFETY: pointers and lengths of slices that outlive the call.
                    bridge.check(unsafe {
                        (bridge.functions().program_view)(
                            program.0,
                            base.to_native(),
                            out.to_native(),
                            value.dtype.0,
                            shape.as_ptr(),
                            strides.as_ptr(),
                            shape.len() as u32,
                            value.offset.to_native(),
                            &mut index,
                        )
                    })?;
                    Step::View(index)
                }
                ArchivedInstr::Collective(c) => {
                    let group = c_string(
                        plan.str(plan.groups[c.group.to_native() as usize].name.to_native()),
                    )?;
                    let shape = ints_of(plan, plan.values[c.output.to_native() as usize].shape);
                    let input_splits = ints_of(plan, c.input_splits);
                    let output_splits = ints_of(plan, c.output_splits);
                    let mut index = 0;
                    // SAFETY: as above.
                    bridge.check(unsafe {
                        (bridge.functions().program_collective)(
                            program.0,
                            c.kind as u32,
                            c.reduce.as_ref().map_or(-1, |reduce| *reduce as i32),
                            group.as_ptr(),
                            c.root.to_native(),
                            c.input.to_native(),
                            c.output.to_native(),
                            shape.as_ptr(),
                            shape.len() as u32,
                            input_splits.as_ptr(),
                            input_splits.len() as u32,
                            output_splits.as_ptr(),
                            output_splits.len() as u32,
                            &mut index,
                        )
                    })?;
                    Step::Start(index)
                }
                ArchivedInstr::Wait { value } => Step::Wait(value.to_native()),
                ArchivedInstr::Free { value } => Step::Free(value.to_native()),
                ArchivedInstr::Rng {
                    action,
                    device,
                    slot,
                } => {
                    let action = match action {
                        ArchivedRngAction::Save => RngAction::Save,
                        ArchivedRngAction::Restore => RngAction::Restore,
                    };
                    let device = Device {
                        kind: device.kind,
                        index: device.index,
                    };
                    executor.rng.push((action, device, slot.to_native()));
                    Step::Rng(executor.rng.len() as u32 - 1)
                }
            };
            executor.steps.push(step);
        }

        let bindings: Vec<(BindingKind, u32)> = plan
            .bindings
            .iter()
            .map(|binding| {
                let kind = match binding.kind {
                    ArchivedBindingKind::Arg => BindingKind::Arg,
                    ArchivedBindingKind::State => BindingKind::State,
                    ArchivedBindingKind::Grad => BindingKind::Grad,
                };
                (kind, binding.value.to_native())
            })
            .collect();
        let state: Vec<u32> = bindings
            .iter()
            .filter(|(kind, _)| *kind == BindingKind::State)
            .map(|&(_, slot)| slot)
            .collect();
        let transient = (0..plan.values.len() as u32)
            .filter(|value| !state.contains(value))
            .collect();
        let written = plan
            .bindings
            .iter()
            .filter(|binding| binding.written)
            .map(|binding| binding.value.to_native())
            .collect();
        let mut results: Vec<(u32, bool)> = Vec::new();
        let outputs = plan.outputs.iter().map(|output| output.value.to_native());
        let grads = plan
            .grads
            .iter()
            .map(|grad| grad.value.to_native())
            .filter(|&value| value != NONE);
        for value in outputs.chain(grads) {
            let bound = matches!(plan.values[value as usize].def, ArchivedDef::Binding(_));
            let fresh = !bound && results.iter().all(|&(other, _)| other != value);
            results.push((value, fresh));
        }
        let scalars: Vec<Scalar> = plan.scalars.iter().map(native_scalar).collect();
        Ok(BoundPlan {
            program,
            executor,
            last_numbers: vec![f64::NAN; numbers.len()],
            numbers,
            scalars,
            transient,
            written,
            results,
            outputs: plan.outputs.len(),
            marked: plan
                .outputs
                .iter()
                .map(|output| output.requires_grad)
                .collect(),
            bindings,
        })
    }

    /// The program, for binding tensors.
    pub fn program(&self) -> &AtenProgram {
        &self.program
    }

    /// Kind and slot of each binding, in the plan's order.
    pub fn bindings(&self) -> &[(BindingKind, u32)] {
        &self.bindings
    }

    /// The scalars to evaluate before each run.
    pub fn scalars(&self) -> &[Scalar] {
        &self.scalars
    }

    /// Sets the numbers that are read anew at every replay. `values`: one per
    /// scalar.
    pub fn set_numbers(&mut self, values: &[f64]) -> Result<(), ReplayError> {
        for (site, last) in self.numbers.iter().zip(&mut self.last_numbers) {
            let value = values[site.scalar as usize];
            if value.to_bits() != last.to_bits() {
                self.program
                    .number(site.op, site.arg, site.element, value)?;
                *last = value;
            }
        }
        Ok(())
    }

    /// Runs the plan. Results wait in their slots, and everything but the
    /// state is dropped by [`BoundPlan::clear`].
    pub fn run(&self) -> Result<(), ReplayError> {
        self.program.run(&self.executor)?;
        for &value in &self.written {
            self.program.bump_version(value)?;
        }
        Ok(())
    }

    /// Outputs, then gradients, as Python tensors.
    pub fn results(&self) -> Result<Vec<super::bridge::Object>, ReplayError> {
        self.results
            .iter()
            .map(|&(value, fresh)| self.program.output(value, fresh))
            .collect()
    }

    /// How many of the results are outputs, and which of them require grad.
    pub fn outputs(&self) -> (usize, &[bool]) {
        (self.outputs, &self.marked)
    }

    /// Drops what a run has left, the state's tensors apart.
    pub fn clear(&self) -> Result<(), ReplayError> {
        self.program.clear(&self.transient)
    }

    /// How many steps a run takes, views and frees included.
    pub fn steps(&self) -> usize {
        self.executor.steps.len()
    }
}

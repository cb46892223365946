//! The notation of tensors, placements, arguments and instructions.

use std::fmt::{self, Display, Formatter, Write};

use rkyv::api::high::HighDeserializer;
use rkyv::rancor::Infallible;
use rkyv::{Archive, Deserialize};

use crate::binding::{
    ArchivedBinding, ArchivedBindingKind, ArchivedComparison, ArchivedGuardKind, ArchivedScalar,
    BindingKind, GuardKind,
};
use crate::instr::{
    ArchivedArg, ArchivedCollective, ArchivedCollectiveKind, ArchivedInstr, ArchivedRngAction,
    CollectiveKind,
};
use crate::placement::{Placement, ReduceOp};
use crate::plan::{ArchivedPlan, Plan};
use crate::pool::{NONE, StrId};
use crate::value::{ArchivedDType, ArchivedDef, ArchivedDevice, DType, Device, Marks};

/// Something that displays itself by a function.
struct Written<F>(F);

impl<F: Fn(&mut Formatter<'_>) -> fmt::Result> Display for Written<F> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        (self.0)(f)
    }
}

fn written(display: impl Fn(&mut Formatter<'_>) -> fmt::Result) -> impl Display {
    Written(display)
}

/// Text of a plan, with control characters escaped.
pub fn text(text: &str) -> impl Display {
    written(move |f| {
        for c in text.chars() {
            match c.is_control() {
                true => write!(f, "{}", c.escape_default())?,
                false => f.write_char(c)?,
            }
        }
        Ok(())
    })
}

/// A number of bytes, for people.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bytes(pub u64);

impl Display for Bytes {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let units = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
        let mut size = self.0 as f64;
        if self.0 < 1024 {
            return f.pad(&format!("{} B", self.0));
        }
        let mut unit = 0;
        size /= 1024.0;
        while size >= 1024.0 && unit + 1 < units.len() {
            size /= 1024.0;
            unit += 1;
        }
        f.pad(&format!("{size:.1} {}", units[unit]))
    }
}

fn list(f: &mut Formatter<'_>, items: impl Iterator<Item = impl Display>) -> fmt::Result {
    separated(f, ", ", items)
}

fn separated(
    f: &mut Formatter<'_>,
    separator: &str,
    items: impl Iterator<Item = impl Display>,
) -> fmt::Result {
    for (index, item) in items.enumerate() {
        if index > 0 {
            f.write_str(separator)?;
        }
        write!(f, "{item}")?;
    }
    Ok(())
}

fn dtype(dtype: ArchivedDType) -> DType {
    DType(dtype.0)
}

fn device(device: ArchivedDevice) -> Device {
    Device {
        kind: device.kind,
        index: device.index,
    }
}

/// The local tensor of a value: `f32[4,8]`, strides unless contiguous
/// (`f32[8,8]{1,8}`), offset unless 0 (`+16`), marks if there are any (` conj`),
/// device unless it is the CPU (` on cuda:0`).
pub fn tensor(plan: &ArchivedPlan, id: u32) -> impl Display {
    written(move |f| {
        let value = &plan.values[id as usize];
        let shape = &plan.dims[value.shape.indices()];
        let strides = &plan.dims[value.strides.indices()];
        write!(f, "{}[", dtype(value.dtype))?;
        separated(f, ",", shape.iter())?;
        f.write_char(']')?;
        // A dim of one element may have any stride.
        let mut expected = Some(1_i64);
        let mut contiguous = true;
        for (size, stride) in shape.iter().zip(strides).rev() {
            contiguous &= *size == 1 || expected == Some(stride.to_native());
            expected = expected.and_then(|e| e.checked_mul(size.to_native()));
        }
        if !contiguous && shape.iter().all(|size| *size != 0) {
            f.write_char('{')?;
            separated(f, ",", strides.iter())?;
            f.write_char('}')?;
        }
        if value.offset != 0 {
            write!(f, "{:+}", value.offset.to_native())?;
        }
        if value.marks.0 != 0 {
            write!(f, " {}", Marks(value.marks.0))?;
        }
        if value.device.kind != 0 {
            write!(f, " on {}", device(value.device))?;
        }
        Ok(())
    })
}

fn native<T: Archive<Archived: Deserialize<T, HighDeserializer<Infallible>>>>(
    archived: &T::Archived,
) -> T {
    let Ok(native) = rkyv::deserialize(archived);
    native
}

/// The specs of a plan: in memory, or in a file.
pub trait Specs {
    /// The placements of a spec, one per mesh dim.
    fn placements(&self, spec: u32) -> impl Iterator<Item = Placement>;
    /// The text with this id.
    fn text(&self, id: StrId) -> &str;
}

impl Specs for Plan {
    fn placements(&self, spec: u32) -> impl Iterator<Item = Placement> {
        let range = self.specs[spec as usize].placements;
        self.placements[range.indices()].iter().copied()
    }

    fn text(&self, id: StrId) -> &str {
        self.str(id)
    }
}

impl Specs for ArchivedPlan {
    fn placements(&self, spec: u32) -> impl Iterator<Item = Placement> {
        let range = self.specs[spec as usize].placements;
        self.placements[range.indices()].iter().map(native)
    }

    fn text(&self, id: StrId) -> &str {
        self.str(id)
    }
}

/// One placement as DTensor prints it: `R`, `S(0)`, `_S(0,2)`, `P(sum)`.
pub fn placement(plan: &impl Specs, placement: Placement) -> impl Display {
    written(move |f| match placement {
        Placement::Replicate => f.write_str("R"),
        Placement::Shard { dim } => write!(f, "S({dim})"),
        Placement::StridedShard { dim, split_factor } => write!(f, "_S({dim},{split_factor})"),
        Placement::Partial { op } => write!(f, "P({})", ReduceOp::TEXTS[op as usize]),
        Placement::Other { text: id } => write!(f, "{}", text(plan.text(id))),
    })
}

/// The placements of a spec, one per mesh dim: `S(0),R`. `-` for a plain
/// tensor ([`NONE`]).
pub fn placements(plan: &impl Specs, spec: u32) -> impl Display {
    written(move |f| {
        if spec == NONE {
            return f.write_str("-");
        }
        separated(f, ",", plan.placements(spec).map(|p| placement(plan, p)))
    })
}

/// A spec with its global shape: `S(0),R of [512,64]`, `-` for a plain tensor.
pub fn spec(plan: &ArchivedPlan, spec: u32) -> impl Display {
    written(move |f| {
        placements(plan, spec).fmt(f)?;
        if spec == NONE {
            return Ok(());
        }
        let spec = &plan.specs[spec as usize];
        f.write_str(" of [")?;
        separated(f, ",", plan.dims[spec.shape.indices()].iter())?;
        f.write_char(']')?;
        match plan.meshes.len() {
            1 => Ok(()),
            _ => write!(f, " on mesh {}", spec.mesh),
        }
    })
}

fn value(id: u32) -> impl Display {
    written(move |f| match id {
        NONE => f.write_str("None"),
        id => write!(f, "%{id}"),
    })
}

/// One argument of an op.
pub fn arg(plan: &ArchivedPlan, arg: ArchivedArg) -> impl Display {
    written(move |f| write_arg(f, plan, &arg))
}

fn write_arg(f: &mut Formatter<'_>, plan: &ArchivedPlan, arg: &ArchivedArg) -> fmt::Result {
    match arg {
        ArchivedArg::None => f.write_str("None"),
        ArchivedArg::Value(id) => write!(f, "{}", value(id.to_native())),
        ArchivedArg::Values(ids) => {
            f.write_char('[')?;
            list(
                f,
                plan.ids[ids.indices()]
                    .iter()
                    .map(|id| value(id.to_native())),
            )?;
            f.write_char(']')
        }
        ArchivedArg::Bool(is) => write!(f, "{is}"),
        ArchivedArg::Int(number) => write!(f, "{number}"),
        ArchivedArg::Float(number) => write!(f, "{:?}", number.to_native()),
        ArchivedArg::Complex(re, im) => {
            write!(f, "{:?}{:+?}j", re.to_native(), im.to_native())
        }
        ArchivedArg::Scalar(id) => write!(f, "${id}"),
        ArchivedArg::Wrapped(inner) => {
            f.write_str("wrapped(")?;
            write_arg(f, plan, &plan.args[inner.to_native() as usize])?;
            f.write_char(')')
        }
        ArchivedArg::Ints(range) => {
            f.write_char('[')?;
            list(f, plan.dims[range.indices()].iter())?;
            f.write_char(']')
        }
        ArchivedArg::List(range) => {
            f.write_char('[')?;
            for (index, arg) in plan.args[range.indices()].iter().enumerate() {
                if index > 0 {
                    f.write_str(", ")?;
                }
                write_arg(f, plan, arg)?;
            }
            f.write_char(']')
        }
        ArchivedArg::Str(id) => write!(f, "\"{}\"", text(plan.str(id.to_native()))),
        ArchivedArg::DType(number) => write!(f, "{}", dtype(*number)),
        ArchivedArg::Device(where_) => write!(f, "{}", device(*where_)),
        ArchivedArg::Layout(0) => f.write_str("strided"),
        ArchivedArg::Layout(number) => write!(f, "layout#{number}"),
        ArchivedArg::MemoryFormat(number) => match number {
            0 => f.write_str("contiguous"),
            1 => f.write_str("preserve"),
            2 => f.write_str("channels_last"),
            3 => f.write_str("channels_last_3d"),
            number => write!(f, "memory_format#{number}"),
        },
    }
}

/// A scalar: `opt.param_groups[0]['lr']`, `-1.0`, `$0 * $1`.
pub fn scalar(plan: &ArchivedPlan, scalar: ArchivedScalar) -> impl Display {
    written(move |f| match scalar {
        ArchivedScalar::Read { path } | ArchivedScalar::Tensor { path } => {
            write!(f, "{}", text(plan.str(path.to_native())))
        }
        ArchivedScalar::Const(number) => write!(f, "{:?}", number.to_native()),
        ArchivedScalar::Neg(a) => write!(f, "-${a}"),
        ArchivedScalar::Add(a, b) => write!(f, "${a} + ${b}"),
        ArchivedScalar::Sub(a, b) => write!(f, "${a} - ${b}"),
        ArchivedScalar::Mul(a, b) => write!(f, "${a} * ${b}"),
        ArchivedScalar::Div(a, b) => write!(f, "${a} / ${b}"),
        ArchivedScalar::Pow(a, b) => write!(f, "${a} ** ${b}"),
        ArchivedScalar::Same(a, b) => write!(f, "${a} == ${b}"),
        ArchivedScalar::Round(a) => write!(f, "f32(${a})"),
        ArchivedScalar::Compared { how, a, b, holds } => {
            let sign = match (how, holds) {
                (ArchivedComparison::Equal, true) => "is",
                (ArchivedComparison::Equal, false) => "is not",
                (ArchivedComparison::Less, true) => "<",
                (ArchivedComparison::Less, false) => "not <",
                (ArchivedComparison::LessOrEqual, true) => "<=",
                (ArchivedComparison::LessOrEqual, false) => "not <=",
            };
            write!(f, "${a} {sign} ${b}")
        }
    })
}

/// One instruction in SSA form: `%12 f32[4,64] = aten::mm(%3, %7) grad`, where the op
/// runs with gradients enabled.
pub fn instr(plan: &ArchivedPlan, index: u32) -> impl Display {
    written(move |f| match &plan.instrs[index as usize] {
        ArchivedInstr::Local {
            op,
            overload,
            args,
            outs,
            grad,
            ..
        } => {
            let outs = &plan.ids[outs.indices()];
            if outs.iter().any(|out| *out != NONE) {
                list(
                    f,
                    outs.iter().map(|out| result(plan, index, out.to_native())),
                )?;
                f.write_str(" = ")?;
            }
            write!(f, "{}", text(plan.str(op.to_native())))?;
            let overload = plan.str(overload.to_native());
            if !overload.is_empty() {
                write!(f, ".{}", text(overload))?;
            }
            f.write_char('(')?;
            list(f, plan.args[args.indices()].iter().map(|a| arg(plan, *a)))?;
            f.write_str(if *grad { ") grad" } else { ")" })
        }
        ArchivedInstr::View { base, out } => {
            write!(f, "{} = view %{base}", result(plan, index, out.to_native()))
        }
        ArchivedInstr::Collective(collective) => write_collective(f, plan, index, collective),
        ArchivedInstr::Wait { value } => write!(f, "wait %{value}"),
        ArchivedInstr::Rng {
            action,
            device: of,
            slot,
        } => match action {
            ArchivedRngAction::Save => {
                write!(f, "save the {} generator in slot {slot}", device(*of))
            }
            ArchivedRngAction::Restore => {
                write!(f, "restore the {} generator from slot {slot}", device(*of))
            }
        },
        ArchivedInstr::Free { value } => write!(f, "free %{value}"),
    })
}

/// A result with its type if it is new, without if it was there before.
fn result(plan: &ArchivedPlan, instr: u32, id: u32) -> impl Display {
    written(move |f| {
        if id == NONE {
            return f.write_char('_');
        }
        match plan.values[id as usize].def {
            ArchivedDef::Instr(def) if def == instr => write!(f, "%{id} {}", tensor(plan, id)),
            _ => write!(f, "%{id}"),
        }
    })
}

fn write_collective(
    f: &mut Formatter<'_>,
    plan: &ArchivedPlan,
    index: u32,
    collective: &ArchivedCollective,
) -> fmt::Result {
    let ArchivedCollective {
        kind,
        reduce,
        group,
        root,
        input,
        output,
        input_splits,
        output_splits,
    } = collective;
    write!(
        f,
        "{} = {}(%{input}",
        result(plan, index, output.to_native()),
        collective_kind(*kind)
    )?;
    if let Some(op) = reduce.as_ref() {
        write!(f, ", {}", ReduceOp::TEXTS[*op as usize])?;
    }
    if *kind == ArchivedCollectiveKind::Broadcast {
        write!(f, ", root {root}")?;
    }
    for (splits, name) in [(input_splits, "sends"), (output_splits, "receives")] {
        if splits.len != 0 {
            write!(f, ", {name} [")?;
            list(f, plan.dims[splits.indices()].iter())?;
            f.write_char(']')?;
        }
    }
    let label = plan.str(plan.groups[group.to_native() as usize].label.to_native());
    write!(f, ") over {}", text(label))
}

/// The name of a kind of collective, for example `all_reduce`.
pub fn collective_kind(kind: ArchivedCollectiveKind) -> &'static str {
    CollectiveKind::TEXTS[kind as usize]
}

pub(crate) fn binding_kind(kind: ArchivedBindingKind) -> &'static str {
    BindingKind::TEXTS[kind as usize]
}

/// What else is known of a binding: `, written`, `, at byte 64 of 256`.
pub(crate) fn binding_marks(binding: &ArchivedBinding) -> impl Display {
    written(move |f| {
        if binding.written {
            f.write_str(", written")?;
        }
        match binding.anchor.as_ref() {
            Some(anchor) => write!(f, ", at byte {} of {}", anchor.start, anchor.bytes),
            None => Ok(()),
        }
    })
}

pub(crate) fn guard_kind(kind: ArchivedGuardKind) -> &'static str {
    GuardKind::TEXTS[kind as usize]
}

//! What tensors of one element hold, as followed floats.
//!
//! PyTorch's optimizers keep their step counters in such tensors on the host, write them by ops
//! (`step += 1`) and read them (`.item()`) in the same step. A replay needs the numbers that follow from
//! them before its first instruction. So the recorder follows what ops write there, from what the tensors
//! of the state held before the step. It follows sums, differences, products, quotients, copies and
//! fills of `f32` and `f64`: what single kernels compute as plain arithmetic does. After any other op, what
//! the tensor holds is not known.
//!
//! Each read compares what is known with what is there. So an op that is not what its name says makes a
//! refusal, and no wrong number.

use hashbrown::HashMap;
use rote_plans::{DType, Marks};

use crate::event::{ArgEvent, Argument, OpEvent, TensorEvent};
use crate::scalars::{Origin, TracedFloats};

/// What tensors of one element hold, by storage.
#[derive(Debug, Default)]
pub struct Contents {
    /// Tensors of the state: their paths, and what they held before the step. `None` for a storage that
    /// another tensor has too, or that the step has written.
    named: HashMap<u64, Option<(String, f64)>>,
    /// What is known of what the step has written.
    held: HashMap<u64, u32>,
}

/// Whether a tensor is one float on the host, with a storage of its own.
fn is_one_float(tensor: &TensorEvent<'_>) -> bool {
    matches!(tensor.dtype, DType::F32 | DType::F64)
        && tensor.device.is_cpu()
        && tensor.marks == Marks::NONE
        && !tensor.opaque
        && tensor.storage != 0
        && tensor.numel() == 1
        && tensor.offset == 0
        && Some(tensor.storage_bytes) == tensor.dtype.bytes()
}

/// The arithmetic of an op, by its name without underscores at its ends and `foreach`.
fn arithmetic(name: &str) -> Option<fn(u32, u32) -> Origin> {
    match name {
        "add" => Some(Origin::Add),
        "sub" => Some(Origin::Sub),
        "mul" => Some(Origin::Mul),
        "div" => Some(Origin::Div),
        _ => None,
    }
}

/// Whether a factor (`alpha`) is left out, or 1.
fn is_one(arg: Option<&Argument<'_>>) -> bool {
    match arg.map(|arg| &arg.value) {
        None | Some(ArgEvent::None | ArgEvent::Int(1)) => true,
        Some(ArgEvent::Float(alpha)) => *alpha == 1.0,
        _ => false,
    }
}

impl Contents {
    /// A tensor that exists before the step. `held`: its path and what it holds, if it is a tensor of the state
    /// that one number can be read from.
    pub fn name(&mut self, tensor: &TensorEvent<'_>, held: Option<(&str, f64)>) {
        let held = held
            .filter(|_| is_one_float(tensor))
            .map(|(path, value)| (path.to_owned(), value));
        (self.named.entry(tensor.storage))
            .and_modify(|other| *other = None)
            .or_insert(held);
    }

    /// What a tensor holds, which is `value`; `None` if it is not known.
    pub fn read(
        &mut self,
        tensor: &TensorEvent<'_>,
        value: f64,
        floats: &mut TracedFloats,
    ) -> Option<u32> {
        let index = self.of(tensor, floats)?;
        if floats.value(index)?.to_bits() != value.to_bits() {
            return None;
        }
        floats.read_again(index);
        Some(index)
    }

    /// Follows an op that has run.
    pub fn observe(&mut self, op: &OpEvent<'_>, floats: &mut TracedFloats) {
        let found = self.results(op, floats);
        self.forget(op);
        self.held.extend(found);
    }

    /// What a storage holds is not known any more: its memory is gone.
    pub fn lost(&mut self, storage: u64) {
        self.held.remove(&storage);
        if let Some(named) = self.named.get_mut(&storage) {
            *named = None;
        }
    }

    /// What an op has written, or made, is not known.
    fn forget(&mut self, op: &OpEvent<'_>) {
        let written = op.args.iter().filter(|arg| arg.written);
        for arg in written.map(|arg| &arg.value) {
            let list = match arg {
                ArgEvent::Tensor(tensor) => std::slice::from_ref(tensor),
                ArgEvent::Tensors(list) => list,
                _ => continue,
            };
            for tensor in list {
                self.lost(tensor.storage);
            }
        }
    }

    /// The float that a tensor holds.
    fn of(&self, tensor: &TensorEvent<'_>, floats: &mut TracedFloats) -> Option<u32> {
        if !is_one_float(tensor) {
            return None;
        }
        if let Some(index) = self.held.get(&tensor.storage) {
            return Some(*index);
        }
        let (path, value) = self.named.get(&tensor.storage)?.as_ref()?;
        floats.held(path, *value)
    }

    /// The float that an argument is: a number, or what a tensor holds.
    fn operand(&self, arg: &ArgEvent<'_>, floats: &mut TracedFloats) -> Option<u32> {
        match arg {
            ArgEvent::Tensor(tensor) => self.of(tensor, floats),
            ArgEvent::Wrapped(inner) => self.operand(inner, floats),
            ArgEvent::Float(value) => floats.number(*value),
            ArgEvent::Int(value) if value.unsigned_abs() <= 1 << f64::MANTISSA_DIGITS => {
                floats.computed(Origin::Const((*value as f64).to_bits()))
            }
            _ => None,
        }
    }

    /// What the tensors that an op has written or made hold, by storage, as far as that is known.
    fn results(&self, op: &OpEvent<'_>, floats: &mut TracedFloats) -> Vec<(u64, u32)> {
        let Some(name) = op.name.strip_prefix("aten::") else {
            return Vec::new();
        };
        let arg = |i: usize| op.args.get(i).map(|arg| &arg.value);
        if let Some(name) = name.strip_prefix("_foreach_") {
            let (Some(ArgEvent::Tensors(all)), Some(with)) = (arg(0), arg(1)) else {
                return Vec::new();
            };
            let Some(make) = name.strip_suffix('_').and_then(arithmetic) else {
                return Vec::new();
            };
            if !is_one(op.args.get(2)) {
                return Vec::new();
            }
            // Items are computed one after the other: one that is in the list twice changes in between.
            let is_elsewhere = |i: usize, tensor: &TensorEvent<'_>| {
                let mut others = all.iter().enumerate().filter(|(j, _)| *j != i);
                others.any(|(_, other)| other.storage == tensor.storage)
            };
            let each = |(i, tensor): (usize, &TensorEvent<'_>)| {
                let own;
                let with = match with {
                    ArgEvent::Tensors(list) => {
                        own = ArgEvent::Tensor(*list.get(i)?);
                        &own
                    }
                    ArgEvent::List(list) => list.get(i)?,
                    same => same,
                };
                if matches!(with, ArgEvent::Tensor(with) if with.dtype != tensor.dtype || is_elsewhere(i, with))
                {
                    return None;
                }
                let (a, b) = (self.of(tensor, floats)?, self.operand(with, floats)?);
                if is_elsewhere(i, tensor) {
                    return None;
                }
                let result = self.result(make, a, b, tensor.dtype, floats)?;
                Some((tensor.storage, result))
            };
            return all.iter().enumerate().filter_map(each).collect();
        }
        let target = match (op.args.iter().find(|arg| arg.written), op.outs.first()) {
            (Some(arg), _) => &arg.value,
            (None, Some(out)) => out,
            (None, None) => return Vec::new(),
        };
        let ArgEvent::Tensor(target) = target else {
            return Vec::new();
        };
        if !is_one_float(target) {
            return Vec::new();
        }
        let mut operand = |i: usize| self.operand(arg(i)?, floats);
        let value = match (name.trim_end_matches('_'), op.overload) {
            (name @ ("add" | "sub" | "mul" | "div"), "Tensor" | "Scalar") => {
                let (Some(make), true) = (arithmetic(name), is_one(op.args.get(2))) else {
                    return Vec::new();
                };
                // Two tensors of other types compute in the wider one.
                let alike = |i: usize| match arg(i) {
                    Some(ArgEvent::Tensor(tensor)) => tensor.dtype == target.dtype,
                    _ => true,
                };
                match (operand(0), operand(1)) {
                    (Some(a), Some(b)) if alike(0) && alike(1) => {
                        self.result(make, a, b, target.dtype, floats)
                    }
                    _ => None,
                }
            }
            ("fill", "Scalar" | "Tensor") | ("copy", "") => {
                operand(1).and_then(|value| in_dtype(value, target.dtype, floats))
            }
            ("scalar_tensor" | "clone", "") => {
                operand(0).and_then(|value| in_dtype(value, target.dtype, floats))
            }
            ("full", "") => operand(1).and_then(|value| in_dtype(value, target.dtype, floats)),
            ("zero" | "zeros" | "zeros_like", "") => floats.computed(Origin::Const(0)),
            ("ones" | "ones_like", "") => floats.computed(Origin::Const(1_f64.to_bits())),
            _ => None,
        };
        value
            .map(|value| (target.storage, value))
            .into_iter()
            .collect()
    }

    /// The result of arithmetic in a dtype.
    fn result(
        &self,
        make: fn(u32, u32) -> Origin,
        a: u32,
        b: u32,
        dtype: DType,
        floats: &mut TracedFloats,
    ) -> Option<u32> {
        let (a, b) = (in_dtype(a, dtype, floats)?, in_dtype(b, dtype, floats)?);
        let exact = floats.computed(make(a, b))?;
        in_dtype(exact, dtype, floats)
    }
}

/// A float as a dtype holds it.
fn in_dtype(value: u32, dtype: DType, floats: &mut TracedFloats) -> Option<u32> {
    match dtype {
        DType::F32 => floats.computed(Origin::Round(value)),
        _ => Some(value),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sample::*;

    /// A step that knows the tensor 1 as `opt.step`, which holds 3, and the tensor 2 as `opt.other`, which holds 0.1.
    struct Step {
        contents: Contents,
        floats: TracedFloats,
    }

    impl Step {
        fn new() -> Self {
            let mut contents = Contents::default();
            contents.name(&tensor(1, &[]).event(), Some(("opt.step", 3.0)));
            let other = f64::from(0.1_f32);
            contents.name(&tensor(2, &[]).event(), Some(("opt.other", other)));
            let floats = TracedFloats::default();
            Step { contents, floats }
        }

        fn run(mut self, op: &OpEvent<'_>) -> Self {
            self.contents.observe(op, &mut self.floats);
            self
        }

        fn holds(&mut self, storage: u64, value: f64) -> bool {
            let tensor = tensor(storage, &[]);
            let found = (self.contents).read(&tensor.event(), value, &mut self.floats);
            found.is_some()
        }
    }

    fn number(value: f64) -> Argument<'static> {
        read(ArgEvent::Wrapped(Box::new(ArgEvent::Float(value))))
    }

    fn with<'a>(
        name: &'a str,
        overload: &'a str,
        target: &'a Tensor,
        rest: Vec<Argument<'a>>,
    ) -> OpEvent<'a> {
        let mut op = in_place(name, target, &[]);
        op.overload = overload;
        op.args.extend(rest);
        op
    }

    #[test]
    fn arithmetic_in_place_is_followed_and_rounded() {
        let x = tensor(1, &[]);
        let small = f64::from(0.1_f32);
        for (name, by, expected) in [
            ("aten::add_", 0.1, 3.0_f32 + 0.1_f32),
            ("aten::sub_", 0.1, 3.0_f32 - 0.1_f32),
            ("aten::mul_", 0.1, 3.0_f32 * 0.1_f32),
            ("aten::div_", 0.1, 3.0_f32 / 0.1_f32),
        ] {
            let mut step = Step::new().run(&with(name, "Tensor", &x, vec![number(by)]));
            assert!(step.holds(1, f64::from(expected)), "{name}");
            let other = tensor(2, &[]);
            let given = vec![read(other.arg())];
            let mut step = Step::new().run(&with(name, "Tensor", &x, given));
            assert!(step.holds(1, f64::from(expected)), "{name}");
            assert!(step.holds(2, small), "it is read only");
        }
        let factor = vec![number(1.0), read(ArgEvent::Float(2.0))];
        let mut step = Step::new().run(&with("aten::add_", "Tensor", &x, factor));
        assert!(
            !step.holds(1, 5.0),
            "what it is multiplied by is not followed"
        );
    }

    #[test]
    fn what_is_made_copied_and_filled_is_followed() {
        let (x, made) = (tensor(1, &[]), tensor(3, &[]));
        let mut new = op("aten::add", &[&x], &[&made]);
        new.overload = "Tensor";
        new.args.push(number(1.0));
        let step = Step::new().run(&new);
        let mut step = step.run(&in_place("aten::copy_", &tensor(2, &[]), &[&made]));
        assert!(step.holds(3, 4.0) && step.holds(2, 4.0) && step.holds(1, 3.0));
        let fill = vec![read(ArgEvent::Float(0.1))];
        let mut step = step.run(&with("aten::fill_", "Scalar", &x, fill));
        assert!(step.holds(1, f64::from(0.1_f32)) && !step.holds(1, 0.1));
        let mut step = step.run(&with("aten::zero_", "", &x, vec![]));
        assert!(step.holds(1, 0.0));
        let mut constant = op("aten::scalar_tensor", &[], &[&x]);
        constant.args.push(read(ArgEvent::Float(2.5)));
        assert!(step.run(&constant).holds(1, 2.5));
    }

    #[test]
    fn lists_are_followed_one_by_one() {
        let (x, y) = (tensor(1, &[]), tensor(2, &[]));
        let list = || written(ArgEvent::Tensors(vec![x.event(), y.event()]));
        let both = |name: &'static str, with: ArgEvent<'static>| {
            let mut op = op(name, &[], &[]);
            op.args = vec![list(), read(with)];
            op
        };
        let mut step = Step::new().run(&both("aten::_foreach_add_", ArgEvent::Float(1.0)));
        assert!(step.holds(1, 4.0) && step.holds(2, f64::from(0.1_f32 + 1.0)));
        let each = ArgEvent::List(vec![ArgEvent::Float(2.0), ArgEvent::Float(10.0)]);
        let mut step = Step::new().run(&both("aten::_foreach_mul_", each));
        assert!(step.holds(1, 6.0) && step.holds(2, f64::from(0.1_f32 * 10.0)));
        let short = ArgEvent::List(vec![ArgEvent::Float(2.0)]);
        let mut step = Step::new().run(&both("aten::_foreach_mul_", short));
        assert!(step.holds(1, 6.0) && !step.holds(2, f64::from(0.1_f32)));
        let swapped = |first, second| {
            let mut op = op("aten::_foreach_add_", &[], &[]);
            let lists = [vec![x.event(), first], vec![y.event(), second]];
            op.args = vec![
                written(ArgEvent::Tensors(vec![lists[0][0], lists[1][0]])),
                read(ArgEvent::Tensors(vec![lists[0][1], lists[1][1]])),
            ];
            op
        };
        let sum = f64::from(3.0 + 0.1_f32);
        let mut step = Step::new().run(&swapped(y.event(), x.event()));
        assert!(
            !step.holds(1, sum) && !step.holds(2, sum),
            "what an item reads was changed by another"
        );
        let mut step = Step::new().run(&swapped(x.event(), y.event()));
        assert!(step.holds(1, 6.0) && step.holds(2, f64::from(0.1_f32 + 0.1_f32)));
    }

    #[test]
    fn after_any_other_op_nothing_is_known() {
        let x = tensor(1, &[]);
        for (name, overload) in [
            ("aten::sqrt_", ""),
            ("aten::add_", "Complex"),
            ("aten::div_", "Tensor_mode"),
            ("mine::add_", "Tensor"),
        ] {
            let op = with(name, overload, &x, vec![number(1.0)]);
            let mut step = Step::new().run(&op);
            assert!(!step.holds(1, 3.0) && !step.holds(1, 4.0), "{name}");
        }
        // A larger tensor in the same memory, or another name of it.
        let mut step = Step::new();
        step.contents.name(&x.event(), Some(("opt.alias", 3.0)));
        assert!(!step.holds(1, 3.0));
        let part = tensor(4, &[2]).view(&[], &[], 0);
        step.contents.name(&part.event(), Some(("opt.part", 1.0)));
        assert!(!step.holds(4, 1.0));
        assert!(!step.holds(5, 1.0), "it has no name");
    }

    #[test]
    fn what_is_there_is_compared_with_what_is_known() {
        let mut step = Step::new();
        assert!(step.holds(1, 3.0) && !step.holds(1, 3.5));
    }

    #[test]
    fn other_dtypes_are_not_followed() {
        let x = tensor(1, &[]);
        let (wide, half) = (tensor(6, &[]), tensor(7, &[]));
        let (mut wide, mut half) = (wide.event(), half.event());
        wide.dtype = DType::F64;
        wide.storage_bytes = 8;
        let mut step = Step::new();
        step.contents.name(&wide, Some(("opt.wide", 0.1)));
        let given = vec![read(ArgEvent::Tensor(wide))];
        let mut mixed = Step {
            contents: step.contents,
            floats: step.floats,
        }
        .run(&with("aten::add_", "Tensor", &x, given));
        assert!(
            !mixed.holds(1, f64::from(3.1_f32)),
            "it computes in the wider type"
        );
        let copied = vec![read(ArgEvent::Tensor(wide))];
        let mut step = mixed.run(&with("aten::copy_", "", &x, copied));
        assert!(step.holds(1, f64::from(0.1_f32)), "it rounds");
        half.dtype = DType::BF16;
        step.contents.name(&half, Some(("opt.half", 1.0)));
        assert!((step.contents.read(&half, 1.0, &mut step.floats)).is_none());
    }
}

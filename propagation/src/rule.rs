//! Rules: for one op, which placements of its inputs and outputs on one mesh
//! dim are correct.
//!
//! A rule knows nothing of cost or of meshes. Where a strategy shards, it holds
//! a sharding placeholder, which the search fills with the shard types that the
//! inputs really have. The form is that of PyTorch's single-dim strategies
//! (`torch/distributed/tensor/_ops/single_dim_strategy.py`).

use rote_plans::DType;

use super::combination::Combination;
use super::error::PropagationError;
use super::placement::{PartialOp, Placement};
use super::sharding::ShardingId;
use super::spec::{Spec, TensorMeta};

/// One argument of an op, in the order of its schema.
#[derive(Clone, Debug, PartialEq)]
pub enum Arg {
    /// A distributed tensor.
    Tensor(Spec),
    /// A list of distributed tensors; where the schema says so, some absent.
    Tensors(Vec<Option<Spec>>),
    /// An integer.
    Int(i64),
    /// A list of integers; of truth values as 0 and 1.
    Ints(Vec<i64>),
    /// A truth value.
    Bool(bool),
    /// A floating point number.
    Float(f64),
    /// A list of floating point numbers.
    Floats(Vec<f64>),
    /// A complex number: real and imaginary part.
    Complex(f64, f64),
    /// A list of complex numbers.
    Complexes(Vec<(f64, f64)>),
    /// A word, such as the mode of a reduction.
    Text(String),
    /// An element type.
    DType(DType),
    /// Not given.
    None,
}

/// An op with its arguments.
#[derive(Clone, Copy, Debug)]
pub struct Query<'a> {
    /// Name and overload, for example `aten::sum.dim_IntList`; the default
    /// overload has no suffix.
    pub op: &'a str,
    /// Its arguments.
    pub args: &'a [Arg],
}

impl<'a> Query<'a> {
    /// The tensors among the arguments, with the position of each.
    pub fn inputs(&self) -> impl Iterator<Item = (usize, &'a Spec)> {
        self.args.iter().enumerate().flat_map(|(i, arg)| {
            let (one, list): (_, &[Option<Spec>]) = match arg {
                Arg::Tensor(spec) => (Some(spec), &[]),
                Arg::Tensors(specs) => (None, specs),
                _ => (None, &[]),
            };
            let specs = one.into_iter().chain(list.iter().flatten());
            specs.map(move |s| (i, s))
        })
    }

    /// The error that an argument is not what the op takes there.
    pub fn wrong(
        &self,
        argument: usize,
        expected: impl Into<String>,
        found: impl Into<String>,
    ) -> PropagationError {
        PropagationError::Argument {
            op: self.op.into(),
            argument,
            expected: expected.into(),
            found: found.into(),
        }
    }

    /// Checks the number of arguments.
    pub fn arity(&self, least: usize, most: usize) -> Result<(), PropagationError> {
        let found = self.args.len();
        if (least..=most).contains(&found) {
            return Ok(());
        }
        Err(PropagationError::Arity {
            op: self.op.into(),
            expected: match (least, most) {
                (a, b) if a == b => a.to_string(),
                (a, usize::MAX) => format!("at least {a}"),
                (a, b) => format!("{a} to {b}"),
            },
            found,
        })
    }

    pub(super) fn found(&self, i: usize) -> String {
        match self.args.get(i) {
            None => "no argument".into(),
            Some(Arg::Tensor(s)) => format!("tensor {s}"),
            Some(Arg::Tensors(list)) if list.contains(&None) => {
                "a list with an absent tensor".into()
            }
            Some(Arg::Tensors(_)) => "a list of tensors".into(),
            Some(Arg::Int(n)) => n.to_string(),
            Some(Arg::Ints(n)) => format!("{n:?}"),
            Some(Arg::Bool(b)) => b.to_string(),
            Some(Arg::Float(x)) => x.to_string(),
            Some(Arg::Floats(x)) => format!("{x:?}"),
            Some(Arg::Complex(re, im)) => format!("{re}{im:+}j"),
            Some(Arg::Complexes(_)) => "a list of complex numbers".into(),
            Some(Arg::Text(text)) => format!("{text:?}"),
            Some(Arg::DType(d)) => d.to_string(),
            Some(Arg::None) => "none".into(),
        }
    }

    /// The meta of the tensor at a position.
    pub fn tensor(&self, i: usize) -> Result<&'a TensorMeta, PropagationError> {
        match self.args.get(i) {
            Some(Arg::Tensor(spec)) => self.meta(i, spec),
            _ => Err(self.wrong(i, "a tensor", self.found(i))),
        }
    }

    /// The meta of the tensor at a position, if there is one.
    pub fn optional_tensor(&self, i: usize) -> Result<Option<&'a TensorMeta>, PropagationError> {
        match self.args.get(i) {
            None | Some(Arg::None) => Ok(None),
            _ => self.tensor(i).map(Some),
        }
    }

    /// The metas of the list of tensors at a position, which is not empty.
    pub fn tensors(&self, i: usize) -> Result<Vec<&'a TensorMeta>, PropagationError> {
        match self.args.get(i) {
            Some(Arg::Tensors(specs)) if !specs.is_empty() => specs
                .iter()
                .map(|s| match s {
                    Some(spec) => self.meta(i, spec),
                    None => Err(self.wrong(i, "a list of tensors", "a list with an absent one")),
                })
                .collect(),
            _ => Err(self.wrong(i, "a list of at least one tensor", self.found(i))),
        }
    }

    /// The metas of the list of tensors at a position, some of which may be
    /// absent.
    pub fn optional_tensors(
        &self,
        i: usize,
    ) -> Result<Vec<Option<&'a TensorMeta>>, PropagationError> {
        let Some(Arg::Tensors(specs)) = self.args.get(i) else {
            return Err(self.wrong(i, "a list of tensors", self.found(i)));
        };
        let metas = specs
            .iter()
            .map(|s| s.as_ref().map(|s| self.meta(i, s)).transpose());
        metas.collect()
    }

    fn meta(&self, i: usize, spec: &'a Spec) -> Result<&'a TensorMeta, PropagationError> {
        let meta = spec.meta.as_ref();
        meta.ok_or_else(|| self.wrong(i, "a tensor whose meta is known", "a tensor without meta"))
    }

    /// The integer at a position, or a default.
    pub fn int(&self, i: usize, default: Option<i64>) -> Result<i64, PropagationError> {
        match (self.args.get(i), default) {
            (Some(Arg::Int(n)), _) => Ok(*n),
            (None | Some(Arg::None), Some(n)) => Ok(n),
            _ => Err(self.wrong(i, "an integer", self.found(i))),
        }
    }

    /// The number at a position, or a default.
    pub fn float(&self, i: usize, default: Option<f64>) -> Result<f64, PropagationError> {
        match (self.args.get(i), default) {
            (Some(Arg::Float(x)), _) => Ok(*x),
            (Some(Arg::Int(n)), _) => Ok(*n as f64),
            (None | Some(Arg::None), Some(x)) => Ok(x),
            _ => Err(self.wrong(i, "a number", self.found(i))),
        }
    }

    /// The word at a position, or a default.
    pub fn text(&self, i: usize, default: &'a str) -> Result<&'a str, PropagationError> {
        match self.args.get(i) {
            None | Some(Arg::None) => Ok(default),
            Some(Arg::Text(text)) => Ok(text),
            _ => Err(self.wrong(i, "a word in quotes", self.found(i))),
        }
    }

    /// The truth value at a position, false by default.
    pub fn flag(&self, i: usize) -> Result<bool, PropagationError> {
        self.flag_or(i, false)
    }

    /// The truth value at a position, or a default.
    pub fn flag_or(&self, i: usize, default: bool) -> Result<bool, PropagationError> {
        match self.args.get(i) {
            None | Some(Arg::None) => Ok(default),
            Some(Arg::Bool(b)) => Ok(*b),
            Some(Arg::Int(n @ (0 | 1))) => Ok(*n == 1),
            _ => Err(self.wrong(i, "true or false", self.found(i))),
        }
    }

    /// The integers at a position, if given; a single one counts as a list.
    pub fn ints(&self, i: usize) -> Result<Option<&'a [i64]>, PropagationError> {
        match self.args.get(i) {
            None | Some(Arg::None) => Ok(None),
            Some(Arg::Ints(n)) => Ok(Some(n)),
            Some(Arg::Int(n)) => Ok(Some(std::slice::from_ref(n))),
            _ => Err(self.wrong(i, "a list of integers", self.found(i))),
        }
    }

    /// The list of integers at a position.
    pub fn list(&self, i: usize) -> Result<&'a [i64], PropagationError> {
        self.ints(i)?
            .ok_or_else(|| self.wrong(i, "a list of integers", self.found(i)))
    }

    /// A tensor dim, counted from the front.
    pub fn wrap(&self, i: usize, dim: i64, ndim: usize) -> Result<usize, PropagationError> {
        let rank = ndim.max(1) as i64;
        if (-rank..rank).contains(&dim) {
            return Ok(dim.rem_euclid(rank) as usize);
        }
        Err(self.wrong(
            i,
            format!("a dim from {} to {}", -rank, rank - 1),
            dim.to_string(),
        ))
    }

    /// The tensor dim at a position.
    pub fn dim(
        &self,
        i: usize,
        default: Option<i64>,
        ndim: usize,
    ) -> Result<usize, PropagationError> {
        self.wrap(i, self.int(i, default)?, ndim)
    }
}

/// What a shard needs of its tensor dim, besides the placement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need {
    /// Nothing: shards may be uneven or empty.
    Nothing,
    /// No rank's shard may be empty.
    Filled,
    /// The number of shards must divide this number.
    Divides(u64),
}

/// One position of a strategy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Slot {
    /// This placement.
    Fixed(Placement),
    /// A sharding placeholder: any shard type, on this tensor dim.
    Shard(u32, Need),
    /// A plain shard of this tensor dim, and no other shard type.
    Plain(u32, Need),
    /// A dim flattened behind others: a strided shard of tensor dim `dim` with
    /// as many blocks as the leading dims have elements, or fewer by as much as
    /// mesh dims further left split these.
    Flattened {
        /// The tensor dim of the flat tensor.
        dim: u32,
        /// The product of the leading dims.
        blocks: u32,
        /// The leading dims, from and up to, in the tensor that is not flat.
        leading: (u32, u32),
        /// What the shard needs, where this is an input's slot.
        need: Need,
    },
}

/// `Fixed(Replicate)`.
pub const R: Slot = Slot::Fixed(Placement::Replicate);

/// A placeholder without needs.
pub fn shard(dim: usize) -> Slot {
    Slot::Shard(dim as u32, Need::Nothing)
}

/// A fixed partial.
pub const fn partial(op: PartialOp) -> Slot {
    Slot::Fixed(Placement::Partial(op))
}

/// The strategies of one op on one mesh dim, for given tensor metas. The
/// strategy that replicates everything is always the first.
#[derive(Clone, Debug, PartialEq)]
pub struct Rule {
    /// Metas of the outputs.
    pub outputs: Vec<TensorMeta>,
    slots: Vec<Slot>,
    width: usize,
    /// Inputs that the op writes besides what its name says, each with the output
    /// that it becomes, if it is returned.
    written: Vec<(usize, Option<usize>)>,
    /// Registered shardings of the inputs that may not fill it.
    pub(super) bars: Vec<ShardingId>,
}

impl Rule {
    /// The rule that only replicates.
    pub fn new(outputs: Vec<TensorMeta>, inputs: usize) -> Self {
        let width = outputs.len() + inputs;
        let mut slots = Vec::with_capacity(width * 10);
        slots.resize(width, R);
        Rule {
            outputs,
            slots,
            width,
            written: Vec::new(),
            bars: Vec::new(),
        }
    }

    /// Adds a strategy: the outputs' slots, then the inputs'.
    ///
    /// # Panics
    ///
    /// When the number of slots is not that of outputs and inputs.
    pub fn add(&mut self, slots: impl IntoIterator<Item = Slot>) {
        self.slots.extend(slots);
        assert_eq!(self.slots.len() % self.width.max(1), 0, "strategy width");
    }

    /// Adds partials that pass from the first input to every output.
    pub fn pass(&mut self, ops: &[PartialOp]) {
        for op in ops {
            self.add(std::iter::repeat_n(partial(*op), self.width));
        }
    }

    /// Adds the strategies of a rule for the same outputs and inputs, but for the one that replicates.
    pub(super) fn add_all(&mut self, other: &Rule) {
        self.slots.extend(other.slots.iter().skip(other.width));
    }

    /// Says which inputs the op writes, and as which output each is returned.
    pub(super) fn writes_all(&mut self, written: impl Iterator<Item = (usize, Option<usize>)>) {
        self.written = written.collect();
    }

    /// Says that the op writes an input, as running statistics: it stays where
    /// it is.
    pub fn writes(&mut self, input: usize) {
        self.written.push((input, None));
    }

    /// Says that the op writes an input and returns it: both stay where the input is.
    pub fn returns(&mut self, input: usize, output: usize) {
        self.written.push((input, Some(output)));
    }

    pub(super) fn written(&self) -> &[(usize, Option<usize>)] {
        &self.written
    }

    /// Says that the op never reads an input: a partial one may stay partial.
    pub fn ignores(&mut self, input: usize) {
        let (width, at) = (self.width.max(1), self.outputs.len() + input);
        let unread = |strategy: &[Slot]| {
            let mut strategy = strategy.to_vec();
            strategy[at] = partial(PartialOp::Sum);
            strategy
        };
        let more: Vec<Slot> = (self.slots.chunks_exact(width)).flat_map(unread).collect();
        self.slots.extend(more);
    }

    /// Leaves out the strategies that pass a partial other than a sum from an input to an
    /// output, but for those that callers bring.
    pub(super) fn pass_only_sums(&mut self) {
        let outputs = self.outputs.len();
        let is_other = |slot: &Slot| match slot {
            Slot::Fixed(Placement::Partial(PartialOp::Sum | PartialOp::Registered(_))) => false,
            Slot::Fixed(Placement::Partial(_)) => true,
            _ => false,
        };
        self.retain(|strategy| {
            let (o, i) = strategy.split_at(outputs);
            !(o.iter().any(is_other) && i.iter().any(is_other))
        });
    }

    /// Leaves out the strategies with an extremum of complex tensors: complex numbers
    /// have no order.
    pub(super) fn leave_out_complex_extrema(&mut self, query: &Query<'_>) {
        let are_complex = || {
            let inputs = query.inputs().filter_map(|(_, spec)| spec.meta.as_ref());
            let metas = self.outputs.iter().chain(inputs);
            metas.map(|meta| meta.dtype.is_complex())
        };
        // Few questions have some: for the others nothing is collected.
        if !are_complex().any(|is| is) {
            return;
        }
        let complex: Vec<bool> = are_complex().collect();
        if complex.len() != self.width {
            return;
        }
        let has_order = |(slot, complex): (&Slot, &bool)| match slot {
            Slot::Fixed(Placement::Partial(PartialOp::Max | PartialOp::Min)) => !complex,
            _ => true,
        };
        self.retain(|strategy| strategy.iter().zip(&complex).all(has_order));
    }

    /// Keeps the strategies that are wanted: outputs' slots, then the inputs'.
    fn retain(&mut self, wanted: impl Fn(&[Slot]) -> bool) {
        let strategies = self.slots.chunks_exact(self.width.max(1));
        self.slots = strategies
            .filter(|strategy| wanted(strategy))
            .flatten()
            .copied()
            .collect();
    }

    /// Leaves out the strategies of registered partials: the op writes numbers of its own
    /// beside the elements that it moves.
    pub(super) fn without_registered_partials(mut self) -> Self {
        let is_registered = |slot: &Slot| {
            matches!(
                slot,
                Slot::Fixed(Placement::Partial(PartialOp::Registered(_)))
            )
        };
        self.retain(|strategy| !strategy.iter().any(is_registered));
        self
    }

    /// The strategies, each with the outputs' slots first.
    pub fn strategies(&self) -> impl Iterator<Item = (&[Slot], &[Slot])> {
        let outputs = self.outputs.len();
        self.slots
            .chunks_exact(self.width.max(1))
            .map(move |s| s.split_at(outputs))
    }

    /// Whether a registered sharding may fill the placeholders.
    pub(super) fn takes(&self, sharding: ShardingId) -> bool {
        !self.bars.contains(&sharding)
    }

    /// Puts a strategy without needs in place of another; both written as
    /// `S(0),R -> S(0)`. Nothing happens when there is no such strategy.
    pub(super) fn replace(&mut self, from: &str, to: &str) -> Result<(), PropagationError> {
        let to = Combination::parse(to, 1)?;
        let outputs = self.outputs.len();
        let slots = |c: &Combination| -> Vec<Slot> {
            let all = c.outputs.iter().chain(&c.inputs).flatten();
            all.map(|p| match p {
                Placement::Shard { dim } => shard(*dim as usize),
                other => Slot::Fixed(*other),
            })
            .collect()
        };
        let shown = |slot: &Slot| match *slot {
            Slot::Fixed(placement) => placement,
            Slot::Shard(dim, _) | Slot::Plain(dim, _) => Placement::Shard { dim },
            Slot::Flattened { dim, blocks, .. } => Placement::StridedShard {
                dim,
                split_factor: blocks,
            },
        };
        let from = Combination::parse(from, 1)?;
        for strategy in self.slots.chunks_exact_mut(self.width.max(1)) {
            let (o, i) = strategy.split_at(outputs);
            let same = |slots: &[Slot], side: &[Vec<Placement>]| {
                slots.iter().map(shown).eq(side.iter().flatten().copied())
            };
            if same(o, &from.outputs) && same(i, &from.inputs) {
                let slots = slots(&to);
                if slots.len() == strategy.len() {
                    strategy.copy_from_slice(&slots);
                }
            }
        }
        Ok(())
    }

    /// How many tensors the op takes.
    pub fn inputs(&self) -> usize {
        self.width - self.outputs.len()
    }

    /// Gives the results the dtypes of the tensors that they are written to. Where these
    /// are others, PyTorch casts, which partials do not pass.
    pub(super) fn keep_dtypes_of(&mut self, outs: &[Arg]) {
        let mut casts = vec![false; self.outputs.len()];
        for (at, (output, out)) in self.outputs.iter_mut().zip(outs).enumerate() {
            if let Arg::Tensor(Spec {
                meta: Some(own), ..
            }) = out
            {
                casts[at] = output.dtype != own.dtype;
                output.dtype = own.dtype;
            }
        }
        if casts.contains(&true) {
            let is_partial = |slot: &Slot| matches!(slot, Slot::Fixed(Placement::Partial(_)));
            self.retain(|strategy| {
                let mut written = strategy.iter().zip(&casts);
                !written.any(|(slot, casts)| *casts && is_partial(slot))
            });
        }
    }

    /// Adds an input per output, which must lie as that output does (`out=`).
    pub(super) fn add_outs(&mut self) {
        let (old, outputs) = (self.width, self.outputs.len());
        self.width += outputs;
        self.slots = self
            .slots
            .chunks_exact(old.max(1))
            .flat_map(|s| s.iter().chain(&s[..outputs]).copied())
            .collect();
    }
}

/// How the rule of an op is made from its arguments.
pub type RuleFn = fn(&Query<'_>) -> Result<Rule, PropagationError>;

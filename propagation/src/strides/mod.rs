//! The global strides of outputs, as PyTorch's fake tensors have them, so that
//! nobody has to make fake tensors to know them.
//!
//! | module | subject |
//! |---|---|
//! | `dense` | strides without gaps |
//! | `element_wise` | element-wise ops |
//! | `view` | views |
//! | `create` | copies and factories |
//! | `attention` | fused attention |
//! | `table` | ops whose outputs are contiguous, or lie as a tensor does |
//!
//! Placements never depend on strides; so [`Spec`] has none.

mod attention;
mod create;
mod dense;
mod element_wise;
mod table;
mod view;

use hashbrown::HashMap;

use super::forms::{self, Form};
use super::registry::Registry;
use super::rule::{Arg, Query};
use super::rules;
use super::spec::Spec;

pub(super) use dense::contiguous;

/// How the outputs of an op lie.
#[derive(Clone, Copy, Debug)]
enum Way {
    ElementWise(element_wise::Kind),
    View(view::Kind),
    Create(create::Kind),
    Attention(attention::Kind),
    Table(table::Kind),
}

/// The ways by op name.
#[derive(Clone, Debug, Default)]
pub(super) struct Ways(HashMap<String, Way>);

impl Ways {
    /// Those of Rote's own rules.
    pub(super) fn standard() -> Self {
        let mut ways = HashMap::new();
        for (op, _) in rules::element_wise() {
            let kind = element_wise::kind(&op);
            ways.insert(op, Way::ElementWise(kind));
        }
        let view = view::OPS.iter().map(|(op, k)| (*op, Way::View(*k)));
        let create = create::OPS.iter().map(|(op, k)| (*op, Way::Create(*k)));
        let attention = attention::OPS
            .iter()
            .map(|(op, k)| (*op, Way::Attention(*k)));
        let table = (table::OPS.iter())
            .flat_map(|(kind, ops)| ops.iter().map(|op| (*op, Way::Table(*kind))));
        let others = view.chain(create).chain(attention).chain(table);
        ways.extend(others.map(|(op, way)| (op.to_owned(), way)));
        Ways(ways)
    }
}

/// A tensor among the arguments.
#[derive(Clone, Copy)]
struct Tensor<'a> {
    shape: &'a [u64],
    strides: &'a [i64],
}

impl Tensor<'_> {
    /// A tensor without dims.
    const NONE: Self = Tensor {
        shape: &[],
        strides: &[],
    };
}

/// A call whose outputs are known but for their strides.
struct Call<'a> {
    query: &'a Query<'a>,
    inputs: &'a [&'a [i64]],
    outputs: &'a [Spec],
}

impl<'a> Call<'a> {
    /// The tensors among the arguments; `None` for one whose meta is unknown.
    fn tensors(&self) -> impl Iterator<Item = Option<Tensor<'a>>> {
        self.query
            .inputs()
            .zip(self.inputs)
            .map(|((_, spec), strides)| {
                let shape = &spec.meta.as_ref()?.shape;
                (shape.len() == strides.len()).then_some(Tensor { shape, strides })
            })
    }

    /// The tensors of one argument.
    fn tensors_at(&self, argument: usize) -> impl Iterator<Item = Option<Tensor<'a>>> {
        let earlier = self.query.args[..argument.min(self.query.args.len())].iter();
        let earlier = earlier.map(|arg| match arg {
            Arg::Tensor(_) => 1,
            Arg::Tensors(list) => list.iter().flatten().count(),
            _ => 0,
        });
        let own = match self.query.args.get(argument) {
            Some(Arg::Tensor(_)) => 1,
            Some(Arg::Tensors(list)) => list.iter().flatten().count(),
            _ => 0,
        };
        self.tensors().skip(earlier.sum()).take(own)
    }

    /// The tensor that an argument is.
    fn tensor(&self, argument: usize) -> Option<Tensor<'a>> {
        match self.query.args.get(argument) {
            Some(Arg::Tensor(_)) => self.tensors_at(argument).next()?,
            _ => None,
        }
    }

    /// The shape of an output.
    fn shape(&self, output: usize) -> Option<&'a [u64]> {
        Some(&self.outputs.get(output)?.meta.as_ref()?.shape)
    }

    /// The strides of a tensor that the op writes, if it keeps its shape.
    fn written(&self, tensor: Option<Tensor<'a>>, output: usize) -> Option<Vec<i64>> {
        let tensor = tensor.filter(|t| Some(t.shape) == self.shape(output))?;
        Some(tensor.strides.to_vec())
    }
}

/// The strides in elements of each output of an op, as PyTorch gives them to the
/// whole tensors; `None` for an output whose strides this table does not state.
///
/// `inputs` has the global strides of each tensor among the arguments, in the
/// order of [`Query::inputs`], and `outputs` are those of
/// [`Propagation`](super::Propagation). In-place and `out=` forms give the
/// strides of the written tensors. A memory format is given by its number or by
/// its name in quotes.
pub fn output_strides(
    rules: &Registry,
    query: &Query<'_>,
    inputs: &[&[i64]],
    outputs: &[Spec],
) -> Vec<Option<Vec<i64>>> {
    let call = Call {
        query,
        inputs,
        outputs,
    };
    let op = query.op.strip_suffix(".default").unwrap_or(query.op);
    let numbers = 0..outputs.len();
    if let Some(way) = rules.strides.0.get(op) {
        let one = |output| match *way {
            Way::ElementWise(kind) => element_wise::strides(kind, &call, output),
            Way::View(kind) => view::strides(kind, &call, output),
            Way::Create(kind) => create::strides(kind, &call, output),
            Way::Attention(kind) => attention::strides(kind, &call, output),
            Way::Table(kind) => table::strides(kind, &call, output),
        };
        return numbers.map(one).collect();
    }
    match forms::form(op) {
        Form::InPlace => {
            let mut written = call.tensors_at(0);
            let one = |output| call.written(written.next()?, output);
            numbers.map(one).collect()
        }
        Form::Out => {
            let first = query.inputs().count().checked_sub(outputs.len());
            let mut written = call.tensors().skip(first.unwrap_or(usize::MAX));
            let one = |output| call.written(written.next()?, output);
            numbers.map(one).collect()
        }
        _ if op.starts_with("aten::_foreach_") => {
            numbers.map(|o| element_wise::of_entry(&call, o)).collect()
        }
        Form::Functional | Form::Each => vec![None; outputs.len()],
    }
}

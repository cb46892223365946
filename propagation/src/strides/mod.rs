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

pub use dense::contiguous;

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
/// strides of the written tensors.
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use super::super::cost::Topology;
    use super::super::search::{propagate, standard_rules};
    use super::super::spec::Mesh;
    use super::*;

    /// The strides of the outputs, for arguments as `rote propagate` reads them.
    fn asked(op: &str, args: &[&str]) -> Vec<Option<Vec<i64>>> {
        let mesh = Mesh::parse("2").unwrap();
        let (mut read, mut strides) = (Vec::new(), Vec::new());
        for text in args {
            let (arg, own, _) = Arg::parse_with_strides(text, &mesh).unwrap();
            read.push(arg);
            strides.extend(own);
        }
        let query = Query { op, args: &read };
        let rules = standard_rules().unwrap();
        let found = propagate(rules, &query, &mesh, &Topology::one_node(&mesh)).unwrap();
        let inputs: Vec<_> = strides.iter().map(Vec::as_slice).collect();
        output_strides(rules, &query, &inputs, &found.outputs)
    }

    /// Against `torch` 2.15; `tests/torch/test_strides.py` asks about all samples.
    #[test]
    fn outputs_lie_as_in_torch() {
        for (op, args, strides) in [
            ("aten::mm", &["f32[4,3]{1,4}", "f32[3,5]"][..], &[5, 1][..]),
            (
                "aten::add.Tensor",
                &["f32[4,3]{1,4}", "f32[4,3]{1,4}"],
                &[1, 4],
            ),
            ("aten::add.Tensor", &["f32[4,3]{0,0}", "f32[3]"], &[3, 1]),
            (
                "aten::add.Tensor",
                &["f32[4,3]{1,4}", "f32[4,3]{3,1}"],
                &[1, 4],
            ),
            ("aten::add_.Tensor", &["f32[4,3]{2,9}", "f32[4,3]"], &[2, 9]),
            ("aten::abs.out", &["f32[4,3]", "f32[4,3]{1,7}"], &[1, 7]),
            ("aten::t_", &["f32[4,3]"], &[1, 3]),
            ("aten::expand", &["f32[3,1]{1,1}", "[2,3,4]"], &[0, 1, 0]),
            ("aten::expand", &["f32[]", "[1,1]"], &[0, 0]),
            (
                "aten::sum.dim_IntList",
                &["f32[4,3,2]{1,4,12}", "[0]"],
                &[2, 1],
            ),
            (
                "aten::clone",
                &["f32[2,3,4,5]", "'channels_last'"],
                &[60, 1, 15, 3],
            ),
        ] {
            assert_eq!(asked(op, args), [Some(strides.to_vec())], "{op} {args:?}");
        }
        let lists = asked(
            "aten::_foreach_mul.Scalar",
            &["{f32[4,3]{1,4}; f32[2]}", "2.0"],
        );
        assert_eq!(lists, [Some(vec![1, 4]), Some(vec![1])]);
    }

    /// PyTorch gives an order, but which one depends on the op.
    #[test]
    fn operands_that_disagree_have_no_answer() {
        for (op, args) in [
            ("aten::xlogy.Tensor", ["f32[4,3]{1,4}", "f32[4,3]{3,1}"]),
            ("aten::add.Tensor", ["f32[4,1]{1,9}", "f32[4,1]{1,1}"]),
        ] {
            assert_eq!(asked(op, &args), [None], "{op} {args:?}");
        }
    }
}

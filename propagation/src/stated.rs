//! Rules that a caller states as lists of placements, in the form of PyTorch's
//! single-dim strategies.
//!
//! A strategy has the placements of the outputs, then those of the inputs, on one mesh
//! dim. No shard may be empty, as in DTensor. If a strategy shards dims of different
//! sizes, their shards must be even: the shards of a view that doubles a dim of 5
//! elements have 6 and 4 elements, and `torch.chunk` makes 5 and 5.

use super::error::PropagationError;
use super::rule::{Need, Query, Rule, Slot};
use super::spec::{Spec, TensorMeta};

/// The rule of some strategies. Of their slots, `Slot::Shard` is a placeholder and
/// `Slot::Plain` a plain shard; what these need is set here.
///
/// # Errors
///
/// [`PropagationError::Strategy`] for a strategy of another number of slots than the op
/// has outputs and inputs, and for a shard of a dim that a tensor does not have.
pub fn rule(
    query: &Query<'_>,
    outputs: Vec<TensorMeta>,
    strategies: impl IntoIterator<Item = Vec<Slot>>,
) -> Result<Rule, PropagationError> {
    let inputs: Vec<&Spec> = query.inputs().map(|(_, spec)| spec).collect();
    let shape = |at: usize| -> &[u64] {
        let output = outputs.get(at);
        let meta = output.or_else(|| inputs.get(at - outputs.len())?.meta.as_ref());
        meta.map_or(&[], |meta| &meta.shape)
    };
    let width = outputs.len() + inputs.len();
    let mut made = Vec::new();
    for (strategy, mut slots) in strategies.into_iter().enumerate() {
        let wrong = |expected: String, found: String| PropagationError::Strategy {
            op: query.op.into(),
            strategy,
            expected,
            found,
        };
        if slots.len() != width {
            let (outputs, inputs) = (outputs.len(), inputs.len());
            let expected =
                format!("{width} placements, of {outputs} results and {inputs} tensor inputs");
            return Err(wrong(expected, slots.len().to_string()));
        }
        let mut sizes = Vec::new();
        for (at, slot) in slots.iter().enumerate() {
            let dim = match *slot {
                Slot::Shard(dim, _) | Slot::Plain(dim, _) => dim,
                Slot::Fixed(placement) => match placement.sharded() {
                    Some((dim, 1..)) => dim,
                    Some((_, 0)) => {
                        let expected = "split factors from 1".to_owned();
                        return Err(wrong(expected, placement.to_string()));
                    }
                    None => continue,
                },
                Slot::Flattened { dim, .. } => dim,
            };
            let dims = shape(at).len();
            let size = shape(at).get(dim as usize).copied();
            sizes.push(size.ok_or_else(|| {
                let expected = format!("a shard of one of the {dims} dims of tensor {at}");
                wrong(expected, format!("dim {dim}"))
            })?);
        }
        let need = match sizes.iter().all(|size| *size == sizes[0]) {
            true => Need::Filled,
            false => Need::Divides(sizes.into_iter().fold(0, greatest_common_divisor)),
        };
        for slot in &mut slots {
            if let Slot::Shard(_, own) | Slot::Plain(_, own) = slot {
                *own = need;
            }
        }
        made.push(slots);
    }
    let mut rule = Rule::new(outputs, inputs.len());
    made.into_iter().for_each(|slots| rule.add(slots));
    Ok(rule)
}

fn greatest_common_divisor(mut a: u64, mut b: u64) -> u64 {
    while b != 0 {
        (a, b) = (b, a % b);
    }
    a
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use super::*;
    use crate::rule::{R, partial, shard};
    use crate::{Arg, Mesh, PartialOp, Placement, Topology, propagate_by, written};

    /// Where the inputs and outputs of an op lie that has these strategies.
    fn found(
        mesh: &str,
        args: &[&str],
        outputs: &[&str],
        strategies: Vec<Vec<Slot>>,
    ) -> Result<String, PropagationError> {
        let mesh = Mesh::parse(mesh).unwrap();
        let args: Vec<Arg> = args.iter().map(|a| Arg::parse(a, &mesh).unwrap()).collect();
        let query = Query {
            op: "my::op",
            args: &args,
        };
        let meta = |text: &&str| Spec::parse(text, &mesh).unwrap().meta.unwrap();
        let rule = rule(&query, outputs.iter().map(meta).collect(), strategies)?;
        let found = propagate_by(rule, &query, &mesh, &Topology::one_node(&mesh))?;
        let inputs = found.inputs.iter().map(|i| written(&i.to));
        let outputs = found.outputs.iter().map(|o| written(&o.placements));
        Ok(inputs.chain(outputs).collect::<Vec<_>>().join(" "))
    }

    fn plain(dim: u32) -> Slot {
        Slot::Plain(dim, Need::Nothing)
    }

    #[test]
    fn strategies_are_joined_over_mesh_dims() {
        let rows = || vec![vec![shard(0), shard(0)], vec![shard(1), shard(1)]];
        let ask = |x| found("2,2", &[x], &["f32[8,4]"], rows()).unwrap();
        assert_eq!(ask("f32[8,4] @ S(0),S(1)"), "S(0),S(1) S(0),S(1)");
        assert_eq!(ask("f32[8,4] @ R,R"), "R,R R,R");
        assert_eq!(ask("f32[8,4] @ S(0),P(sum)").split(' ').count(), 2);
    }

    #[test]
    fn a_plain_shard_is_no_placeholder() {
        let ask = |slot| found("4", &["f32[8] @ _S(0,2)"], &["f32[8]"], vec![vec![slot; 2]]);
        assert_eq!(ask(shard(0)).unwrap(), "_S(0,2) _S(0,2)");
        assert_ne!(ask(plain(0)).unwrap(), "_S(0,2) _S(0,2)");
    }

    #[test]
    fn no_shard_is_empty() {
        let ask = |x| found("4", &[x], &["f32[3]"], vec![vec![shard(0), shard(0)]]);
        assert_eq!(ask("f32[3] @ S(0)").unwrap(), "R R");
        let ask = |x| found("2", &[x], &["f32[3]"], vec![vec![shard(0), shard(0)]]);
        assert_eq!(ask("f32[3] @ S(0)").unwrap(), "S(0) S(0)");
    }

    #[test]
    fn shards_of_different_dims_are_even() {
        let twice = |x, y: &str, slot: Slot| found("2", &[x], &[y], vec![vec![slot; 2]]).unwrap();
        for slot in [shard(0), plain(0)] {
            assert_eq!(twice("f32[5] @ S(0)", "f32[10]", slot), "R R");
            assert_eq!(twice("f32[6] @ S(0)", "f32[12]", slot), "S(0) S(0)");
        }
    }

    #[test]
    fn what_is_written_stays() {
        let mesh = Mesh::parse("2").unwrap();
        let topology = Topology::one_node(&mesh);
        let ask = |x: &str| {
            let args = [Arg::parse(x, &mesh).unwrap()];
            let query = Query {
                op: "my::op_",
                args: &args,
            };
            let meta = Spec::parse("f32[8]", &mesh).unwrap().meta.unwrap();
            let mut rule = rule(&query, vec![meta], [vec![shard(0), shard(0)]]).unwrap();
            rule.returns(0, 0);
            propagate_by(rule, &query, &mesh, &topology)
        };
        let kept = ask("f32[8] @ S(0)").unwrap();
        assert_eq!(kept.outputs[0].placements, [Placement::Shard { dim: 0 }]);
        assert!(matches!(
            ask("f32[8] @ P(sum)"),
            Err(PropagationError::InPlace { .. })
        ));
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let ask = |slots| {
            let found = found("2", &["f32[8] @ S(0)"], &["f32[8]"], vec![slots]);
            found.unwrap_err().to_string()
        };
        assert_eq!(
            ask(vec![R]),
            "my::op: strategy 0 of the rule: expected 2 placements, of 1 results and 1 tensor \
             inputs, found 1"
        );
        assert_eq!(
            ask(vec![partial(PartialOp::Sum), shard(1)]),
            "my::op: strategy 0 of the rule: expected a shard of one of the 1 dims of tensor 1, \
             found dim 1"
        );
        let none = Slot::Fixed(Placement::StridedShard {
            dim: 0,
            split_factor: 0,
        });
        assert!(ask(vec![R, none]).contains("split factors from 1"));
    }
}

//! From whole tensors to the pieces of each rank, and back.
//!
//! Pieces are made so that no wrong strategy passes by chance. Summands are unequal
//! and of mixed sign. Every rank decides some elements of an extremum, and the other
//! ranks' elements are clearly away from it. Factors turn signs. Norms have unequal
//! shares. Partial mesh dims nest, the leftmost outside.

use crate::samples::Values;
use rote_propagation::layout::Layout;
use rote_propagation::{PartialOp, Placement};

use super::draw::Rng;
use super::host::{HostTensor, Kind, Numbers, kind};
use super::registered;

/// The coordinates of a mesh, last dim fastest.
pub(super) fn coordinates(mesh: &[u32]) -> Vec<Vec<u32>> {
    let mut all = vec![Vec::new()];
    for n in mesh {
        all = (all.iter())
            .flat_map(|c: &Vec<u32>| (0..*n).map(move |i| [c.as_slice(), &[i]].concat()))
            .collect();
    }
    all
}

/// The shard at a coordinate; partial mesh dims count as replicated.
pub(super) fn shard(
    whole: &HostTensor,
    placements: &[Placement],
    mesh: &[u32],
    coordinate: &[u32],
) -> Option<HostTensor> {
    if placements.iter().all(|p| p.sharded().is_none()) {
        return Some(whole.clone());
    }
    let mut indices = Vec::with_capacity(whole.meta.shape.len());
    for (dim, size) in whole.meta.shape.iter().enumerate() {
        let layout = Layout::of(*size, dim as u32, placements, mesh, coordinate)?;
        indices.push(
            (0..layout.size())
                .map(|i| layout.global(i))
                .collect::<Option<_>>()?,
        );
    }
    Some(whole.picked(&indices))
}

/// What each rank holds, in the order of [`coordinates`]; `None` when a tensor
/// of this dtype, or with such values, cannot lie so.
pub(super) fn pieces(
    whole: &HostTensor,
    values: Values,
    placements: &[Placement],
    mesh: &[u32],
    rng: &mut Rng,
) -> Option<Vec<HostTensor>> {
    let parts = parts(whole, values, placements, mesh, rng)?;
    let coordinates = coordinates(mesh);
    (parts.iter().zip(&coordinates))
        .map(|(part, c)| shard(part, placements, mesh, c))
        .collect()
}

fn parts(
    whole: &HostTensor,
    values: Values,
    placements: &[Placement],
    mesh: &[u32],
    rng: &mut Rng,
) -> Option<Vec<HostTensor>> {
    let (Some((placement, placements)), Some((n, mesh))) =
        (placements.split_first(), mesh.split_first())
    else {
        return Some(vec![whole.clone()]);
    };
    if let Placement::Partial(op) = placement {
        let mut all = Vec::new();
        for part in split(whole, values, *op, *n as usize, rng)? {
            all.extend(parts(&part, values, placements, mesh, rng)?);
        }
        return Some(all);
    }
    let inner = parts(whole, values, placements, mesh, rng)?;
    let all = (0..*n).flat_map(|_| inner.iter().cloned());
    Some(all.collect())
}

/// Tensors that combine to the whole.
fn split(
    whole: &HostTensor,
    values: Values,
    op: PartialOp,
    n: usize,
    rng: &mut Rng,
) -> Option<Vec<HostTensor>> {
    let kind = kind(whole.meta.dtype)?;
    let count = whole.len();
    // Ranks in an order that changes from element to element, so that each of
    // them decides some.
    let first = rng.below(n as u64) as usize;
    let decides = |i: usize, rng: &mut Rng| match i < n {
        true => (first + i) % n,
        false => rng.below(n as u64) as usize,
    };
    let numbers: Vec<Numbers> = match (&whole.numbers, kind, op) {
        // How a tensor comes apart is not known.
        (_, _, PartialOp::Registered(_)) => return None,
        // No norm is negative.
        (Numbers::Real(x), _, PartialOp::Norm(_)) if !x.iter().all(|x| *x >= 0.0) => return None,
        (Numbers::Real(x), _, _) => {
            let mut out = vec![vec![0.0; count]; n];
            for (i, x) in x.iter().enumerate() {
                let parts = split_real(*x, op, n, decides(i, rng), rng);
                out.iter_mut().zip(parts).for_each(|(o, p)| o[i] = p);
            }
            out.into_iter().map(Numbers::Real).collect()
        }
        (Numbers::Complex(x), _, PartialOp::Sum | PartialOp::Avg | PartialOp::Mask) => {
            let mut out = vec![vec![[0.0; 2]; count]; n];
            for (i, x) in x.iter().enumerate() {
                for part in 0..2 {
                    let parts = split_real(x[part], op, n, decides(i, rng), rng);
                    out.iter_mut().zip(parts).for_each(|(o, p)| o[i][part] = p);
                }
            }
            out.into_iter().map(Numbers::Complex).collect()
        }
        (Numbers::Whole(x), Kind::Truth, PartialOp::Max | PartialOp::Min) => {
            let decided = i64::from(op == PartialOp::Max);
            let mut out = vec![vec![1 - decided; count]; n];
            for (i, x) in x.iter().enumerate().filter(|(_, x)| **x == decided) {
                let own = decides(i, rng);
                for (rank, out) in out.iter_mut().enumerate() {
                    let same = rank == own || rng.below(2) == 0;
                    out[i] = if same { *x } else { 1 - decided };
                }
            }
            out.into_iter().map(Numbers::Whole).collect()
        }
        (Numbers::Whole(x), Kind::Whole, _) => {
            let mut out = vec![vec![0; count]; n];
            for (i, x) in x.iter().enumerate() {
                let parts = split_whole(*x, values, op, n, decides(i, rng), rng)?;
                out.iter_mut().zip(parts).for_each(|(o, p)| o[i] = p);
            }
            out.into_iter().map(Numbers::Whole).collect()
        }
        _ => return None,
    };
    let meta = &whole.meta;
    Some(
        (numbers.into_iter())
            .map(|numbers| HostTensor {
                meta: meta.clone(),
                numbers,
            })
            .collect(),
    )
}

/// Parts of one number, of which the one at `own` is decided by the others, or
/// decides over them.
fn split_real(x: f64, op: PartialOp, n: usize, own: usize, rng: &mut Rng) -> Vec<f64> {
    let mut parts: Vec<f64> = (0..n)
        .map(|_| match op {
            PartialOp::Product => rng.sign() * (0.5 + 1.5 * rng.unit()),
            PartialOp::Max => x - 0.1 - 2.0 * rng.unit(),
            PartialOp::Min => x + 0.1 + 2.0 * rng.unit(),
            PartialOp::Norm(_) => 0.05 + rng.unit(),
            _ => 1.5 * rng.normal(),
        })
        .collect();
    if let PartialOp::Norm(order) = op {
        let whole = parts.iter().sum::<f64>();
        let norm = |share: f64| x * (share / whole).powf(order.p().recip());
        return parts.into_iter().map(norm).collect();
    }
    let others = |parts: &[f64]| -> Vec<f64> {
        let other = parts.iter().enumerate().filter(|(rank, _)| *rank != own);
        other.map(|(_, p)| *p).collect()
    };
    parts[own] = match op {
        PartialOp::Sum | PartialOp::Mask => x - others(&parts).iter().sum::<f64>(),
        PartialOp::Avg => n as f64 * x - others(&parts).iter().sum::<f64>(),
        PartialOp::Product => x / others(&parts).iter().product::<f64>(),
        PartialOp::Max | PartialOp::Min | PartialOp::Norm(_) | PartialOp::Registered(_) => x,
    };
    parts
}

fn split_whole(
    x: i64,
    values: Values,
    op: PartialOp,
    n: usize,
    own: usize,
    rng: &mut Rng,
) -> Option<Vec<i64>> {
    if let Values::Below(bound) = values {
        // Indices: every part must be one.
        let mut parts = vec![0; n];
        match op {
            PartialOp::Sum | PartialOp::Mask => {
                for _ in 0..x {
                    parts[rng.below(n as u64) as usize] += 1;
                }
            }
            PartialOp::Max => {
                parts.fill_with(|| rng.below(x as u64 + 1) as i64);
                parts[own] = x;
            }
            PartialOp::Min => {
                parts.fill_with(|| x + rng.below((bound - x).max(1) as u64) as i64);
                parts[own] = x;
            }
            PartialOp::Avg | PartialOp::Product | PartialOp::Norm(_) | PartialOp::Registered(_) => {
                return None;
            }
        }
        return Some(parts);
    }
    let mut parts: Vec<i64> = (0..n)
        .map(|_| match op {
            PartialOp::Product => rng.sign() as i64,
            PartialOp::Max => x - 1 - rng.below(5) as i64,
            PartialOp::Min => x + 1 + rng.below(5) as i64,
            _ => rng.below(11) as i64 - 5,
        })
        .collect();
    let others = || (0..n).filter(|rank| *rank != own);
    parts[own] = match op {
        PartialOp::Sum | PartialOp::Mask => x - others().map(|r| parts[r]).sum::<i64>(),
        PartialOp::Product => x * others().map(|r| parts[r]).product::<i64>(),
        PartialOp::Max | PartialOp::Min => x,
        // A mean or a root of integers is none in general.
        PartialOp::Avg | PartialOp::Norm(_) | PartialOp::Registered(_) => return None,
    };
    Some(parts)
}

/// Whether the ranks' tensors are the whole, placed so. Every rank is looked
/// at; the error tells the first difference. `scale`: as [`HostTensor::equals`].
pub(super) fn holds(
    whole: &HostTensor,
    placements: &[Placement],
    mesh: &[u32],
    ranks: &[HostTensor],
    scale: Option<f64>,
) -> Result<(), String> {
    let mut sizes = mesh.to_vec();
    let mut parts: Vec<HostTensor>;
    let mut now: &[HostTensor] = ranks;
    for m in (0..mesh.len()).rev() {
        let Placement::Partial(op) = placements[m] else {
            continue;
        };
        parts = along(now, &sizes, m, |parts| combined(parts, op))?;
        sizes[m] = 1;
        now = &parts;
    }
    for (found, coordinate) in now.iter().zip(coordinates(&sizes)) {
        let expected = shard(whole, placements, mesh, &coordinate).ok_or("too many blocks")?;
        if expected.is_empty() && expected.meta.shape == found.meta.shape {
            // Kernels forget the dtype of results without elements.
            continue;
        }
        if expected.meta != found.meta {
            return Err(format!(
                "rank {coordinate:?}: expected {}, found {}",
                expected.meta, found.meta
            ));
        }
        if !found.equals(&expected, scale) {
            return Err(format!("rank {coordinate:?}: values differ"));
        }
    }
    Ok(())
}

/// What the ranks along a mesh dim combine to, for each of the others, in the order of
/// [`coordinates`]. `sizes` are those of the mesh on which the tensors lie.
pub(super) fn along(
    ranks: &[HostTensor],
    sizes: &[u32],
    dim: usize,
    combine: impl Fn(&[&HostTensor]) -> Result<HostTensor, String>,
) -> Result<Vec<HostTensor>, String> {
    let inner: usize = sizes[dim + 1..].iter().map(|n| *n as usize).product();
    let n = sizes[dim] as usize;
    let mut all = Vec::with_capacity(ranks.len() / n);
    for outer in 0..ranks.len() / (n * inner) {
        for at in 0..inner {
            let parts = (0..n).map(|r| &ranks[(outer * n + r) * inner + at]);
            all.push(combine(&parts.collect::<Vec<_>>())?);
        }
    }
    Ok(all)
}

fn combined(parts: &[&HostTensor], op: PartialOp) -> Result<HostTensor, String> {
    let first = parts[0];
    if let Some(other) = parts.iter().find(|p| p.meta != first.meta) {
        return Err(format!("partials {} and {}", first.meta, other.meta));
    }
    let n = parts.len() as f64;
    if let PartialOp::Norm(order) = op {
        return norm(parts, order.p());
    }
    if let PartialOp::Registered(partial) = op {
        return registered::combined(partial, parts);
    }
    let truth = kind(first.meta.dtype) == Some(Kind::Truth);
    let mut numbers = first.numbers.clone();
    for part in &parts[1..] {
        match (&mut numbers, &part.numbers) {
            (Numbers::Real(a), Numbers::Real(b)) => {
                for (a, b) in a.iter_mut().zip(b) {
                    *a = match op {
                        PartialOp::Sum | PartialOp::Avg | PartialOp::Mask => *a + b,
                        PartialOp::Product => *a * b,
                        // As PyTorch: NaN wins.
                        _ if a.is_nan() || b.is_nan() => f64::NAN,
                        PartialOp::Max => a.max(*b),
                        PartialOp::Min => a.min(*b),
                        PartialOp::Norm(_) | PartialOp::Registered(_) => {
                            return Err("a norm is no sum".into());
                        }
                    };
                }
            }
            (Numbers::Complex(a), Numbers::Complex(b)) => {
                for (a, b) in a.iter_mut().zip(b) {
                    *a = match op {
                        PartialOp::Sum | PartialOp::Avg | PartialOp::Mask => {
                            [a[0] + b[0], a[1] + b[1]]
                        }
                        PartialOp::Product => {
                            [a[0] * b[0] - a[1] * b[1], a[0] * b[1] + a[1] * b[0]]
                        }
                        PartialOp::Max
                        | PartialOp::Min
                        | PartialOp::Norm(_)
                        | PartialOp::Registered(_) => {
                            return Err("complex numbers have no order".into());
                        }
                    };
                }
            }
            (Numbers::Whole(a), Numbers::Whole(b)) => {
                for (a, b) in a.iter_mut().zip(b) {
                    *a = match op {
                        PartialOp::Max => *a.max(&mut b.clone()),
                        PartialOp::Min => *a.min(&mut b.clone()),
                        _ if truth => return Err("truth values have no sum or product".into()),
                        PartialOp::Sum | PartialOp::Mask => a.wrapping_add(*b),
                        PartialOp::Product => a.wrapping_mul(*b),
                        PartialOp::Avg | PartialOp::Norm(_) | PartialOp::Registered(_) => {
                            return Err("integers have no mean".into());
                        }
                    };
                }
            }
            _ => return Err("partials of different kinds".into()),
        }
    }
    if op == PartialOp::Avg {
        match &mut numbers {
            Numbers::Real(x) => x.iter_mut().for_each(|x| *x /= n),
            Numbers::Complex(x) => x.iter_mut().flatten().for_each(|x| *x /= n),
            Numbers::Whole(_) => return Err("integers have no mean".into()),
        }
    }
    Ok(HostTensor {
        meta: first.meta.clone(),
        numbers,
    })
}

/// The root of the sum of powers of the parts, which are norms.
fn norm(parts: &[&HostTensor], order: f64) -> Result<HostTensor, String> {
    let mut sums = vec![0.0; parts[0].len()];
    for part in parts {
        let Numbers::Real(x) = &part.numbers else {
            return Err("norms are real numbers".into());
        };
        if let Some(x) = x.iter().find(|x| **x < 0.0) {
            return Err(format!("a part of a norm is {x}"));
        }
        (sums.iter_mut().zip(x)).for_each(|(sum, x)| *sum += x.powf(order));
    }
    let roots = sums.into_iter().map(|sum| sum.powf(order.recip()));
    Ok(HostTensor {
        meta: parts[0].meta.clone(),
        numbers: Numbers::Real(roots.collect()),
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use super::*;
    use crate::draw::whole;
    use rote_propagation::{Mesh, Spec};

    /// What is taken apart comes together again, and not as anything else.
    #[test]
    fn pieces_hold_the_whole_and_nothing_else_does() {
        for (mesh, shape, all) in [
            (
                "2",
                "f64[5,3]",
                &[
                    "R",
                    "S(0)",
                    "S(1)",
                    "_S(0,2)",
                    "P(sum)",
                    "P(avg)",
                    "P(max)",
                    "P(min)",
                    "P(product)",
                ][..],
            ),
            (
                "4",
                "f64[3,6]",
                &[
                    "R",
                    "S(0)",
                    "S(1)",
                    "P(sum)",
                    "P(avg)",
                    "P(max)",
                    "P(min)",
                    "P(product)",
                ],
            ),
            (
                "2,2",
                "f64[5,3]",
                &[
                    "S(0),S(0)",
                    "P(sum),S(1)",
                    "P(max),P(sum)",
                    "R,P(min)",
                    "P(avg),R",
                    "R,R",
                ],
            ),
            (
                "2",
                "i64[5,3]",
                &["R", "S(0)", "P(sum)", "P(max)", "P(min)", "P(product)"],
            ),
            ("2", "bool[5,3]", &["R", "S(1)", "P(max)", "P(min)"]),
            ("2", "c128[5,3]", &["R", "S(1)", "P(sum)", "P(avg)"]),
            (
                "2",
                "f64[4,3]>0",
                &["R", "S(0)", "P(sum)", "P(norm2)", "P(norm-0.5)"],
            ),
            (
                "2,2",
                "f64[4,3]>0",
                &["P(norm2),S(1)", "P(norm2),P(norm2)", "P(norm3),R", "R,R"],
            ),
        ] {
            let mesh = Mesh::parse(mesh).unwrap();
            let (shape, values) = match shape.strip_suffix(">0") {
                Some(shape) => (shape, Values::Positive),
                None => (shape, Values::Any),
            };
            let meta = Spec::parse(shape, &mesh).unwrap().meta.unwrap();
            let mut rng = Rng::new(&[1]);
            let tensor = whole(&meta, values, &mut rng, false).unwrap();
            let placed = |t: &str| {
                Spec::parse(&format!("{shape} @ {t}"), &mesh)
                    .unwrap()
                    .placements
            };
            for from in all {
                let ranks = pieces(&tensor, values, &placed(from), mesh.sizes(), &mut rng).unwrap();
                for to in all {
                    // What every rank has whole is also its own extremum and mean.
                    let trivial =
                        from.contains('R') && ["avg", "max", "min"].iter().any(|p| to.contains(p));
                    if from == to || !trivial {
                        let found = holds(
                            &tensor,
                            &placed(to),
                            mesh.sizes(),
                            &ranks,
                            Some(tensor.scale()),
                        );
                        assert_eq!(
                            found.is_ok(),
                            from == to,
                            "{shape} {from} as {to}: {found:?}"
                        );
                    }
                }
            }
        }
    }
}

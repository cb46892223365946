//! Placements: how one mesh dim holds a tensor.
//!
//! These are [`rote_plans::Placement`]'s four kinds, and the masked partial of an
//! embedding whose vocabulary is sharded and the partial of a norm, which a plan
//! keeps as text.

use std::fmt;

use rote_plans::{DType, ReduceOp};

use super::error::PropagationError;
use super::partials::PartialId;
use super::promote::{Class, class};
use super::sharding::ShardingId;

/// How one mesh dim holds a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Placement {
    /// Every rank of the mesh dim holds the whole tensor. Written `R`.
    Replicate,
    /// The tensor dim is split over the ranks as `torch.chunk` splits: pieces
    /// of the rounded-up size, the last ones smaller or empty. Written `S(0)`.
    Shard {
        /// The tensor dim, counted from the front.
        dim: u32,
    },
    /// Each of `split_factor` blocks of the tensor dim is split over the ranks,
    /// and a rank holds its piece of every block. Written `_S(0,2)`.
    StridedShard {
        /// The tensor dim, counted from the front.
        dim: u32,
        /// How many blocks the dim has.
        split_factor: u32,
    },
    /// The tensor dim is split as a registered [`Sharding`] says. Written with
    /// its name, and with its parameters if it has some: `RoundRobin(0)`,
    /// `RaggedShard(0,1,3)`.
    ///
    /// [`Sharding`]: super::sharding::Sharding
    Registered {
        /// The tensor dim, counted from the front.
        dim: u32,
        /// Which sharding.
        sharding: ShardingId,
    },
    /// Every rank holds a summand (or factor, ...) of the tensor. Written
    /// `P(sum)`.
    Partial(PartialOp),
}

/// How the ranks' tensors of a partial placement combine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum PartialOp {
    /// Element-wise sum.
    Sum,
    /// Element-wise mean over the ranks.
    Avg,
    /// Element-wise maximum.
    Max,
    /// Element-wise minimum.
    Min,
    /// Element-wise product.
    Product,
    /// Sum, where a rank's rows are zero if it does not hold their part of the
    /// vocabulary.
    Mask,
    /// Norm over the ranks, of an order besides 0, 1 and the infinities: the sum
    /// of the powers, and its root. Every rank's elements are norms, none of them
    /// negative.
    Norm(Order),
    /// As a caller has registered.
    Registered(PartialId),
}

/// The order p of a norm `(sum of |x|^p)^(1/p)`: finite, and neither 0 nor 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Order(u64);

impl Order {
    /// In rules, whichever order the inputs have; no norm has it.
    pub(super) const ANY: Order = Order(u64::MAX);

    /// The number.
    pub fn p(self) -> f64 {
        f64::from_bits(self.0)
    }
}

impl fmt::Display for Order {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Order::ANY => f.write_str("p"),
            order => {
                let p = format!("{:?}", order.p());
                f.write_str(p.strip_suffix(".0").unwrap_or(&p))
            }
        }
    }
}

const OPS: [(PartialOp, &str); 6] = [
    (PartialOp::Sum, "sum"),
    (PartialOp::Avg, "avg"),
    (PartialOp::Max, "max"),
    (PartialOp::Min, "min"),
    (PartialOp::Product, "product"),
    (PartialOp::Mask, "mask"),
];

impl PartialOp {
    /// How the norms of shards combine to the norm of the whole: those of orders 0
    /// and 1 as a sum, of infinity as a maximum, of minus infinity as a minimum, of
    /// others as a norm. `None` for NaN.
    pub fn of_norm(order: f64) -> Option<PartialOp> {
        Some(match order {
            0.0 | 1.0 => PartialOp::Sum,
            f64::INFINITY => PartialOp::Max,
            f64::NEG_INFINITY => PartialOp::Min,
            order if order.is_nan() => return None,
            order => PartialOp::Norm(Order(order.to_bits())),
        })
    }

    /// The reduction that its collectives apply; of a norm to powers, before the
    /// root.
    pub fn reduce_op(self) -> ReduceOp {
        match self {
            PartialOp::Sum | PartialOp::Mask | PartialOp::Norm(_) => ReduceOp::Sum,
            PartialOp::Avg => ReduceOp::Avg,
            PartialOp::Max => ReduceOp::Max,
            PartialOp::Min => ReduceOp::Min,
            PartialOp::Product => ReduceOp::Product,
            PartialOp::Registered(partial) => partial.reduction(),
        }
    }

    /// Whether a partial is written so that no caller brought.
    pub(super) fn is_name(name: &str) -> bool {
        name.starts_with("norm") || OPS.iter().any(|(_, known)| *known == name)
    }
}

/// The plain partial that a reduction reduces.
impl From<ReduceOp> for PartialOp {
    fn from(op: ReduceOp) -> Self {
        match op {
            ReduceOp::Sum => PartialOp::Sum,
            ReduceOp::Avg => PartialOp::Avg,
            ReduceOp::Max => PartialOp::Max,
            ReduceOp::Min => PartialOp::Min,
            ReduceOp::Product => PartialOp::Product,
        }
    }
}

/// The name inside `P(...)`.
impl fmt::Display for PartialOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PartialOp::Norm(order) => write!(f, "norm{order}"),
            PartialOp::Registered(partial) => write!(f, "{partial}"),
            _ => {
                let known = OPS.iter().find(|(op, _)| op == self);
                f.write_str(known.map_or("", |(_, name)| name))
            }
        }
    }
}

impl Placement {
    /// The tensor dim that this placement splits, and into how many blocks it
    /// was split before; one block for a registered sharding.
    pub fn sharded(self) -> Option<(u32, u32)> {
        match self {
            Placement::Shard { dim } => Some((dim, 1)),
            Placement::StridedShard { dim, split_factor } => Some((dim, split_factor)),
            Placement::Registered { dim, .. } => Some((dim, 1)),
            _ => None,
        }
    }

    /// The registered sharding that this placement splits a tensor dim by.
    pub fn registered(self) -> Option<ShardingId> {
        match self {
            Placement::Registered { sharding, .. } => Some(sharding),
            _ => None,
        }
    }

    /// Whether a mesh dim that is replicated can be made so without moving
    /// anything, for elements of a type. PyTorch divides by the number of ranks for
    /// a sum (`Partial._partition_value`), which integers and truth values do not
    /// survive. It makes no factors. Negative elements are no norms. What callers bring is
    /// not known.
    pub(super) fn is_made_of_copies(self, dtype: DType) -> bool {
        match self {
            Placement::Partial(PartialOp::Sum) => {
                matches!(class(dtype), Class::Float | Class::Complex)
            }
            Placement::Partial(PartialOp::Avg | PartialOp::Max | PartialOp::Min) => true,
            _ => false,
        }
    }

    /// Reads the notation that [`Placement`] prints, and DTensor's `_NormP(2)`.
    ///
    /// # Errors
    ///
    /// [`PropagationError::Notation`] for anything else.
    pub fn parse(text: &str) -> Result<Self, PropagationError> {
        Self::parse_of(text, None)
    }

    /// The same of a tensor of `ndim` dims, where `S(-1)` is its last dim.
    pub(super) fn parse_of(text: &str, ndim: Option<usize>) -> Result<Self, PropagationError> {
        let text = text.trim();
        let wrong = || {
            PropagationError::notation(text, "a placement: R, S(dim), _S(dim,split_factor), P(op)")
        };
        if text == "R" {
            return Ok(Placement::Replicate);
        }
        let (head, rest) = text.split_once('(').ok_or_else(wrong)?;
        let inside = rest.strip_suffix(')').ok_or_else(wrong)?;
        let number = |t: &str| t.trim().parse::<u32>().map_err(|_| wrong());
        let dim = |t: &str| -> Result<u32, PropagationError> {
            let Some(back) = t.trim().strip_prefix('-') else {
                return number(t);
            };
            let ndim = ndim.ok_or_else(wrong)?;
            let within = |back: &usize| (1..=ndim).contains(back);
            let back = back.parse::<usize>().ok().filter(within);
            let back = back.ok_or_else(|| {
                let expected = format!("a placement whose dim is one of the tensor's {ndim}");
                PropagationError::notation(text, expected)
            })?;
            Ok((ndim - back) as u32)
        };
        match head.trim() {
            "S" => Ok(Placement::Shard { dim: dim(inside)? }),
            "_S" => {
                let (split, split_factor) = inside.split_once(',').ok_or_else(wrong)?;
                Ok(Placement::StridedShard {
                    dim: dim(split)?,
                    split_factor: number(split_factor)?,
                })
            }
            "P" => {
                let inside = inside.trim();
                if let Some(order) = inside.strip_prefix("norm") {
                    return norm(order).ok_or_else(wrong);
                }
                let found = OPS.iter().find(|(_, name)| *name == inside);
                let found = found.map(|(op, _)| *op).or_else(|| {
                    let (name, parameters) = inside.split_once(',').unwrap_or((inside, ""));
                    let parameters = parameters.replace(' ', "");
                    PartialId::named(name, &parameters).map(PartialOp::Registered)
                });
                found.map(Placement::Partial).ok_or_else(wrong)
            }
            "_NormP" => norm(inside).ok_or_else(wrong),
            name => {
                let (split, parameters) = match inside.split_once(',') {
                    Some((split, parameters)) => (split, Some(parameters.replace(' ', ""))),
                    None => (inside, None),
                };
                let sharding = ShardingId::named(name, parameters.as_deref()).ok_or_else(wrong)?;
                let dim = dim(split)?;
                Ok(Placement::Registered { dim, sharding })
            }
        }
    }

    /// The placement of a plan, unless the plan has only a text for it.
    pub fn from_plan(placement: rote_plans::Placement) -> Option<Self> {
        Some(match placement {
            rote_plans::Placement::Replicate => Placement::Replicate,
            rote_plans::Placement::Shard { dim } => Placement::Shard { dim },
            rote_plans::Placement::StridedShard { dim, split_factor } => {
                Placement::StridedShard { dim, split_factor }
            }
            rote_plans::Placement::Partial { op } => Placement::Partial(op.into()),
            rote_plans::Placement::Other { .. } => return None,
        })
    }
}

/// The partial of a norm whose order is written so.
fn norm(order: &str) -> Option<Placement> {
    let order = order.trim().parse().ok()?;
    PartialOp::of_norm(order).map(Placement::Partial)
}

impl fmt::Display for Placement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Placement::Replicate => f.write_str("R"),
            Placement::Shard { dim } => write!(f, "S({dim})"),
            Placement::StridedShard { dim, split_factor } => write!(f, "_S({dim},{split_factor})"),
            Placement::Registered { dim, sharding } => {
                let sharding = sharding.sharding();
                write!(f, "{}({dim}", sharding.name())?;
                match sharding.parameters() {
                    Some(parameters) => write!(f, ",{parameters})"),
                    None => f.write_str(")"),
                }
            }
            Placement::Partial(op) => write!(f, "P({op})"),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use super::*;

    #[test]
    fn what_is_printed_reads_back() {
        for text in [
            "R",
            "S(0)",
            "S(3)",
            "_S(1,4)",
            "P(sum)",
            "P(avg)",
            "P(product)",
            "P(mask)",
            "P(norm2)",
            "P(norm2.5)",
            "P(norm-1)",
            "P(norm1e300)",
        ] {
            assert_eq!(Placement::parse(text).unwrap().to_string(), text);
        }
        for text in [
            "",
            "r",
            "S",
            "S()",
            "S(-1)",
            "_S(1)",
            "P",
            "P(x)",
            "S(1",
            "S(1))",
            "P(norm)",
            "P(normp)",
            "P(normnan)",
            "_NormP()",
        ] {
            assert!(Placement::parse(text).is_err(), "{text}");
        }
        // Sums and extrema of norms are those partials.
        for (text, shown) in [
            ("_NormP(2)", "P(norm2)"),
            ("_NormP(2.5)", "P(norm2.5)"),
            ("_NormP(1)", "P(sum)"),
            ("P(norm2.0)", "P(norm2)"),
            ("P(norm0)", "P(sum)"),
            ("P(norminf)", "P(max)"),
        ] {
            assert_eq!(Placement::parse(text).unwrap().to_string(), shown);
        }
    }
}

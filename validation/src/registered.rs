//! Tensors that lie in registered partials. How a whole tensor comes apart is not known, only
//! how parts combine: so the parts are drawn, and the whole follows from them.

use rote_propagation::{PartialId, PartialOp, Placement, TensorMeta};

use crate::samples::Values;

use super::draw::{Rng, make_non_negative, whole};
use super::host::{HostTensor, Kind, Numbers, kind};
use super::judge::Placed;
use super::pieces::{along, coordinates, shard};

/// The registered partial of each input that has one.
pub(super) type Partials = Vec<Option<PartialId>>;

/// The registered partial that each input has, on whichever mesh dims.
pub(super) fn partials(inputs: &Placed) -> Partials {
    let first = |placements: &Vec<Placement>| placements.iter().find_map(registered);
    inputs.iter().map(first).collect()
}

/// The registered partial that a placement is.
pub(super) fn registered(placement: &Placement) -> Option<PartialId> {
    match placement {
        Placement::Partial(PartialOp::Registered(partial)) => Some(*partial),
        _ => None,
    }
}

/// What each rank holds if a tensor is a partial on every mesh dim.
pub(super) struct Parts {
    partial: PartialId,
    ranks: Vec<HostTensor>,
}

impl Parts {
    /// Draws the parts of a tensor; also what they combine to. `signs` turns those of every
    /// second draw, and is `None` if there are to be no negative numbers.
    ///
    /// # Errors
    ///
    /// Why a tensor of this dtype, or with such values, cannot lie so.
    pub(super) fn drawn(
        partial: PartialId,
        meta: &TensorMeta,
        values: Values,
        mesh: &[u32],
        rng: &mut Rng,
        signs: Option<bool>,
    ) -> Result<(Self, HostTensor), String> {
        if values != Values::Any {
            return Err(format!(
                "parts of P({partial}) with such values are not known"
            ));
        }
        let ranks = mesh.iter().product();
        let part = |_| whole(meta, values, rng, signs == Some(true));
        let ranks: Option<Vec<_>> = (0..ranks).map(part).collect();
        let ranks = ranks.ok_or_else(|| format!("no arithmetic for {meta}"))?;
        let mut parts = Parts { partial, ranks };
        if signs.is_some() {
            let whole = parts.whole(mesh)?;
            if whole.is_finite() {
                return Ok((parts, whole));
            }
        }
        // A root or a logarithm of a negative number is none.
        let all = parts.ranks.iter_mut();
        all.for_each(|part| make_non_negative(part, values));
        let whole = parts.whole(mesh)?;
        match whole.is_finite() {
            true => Ok((parts, whole)),
            false => Err(format!("parts of P({partial}) combine to no number")),
        }
    }

    /// What the parts combine to, one mesh dim after the other.
    ///
    /// # Errors
    ///
    /// Why they cannot be combined, or that it matters which mesh dim comes first.
    fn whole(&self, mesh: &[u32]) -> Result<HostTensor, String> {
        let dims = || 0..mesh.len();
        let all: Vec<&HostTensor> = self.ranks.iter().collect();
        let whole = self.reduced(&all, mesh, dims().rev())?;
        let other = self.reduced(&all, mesh, dims())?;
        match whole.is_finite() && !other.equals(&whole, Some(whole.scale())) {
            true => Err(format!(
                "parts of P({}) combine to something else if another mesh dim comes first",
                self.partial
            )),
            false => Ok(whole),
        }
    }

    /// What each rank holds by these placements, in the order of [`coordinates`]; `None` if
    /// there are other partials among them.
    pub(super) fn pieces(&self, placements: &[Placement], mesh: &[u32]) -> Option<Vec<HostTensor>> {
        let own = Placement::Partial(PartialOp::Registered(self.partial));
        if (placements.iter()).any(|p| *p != own && matches!(p, Placement::Partial(_))) {
            return None;
        }
        let all = coordinates(mesh);
        let reduced = || (0..mesh.len()).rev().filter(|m| placements[*m] != own);
        let sizes: Vec<u32> = (placements.iter().zip(mesh))
            .map(|(placement, n)| if *placement == own { 1 } else { *n })
            .collect();
        let piece = |at: &Vec<u32>| {
            let together = |other: &Vec<u32>| {
                let mut dims = placements.iter().zip(at.iter().zip(other));
                dims.all(|(placement, (a, b))| *placement != own || a == b)
            };
            let parts = all.iter().zip(&self.ranks);
            let parts: Vec<_> = (parts.filter(|(c, _)| together(c)))
                .map(|(_, part)| part)
                .collect();
            let whole = self.reduced(&parts, &sizes, reduced()).ok()?;
            shard(&whole, placements, mesh, at)
        };
        all.iter().map(piece).collect()
    }

    /// What parts on a mesh of these sizes combine to over mesh dims, in this order.
    fn reduced(
        &self,
        parts: &[&HostTensor],
        sizes: &[u32],
        dims: impl Iterator<Item = usize>,
    ) -> Result<HostTensor, String> {
        let mut sizes = sizes.to_vec();
        let mut now: Vec<HostTensor> = parts.iter().map(|part| (*part).clone()).collect();
        for m in dims {
            now = along(&now, &sizes, m, |parts| combined(self.partial, parts))?;
            sizes[m] = 1;
        }
        now.pop().ok_or_else(|| "no parts".to_owned())
    }
}

/// What parts on some ranks combine to.
pub(super) fn combined(partial: PartialId, parts: &[&HostTensor]) -> Result<HostTensor, String> {
    let numbers: Option<Vec<Vec<f64>>> = (parts.iter())
        .map(|part| match &part.numbers {
            Numbers::Real(numbers) => Some(numbers.clone()),
            Numbers::Whole(numbers) if kind(part.meta.dtype) == Some(Kind::Whole) => {
                Some(numbers.iter().map(|n| *n as f64).collect())
            }
            _ => None,
        })
        .collect();
    let meta = &parts[0].meta;
    let numbers = numbers.ok_or_else(|| format!("{meta} cannot be P({partial})"))?;
    let found = partial.combined(&numbers.iter().map(Vec::as_slice).collect::<Vec<_>>())?;
    let numbers = match &parts[0].numbers {
        Numbers::Whole(_) if found.iter().any(|x| x.fract() != 0.0) => {
            return Err(format!("parts of P({partial}) combine to no integers"));
        }
        Numbers::Whole(_) => Numbers::Whole(found.iter().map(|x| *x as i64).collect()),
        _ => Numbers::Real(found),
    };
    Ok(HostTensor {
        meta: meta.clone(),
        numbers,
    })
}

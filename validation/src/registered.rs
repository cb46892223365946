//! Tensors that lie in registered partials. How a whole tensor comes apart is not known, only
//! how parts combine: so the parts are drawn, and the whole follows from them.

use rote_propagation::{PartialId, PartialOp, Placement};

use crate::samples::Values;

use super::draw::{Rng, make_non_negative, whole};
use super::host::{HostTensor, Kind, Numbers, kind};
use super::judge::Placed;
use super::pieces::{coordinates, shard};

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
    /// Draws the parts of a tensor like `like`. `signs` turns those of every second draw, and
    /// is `None` if there are to be no negative numbers.
    ///
    /// # Errors
    ///
    /// That a tensor of this dtype, or with such values, cannot lie so.
    pub(super) fn drawn(
        partial: PartialId,
        like: &HostTensor,
        values: Values,
        mesh: &[u32],
        rng: &mut Rng,
        signs: Option<bool>,
    ) -> Result<Self, String> {
        if kind(like.meta.dtype) != Some(Kind::Real) || values != Values::Any {
            return Err(format!("{} cannot be P({partial})", like.meta));
        }
        let ranks = mesh.iter().product();
        let part = |_| whole(&like.meta, values, rng, signs == Some(true));
        let ranks: Option<Vec<_>> = (0..ranks).map(part).collect();
        let mut ranks = ranks.ok_or_else(|| format!("no arithmetic for {}", like.meta))?;
        let mut parts = Parts {
            partial,
            ranks: Vec::new(),
        };
        let mut non_negative = signs.is_none();
        loop {
            if non_negative {
                ranks
                    .iter_mut()
                    .for_each(|part| make_non_negative(part, values));
            }
            parts.ranks = ranks;
            if parts.whole()?.is_finite() {
                return Ok(parts);
            }
            if non_negative {
                return Err(format!("parts of P({partial}) combine to no number"));
            }
            // A root or a logarithm of a negative number is none.
            non_negative = true;
            ranks = parts.ranks;
        }
    }

    /// What the parts combine to.
    pub(super) fn whole(&self) -> Result<HostTensor, String> {
        combined(self.partial, &self.ranks.iter().collect::<Vec<_>>())
    }

    /// What each rank holds by these placements, in the order of [`coordinates`]; `None` if
    /// there are other partials among them.
    pub(super) fn pieces(&self, placements: &[Placement], mesh: &[u32]) -> Option<Vec<HostTensor>> {
        let own = Placement::Partial(PartialOp::Registered(self.partial));
        if placements
            .iter()
            .any(|p| *p != own && matches!(p, Placement::Partial(_)))
        {
            return None;
        }
        let all = coordinates(mesh);
        let piece = |at: &Vec<u32>| {
            let together = |other: &Vec<u32>| {
                let mut dims = placements.iter().zip(at.iter().zip(other));
                dims.all(|(placement, (a, b))| *placement != own || a == b)
            };
            let parts = all.iter().zip(&self.ranks);
            let parts: Vec<_> = parts
                .filter(|(c, _)| together(c))
                .map(|(_, part)| part)
                .collect();
            shard(&combined(self.partial, &parts).ok()?, placements, mesh, at)
        };
        all.iter().map(piece).collect()
    }
}

/// What parts on some ranks combine to.
pub(super) fn combined(partial: PartialId, parts: &[&HostTensor]) -> Result<HostTensor, String> {
    let numbers: Option<Vec<&[f64]>> = (parts.iter())
        .map(|part| match &part.numbers {
            Numbers::Real(numbers) => Some(numbers.as_slice()),
            _ => None,
        })
        .collect();
    let numbers = numbers.ok_or_else(|| format!("parts of P({partial}) are real numbers"))?;
    Ok(HostTensor {
        meta: parts[0].meta.clone(),
        numbers: Numbers::Real(partial.combined(&numbers)?),
    })
}

//! Meshes and specs, and the notations people write them in.
//!
//! `f32[64,32] @ S(0),R` is mesh-dim oriented: one placement per mesh dim.
//! `PartitionSpec(('dp','tp'), None)` is tensor-dim oriented: for each tensor
//! dim the mesh dims that split it, outermost first.

use std::fmt::{self, Write as _};

use rote_plans::DType;

use super::error::PropagationError;
use super::placement::Placement;

/// The largest number of mesh dims.
pub const MAX_MESH_DIMS: usize = 8;
/// The largest number of tensor dims, as in PyTorch.
pub const MAX_TENSOR_DIMS: usize = 64;

/// A device mesh, as far as propagation needs it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mesh {
    names: Vec<String>,
    sizes: Vec<u32>,
}

impl Mesh {
    /// A mesh of named dims, each with its number of ranks.
    ///
    /// # Errors
    ///
    /// No dim, more than [`MAX_MESH_DIMS`], a dim without ranks, two dims of one
    /// name, or more than 2^31 ranks.
    pub fn new(dims: &[(&str, u32)]) -> Result<Self, PropagationError> {
        let mesh = Mesh {
            names: dims.iter().map(|d| d.0.to_owned()).collect(),
            sizes: dims.iter().map(|d| d.1).collect(),
        };
        let wrong = |expected| PropagationError::Mesh {
            mesh: mesh.to_string(),
            expected,
        };
        if dims.is_empty() || dims.len() > MAX_MESH_DIMS {
            return Err(wrong("1 to 8 mesh dims"));
        }
        let ranks = dims
            .iter()
            .try_fold(1_u64, |n, d| n.checked_mul(u64::from(d.1)));
        if !ranks.is_some_and(|n| (1..=1 << 31).contains(&n)) {
            return Err(wrong("between 1 and 2^31 ranks"));
        }
        let names = &mesh.names;
        if (1..names.len()).any(|i| names[..i].contains(&names[i])) {
            return Err(wrong("a different name for every mesh dim"));
        }
        Ok(mesh)
    }

    /// Reads `dp=8,tp=2`, or `8,2` for a mesh whose dims have no names.
    ///
    /// # Errors
    ///
    /// As [`Mesh::new`], and for a text that is no such list.
    pub fn parse(text: &str) -> Result<Self, PropagationError> {
        let wrong = || PropagationError::notation(text, "a mesh such as dp=8,tp=2");
        let mut dims = Vec::new();
        for (i, dim) in text.split(',').enumerate() {
            let (name, size) = match dim.split_once('=') {
                Some((name, size)) => (name.trim().to_owned(), size),
                None => (format!("dim{i}"), dim),
            };
            if name.is_empty() {
                return Err(wrong());
            }
            dims.push((name, size.trim().parse::<u32>().map_err(|_| wrong())?));
        }
        let dims: Vec<_> = dims.iter().map(|d| (d.0.as_str(), d.1)).collect();
        Mesh::new(&dims)
    }

    /// Ranks per mesh dim.
    pub fn sizes(&self) -> &[u32] {
        &self.sizes
    }

    /// The name of each mesh dim.
    pub fn names(&self) -> &[String] {
        &self.names
    }
}

impl fmt::Display for Mesh {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, (name, size)) in self.names.iter().zip(&self.sizes).enumerate() {
            let comma = if i == 0 { "" } else { "," };
            write!(f, "{comma}{name}={size}")?;
        }
        Ok(())
    }
}

/// Element type and global shape of a tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorMeta {
    /// Element type.
    pub dtype: DType,
    /// Global shape in elements.
    pub shape: Vec<u64>,
}

impl TensorMeta {
    /// Bytes of the whole tensor.
    pub fn bytes(&self) -> u64 {
        let width = self.dtype.bytes().unwrap_or(1);
        self.shape.iter().fold(width, |n, d| n.saturating_mul(*d))
    }
}

impl fmt::Display for TensorMeta {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}[", self.dtype)?;
        for (i, dim) in self.shape.iter().enumerate() {
            let comma = if i == 0 { "" } else { "," };
            write!(f, "{comma}{dim}")?;
        }
        f.write_str("]")
    }
}

/// A distributed tensor: its global meta, and a placement per mesh dim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Spec {
    /// Global meta; `None` when the caller does not know it, which no op takes.
    pub meta: Option<TensorMeta>,
    /// One placement per mesh dim.
    pub placements: Vec<Placement>,
}

impl Spec {
    /// Reads `f32[64,32] @ S(0),R`, `? @ S(0),R` (unknown meta) or `f32[64,32] @
    /// PartitionSpec('dp', None)`; a tensor without `@` is replicated.
    ///
    /// # Errors
    ///
    /// [`PropagationError::Notation`] for anything else.
    pub fn parse(text: &str, mesh: &Mesh) -> Result<Self, PropagationError> {
        let (meta, placements) = match text.split_once('@') {
            Some((meta, placements)) => (meta.trim(), Some(placements.trim())),
            None => (text.trim(), None),
        };
        let meta = match meta {
            "?" => None,
            meta => Some(parse_meta(meta)?),
        };
        let placements = match placements {
            None => vec![Placement::Replicate; mesh.sizes.len()],
            Some(p) if p.starts_with("PartitionSpec") => {
                from_partition_spec(p, mesh, meta.as_ref().map_or(0, |m| m.shape.len()))?
            }
            Some(list) => parse_placements(list, meta.as_ref())?,
        };
        Ok(Spec { meta, placements })
    }
}

impl fmt::Display for Spec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.meta {
            Some(meta) => write!(f, "{meta} @ ")?,
            None => f.write_str("? @ ")?,
        }
        f.write_str(&written(&self.placements))
    }
}

/// Reads placements such as `S(0),R` of a tensor; dims below 0 count from its end.
///
/// # Errors
///
/// [`PropagationError::Notation`] for anything else, and for a dim below 0 of a tensor
/// whose meta is unknown.
pub fn parse_placements(
    text: &str,
    meta: Option<&TensorMeta>,
) -> Result<Vec<Placement>, PropagationError> {
    let ndim = meta.map(|meta| meta.shape.len());
    let listed = split_top(text).into_iter();
    listed.map(|one| Placement::parse_of(one, ndim)).collect()
}

/// Placements as in `S(0),R`.
pub fn written(placements: &[Placement]) -> String {
    let mut text = String::new();
    for (i, p) in placements.iter().enumerate() {
        let comma = if i == 0 { "" } else { "," };
        let _ = write!(text, "{comma}{p}");
    }
    text
}

fn parse_meta(text: &str) -> Result<TensorMeta, PropagationError> {
    let wrong = || PropagationError::notation(text, "a tensor such as f32[64,32]");
    let (dtype, rest) = text.split_once('[').ok_or_else(wrong)?;
    let dims = rest.strip_suffix(']').ok_or_else(wrong)?.trim();
    let dtype = DType::from_name(dtype.trim()).ok_or_else(wrong)?;
    let shape = if dims.is_empty() {
        Vec::new()
    } else {
        dims.split(',')
            .map(|d| d.trim().parse::<u64>().map_err(|_| wrong()))
            .collect::<Result<_, _>>()?
    };
    Ok(TensorMeta { dtype, shape })
}

/// Splits at the commas outside of parentheses and brackets.
pub(super) fn split_top(text: &str) -> Vec<&str> {
    let (mut parts, mut depth, mut start) = (Vec::new(), 0_i32, 0);
    for (i, c) in text.char_indices() {
        match c {
            '(' | '[' | '{' => depth += 1,
            ')' | ']' | '}' => depth -= 1,
            ',' if depth == 0 => {
                parts.push(text[start..i].trim());
                start = i + 1;
            }
            _ => {}
        }
    }
    parts.push(text[start..].trim());
    parts
}

/// The tensor-dim oriented notation: `PartitionSpec(('dp','tp'), None)`, with
/// `unreduced={'tp': 'sum'}` for partial mesh dims. `None` when the placements
/// have no such form: a strided shard whose blocks are not those of a mesh dim
/// to its right, or a registered sharding.
pub fn partition_spec(placements: &[Placement], mesh: &Mesh, ndim: usize) -> Option<String> {
    let mut entries = Vec::new();
    for dim in 0..ndim as u32 {
        entries.push(match shard_order(placements, mesh, dim)?.as_slice() {
            [] => "None".to_owned(),
            [one] => format!("'{}'", mesh.names[*one]),
            many => {
                let names: Vec<_> = many
                    .iter()
                    .map(|m| format!("'{}'", mesh.names[*m]))
                    .collect();
                format!("({})", names.join(","))
            }
        });
    }
    let partial: Vec<_> = placements
        .iter()
        .zip(&mesh.names)
        .filter_map(|(p, name)| match p {
            Placement::Partial(op) => Some(format!("'{name}': '{op}'")),
            _ => None,
        })
        .collect();
    if !partial.is_empty() {
        entries.push(format!("unreduced={{{}}}", partial.join(", ")));
    }
    Some(format!("PartitionSpec({})", entries.join(", ")))
}

/// The mesh dims that split a tensor dim, outermost first.
fn shard_order(placements: &[Placement], mesh: &Mesh, dim: u32) -> Option<Vec<usize>> {
    let mut order: Vec<usize> = Vec::new();
    // From the right: a strided shard lies inside those of the later mesh dims
    // whose sizes multiply to its split factor.
    for m in (0..placements.len()).rev() {
        let Some((d, split_factor)) = placements[m].sharded() else {
            continue;
        };
        if d != dim {
            continue;
        }
        if placements[m].registered().is_some() {
            return None;
        }
        let (mut at, mut blocks) = (0, 1_u64);
        while blocks < u64::from(split_factor) {
            blocks *= u64::from(mesh.sizes[*order.get(at)?]);
            at += 1;
        }
        if blocks != u64::from(split_factor) {
            return None;
        }
        order.insert(at, m);
    }
    Some(order)
}

fn from_partition_spec(
    text: &str,
    mesh: &Mesh,
    ndim: usize,
) -> Result<Vec<Placement>, PropagationError> {
    let wrong = || {
        PropagationError::notation(
            text,
            format!("PartitionSpec(...) over mesh dims of {mesh}, each at most once"),
        )
    };
    let inside = text
        .strip_prefix("PartitionSpec(")
        .and_then(|t| t.strip_suffix(')'))
        .ok_or_else(wrong)?;
    let mut placements = vec![Placement::Replicate; mesh.sizes.len()];
    let mut taken = vec![false; mesh.sizes.len()];
    let mut find = |name: &str| {
        let name = name.trim().trim_matches(['\'', '"']);
        let m = mesh.names.iter().position(|n| n == name);
        m.filter(|m| !std::mem::replace(&mut taken[*m], true))
            .ok_or_else(wrong)
    };
    let entries = if inside.trim().is_empty() {
        Vec::new()
    } else {
        split_top(inside)
    };
    for (dim, entry) in entries.into_iter().enumerate() {
        if let Some(unreduced) = entry.strip_prefix("unreduced={") {
            for pair in unreduced.strip_suffix('}').ok_or_else(wrong)?.split(',') {
                let (name, op) = pair.split_once(':').ok_or_else(wrong)?;
                let op = op.trim().trim_matches(['\'', '"']);
                placements[find(name)?] = Placement::parse(&format!("P({op})"))?;
            }
            continue;
        }
        if dim >= ndim {
            return Err(wrong());
        }
        let names = match entry.strip_prefix('(').and_then(|e| e.strip_suffix(')')) {
            Some(names) => names.split(',').filter(|n| !n.trim().is_empty()).collect(),
            None if entry == "None" => Vec::new(),
            None => vec![entry],
        };
        let order = names
            .into_iter()
            .map(&mut find)
            .collect::<Result<Vec<_>, _>>()?;
        for (at, m) in order.iter().enumerate() {
            // Split by mesh dims to the right before this one splits.
            let later = order[..at].iter().filter(|o| *o > m);
            let split_factor = later.fold(1_u64, |n, o| n * u64::from(mesh.sizes[*o]));
            let dim = dim as u32;
            placements[*m] = match u32::try_from(split_factor).map_err(|_| wrong())? {
                1 => Placement::Shard { dim },
                split_factor => Placement::StridedShard { dim, split_factor },
            };
        }
    }
    Ok(placements)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use super::*;

    #[test]
    fn both_notations_read_back() {
        let mesh = Mesh::parse("dp=4,tp=2").unwrap();
        for (by_mesh_dim, by_tensor_dim) in [
            ("S(0),S(1)", "PartitionSpec('dp', 'tp')"),
            ("S(0),S(0)", "PartitionSpec(('dp','tp'), None)"),
            ("_S(0,2),S(0)", "PartitionSpec(('tp','dp'), None)"),
            (
                "S(1),P(sum)",
                "PartitionSpec(None, 'dp', unreduced={'tp': 'sum'})",
            ),
        ] {
            let spec = Spec::parse(&format!("f32[64,32] @ {by_mesh_dim}"), &mesh).unwrap();
            assert_eq!(spec.to_string(), format!("f32[64,32] @ {by_mesh_dim}"));
            let other = partition_spec(&spec.placements, &mesh, 2).unwrap();
            assert_eq!(other, by_tensor_dim);
            assert_eq!(
                Spec::parse(&format!("f32[64,32] @ {other}"), &mesh).unwrap(),
                spec
            );
        }
        let odd = Spec::parse("f32[64] @ R,_S(0,3)", &mesh).unwrap();
        assert_eq!(partition_spec(&odd.placements, &mesh, 1), None);
        for bad in [
            "f32",
            "f32[",
            "f32[x]",
            "q7[1]",
            "f32[2] @ PartitionSpec('dp','tp')",
        ] {
            assert!(Spec::parse(bad, &mesh).is_err(), "{bad}");
        }
        assert!(Mesh::parse("dp=0").is_err() && Mesh::parse("a=2,a=2").is_err());
    }
}

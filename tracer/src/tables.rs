//! Builds the tables of a plan: interned text and pools without repetition.

use hashbrown::HashMap;
use rote_plans::{Group, Mesh, NONE, Placement, Plan, Range, ReduceOp, Spec, StrId};

use crate::event::SpecEvent;

/// A plan under construction, with the indices that keep its pools small.
#[derive(Debug, Default)]
pub struct Tables {
    /// The plan so far.
    pub plan: Plan,
    strings: HashMap<String, StrId>,
    dims: HashMap<Vec<i64>, Range>,
    meshes: HashMap<Mesh, u32>,
    specs: HashMap<SpecEvent, u32>,
    groups: HashMap<String, u32>,
}

impl Tables {
    /// The id of a text.
    pub fn str(&mut self, text: &str) -> StrId {
        if let Some(&id) = self.strings.get(text) {
            return id;
        }
        let id = self.plan.strings.len() as StrId;
        self.plan.strings.push(text.to_owned());
        self.strings.insert(text.to_owned(), id);
        id
    }

    /// A list of integers.
    pub fn dims(&mut self, dims: &[i64]) -> Range {
        if let Some(&range) = self.dims.get(dims) {
            return range;
        }
        let range = Range {
            start: self.plan.dims.len() as u32,
            len: dims.len() as u32,
        };
        self.plan.dims.extend_from_slice(dims);
        self.dims.insert(dims.to_vec(), range);
        range
    }

    /// A list of ids.
    pub fn ids(&mut self, ids: &[u32]) -> Range {
        let range = Range {
            start: self.plan.ids.len() as u32,
            len: ids.len() as u32,
        };
        self.plan.ids.extend_from_slice(ids);
        range
    }

    /// The index of a spec.
    pub fn spec(&mut self, spec: &SpecEvent) -> u32 {
        if let Some(&index) = self.specs.get(spec) {
            return index;
        }
        let names: Vec<StrId> = spec
            .mesh_dim_names
            .iter()
            .map(|name| self.str(name))
            .collect();
        let mesh = Mesh {
            device_type: self.str(&spec.device_type),
            shape: self.dims(&spec.mesh_shape),
            dim_names: self.ids(&names),
            ranks: self.dims(&spec.ranks),
        };
        // Names live in the id pool, which does not share runs: compare by content.
        let known = self.meshes.iter().find(|(other, _)| {
            other.device_type == mesh.device_type
                && other.shape == mesh.shape
                && other.ranks == mesh.ranks
                && self.plan.ids(other.dim_names) == names
        });
        let mesh = match known {
            Some((_, &index)) => index,
            None => {
                let index = self.plan.meshes.len() as u32;
                self.plan.meshes.push(mesh);
                self.meshes.insert(mesh, index);
                index
            }
        };
        let placements: Vec<Placement> = spec
            .placements
            .iter()
            .map(|text| self.placement(text))
            .collect();
        let start = self.plan.placements.len() as u32;
        self.plan.placements.extend_from_slice(&placements);
        let entry = Spec {
            mesh,
            placements: Range {
                start,
                len: placements.len() as u32,
            },
            shape: self.dims(&spec.shape),
            strides: self.dims(&spec.strides),
        };
        let index = self.plan.specs.len() as u32;
        self.plan.specs.push(entry);
        self.specs.insert(spec.clone(), index);
        index
    }

    /// The index of an optional spec.
    pub fn optional_spec(&mut self, spec: Option<&SpecEvent>) -> u32 {
        spec.map_or(NONE, |spec| self.spec(spec))
    }

    /// The index of a process group, named by the framework. Its ranks are
    /// filled in by [`Tables::describe_group`].
    pub fn group(&mut self, name: &str) -> u32 {
        if let Some(&index) = self.groups.get(name) {
            return index;
        }
        let id = self.str(name);
        let index = self.plan.groups.len() as u32;
        let ranks = self.dims(&[]);
        self.plan.groups.push(Group {
            name: id,
            ranks,
            label: id,
        });
        self.groups.insert(name.to_owned(), index);
        index
    }

    /// Says which ranks a group has and what people call it.
    pub fn describe_group(&mut self, name: &str, ranks: &[i64], label: &str) {
        let index = self.group(name) as usize;
        self.plan.groups[index].ranks = self.dims(ranks);
        self.plan.groups[index].label = self.str(label);
    }

    fn placement(&mut self, text: &str) -> Placement {
        parse_placement(text).unwrap_or_else(|| Placement::Other {
            text: self.str(text),
        })
    }
}

/// Reads DTensor's short form of a placement.
fn parse_placement(text: &str) -> Option<Placement> {
    if text == "R" {
        return Some(Placement::Replicate);
    }
    let (head, rest) = text.split_once('(')?;
    let inside = rest.strip_suffix(')')?;
    match head {
        "S" => Some(Placement::Shard {
            dim: inside.parse().ok()?,
        }),
        "_S" => {
            let (dim, split_factor) = inside.split_once(',')?;
            Some(Placement::StridedShard {
                dim: dim.trim().parse().ok()?,
                split_factor: split_factor.trim().parse().ok()?,
            })
        }
        "P" => parse_reduce(inside).map(|op| Placement::Partial { op }),
        _ => None,
    }
}

/// Reads the name of a reduction.
pub fn parse_reduce(text: &str) -> Option<ReduceOp> {
    let number = ReduceOp::TEXTS.iter().position(|name| *name == text)?;
    Some(ReduceOp::ALL[number])
}

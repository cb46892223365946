//! Device meshes and the process groups that collectives run on.

use rkyv::{Archive, Deserialize, Serialize};

use crate::pool::{Range, StrId};

/// A device mesh: an n-dimensional array of global ranks with named dims.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[rkyv(derive(Clone, Copy, Debug))]
pub struct Mesh {
    /// The device type of its ranks, for example `cpu` or `cuda`.
    pub device_type: StrId,
    /// Ranks per mesh dim, a range of [`crate::Plan::dims`].
    pub shape: Range,
    /// The name of each mesh dim, a range of [`crate::Plan::ids`] that holds
    /// [`StrId`]s; empty when the mesh has no names.
    pub dim_names: Range,
    /// Global ranks in row-major order, a range of [`crate::Plan::dims`].
    pub ranks: Range,
}

/// A process group, as the framework names it.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[rkyv(derive(Clone, Copy, Debug))]
pub struct Group {
    /// The name under which the framework registered the group.
    pub name: StrId,
    /// Global ranks in group order, a range of [`crate::Plan::dims`].
    pub ranks: Range,
    /// What a person calls it: mesh dim name (`tp`), or the ranks.
    pub label: StrId,
}

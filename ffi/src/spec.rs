//! Specs as text, in the form that `rote_record_spec` documents.

use rote::plans::describe::{self, Specs};
use rote::plans::pool::ArchivedRange;
use rote::plans::{ArchivedPlan, NONE};
use rote::tracer::SpecEvent;

/// Reads a spec.
pub(crate) fn parse(text: &str) -> Result<SpecEvent, String> {
    let list = |text: &str, by: char| -> Vec<String> {
        text.split(by)
            .filter(|part| !part.is_empty())
            .map(str::to_owned)
            .collect()
    };
    let dims = |text: &str| -> Option<Vec<i64>> {
        list(text, ',')
            .iter()
            .map(|part| part.parse().ok())
            .collect()
    };
    let mut parts = text.split('|');
    let mut read = || {
        let spec = SpecEvent {
            device_type: parts.next()?.to_owned(),
            mesh_shape: dims(parts.next()?)?,
            mesh_dim_names: list(parts.next()?, ','),
            ranks: dims(parts.next()?)?,
            placements: list(parts.next()?, ';'),
            shape: dims(parts.next()?)?,
            strides: dims(parts.next()?)?,
        };
        parts.next().is_none().then_some(spec)
    };
    read().ok_or_else(|| format!("{text:?} is not a spec"))
}

/// Reads a spec; none from the empty text.
pub(crate) fn optional(text: &str) -> Result<Option<SpecEvent>, String> {
    match text {
        "" => Ok(None),
        text => parse(text).map(Some),
    }
}

/// Writes a spec of a plan; `None` for a plain tensor.
pub(crate) fn write(plan: &ArchivedPlan, index: u32) -> Option<String> {
    if index == NONE {
        return None;
    }
    let spec = &plan.specs[index as usize];
    let mesh = &plan.meshes[spec.mesh.to_native() as usize];
    let join = |range: ArchivedRange| {
        let dims = &plan.dims[range.indices()];
        dims.iter()
            .map(|dim| dim.to_native().to_string())
            .collect::<Vec<_>>()
            .join(",")
    };
    let names: Vec<&str> = plan.ids[mesh.dim_names.indices()]
        .iter()
        .map(|id| plan.str(id.to_native()))
        .collect();
    let placements = plan.placements(index);
    let placements: Vec<String> = placements
        .map(|placement| describe::placement(plan, placement).to_string())
        .collect();
    Some(format!(
        "{}|{}|{}|{}|{}|{}|{}",
        plan.str(mesh.device_type.to_native()),
        join(mesh.shape),
        names.join(","),
        join(mesh.ranks),
        placements.join(";"),
        join(spec.shape),
        join(spec.strides)
    ))
}

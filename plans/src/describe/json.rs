//! A plan as JSON, for programs.

use serde_json::{Value as Json, json as object};

use super::figures::{collectives, instructions, memory};
use super::notation::{binding_kind, guard_kind, instr, placements, scalar, spec, tensor};
use crate::describe::{CollectiveTotal, Instructions, Memory};
use crate::plan::ArchivedPlan;
use crate::pool::{ArchivedRange, NONE};
use crate::value::Marks;

/// Everything that `rote show` can tell of a plan.
pub fn json(plan: &ArchivedPlan) -> Json {
    let at = &plan.fingerprint;
    let Instructions {
        local,
        views,
        collectives: issued,
        waits,
        rng,
        frees,
    } = instructions(plan);
    let Memory {
        arguments,
        state,
        gradients,
        constants,
        peak,
        peak_at,
    } = memory(plan);
    let result = serde_json::from_str(&plan.result).unwrap_or(Json::Null);
    object!({
        "function": plan.function.as_str(),
        "fingerprint": {
            "rote": at.rote.as_str(),
            "framework": at.framework.as_str(),
            "world_size": at.world_size.to_native(),
            "rank": at.rank.to_native(),
        },
        "meshes": all(&plan.meshes, |mesh| object!({
            "device_type": plan.str(mesh.device_type.to_native()),
            "shape": ints(plan, mesh.shape),
            "dim_names": ids(plan, mesh.dim_names, |id| plan.str(id).into()),
            "ranks": ints(plan, mesh.ranks),
        })),
        "groups": all(&plan.groups, |group| object!({
            "name": plan.str(group.name.to_native()),
            "label": plan.str(group.label.to_native()),
            "ranks": ints(plan, group.ranks),
        })),
        "result": result,
        "bindings": all(&plan.bindings, |binding| object!({
            "kind": binding_kind(binding.kind),
            "path": plan.str(binding.path.to_native()),
            "tensor": tensor_of(plan, binding.value.to_native()),
            "spec": spec_of(plan, binding.spec.to_native()),
            "written": binding.written,
            "counted": [binding.counted[0].to_native(), binding.counted[1].to_native()],
            "anchor": binding.anchor.as_ref().map_or(Json::Null, |anchor| object!({
                "start": anchor.start.to_native(),
                "bytes": anchor.bytes.to_native(),
            })),
        })),
        "outputs": all(&plan.outputs, |output| object!({
            "path": plan.str(output.path.to_native()),
            "tensor": tensor_of(plan, output.value.to_native()),
            "spec": spec_of(plan, output.spec.to_native()),
            "requires_grad": output.requires_grad,
        })),
        "grads": all(&plan.grads, |grad| object!({
            "path": plan.str(grad.path.to_native()),
            "tensor": tensor_of(plan, grad.value.to_native()),
            "spec": spec_of(plan, grad.spec.to_native()),
        })),
        "scalars": all(&plan.scalars, |entry| scalar(plan, *entry).to_string().into()),
        "instructions": {
            "local": local,
            "views": views,
            "collectives": issued,
            "waits": waits,
            "rng": rng,
            "frees": frees,
        },
        "collectives": all(&collectives(plan), |total| {
            let CollectiveTotal { group, kind, reduce, count, bytes } = total;
            object!({
                "group": group,
                "kind": kind,
                "reduce": reduce,
                "count": count,
                "bytes": bytes,
            })
        }),
        "memory": {
            "arguments": arguments,
            "state": state,
            "gradients": gradients,
            "constants": constants,
            "peak": peak,
            "peak_at": peak_at,
        },
        "guards": all(&plan.guards, |guard| object!({
            "kind": guard_kind(guard.kind),
            "subject": plan.str(guard.subject.to_native()),
            "expected": plan.str(guard.expected.to_native()),
        })),
        "ops": (0..plan.instrs.len() as u32)
            .map(|index| instr(plan, index).to_string().into())
            .collect::<Vec<Json>>(),
        "strategies": all(&plan.strategies, |strategy| object!({
            "op": plan.str(strategy.op.to_native()),
            "source": plan.str(strategy.source.to_native()),
            "args": ids(plan, strategy.args, |id| plan.str(id).into()),
            "inputs": ids(plan, strategy.inputs, |id| spec_of(plan, id)),
            "outputs": ids(plan, strategy.outputs, |id| spec_of(plan, id)),
            "instrs": span(strategy.instrs),
            "redistributions": all(
                &plan.redistributions[strategy.redistributions.indices()],
                |redistribution| object!({
                    "from": spec_of(plan, redistribution.from.to_native()),
                    "to": spec_of(plan, redistribution.to.to_native()),
                    "source": plan.str(redistribution.source.to_native()),
                    "bytes": redistribution.bytes.to_native(),
                    "instrs": span(redistribution.instrs),
                }),
            ),
        })),
    })
}

fn all<T>(entries: &[T], entry: impl FnMut(&T) -> Json) -> Json {
    entries.iter().map(entry).collect()
}

fn ids(plan: &ArchivedPlan, range: ArchivedRange, entry: impl Fn(u32) -> Json) -> Json {
    plan.ids[range.indices()]
        .iter()
        .map(|id| entry(id.to_native()))
        .collect()
}

fn ints(plan: &ArchivedPlan, range: ArchivedRange) -> Json {
    plan.dims[range.indices()]
        .iter()
        .map(|dim| dim.to_native())
        .collect()
}

/// First instruction and the one after the last.
fn span(range: ArchivedRange) -> Json {
    let indices = range.indices();
    object!([indices.start, indices.end])
}

/// A local tensor, `null` for none.
fn tensor_of(plan: &ArchivedPlan, id: u32) -> Json {
    if id == NONE {
        return Json::Null;
    }
    let value = &plan.values[id as usize];
    object!({
        "value": id,
        "type": tensor(plan, id).to_string(),
        "root": value.root.to_native(),
        "shape": ints(plan, value.shape),
        "strides": ints(plan, value.strides),
        "marks": Marks(value.marks.0).to_string(),
    })
}

/// The spec of a distributed tensor, `null` for a plain one.
fn spec_of(plan: &ArchivedPlan, id: u32) -> Json {
    if id == NONE {
        return Json::Null;
    }
    let entry = &plan.specs[id as usize];
    object!({
        "text": spec(plan, id).to_string(),
        "placements": placements(plan, id).to_string(),
        "mesh": entry.mesh.to_native(),
        "shape": ints(plan, entry.shape),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::file::PlanFile;
    use crate::sample;

    #[test]
    fn the_json_of_the_sample() {
        let file = PlanFile::from_plan(&sample::small()).expect("valid");
        let json = json(file.plan());
        assert_eq!(json["fingerprint"]["world_size"], 2);
        assert_eq!(json["bindings"][1]["spec"]["placements"], "S(1)");
        assert_eq!(json["bindings"][0]["spec"], Json::Null);
        assert_eq!(json["bindings"][0]["tensor"]["shape"], object!([4, 8]));
        assert_eq!(json["collectives"][0]["bytes"], 128);
        assert_eq!(json["memory"]["peak"], 256);
        assert_eq!(json["ops"][2], "%2 f32[8,8]{1,8} = view %1");
        assert_eq!(json["strategies"][0]["args"][1], "f32[8,16] @ S(1)");
        assert_eq!(json["strategies"][0]["instrs"], object!([3, 6]));
        assert_eq!(
            json["strategies"][0]["redistributions"][0]["to"]["text"],
            "R of [4,8]"
        );
        assert_eq!(json["result"]["dict"][0][1], object!({"t": 0}));
        assert_eq!(json["scalars"][2], "$0 * $1");
        assert_eq!(json["grads"][1]["tensor"], Json::Null);
    }
}

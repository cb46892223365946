//! Which instructions must keep their order.
//!
//! Two instructions depend on each other if they touch one storage and one of them
//! writes it (a collective writes its result and reads its input until the wait for it,
//! which counts as a write of the result and a read of the input), if one reads a value
//! that the other makes, if both draw random numbers or move a generator, or if both
//! communicate: collectives, and ops outside of ATen, which may.

use hashbrown::HashMap;
use rote_plans::{Def, Instr, Plan, ValueId};

use crate::effects::{for_each_written, root};
use crate::liveness::{for_each_out, for_each_value};

/// For each instruction, those that it waits for, and those that wait for it.
pub(super) struct Graph {
    pub(super) before: Vec<Vec<usize>>,
    pub(super) after: Vec<Vec<usize>>,
    /// The collective that each wait is for.
    pub(super) waits: HashMap<usize, usize>,
}

/// Who touched a storage, or any other thing that has an order.
#[derive(Clone, Default)]
struct Touched {
    written: Option<usize>,
    read: Vec<usize>,
}

impl Touched {
    fn read(&mut self, i: usize, before: &mut Vec<usize>) {
        before.extend(self.written);
        self.read.push(i);
    }

    fn write(&mut self, i: usize, before: &mut Vec<usize>) {
        before.extend(self.written.replace(i));
        before.append(&mut self.read);
    }
}

impl Graph {
    pub(super) fn of(plan: &Plan) -> Self {
        let mut storages = vec![Touched::default(); plan.values.len()];
        let (mut wire, mut generators) = (Touched::default(), Touched::default());
        let mut started: HashMap<ValueId, usize> = HashMap::new();
        let mut graph = Graph {
            before: Vec::with_capacity(plan.instrs.len()),
            after: vec![Vec::new(); plan.instrs.len()],
            waits: HashMap::new(),
        };
        for (i, instr) in plan.instrs.iter().enumerate() {
            let mut before = Vec::new();
            for_each_value(plan, instr, |value| {
                if let Def::Instr(made) = plan.values[value as usize].def {
                    before.push(made as usize);
                }
            });
            // A view says where to look, and looks at nothing.
            if !matches!(instr, Instr::View { .. }) {
                for_each_value(plan, instr, |value| {
                    storages[root(plan, value) as usize].read(i, &mut before);
                });
                for_each_out(plan, instr, |value| {
                    storages[root(plan, value) as usize].write(i, &mut before);
                });
                for_each_written(plan, instr, |root| {
                    storages[root as usize].write(i, &mut before);
                });
            }
            match instr {
                Instr::Collective(c) => {
                    wire.write(i, &mut before);
                    started.insert(root(plan, c.output), i);
                }
                Instr::Wait { value } => {
                    let result = root(plan, *value);
                    storages[result as usize].write(i, &mut before);
                    if let Some(at) = started.remove(&result) {
                        if let Instr::Collective(c) = plan.instrs[at] {
                            storages[root(plan, c.input) as usize].read(i, &mut before);
                        }
                        graph.waits.insert(i, at);
                    }
                }
                Instr::Local { op, seeded, .. } => {
                    let name = plan.str(*op);
                    let foreign = !name.starts_with("aten::") && !name.starts_with("prims::");
                    if foreign {
                        wire.write(i, &mut before);
                    }
                    if foreign || *seeded {
                        generators.write(i, &mut before);
                    }
                }
                Instr::Rng { .. } => generators.write(i, &mut before),
                Instr::View { .. } | Instr::Free { .. } => {}
            }
            before.sort_unstable();
            before.dedup();
            before.retain(|earlier| *earlier < i);
            for earlier in &before {
                graph.after[*earlier].push(i);
            }
            graph.before.push(before);
        }
        graph
    }
}

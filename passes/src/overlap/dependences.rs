//! Which instructions must keep their order.
//!
//! Two instructions depend on each other if they touch one storage and one of them
//! writes it (a collective writes its result and reads its input until the wait for it,
//! which counts as a write of the result and a read of the input), if one reads a value
//! that the other makes, if both draw random numbers or move a generator, or if both
//! communicate: collectives, and ops outside of ATen, which may.
//!
//! A run that raises must leave what the recorded order leaves. So local ops that may raise keep
//! their order with what writes a binding and with what makes, writes or drops a gradient, no
//! binding is written before a wait that was recorded before it, and nothing is sent before ops
//! that may raise and behind which the recorded order has changed nothing yet, since the call can
//! be made again there.

use hashbrown::HashMap;
use rote_plans::{Def, Instr, NONE, Plan, ValueId};

use crate::effects::{for_each_written, root};
use crate::liveness::{for_each_out, for_each_value, writes_binding};
use crate::ops::may_raise;

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

/// What a run that raises may have changed.
#[derive(Default)]
struct Lasting {
    /// Written by what writes bindings and by local ops that may raise, and read by what
    /// makes, writes or drops a gradient.
    line: Touched,
    /// For each instruction, whether a gradient is dropped by then.
    drops: Vec<bool>,
    /// For each root, whether a gradient lies there.
    gradients: Vec<bool>,
    /// Waits since the last write of a binding.
    waits: Vec<usize>,
    /// Local ops that may raise before anything that lasts, until something is sent.
    first: Vec<usize>,
    begun: bool,
}

impl Lasting {
    fn of(plan: &Plan) -> Self {
        let mut lasting = Lasting {
            drops: vec![false; plan.instrs.len()],
            gradients: vec![false; plan.values.len()],
            ..Lasting::default()
        };
        for grad in &plan.grads {
            if let Some(drops) = lasting.drops.get_mut(grad.gone as usize) {
                *drops = true;
            }
            if grad.value != NONE {
                lasting.gradients[root(plan, grad.value) as usize] = true;
            }
        }
        lasting
    }

    /// Whether an instruction makes or writes a gradient, or a collective that does ends there.
    fn writes_gradient(&self, plan: &Plan, instr: &Instr) -> bool {
        let mut found = false;
        let mut look = |value: ValueId| found |= self.gradients[root(plan, value) as usize];
        for_each_out(plan, instr, &mut look);
        for_each_written(plan, instr, &mut look);
        if let Instr::Wait { value } = instr {
            look(*value);
        }
        found
    }

    /// An instruction that other ranks or libraries may see.
    fn tell(&mut self, before: &mut Vec<usize>) {
        before.append(&mut self.first);
        self.begun = true;
    }

    fn meet(&mut self, plan: &Plan, i: usize, instr: &Instr, before: &mut Vec<usize>) {
        let writes = writes_binding(plan, instr);
        let raises = matches!(instr, Instr::Local { .. }) && may_raise(plan, instr);
        if writes || raises {
            self.line.write(i, before);
        } else if self.drops[i] || self.writes_gradient(plan, instr) {
            self.line.read(i, before);
        }
        if writes {
            before.append(&mut self.waits);
            self.begun = true;
        } else if raises && !self.begun {
            self.first.push(i);
        }
        if matches!(instr, Instr::Wait { .. }) {
            self.waits.push(i);
        }
    }
}

impl Graph {
    pub(super) fn of(plan: &Plan) -> Self {
        let mut storages = vec![Touched::default(); plan.values.len()];
        let (mut wire, mut generators) = (Touched::default(), Touched::default());
        let mut lasting = Lasting::of(plan);
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
                    lasting.tell(&mut before);
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
                        lasting.tell(&mut before);
                    }
                    if foreign || *seeded {
                        generators.write(i, &mut before);
                    }
                }
                Instr::Rng { .. } => generators.write(i, &mut before),
                Instr::View { .. } | Instr::Free { .. } => {}
            }
            lasting.meet(plan, i, instr, &mut before);
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

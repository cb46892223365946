//! Collectives start as soon as their input is there, and compute that does not need
//! their results runs before they are waited for.
//!
//! A list scheduler: an instruction can run once everything that it depends on has
//! run. Two instructions depend on each other if they touch one storage and one of
//! them writes it (a collective writes its result and reads its input until the wait
//! for it, which counts as a write of the result and a read of the input), if one
//! reads a value that the other makes, if both draw random numbers or move a
//! generator, or if both communicate: collectives, and ops outside of ATen, which may.
//! Dependent instructions keep their order, so every instruction sees the bytes that
//! it saw before, and every rank issues the same collectives in the same order as
//! in eager, with this pass or without. (An order of its own would let a later start
//! pass one whose input is not there yet. But a rank's program is a chain of layers:
//! what is ready early is what comes next, which the compute that runs ahead
//! starts early too; so the agreement of ranks that it would take is not asked for.)
//!
//! What runs next is, in this order: the next collective; the next instruction as
//! recorded, waits apart; if that needs a result that is under way, the first
//! one behind it that does not, for as long as the collective is thought to take;
//! the wait.
//!
//! Memory grows by what lives longer, and no more than this beyond the recorded
//! order: results that are made ahead of their turn, [`AHEAD_BYTES`], and inputs of
//! collectives whose wait is late, [`HELD_BYTES`].

use hashbrown::HashMap;
use rote_plans::schedule::Ops;
use rote_plans::{Def, Instr, Plan, ValueId};

use super::effects::{self, for_each_written, outs, root};
use super::{Done, Pass, Program, Stage};
use crate::liveness::{for_each_out, for_each_value};

pub(super) const PASS: Pass = Pass {
    name: "overlap",
    about: "run independent compute while collectives are under way (more memory)",
    by_default: false,
    alters_collectives: false,
    keeps_bits: true,
    needs: &[],
    stage: Stage::Instructions,
    apply,
};

/// The most bytes of results that are made before their turn.
const AHEAD_BYTES: u64 = 64 << 20;
/// The most bytes that are sent and kept because their wait is late.
const HELD_BYTES: u64 = 64 << 20;
/// How many instructions behind the next one are looked at.
const WINDOW: usize = 1024;

/// What a collective and an op are thought to take, in bytes that a kernel could move
/// meanwhile: latencies of some 20 and 3 us, and a link ten times slower than memory.
/// Only how much compute runs ahead of its turn depends on it.
const COLLECTIVE: u64 = 256 << 10;
const OP: u64 = 32 << 10;
const LINK: u64 = 10;

fn apply(program: &mut Program, _ops: &dyn Ops) -> Done {
    let plan = &mut program.plan;
    let recorded: Vec<usize> = (0..plan.instrs.len()).collect();
    let order = Scheduler::new(plan).run();
    let (before, after) = (hidden(plan, &recorded), hidden(plan, &order));
    effects::reorder(plan, &order);
    Done {
        changed: usize::from(order != recorded) * after.abs_diff(before).max(1),
        what: format!("{after} ops run while a collective is under way, {before} as recorded"),
    }
}

/// How many local ops run between the start of a collective and the wait for it.
fn hidden(plan: &Plan, order: &[usize]) -> usize {
    let (mut flying, mut ops) = (Vec::new(), 0);
    for at in order {
        match plan.instrs[*at] {
            Instr::Collective(c) => flying.push(root(plan, c.output)),
            Instr::Wait { value } => flying.retain(|result| *result != root(plan, value)),
            Instr::Local { .. } => ops += usize::from(!flying.is_empty()),
            _ => {}
        }
    }
    ops
}

// -- dependences --------------------------------------------------------------------

/// For each instruction, those that it waits for, and those that wait for it.
struct Graph {
    before: Vec<Vec<usize>>,
    after: Vec<Vec<usize>>,
    /// The collective that each wait is for.
    waits: HashMap<usize, usize>,
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
    fn of(plan: &Plan) -> Self {
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

// -- the order -------------------------------------------------------------------------

struct Scheduler<'a> {
    plan: &'a Plan,
    graph: Graph,
    /// How many of those that it waits for have not run.
    left: Vec<usize>,
    done: Vec<bool>,
    order: Vec<usize>,
    /// The first instruction that has not run, waits apart.
    front: usize,
    /// The next collectives, last first.
    collectives: Vec<usize>,
    /// Bytes of results behind the front.
    ahead: u64,
    /// Bytes sent by collectives whose wait lies before the front.
    held: u64,
    late: Vec<usize>,
    /// What has run so far takes, and had taken when each collective started.
    work: u64,
    started: HashMap<usize, u64>,
}

impl<'a> Scheduler<'a> {
    fn new(plan: &'a Plan) -> Self {
        let graph = Graph::of(plan);
        let is_collective = |i: &usize| matches!(plan.instrs[*i], Instr::Collective(_));
        Scheduler {
            plan,
            left: graph.before.iter().map(Vec::len).collect(),
            graph,
            done: vec![false; plan.instrs.len()],
            order: Vec::with_capacity(plan.instrs.len()),
            front: 0,
            collectives: (0..plan.instrs.len()).rev().filter(is_collective).collect(),
            ahead: 0,
            held: 0,
            late: Vec::new(),
            work: 0,
            started: HashMap::new(),
        }
    }

    fn run(mut self) -> Vec<usize> {
        loop {
            self.advance();
            let next = self.next();
            let Some(next) = next else {
                return self.order;
            };
            self.take(next);
        }
    }

    /// Moves the front behind what has run.
    fn advance(&mut self) {
        while self.front < self.done.len() {
            let at = self.front;
            if self.done[at] {
                // Its turn has come: no longer ahead. What ran in its turn left the
                // front where it was, and counted nothing.
                self.ahead -= self.made(at).min(self.ahead);
            } else if self.is_wait(at) {
                self.held = self.held.saturating_add(self.sent(at));
                self.late.push(at);
            } else {
                return;
            }
            self.front += 1;
        }
    }

    fn next(&self) -> Option<usize> {
        if self.held > HELD_BYTES {
            return self.late.first().map(|wait| self.first_of(*wait));
        }
        let collective = self.collectives.last().filter(|at| self.left[**at] == 0);
        if let Some(at) = collective.filter(|at| self.fits(**at)) {
            return Some(*at);
        }
        if self.front == self.done.len() {
            return self.late.first().map(|wait| self.first_of(*wait));
        }
        if self.left[self.front] == 0 {
            return Some(self.front);
        }
        let wait = self.first_of(self.front);
        self.meanwhile(wait).or(Some(wait))
    }

    /// The first wait that an instruction needs: everything else before it has run.
    fn first_of(&self, mut at: usize) -> usize {
        while let Some(before) = self.graph.before[at].iter().find(|i| !self.done[**i]) {
            at = *before;
        }
        at
    }

    /// What can run before a wait ends.
    fn meanwhile(&self, wait: usize) -> Option<usize> {
        let collective = self.graph.waits.get(&wait)?;
        let since = self.work - self.started.get(collective).copied().unwrap_or(self.work);
        if since >= self.takes(*collective) {
            return None;
        }
        let end = self.done.len().min(self.front + WINDOW);
        (self.front + 1..end).find(|at| {
            let instr = &self.plan.instrs[*at];
            let other = matches!(instr, Instr::Collective(_) | Instr::Wait { .. });
            !self.done[*at] && !other && self.left[*at] == 0 && self.fits(*at)
        })
    }

    /// Whether an instruction may run now, in its turn or ahead of it.
    fn fits(&self, at: usize) -> bool {
        at == self.front || self.ahead + self.made(at) <= AHEAD_BYTES
    }

    fn take(&mut self, at: usize) {
        self.done[at] = true;
        self.order.push(at);
        for after in std::mem::take(&mut self.graph.after[at]) {
            self.left[after] -= 1;
        }
        // The front moves over it and gives it back.
        self.ahead += self.made(at);
        match &self.plan.instrs[at] {
            Instr::Collective(_) => {
                self.collectives.pop();
                self.started.insert(at, self.work);
            }
            Instr::Wait { .. } => {
                if let Some(late) = self.late.iter().position(|wait| *wait == at) {
                    self.late.remove(late);
                    self.held = self.held.saturating_sub(self.sent(at));
                }
            }
            Instr::Local { .. } => self.work = self.work.saturating_add(self.takes(at)),
            _ => {}
        }
    }

    // -- sizes ------------------------------------------------------------------------

    fn is_wait(&self, at: usize) -> bool {
        matches!(self.plan.instrs[at], Instr::Wait { .. })
    }

    /// Bytes of what an instruction makes.
    fn made(&self, at: usize) -> u64 {
        let made = outs(self.plan, &self.plan.instrs[at]).into_iter();
        let own = made.filter(|v| self.plan.values[*v as usize].def == Def::Instr(at as u32));
        own.map(|v| self.plan.values[v as usize].storage_bytes)
            .sum()
    }

    /// Bytes that the collective of a wait keeps.
    fn sent(&self, wait: usize) -> u64 {
        match self.graph.waits.get(&wait).map(|at| &self.plan.instrs[*at]) {
            Some(Instr::Collective(c)) => self.bytes(c.input),
            _ => 0,
        }
    }

    fn bytes(&self, value: ValueId) -> u64 {
        let value = &self.plan.values[value as usize];
        let numel: i64 = self.plan.dims(value.shape).iter().product();
        numel.unsigned_abs() * value.dtype.bytes().unwrap_or(1)
    }

    /// What an instruction is thought to take.
    fn takes(&self, at: usize) -> u64 {
        let instr = &self.plan.instrs[at];
        // A list may name a value any number of times.
        let mut bytes = 0_u64;
        let mut add = |value: ValueId| bytes = bytes.saturating_add(self.bytes(value));
        for_each_value(self.plan, instr, &mut add);
        for_each_out(self.plan, instr, &mut add);
        match instr {
            Instr::Collective(_) => COLLECTIVE.saturating_add(bytes.saturating_mul(LINK)),
            Instr::Local { .. } => OP.saturating_add(bytes),
            _ => 0,
        }
    }
}

//! Collectives start as soon as their input is there, and compute that does not need
//! their results runs before they are waited for.
//!
//! A list scheduler: an instruction can run once everything that it depends on has
//! run ([`dependences`]). Dependent instructions keep their order, so every instruction
//! sees the bytes that it saw before, and every rank issues the same collectives in the
//! same order as in eager, with this pass or without. (An order of its own would let a
//! later start pass one whose input is not there yet. But a rank's program is a chain of
//! layers: what is ready early is what comes next, which the compute that runs ahead
//! starts early too; so the agreement of ranks that it would take is not asked for.)
//!
//! What runs next is, in this order: the next collective; what makes its input, where the
//! link is thought to be free soon and none of it waits for a result that is under way; the
//! next instruction as recorded, waits apart; if that needs a result that is under way, the
//! first one behind it that does not, for as long as the collective is thought to take; the
//! wait.
//!
//! Results that are made ahead of their turn, inputs of collectives whose wait is late, and
//! what process groups allocate meanwhile take only what the recorded order leaves below its
//! peak, at each instruction until their turn ([`room`]). An arena is as large as its fullest
//! moment, though, and what is allocated beside it has its fullest moment elsewhere: with
//! both, a replay may need more than the recorded step.

mod dependences;
mod room;

use hashbrown::{HashMap, HashSet};
use rote_plans::schedule::Ops;
use rote_plans::{CollectiveKind, Def, Instr, Plan, ValueId};

use self::dependences::Graph;
use self::room::Room;
use super::effects::{self, outs, root};
use super::live::{bytes, of_groups};
use super::{Done, Pass, Program, Stage, gathers, most};
use crate::liveness::{for_each_out, for_each_value};

pub(super) const PASS: Pass = Pass {
    name: "overlap",
    about: "run independent compute while collectives are under way",
    by_default: false,
    alters_collectives: false,
    keeps_bits: true,
    needs: &[],
    stage: Stage::Instructions,
    apply,
};

/// How many instructions behind the next one are looked at.
const WINDOW: usize = 1024;
/// How many instructions run in their turn before the next collective's input is
/// looked at again, where memory was short.
const PAUSE: usize = 32;

/// What a collective and an op are thought to take, in bytes that a kernel could move
/// meanwhile: latencies of some 20 and 3 us, and a link ten times slower than memory.
/// Only how much compute runs ahead of its turn depends on it.
const COLLECTIVE: u64 = 256 << 10;
const OP: u64 = 32 << 10;
const LINK: u64 = 10;

fn apply(program: &mut Program, ops: &dyn Ops) -> Done {
    if super::collectives(&program.plan).next().is_none() {
        return Done {
            changed: 0,
            what: "no collectives".to_owned(),
        };
    }
    let allowed = program.allowed().max(most(&program.plan, ops));
    let plan = &mut program.plan;
    let recorded: Vec<usize> = (0..plan.instrs.len()).collect();
    let order = Scheduler::new(plan, ops, allowed).run();
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

// -- the order -------------------------------------------------------------------------

struct Scheduler<'a> {
    plan: &'a Plan,
    graph: Graph,
    room: Room,
    /// Gathers whose output lies over what they send.
    in_place: HashSet<usize>,
    /// Bytes that the process group of each collective allocates for itself until the wait.
    of_groups: HashMap<usize, u64>,
    /// How many of those that it waits for have not run.
    left: Vec<usize>,
    done: Vec<bool>,
    order: Vec<usize>,
    /// The first instruction that has not run, waits apart.
    front: usize,
    /// The next collectives, last first.
    collectives: Vec<usize>,
    /// Waits before the front that have not run.
    late: Vec<usize>,
    /// What has run so far takes, and when each collective that has started is thought to end.
    work: u64,
    ends: HashMap<usize, u64>,
    /// When the link is thought to be free.
    free: u64,
    /// What makes the input of the next collective and has yet to run, last first.
    chain: Vec<usize>,
    /// Why that was not looked at: a wait that must run first, or memory, and the front then.
    paused: Option<(Option<usize>, usize)>,
}

impl<'a> Scheduler<'a> {
    fn new(plan: &'a Plan, ops: &dyn Ops, allowed: u64) -> Self {
        let graph = Graph::of(plan);
        let is_collective = |i: &usize| matches!(plan.instrs[*i], Instr::Collective(_));
        Scheduler {
            plan,
            left: graph.before.iter().map(Vec::len).collect(),
            graph,
            room: Room::of(plan, ops, allowed),
            of_groups: of_groups(plan, ops)
                .map(|((at, _), bytes)| (at as usize, bytes))
                .collect(),
            in_place: match ops.gathers_in_place() {
                true => gathers::in_place(plan)
                    .into_iter()
                    .map(|(at, ..)| at)
                    .collect(),
                false => HashSet::new(),
            },
            done: vec![false; plan.instrs.len()],
            order: Vec::with_capacity(plan.instrs.len()),
            front: 0,
            collectives: (0..plan.instrs.len()).rev().filter(is_collective).collect(),
            late: Vec::new(),
            work: 0,
            ends: HashMap::new(),
            free: 0,
            chain: Vec::new(),
            paused: None,
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
            if !self.done[at] {
                if !self.is_wait(at) {
                    return;
                }
                self.room.take(at + 1, usize::MAX, self.sent(at));
                self.late.push(at);
            }
            self.front += 1;
        }
    }

    fn next(&mut self) -> Option<usize> {
        if !self.room.has(self.front, self.front + 1, 0) {
            let keeps = |wait: &&usize| self.sent(**wait) > 0;
            if let Some(wait) = self.late.iter().find(keeps) {
                return Some(self.first_of(*wait));
            }
        }
        let collective = self.collectives.last().filter(|at| self.left[**at] == 0);
        if let Some(at) = collective.filter(|at| self.fits(**at)) {
            return Some(*at);
        }
        if let Some(at) = self.towards_collective() {
            return Some(at);
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

    /// What makes the input of the next collective, if the link is free by the time that
    /// the one before it takes.
    fn towards_collective(&mut self) -> Option<usize> {
        while let Some(at) = self.chain.pop() {
            if !self.done[at] {
                return Some(at);
            }
        }
        let next = *self.collectives.last()?;
        let paused = self.paused.is_some_and(|(wait, front)| match wait {
            Some(wait) => !self.done[wait],
            None => self.front < front + PAUSE,
        });
        if paused || self.free > self.work.saturating_add(self.takes(next)) {
            return None;
        }
        match self.chain_of(next) {
            Ok(chain) => {
                self.chain = chain;
                self.chain.pop()
            }
            Err(wait) => {
                self.paused = Some((wait, self.front));
                None
            }
        }
    }

    /// What an instruction needs that has not run, in the order recorded, last first; or the wait
    /// that is among it, or none where memory is short.
    fn chain_of(&self, at: usize) -> Result<Vec<usize>, Option<usize>> {
        let (mut found, mut left) = (HashSet::new(), vec![at]);
        while let Some(at) = left.pop() {
            for before in self.graph.before[at].iter().filter(|at| !self.done[**at]) {
                if self.is_wait(*before) {
                    return Err(Some(*before));
                }
                if found.insert(*before) {
                    left.push(*before);
                }
            }
        }
        let made = found.iter().map(|at| self.made(*at)).sum::<u64>() + self.made(at);
        if !self.room.has(self.front, at, made) {
            return Err(None);
        }
        let mut chain: Vec<usize> = found.into_iter().collect();
        chain.sort_unstable_by(|a, b| b.cmp(a));
        Ok(chain)
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
        if self
            .ends
            .get(collective)
            .is_none_or(|end| *end <= self.work)
        {
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
        at == self.front || self.room.has(self.front, at, self.made(at))
    }

    fn take(&mut self, at: usize) {
        self.done[at] = true;
        self.order.push(at);
        for after in std::mem::take(&mut self.graph.after[at]) {
            self.left[after] -= 1;
        }
        self.room.take(self.front, at, self.made(at));
        match &self.plan.instrs[at] {
            Instr::Collective(_) => {
                self.collectives.pop();
                self.paused = None;
                self.free = self.free.max(self.work).saturating_add(self.takes(at));
                self.ends.insert(at, self.free);
            }
            Instr::Wait { .. } => {
                let end = self.graph.waits.get(&at).and_then(|at| self.ends.get(at));
                self.work = self.work.max(end.copied().unwrap_or(0));
                if let Some(late) = self.late.iter().position(|wait| *wait == at) {
                    self.late.remove(late);
                    self.room.give_back(self.front, self.sent(at));
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

    /// Bytes of what an instruction makes, with what the process group of a collective needs.
    fn made(&self, at: usize) -> u64 {
        let made = outs(self.plan, &self.plan.instrs[at]).into_iter();
        let own = made.filter(|v| self.plan.values[*v as usize].def == Def::Instr(at as u32));
        let own = own.map(|v| self.plan.values[v as usize].storage_bytes);
        own.sum::<u64>() + self.of_groups.get(&at).copied().unwrap_or(0)
    }

    /// Bytes that the collective of a wait keeps: those of its process group, and what it sends
    /// where that is not copied to the result first and does not lie in it.
    fn sent(&self, wait: usize) -> u64 {
        let Some(start) = self.graph.waits.get(&wait) else {
            return 0;
        };
        let Instr::Collective(c) = &self.plan.instrs[*start] else {
            return 0;
        };
        let copied = matches!(
            c.kind,
            CollectiveKind::AllReduce | CollectiveKind::Broadcast
        );
        let of_group = self.of_groups.get(start).copied().unwrap_or(0);
        match copied || self.in_place.contains(start) {
            true => of_group,
            false => {
                let input = root(self.plan, c.input);
                of_group + self.plan.values[input as usize].storage_bytes
            }
        }
    }

    /// What an instruction is thought to take.
    fn takes(&self, at: usize) -> u64 {
        let instr = &self.plan.instrs[at];
        // A list may name a value any number of times.
        let mut total = 0_u64;
        let mut add = |value: ValueId| total = total.saturating_add(bytes(self.plan, value));
        for_each_value(self.plan, instr, &mut add);
        for_each_out(self.plan, instr, &mut add);
        match instr {
            Instr::Collective(_) => COLLECTIVE.saturating_add(total.saturating_mul(LINK)),
            Instr::Local { .. } => OP.saturating_add(total),
            _ => 0,
        }
    }
}

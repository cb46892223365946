//! Runs a plan on paper, to hold a program after passes against the plan as it
//! was recorded.
//!
//! Memory is bytes, and each byte holds a symbol: what wrote it, from what. Two
//! programs do the same if, run after run, they leave the same symbols in the
//! same places, write to the same tensors of the caller's (which raises their
//! version counters), look at no more of them, send the same symbols, and draw random
//! numbers at the same points. A conjugated or negated view sees other symbols than
//! lie there, and what is written through it lies there as others.
//! Ranks run the same program: where this rank sends a symbol, the others send what
//! is the same to them, so that a sum is told by the symbols that this rank adds to
//! it, element by element, whatever else is in the message.
//! Everything that may differ between runs (arguments, numbers read anew) has
//! symbols of its own in each run, and between runs the caller writes to what it
//! was returned.
//!
//! It knows nothing of the passes; of the schedule it does what binding a plan
//! does (`replay/src/bind.rs`).

mod ops;
mod seen;

use std::hash::{DefaultHasher, Hash, Hasher};

use rote_plans::{
    BindingKind, Collective, CollectiveKind, Def, Instr, Marks, NONE, Plan, RngAction, Schedule,
    Value, ValueId,
};

pub use seen::{Collectives, Seen};

/// What a byte holds. [`UNDEFINED`] is what nobody wrote.
type Symbol = u64;
const UNDEFINED: Symbol = 0;

/// Runs of a program: the first, and two that find what it left.
pub const RUNS: usize = 3;

fn symbol(parts: impl Hash) -> Symbol {
    let mut hasher = DefaultHasher::new();
    parts.hash(&mut hasher);
    hasher.finish().max(1)
}

/// What a tensor with these marks sees where `held` lies, and the other way round.
fn through(marks: Marks, held: Symbol) -> Symbol {
    let turned = |mark| marks.has(mark).then(|| symbol(("through", mark)));
    match held {
        UNDEFINED => UNDEFINED,
        _ => [Marks::CONJ, Marks::NEG]
            .into_iter()
            .filter_map(turned)
            .fold(held, |held, turn| held ^ turn),
    }
}

/// Where a tensor lies: a storage, and the byte of its first element.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Place {
    storage: usize,
    at: i64,
}

struct Flight {
    output: ValueId,
    sent: Vec<(Place, Symbol)>,
    into: Vec<Place>,
    result: Vec<Symbol>,
}

/// The world in which a program runs.
struct Paper<'a> {
    plan: &'a Plan,
    schedule: &'a Schedule,
    storages: Vec<Vec<Symbol>>,
    /// Which storages the program made itself.
    own: Vec<bool>,
    /// Which storages were written in this run.
    written: Vec<bool>,
    slots: Vec<Option<Place>>,
    arena: usize,
    flights: Vec<Flight>,
    generator: Symbol,
    saved: Vec<Symbol>,
    run: usize,
    seen: Seen,
}

/// Runs a program so many times.
///
/// # Errors
///
/// What no program may do: read what was dropped, write what is being sent or
/// received, write over what it reads.
pub fn run(plan: &Plan, schedule: &Schedule, runs: usize) -> Result<Seen, String> {
    let mut paper = Paper {
        plan,
        schedule,
        storages: vec![vec![UNDEFINED; schedule.arena_bytes as usize]],
        own: vec![true],
        written: vec![false],
        slots: vec![None; plan.values.len()],
        arena: 0,
        flights: Vec::new(),
        generator: symbol("generator"),
        saved: vec![UNDEFINED; plan.rng_slots as usize],
        run: 0,
        seen: Seen::default(),
    };
    for (id, value) in plan.values.iter().enumerate() {
        if let Some(offset) = schedule.offset(id as u32) {
            if offset + value.storage_bytes > schedule.arena_bytes {
                return Err(format!("%{id} lies outside the arena"));
            }
            paper.slots[id] = Some(Place {
                storage: paper.arena,
                at: offset as i64,
            });
        }
    }
    let mut kept: Vec<(String, Vec<Place>, Symbol)> = Vec::new();
    for run in 0..runs {
        paper.run = run;
        paper.written.fill(false);
        paper.bind();
        for at in 0..plan.instrs.len() {
            if run == 0 || !paper.settled(at) {
                paper.step(at)?;
                paper.seen.most = paper.seen.most.max(paper.held());
            }
        }
        while !paper.flights.is_empty() {
            paper.land(0)?;
        }
        paper.observe(&mut kept)?;
        for value in 0..plan.values.len() as u32 {
            if !paper.lasts(value) {
                paper.slots[value as usize] = None;
            }
        }
    }
    Ok(paper.seen)
}

impl Paper<'_> {
    // -- what binding does --------------------------------------------------

    fn is_view(&self, value: ValueId) -> bool {
        let def = self.plan.values[value as usize].def;
        matches!(def, Def::Instr(i) if matches!(self.plan.instrs[i as usize], Instr::View { .. }))
    }

    /// Whether a slot holds the same tensor in every run.
    fn lasts(&self, value: ValueId) -> bool {
        let made_once = |def: Def| matches!(def, Def::Instr(i) if self.schedule.once(i as usize));
        let own = self.plan.values[value as usize];
        let root = self.plan.values[own.root as usize];
        let state = matches!(root.def, Def::Binding(b)
            if self.plan.bindings[b as usize].kind == BindingKind::State);
        let root_lasts = self.schedule.offset(own.root).is_some() || state || made_once(root.def);
        root_lasts && (own.root == value || self.is_view(value)) || made_once(own.def)
    }

    /// Whether later runs leave an instruction out.
    fn settled(&self, at: usize) -> bool {
        let view = matches!(self.plan.instrs[at], Instr::View { out, .. } if self.lasts(out));
        self.schedule.once(at) || view
    }

    /// Gives bindings their tensors: the state keeps its own.
    fn bind(&mut self) {
        for (i, binding) in self.plan.bindings.iter().enumerate() {
            let state = binding.kind == BindingKind::State;
            if state && self.run > 0 {
                continue;
            }
            let run = if state { 0 } else { self.run };
            let (before, bytes) = self.extent(binding.value);
            self.seen.looks.insert(i, (-before, bytes - before));
            let fill = (0..bytes).map(|byte| symbol(("binding", i, run, byte)));
            let storage = self.storage(fill.collect(), false);
            self.slots[binding.value as usize] = Some(Place {
                storage,
                at: before,
            });
        }
    }

    /// Adds a storage.
    fn storage(&mut self, holds: Vec<Symbol>, own: bool) -> usize {
        self.storages.push(holds);
        self.own.push(own);
        self.written.push(false);
        self.storages.len() - 1
    }

    /// Bytes before a root's data and in all that its values look at.
    fn extent(&self, root: ValueId) -> (i64, i64) {
        let (mut from, mut to) = (0, self.plan.values[root as usize].storage_bytes as i64);
        for value in self.plan.values.iter().filter(|v| v.root == root) {
            let width = width(value);
            for element in self.elements(value) {
                from = from.min((value.offset + element) * width);
                to = to.max((value.offset + element + 1) * width);
            }
        }
        (-from, to - from)
    }

    // -- memory ----------------------------------------------------------------

    /// Offsets of a value's elements in logical order, from its first one.
    fn elements(&self, value: &Value) -> Vec<i64> {
        let (shape, strides) = (self.plan.dims(value.shape), self.plan.dims(value.strides));
        let mut found = vec![0];
        for (size, stride) in shape.iter().zip(strides) {
            found = (found.iter())
                .flat_map(|start| (0..*size).map(move |i| start + i * stride))
                .collect();
        }
        found
    }

    fn place(&self, value: ValueId) -> Result<Place, String> {
        self.slots[value as usize].ok_or(format!("%{value} is read after it was dropped"))
    }

    /// The bytes of a value, in logical order.
    fn bytes(&self, value: ValueId) -> Result<Vec<Place>, String> {
        let place = self.place(value)?;
        let meta = &self.plan.values[value as usize];
        let width = width(meta);
        let mut found = Vec::new();
        for element in self.elements(meta) {
            for byte in 0..width {
                let at = place.at + element * width + byte;
                let bound = self.storages[place.storage].len() as i64;
                if at < 0 || at >= bound {
                    return Err(format!("%{value} lies outside its storage"));
                }
                found.push(Place { at, ..place });
            }
        }
        Ok(found)
    }

    fn at(&self, place: Place) -> Symbol {
        self.storages[place.storage][place.at as usize]
    }

    fn read(&self, value: ValueId) -> Result<Vec<Symbol>, String> {
        let places = self.bytes(value)?;
        let flying = |flight: &Flight| places.iter().any(|p| flight.into.contains(p));
        if self.flights.iter().any(flying) {
            return Err(format!("%{value} is read while it is received"));
        }
        let marks = self.plan.values[value as usize].marks;
        Ok(places
            .into_iter()
            .map(|p| through(marks, self.at(p)))
            .collect())
    }

    /// Writes what a tensor is to hold.
    fn write_to(&mut self, value: ValueId, symbols: &[Symbol]) -> Result<(), String> {
        let places = self.bytes(value)?;
        let marks = self.plan.values[value as usize].marks;
        let held: Vec<Symbol> = symbols.iter().map(|s| through(marks, *s)).collect();
        self.write(&places, &held)
    }

    fn write(&mut self, places: &[Place], symbols: &[Symbol]) -> Result<(), String> {
        for flight in &self.flights {
            let busy = |p: &Place| {
                flight.into.contains(p) || flight.sent.iter().any(|(sent, _)| sent == p)
            };
            if places.iter().any(busy) {
                return Err(format!("what %{} is made of is written", flight.output));
            }
        }
        for (place, symbol) in places.iter().zip(symbols) {
            self.written[place.storage] = true;
            self.storages[place.storage][place.at as usize] = *symbol;
        }
        Ok(())
    }

    /// Gives a result its place: in the arena, or in a storage of its own.
    fn define(&mut self, value: ValueId) -> Result<(), String> {
        let meta = self.plan.values[value as usize];
        if self.schedule.offset(value).is_none() {
            let place = if meta.root == value {
                let (before, _) = self.extent(value);
                let bytes = before as usize + meta.storage_bytes as usize;
                Place {
                    storage: self.storage(vec![UNDEFINED; bytes], true),
                    at: before,
                }
            } else {
                let base = self.place(meta.root)?;
                Place {
                    at: base.at + meta.offset * width(&meta),
                    ..base
                }
            };
            self.slots[value as usize] = Some(place);
        }
        let places = self.bytes(value)?;
        if meta.root == value {
            self.write(&places, &vec![UNDEFINED; places.len()])?;
        }
        Ok(())
    }

    /// Bytes that are held now, what is on its way among them.
    fn held(&self) -> u64 {
        let mut held: Vec<usize> = self.slots.iter().flatten().map(|p| p.storage).collect();
        held.push(self.arena);
        for flight in &self.flights {
            let sent = flight.sent.iter().map(|(place, _)| place);
            held.extend(sent.chain(&flight.into).map(|place| place.storage));
        }
        held.sort_unstable();
        held.dedup();
        let own = held.into_iter().filter(|storage| self.own[*storage]);
        own.map(|storage| self.storages[storage].len() as u64).sum()
    }

    // -- instructions --------------------------------------------------------------

    fn step(&mut self, at: usize) -> Result<(), String> {
        let plan = self.plan;
        match plan.instrs[at] {
            Instr::View { base, out } => {
                if plan.values[out as usize].root != base {
                    return Err(format!("view %{out} is not based on its root"));
                }
                self.define(out)
            }
            Instr::Free { value } => {
                if !self.lasts(value) {
                    self.slots[value as usize] = None;
                }
                Ok(())
            }
            Instr::Rng { action, slot, .. } => {
                match action {
                    RngAction::Save => self.saved[slot as usize] = self.generator,
                    RngAction::Restore => self.generator = self.saved[slot as usize],
                }
                Ok(())
            }
            Instr::Wait { value } => {
                let root = plan.values[value as usize].root;
                self.place(value)?;
                let flying =
                    (self.flights.iter()).position(|f| plan.values[f.output as usize].root == root);
                flying.map_or(Ok(()), |flight| self.land(flight))
            }
            Instr::Collective(c) => {
                let input = self.bytes(c.input)?;
                let sent = self.read(c.input)?;
                if c.output != c.input {
                    self.define(c.output)?;
                }
                let into = self.bytes(c.output)?;
                let is_part = self.is_own_part(&c, &input, &into);
                if c.output != c.input && !is_part && into.iter().any(|p| input.contains(p)) {
                    return Err(format!("%{} is received where %{} lies", c.output, c.input));
                }
                let result = self.received(&c, &sent, into.len());
                self.write(&into, &vec![UNDEFINED; into.len()])?;
                // Reductions send what lies in their result.
                let held = matches!(
                    c.kind,
                    CollectiveKind::AllReduce | CollectiveKind::Broadcast
                );
                let sent = if held || is_part {
                    Vec::new()
                } else {
                    input.into_iter().zip(sent).collect()
                };
                self.flights.push(Flight {
                    output: c.output,
                    sent,
                    into,
                    result,
                });
                Ok(())
            }
            Instr::Local { .. } => self.local(at),
        }
    }

    /// Whether a gather sends what lies in its result already, as this rank's part.
    fn is_own_part(&self, c: &Collective, input: &[Place], into: &[Place]) -> bool {
        let ranks = self.plan.dims(self.plan.groups[c.group as usize].ranks);
        let own = i64::from(self.plan.fingerprint.rank);
        let at = ranks.iter().position(|rank| *rank == own);
        let part = at.and_then(|at| into.get(at * input.len()..(at + 1) * input.len()));
        c.kind == CollectiveKind::AllGather && part == Some(input)
    }

    /// What a collective gives this rank.
    fn received(&mut self, c: &Collective, sent: &[Symbol], bytes: usize) -> Vec<Symbol> {
        let plan = self.plan;
        let ranks = plan.dims(plan.groups[c.group as usize].ranks);
        let own = ranks
            .iter()
            .position(|rank| *rank == i64::from(plan.fingerprint.rank));
        let splits = (plan.dims(c.input_splits), plan.dims(c.output_splits));
        let what = format!(
            "{:?} {:?} {} {} {splits:?}",
            c.kind, c.reduce, c.group, c.root
        );
        self.seen.sent.push((what.clone(), symbol(sent)));
        let width = width(&plan.values[c.input as usize]) as usize;
        let row = sent.len() / ranks.len().max(1);
        let defined = |of: &[Symbol], made: Symbol| {
            if of.contains(&UNDEFINED) {
                UNDEFINED
            } else {
                made
            }
        };
        let mut result = Vec::with_capacity(bytes);
        match c.kind {
            CollectiveKind::AllReduce => {
                for element in sent.chunks(width) {
                    let sum = symbol((&what, element));
                    self.seen.elements.push(defined(element, sum));
                    result.extend((0..width).map(|byte| defined(element, symbol((sum, byte)))));
                }
            }
            CollectiveKind::ReduceScatter if row * ranks.len() == sent.len() && row == bytes => {
                for (rank, part) in sent.chunks(row.max(1)).enumerate() {
                    for element in part.chunks(width) {
                        let sum = symbol((&what, rank, element));
                        self.seen.elements.push(defined(element, sum));
                        if Some(rank) == own {
                            let bytes =
                                (0..width).map(|byte| defined(element, symbol((sum, byte))));
                            result.extend(bytes);
                        }
                    }
                }
            }
            CollectiveKind::AllGather if sent.len() * ranks.len() == bytes => {
                let of = |rank: usize, own_symbol: Symbol| match Some(rank) == own {
                    true => own_symbol,
                    false => defined(
                        &[own_symbol],
                        symbol(("of another", c.group, rank, own_symbol)),
                    ),
                };
                result.extend(
                    (0..ranks.len()).flat_map(|rank| sent.iter().map(move |s| of(rank, *s))),
                );
                let gathered = sent.iter().map(|s| defined(&[*s], symbol((&what, s))));
                self.seen.elements.extend(gathered);
            }
            _ => {
                self.seen.elements.push(symbol((&what, sent)));
                result.extend((0..bytes).map(|byte| symbol((&what, sent, byte))));
            }
        }
        self.seen.elements.retain(|element| *element != UNDEFINED);
        result
    }

    /// A collective has finished.
    fn land(&mut self, flight: usize) -> Result<(), String> {
        let flight = self.flights.remove(flight);
        if flight
            .sent
            .iter()
            .any(|(place, sent)| self.at(*place) != *sent)
        {
            return Err(format!(
                "what %{} is made of changed on its way",
                flight.output
            ));
        }
        self.write(&flight.into, &flight.result)
    }

    // -- what is there afterwards ----------------------------------------------------

    fn observe(&mut self, kept: &mut Vec<(String, Vec<Place>, Symbol)>) -> Result<(), String> {
        let (plan, run) = (self.plan, self.run);
        for (name, places, left) in kept.iter() {
            let now = places
                .iter()
                .map(|p| symbol((self.at(*p) == *left, "kept")));
            self.seen.bytes.push((
                format!("run {run}: {name} of an earlier run"),
                now.collect(),
            ));
        }
        let mut bound = Vec::new();
        for (i, binding) in plan.bindings.iter().enumerate() {
            let storage = self.place(binding.value)?.storage;
            bound.push(storage);
            self.seen.bytes.push((
                format!("run {run}: binding {i}"),
                self.storages[storage].clone(),
            ));
            let raised = symbol(("raised", self.written[storage]));
            self.seen
                .bytes
                .push((format!("run {run}: version of binding {i}"), vec![raised]));
        }
        let results =
            (plan.outputs.iter().map(|o| o.value)).chain(plan.grads.iter().map(|g| g.value));
        let results: Vec<ValueId> = results.filter(|v| *v != NONE).collect();
        let mut first = Vec::new();
        for (i, value) in results.iter().enumerate() {
            let place = self.place(*value)?;
            if place.storage == self.arena {
                return Err(format!("result {i} lies in the arena"));
            }
            // Which results and bindings share a storage, and where in it.
            let alias = bound.iter().position(|s| *s == place.storage);
            let twin = results[..i]
                .iter()
                .position(|v| self.slots[*v as usize].is_some_and(|p| p.storage == place.storage));
            let meta = &plan.values[*value as usize];
            let looks = (
                plan.dims(meta.shape),
                plan.dims(meta.strides),
                meta.dtype.0,
                meta.marks,
            );
            let offset = match twin {
                Some(twin) => place.at - self.place(results[twin])?.at,
                None if alias.is_some() => place.at,
                None => 0,
            };
            let symbols = self.read(*value)?;
            self.seen
                .bytes
                .push((format!("run {run}: result {i}"), symbols));
            let how = symbol((alias, twin, looks, offset));
            self.seen
                .bytes
                .push((format!("run {run}: what result {i} shares"), vec![how]));
            first.push((i, alias.is_none()));
        }
        // The caller writes to what is its own.
        for (i, own) in first {
            if own {
                let places = self.bytes(results[i])?;
                let mark = symbol(("written by the caller", run, i));
                self.write(&places, &vec![mark; places.len()])?;
                kept.retain(|(_, old, _)| !old.iter().any(|p| places.contains(p)));
                kept.push((format!("result {i} of run {run}"), places, mark));
            }
        }
        self.seen
            .bytes
            .push((format!("run {run}: generator"), vec![self.generator]));
        Ok(())
    }
}

fn width(value: &Value) -> i64 {
    value.dtype.bytes().unwrap_or(1) as i64
}

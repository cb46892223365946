//! The rules of the program and its arguments.

use super::fault::Fault;
use super::{Checker, LAYOUT_END, MAX_ARG_DEPTH, MEMORY_FORMAT_END, at, defining_instr};
use crate::instr::{
    ArchivedArg, ArchivedCollective, ArchivedCollectiveKind, ArchivedInstr, ArchivedRngAction,
};
use crate::pool::{ArchivedRange, NONE};
use crate::value::ArchivedValue;

/// Values that one pass over the program keeps a flag for, in 1 MiB. A plan
/// with more takes several passes, so that the memory stays bounded.
const FLAGS: usize = 8 << 20;

impl Checker<'_> {
    /// What can be said of the pool of arguments without the program.
    pub(super) fn arg_pool(&self, args: &[ArchivedArg]) -> Result<(), Fault> {
        let plan = self.plan;
        for (index, arg) in args.iter().enumerate() {
            let place = || at("args", index, "");
            match arg {
                ArchivedArg::None
                | ArchivedArg::Bool(_)
                | ArchivedArg::Int(_)
                | ArchivedArg::Float(_)
                | ArchivedArg::Complex(..) => {}
                ArchivedArg::Value(value) => {
                    self.id(value.to_native(), "values", plan.values.len(), place)?;
                }
                ArchivedArg::Values(range) => {
                    self.range(*range, "ids", plan.ids.len(), place)?;
                }
                ArchivedArg::Scalar(scalar) => {
                    self.id(scalar.to_native(), "scalars", plan.scalars.len(), place)?;
                }
                ArchivedArg::Wrapped(inner) => {
                    let inner = inner.to_native();
                    self.inner_arg(index, u64::from(inner))?;
                    if !is_number(&args[inner as usize]) {
                        return Err(Fault::Wrapped { index, inner });
                    }
                }
                ArchivedArg::Ints(range) => {
                    self.range(*range, "dims", plan.dims.len(), place)?;
                }
                ArchivedArg::List(range) => {
                    self.range(*range, "args", args.len(), place)?;
                    let end = u64::from(range.start.to_native()) + u64::from(range.len.to_native());
                    if range.len != 0 {
                        self.inner_arg(index, end - 1)?;
                    }
                }
                ArchivedArg::Str(text) => self.text(text.to_native(), place)?,
                ArchivedArg::DType(dtype) => self.dtype(*dtype, "args", index)?,
                ArchivedArg::Device(device) => self.device(*device, "args", index)?,
                ArchivedArg::Layout(layout) => {
                    self.number(i64::from(*layout), 0, LAYOUT_END, place)?;
                }
                ArchivedArg::MemoryFormat(format) => {
                    self.number(i64::from(*format), 0, MEMORY_FORMAT_END, place)?;
                }
            }
        }
        Ok(())
    }

    fn inner_arg(&self, index: usize, inner: u64) -> Result<(), Fault> {
        if inner < index as u64 {
            return Ok(());
        }
        Err(Fault::ArgOrder { index, inner })
    }

    /// Every instruction in order: what it uses, defines and frees.
    pub(super) fn program(&self, instrs: &[ArchivedInstr]) -> Result<(), Fault> {
        let entries_left = self.entries_left.get();
        Flags::passes(self.plan.values.len(), |freed| {
            self.entries_left.set(entries_left);
            self.pass(instrs, freed)
        })
    }

    /// One pass over the program, which knows of some of the values whether
    /// they have been freed.
    fn pass(&self, instrs: &[ArchivedInstr], freed: &mut Flags) -> Result<(), Fault> {
        let plan = self.plan;
        let mut defined = 0_u64;
        for (index, instr) in instrs.iter().enumerate() {
            let now = index as u32;
            match instr {
                ArchivedInstr::Local {
                    op,
                    overload,
                    args,
                    outs,
                    writes,
                    seeded: _,
                    grad: _,
                } => {
                    self.text(op.to_native(), || at("instrs", index, "op"))?;
                    self.text(overload.to_native(), || at("instrs", index, "overload"))?;
                    self.args(now, *args, freed, 0)?;
                    let place = || at("instrs", index, "writes");
                    for value in self.list(*writes, "ids", &plan.ids, place)? {
                        self.used(now, value.to_native(), "writes", freed)?;
                    }
                    defined += self.outs(now, *args, *outs, freed)?;
                }
                ArchivedInstr::View { base, out } => {
                    let (base, out) = (base.to_native(), out.to_native());
                    let base_root = self.used(now, base, "base", freed)?.root.to_native();
                    let out_root = self.defined(now, out, "out")?.root.to_native();
                    if base_root != out_root {
                        let at = at("instrs", index, "");
                        return Err(Fault::View {
                            at,
                            out,
                            out_root,
                            base,
                            base_root,
                        });
                    }
                    defined += 1;
                }
                ArchivedInstr::Collective(collective) => {
                    defined += u64::from(self.collective(now, collective, freed)?);
                }
                ArchivedInstr::Wait { value } => {
                    self.used(now, value.to_native(), "value", freed)?;
                }
                ArchivedInstr::Rng {
                    action: _,
                    device,
                    slot,
                } => {
                    self.device(*device, "instrs", index)?;
                    let slots = i64::from(self.plan.rng_slots.to_native());
                    let slot = i64::from(slot.to_native());
                    self.number(slot, 0, slots, || at("instrs", index, "slot"))?;
                }
                ArchivedInstr::Free { value } => self.freed(now, value.to_native(), freed)?,
            }
        }
        self.all_defined(defined)?;
        self.left_behind(freed)
    }

    /// A value that the instruction `now` reads or writes.
    #[inline]
    fn used(
        &self,
        now: u32,
        id: u32,
        field: &'static str,
        freed: &Flags,
    ) -> Result<&ArchivedValue, Fault> {
        let place = || at("instrs", now as usize, field);
        let value = self.value(id, place)?;
        if let Some(def) = defining_instr(value).filter(|def| *def >= now) {
            return Err(Fault::Undefined {
                at: place(),
                value: id,
                def,
            });
        }
        // NONE is above every instruction.
        let last_use = value.last_use.to_native();
        if last_use < now {
            return Err(Fault::UsedUp {
                at: place(),
                value: id,
                last_use,
            });
        }
        if freed.get(id) == Some(true) {
            return Err(Fault::UsedAfterFree {
                at: place(),
                value: id,
            });
        }
        Ok(value)
    }

    /// A value that the instruction `now` makes.
    fn defined(&self, now: u32, id: u32, field: &'static str) -> Result<&ArchivedValue, Fault> {
        let place = || at("instrs", now as usize, field);
        let value = self.value(id, place)?;
        if defining_instr(value) == Some(now) {
            return Ok(value);
        }
        Err(Fault::NotNew {
            at: place(),
            value: id,
        })
    }

    fn args(&self, now: u32, args: ArchivedRange, freed: &Flags, depth: u32) -> Result<(), Fault> {
        let plan = self.plan;
        let place = || at("instrs", now as usize, "args");
        if depth > MAX_ARG_DEPTH {
            return Err(Fault::ArgDepth {
                at: place(),
                max: MAX_ARG_DEPTH,
            });
        }
        for arg in self.list(args, "args", &plan.args, place)? {
            match arg {
                ArchivedArg::Value(value) => {
                    self.used(now, value.to_native(), "args", freed)?;
                }
                ArchivedArg::Values(range) => {
                    for value in self.list(*range, "ids", &plan.ids, place)? {
                        if *value != NONE {
                            self.used(now, value.to_native(), "args", freed)?;
                        }
                    }
                }
                // Paid for, so that whoever walks the program may walk it too.
                ArchivedArg::Ints(range) => {
                    self.list(*range, "dims", &plan.dims, place)?;
                }
                ArchivedArg::List(range) => self.args(now, *range, freed, depth + 1)?,
                ArchivedArg::Wrapped(inner) => {
                    let range = ArchivedRange {
                        start: *inner,
                        len: 1.into(),
                    };
                    self.args(now, range, freed, depth + 1)?;
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Whether one of these arguments, which were checked, lies in the storage of `root`.
    fn takes(&self, args: ArchivedRange, root: u32) -> bool {
        let plan = self.plan;
        let on_root = |value: u32| plan.values[value as usize].root.to_native() == root;
        plan.args[args.indices()].iter().any(|arg| match arg {
            ArchivedArg::Value(value) => on_root(value.to_native()),
            ArchivedArg::Values(range) => plan.ids[range.indices()]
                .iter()
                .any(|value| *value != NONE && on_root(value.to_native())),
            ArchivedArg::List(range) => self.takes(*range, root),
            _ => false,
        })
    }

    /// The results of an op; returns how many of them are new.
    fn outs(
        &self,
        now: u32,
        args: ArchivedRange,
        outs: ArchivedRange,
        freed: &Flags,
    ) -> Result<u64, Fault> {
        let place = || at("instrs", now as usize, "outs");
        let mut new = 0;
        let mut before = None;
        for out in self.list(outs, "ids", &self.plan.ids, place)? {
            let out = out.to_native();
            if out == NONE {
                continue;
            }
            if defining_instr(self.value(out, place)?) != Some(now) {
                self.used(now, out, "outs", freed)?;
                continue;
            }
            let root = self.value(out, place)?.root.to_native();
            let own = defining_instr(self.value(root, place)?) == Some(now);
            if !own && !self.takes(args, root) {
                return Err(Fault::ForeignStorage {
                    at: place(),
                    value: out,
                    root,
                });
            }
            if let Some(before) = before.filter(|before| *before >= out) {
                return Err(Fault::Order {
                    at: place(),
                    value: out,
                    before,
                });
            }
            before = Some(out);
            new += 1;
        }
        Ok(new)
    }

    /// Returns whether the collective's output is new.
    fn collective(
        &self,
        now: u32,
        collective: &ArchivedCollective,
        freed: &Flags,
    ) -> Result<bool, Fault> {
        let ArchivedCollective {
            kind,
            reduce,
            group,
            root,
            input,
            output,
            input_splits,
            output_splits,
        } = collective;
        let plan = self.plan;
        let place = |field| move || at("instrs", now as usize, field);
        let reduces = match kind {
            ArchivedCollectiveKind::AllReduce | ArchivedCollectiveKind::ReduceScatter => true,
            ArchivedCollectiveKind::AllGather
            | ArchivedCollectiveKind::AllToAll
            | ArchivedCollectiveKind::Broadcast => false,
        };
        if reduces != reduce.is_some() {
            let name = |is| if is { "a reduction" } else { "none" };
            let (found, expected) = (name(reduce.is_some()), name(reduces));
            return Err(Fault::Reduce {
                at: place("reduce")(),
                found,
                expected,
            });
        }
        self.id(
            group.to_native(),
            "groups",
            plan.groups.len(),
            place("group"),
        )?;
        let ranks = plan.groups[group.to_native() as usize]
            .ranks
            .len
            .to_native();
        let roots = match kind {
            ArchivedCollectiveKind::Broadcast => i64::from(ranks),
            _ => 1,
        };
        self.number(i64::from(root.to_native()), 0, roots, place("root"))?;
        let (input, output) = (input.to_native(), output.to_native());
        self.used(now, input, "input", freed)?;
        for (range, field) in [
            (input_splits, "input_splits"),
            (output_splits, "output_splits"),
        ] {
            let rows = self.list(*range, "dims", &plan.dims, place(field))?;
            let expected = match kind {
                ArchivedCollectiveKind::AllToAll if !rows.is_empty() => ranks as usize,
                _ => 0,
            };
            self.count(
                rows.len(),
                expected,
                "one per rank of an all-to-all",
                place(field),
            )?;
            for rows in rows {
                self.number(rows.to_native(), 0, i64::MAX, place(field))?;
            }
        }
        if output == input {
            return Ok(false);
        }
        let value = self.value(output, place("output"))?;
        if defining_instr(value) != Some(now) {
            return Err(Fault::CollectiveOutput {
                at: place("output")(),
                output,
                input,
            });
        }
        Ok(true)
    }

    /// A value that is dropped by the instruction `now`: made before it by
    /// another instruction, and not dropped yet.
    fn freed(&self, now: u32, id: u32, freed: &mut Flags) -> Result<(), Fault> {
        let place = || at("instrs", now as usize, "value");
        match defining_instr(self.value(id, place)?) {
            Some(def) if def >= now => {
                return Err(Fault::Undefined {
                    at: place(),
                    value: id,
                    def,
                });
            }
            Some(_) => {}
            None => {
                return Err(Fault::FreedKept {
                    at: place(),
                    value: id,
                });
            }
        }
        if freed.set(id) == Some(true) {
            return Err(Fault::FreedTwice {
                at: place(),
                value: id,
            });
        }
        Ok(())
    }

    /// What outlives the run has not been freed.
    fn left_behind(&self, freed: &Flags) -> Result<(), Fault> {
        let outputs = self.plan.outputs.iter().map(|output| &output.value);
        let grads = self.plan.grads.iter().map(|grad| &grad.value);
        for (table, values) in [
            (
                "outputs",
                &mut outputs.enumerate() as &mut dyn Iterator<Item = _>,
            ),
            ("grads", &mut grads.enumerate()),
        ] {
            for (index, value) in values {
                let value = value.to_native();
                if value != NONE && freed.get(value) == Some(true) {
                    return Err(Fault::UsedAfterFree {
                        at: at(table, index, "value"),
                        value,
                    });
                }
            }
        }
        Ok(())
    }

    /// Every value that names an instruction as its definition was met there.
    /// Each instruction lists a value once, so it is enough to count.
    fn all_defined(&self, defined: u64) -> Result<(), Fault> {
        let plan = self.plan;
        let by_instr = || {
            (0_u32..)
                .zip(plan.values.iter())
                .filter_map(|(id, value)| Some((id, defining_instr(value)?)))
        };
        let values = by_instr().count() as u64;
        if values == defined {
            return Ok(());
        }
        for (id, instr) in by_instr() {
            let lists = match &plan.instrs[instr as usize] {
                ArchivedInstr::Local { outs, .. } => {
                    let place = || at("instrs", instr as usize, "outs");
                    match self.list(*outs, "ids", &plan.ids, place) {
                        Ok(outs) => outs.iter().any(|out| *out == id),
                        // Too long a search: the counts have to do.
                        Err(_) => break,
                    }
                }
                ArchivedInstr::View { out, .. } => *out == id,
                ArchivedInstr::Collective(collective) => collective.output == id,
                ArchivedInstr::Wait { .. }
                | ArchivedInstr::Rng { .. }
                | ArchivedInstr::Free { .. } => false,
            };
            if !lists {
                return Err(Fault::Definition {
                    value: id,
                    def: at("instrs", instr as usize, ""),
                });
            }
        }
        Err(Fault::Definitions { values, defined })
    }

    /// No slot is restored before it is saved, and there are no more slots than
    /// instructions that use them: no pass removes these.
    pub(super) fn rng_slots(&self, instrs: &[ArchivedInstr], slots: u32) -> Result<(), Fault> {
        let uses = (instrs.iter()).filter(|instr| matches!(instr, ArchivedInstr::Rng { .. }));
        let end = uses.count() as i64 + 1;
        self.number(i64::from(slots), 0, end, || at("rng_slots", 0, ""))?;
        Flags::passes(slots as usize, |flags| {
            for (index, instr) in instrs.iter().enumerate() {
                let ArchivedInstr::Rng { action, slot, .. } = instr else {
                    continue;
                };
                let slot = slot.to_native();
                match action {
                    ArchivedRngAction::Save => {
                        flags.set(slot);
                    }
                    ArchivedRngAction::Restore if flags.get(slot) == Some(false) => {
                        return Err(Fault::RngSlot {
                            at: at("instrs", index, "slot"),
                            slot,
                        });
                    }
                    ArchivedRngAction::Restore => {}
                }
            }
            Ok(())
        })
    }
}

/// Whether an argument is a number of some kind.
fn is_number(arg: &ArchivedArg) -> bool {
    matches!(
        arg,
        ArchivedArg::Bool(_)
            | ArchivedArg::Int(_)
            | ArchivedArg::Float(_)
            | ArchivedArg::Complex(..)
            | ArchivedArg::Scalar(_)
    )
}

/// A flag for each of a run of ids.
struct Flags {
    start: usize,
    words: Vec<u64>,
}

impl Flags {
    /// Calls `pass` with cleared flags for one run of ids after the other, at
    /// least once.
    fn passes(
        ids: usize,
        mut pass: impl FnMut(&mut Flags) -> Result<(), Fault>,
    ) -> Result<(), Fault> {
        let mut flags = Flags {
            start: 0,
            words: vec![0; ids.min(FLAGS).div_ceil(64)],
        };
        loop {
            pass(&mut flags)?;
            flags.start += FLAGS;
            if flags.start >= ids {
                return Ok(());
            }
            flags.words.fill(0);
        }
    }

    /// Sets a flag and returns what it was, `None` for an id of another pass.
    fn set(&mut self, id: u32) -> Option<bool> {
        let before = self.get(id)?;
        let at = id as usize - self.start;
        self.words[at / 64] |= 1 << (at % 64);
        Some(before)
    }

    #[inline]
    fn get(&self, id: u32) -> Option<bool> {
        let at = (id as usize).checked_sub(self.start)?;
        let word = self.words.get(at / 64)?;
        Some(word >> (at % 64) & 1 == 1)
    }
}

//! Runs that fail at an op: which ops may fail, whether the run has by then changed something
//! that cannot be undone, and which gradients were gone.

use rote_plans::{Instr, InstrId, NONE, Plan, StrId, keeps_to_arguments};

use super::Recorder;
use crate::refusal::Refusal;
use rote_passes::liveness::writes_binding;
use rote_passes::ops::may_raise;

impl Recorder {
    /// Looks at the instructions of the op that was recorded last, from `first` on.
    pub(super) fn look_at_last(&mut self, first: usize) {
        let plan = &self.tables.plan;
        let last = &plan.instrs[first..];
        self.last = first;
        if self.first_lasting.is_none() {
            let lasting = last.iter().position(|instr| lasts(plan, instr));
            self.first_lasting = lasting.map(|at| (first + at) as InstrId);
        }
        if self.first_final.is_none() {
            let last_word = last.iter().position(|instr| is_final(plan, instr));
            self.first_final = last_word.map(|at| (first + at) as InstrId);
        }
        self.may_raise = last.iter().any(|instr| may_raise(plan, instr));
        if self.may_raise {
            self.last_raising = Some(first as InstrId);
        }
    }

    /// The first instruction at which a gradient that the step has replaced may have been
    /// gone; [`NONE`] where no op shows it.
    pub(super) fn gone(&self, path: StrId) -> InstrId {
        let seen = self.gone.get(&path).copied();
        let last = self.last_raising.map(|last| last + 1); // there it was still the old one
        seen.or(last).unwrap_or(NONE)
    }

    /// Whether the op that was recorded last may raise for other data.
    pub fn may_raise(&self) -> bool {
        self.may_raise
    }

    /// Whether the op that was recorded last may raise where the call could not be made again:
    /// it, or what came before it, does what lasts. Where the ranks agree about checks, that is at any op: the others
    /// would wait for this rank at the next check.
    pub fn may_raise_late(&self) -> bool {
        self.may_raise && (self.first_lasting.is_some() || self.ranks_agree)
    }

    /// Why a step that handles errors of the op that was recorded last can't be replayed.
    /// `handler`: where it does.
    pub fn handled(&self, handler: &str) -> Refusal {
        let plan = &self.tables.plan;
        let named = |instr: &Instr| match instr {
            Instr::Local { op, .. } => Some(plan.str(*op)),
            Instr::Collective(_) | Instr::Wait { .. } => Some("a collective"),
            _ => None,
        };
        let last = plan.instrs.get(self.last..).unwrap_or_default();
        let name = last.iter().find_map(named).unwrap_or_default();
        let source = self.sources.last().map_or("", |&source| plan.str(source));
        Refusal::op(
            name,
            source,
            format!(
                "may raise for other data, and the step may handle the error at {handler}: a replay that has written or \
                 sent something before can neither run the handler nor start again"
            ),
            "handle the error outside the captured function, call the op before the step writes anything, or use a \
             form that does not raise (linalg.cholesky_ex); in Python a `with` counts as a handler if the step can \
             reach any context manager that may swallow errors (contextlib.suppress)",
        )
    }

    /// The gradient that a tensor had before the step was gone when the op ran that was
    /// recorded last.
    pub fn gradient_gone(&mut self, path: &str) {
        let path = self.tables.str(path);
        self.gone.entry(path).or_insert(self.last as u32);
    }
}

/// Whether an instruction does what is there after the run, whatever becomes of it: it writes
/// a binding, tells other ranks, or is an op of another library, which may keep something.
/// `BoundPlan::is_undone_at` asks the same of a run that has failed.
pub(super) fn lasts(plan: &Plan, instr: &Instr) -> bool {
    match instr {
        Instr::Local { op, .. } => {
            writes_binding(plan, instr) || !keeps_to_arguments(plan.str(*op))
        }
        Instr::Collective(_) | Instr::Wait { .. } => true,
        Instr::View { .. } | Instr::Rng { .. } | Instr::Free { .. } => false,
    }
}

/// Whether an instruction [`lasts`] even where all ranks begin the call anew, as a collective between tensors of the
/// step's own does not.
pub(super) fn is_final(plan: &Plan, instr: &Instr) -> bool {
    match instr {
        Instr::Collective(_) => writes_binding(plan, instr),
        Instr::Wait { .. } => false,
        _ => lasts(plan, instr),
    }
}

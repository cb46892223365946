//! The ranges that a profiler shows of a replay, beside the framework's own ops: the global
//! op of the recorded step, and the redistribution, that each step of the executor belongs to.
//!
//! A plan has ranges of instructions. An executor has steps for the instructions that
//! are left. Ranges of a plan may overlap if passes have moved instructions. A step
//! then belongs to the range that began last, so that the shown ranges always nest.

use std::ffi::{CStr, CString};

use hashbrown::HashMap;
use rote_plans::describe::placements;
use rote_plans::{NONE, Plan};

use crate::backend::Program;
use crate::executor::{Executor, ReplayError, Step};

/// A run of steps with a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Span {
    first: u32,
    /// One past the last.
    end: u32,
    name: u32,
}

/// The named ranges of an executor's steps.
#[derive(Debug, Default)]
pub struct Ranges {
    names: Vec<CString>,
    /// In the order in which they begin, outer ones first; they nest.
    spans: Vec<Span>,
}

/// The origin of a plan's instructions: for each, the global op and the
/// redistribution that it belongs to, if any.
#[derive(Debug)]
pub struct Origins {
    names: Vec<CString>,
    /// The name of each global op, then of each redistribution.
    name_of: Vec<u32>,
    /// Of each instruction the global op, as an index into `name_of`, or [`NONE`].
    ops: Vec<u32>,
    /// Of each instruction the redistribution, likewise.
    redistributions: Vec<u32>,
}

impl Origins {
    /// Reads them from a plan.
    pub fn of(plan: &Plan) -> Self {
        let ops = plan.strategies.iter().map(|s| {
            let op = plan.str(s.op);
            // Profilers show ops without their overloads.
            let op = op.split_once('.').map_or(op, |(name, _)| name);
            (op.to_owned(), plan.str(s.source))
        });
        let redistributions = plan.redistributions.iter().map(|r| {
            let from = placements(plan, r.from);
            let to = placements(plan, r.to);
            let what = format!("redistribute {from} -> {to}");
            (what, plan.str(r.source))
        });
        let mut names: Vec<CString> = Vec::new();
        let mut ids: HashMap<CString, u32> = HashMap::new();
        let name_of = ops.chain(redistributions).map(|(what, source)| {
            let file = source.rsplit(['/', '\\']).next().unwrap_or(source);
            let name = match file {
                "" => what,
                line => format!("{what} ({line})"),
            };
            let name = text(&name);
            *ids.entry_ref(name.as_c_str()).or_insert_with(|| {
                names.push(name.clone());
                names.len() as u32 - 1
            })
        });
        let name_of = name_of.collect();
        let ops = plan.strategies.iter().map(|s| s.instrs.indices());
        let redistributions = plan.redistributions.iter().map(|r| r.instrs.indices());
        let (instrs, after_ops) = (plan.instrs.len(), plan.strategies.len() as u32);
        Origins {
            names,
            name_of,
            ops: owners(ops.zip(0..), instrs),
            redistributions: owners(redistributions.zip(after_ops..), instrs),
        }
    }

    /// The ranges of an executor's steps. `instrs`: for each step, the
    /// instruction that it comes from.
    pub fn ranges(&self, executor: &Executor, instrs: &[u32]) -> Ranges {
        let mut spans: Vec<Span> = Vec::new();
        // The open span of either level: what it belongs to, and its place.
        let mut open: [(u32, usize); 2] = [(NONE, 0); 2];
        for (at, (step, &instr)) in (0..).zip(executor.steps.iter().zip(instrs)) {
            // What an op leaves is dropped after it, and belongs to no other.
            if matches!(step, Step::Free(_)) {
                continue;
            }
            let instr = instr as usize;
            let owners = [self.ops[instr], self.redistributions[instr]];
            let mut changed = false;
            for (level, &owner) in owners.iter().enumerate() {
                changed |= owner != open[level].0;
                if changed {
                    open[level] = (owner, spans.len());
                    if owner != NONE {
                        spans.push(Span {
                            first: at,
                            end: at,
                            name: self.name_of[owner as usize],
                        });
                    }
                }
                if owner != NONE {
                    spans[open[level].1].end = at + 1;
                }
            }
        }
        Ranges {
            names: self.names.clone(),
            spans,
        }
    }
}

/// Text for C: without what would end it.
pub fn text(text: &str) -> CString {
    CString::new(text.replace('\0', "")).unwrap_or_default()
}

/// For each of so many instructions, which of the ranges it lies in: of several
/// the one that begins last. [`NONE`]: in none.
fn owners(ranges: impl Iterator<Item = (std::ops::Range<usize>, u32)>, instrs: usize) -> Vec<u32> {
    let mut ranges: Vec<_> = ranges.collect();
    ranges.sort_by_key(|(range, _)| (range.start, std::cmp::Reverse(range.end)));
    let mut coming = ranges.into_iter().peekable();
    let mut begun: Vec<(usize, u32)> = Vec::new();
    (0..instrs)
        .map(|at| {
            while let Some((range, id)) = coming.next_if(|(range, _)| range.start <= at) {
                begun.push((range.end, id));
            }
            while begun.last().is_some_and(|(end, _)| *end <= at) {
                begun.pop();
            }
            begun.last().map_or(NONE, |(_, id)| *id)
        })
        .collect()
}

impl Ranges {
    /// Runs an executor's steps in their ranges.
    ///
    /// # Errors
    ///
    /// As [`Executor::run`]; every range is ended.
    pub(crate) fn run(
        &self,
        executor: &Executor,
        program: &impl Program,
    ) -> Result<(), ReplayError> {
        let mut open: Vec<u32> = Vec::new();
        let mut coming = self.spans.iter().peekable();
        // A profiler that fails is no reason for a step to fail.
        let begin = |name: &CStr| program.begin_range(name).is_ok();
        let done = executor.run_observed(program, program, |step| {
            while open.last().is_some_and(|end| *end as usize <= step) {
                open.pop();
                let _ = program.end_range();
            }
            while let Some(span) = coming.next_if(|span| span.first as usize <= step) {
                if begin(&self.names[span.name as usize]) {
                    open.push(span.end);
                }
            }
        });
        for _ in open {
            let _ = program.end_range();
        }
        done
    }
}

#[cfg(test)]
#[path = "../../plans/tests/sample/mod.rs"]
mod sample;

#[cfg(test)]
mod tests {
    use super::*;

    /// Each span as its name, its first step and the one past its last.
    fn shown(ranges: &Ranges) -> Vec<(&str, u32, u32)> {
        let name = |span: &Span| ranges.names[span.name as usize].to_str().expect("text");
        (ranges.spans.iter())
            .map(|span| (name(span), span.first, span.end))
            .collect()
    }

    #[test]
    fn a_redistribution_lies_in_the_op_that_it_is_for() {
        let origins = Origins::of(&sample::small());
        // A view, aten::mm, its all-reduce and the wait for it, aten::add.
        let executor = Executor {
            steps: vec![
                Step::View(0),
                Step::Local(0),
                Step::Start(0),
                Step::Wait(0),
                Step::Local(1),
            ],
            rng: Vec::new(),
        };
        let op = ("aten::mm (train.py:12)", 1, 4);
        let redistribution = ("redistribute P(sum) -> R (train.py:12)", 2, 4);
        let ranges = origins.ranges(&executor, &[2, 3, 4, 5, 6]);
        assert_eq!(shown(&ranges), [op, redistribution]);
        // The same when only some of the steps are left.
        let later = Executor {
            steps: vec![Step::Start(0), Step::Local(1)],
            rng: Vec::new(),
        };
        let ranges = origins.ranges(&later, &[4, 6]);
        assert_eq!(shown(&ranges), [(op.0, 0, 1), (redistribution.0, 0, 1)]);
    }

    #[test]
    fn equal_ops_in_a_row_are_two_ranges_and_frees_end_none() {
        let plan = sample::large(4);
        let origins = Origins::of(&plan);
        let (first, second) = (&plan.strategies[0], &plan.strategies[1]);
        let (first, second) = (first.instrs.indices(), second.instrs.indices());
        let instrs: Vec<u32> = [&first, &second]
            .into_iter()
            .flat_map(|range| [range.start as u32, range.start as u32, range.end as u32 - 1])
            .collect();
        let op = [Step::Local(0), Step::Free(0), Step::Local(1)];
        let executor = Executor {
            steps: [op, op].concat(),
            rng: Vec::new(),
        };
        let name = "aten::addmm (train.py:12)";
        assert_eq!(
            shown(&origins.ranges(&executor, &instrs)),
            [(name, 0, 3), (name, 3, 6)]
        );
    }

    #[test]
    fn of_ranges_that_overlap_the_later_one_owns() {
        assert_eq!(
            owners([(1..4, 7), (3..6, 8), (2..2, 9), (3..4, 10)].into_iter(), 7),
            [NONE, 7, 7, 10, 8, 8, NONE]
        );
    }
}

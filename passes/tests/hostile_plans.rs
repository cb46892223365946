//! A plan that somebody altered and that still opens: every pass makes a valid plan of it.

use proptest::prelude::*;
use rote_aten_ops::AtenOps;
use rote_passes::{Selection, optimize};
use rote_plans::{Arg, Plan, PlanFile, Range};

#[path = "../../plans/tests/edits/mod.rs"]
mod edits;
#[path = "../../plans/tests/hostile/mod.rs"]
mod hostile;
#[path = "../../plans/tests/sample/mod.rs"]
mod sample;

use edits::{edit, edits};

/// Whether every choice of passes makes a valid plan of this one.
fn survives(plan: &Plan) -> Result<(), TestCaseError> {
    for passes in ["none", "default", "all"] {
        let passes = Selection::parse(passes).expect("these names are known");
        let (program, _) = optimize(plan.clone(), passes, &AtenOps);
        let done = program.plan.check();
        prop_assert!(done.is_ok(), "{done:?}");
    }
    Ok(())
}

#[test]
fn entries_that_no_list_names_may_be_anything() {
    let mut plan = sample::small();
    let start = plan.ids.len() as u32;
    plan.ids.push(4_000_000_000);
    plan.args.push(Arg::Values(Range { start, len: 1 }));
    plan.check().expect("valid");
    survives(&plan).expect("so are those that passes make of it");
    // Beside lists of which each has entries of its own: one that names all their entries.
    let (program, _) = optimize(sample::small(), Selection::NONE, &AtenOps);
    let mut plan = program.plan;
    let len = plan.ids.len() as u32;
    for _ in 0..2 {
        plan.args.push(Arg::Values(Range { start: 0, len }));
    }
    plan.check().expect("valid");
    survives(&plan).expect("so are those that passes make of it");
}

const CASES: u32 = if cfg!(miri) { 8 } else { 4096 };

proptest! {
    #![proptest_config(ProptestConfig { cases: CASES, ..ProptestConfig::default() })]

    #[test]
    fn passes_make_valid_plans_of_altered_ones(edits in edits(3)) {
        let mut bytes = PlanFile::from_plan(&sample::small()).expect("valid").as_bytes().to_vec();
        edit(&mut bytes, &edits);
        hostile::seal(&mut bytes);
        let Ok(file) = PlanFile::from_bytes(&bytes) else {
            return Ok(());
        };
        hostile::walk(&file);
        survives(&file.to_plan())?;
    }
}

//! A plan that somebody altered and that still opens: every pass makes a valid plan of it.

use proptest::prelude::*;
use rote_plans::PlanFile;
use rote_tracer::passes::{Selection, optimize};

#[path = "../../plans/tests/edits/mod.rs"]
mod edits;
#[path = "../../plans/tests/hostile/mod.rs"]
mod hostile;
#[path = "../../plans/tests/sample/mod.rs"]
mod sample;

use edits::{edit, edits};

proptest! {
    #![proptest_config(ProptestConfig { cases: 4096, ..ProptestConfig::default() })]

    #[test]
    fn passes_make_valid_plans_of_altered_ones(edits in edits(3)) {
        let mut bytes = PlanFile::from_plan(&sample::small()).expect("valid").as_bytes().to_vec();
        edit(&mut bytes, &edits);
        hostile::seal(&mut bytes);
        let Ok(file) = PlanFile::from_bytes(&bytes) else {
            return Ok(());
        };
        hostile::walk(&file);
        let plan = file.to_plan();
        for passes in ["none", "default", "all"] {
            let passes = Selection::parse(passes).expect("these names are known");
            let (program, _) = optimize(plan.clone(), passes);
            let done = program.plan.check();
            prop_assert!(done.is_ok(), "{done:?}");
        }
    }
}

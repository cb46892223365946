//! Any bytes as a plan file: opening returns, and what opens can be read, compared, written again and
//! run through every pass. Length and checksum are made to fit, so that the archive and its rules are reached.

#![no_main]

use libfuzzer_sys::fuzz_target;
use rote_plans::PlanFile;
use rote_aten_ops::AtenOps;
use rote_passes::{Selection, optimize};

#[path = "../../plans/tests/hostile/mod.rs"]
mod hostile;

fuzz_target!(|data: &[u8]| {
    drop(PlanFile::from_bytes(data));
    let mut sealed = data.to_vec();
    hostile::seal(&mut sealed);
    let Ok(file) = PlanFile::from_bytes(&sealed) else {
        return;
    };
    hostile::walk(&file);
    let plan = file.to_plan();
    let again = PlanFile::from_plan(&plan).expect("an opened plan is a valid plan");
    // Bytes, since plans with a NaN differ from themselves.
    let third = PlanFile::from_plan(&again.to_plan()).expect("as above");
    assert_eq!(again.as_bytes(), third.as_bytes());
    for passes in ["none", "default", "all"] {
        let passes = Selection::parse(passes).expect("these names are known");
        let (program, _) = optimize(plan.clone(), passes, &AtenOps);
        program.plan.check().expect("passes make valid plans");
    }
});

//! Any bytes as a plan file: opening returns, and what opens can be read, compared, written again and
//! run through every pass. Length and checksum are made to fit, so that the archive and its rules are reached.

#![no_main]

use libfuzzer_sys::fuzz_target;
use rote_plans::{Plan, PlanFile, describe, diff};
use rote_tracer::passes::{Selection, optimize};
use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

const HEADER_BYTES: usize = 64;

/// Makes length and checksum fit, by docs/plan-format.md.
fn seal(bytes: &mut [u8]) {
    if bytes.len() < HEADER_BYTES {
        return;
    }
    let (head, payload) = bytes.split_at_mut(HEADER_BYTES);
    head[16..24].copy_from_slice(&(payload.len() as u64).to_le_bytes());
    head[24..32].fill(0);
    let sum = xxh3_64_with_seed(payload, xxh3_64(head));
    head[24..32].copy_from_slice(&sum.to_le_bytes());
}

fuzz_target!(|data: &[u8]| {
    drop(PlanFile::from_bytes(data));
    let mut sealed = data.to_vec();
    seal(&mut sealed);
    let Ok(file) = PlanFile::from_bytes(&sealed) else {
        return;
    };
    let archived = file.plan();
    let text = [
        describe::summary(archived).to_string(),
        describe::ops(archived).to_string(),
        describe::strategies(archived).to_string(),
        describe::json(archived).to_string(),
    ];
    assert!(text.iter().all(|text| !text.contains('\u{1b}')));
    assert!(diff::diff(archived, archived).is_empty());
    let plan = file.to_plan();
    let again = PlanFile::from_plan(&plan).expect("an opened plan is a valid plan");
    assert_eq!(again.to_plan(), plan);
    for passes in ["none", "default", "all"] {
        let passes = Selection::parse(passes).expect("these names are known");
        let (program, _) = optimize(Plan::clone(&plan), passes);
        program.plan.check().expect("passes make valid plans");
    }
});

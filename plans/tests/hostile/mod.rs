//! What a plan file from anywhere goes through, in tests and under a fuzzer.

use rote_plans::{PlanFile, describe, diff};
use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

/// Bytes before the archive, by docs/plan-format.md.
pub const HEADER_BYTES: usize = 64;

/// Makes length and checksum fit, by docs/plan-format.md.
pub fn seal(bytes: &mut [u8]) {
    if bytes.len() < HEADER_BYTES {
        return;
    }
    let (head, payload) = bytes.split_at_mut(HEADER_BYTES);
    head[16..24].copy_from_slice(&(payload.len() as u64).to_le_bytes());
    head[24..32].fill(0);
    let sum = xxh3_64_with_seed(payload, xxh3_64(head));
    head[24..32].copy_from_slice(&sum.to_le_bytes());
}

/// What readers of an opened plan do, without any check of their own.
pub fn walk(file: &PlanFile) {
    file.to_plan()
        .check()
        .expect("an opened plan is a valid plan");
    let plan = file.plan();
    let text = [
        describe::summary(plan).to_string(),
        describe::ops(plan).to_string(),
        describe::strategies(plan).to_string(),
        describe::json(plan).to_string(),
    ];
    assert!(text.iter().all(|t| !t.contains('\u{1b}')));
    assert!(diff::diff(plan, plan).is_empty());
}

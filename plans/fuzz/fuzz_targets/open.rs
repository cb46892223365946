//! Opens whatever comes: `cargo +nightly fuzz run open` in `plans/`.
//!
//! Length and checksum are made to fit first, or no input would ever get past
//! them. A file that opens must be a valid plan all the way.

#![no_main]

use libfuzzer_sys::fuzz_target;
use rote_plans::{PlanFile, describe};
use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

fuzz_target!(|bytes: &[u8]| {
    let _ = PlanFile::from_bytes(bytes);
    let mut bytes = bytes.to_vec();
    if let Some((head, payload)) = bytes.split_first_chunk_mut::<64>() {
        head[16..24].copy_from_slice(&(payload.len() as u64).to_le_bytes());
        head[24..32].fill(0);
        let sum = xxh3_64_with_seed(payload, xxh3_64(head));
        head[24..32].copy_from_slice(&sum.to_le_bytes());
    }
    if let Ok(file) = PlanFile::from_bytes(&bytes) {
        file.to_plan().check().expect("an opened plan is a valid plan");
        let plan = file.plan();
        let _ = describe::summary(plan).to_string();
        let _ = describe::ops(plan).to_string();
        let _ = describe::strategies(plan).to_string();
        let _ = describe::json(plan).to_string();
    }
});

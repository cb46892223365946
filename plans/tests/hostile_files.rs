//! A plan file may come from anywhere: whatever its bytes, opening it returns,
//! and what opens can be walked. Most of these files carry a checksum that
//! fits, so that the archive and the rules between the tables are reached.

use proptest::prelude::*;
use rote_plans::PlanFile;

mod edits;
mod hostile;
mod sample;

use edits::{edit, edits};
use hostile::{HEADER_BYTES, seal, walk};

/// Random files of each kind.
const CASES: u32 = if cfg!(miri) { 2 } else { 2048 };
/// Of bits and of lengths, one in so many is tried.
const EVERY: usize = if cfg!(miri) { 3989 } else { 1 };

fn good() -> Vec<u8> {
    PlanFile::from_plan(&sample::small())
        .expect("valid")
        .as_bytes()
        .to_vec()
}

/// Opens a file, and walks all of it if it opens.
fn open(bytes: &[u8]) -> bool {
    let Ok(file) = PlanFile::from_bytes(bytes) else {
        return false;
    };
    walk(&file);
    true
}

#[test]
fn the_seal_is_the_one_of_the_format() {
    let mut bytes = good();
    let before = bytes.clone();
    seal(&mut bytes);
    assert_eq!(bytes, before);
    assert!(open(&bytes));
}

#[test]
fn every_truncation_is_refused() {
    let bytes = good();
    for len in (0..bytes.len()).step_by(EVERY.div_ceil(8)) {
        assert!(!open(&bytes[..len]), "{len} bytes");
        let mut sealed = bytes[..len].to_vec();
        seal(&mut sealed);
        open(&sealed);
    }
}

#[test]
fn every_flipped_bit_is_refused_unless_sealed_and_then_survived() {
    let mut bytes = good();
    let (mut opened, mut refused) = (0, 0);
    for bit in (0..bytes.len() * 8).step_by(EVERY) {
        bytes[bit / 8] ^= 1 << (bit % 8);
        assert!(!open(&bytes), "bit {bit}");
        let mut sealed = bytes.clone();
        seal(&mut sealed);
        match open(&sealed) {
            true => opened += 1,
            false => refused += 1,
        }
        bytes[bit / 8] ^= 1 << (bit % 8);
    }
    // Names, padding and most numbers may change; what refers may not.
    assert!(
        opened > 1000 / EVERY && refused > 1000 / EVERY,
        "{opened} opened, {refused} refused"
    );
}

proptest! {
    #![proptest_config(ProptestConfig { cases: CASES, ..ProptestConfig::default() })]

    #[test]
    fn edited_files_are_survived(edits in edits(11)) {
        let mut bytes = good();
        edit(&mut bytes, &edits);
        open(&bytes);
        seal(&mut bytes);
        open(&bytes);
    }

    #[test]
    fn random_bytes_are_survived(mut bytes in prop::collection::vec(any::<u8>(), 0..2048)) {
        prop_assert!(!open(&bytes));
        let head = good();
        if bytes.len() >= HEADER_BYTES {
            bytes[..HEADER_BYTES].copy_from_slice(&head[..HEADER_BYTES]);
            seal(&mut bytes);
        }
        open(&bytes);
    }

    #[test]
    fn spliced_files_are_survived(from in any::<prop::sample::Index>(), to in any::<prop::sample::Index>(), len in 1..256_usize) {
        let mut bytes = good();
        let (from, to) = (from.index(bytes.len()), to.index(bytes.len()));
        let len = len.min(bytes.len() - from.max(to));
        bytes.copy_within(from..from + len, to);
        seal(&mut bytes);
        open(&bytes);
    }
}

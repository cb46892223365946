//! Random changes of a plan file, for tests.

use proptest::prelude::*;
use proptest::sample::Index;

/// A number, where it goes, and whether all four bytes of it do.
pub type Edit = (Index, u32, bool);

/// Up to `most` changes of a file: bytes or little-endian numbers put somewhere.
pub fn edits(most: usize) -> impl Strategy<Value = Vec<Edit>> {
    let number = prop_oneof![
        Just(0),
        Just(u32::MAX),
        Just(u32::MAX - 1),
        Just(1 << 31),
        0..64_u32,
        (0..64_u32).prop_map(|n| n.wrapping_neg()),
        any::<u32>(),
    ];
    prop::collection::vec((any::<Index>(), number, any::<bool>()), 1..=most)
}

/// Makes these changes.
pub fn edit(bytes: &mut [u8], edits: &[Edit]) {
    for (at, number, whole) in edits {
        if *whole {
            // Numbers of the archive are aligned to four bytes.
            let at = at.index(bytes.len() / 4) * 4;
            bytes[at..at + 4].copy_from_slice(&number.to_le_bytes());
        } else {
            let at = at.index(bytes.len());
            bytes[at] = *number as u8;
        }
    }
}

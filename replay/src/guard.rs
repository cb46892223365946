//! Guards: facts as flat arrays of words, compared one by one.

/// Where two arrays of facts first differ, a block of words at a time.
pub fn first_difference(expected: &[u64], found: &[u64]) -> Option<usize> {
    const BLOCK: usize = 16;
    let common = expected.len().min(found.len());
    let blocks = common / BLOCK * BLOCK;
    let differing = expected[..blocks]
        .chunks_exact(BLOCK)
        .zip(found[..blocks].chunks_exact(BLOCK))
        .position(|(a, b)| a.iter().zip(b).fold(0, |all, (x, y)| all | (x ^ y)) != 0);
    let start = differing.map_or(blocks, |block| block * BLOCK);
    (start..common)
        .find(|&i| expected[i] != found[i])
        .or_else(|| (expected.len() != found.len()).then_some(common))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_the_first_difference_at_any_place() {
        let expected: Vec<u64> = (0..100).collect();
        assert_eq!(first_difference(&expected, &expected), None);
        for at in 0..expected.len() {
            let mut found = expected.clone();
            found[at] ^= 1;
            if at + 7 < found.len() {
                found[at + 7] ^= 1;
            }
            assert_eq!(first_difference(&expected, &found), Some(at));
        }
    }

    #[test]
    fn a_missing_fact_differs_where_the_shorter_ends() {
        let expected: Vec<u64> = (0..40).collect();
        assert_eq!(first_difference(&expected, &expected[..33]), Some(33));
        assert_eq!(first_difference(&expected[..33], &expected), Some(33));
        assert_eq!(first_difference(&[], &[]), None);
    }

    #[test]
    fn differences_are_those_of_a_plain_search() {
        // Every length around a block, and every pair of places in it.
        for len in 0..36 {
            let expected: Vec<u64> = (0..len).map(|i| i * 0x9e37_79b9).collect();
            for at in 0..len as usize {
                let mut found = expected.clone();
                found[at] = found[at].wrapping_add(1 << 63);
                found[len as usize - 1] ^= 2;
                let plain = expected.iter().zip(&found).position(|(a, b)| a != b);
                assert_eq!(first_difference(&expected, &found), plain);
            }
        }
    }
}

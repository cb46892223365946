//! Guards: facts as flat arrays of words, compared one by one.

/// The words that a plan expects, with where each of them belongs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Expected {
    words: Vec<u64>,
}

impl Expected {
    /// What was found when the plan was recorded.
    pub fn new(words: Vec<u64>) -> Self {
        Expected { words }
    }

    /// The words.
    pub fn words(&self) -> &[u64] {
        &self.words
    }

    /// The first fact that does not hold. A different number of facts differs
    /// where the shorter array ends.
    pub fn difference(&self, found: &[u64]) -> Option<usize> {
        first_difference(&self.words, found)
    }

    /// Takes over a word that differs but means the same, so that the next
    /// comparison is quick.
    pub fn accept(&mut self, index: usize, word: u64) {
        self.words[index] = word;
    }
}

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

    #[test]
    fn an_accepted_word_no_longer_differs() {
        let mut expected = Expected::new(vec![1, 2, 3]);
        assert_eq!(expected.difference(&[1, 9, 8]), Some(1));
        expected.accept(1, 9);
        assert_eq!(expected.difference(&[1, 9, 8]), Some(2));
        assert_eq!(expected.words(), [1, 9, 3]);
    }
}

//! Ranks agree before they replay altered collectives.
//!
//! A recorded plan issues the collectives of eager, in eager's order. So a rank that
//! replays it can work beside ranks that run eagerly. Passes may merge collectives.
//! Such a plan works only beside ranks that replay a plan that fits.
//! So at every call of a function with such passes, the ranks first tell each other
//! one number: 0 for "I do not replay", else a token for the sequence of collectives
//! that the rank would issue.
//!
//! - If one number is 0, all ranks issue the recorded collectives.
//! - If the same numbers were told before, in this order of ranks, the earlier decision holds.
//! - If the numbers are new, the ranks exchange the sequences themselves, and each rank
//!   decides by [`fit`] whether they fit together.
//!
//! No rank can hang here that would not hang in eager:
//!
//! 1. Every call takes part, before it does anything else, in one exchange of
//!    tokens. The ranks see the same numbers. Whether sequences follow depends on
//!    these numbers and on those seen before, in this process group: by induction
//!    the same on every rank. So exchanges pair up, as long as all ranks of the
//!    job call such functions equally often and in one order.
//! 2. The decision is a pure function of what was exchanged: the same on all.
//! 3. If it is no, every rank issues the collectives of eager, replayed or not.
//! 4. If it is yes, every rank replays, and what they issue runs to its end, by
//!    the argument at [`fit`].
//!
//! Captured functions that a captured function calls take no part, and issue the
//! recorded collectives: a rank that replays the outer function does not make the
//! inner calls.

use std::sync::{Arc, Mutex, PoisonError};

use hashbrown::HashMap;
use rote_plans::sequence::{Sequence, fit};

use crate::executor::ReplayError;

/// How many decisions are kept. Then all are forgotten, on every rank at once.
const MAX_DECISIONS: usize = 4096;

/// The ranks of a process group, and how bytes get from one to all.
pub trait Ranks {
    /// A number that no other group of this process ever has. Ranks that are threads of one process have one each: a
    /// rank holds what was decided under its number while it waits for the others.
    fn number(&self) -> u64;
    /// Why bytes cannot be gathered in this group, if so, and what to do.
    fn why_silent(&self) -> Option<&'static str> {
        None
    }
    /// What every rank puts in, one after the other. All must put in equally
    /// many bytes.
    fn gather(&self, ours: &[u8]) -> Result<Vec<u8>, ReplayError>;
}

/// What a rank would issue.
#[derive(Clone, Debug)]
pub struct Offer {
    token: u64,
    bytes: Vec<u8>,
}

impl Offer {
    /// The offer to issue these collectives.
    pub fn new(sequence: &Sequence) -> Result<Self, ReplayError> {
        let (token, bytes) = sequence
            .to_bytes()
            .map_err(|error| ReplayError::Bind(format!("cannot write collectives: {error}")))?;
        Ok(Offer {
            token,
            bytes: bytes.to_vec(),
        })
    }
}

/// What the ranks decided about a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Decision {
    /// All replay, with altered collectives.
    Altered,
    /// All replay, but what they would issue does not fit together: each keeps
    /// to what was recorded.
    Unfit(Arc<str>),
    /// Some rank does not replay: each keeps to what was recorded.
    Missed,
}

/// Decisions of one process group, by the tokens of its ranks.
#[derive(Debug, Default)]
pub struct Decisions {
    known: HashMap<Vec<u64>, Decision>,
}

impl Decisions {
    /// Decides about a call, together with all ranks. Also says whether the
    /// ranks had to exchange their sequences.
    ///
    /// # Errors
    ///
    /// When the ranks cannot be reached.
    pub fn decide(
        &mut self,
        ranks: &impl Ranks,
        offer: Option<&Offer>,
    ) -> Result<(Decision, bool), ReplayError> {
        let tokens = words(ranks, offer.map_or(0, |offer| offer.token))?;
        let Some(offer) = offer.filter(|_| !tokens.contains(&0)) else {
            return Ok((Decision::Missed, false));
        };
        if let Some(decision) = self.known.get(&tokens) {
            return Ok((decision.clone(), false));
        }
        let decision = match compare(ranks, offer, &tokens)? {
            None => Decision::Altered,
            Some(misfit) => Decision::Unfit(misfit.into()),
        };
        if self.known.len() >= MAX_DECISIONS {
            self.known.clear();
        }
        self.known.insert(tokens, decision.clone());
        Ok((decision, true))
    }
}

/// One word of every rank.
fn words(ranks: &impl Ranks, ours: u64) -> Result<Vec<u64>, ReplayError> {
    let bytes = ranks.gather(&ours.to_le_bytes())?;
    let words = bytes.chunks_exact(8).map(|word| {
        let word = word.try_into().unwrap_or_default();
        u64::from_le_bytes(word)
    });
    Ok(words.collect())
}

/// Exchanges sequences: why they do not fit, if so.
fn compare(
    ranks: &impl Ranks,
    offer: &Offer,
    tokens: &[u64],
) -> Result<Option<String>, ReplayError> {
    let lengths = words(ranks, offer.bytes.len() as u64)?;
    let longest = lengths.iter().max().map_or(0, |longest| *longest as usize);
    let mut ours = offer.bytes.clone();
    ours.resize(longest, 0);
    let all = ranks.gather(&ours)?;
    let sequences: Result<Vec<Sequence>, _> = all
        .chunks_exact(longest.max(1))
        .zip(lengths)
        .zip(tokens)
        .enumerate()
        .map(|(rank, ((bytes, length), token))| {
            Sequence::from_bytes(rank, *token, &bytes[..length as usize])
        })
        .collect();
    Ok(sequences
        .and_then(|sequences| fit(&sequences))
        .err()
        .map(|misfit| misfit.to_string()))
}

/// The decisions of each process group that this process has agreed in, by the
/// number ([`Ranks::number`]). Of the process, not of a session: the ranks
/// may have several captured functions, and must remember the same.
static DECISIONS: Mutex<Option<HashMap<u64, Arc<Mutex<Decisions>>>>> = Mutex::new(None);

/// Decides about a call of this process. To be called without a lock that other threads
/// need ([`Frontend::unlocked`](crate::Frontend::unlocked)): another thread may hold the group's while it waits
/// for its ranks.
///
/// # Errors
///
/// When the ranks cannot be reached.
pub fn decide(ranks: &impl Ranks, offer: Option<&Offer>) -> Result<(Decision, bool), ReplayError> {
    let decisions = {
        let mut all = DECISIONS.lock().unwrap_or_else(PoisonError::into_inner);
        let group = all
            .get_or_insert_default()
            .entry(ranks.number())
            .or_default();
        Arc::clone(group)
    };
    let mut decisions = decisions.lock().unwrap_or_else(PoisonError::into_inner);
    decisions.decide(ranks, offer)
}

#[cfg(test)]
mod tests;

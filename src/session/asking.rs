//! Whether it pays to replay plans that check data: each check that fails ends a replay in vain.

use super::variants::IDLE_CALLS;

/// By how much replays that have ended in vain may outnumber the calls that were replayed.
const MOST_IN_VAIN: u32 = 64;

/// How many of these are forgiven when replays are tried again.
const FORGIVEN: u32 = 16;

/// A balance of the replays that check data.
#[derive(Debug)]
pub struct Asking {
    in_vain: u32,
    /// Up to which call no such plan is tried, and none recorded.
    paused_until: u64,
    /// For how many calls, the next time.
    pause: u64,
}

impl Asking {
    pub fn new() -> Self {
        Asking {
            in_vain: 0,
            paused_until: 0,
            pause: IDLE_CALLS,
        }
    }

    /// A call was replayed.
    pub fn replayed(&mut self) {
        self.in_vain = self.in_vain.saturating_sub(1);
    }

    /// A replay has ended at a check.
    pub fn ended_in_vain(&mut self) {
        self.in_vain += 1;
    }

    /// No plan was left for a call. Comes back: for how many calls no plan with checks is tried from now on, if too many
    /// replays have ended.
    pub fn pauses(&mut self, call: u64) -> Option<u64> {
        if self.in_vain < MOST_IN_VAIN {
            return None;
        }
        let pause = self.pause;
        self.in_vain = MOST_IN_VAIN - FORGIVEN;
        self.paused_until = call + pause;
        self.pause = pause.saturating_mul(2);
        Some(pause)
    }

    /// Whether no such plan is tried at a call.
    pub fn is_paused(&self, call: u64) -> bool {
        call < self.paused_until
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_balance_that_stays_low_pauses_nothing() {
        let mut asking = Asking::new();
        for call in 0..10_000 {
            asking.ended_in_vain();
            asking.replayed();
            assert_eq!(asking.pauses(call), None);
        }
        assert!(!asking.is_paused(10_000));
    }

    #[test]
    fn pauses_grow() {
        let mut asking = Asking::new();
        let mut pauses = Vec::new();
        for call in 0..10_000 {
            if !asking.is_paused(call) {
                asking.ended_in_vain();
                pauses.extend(asking.pauses(call));
            }
        }
        assert!(
            pauses.len() > 2 && pauses.windows(2).all(|two| two[1] == 2 * two[0]),
            "{pauses:?}"
        );
    }
}

//! Ranks as threads: whatever each offers at each call, all come to the same
//! decision, in as many exchanges.

use std::sync::{Barrier, Mutex};
use std::thread;

use rote_plans::instr::CollectiveKind;
use rote_plans::sequence::{Issued, Members, Sequence};
use rote_plans::{DType, ReduceOp};

use super::{Decision, Decisions, Offer, Ranks};
use crate::ReplayError;

/// Threads that exchange through one table.
struct Table {
    all: Barrier,
    words: Mutex<Vec<Vec<u8>>>,
}

struct Rank<'a> {
    rank: usize,
    table: &'a Table,
}

impl Ranks for Rank<'_> {
    fn number(&self) -> u64 {
        0
    }

    fn gather(&self, ours: &[u8]) -> Result<Vec<u8>, ReplayError> {
        self.table.words.lock().expect("the table")[self.rank] = ours.to_vec();
        self.table.all.wait();
        let words = self.table.words.lock().expect("the table").clone();
        self.table.all.wait();
        assert!(words.iter().all(|other| other.len() == ours.len()));
        Ok(words.concat())
    }
}

/// An offer of all-reduces of these sizes over all ranks.
fn offer(ranks: usize, sizes: &[u64]) -> Offer {
    let issued = |(at, &sent): (usize, &u64)| Issued {
        group: 0,
        kind: CollectiveKind::AllReduce,
        reduce: Some(ReduceOp::Sum),
        root: 0,
        dtype: DType::F32,
        sent,
        received: sent,
        to: Vec::new(),
        from: Vec::new(),
        parts: vec![(at as u32, sent)],
    };
    let sequence = Sequence {
        function: "train.py:step".into(),
        groups: vec![Members {
            name: "0".into(),
            ranks: (0..ranks as u32).collect(),
        }],
        issued: sizes.iter().enumerate().map(issued).collect(),
    };
    Offer::new(&sequence).expect("an offer")
}

/// What each rank of a job decides when it makes these calls. `calls[i][rank]`:
/// an index into the offers, or none.
fn job(ranks: usize, calls: &[Vec<Option<usize>>], offers: &[Offer]) -> Vec<Vec<(Decision, bool)>> {
    let table = Table {
        all: Barrier::new(ranks),
        words: Mutex::new(vec![Vec::new(); ranks]),
    };
    thread::scope(|scope| {
        let rank = |rank: usize| {
            let table = &table;
            scope.spawn(move || {
                let mut decisions = Decisions::default();
                let ranks = Rank { rank, table };
                let decide = |call: &Vec<Option<usize>>| {
                    let offer = call[rank].map(|i| &offers[i]);
                    decisions.decide(&ranks, offer).expect("threads answer")
                };
                calls.iter().map(decide).collect()
            })
        };
        let threads: Vec<_> = (0..ranks).map(rank).collect();
        let ended = threads.into_iter().map(|thread| thread.join());
        ended.map(|rank| rank.expect("a rank ends")).collect()
    })
}

#[test]
fn ranks_that_all_offer_the_same_exchange_it_once() {
    let offers = [offer(3, &[8, 16])];
    let calls = vec![vec![Some(0); 3]; 3];
    for decided in job(3, &calls, &offers) {
        let expected = [true, false, false].map(|exchanged| (Decision::Altered, exchanged));
        assert_eq!(decided, expected);
    }
}

#[test]
fn one_rank_without_an_offer_keeps_all_to_what_was_recorded() {
    let offers = [offer(2, &[8])];
    let calls = [vec![Some(0), None], vec![Some(0); 2], vec![None, None]];
    for decided in job(2, &calls, &offers) {
        assert_eq!(decided[0], (Decision::Missed, false));
        assert_eq!(decided[1], (Decision::Altered, true));
        assert_eq!(decided[2], (Decision::Missed, false));
    }
}

/// Three offers, of which two fit with themselves only and the third is longer
/// than both, in every mixture, in an order that repeats.
#[test]
fn all_ranks_decide_the_same_whatever_they_offer() {
    for ranks in [2, 3] {
        let offers = [
            offer(ranks, &[8, 16]),
            offer(ranks, &[24]),
            offer(ranks, &[1; 100]),
        ];
        let mut state = 12345_u64;
        let mut random = move |n: u64| {
            state = state
                .wrapping_mul(6364136223846793005)
                .wrapping_add(1442695040888963407);
            (state >> 33) % n
        };
        let calls: Vec<Vec<Option<usize>>> = (0..400)
            .map(|_| {
                let common = random(4);
                let one = |_| {
                    let pick = if random(3) == 0 { random(4) } else { common };
                    (pick > 0).then(|| pick as usize - 1)
                };
                (0..ranks).map(one).collect()
            })
            .collect();
        let decided = job(ranks, &calls, &offers);
        let mut seen = Vec::new();
        for (i, call) in calls.iter().enumerate() {
            let replays = call.iter().all(Option::is_some);
            let new = replays && !seen.contains(call);
            seen.extend(new.then(|| call.clone()));
            for rank in &decided {
                let (decision, exchanged) = &rank[i];
                assert_eq!(*exchanged, new, "call {i}: {call:?}");
                let expected = match decision {
                    Decision::Missed => !replays,
                    Decision::Altered => replays && call.iter().all(|o| *o == call[0]),
                    Decision::Unfit(_) => replays && call.iter().any(|o| *o != call[0]),
                };
                assert!(expected, "call {i}: {call:?} is {decision:?}");
            }
        }
        assert!(seen.len() > 8, "{} mixtures", seen.len());
    }
}

//! Ranks as threads, which exchange through a table.

use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::Duration;

use rote::replay::ReplayError;
use rote::replay::agreement::Ranks;

use super::fake::network::Network;

/// For how long a rank waits for others that have not ended: longer than anything takes here.
const PATIENCE: Duration = Duration::from_secs(60);

/// What the ranks have put in.
#[derive(Debug)]
struct Table {
    round: Mutex<Round>,
    full: Condvar,
}

#[derive(Debug, Default)]
struct Round {
    number: u64,
    given: Vec<Option<(&'static str, Vec<u8>)>>,
    last: Vec<(&'static str, Vec<u8>)>,
    /// Whether a rank has ended, so that nothing more is exchanged.
    ended: bool,
}

/// One rank of a job.
#[derive(Clone, Debug)]
pub struct Rank {
    pub rank: u32,
    pub ranks: u32,
    job: u64,
    table: Arc<Table>,
}

impl Rank {
    /// What every rank puts in, in their order. All must do the same: a rank that does something else, or does not
    /// come, is an error for all.
    fn exchange(&self, what: &'static str, ours: Vec<u8>) -> Result<Vec<Vec<u8>>, String> {
        let lock = || self.table.round.lock().map_err(|_| "a rank has panicked");
        let mut round = lock()?;
        let (number, length) = (round.number, ours.len());
        round.given[self.rank as usize] = Some((what, ours));
        if round.given.iter().all(Option::is_some) {
            round.last = round.given.iter_mut().filter_map(Option::take).collect();
            round.number += 1;
            self.table.full.notify_all();
        }
        let waits = |round: &mut Round| round.number == number && !round.ended;
        let waited = self.table.full.wait_timeout_while(round, PATIENCE, waits);
        let (round, _) = waited.map_err(|_| "a rank has panicked")?;
        let all = |what: &str, length: usize| {
            let mut last = round.last.iter();
            last.all(|(other, bytes)| *other == what && bytes.len() == length)
        };
        if round.number == number || !all(what, length) {
            return Err(format!(
                "rank {}: the ranks do not {what} together",
                self.rank
            ));
        }
        Ok(round.last.iter().map(|(_, bytes)| bytes.clone()).collect())
    }
}

/// Tells the others when a rank ends, whatever ends it.
struct Ending(Arc<Table>);

impl Drop for Ending {
    fn drop(&mut self) {
        if let Ok(mut round) = self.0.round.lock() {
            round.ended = true;
        }
        self.0.full.notify_all();
    }
}

impl Ranks for Rank {
    fn number(&self) -> u64 {
        self.job * 64 + u64::from(self.rank)
    }

    fn gather(&self, ours: &[u8]) -> Result<Vec<u8>, ReplayError> {
        let all = self
            .exchange("agree", ours.to_vec())
            .map_err(ReplayError::Bridge)?;
        Ok(all.concat())
    }
}

impl Network for Rank {
    fn sum(&self, ours: &[f32]) -> Result<Vec<f32>, String> {
        let bytes = ours
            .iter()
            .flat_map(|element| element.to_le_bytes())
            .collect();
        let mut sum = vec![0.0; ours.len()];
        for theirs in self.exchange("sum", bytes)? {
            for (sum, element) in sum.iter_mut().zip(theirs.chunks_exact(4)) {
                *sum += f32::from_le_bytes(element.try_into().map_err(|_| "half an element")?);
            }
        }
        Ok(sum)
    }
}

/// Runs `body` on every rank of a job, and gives what each returns. `job`: a number that no other job of this process
/// has, as decisions are kept by it.
pub fn job<T: Send>(job: u64, ranks: u32, body: impl Fn(Rank) -> T + Sync) -> Vec<T> {
    let round = Round {
        given: vec![None; ranks as usize],
        ..Round::default()
    };
    let table = Arc::new(Table {
        round: Mutex::new(round),
        full: Condvar::new(),
    });
    thread::scope(|scope| {
        let (body, table) = (&body, &table);
        let start = |rank| {
            let table = table.clone();
            let rank = Rank {
                rank,
                ranks,
                job,
                table,
            };
            scope.spawn(move || {
                let _ending = Ending(rank.table.clone());
                body(rank)
            })
        };
        let threads: Vec<_> = (0..ranks).map(start).collect();
        let ended = threads.into_iter().map(|thread| thread.join());
        ended.map(|ended| ended.expect("a rank ends")).collect()
    })
}

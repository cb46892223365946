//! Killing a writer at any moment leaves the old plan or the new one under the
//! name, and nothing torn.

use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rote_plans::{PlanFile, PlanStore};

mod sample;

/// Set for the process that writes until it is killed.
const WRITER: &str = "ROTE_TEST_WRITER_STORE";

/// Writes two plans of different sizes in turns, for ever, in a child process.
#[test]
fn writer() {
    let Some(directory) = std::env::var_os(WRITER) else {
        return;
    };
    let store = PlanStore::open(directory).expect("store");
    let (small, mut large) = (sample::small(), sample::large(500));
    large.fingerprint.rank = small.fingerprint.rank;
    loop {
        store.write("key", &small).expect("written");
        store.write("key", &large).expect("written");
    }
}

struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        // On unix this is SIGKILL to this very child.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_killed_writer_leaves_no_torn_plan() {
    let directory = tempfile::tempdir().expect("temporary directory");
    let store = PlanStore::open(directory.path()).expect("store");
    let path = store.path("key", 1).expect("a key");
    let (mut kills, mut sizes) = (0, std::collections::BTreeSet::new());
    for round in 0..20_u64 {
        let writer = Command::new(std::env::current_exe().expect("this test"))
            .args(["writer", "--exact", "--nocapture"])
            .env(WRITER, directory.path())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .map(Killed)
            .expect("started");
        let start = Instant::now();
        let lifetime = Duration::from_millis(20 + 7 * round);
        while start.elapsed() < lifetime || !path.exists() {
            if path.exists() {
                let file = PlanFile::open(&path).expect("whole while it is written");
                sizes.insert(file.as_bytes().len());
            }
            assert!(
                start.elapsed() < Duration::from_secs(60),
                "the writer never wrote"
            );
        }
        drop(writer);
        kills += 1;
        let file = PlanFile::open(&path).expect("whole after the kill");
        sizes.insert(file.as_bytes().len());
        assert!(file.to_plan() == sample::small() || file.plan().values.len() > 100);
    }
    assert_eq!(
        (kills, sizes.len()),
        (20, 2),
        "both plans were seen under the name"
    );
}

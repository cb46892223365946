//! The plan store: a directory with one subdirectory per guard key and one
//! file per rank in it, `KEY/rank0.rote`.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use crate::error::PlanError;
use crate::file::{PlanFile, io_error, sync_directory};
use crate::plan::Plan;

/// A directory of plans. Ranks are processes of their own and may write to one
/// store at the same time.
#[derive(Clone, Debug)]
pub struct PlanStore {
    directory: PathBuf,
}

impl PlanStore {
    /// The store in this directory, which is made when it does not exist.
    ///
    /// # Errors
    ///
    /// [`PlanError::Io`] when it cannot be made or is not a directory.
    pub fn open(directory: impl Into<PathBuf>) -> Result<Self, PlanError> {
        let directory = directory.into();
        fs::create_dir_all(&directory).map_err(|e| io_error("create", &directory, e))?;
        Ok(PlanStore { directory })
    }

    /// Where the store is.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// The file of one rank's plan for a guard key.
    ///
    /// # Errors
    ///
    /// [`PlanError::Key`] when the key is not 1 to 128 ASCII letters, digits,
    /// `-` and `_`.
    pub fn path(&self, key: &str, rank: u32) -> Result<PathBuf, PlanError> {
        if !is_key(key) {
            let key = key.escape_debug().take(200).collect();
            return Err(PlanError::Key { key });
        }
        Ok(self.directory.join(key).join(file_name(rank)))
    }

    /// Writes a plan under a guard key and its own rank, replacing what was
    /// there. Returns the file.
    ///
    /// # Errors
    ///
    /// [`PlanError::Key`] and those of [`Plan::write`].
    pub fn write(&self, key: &str, plan: &Plan) -> Result<PathBuf, PlanError> {
        let path = self.path(key, plan.fingerprint.rank)?;
        let file = PlanFile::from_plan(plan)?;
        let directory = self.directory.join(key);
        match fs::create_dir(&directory) {
            Ok(()) => sync_directory(&self.directory)
                .map_err(|e| io_error("write", &self.directory, e))?,
            Err(e) if e.kind() == ErrorKind::AlreadyExists => {}
            Err(e) => return Err(io_error("create", &directory, e)),
        }
        file.write(&path)?;
        Ok(path)
    }

    /// Opens one rank's plan for a guard key, `None` when there is none.
    ///
    /// # Errors
    ///
    /// [`PlanError::Key`] and those of [`PlanFile::open`].
    pub fn load(&self, key: &str, rank: u32) -> Result<Option<PlanFile>, PlanError> {
        match PlanFile::open(self.path(key, rank)?) {
            Ok(file) => Ok(Some(file)),
            Err(PlanError::Io { source, .. }) if source.kind() == ErrorKind::NotFound => Ok(None),
            Err(e) => Err(e),
        }
    }

    /// Every guard key of the store, sorted. Whatever else lies in the
    /// directory is passed over.
    ///
    /// # Errors
    ///
    /// [`PlanError::Io`] when the directory cannot be read.
    pub fn keys(&self) -> Result<Vec<String>, PlanError> {
        let failed = |e| io_error("read", &self.directory, e);
        let mut keys = Vec::new();
        for entry in fs::read_dir(&self.directory).map_err(failed)? {
            let name = entry.map_err(failed)?.file_name();
            if let Some(key) = name.to_str().filter(|name| is_key(name)) {
                if self.directory.join(key).is_dir() {
                    keys.push(key.to_owned());
                }
            }
        }
        keys.sort_unstable();
        Ok(keys)
    }

    /// One rank's plans, by guard key in order: each opened, or why not. Keys
    /// without a plan of this rank are passed over.
    ///
    /// # Errors
    ///
    /// [`PlanError::Io`] when the directory cannot be read.
    pub fn iter(
        &self,
        rank: u32,
    ) -> Result<impl Iterator<Item = (String, Result<PlanFile, PlanError>)>, PlanError> {
        Ok(self.keys()?.into_iter().filter_map(move |key| {
            let file = self.load(&key, rank).transpose()?;
            Some((key, file))
        }))
    }

    /// The plan files of every key and rank, in order of key and rank.
    ///
    /// # Errors
    ///
    /// [`PlanError::Io`] when a directory cannot be read.
    pub fn files(&self) -> Result<Vec<(String, u32, PathBuf)>, PlanError> {
        let mut files = Vec::new();
        for key in self.keys()? {
            for (rank, path) in Self::files_of_key(&self.directory.join(&key))? {
                files.push((key.clone(), rank, path));
            }
        }
        Ok(files)
    }

    /// The plan files in the directory of one key, in order of rank.
    ///
    /// # Errors
    ///
    /// [`PlanError::Io`] when the directory cannot be read.
    pub fn files_of_key(directory: &Path) -> Result<Vec<(u32, PathBuf)>, PlanError> {
        let failed = |e| io_error("read", directory, e);
        let mut files = Vec::new();
        for entry in fs::read_dir(directory).map_err(failed)? {
            let name = entry.map_err(failed)?.file_name();
            if let Some(rank) = name.to_str().and_then(rank_of) {
                files.push((rank, directory.join(name)));
            }
        }
        files.sort_unstable();
        Ok(files)
    }
}

fn file_name(rank: u32) -> String {
    format!("rank{rank}.rote")
}

/// The rank in a file's name, `None` for a name that is not a plan's.
fn rank_of(name: &str) -> Option<u32> {
    let rank = name
        .strip_prefix("rank")?
        .strip_suffix(".rote")?
        .parse()
        .ok()?;
    (file_name(rank) == name).then_some(rank)
}

fn is_key(name: &str) -> bool {
    let safe = |b: u8| b.is_ascii_alphanumeric() || b == b'-' || b == b'_';
    (1..=128).contains(&name.len()) && name.bytes().all(safe)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sample;

    #[test]
    #[cfg_attr(miri, ignore = "Miri maps no files")]
    fn a_store_finds_what_was_written_and_passes_over_strangers() {
        let directory = tempfile::tempdir().expect("temporary directory");
        let store = PlanStore::open(directory.path().join("plans")).expect("made");
        let plan = sample::small();
        assert!(store.load("0a1b", 1).expect("no error").is_none());
        let path = store.write("0a1b", &plan).expect("written");
        assert_eq!(path, directory.path().join("plans/0a1b/rank1.rote"));
        let file = store.load("0a1b", 1).expect("valid").expect("there");
        assert_eq!(file.to_plan(), plan);
        assert!(store.load("0a1b", 0).expect("no error").is_none());

        let at = |name: &str| store.directory().join(name);
        fs::write(at("README"), "a file").expect("written");
        fs::create_dir(at(".hidden")).expect("made");
        fs::create_dir(at("empty")).expect("made");
        fs::create_dir(at("bad")).expect("made");
        fs::write(at("bad/rank1.rote"), "not a plan at all").expect("written");
        fs::write(at("bad/rank01.rote"), "another name").expect("written");
        fs::write(at("bad/.rank1.rote.1.0.tmp"), "cut off").expect("written");
        let found: Vec<_> = store.iter(1).expect("listed").collect();
        assert_eq!(
            found.iter().map(|f| f.0.as_str()).collect::<Vec<_>>(),
            ["0a1b", "bad"]
        );
        assert!(found[0].1.is_ok());
        assert!(matches!(found[1].1, Err(PlanError::TooShort { found: 17 })));
        assert_eq!(store.iter(0).expect("listed").count(), 0);
        let files = store.files().expect("listed");
        assert_eq!(
            files
                .iter()
                .map(|f| (f.0.as_str(), f.1))
                .collect::<Vec<_>>(),
            [("0a1b", 1), ("bad", 1)]
        );
    }

    #[test]
    fn a_key_is_a_name_and_nothing_else() {
        let directory = tempfile::tempdir().expect("temporary directory");
        let store = PlanStore::open(directory.path()).expect("made");
        let long = "a".repeat(129);
        for key in [
            "",
            ".",
            "..",
            "a/b",
            "../up",
            "a\0b",
            "caf\u{e9}",
            "a b",
            long.as_str(),
        ] {
            assert!(
                matches!(store.path(key, 0), Err(PlanError::Key { .. })),
                "{key:?}"
            );
            assert!(
                matches!(store.load(key, 0), Err(PlanError::Key { .. })),
                "{key:?}"
            );
            assert!(store.write(key, &sample::small()).is_err(), "{key:?}");
        }
        assert_eq!(
            store.path("a\n", 0).expect_err("a line break").to_string(),
            "guard key \"a\\n\" is not a name of 1 to 128 letters, digits, `-` and `_`"
        );
        assert_eq!(fs::read_dir(directory.path()).expect("listed").count(), 0);
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri maps no files")]
    fn ranks_write_at_the_same_time() {
        let directory = tempfile::tempdir().expect("temporary directory");
        let store = PlanStore::open(directory.path()).expect("made");
        std::thread::scope(|scope| {
            for rank in 0..4_u32 {
                let store = &store;
                scope.spawn(move || {
                    let mut plan = sample::small();
                    // Two threads for each rank, as two jobs on one store.
                    plan.fingerprint.rank = rank / 2;
                    for _ in 0..20 {
                        store.write("key", &plan).expect("written");
                        store.load("key", rank / 2).expect("valid").expect("there");
                    }
                });
            }
        });
        assert_eq!(store.files().expect("listed").len(), 2);
        assert_eq!(
            fs::read_dir(directory.path().join("key"))
                .expect("listed")
                .count(),
            2
        );
    }
}

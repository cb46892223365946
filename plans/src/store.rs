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
            let directory = self.directory.join(&key);
            let failed = |e| io_error("read", &directory, e);
            for entry in fs::read_dir(&directory).map_err(failed)? {
                let name = entry.map_err(failed)?.file_name();
                if let Some(rank) = name.to_str().and_then(rank_of) {
                    files.push((key.clone(), rank, directory.join(name)));
                }
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

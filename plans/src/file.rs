//! Plan files: written whole or not at all, opened without copying.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use memmap2::Mmap;
use rkyv::rancor;
use rkyv::util::AlignedVec;

use crate::check::check;
use crate::error::PlanError;
use crate::header::{HEADER_BYTES, Header, mesh_fields, versions_hash};
use crate::plan::{ArchivedFingerprint, ArchivedPlan, Fingerprint, Plan};

/// The bytes of a plan file, aligned as a mapped file is.
type FileBytes = AlignedVec<HEADER_BYTES>;

impl Plan {
    /// Checks the plan by the rules that [`PlanFile::open`] applies.
    ///
    /// # Errors
    ///
    /// [`PlanError::Invalid`] with the first rule that it breaks.
    pub fn check(&self) -> Result<(), PlanError> {
        PlanFile::from_plan(self).map(drop)
    }

    /// Writes the plan to `path`, whole or not at all: to a temporary name in
    /// the same directory, synced, then renamed. Whoever reads `path` sees the
    /// old file or the new one, also when this process dies midway.
    ///
    /// # Errors
    ///
    /// [`PlanError::Invalid`] when the plan breaks a rule, [`PlanError::Io`]
    /// when the system refuses; then nothing is left behind.
    pub fn write(&self, path: impl AsRef<Path>) -> Result<(), PlanError> {
        PlanFile::from_plan(self)?.write(path)
    }

    /// The plan as the bytes of a file, not yet checked.
    pub(crate) fn archive(&self) -> Result<FileBytes, PlanError> {
        let mut start = FileBytes::with_capacity(4096);
        start.extend_from_slice(&[0; HEADER_BYTES]);
        let mut bytes =
            rkyv::api::high::to_bytes_in::<_, rancor::Error>(self, start).map_err(|e| {
                PlanError::Serialize {
                    detail: e.to_string(),
                }
            })?;
        let mesh = match self.meshes.first() {
            Some(mesh) => self.dims.get(mesh.shape.indices()).unwrap_or_default(),
            None => &[],
        };
        let (head, payload) = bytes.split_at_mut(HEADER_BYTES);
        head.copy_from_slice(&Header::new(&self.fingerprint, mesh, payload).encode());
        Ok(bytes)
    }
}

/// A plan file, opened and checked: every id, range and alias in
/// [`PlanFile::plan`] holds.
#[derive(Debug)]
pub struct PlanFile {
    bytes: Bytes,
    header: Header,
}

#[derive(Debug)]
enum Bytes {
    Mapped(Mmap),
    Memory(FileBytes),
}

impl Bytes {
    fn file(&self) -> &[u8] {
        match self {
            Bytes::Mapped(map) => map,
            Bytes::Memory(bytes) => bytes,
        }
    }
}

impl PlanFile {
    /// Maps a plan file and checks it: header, checksum, archive, and every
    /// rule of [`crate::check`]. Nothing is copied and no memory is allocated
    /// in proportion to the file.
    ///
    /// The file must not be changed in place while it is open. Plans never
    /// are: [`Plan::write`] replaces the name, and the mapping keeps the old
    /// file.
    ///
    /// # Errors
    ///
    /// One of [`PlanError`]'s variants for whatever is wrong with the file.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, PlanError> {
        let path = path.as_ref();
        let failed = |source| io_error("open", path, source);
        // Asked before opening: opening a pipe would wait for its other end.
        if !fs::metadata(path).map_err(failed)?.is_file() {
            return Err(PlanError::NotAFile { path: path.into() });
        }
        let file = File::open(path).map_err(failed)?;
        let found = file.metadata().map_err(failed)?.len();
        if found < HEADER_BYTES as u64 {
            return Err(PlanError::TooShort { found });
        }
        // SAFETY: the mapping is read-only and private to this value. Plan
        // files are replaced by renaming and never changed in place, which the
        // documentation above asks of everyone else.
        let map = unsafe { Mmap::map(&file) }.map_err(failed)?;
        Self::checked(Bytes::Mapped(map))
    }

    /// Opens a plan and makes sure that it was recorded in a process like this
    /// one.
    ///
    /// # Errors
    ///
    /// Those of [`PlanFile::open`] and of [`PlanFile::expect`].
    pub fn open_for(path: impl AsRef<Path>, process: &Fingerprint) -> Result<Self, PlanError> {
        let file = Self::open(path)?;
        file.expect(process)?;
        Ok(file)
    }

    /// A plan file held in memory, from a copy of its bytes.
    ///
    /// # Errors
    ///
    /// As [`PlanFile::open`].
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, PlanError> {
        let mut copy = FileBytes::with_capacity(bytes.len());
        copy.extend_from_slice(bytes);
        Self::checked(Bytes::Memory(copy))
    }

    /// A plan file held in memory, made of a plan and checked like any other.
    ///
    /// # Errors
    ///
    /// [`PlanError::Invalid`] when the plan breaks a rule.
    pub fn from_plan(plan: &Plan) -> Result<Self, PlanError> {
        Self::checked(Bytes::Memory(plan.archive()?))
    }

    fn checked(bytes: Bytes) -> Result<Self, PlanError> {
        let header = Header::decode(bytes.file())?;
        let payload = &bytes.file()[HEADER_BYTES..];
        let plan = rkyv::access::<ArchivedPlan, rancor::Error>(payload).map_err(|e| {
            PlanError::Archive {
                detail: e.to_string().replace('\n', ", "),
            }
        })?;
        check(plan, payload.len() as u64)?;
        same_as_archive(&header, plan)?;
        Ok(PlanFile { bytes, header })
    }

    /// The plan, in place.
    pub fn plan(&self) -> &ArchivedPlan {
        let payload = &self.bytes.file()[HEADER_BYTES..];
        // SAFETY: `checked` ran `rkyv::access` over these very bytes, at this
        // address (a mapping and a heap buffer both stay where they are when
        // the value moves), and nothing changes them afterwards.
        unsafe { rkyv::access_unchecked::<ArchivedPlan>(payload) }
    }

    /// The plan as an owned value, for tools and passes.
    pub fn to_plan(&self) -> Plan {
        match rkyv::deserialize::<Plan, rancor::Error>(self.plan()) {
            Ok(plan) => plan,
            Err(e) => unreachable!("plain tables always deserialize: {e}"),
        }
    }

    /// The file's header.
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// The whole file, header included.
    pub fn as_bytes(&self) -> &[u8] {
        self.bytes.file()
    }

    /// Makes sure that the plan was recorded in a process like this one.
    ///
    /// # Errors
    ///
    /// The first difference, naming both sides.
    pub fn expect(&self, process: &Fingerprint) -> Result<(), PlanError> {
        let Fingerprint {
            rote,
            framework,
            world_size,
            rank,
        } = process;
        let plan = &self.plan().fingerprint;
        if plan.world_size != *world_size {
            return Err(PlanError::WorldSize {
                plan: plan.world_size.to_native(),
                process: *world_size,
            });
        }
        if plan.rank != *rank {
            return Err(PlanError::Rank {
                plan: plan.rank.to_native(),
                process: *rank,
            });
        }
        if plan.framework != *framework {
            return Err(PlanError::Framework {
                plan: plan.framework.to_string(),
                process: framework.clone(),
            });
        }
        if plan.rote != *rote {
            return Err(PlanError::Rote {
                plan: plan.rote.to_string(),
                process: rote.clone(),
            });
        }
        Ok(())
    }

    /// Makes sure that the plan's first mesh has this shape (ranks per dim);
    /// an empty shape stands for no mesh.
    ///
    /// # Errors
    ///
    /// [`PlanError::Mesh`], naming both sides.
    pub fn expect_mesh(&self, process: &[i64]) -> Result<(), PlanError> {
        let shape = first_mesh(self.plan());
        if shape.clone().eq(process.iter().copied()) {
            return Ok(());
        }
        Err(PlanError::Mesh {
            plan: shape.collect(),
            process: process.to_vec(),
        })
    }

    /// Writes the file to `path`, as [`Plan::write`] does.
    ///
    /// # Errors
    ///
    /// [`PlanError::Io`] when the system refuses.
    pub fn write(&self, path: impl AsRef<Path>) -> Result<(), PlanError> {
        replace(path.as_ref(), self.as_bytes())
    }
}

/// Ranks per dim of the plan's first mesh. The plan has been checked.
fn first_mesh(plan: &ArchivedPlan) -> impl ExactSizeIterator<Item = i64> + Clone + '_ {
    let shape = match plan.meshes.first() {
        Some(mesh) => &plan.dims[mesh.shape.indices()],
        None => &[],
    };
    shape.iter().map(|ranks| ranks.to_native())
}

/// Makes sure that what the header repeats is what the archive says.
fn same_as_archive(header: &Header, plan: &ArchivedPlan) -> Result<(), PlanError> {
    let ArchivedFingerprint {
        rote,
        framework,
        world_size,
        rank,
    } = &plan.fingerprint;
    let (mesh_dims, mesh_shape) = mesh_fields(first_mesh(plan));
    let differs = |field, header: &dyn ToString, archive: &dyn ToString| {
        Err(PlanError::Header {
            field,
            header: header.to_string(),
            archive: archive.to_string(),
        })
    };
    if header.world_size != *world_size {
        return differs("world size", &header.world_size, world_size);
    }
    if header.rank != *rank {
        return differs("rank", &header.rank, rank);
    }
    let versions = versions_hash(rote, framework);
    if header.fingerprint != versions {
        return differs(
            "versions with hash",
            &format!("{:#018x}", header.fingerprint),
            &format!("{versions:#018x}"),
        );
    }
    if (header.mesh_dims, header.mesh_shape) != (mesh_dims, mesh_shape) {
        return differs(
            "mesh shape",
            &format!("{:?} of {} dims", header.mesh_shape, header.mesh_dims),
            &format!("{mesh_shape:?} of {mesh_dims} dims"),
        );
    }
    Ok(())
}

/// Puts `bytes` under `path` by way of a temporary name in the same directory.
fn replace(path: &Path, bytes: &[u8]) -> Result<(), PlanError> {
    let directory = match path.parent() {
        Some(parent) if parent != Path::new("") => parent,
        _ => Path::new("."),
    };
    let (temporary, mut file) = create_temporary(path)?;
    let written = file
        .write_all(bytes)
        .and_then(|()| file.sync_all())
        .and_then(|()| fs::rename(&temporary, path))
        .and_then(|()| sync_directory(directory));
    written.map_err(|source| {
        // Best effort: the name may have been taken over by `path` already.
        let _ = fs::remove_file(&temporary);
        io_error("write", path, source)
    })
}

/// A new file beside `path` that no other process or thread writes to.
fn create_temporary(path: &Path) -> Result<(PathBuf, File), PlanError> {
    static COUNTER: AtomicU32 = AtomicU32::new(0);
    let Some(name) = path.file_name() else {
        return Err(PlanError::NotAFile { path: path.into() });
    };
    loop {
        let number = COUNTER.fetch_add(1, Ordering::Relaxed);
        let mut temporary = std::ffi::OsString::from(".");
        temporary.push(name);
        temporary.push(format!(".{}.{number}.tmp", std::process::id()));
        let temporary = path.with_file_name(temporary);
        match File::create_new(&temporary) {
            Ok(file) => return Ok((temporary, file)),
            // Left behind by a process of the same id that was killed.
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
            Err(e) => return Err(io_error("create", &temporary, e)),
        }
    }
}

/// Makes renames and new entries in a directory survive a power cut.
pub(crate) fn sync_directory(directory: &Path) -> io::Result<()> {
    File::open(directory)?.sync_all()
}

pub(crate) fn io_error(action: &'static str, path: &Path, source: io::Error) -> PlanError {
    PlanError::Io {
        action,
        path: path.into(),
        source,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(world_size: u32, rank: u32) -> Plan {
        Plan {
            fingerprint: Fingerprint {
                rote: "0.1.0".into(),
                framework: "torch 2.15.0".into(),
                world_size,
                rank,
            },
            function: "train.py:train_step".into(),
            ..Plan::default()
        }
    }

    #[test]
    fn a_written_plan_opens_as_it_was() {
        let directory = tempfile::tempdir().expect("temporary directory");
        let path = directory.path().join("plan.rote");
        let plan = plan(8, 3);
        plan.write(&path).expect("written");
        let file = PlanFile::open_for(&path, &plan.fingerprint).expect("opened");
        assert_eq!(file.to_plan(), plan);
        assert_eq!(
            std::fs::read_dir(directory.path()).expect("listed").count(),
            1
        );
    }
}

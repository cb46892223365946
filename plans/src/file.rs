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
    use crate::header::checksum;
    use crate::sample;

    fn opened(bytes: &[u8]) -> String {
        match PlanFile::from_bytes(bytes) {
            Ok(_) => "opened".into(),
            Err(e) => e.to_string(),
        }
    }

    fn bytes_of(plan: &Plan) -> Vec<u8> {
        plan.archive().expect("archived").to_vec()
    }

    /// Makes a changed file pass the checksum again.
    fn seal(bytes: &mut [u8]) {
        let (head, payload) = bytes
            .split_first_chunk_mut::<HEADER_BYTES>()
            .expect("header");
        let sum = checksum(head, payload);
        head[24..32].copy_from_slice(&sum.to_le_bytes());
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri maps no files")]
    fn a_written_plan_opens_as_it_was() {
        let directory = tempfile::tempdir().expect("temporary directory");
        let path = directory.path().join("plan.rote");
        for plan in [sample::small(), sample::large(1000)] {
            plan.write(&path).expect("written");
            let file = PlanFile::open_for(&path, &plan.fingerprint).expect("opened");
            assert_eq!(file.to_plan(), plan);
            assert_eq!(file.as_bytes(), std::fs::read(&path).expect("read"));
            assert_eq!(
                std::fs::read_dir(directory.path()).expect("listed").count(),
                1
            );
        }
    }

    #[test]
    fn an_invalid_plan_is_not_written() {
        let directory = tempfile::tempdir().expect("temporary directory");
        let mut plan = sample::small();
        plan.values[0].root = 99;
        let error = plan
            .write(directory.path().join("plan.rote"))
            .expect_err("invalid");
        assert!(matches!(error, PlanError::Invalid(_)), "{error}");
        assert_eq!(
            std::fs::read_dir(directory.path()).expect("listed").count(),
            0
        );
    }

    #[test]
    fn each_way_a_file_can_be_wrong_has_its_message() {
        let good = bytes_of(&sample::small());
        assert_eq!(opened(&good), "opened");
        let changed = |at: usize, to: &[u8]| {
            let mut bytes = good.clone();
            bytes[at..at + to.len()].copy_from_slice(to);
            seal(&mut bytes);
            opened(&bytes)
        };
        assert_eq!(
            opened(&good[..63]),
            "file has 63 bytes, a plan has at least 64"
        );
        assert_eq!(opened(&[]), "file has 0 bytes, a plan has at least 64");
        assert_eq!(
            changed(0, b"\x7fELF\x02\x01\x01\0"),
            r#"file starts with "\x7fELF\x02\x01\x01\x00", a plan starts with "ROTEPLAN""#
        );
        assert_eq!(
            changed(8, &[8, 1]),
            "plan has format version 264, this rote reads version 9"
        );
        assert_eq!(
            changed(10, &[2]),
            "plan is big-endian, this rote reads little-endian plans"
        );
        assert_eq!(
            changed(10, &[9]),
            "plan is of unknown byte order 9, this rote reads little-endian plans"
        );
        assert_eq!(
            changed(11, &[0x12]),
            "plan has archive layout 0x12, this rote reads layout 0x14"
        );
        let payload = good.len() - HEADER_BYTES;
        assert_eq!(
            opened(&good[..good.len() - 1]),
            format!(
                "header says {payload} bytes follow it, the file has {}",
                payload - 1
            )
        );
        let mut flipped = good.clone();
        flipped[100] ^= 1;
        assert!(
            opened(&flipped).starts_with("header says checksum 0x"),
            "{}",
            opened(&flipped)
        );
        let mut root = good.clone();
        root[good.len() - 400..].fill(0xff);
        seal(&mut root);
        assert!(
            opened(&root).starts_with("archive is not valid: "),
            "{}",
            opened(&root)
        );
        assert_eq!(changed(12, &[0]), "header says rank 0, the archive says 1");
        assert_eq!(
            changed(40, &[3]),
            "header says world size 3, the archive says 2"
        );
        let versions = changed(32, &[0; 8]);
        assert!(
            versions.starts_with("header says versions with hash 0x0000"),
            "{versions}"
        );
        assert_eq!(
            changed(48, &[4]),
            "header says mesh shape [4, 0, 0, 0, 0, 0, 0, 0] of 1 dims, \
             the archive says [2, 0, 0, 0, 0, 0, 0, 0] of 1 dims"
        );
        let mut invalid = sample::small();
        invalid.values[0].root = 99;
        assert_eq!(
            opened(&bytes_of(&invalid)),
            "plan is not valid: values[0].root is 99, but values has 7 entries"
        );
    }

    #[test]
    fn a_plan_of_another_process_is_refused_with_both_sides() {
        let plan = sample::small();
        let file = PlanFile::from_plan(&plan).expect("valid");
        let here = &plan.fingerprint;
        assert!(file.expect(here).is_ok());
        let says = |process: Fingerprint| file.expect(&process).expect_err("refused").to_string();
        assert_eq!(
            says(Fingerprint {
                world_size: 4,
                ..here.clone()
            }),
            "plan was recorded for world size 2, this process has 4"
        );
        assert_eq!(
            says(Fingerprint {
                rank: 0,
                ..here.clone()
            }),
            "plan was recorded on rank 1, this process is rank 0"
        );
        assert_eq!(
            says(Fingerprint {
                framework: "torch 2.16.0".into(),
                ..here.clone()
            }),
            "plan was recorded with torch 2.15.0, this process runs torch 2.16.0"
        );
        assert_eq!(
            says(Fingerprint {
                rote: "0.2.0".into(),
                ..here.clone()
            }),
            "plan was recorded by rote 0.1.0, this process runs rote 0.2.0"
        );
    }

    #[test]
    fn what_is_not_a_file_is_not_opened() {
        let directory = tempfile::tempdir().expect("temporary directory");
        let error = PlanFile::open(directory.path())
            .expect_err("a directory")
            .to_string();
        assert!(error.ends_with("is not a regular file"), "{error}");
        let missing = directory.path().join("missing.rote");
        let error = PlanFile::open(&missing).expect_err("missing").to_string();
        assert!(
            error.starts_with(&format!("cannot open {}: ", missing.display())),
            "{error}"
        );
        let error = sample::small().write("/").expect_err("no name").to_string();
        assert_eq!(error, "/ is not a regular file");
        let nowhere = directory.path().join("no/such/plan.rote");
        let error = sample::small()
            .write(&nowhere)
            .expect_err("no directory")
            .to_string();
        assert!(error.starts_with("cannot create "), "{error}");
    }
}

//! Every way a plan file can be wrong, or wrong for this process.

use std::path::PathBuf;

use crate::check::Fault;

/// Why a plan could not be written, opened or used here.
#[derive(Debug, thiserror::Error)]
pub enum PlanError {
    /// The operating system refused.
    #[error("cannot {action} {path}: {source}", path = path.display())]
    Io {
        /// What was tried: `open`, `write`, ...
        action: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A directory, pipe or device where a plan should be.
    #[error("{path} is not a regular file", path = path.display())]
    NotAFile {
        /// What is not a file.
        path: PathBuf,
    },
    /// Fewer bytes than a header.
    #[error("file has {found} bytes, a plan has at least 64")]
    TooShort {
        /// Bytes in the file.
        found: u64,
    },
    /// Not a plan at all.
    #[error("file starts with \"{found}\", a plan starts with \"ROTEPLAN\"")]
    Magic {
        /// The first eight bytes, escaped.
        found: String,
    },
    /// Written by another version of the format.
    #[error("plan has format version {found}, this rote reads version {expected}")]
    Format {
        /// The file's version.
        found: u16,
        /// This build's version.
        expected: u16,
    },
    /// Written with the other byte order.
    #[error("plan is {found}, this rote reads {expected} plans")]
    Endianness {
        /// The file's byte order.
        found: String,
        /// This build's byte order.
        expected: String,
    },
    /// Written by a build with other rkyv features.
    #[error("plan has archive layout {found:#04x}, this rote reads layout {expected:#04x}")]
    Layout {
        /// The file's layout flags.
        found: u8,
        /// This build's layout flags.
        expected: u8,
    },
    /// Truncated, or followed by something else.
    #[error("header says {header} bytes follow it, the file has {found}")]
    Length {
        /// Payload bytes by the header.
        header: u64,
        /// Payload bytes in the file.
        found: u64,
    },
    /// Some bytes are not those that were written.
    #[error("header says checksum {header:#018x}, the bytes have {computed:#018x}")]
    Checksum {
        /// The header's checksum.
        header: u64,
        /// The checksum of the bytes found.
        computed: u64,
    },
    /// The archive is not valid as an archive.
    #[error("archive is not valid: {detail}")]
    Archive {
        /// What bytecheck found.
        detail: String,
    },
    /// Header and archive contradict each other.
    #[error("header says {field} {header}, the archive says {archive}")]
    Header {
        /// Which field.
        field: &'static str,
        /// The header's side.
        header: String,
        /// The archive's side.
        archive: String,
    },
    /// A table of the plan contradicts another.
    #[error("plan is not valid: {0}")]
    Invalid(#[from] Fault),
    /// The plan cannot be archived, for example because it is over 2 GiB.
    #[error("plan cannot be archived: {detail}")]
    Serialize {
        /// What rkyv found.
        detail: String,
    },
    /// Recorded by another version of Rote.
    #[error("plan was recorded by rote {plan}, this process runs rote {process}")]
    Rote {
        /// The plan's side.
        plan: String,
        /// This process's side.
        process: String,
    },
    /// Recorded with another framework or version of it.
    #[error("plan was recorded with {plan}, this process runs {process}")]
    Framework {
        /// The plan's side.
        plan: String,
        /// This process's side.
        process: String,
    },
    /// Recorded among another number of ranks.
    #[error("plan was recorded for world size {plan}, this process has {process}")]
    WorldSize {
        /// The plan's side.
        plan: u32,
        /// This process's side.
        process: u32,
    },
    /// Recorded on another rank.
    #[error("plan was recorded on rank {plan}, this process is rank {process}")]
    Rank {
        /// The plan's side.
        plan: u32,
        /// This process's side.
        process: u32,
    },
    /// A guard key that is not a safe directory name.
    #[error("guard key \"{key}\" is not a name of 1 to 128 letters, digits, `-` and `_`")]
    Key {
        /// The key, escaped.
        key: String,
    },
}

//! The 64 bytes in front of the archive (docs/plan-format.md).

use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

use crate::error::PlanError;
use crate::plan::Fingerprint;

/// Bytes of the header, and the alignment of the archive behind it.
pub const HEADER_BYTES: usize = 64;

/// The first eight bytes of every plan file.
pub const MAGIC: [u8; 8] = *b"ROTEPLAN";

/// The version of the format that this build writes and reads. It grows with
/// every change of an archived type.
pub const FORMAT_VERSION: u16 = 9;

/// Mesh dims that the header has room for; a mesh with more keeps the rest in
/// the archive only.
pub const HEADER_MESH_DIMS: usize = 8;

/// What the header says about the archive behind it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Version of the format.
    pub format: u16,
    /// Byte order of the archive: 1 little, 2 big.
    pub endianness: u8,
    /// Layout of the archive: bits 0 to 3 the bytes of a relative pointer,
    /// bit 4 set when primitives are aligned.
    pub layout: u8,
    /// The rank that recorded the plan.
    pub rank: u32,
    /// Bytes behind the header.
    pub payload_bytes: u64,
    /// XXH3 of the payload, seeded with XXH3 of the header's other bytes.
    pub checksum: u64,
    /// XXH3 of the versions of Rote and of the framework.
    pub fingerprint: u64,
    /// Ranks of the recording process group.
    pub world_size: u32,
    /// Dims of the plan's first mesh, 0 without a mesh.
    pub mesh_dims: u32,
    /// Ranks per dim of that mesh, at most 65535 (which then means "or more");
    /// 0 beyond `mesh_dims`.
    pub mesh_shape: [u16; HEADER_MESH_DIMS],
}

/// Byte order of archives in this build, in the header's terms.
pub const ENDIANNESS: u8 = {
    // SAFETY: `ArchivedU16` is a two-byte integer without padding or
    // uninitialised bytes, and every bit pattern is a valid `[u8; 2]`.
    let one: [u8; 2] = unsafe { std::mem::transmute(rkyv::primitive::ArchivedU16::from_native(1)) };
    if one[0] == 1 { 1 } else { 2 }
};

/// rkyv's layout in this build, in the header's terms.
pub const LAYOUT: u8 = {
    let pointer = size_of::<rkyv::primitive::ArchivedUsize>() as u8;
    let aligned = align_of::<rkyv::primitive::ArchivedU64>() > 1;
    pointer | (aligned as u8) << 4
};

impl Header {
    /// The header of an archive that this build wrote.
    pub(crate) fn new(fingerprint: &Fingerprint, mesh: &[i64], payload: &[u8]) -> Self {
        let Fingerprint {
            rote,
            framework,
            world_size,
            rank,
        } = fingerprint;
        let (mesh_dims, mesh_shape) = mesh_fields(mesh.iter().copied());
        let mut header = Header {
            format: FORMAT_VERSION,
            endianness: ENDIANNESS,
            layout: LAYOUT,
            rank: *rank,
            payload_bytes: payload.len() as u64,
            checksum: 0,
            fingerprint: versions_hash(rote, framework),
            world_size: *world_size,
            mesh_dims,
            mesh_shape,
        };
        header.checksum = checksum(&header.encode(), payload);
        header
    }

    /// The header as it stands in the file.
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let Header {
            format,
            endianness,
            layout,
            rank,
            payload_bytes,
            checksum,
            fingerprint,
            world_size,
            mesh_dims,
            mesh_shape,
        } = self;
        let mut bytes = [0; HEADER_BYTES];
        bytes[0..8].copy_from_slice(&MAGIC);
        bytes[8..10].copy_from_slice(&format.to_le_bytes());
        bytes[10] = *endianness;
        bytes[11] = *layout;
        bytes[12..16].copy_from_slice(&rank.to_le_bytes());
        bytes[16..24].copy_from_slice(&payload_bytes.to_le_bytes());
        bytes[24..32].copy_from_slice(&checksum.to_le_bytes());
        bytes[32..40].copy_from_slice(&fingerprint.to_le_bytes());
        bytes[40..44].copy_from_slice(&world_size.to_le_bytes());
        bytes[44..48].copy_from_slice(&mesh_dims.to_le_bytes());
        for (at, ranks) in mesh_shape.iter().enumerate() {
            bytes[48 + 2 * at..50 + 2 * at].copy_from_slice(&ranks.to_le_bytes());
        }
        bytes
    }

    /// Reads the header of a whole file and checks all that can be known
    /// without the archive: magic, version, layout, length and checksum.
    pub(crate) fn decode(file: &[u8]) -> Result<Self, PlanError> {
        let Some((bytes, payload)) = file.split_first_chunk::<HEADER_BYTES>() else {
            return Err(PlanError::TooShort {
                found: file.len() as u64,
            });
        };
        let magic = take(bytes, 0);
        if magic != MAGIC {
            return Err(PlanError::Magic {
                found: magic.escape_ascii().to_string(),
            });
        }
        let format = u16::from_le_bytes(take(bytes, 8));
        if format != FORMAT_VERSION {
            return Err(PlanError::Format {
                found: format,
                expected: FORMAT_VERSION,
            });
        }
        let header = Header {
            format,
            endianness: bytes[10],
            layout: bytes[11],
            rank: u32::from_le_bytes(take(bytes, 12)),
            payload_bytes: u64::from_le_bytes(take(bytes, 16)),
            checksum: u64::from_le_bytes(take(bytes, 24)),
            fingerprint: u64::from_le_bytes(take(bytes, 32)),
            world_size: u32::from_le_bytes(take(bytes, 40)),
            mesh_dims: u32::from_le_bytes(take(bytes, 44)),
            mesh_shape: std::array::from_fn(|at| u16::from_le_bytes(take(bytes, 48 + 2 * at))),
        };
        if header.endianness != ENDIANNESS {
            return Err(PlanError::Endianness {
                found: endianness_name(header.endianness),
                expected: endianness_name(ENDIANNESS),
            });
        }
        if header.layout != LAYOUT {
            return Err(PlanError::Layout {
                found: header.layout,
                expected: LAYOUT,
            });
        }
        if header.payload_bytes != payload.len() as u64 {
            return Err(PlanError::Length {
                header: header.payload_bytes,
                found: payload.len() as u64,
            });
        }
        let computed = checksum(bytes, payload);
        if header.checksum != computed {
            return Err(PlanError::Checksum {
                header: header.checksum,
                computed,
            });
        }
        Ok(header)
    }
}

/// The `N` bytes at `start`, both constants within the header.
fn take<const N: usize>(bytes: &[u8; HEADER_BYTES], start: usize) -> [u8; N] {
    std::array::from_fn(|at| bytes[start + at])
}

/// The checksum of a file: XXH3 of the payload, seeded with XXH3 of the header
/// without the checksum's own bytes, so that no bit of the file is left out.
pub(crate) fn checksum(header: &[u8; HEADER_BYTES], payload: &[u8]) -> u64 {
    let mut rest = *header;
    rest[24..32].fill(0);
    xxh3_64_with_seed(payload, xxh3_64(&rest))
}

/// The hash of the versions that a plan was recorded with.
pub(crate) fn versions_hash(rote: &str, framework: &str) -> u64 {
    xxh3_64_with_seed(framework.as_bytes(), xxh3_64(rote.as_bytes()))
}

/// A mesh shape as the header holds it.
pub(crate) fn mesh_fields(
    shape: impl ExactSizeIterator<Item = i64>,
) -> (u32, [u16; HEADER_MESH_DIMS]) {
    let dims = shape.len() as u32;
    let mut fields = [0; HEADER_MESH_DIMS];
    for (field, ranks) in fields.iter_mut().zip(shape) {
        *field = u16::try_from(ranks).unwrap_or(u16::MAX);
    }
    (dims, fields)
}

fn endianness_name(number: u8) -> String {
    match number {
        1 => "little-endian".into(),
        2 => "big-endian".into(),
        other => format!("of unknown byte order {other}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_header_reads_back_as_written() {
        let payload = b"not an archive, but enough for a header";
        let fingerprint = Fingerprint {
            rote: "0.1.0".into(),
            framework: "torch 2.15.0".into(),
            world_size: 8,
            rank: 5,
        };
        let header = Header::new(&fingerprint, &[2, 70_000], payload);
        let mut file = header.encode().to_vec();
        file.extend_from_slice(payload);
        assert_eq!(Header::decode(&file).expect("valid"), header);
        assert_eq!(
            (header.mesh_dims, header.mesh_shape[..3].to_vec()),
            (2, vec![2, 65535, 0])
        );
    }

    #[test]
    fn no_bit_of_the_file_escapes_the_header_checks() {
        let payload = b"payload";
        let header = Header::new(&Fingerprint::default(), &[4], payload);
        let mut file = header.encode().to_vec();
        file.extend_from_slice(payload);
        for bit in 0..file.len() * 8 {
            file[bit / 8] ^= 1 << (bit % 8);
            assert!(Header::decode(&file).is_err(), "bit {bit}");
            file[bit / 8] ^= 1 << (bit % 8);
        }
        assert!(Header::decode(&file).is_ok());
    }

    /// An archived type that changes without a new version would be read as
    /// something else than what was written.
    #[test]
    fn the_format_version_follows_the_layout() {
        let archive = crate::sample::small().archive().expect("archived");
        let hash = xxh3_64(&archive[HEADER_BYTES..]);
        assert_eq!(
            (FORMAT_VERSION, hash),
            (9, 4_194_416_289_338_547_136),
            "the archive of the sample plan has changed: if the data model did, raise \
             FORMAT_VERSION (and docs/plan-format.md), then put the new hash here"
        );
    }
}

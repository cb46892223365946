//! Layouts: which global index each local index of a shard stands for.
//!
//! Along one tensor dim a layout is a function from local to global index in
//! hierarchical shape:stride form (as in CuTe): `(2,4):(8,1)+4` holds two
//! blocks of four elements, eight apart, from element 4 on. Placements apply
//! from left to right, each to what the ones before it left, so nested, uneven
//! and strided sharding of one dim are the same arithmetic. An uneven strided
//! shard needs more than one such piece.

use std::fmt;

use super::placement::Placement;

/// The most blocks that a layout is written out for.
const MAX_BLOCKS: usize = 1 << 16;

/// One hierarchical piece: `count` blocks of `length` elements, `stride` apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Blocks {
    /// Global index of the first element.
    pub offset: u64,
    /// How many blocks.
    pub count: u64,
    /// Global distance from block to block.
    pub stride: u64,
    /// Elements per block, which lie next to each other.
    pub length: u64,
}

/// What one rank holds of one tensor dim.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Layout {
    /// The pieces, in local order.
    pub pieces: Vec<Blocks>,
}

impl Layout {
    /// How many elements the rank holds.
    pub fn size(&self) -> u64 {
        self.pieces.iter().map(|p| p.count * p.length).sum()
    }

    /// The global index of a local one.
    pub fn global(&self, mut local: u64) -> Option<u64> {
        for p in &self.pieces {
            let size = p.count * p.length;
            if local < size {
                return Some(p.offset + local / p.length * p.stride + local % p.length);
            }
            local -= size;
        }
        None
    }

    /// What the rank at `coordinate` of the mesh holds of tensor dim `dim`,
    /// which has `size` elements; `None` when that takes more than 65,536
    /// blocks.
    pub fn of(
        size: u64,
        dim: u32,
        placements: &[Placement],
        mesh: &[u32],
        coordinate: &[u32],
    ) -> Option<Self> {
        let mut runs = vec![(0, size)];
        for (m, placement) in placements.iter().enumerate() {
            let Some((d, split_factor)) = placement.sharded() else {
                continue;
            };
            if d != dim {
                continue;
            }
            let total = runs.iter().map(|r| r.1).sum();
            let (n, rank) = (u64::from(mesh[m]), u64::from(coordinate[m]));
            let mut kept = Vec::new();
            if let Some(sharding) = placement.registered() {
                let sharding = sharding.sharding();
                if !sharding.fits(total, n) {
                    return None;
                }
                if let Some(listed) = sharding.runs(total, n, rank) {
                    for run in listed {
                        if run.step == 1 || run.count <= 1 {
                            cut(&runs, run.start, run.start + run.count, &mut kept);
                        } else {
                            for place in 0..run.count {
                                let index = run.at(place);
                                cut(&runs, index, index.saturating_add(1), &mut kept);
                                if kept.len() > MAX_BLOCKS {
                                    return None;
                                }
                            }
                        }
                        if kept.len() > MAX_BLOCKS {
                            return None;
                        }
                    }
                    runs = kept;
                    continue;
                }
                let held = sharding.held(total, n, rank);
                if held > MAX_BLOCKS as u64 {
                    return None;
                }
                for local in 0..held {
                    let index = sharding.merge(total, n, rank, local);
                    cut(&runs, index, index.saturating_add(1), &mut kept);
                }
                runs = kept;
                continue;
            }
            // A plain shard is the case of a single block.
            for block in 0..u64::from(split_factor) {
                let (start, end) = chunk(total, u64::from(split_factor), block);
                if start == end {
                    break;
                }
                let (from, to) = chunk(end - start, n, rank);
                cut(&runs, start + from, start + to, &mut kept);
                if kept.len() > MAX_BLOCKS {
                    return None;
                }
            }
            runs = kept;
        }
        Some(Layout {
            pieces: fold(&runs),
        })
    }
}

/// The bounds of one of `torch.chunk`'s chunks: pieces of the rounded-up size,
/// the last ones smaller or empty.
pub fn chunk(size: u64, chunks: u64, at: u64) -> (u64, u64) {
    let length = size.div_ceil(chunks);
    let from = length.saturating_mul(at).min(size);
    (from, from.saturating_add(length).min(size))
}

/// The smallest number of elements that any rank holds of a dim.
pub fn smallest(size: u64, dim: u32, placements: &[Placement], mesh: &[u32]) -> u64 {
    // A smaller shard may be cut more evenly than a larger one (3 and 4 into
    // 3), so every size that occurs is followed; few differ.
    let mut sizes = vec![size];
    for (placement, n) in placements.iter().zip(mesh) {
        let Some((_, blocks)) = placement.sharded().filter(|s| s.0 == dim) else {
            continue;
        };
        let (n, blocks) = (u64::from(*n), u64::from(blocks));
        if let Some(sharding) = placement.registered() {
            let held = sizes.iter().map(|left| sharding.extent(*left, n).0);
            sizes = vec![held.min().unwrap_or(0)];
            continue;
        }
        sizes = held_sizes(&sizes, n, blocks);
    }
    sizes.into_iter().min().unwrap_or(0)
}

/// The numbers of elements that ranks hold of pieces of these sizes, each once.
fn held_sizes(sizes: &[u64], n: u64, blocks: u64) -> Vec<u64> {
    let mut next = Vec::with_capacity(sizes.len() * 2);
    for &left in sizes {
        let block = left.div_ceil(blocks).max(1);
        let rest = left % block;
        // The ranks at which what a rank holds changes.
        let ends = [block, rest].map(|b| b / b.div_ceil(n).max(1));
        for rank in [0, ends[0], ends[0] + 1, ends[1], ends[1] + 1, n - 1] {
            let piece = |b| {
                let (from, to) = chunk(b, n, rank.min(n - 1));
                to - from
            };
            let held = left / block * piece(block) + piece(rest);
            if !next.contains(&held) {
                next.push(held);
            }
        }
    }
    next
}

/// Whether the registered shardings among some placements can split what the placements
/// to their left leave of a dim, on every rank.
pub fn fits(size: u64, dim: u32, placements: &[Placement], mesh: &[u32]) -> bool {
    let of_dim = |p: &&Placement| p.sharded().is_some_and(|s| s.0 == dim);
    if !placements
        .iter()
        .filter(of_dim)
        .any(|p| p.registered().is_some())
    {
        return true;
    }
    let mut sizes = vec![size];
    for (placement, n) in placements.iter().zip(mesh) {
        let Some((_, blocks)) = placement.sharded().filter(|s| s.0 == dim) else {
            continue;
        };
        let n = u64::from(*n);
        let Some(sharding) = placement.registered() else {
            sizes = held_sizes(&sizes, n, u64::from(blocks));
            continue;
        };
        let sharding = sharding.sharding();
        if !sizes.iter().all(|size| sharding.fits(*size, n)) {
            return false;
        }
        let mut next: Vec<u64> = (sizes.iter())
            .flat_map(|size| (0..n).map(|rank| sharding.held(*size, n, rank)))
            .collect();
        next.sort_unstable();
        next.dedup();
        sizes = next;
    }
    true
}

/// Appends the elements `from..to` of what the runs hold.
fn cut(runs: &[(u64, u64)], from: u64, to: u64, kept: &mut Vec<(u64, u64)>) {
    let mut at = 0;
    for &(start, length) in runs {
        let (a, b) = (from.max(at), to.min(at + length));
        if a < b {
            let start = start + (a - at);
            match kept.last_mut() {
                Some(last) if last.0 + last.1 == start => last.1 += b - a,
                _ => kept.push((start, b - a)),
            }
        }
        at += length;
        if at >= to {
            break;
        }
    }
}

/// Joins runs of one length at one distance.
fn fold(runs: &[(u64, u64)]) -> Vec<Blocks> {
    let mut pieces: Vec<Blocks> = Vec::new();
    for &(offset, length) in runs {
        if let Some(last) = pieces.last_mut() {
            let end = last.offset + (last.count - 1) * last.stride;
            // Runs ascend, as cutting keeps their order, unless a registered
            // sharding orders them otherwise.
            if let Some(stride) = offset.checked_sub(end) {
                if last.length == length && (last.count == 1 || last.stride == stride) {
                    last.count += 1;
                    last.stride = stride;
                    continue;
                }
            }
        }
        pieces.push(Blocks {
            offset,
            count: 1,
            stride: length,
            length,
        });
    }
    pieces
}

impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.pieces.is_empty() {
            return f.write_str("0:1");
        }
        for (i, p) in self.pieces.iter().enumerate() {
            if i > 0 {
                f.write_str(" | ")?;
            }
            match p.count {
                1 => write!(f, "{}:1", p.length)?,
                n => write!(f, "({n},{}):({},1)", p.length, p.stride)?,
            }
            if p.offset > 0 {
                write!(f, "+{}", p.offset)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use super::*;

    fn layout(size: u64, placements: &[&str], mesh: &[u32], at: &[u32]) -> Layout {
        let placements: Vec<_> = placements
            .iter()
            .map(|p| Placement::parse(p).unwrap())
            .collect();
        Layout::of(size, 0, &placements, mesh, at).unwrap()
    }

    fn indices(l: &Layout) -> Vec<u64> {
        (0..l.size()).map(|i| l.global(i).unwrap()).collect()
    }

    #[test]
    fn uneven_shards_follow_torch_chunk() {
        // torch.arange(10).chunk(4) has sizes 3, 3, 3, 1; arange(5).chunk(4)
        // has sizes 2, 2, 1 and a fourth rank with nothing.
        let sizes = |n, ranks| -> Vec<u64> {
            (0..ranks)
                .map(|r| layout(n, &["S(0)"], &[ranks], &[r]).size())
                .collect()
        };
        assert_eq!(sizes(10, 4), [3, 3, 3, 1]);
        assert_eq!(sizes(5, 4), [2, 2, 1, 0]);
        assert_eq!(sizes(2, 4), [1, 1, 0, 0]);
        assert_eq!(layout(5, &["S(0)"], &[4], &[3]).to_string(), "0:1");
    }

    #[test]
    fn a_strided_shard_left_of_its_blocks_is_the_inner_split() {
        let mesh = [2, 2];
        for (i, j) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
            let l = layout(8, &["_S(0,2)", "S(0)"], &mesh, &[i, j]);
            let first = u64::from(j * 4 + i * 2);
            assert_eq!(indices(&l), [first, first + 1]);
        }
        let l = layout(16, &["_S(0,2)"], &[2], &[1]);
        assert_eq!(l.to_string(), "(2,4):(8,1)+4");
        assert_eq!(indices(&l), [4, 5, 6, 7, 12, 13, 14, 15]);
    }

    #[test]
    fn the_ranks_together_hold_every_element_once() {
        let mesh = [2, 3];
        for size in 0..40 {
            for placements in [["S(0)", "S(0)"], ["_S(0,3)", "S(0)"], ["S(0)", "_S(0,2)"]] {
                let mut all: Vec<u64> = Vec::new();
                let mut least = u64::MAX;
                for i in 0..2 {
                    for j in 0..3 {
                        let l = layout(size, &placements, &mesh, &[i, j]);
                        least = least.min(l.size());
                        all.extend(indices(&l));
                    }
                }
                all.sort_unstable();
                assert_eq!(all, (0..size).collect::<Vec<_>>());
                let p = placements.map(|p| Placement::parse(p).unwrap());
                assert_eq!(smallest(size, 0, &p, &mesh), least, "{size} {placements:?}");
            }
        }
    }
}

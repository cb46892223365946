//! The storages of one call, held to what the leaves say of them.

use hashbrown::HashMap;
use hashbrown::hash_map::Entry;
use rote_plans::Device;

use crate::program::number;
use crate::tensor::Tensor;

/// The memory of a storage.
#[derive(Clone, Copy, Debug)]
struct Memory {
    device: Device,
    /// Addresses: the first byte, and the one behind the last.
    from: u64,
    to: u64,
    /// The first and the last leaf in it.
    first: usize,
    last: usize,
}

/// The storages of a call. Reading a call is linear in its leaves, but for one sort.
#[derive(Debug, Default)]
pub(crate) struct Storages {
    known: HashMap<u64, Memory>,
    sorted: Vec<Memory>,
}

impl Storages {
    pub(crate) fn clear(&mut self) {
        self.known.clear();
    }

    /// Adds the storage of a leaf. Returns the first leaf that has the same.
    ///
    /// # Errors
    ///
    /// Where an earlier leaf names the same storage, and lies in other memory.
    pub(crate) fn add(&mut self, leaf: usize, tensor: &Tensor) -> Result<Option<usize>, String> {
        let held = &tensor.0;
        if held.sizes().contains(&0) {
            return Ok(None); // it may lie anywhere
        }
        let from = number(held.data).wrapping_sub(held.start as u64);
        let to = from.saturating_add(held.storage_bytes);
        let memory = match self.known.entry(held.storage) {
            Entry::Vacant(vacant) => {
                vacant.insert(Memory {
                    device: held.device,
                    from,
                    to,
                    first: leaf,
                    last: leaf,
                });
                return Ok(None);
            }
            Entry::Occupied(known) => known.into_mut(),
        };
        if (memory.device, memory.from) != (held.device, from) {
            return Err(format!(
                "names the storage of leaf {}, which lies in other memory: two storages have two numbers, and `start` \
                 counts from the first byte of a storage",
                memory.first
            ));
        }
        memory.to = memory.to.max(to);
        memory.last = leaf;
        Ok(Some(memory.first))
    }

    /// A leaf of a storage that shares bytes with another one, if there is one.
    pub(crate) fn overlapping(&mut self) -> Option<usize> {
        self.sorted.clear();
        let some = self.known.values().filter(|memory| memory.from < memory.to);
        self.sorted.extend(some);
        let key = |memory: &Memory| (memory.device.kind, memory.device.index, memory.from);
        self.sorted.sort_unstable_by_key(key);
        let mut pairs = self.sorted.iter().zip(self.sorted.iter().skip(1));
        let shared = |(a, b): &(&Memory, &Memory)| a.device == b.device && b.from < a.to;
        pairs.find(shared).map(|(a, b)| a.last.max(b.last))
    }
}

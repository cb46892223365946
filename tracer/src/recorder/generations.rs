//! Memory that the framework's own code takes and gives back while a step runs, under one storage: parameters that a
//! sharded wrapper gathers before their use.
//!
//! Such a storage is resized outside the dispatcher. From 0 bytes to some, it gets new memory: a *generation*, which ends
//! when the storage is resized to 0 again. Each generation is memory of the plan's own, as a bucket is (see `buckets`):
//! it begins empty, and the step must have written what it reads. Nothing of it is left when the step ends.

use rote_plans::ValueId;

use super::Recorder;
use crate::event::{OpEvent, TensorEvent};
use crate::refusal::Refusal;

impl Recorder {
    /// Records that a storage was resized, from and to so many bytes.
    pub fn resized(
        &mut self,
        storage: u64,
        [before, after]: [u64; 2],
        source: &str,
    ) -> Result<(), Refusal> {
        if before == after {
            return Ok(());
        }
        let refuse = |reason: &str, remedy: &str| {
            Err(Refusal::op(
                "UntypedStorage.resize_",
                source,
                reason,
                remedy,
            ))
        };
        let bound = (self.roots.get(&storage)).is_some_and(|root| root.binding.is_some());
        // A tensor that is named and has no memory before the step, such as a parameter that is not gathered yet.
        if before == 0 {
            self.candidates.remove(&storage);
        }
        if bound || self.candidates.contains_key(&storage) {
            return refuse(
                "changes the memory of a tensor that exists before the step",
                "resize storages outside the captured function",
            );
        }
        if before != 0 && after != 0 {
            return refuse(
                "changes the size of a storage and keeps what is in it",
                "allocate tensors with their final size",
            );
        }
        if self.is_under_way(storage) {
            return refuse(
                "gives memory back that a collective still uses",
                "wait for the collective first",
            );
        }
        self.roots.remove(&storage);
        self.buckets.remove(&storage);
        if after == 0 {
            self.generations.remove(&storage);
        } else {
            self.generations.insert(storage, source.to_owned());
        }
        Ok(())
    }

    /// Makes the memory of generations that an op is the first to use.
    pub(super) fn begin_generations(&mut self, op: &OpEvent<'_>) -> Result<(), Refusal> {
        if self.generations.is_empty() {
            return Ok(());
        }
        for arg in &op.args {
            for tensor in super::tensors(&arg.value) {
                if self.generations.contains_key(&tensor.storage)
                    && !self.roots.contains_key(&tensor.storage)
                    && !tensor.opaque
                    && tensor.dtype.bytes().is_some()
                {
                    self.make_bucket(tensor, op)?;
                }
            }
        }
        Ok(())
    }

    /// Whether a tensor lies in memory that a storage has got in this step.
    pub(super) fn is_of_generation(&self, tensor: &TensorEvent<'_>) -> bool {
        self.generations.contains_key(&tensor.storage)
    }

    /// Refuses a step that does not give the memory back.
    pub(super) fn end_generations(&self) -> Result<(), Refusal> {
        match self.generations.values().next() {
            None => Ok(()),
            Some(source) => Err(Refusal::op(
                "UntypedStorage.resize_",
                source,
                "takes memory that it does not give back: a replay would leave what was there before",
                "give it back in the same step; of FSDP, reshard all modules before the step ends (reshard(), \
                 set_reshard_after_backward(True))",
            )),
        }
    }

    /// Whether a collective that was not waited for uses a storage.
    fn is_under_way(&self, storage: u64) -> bool {
        let Some(root) = self.roots.get(&storage) else {
            return false;
        };
        let plan = &self.tables.plan;
        let of_root = |value: ValueId| plan.values[value as usize].root == root.value;
        self.handles.used().any(of_root) || self.pending.iter().copied().any(of_root)
    }
}

#[cfg(test)]
mod tests {
    use crate::recorder::Recorder;
    use crate::sample::{finish, in_place, op, program, recorder, tensor};

    const LINE: &str = "train.py:3";

    /// What is refused first, at the latest when the step ends.
    fn refused(steps: impl FnOnce(&mut Recorder) -> Result<(), crate::Refusal>) -> String {
        let (x, kept) = (tensor(1, &[4]), tensor(2, &[4]));
        let mut recorder = recorder(&[&x, &kept]);
        let ended = steps(&mut recorder).and_then(|()| recorder.settle());
        ended.expect_err("it is refused").to_string()
    }

    #[test]
    fn each_generation_is_memory_of_its_own() {
        let (x, gathered) = (tensor(1, &[4]), tensor(9, &[4]));
        let (a, b) = (tensor(3, &[4]), tensor(4, &[4]));
        let mut recorder = recorder(&[&x]);
        for out in [&a, &b] {
            recorder.resized(9, [0, 16], LINE).expect("it begins");
            recorder
                .op(&in_place("aten::copy_", &gathered, &[&x]))
                .expect("it is filled");
            recorder
                .op(&op("aten::neg", &[&gathered], &[out]))
                .expect("it is read");
            recorder.resized(9, [16, 0], LINE).expect("it ends");
        }
        recorder.settle().expect("nothing is left");
        let (plan, _) = finish(recorder, &[&a, &b]);
        plan.check().expect("the plan is valid");
        let made = program(&plan);
        let names: Vec<&str> = made
            .iter()
            .filter_map(|text| {
                text.split_whitespace()
                    .find(|word| word.starts_with("empty"))
            })
            .collect();
        assert_eq!(names.len(), 2, "{made:?}");
    }

    #[test]
    fn all_that_is_read_was_written() {
        let (x, gathered) = (tensor(1, &[4]), tensor(9, &[4]));
        let [front, whole] = [2, 4].map(|size| gathered.view(&[size], &[1], 0));
        let (small, out) = (tensor(3, &[2]), tensor(4, &[4]));
        let given = x.view(&[2], &[1], 0);
        let why = refused(|recorder| {
            recorder.resized(9, [0, 16], LINE)?;
            recorder.op(&in_place("aten::copy_", &front, &[&given]))?;
            recorder.op(&op("aten::neg", &[&front], &[&small]))?;
            recorder.op(&op("aten::neg", &[&whole], &[&out]))
        });
        assert!(why.contains("not filled"), "{why}");
        let why = refused(|recorder| {
            recorder.resized(9, [0, 16], LINE)?;
            recorder.op(&in_place("aten::copy_", &gathered, &[&x]))?;
            recorder.resized(9, [16, 0], LINE)?;
            recorder.resized(9, [0, 16], LINE)?;
            recorder.op(&op("aten::neg", &[&gathered], &[&out]))
        });
        assert!(why.contains("not filled"), "{why}");
    }

    #[test]
    fn memory_of_others_and_memory_that_stays_are_refused() {
        let (x, kept) = (tensor(1, &[4]), tensor(2, &[4]));
        let gathered = tensor(9, &[4]);
        let why = refused(|recorder| recorder.resized(2, [16, 0], LINE));
        assert!(why.contains("exists before the step"), "{why}");
        let why = refused(|recorder| {
            recorder.op(&in_place("aten::add_", &kept, &[&x]))?;
            recorder.resized(2, [16, 0], LINE)
        });
        assert!(why.contains("exists before the step"), "{why}");
        let why = refused(|recorder| recorder.resized(9, [16, 32], LINE));
        assert!(why.contains("keeps what is in it"), "{why}");
        let why = refused(|recorder| {
            recorder.resized(9, [0, 16], LINE)?;
            recorder.op(&in_place("aten::copy_", &gathered, &[&x]))
        });
        assert!(why.contains("does not give back"), "{why}");
    }
}

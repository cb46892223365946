//! Tensors that a step can reach, that are no arguments and not in the state, and that its ops use.
//!
//! A recording takes them for tensors of the state, so that it meets all of them, and is refused in the end. Who records
//! may name them, and record again.

use super::{Recorder, tensors};
use crate::event::{OpEvent, TensorEvent};
use crate::refusal::Refusal;
use rote_plans::BindingKind;

/// What ops have met.
#[derive(Debug, Default)]
pub(super) struct Met {
    /// The storages, in order.
    storages: Vec<u64>,
    /// The refusal of the step because of the first of them.
    refusal: Option<Refusal>,
}

impl Recorder {
    /// Takes such tensors among the arguments of an op for tensors of the state.
    pub(super) fn meet(&mut self, op: &OpEvent<'_>) {
        if self.reach.is_empty() {
            return;
        }
        for (i, arg) in op.args.iter().enumerate() {
            for tensor in tensors(&arg.value) {
                let storage = tensor.storage;
                if self.knows(storage) || tensor.opaque || tensor.dtype.bytes().is_none() {
                    continue;
                }
                let Some(place) = self.reach.get(&storage).cloned() else {
                    continue;
                };
                self.met.storages.push(storage);
                let refusal = &mut self.met.refusal;
                refusal.get_or_insert_with(|| unknown(op, i, tensor, Some(&place)));
                self.name_tensor(BindingKind::State, &place, tensor, None, None);
            }
        }
    }

    /// The storages without a name that the step can reach and that an op has met.
    pub fn met(&self) -> &[u64] {
        &self.met.storages
    }

    /// Refuses a step that has met some.
    pub(super) fn end_met(&mut self) -> Result<(), Refusal> {
        self.met.refusal.take().map_or(Ok(()), Err)
    }
}

/// The refusal of an op with a tensor of which nothing is known but where the step can reach it, if it can.
pub(super) fn unknown(
    op: &OpEvent<'_>,
    argument: usize,
    tensor: &TensorEvent<'_>,
    place: Option<&str>,
) -> Refusal {
    let remedy = match place {
        Some(_) => {
            "pass the tensor as an argument, make it inside the step by ops, or keep one tensor without a graph there and \
             write to it in place (copy_ in PyTorch)"
        }
        None => {
            "name the tensor in the state (state= in Python), pass it as an argument, or make it inside the step by ops"
        }
    };
    let place = place.map(|place| format!("; it lies in the memory of {place}"));
    Refusal::op(
        op.name,
        op.source,
        format!(
            "argument {argument} ({}) is a tensor that is no argument of the step and not in the state, and no recorded op \
             made it{}",
            tensor.describe(),
            place.unwrap_or_default()
        ),
        remedy,
    )
}

#[cfg(test)]
mod tests {
    use crate::sample::{op, recorder, tensor};

    #[test]
    fn one_recording_meets_all_that_is_in_reach() {
        let (x, far, near) = (tensor(1, &[4]), tensor(2, &[4]), tensor(3, &[4]));
        let made = [tensor(4, &[4]), tensor(5, &[4]), tensor(6, &[4])];
        let mut recorder = recorder(&[&x]);
        recorder.reaches(1, "args[0]");
        recorder.reaches(2, "closure['far']");
        recorder.reaches(3, "self.near");
        for (pair, y) in [[&x, &far], [&near, &x], [&x, &far]].iter().zip(&made) {
            let done = recorder.op(&op("aten::add", pair, &[y]));
            done.expect("known from now on");
        }
        assert_eq!(recorder.met(), [2, 3]);
        let why = recorder.settle().expect_err("not named").to_string();
        assert!(why.contains("in the memory of closure['far']"), "{why}");
    }

    #[test]
    fn what_is_in_no_place_is_refused_at_once() {
        let (x, strange, y) = (tensor(1, &[4]), tensor(2, &[4]), tensor(3, &[4]));
        let mut recorder = recorder(&[&x]);
        recorder.reaches(7, "self.other");
        let why = recorder.op(&op("aten::add", &[&x, &strange], &[&y]));
        let why = why.expect_err("stale").to_string();
        assert!(why.contains("no recorded op made it;"), "{why}");
        assert!(recorder.met().is_empty());
        recorder.settle().expect("nothing was met");
    }
}

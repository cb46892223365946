//! Ops of process groups that a plan holds as they are: collectives on lists of tensors, and point to point.
//!
//! Such an op becomes a local op, whose only result stands for its handle. The wait is another local op ([`WAIT`]). It
//! names what the first one receives and sends. Ops outside of ATen keep their order and their place among collectives
//! in every pass, and none is left out.

use rote_plans::{Arg, DType, Device, Instr, Marks, ValueId, WAIT};

use super::by_hand::OTHERWISE;
use super::{Recorder, tensors};
use crate::event::{ArgEvent, OpEvent, TensorEvent};
use crate::refusal::Refusal;
use crate::tables::parse_reduce;

/// Where the arguments of an op lie that are objects.
pub(super) struct Layout {
    name: &'static str,
    group: usize,
    reduce: Option<usize>,
}

const fn layout_of(name: &'static str, group: usize, reduce: Option<usize>) -> Layout {
    Layout {
        name,
        group,
        reduce,
    }
}

const LAYOUTS: &[Layout] = &[
    layout_of("c10d::reduce_", 1, Some(2)),
    layout_of("c10d::allgather_", 2, None),
    layout_of("c10d::reduce_scatter_", 2, Some(3)),
    layout_of("c10d::gather_", 2, None),
    layout_of("c10d::gather_into_tensor_", 2, None),
    layout_of("c10d::scatter_", 2, None),
    layout_of("c10d::alltoall_", 2, None),
    layout_of("c10d::barrier", 1, None),
    layout_of("c10d::send", 1, None),
    layout_of("c10d::recv_", 1, None),
    layout_of("c10d::allreduce_coalesced_", 1, Some(2)),
    layout_of("c10d::allgather_into_tensor_coalesced_", 2, None),
    layout_of("c10d::reduce_scatter_tensor_coalesced_", 2, Some(3)),
];

/// Where the arguments of an op lie; `None` if the plan does not hold the op as it is.
pub(super) fn layout(name: &str) -> Option<&'static Layout> {
    LAYOUTS.iter().find(|layout| layout.name == name)
}

/// An op that is under way.
#[derive(Clone, Debug)]
pub(super) struct Exchange {
    handle: ValueId,
    received: Vec<ValueId>,
    sent: Vec<ValueId>,
}

impl Exchange {
    /// What it receives and sends.
    pub(super) fn values(&self) -> impl Iterator<Item = &ValueId> {
        self.received.iter().chain(&self.sent)
    }
}

impl Recorder {
    /// Records such an op.
    pub(super) fn exchange(
        &mut self,
        op: &OpEvent<'_>,
        layout: &Layout,
    ) -> Result<Exchange, Refusal> {
        let group = Self::check_objects(op, layout)?;
        self.check(op)?;
        self.check_tensors(op)?;
        let all = op.args.iter().flat_map(|arg| tensors(&arg.value));
        if all.into_iter().any(|t| t.marks != Marks::NONE) {
            return Self::refuse(
                op,
                "sends or receives a conjugated or negated view",
                "make a copy of the tensor first (resolve_conj(), resolve_neg() in PyTorch)",
            );
        }
        let mut args = Vec::with_capacity(op.args.len());
        let (mut received, mut sent) = (Vec::new(), Vec::new());
        for (i, arg) in op.args.iter().enumerate() {
            args.push(self.arg(op, i, &arg.value)?);
            for tensor in tensors(&arg.value) {
                let value = self.known_value(op, i, tensor)?;
                if arg.written {
                    &mut received
                } else {
                    &mut sent
                }
                .push(value);
            }
        }
        self.tables.group(group);
        let token = TensorEvent {
            storage: self.own_storage(),
            dtype: DType::U8,
            device: Device {
                kind: Device::CPU,
                index: -1,
            },
            sizes: &[0],
            strides: &[1],
            offset: 0,
            storage_bytes: 0,
            marks: Marks::NONE,
            opaque: false,
        };
        let handle = self.fresh(&token, self.next_instr(), false);
        let instr = Instr::Local {
            op: self.tables.str(op.name),
            overload: self.tables.str(op.overload),
            args: self.push_args(&args),
            outs: self.tables.ids(&[handle]),
            writes: self.tables.ids(&received),
            seeded: false,
            grad: op.grad,
        };
        self.mark_start();
        self.push_instr(instr, op.source);
        Ok(Exchange {
            handle,
            received,
            sent,
        })
    }

    /// Records the wait for such an op.
    pub(super) fn wait_for(&mut self, exchange: &Exchange, source: &str) {
        let Exchange {
            handle,
            received,
            sent,
        } = exchange;
        let args = [
            Arg::Value(*handle),
            Arg::Values(self.tables.ids(received)),
            Arg::Values(self.tables.ids(sent)),
        ];
        let instr = Instr::Local {
            op: self.tables.str(WAIT),
            overload: self.tables.str(""),
            args: self.push_args(&args),
            outs: self.tables.ids(&[]),
            writes: self.tables.ids(received),
            seeded: false,
            grad: false,
        };
        self.push_instr(instr, source);
    }

    /// The name of the op's process group, if a plan can hold the group and the reduction.
    fn check_objects<'a>(op: &OpEvent<'a>, layout: &Layout) -> Result<&'a str, Refusal> {
        let arg = |at: usize| op.args.get(at).map(|arg| &arg.value);
        let known = |arg: Option<&ArgEvent<'_>>| matches!(arg, Some(ArgEvent::Str(name)) if parse_reduce(name).is_some());
        if layout.reduce.is_some_and(|at| !known(arg(at))) {
            return Self::refuse(
                op,
                format!("{OTHERWISE}: with another reduction than SUM, AVG, MAX, MIN and PRODUCT"),
                "use one of these",
            );
        }
        match arg(layout.group) {
            Some(ArgEvent::Str(name)) => Ok(name),
            _ => Self::refuse(
                op,
                format!("{OTHERWISE}: with a process group that is not registered under a name"),
                "make the group by torch.distributed.new_group",
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use rote_passes::{Selection, optimize};
    use rote_plans::schedule::{Into, Ops};
    use rote_plans::{Device, Instr, Plan};

    use crate::event::{ArgEvent, OpEvent};
    use crate::recorder::Recorder;
    use crate::sample::{Tensor, finish, in_place, op, program, read, recorder, tensor, written};

    struct AllOps;

    impl Ops for AllOps {
        fn has(&self, _: &str, _: &str) -> bool {
            true
        }

        fn writes_into(&self, _: &str, _: &str) -> Option<Into> {
            None
        }

        fn copies_inputs(&self) -> bool {
            false
        }

        fn gathers_in_place(&self) -> bool {
            false
        }

        fn alignment(&self, _: Device) -> u64 {
            64
        }
    }

    fn call<'a>(name: &'a str, tensor: &'a Tensor, handle: i64) -> OpEvent<'a> {
        let mut event = op(name, &[], &[]);
        let list = ArgEvent::Tensors(vec![tensor.event()]);
        event.args = vec![
            if name == "c10d::send" {
                read(list)
            } else {
                written(list)
            },
            read(ArgEvent::Str("tp")),
            read(ArgEvent::Int(1)),
            read(ArgEvent::Int(0)),
        ];
        event.outs.push(ArgEvent::Int(handle));
        event
    }

    fn refused(recorder: &Recorder) -> Option<String> {
        recorder.race(true).map(|refusal| refusal.to_string())
    }

    /// Ops and waits in the order of a plan.
    fn wire(plan: &Plan) -> Vec<&str> {
        let names = plan.instrs.iter().filter_map(|instr| match instr {
            Instr::Local { op, .. } => Some(plan.str(*op)),
            _ => None,
        });
        names.filter(|name| !name.starts_with("aten::")).collect()
    }

    #[test]
    fn an_op_and_its_wait_name_what_is_received_and_sent() {
        let (x, y, out) = (tensor(1, &[4]), tensor(2, &[4]), tensor(3, &[4]));
        let mut recorder = recorder(&[&x, &y]);
        for (name, tensor, handle) in [("c10d::send", &x, 1), ("c10d::recv_", &y, 2)] {
            recorder.op(&call(name, tensor, handle)).expect("recorded");
        }
        assert_eq!(recorder.unwaited(), 2);
        assert!(refused(&recorder).is_some_and(|why| why.contains("wait for 2 of")));
        for handle in [2, 1, 2] {
            recorder.waited(handle, "train.py:2").expect("recorded");
        }
        assert_eq!(recorder.unwaited(), 0);
        recorder
            .op(&op("aten::neg", &[&y], &[&out]))
            .expect("recorded");
        assert_eq!(refused(&recorder), None);
        let (plan, _) = finish(recorder, &[&out]);
        plan.check().expect("the plan is valid");
        let expected = ["c10d::send", "c10d::recv_", "rote::wait", "rote::wait"];
        assert_eq!(wire(&plan), expected, "{:?}", program(&plan));
        assert!(plan.bindings[1].written && !plan.bindings[0].written);
        assert_eq!(plan.groups.len(), 1);
    }

    #[test]
    fn passes_keep_every_op_in_its_place() {
        let [x, y, out] = [1, 2, 3].map(|storage| tensor(storage, &[4]));
        let unused = tensor(4, &[4]);
        let mut recorder = recorder(&[&x, &y]);
        let calls = [("c10d::send", &x, 1), ("c10d::recv_", &unused, 2)];
        let recorded = |recorder: &mut Recorder, event: &OpEvent<'_>| {
            recorder.op(event).expect("recorded");
        };
        recorded(&mut recorder, &op("aten::empty", &[], &[&unused]));
        for (name, tensor, handle) in calls {
            recorded(&mut recorder, &call(name, tensor, handle));
        }
        recorder.waited(1, "train.py:2").expect("recorded");
        recorded(&mut recorder, &in_place("aten::add_", &x, &[&y]));
        recorded(&mut recorder, &op("aten::neg", &[&y], &[&out]));
        recorder.waited(2, "train.py:3").expect("recorded");
        recorded(&mut recorder, &call("c10d::send", &x, 3));
        recorder.waited(3, "train.py:3").expect("recorded");
        let (plan, _) = finish(recorder, &[&out]);
        let all = Selection::parse("all,sums").expect("names of passes");
        let (altered, _) = optimize(plan.clone(), all, &AllOps);
        altered.plan.check().expect("the plan is valid");
        assert_eq!(wire(&altered.plan), wire(&plan));
        let at = |plan: &Plan, name: &str, nth: usize| {
            let names = program(plan);
            let found = (names.iter().enumerate()).filter(|(_, text)| text.starts_with(name));
            found.map(|(at, _)| at).nth(nth).expect("the op is there")
        };
        // What is written between the wait and the next send stays there.
        let add = at(&altered.plan, "add_", 0);
        assert!(at(&altered.plan, "wait", 0) < add && add < at(&altered.plan, "send", 1));
    }

    #[test]
    fn only_what_an_op_receives_is_under_way() {
        let (x, other) = (tensor(1, &[4]), tensor(2, &[2]));
        let [half, rest] = [0, 2].map(|offset| x.view(&[2], &[1], offset));
        let made = tensor(3, &[2]);
        for (name, event, expected) in [
            ("c10d::recv_", op("aten::neg", &[&half], &[&made]), "before"),
            ("c10d::recv_", op("aten::neg", &[&rest], &[&made]), ""),
            (
                "c10d::recv_",
                in_place("aten::add_", &half, &[&other]),
                "before",
            ),
            ("c10d::recv_", in_place("aten::add_", &rest, &[&other]), ""),
            ("c10d::send", op("aten::neg", &[&half], &[&made]), ""),
            (
                "c10d::send",
                in_place("aten::add_", &half, &[&other]),
                "still sends",
            ),
            ("c10d::send", in_place("aten::add_", &rest, &[&other]), ""),
        ] {
            let mut recorder = recorder(&[&x, &other]);
            recorder.op(&call(name, &half, 1)).expect("recorded");
            recorder.op(&event).expect("recorded");
            recorder.waited(1, "train.py:2").expect("recorded");
            match refused(&recorder) {
                None => assert_eq!(expected, "", "{name}, {}", event.name),
                Some(why) => {
                    assert!(
                        !expected.is_empty() && why.contains(expected),
                        "{name}: {why}"
                    );
                }
            }
        }
    }
}

//! Random streams of ops: the recorder never panics, and what it finishes is a
//! valid plan.

use proptest::prelude::*;

use crate::event::ArgEvent;
use crate::sample::*;

/// What a random op does. Numbers pick among the tensors that exist, modulo how
/// many there are.
#[derive(Clone, Debug)]
enum Step {
    /// Reads two tensors and makes one.
    Fresh(usize, usize),
    /// Allocates without writing.
    Empty,
    /// Looks at a tensor's storage another way: how many elements, every how
    /// many, from where.
    View(usize, i64, i64, i64),
    /// Writes to a tensor what another holds.
    Write(usize, usize),
    /// Makes a tensor, and a view of it in the same op.
    FreshAndView(usize),
    /// Makes a list of tensors from a list of tensors.
    Lists(Vec<usize>),
    /// A collective, in place or not; waited for later, if at all.
    Collective(usize, bool),
    Wait(usize),
    /// A tensor that nobody has seen before is read.
    Stranger(usize),
    /// The storage of a tensor is seen with another size.
    Resized(usize),
    BeginGlobal,
    EndGlobal,
    BeginRedistribution,
    EndRedistribution,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let pick = || 0..1000_usize;
    let step = prop_oneof![
        6 => (pick(), pick()).prop_map(|(a, b)| Step::Fresh(a, b)),
        2 => Just(Step::Empty),
        6 => (pick(), 0..9_i64, 0..4_i64, 0..9_i64).prop_map(|(a, n, s, o)| Step::View(a, n, s, o)),
        4 => (pick(), pick()).prop_map(|(a, b)| Step::Write(a, b)),
        2 => pick().prop_map(Step::FreshAndView),
        1 => prop::collection::vec(pick(), 0..4).prop_map(Step::Lists),
        2 => (pick(), any::<bool>()).prop_map(|(a, here)| Step::Collective(a, here)),
        3 => pick().prop_map(Step::Wait),
        1 => pick().prop_map(Step::Stranger),
        1 => pick().prop_map(Step::Resized),
        2 => Just(Step::BeginGlobal),
        2 => Just(Step::EndGlobal),
        1 => Just(Step::BeginRedistribution),
        1 => Just(Step::EndRedistribution),
    ];
    prop::collection::vec(step, 0..60)
}

/// Elements of every storage.
const ELEMENTS: i64 = 16;

fn inside(tensor: &Tensor) -> bool {
    let last = tensor.offset + (tensor.sizes[0] - 1).max(0) * tensor.strides[0];
    last < ELEMENTS
}

const CASES: u32 = if cfg!(miri) { 2 } else { 512 };

proptest! {
    #![proptest_config(ProptestConfig { cases: CASES, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_finished_recording_is_a_valid_plan(steps in steps(), outputs in prop::collection::vec(0..1000_usize, 0..5)) {
        let mut tensors = vec![tensor(1, &[ELEMENTS]), tensor(2, &[ELEMENTS])];
        let mut storage = 2;
        let args: Vec<&Tensor> = tensors.iter().collect();
        let mut recorder = recorder(&args);
        let mut fresh = || {
            storage += 1;
            tensor(storage, &[ELEMENTS])
        };
        for step in &steps {
            let at = |i: &usize| tensors[i % tensors.len()].clone();
            let mut made = Vec::new();
            let recorded = match step {
                Step::Fresh(a, b) => {
                    made.push(fresh());
                    recorder.op(&op("aten::add", &[&at(a), &at(b)], &[&made[0]]))
                }
                Step::Empty => {
                    made.push(fresh());
                    let allocated = recorder.op(&op("aten::empty", &[], &[&made[0]]));
                    allocated.and_then(|_| recorder.op(&in_place("aten::zero_", &made[0], &[])))
                }
                Step::View(a, size, stride, offset) => {
                    let view = at(a).view(&[*size], &[*stride], *offset);
                    if !inside(&view) {
                        continue;
                    }
                    made.push(view);
                    recorder.op(&op("aten::as_strided", &[&at(a)], &[&made[0]]))
                }
                Step::Write(a, b) => recorder.op(&in_place("aten::copy_", &at(a), &[&at(b)])),
                Step::FreshAndView(a) => {
                    let whole = fresh();
                    made.extend([whole.view(&[3], &[2], 1), whole]);
                    recorder.op(&op("custom::two", &[&at(a)], &[&made[1], &made[0]]))
                }
                Step::Lists(from) => {
                    let from: Vec<Tensor> = from.iter().map(at).collect();
                    made.extend(from.iter().map(|_| fresh()));
                    let mut event = op("aten::_foreach_exp", &[], &[]);
                    event.args.push(read(ArgEvent::Tensors(from.iter().map(Tensor::event).collect())));
                    event.outs.push(ArgEvent::Tensors(made.iter().map(Tensor::event).collect()));
                    recorder.op(&event)
                }
                Step::Collective(a, here) => {
                    let input = at(a);
                    let out = if *here { input.clone() } else { fresh() };
                    made.extend((!here).then(|| out.clone()));
                    let name = if *here { "_c10d_functional::all_reduce_" } else { "_c10d_functional::all_reduce" };
                    let mut event = collective(name, &input, vec![ArgEvent::Str("sum")], &out);
                    event.args[0].written = *here;
                    recorder.op(&event)
                }
                Step::Wait(a) => recorder.op(&wait(&at(a))),
                Step::Stranger(a) => {
                    let refused = recorder.op(&op("aten::add", &[&at(a), &fresh()], &[&fresh()]));
                    prop_assert!(refused.is_err());
                    continue;
                }
                Step::Resized(a) => {
                    let resized = Tensor { storage_bytes: 1 << 20, ..at(a) };
                    let _ = recorder.op(&op("aten::relu", &[&resized], &[&fresh()]));
                    continue;
                }
                Step::BeginGlobal => {
                    recorder.global_begin("aten::op", &[Some(spec("S(0)"))], "");
                    Ok(())
                }
                Step::EndGlobal => {
                    recorder.global_end(&[None]);
                    Ok(())
                }
                Step::BeginRedistribution => {
                    recorder.redistribute_begin(&spec("S(0)"), &spec("R"), "");
                    Ok(())
                }
                Step::EndRedistribution => {
                    recorder.redistribute_end();
                    Ok(())
                }
            };
            if recorded.is_ok() {
                tensors.extend(made);
            }
        }
        let outputs: Vec<&Tensor> = outputs.iter().map(|i| &tensors[i % tensors.len()]).collect();
        finish(recorder, &outputs); // checks the plan and its frees
    }
}

//! Shardings that callers bring, against the data that each rank holds.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::sync::OnceLock;

use super::data_tests::{coordinates, held};
use super::*;

/// Blocks of `block` elements go round the ranks.
#[derive(Clone, Copy)]
struct Cyclic {
    name: &'static str,
    block: u64,
    /// Which families of rules it may fill.
    families: &'static [&'static str],
}

impl Sharding for Cyclic {
    fn name(&self) -> &str {
        self.name
    }

    fn held(&self, size: u64, ranks: u64, rank: u64) -> u64 {
        let round = self.block * ranks;
        let rest = (size % round).saturating_sub(rank * self.block);
        size / round * self.block + rest.min(self.block)
    }

    fn split(&self, _size: u64, ranks: u64, index: u64) -> (u64, u64) {
        let block = index / self.block;
        (
            block % ranks,
            block / ranks * self.block + index % self.block,
        )
    }

    fn merge(&self, _size: u64, ranks: u64, rank: u64, local: u64) -> u64 {
        (local / self.block * ranks + rank) * self.block + local % self.block
    }

    fn fills(&self, family: &str, _op: &str) -> bool {
        self.families.is_empty() || self.families.contains(&family)
    }
}

const CYCLIC: Cyclic = Cyclic {
    name: "Cyclic",
    block: 1,
    families: &[],
};
const BLOCKS: Cyclic = Cyclic {
    name: "Cyclic3",
    block: 3,
    families: &[],
};
const SIMPLE: Cyclic = Cyclic {
    name: "Simple",
    block: 2,
    families: &["pointwise"],
};

/// Registers the shardings of these tests, once.
pub(super) fn registered() -> [ShardingId; 3] {
    static IDS: OnceLock<[ShardingId; 3]> = OnceLock::new();
    *IDS.get_or_init(|| [CYCLIC, BLOCKS, SIMPLE].map(|s| register_sharding(s).unwrap()))
}

fn ask(op: &str, on: &str, args: &[&str]) -> Propagation {
    registered();
    let mesh = Mesh::parse(on).unwrap();
    let args: Vec<_> = args.iter().map(|a| Arg::parse(a, &mesh).unwrap()).collect();
    let query = Query { op, args: &args };
    let topology = Topology::one_node(&mesh);
    propagate(standard_rules().unwrap(), &query, &mesh, &topology).unwrap()
}

fn placed(p: &Propagation) -> String {
    let inputs: Vec<_> = p.inputs.iter().map(|i| written(&i.to)).collect();
    let outputs: Vec<_> = p.outputs.iter().map(|o| written(&o.placements)).collect();
    format!("{} -> {}", inputs.join(" "), outputs.join(" "))
}

#[test]
fn what_is_printed_reads_back() {
    registered();
    for text in ["Cyclic(0)", "Cyclic3(12)", "Simple(1)"] {
        assert_eq!(Placement::parse(text).unwrap().to_string(), text);
    }
    for text in [
        "Cyclic",
        "Cyclic()",
        "Cyclic(-1)",
        "cyclic(0)",
        "Unknown(0)",
    ] {
        assert!(Placement::parse(text).is_err(), "{text}");
    }
    let mesh = Mesh::parse("dp=2").unwrap();
    let spec = Spec::parse("f32[8] @ Cyclic(0)", &mesh).unwrap();
    assert_eq!(partition_spec(&spec.placements, &mesh, 1), None);
}

#[test]
fn a_layout_is_what_the_maps_say() {
    registered();
    let layout = |text: &str, size, at| {
        let placement = [Placement::parse(text).unwrap()];
        Layout::of(size, 0, &placement, &[3], &[at]).unwrap()
    };
    let indices =
        |l: &Layout| -> Vec<u64> { (0..l.size()).map(|i| l.global(i).unwrap()).collect() };
    assert_eq!(indices(&layout("Cyclic(0)", 8, 1)), [1, 4, 7]);
    assert_eq!(layout("Cyclic(0)", 8, 1).to_string(), "(3,1):(3,1)+1");
    assert_eq!(indices(&layout("Cyclic3(0)", 14, 0)), [0, 1, 2, 9, 10, 11]);
    assert_eq!(indices(&layout("Cyclic3(0)", 14, 1)), [3, 4, 5, 12, 13]);
    assert_eq!(indices(&layout("Cyclic3(0)", 14, 2)), [6, 7, 8]);
}

#[test]
fn it_fills_placeholders() {
    for (op, args, expected) in [
        (
            "aten::mm",
            vec!["f32[8,6] @ Cyclic(1)", "f32[6,4] @ Cyclic(0)"],
            "Cyclic(1) Cyclic(0) -> P(sum)",
        ),
        (
            "aten::add.Tensor",
            vec!["f32[8,6] @ Cyclic3(1)", "f32[6] @ Cyclic3(0)"],
            "Cyclic3(1) Cyclic3(0) -> Cyclic3(1)",
        ),
        (
            "aten::relu",
            vec!["f32[7] @ Simple(0)"],
            "Simple(0) -> Simple(0)",
        ),
        (
            "aten::amax",
            vec!["f32[7] @ Cyclic(0)", "[0]"],
            "Cyclic(0) -> P(max)",
        ),
        // The fourth rank would hold nothing.
        ("aten::amax", vec!["f32[3] @ Cyclic(0)", "[0]"], "R -> R"),
        // Strategies that need even or contiguous shards.
        ("aten::mean", vec!["f32[8] @ Cyclic(0)"], "R -> R"),
        ("aten::view", vec!["f32[8,6] @ Cyclic(0)", "[48]"], "R -> R"),
        // A family that it may not fill.
        ("aten::sum", vec!["f32[8] @ Simple(0)"], "R -> R"),
        (
            "aten::sum",
            vec!["f32[8] @ Cyclic(0)"],
            "Cyclic(0) -> P(sum)",
        ),
    ] {
        let found = ask(op, "tp=4", &args);
        assert_eq!(placed(&found), expected, "{op} {args:?}");
        assert_eq!(found.cost_us > 0.0, expected == "R -> R");
    }
    // The rows of a lookup must be contiguous.
    let found = ask(
        "aten::embedding",
        "tp=2",
        &["f32[8,4] @ Cyclic(0)", "i64[5]"],
    );
    assert!(!placed(&found).contains("mask"), "{}", placed(&found));
}

#[test]
fn ways_lead_through_replicate() {
    let found = ask(
        "aten::add.Tensor",
        "tp=2",
        &["f32[1024,1024] @ Cyclic(0)", "f32[1024,1024] @ S(0)"],
    );
    let kinds: Vec<_> = (found.inputs.iter().flat_map(|i| &i.steps))
        .map(|s| s.kind)
        .collect();
    assert_eq!(kinds, [Kind::AllGather, Kind::Chunk], "{found:?}");
}

/// The product of what a rank holds of two matrices, into the whole output.
fn local_product(a: &[u64], b: &[u64], at: &[u64], out: &mut [i64], sizes: [u64; 3]) {
    let [_, k, n] = sizes;
    let value = |index: u64, salt: u64| ((index * 7 + salt) % 11) as i64 - 5;
    for index in at {
        let (row, column) = (index / n, index % n);
        // Only what both hold of the contracted dim.
        for inner in 0..k {
            let (left, right) = (row * k + inner, inner * n + column);
            if a.contains(&left) && b.contains(&right) {
                out[*index as usize] += value(left, 3) * value(right, 5);
            }
        }
    }
}

#[test]
fn a_product_of_pieces_is_the_product() {
    registered();
    let sizes = [7, 6, 5];
    let [m, k, n] = sizes;
    let every = |count: u64| (0..count).collect::<Vec<_>>();
    let mut whole = vec![0; (m * n) as usize];
    local_product(
        &every(m * k),
        &every(k * n),
        &every(m * n),
        &mut whole,
        sizes,
    );
    let mut partial = 0;
    for on in ["2", "3", "2,2"] {
        let mesh = Mesh::parse(on).unwrap();
        let dims = mesh.sizes().len();
        let choices = [
            "R",
            "Cyclic(0)",
            "Cyclic(1)",
            "Cyclic3(0)",
            "Cyclic3(1)",
            "S(0)",
            "S(1)",
        ];
        let choices = choices.map(|c| Placement::parse(c).unwrap());
        let lists = super::data_tests::every(&choices, dims);
        for a in &lists {
            for b in &lists {
                let args = [
                    format!("f32[{m},{k}] @ {}", written(a)),
                    format!("f32[{k},{n}] @ {}", written(b)),
                ];
                let found = ask("aten::mm", on, &[&args[0], &args[1]]);
                let (a, b) = (&found.inputs[0].to, &found.inputs[1].to);
                let out = &found.outputs[0].placements;
                let mut sum = vec![0; (m * n) as usize];
                // Every rank that holds a summand of its own adds it.
                for at in coordinates(mesh.sizes()) {
                    let copies = (0..dims).any(|d| out[d] == Placement::Replicate && at[d] > 0);
                    if copies {
                        continue;
                    }
                    let a = held(&[m, k], a, mesh.sizes(), &at);
                    let b = held(&[k, n], b, mesh.sizes(), &at);
                    let o = held(&[m, n], out, mesh.sizes(), &at);
                    local_product(&a, &b, &o, &mut sum, sizes);
                }
                assert_eq!(sum, whole, "{args:?} on {on}: {}", placed(&found));
                partial += usize::from(out.iter().any(|p| matches!(p, Placement::Partial(_))));
            }
        }
    }
    assert!(partial > 10, "{partial}");
}

#[test]
fn element_wise_ops_meet_the_same_elements() {
    registered();
    for on in ["2", "3", "2,2"] {
        let mesh = Mesh::parse(on).unwrap();
        let choices = [
            "R",
            "Cyclic(0)",
            "Simple(0)",
            "Simple(1)",
            "S(0)",
            "_S(0,2)",
        ];
        let choices = choices.map(|c| Placement::parse(c).unwrap());
        let lists = super::data_tests::every(&choices, mesh.sizes().len());
        for a in &lists {
            for b in &lists {
                let [a, b] = [a, b].map(|p| format!("f32[7,6] @ {}", written(p)));
                let found = ask("aten::mul.Tensor", on, &[&a, &b]);
                for at in coordinates(mesh.sizes()) {
                    let holds = |p: &[Placement]| held(&[7, 6], p, mesh.sizes(), &at);
                    let out = holds(&found.outputs[0].placements);
                    for input in &found.inputs {
                        assert_eq!(holds(&input.to), out, "{a} {b} on {on} at {at:?}");
                    }
                }
            }
        }
    }
}

/// A sharding made of three functions, to be refused.
struct Broken {
    name: &'static str,
    held: fn(u64, u64, u64) -> u64,
    split: fn(u64, u64, u64) -> (u64, u64),
    merge: fn(u64, u64, u64, u64) -> u64,
}

impl Sharding for Broken {
    fn name(&self) -> &str {
        self.name
    }
    fn held(&self, size: u64, ranks: u64, rank: u64) -> u64 {
        (self.held)(size, ranks, rank)
    }
    fn split(&self, size: u64, ranks: u64, index: u64) -> (u64, u64) {
        (self.split)(size, ranks, index)
    }
    fn merge(&self, size: u64, ranks: u64, rank: u64, local: u64) -> u64 {
        (self.merge)(size, ranks, rank, local)
    }
}

#[test]
fn maps_that_lose_or_double_an_index_are_refused() {
    registered();
    let right = || Broken {
        name: "Broken",
        held: |size, ranks, rank| (size + ranks - 1 - rank) / ranks,
        split: |_, ranks, index| (index % ranks, index / ranks),
        merge: |_, ranks, rank, local| local * ranks + rank,
    };
    let mut lost = right();
    lost.held = |size, ranks, _| size / ranks;
    let mut doubled = right();
    doubled.held = |size, _, _| size;
    doubled.split = |_, _, index| (0, index);
    doubled.merge = |_, _, _, local| local;
    let mut outside = right();
    outside.merge = |size, _, _, local| local + size;
    let mut crossed = right();
    crossed.split = |_, ranks, index| (ranks - 1 - index % ranks, index / ranks);
    let mut taken = right();
    taken.name = "Cyclic";
    let mut strange = right();
    strange.name = "a b";
    for (sharding, message) in [
        (
            lost,
            "sharding Broken: expected every index once, found index 0 on no rank of 1 elements \
             on 2 ranks",
        ),
        (
            doubled,
            "sharding Broken: expected every index once, found index 0 at 0 on rank 1 of 1 \
             elements on 2 ranks",
        ),
        (
            outside,
            "sharding Broken: expected indices below the size, found index 1 at 0 on rank 0 of 1 \
             elements on 1 ranks",
        ),
        (
            crossed,
            "sharding Broken: expected split and merge to be inverse, found index 0 at 0 on rank \
             0, split to 0 on rank 1 of 1 elements on 2 ranks",
        ),
        (
            taken,
            "sharding Cyclic: expected a name that is not taken, found \"Cyclic\"",
        ),
        (
            strange,
            "sharding a b: expected a letter, then letters and digits, other than R, S, P, \
             PartitionSpec, found \"a b\"",
        ),
    ] {
        let error = register_sharding(sharding).unwrap_err();
        assert_eq!(error.to_string(), message);
    }
    assert!(register_sharding(right()).is_ok());
}

//! Propagation against full enumeration, and under random questions.

#![allow(clippy::unwrap_used, reason = "tests")]

use super::*;

fn mesh(text: &str) -> Mesh {
    Mesh::parse(text).unwrap()
}

pub(super) fn ask(op: &str, on: &str, args: &[&str]) -> Result<Propagation, PropagationError> {
    let mesh = mesh(on);
    let args: Vec<_> = args
        .iter()
        .map(|a| Arg::parse(a, &mesh))
        .collect::<Result<_, _>>()?;
    let query = Query { op, args: &args };
    propagate(standard_rules()?, &query, &mesh, &Topology::one_node(&mesh))
}

/// Placements of inputs as taken, then of outputs.
pub(super) fn placed(p: &Propagation) -> String {
    let inputs = p.inputs.iter().map(|i| written(&i.to));
    let outputs = p.outputs.iter().map(|o| written(&o.placements));
    let join = |texts: Vec<String>| texts.join(" ");
    format!("{} -> {}", join(inputs.collect()), join(outputs.collect()))
}

pub(super) fn steps(p: &Propagation) -> Vec<String> {
    p.inputs
        .iter()
        .flat_map(|i| i.steps.iter().map(|s| format!("{}@{}", s.kind, s.mesh_dim)))
        .collect()
}

#[test]
fn inputs_that_match_stay() {
    for (op, on, args, expected) in [
        (
            "aten::mm",
            "dp=8,tp=2",
            vec!["f32[64,32] @ S(0),R", "f32[32,128] @ R,S(1)"],
            "S(0),R R,S(1) -> S(0),S(1)",
        ),
        (
            "aten::mm",
            "tp=2",
            vec!["f32[64,32] @ S(1)", "f32[32,128] @ S(0)"],
            "S(1) S(0) -> P(sum)",
        ),
        (
            "aten::add.Tensor",
            "tp=2",
            vec!["f32[4,8] @ S(1)", "f32[8] @ S(0)"],
            "S(1) S(0) -> S(1)",
        ),
        (
            "aten::view",
            "tp=2",
            vec!["f32[4,6] @ S(1)", "[24]"],
            "S(1) -> _S(0,4)",
        ),
        (
            "aten::view",
            "tp=2",
            vec!["f32[24] @ _S(0,4)", "[4,6]"],
            "_S(0,4) -> S(1)",
        ),
        (
            "aten::embedding",
            "tp=2",
            vec!["f32[100,8] @ S(0)", "i64[4,5]"],
            "S(0) R -> P(mask)",
        ),
        (
            "aten::add_.Tensor",
            "tp=2",
            vec!["f32[4] @ S(0)", "f32[4] @ S(0)"],
            "S(0) S(0) -> S(0)",
        ),
        (
            "aten::mm.out",
            "tp=2",
            vec!["f32[4,4] @ S(0)", "f32[4,4]", "f32[4,4] @ S(0)"],
            "S(0) R S(0) -> S(0)",
        ),
    ] {
        let found = ask(op, on, &args).unwrap();
        assert_eq!(placed(&found), expected, "{op} {args:?}");
        assert_eq!((found.cost_us, steps(&found).len()), (0.0, 0));
    }
}

#[test]
fn heads_of_a_grouped_query_stay_with_their_keys() {
    // 8 query heads, 2 key heads: query heads 0 to 3 read key head 0.
    let flash = |mesh: &str| {
        let query = "f16[4,8,64,32] @ S(1)";
        let key = "f16[4,2,64,32] @ S(1)";
        let op = "aten::_scaled_dot_product_flash_attention";
        placed(&ask(op, mesh, &[query, key, key, "0.0", "true"]).unwrap())
    };
    assert_eq!(flash("2"), "S(1) S(1) S(1) -> S(1) S(1) R R");
    assert!(!flash("4").contains("S(1)"), "{}", flash("4"));
}

#[test]
fn running_statistics_stay_where_they_are() {
    let norm = |input: &str, training: &str| {
        let (input, channels) = (format!("f32[4,8,6] @ {input}"), "f32[8]");
        let args = [
            &input, channels, channels, channels, channels, training, "0.1", "1e-5",
        ];
        placed(&ask("aten::native_batch_norm", "2", &args).unwrap())
    };
    // Channels can be cut off weights, but not off what training writes.
    assert_eq!(norm("S(1)", "true"), "R R R R R -> R R R");
    assert_eq!(
        norm("S(1)", "false"),
        "S(1) S(0) S(0) S(0) S(0) -> S(1) S(0) S(0)"
    );
    // Known statistics make the op element-wise.
    assert_eq!(norm("S(0)", "false"), "S(0) R R R R -> S(0) R R");
}

#[test]
fn redistribution_keeps_the_order_of_shards() {
    let mesh = mesh("dp=4,tp=2");
    let topology = Topology::one_node(&mesh);
    let meta = Spec::parse("f32[1024,1024]", &mesh).unwrap().meta.unwrap();
    let go = |from: &str, to: &str| {
        let read = |t: &str| Spec::parse(&format!("f32[1024,1024] @ {t}"), &mesh).unwrap();
        let (from, to) = (read(from).placements, read(to).placements);
        let (steps, _) = plan(&meta, mesh.sizes(), &topology, &from, &to).unwrap();
        let text = |s: &Step| format!("{}@{} {}", s.kind, s.mesh_dim, s.bytes);
        steps.iter().map(text).collect::<Vec<_>>()
    };
    let part = 1024 * 1024 * 4 / 8;
    // The inner split first, then the outer one.
    assert_eq!(
        go("S(0),S(0)", "R,R"),
        [
            format!("all_gather@1 {part}"),
            format!("all_gather@0 {}", 3 * 2 * part)
        ]
    );
    // A strided shard is the inner split: it alone is gathered (FSDP over TP).
    assert_eq!(
        go("_S(0,2),S(0)", "R,S(0)"),
        [format!("all_gather@0 {}", 3 * part)]
    );
    assert_eq!(
        go("P(sum),S(0)", "_S(0,2),S(0)"),
        [format!("reduce_scatter@0 {}", 3 * part)]
    );
    // Chunking first makes the reduction smaller.
    assert_eq!(
        go("P(sum),R", "R,S(0)"),
        [
            "chunk@1 0".into(),
            format!("all_reduce@0 {}", 4 * part * 2 * 3 / 4)
        ]
    );
    assert_eq!(go("R,R", "R,R"), Vec::<String>::new());
}

#[test]
fn uneven_shards_are_padded() {
    let mesh = mesh("tp=4");
    let spec = Spec::parse("f32[5] @ S(0)", &mesh).unwrap();
    let (steps, _) = plan(
        spec.meta.as_ref().unwrap(),
        mesh.sizes(),
        &Topology::one_node(&mesh),
        &spec.placements,
        &[Placement::Replicate],
    )
    .unwrap();
    assert_eq!((steps[0].bytes, steps[0].padding), (24, 24));
}

#[test]
fn errors_name_op_argument_expected_and_found() {
    for (op, args, message) in [
        (
            "aten::mm",
            vec!["f32[4,4] @ S(0),R"],
            "aten::mm: expected 2 arguments, found 1",
        ),
        (
            "aten::mm",
            vec!["f32[4,4] @ S(2),R", "f32[4,4] @ R,R"],
            "aten::mm: argument 0: expected shard dims below 2, the dims of f32[4,4], found S(2)",
        ),
        (
            "aten::mm",
            vec!["f32[4,4] @ R,R", "f32[4,4] @ R"],
            "aten::mm: argument 1: expected 2 placements, one per mesh dim of dp=4,tp=2, found 1: R",
        ),
        (
            "aten::relu",
            vec!["? @ R,R"],
            "aten::relu: argument 0: expected a tensor whose meta is known, found a tensor without \
             meta",
        ),
        (
            "aten::mm",
            vec!["f32[4,4]", "f32[5,4]"],
            "aten::mm: argument 1: expected dim 0 of size 4, as argument 0 has it, found f32[5,4]",
        ),
        (
            "aten::nope",
            vec![],
            "aten::nope: no sharding rule is registered for this op",
        ),
        (
            "aten::add_.Tensor",
            vec!["f32[4] @ R,R", "f32[4] @ P(max),R"],
            "",
        ),
        (
            "aten::relu_",
            vec!["f32[4] @ P(sum),R"],
            "aten::relu_: argument 0 is written in place and cannot be redistributed: expected \
             placements that a strategy keeps, found f32[4] @ P(sum),R",
        ),
    ] {
        match ask(op, "dp=4,tp=2", &args) {
            Ok(_) => assert_eq!(message, "", "{op}"),
            Err(error) => assert_eq!(error.to_string(), message),
        }
    }
}

#[test]
fn an_op_is_registered_once() {
    let mut rules = Registry::standard().unwrap();
    let again = rules.register("aten::mm", |_| Ok(Rule::new(Vec::new(), 2)));
    assert_eq!(
        again.unwrap_err().to_string(),
        "aten::mm: a sharding rule is registered already"
    );
    assert!(
        rules
            .register("my::op", |_| Ok(Rule::new(Vec::new(), 2)))
            .is_ok()
    );
}

/// Numbers that look random and are the same in every run (splitmix64).
pub(super) struct Random(pub(super) u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % n as u64) as usize
    }

    fn of<'a>(&mut self, choices: &[&'a str]) -> &'a str {
        choices[self.below(choices.len())]
    }
}

pub(super) fn random_spec(
    random: &mut Random,
    shape: &str,
    ndim: usize,
    mesh_dims: usize,
) -> String {
    let placements: Vec<String> = (0..mesh_dims)
        .map(|_| match random.below(8) {
            0 | 1 => "R".into(),
            2 => "P(sum)".into(),
            3 => format!("P({})", random.of(&["avg", "max", "min", "product"])),
            4 if ndim > 0 => format!("_S({},{})", random.below(ndim), 1 + random.below(3)),
            _ if ndim > 0 => format!("S({})", random.below(ndim)),
            _ => "R".into(),
        })
        .collect();
    format!("f32[{shape}] @ {}", placements.join(","))
}

#[test]
fn search_finds_what_full_enumeration_finds() {
    let random = &mut Random(1);
    let mut moved = 0;
    for number in 0..400 {
        let (on, dims) = [("a=2", 1), ("a=2,b=3", 2), ("a=4,b=2", 2)][random.below(3)];
        let big = random.of(&["8,12", "9,7", "4096,2048", "2,24"]);
        let back = match big {
            "8,12" => "12,8",
            "9,7" => "7,9",
            "4096,2048" => "2048,4096",
            _ => "24,2",
        };
        let (op, args) = match number % 4 {
            0 => (
                "aten::mm",
                vec![
                    random_spec(random, big, 2, dims),
                    random_spec(random, back, 2, dims),
                ],
            ),
            1 => (
                "aten::add.Tensor",
                vec![
                    random_spec(random, big, 2, dims),
                    random_spec(random, big, 2, dims),
                ],
            ),
            2 => (
                "aten::sum.dim_IntList",
                vec![random_spec(random, big, 2, dims), "[0]".into()],
            ),
            _ => (
                "aten::where.self",
                vec![
                    random_spec(random, big, 2, dims),
                    random_spec(random, big, 2, dims),
                    random_spec(random, "1", 1, dims),
                ],
            ),
        };
        let mesh = mesh(on);
        let parsed: Vec<_> = args.iter().map(|a| Arg::parse(a, &mesh).unwrap()).collect();
        let query = Query { op, args: &parsed };
        let rules = standard_rules().unwrap();
        let topology = Topology::one_node(&mesh);
        let found = propagate(rules, &query, &mesh, &topology).unwrap();
        let all = candidates(rules, &query, &mesh, &topology).unwrap();
        let least = all[0].cost_us;
        let told = format!("{op} on {on}: {args:?}\n{found:?}\n{:?}", all[0]);
        assert!((found.cost_us - least).abs() < 1e-6, "{told}");
        // Inputs that match stay, even where a chunk would cost nothing either.
        let stays = found.inputs.iter().all(|i| i.from == i.to);
        assert!(stays || placed(&found) == placed(&all[0]), "{told}");
        moved += usize::from(found.cost_us > 0.0);
        assert_eq!(found, propagate(rules, &query, &mesh, &topology).unwrap());
    }
    assert!(moved > 150, "{moved} of 400 had to move something");
}

#[test]
fn random_questions_never_panic() {
    let random = &mut Random(7);
    let rules = standard_rules().unwrap();
    let mut ops: Vec<String> = rules.ops().into_iter().map(str::to_owned).collect();
    for op in [
        "aten::add_.Tensor",
        "aten::relu_",
        "aten::mul.out",
        "aten::sum.out",
    ] {
        ops.push(op.into());
    }
    let mut answered = 0;
    for _ in 0..45_000 {
        let (on, dims) = [
            ("a=2", 1),
            ("a=2,b=3", 2),
            ("a=1,b=4", 2),
            ("a=2,b=2,c=2", 3),
        ][random.below(4)];
        let mesh = mesh(on);
        let args: Vec<Arg> = (0..random.below(6))
            .map(|_| {
                let shapes = ["", "4", "4,6", "6,4", "0,4", "4,6,2", "1,24", "7", "1"];
                let shape = shapes[random.below(shapes.len())];
                let ndim = shape.split(',').filter(|s| !s.is_empty()).count();
                let dims = if random.below(20) == 0 {
                    dims + 1
                } else {
                    dims
                };
                let dim = if random.below(20) == 0 {
                    ndim + 1
                } else {
                    ndim
                };
                let text = match random.below(10) {
                    0 => random
                        .of(&["[0]", "[24]", "[4,6]", "[-1]", "[]", "[true,false]"])
                        .into(),
                    1 => random
                        .of(&["0", "1", "-1", "5", "-9223372036854775808"])
                        .into(),
                    2 => random.of(&["true", "none", "bf16", "0.5"]).into(),
                    3 => {
                        let one = random_spec(random, shape, dim, dims);
                        let two = random_spec(random, shape, dim, dims);
                        format!("{{{one}; {two}}}")
                    }
                    _ => random_spec(random, shape, dim, dims),
                };
                Arg::parse(&text, &mesh).unwrap()
            })
            .collect();
        let op = &ops[random.below(ops.len())];
        let query = Query { op, args: &args };
        answered +=
            usize::from(propagate(rules, &query, &mesh, &Topology::one_node(&mesh)).is_ok());
    }
    assert!(answered > 1_500, "{answered}");
}

#[test]
fn out_forms_with_several_outputs_pin_each_of_them() {
    let out = |values: &str, indices: &str| {
        let args = ["f32[8,4] @ S(0)", "1", "false", values, indices];
        ask("aten::max.dim_max", "d=2", &args)
    };
    assert!(out("f32[8] @ S(0)", "i64[8] @ S(0)").is_ok());
    assert!(out("f32[8] @ S(0)", "i64[8] @ R").is_err());
    assert!(out("f32[8] @ R", "i64[8] @ S(0)").is_err());
}

#[test]
fn in_place_results_have_the_shape_of_what_is_written() {
    let error = ask("aten::add_.Tensor", "d=2", &["f32[4]", "f32[3,4]"]).unwrap_err();
    assert!(error.to_string().contains("[3, 4]"), "{error}");
    let kept = ask("aten::cumsum_", "d=2", &["i32[4,6] @ S(0)", "1"]).unwrap();
    assert_eq!(kept.outputs[0].to_string(), "i32[4,6] @ S(0)");
}

//! How long propagation takes for ops on many tensors, over 1 to 6 mesh dims. The
//! aim is less than 100 ms for every op of up to 300 tensors; the last line says how many
//! questions take longer.
//!
//! ```text
//! cargo bench --bench propagation_growth -- [--tensors 300] [--seed 1] [--runs 3]
//!     [--op PART_OF_A_NAME] [--dims 6] [--above MS]
//! ```
//!
//! Asked are every `_foreach_` and `_fused_` op, by its schema, and other ops with many
//! tensors, dims or letters. All tensors of a list have different shapes. Placements are
//! one of these kinds:
//!
//! | kind | placements |
//! |---|---|
//! | equal | drawn once per list |
//! | mixed | drawn per tensor: replicated, shards, partials |
//! | strided | the same, strided shards among them |
//!
//! Tensors that an op writes have no partials, and those of one fused optimizer's entry
//! lie alike. Each row of the table has the median of the runs, the cost of the answer,
//! and a digest of it: two builds answer a question alike if the digests are equal.

use std::hash::Hasher;
use std::process::ExitCode;
use std::time::Instant;

use rote_propagation::{Arg, Mesh, Query, Topology, propagate, standard_rules};
use xxhash_rust::xxh3::Xxh3;

const SCHEMAS: &str = include_str!("../propagation/src/schemas.txt");
const KINDS: [&str; 3] = ["equal", "mixed", "strided"];
const LIMIT_MS: f64 = 100.0;

/// What is asked and shown.
struct Options {
    tensors: usize,
    seed: u64,
    runs: usize,
    op: String,
    dims: Option<usize>,
    above_ms: f64,
}

impl Options {
    fn read() -> Result<Options, String> {
        let mut options = Options {
            tensors: 300,
            seed: 1,
            runs: 3,
            op: String::new(),
            dims: None,
            above_ms: 0.0,
        };
        let mut args = std::env::args().skip(1).filter(|a| a != "--bench");
        while let Some(name) = args.next() {
            let value = args.next().ok_or_else(|| format!("{name} needs a value"))?;
            let number = || value.parse::<usize>().map_err(|e| format!("{name}: {e}"));
            match name.as_str() {
                "--tensors" => options.tensors = number()?.clamp(1, 343),
                "--seed" => options.seed = number()? as u64,
                "--runs" => options.runs = number()?.max(1),
                "--op" => options.op.clone_from(&value),
                "--dims" => options.dims = Some(number()?.clamp(1, 8)),
                "--above" => options.above_ms = number()? as f64,
                _ => return Err(format!("unknown option {name}")),
            }
        }
        Ok(options)
    }
}

/// Numbers that look random and are the same in every run (splitmix64).
struct Random(u64);

impl Random {
    fn of(name: &str, seed: u64) -> Random {
        let mut hasher = Xxh3::with_seed(seed);
        hasher.write(name.as_bytes());
        Random(hasher.finish())
    }

    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % n as u64) as usize
    }
}

/// What draws the arguments of one question.
struct Draw {
    random: Random,
    mesh_dims: usize,
    kind: &'static str,
}

impl Draw {
    fn placements(&mut self, ndim: usize, partials: bool) -> String {
        let one = |_| match self.random.below(8) {
            0..=2 if partials => {
                let op = ["sum", "sum", "avg", "max"][self.random.below(4)];
                format!("P({op})")
            }
            3 | 4 if self.kind == "strided" && ndim > 0 => {
                let factor = [2, 4, 8][self.random.below(3)];
                format!("_S({},{factor})", self.random.below(ndim))
            }
            3..=6 if ndim > 0 => format!("S({})", self.random.below(ndim)),
            _ => "R".into(),
        };
        let all: Vec<_> = (0..self.mesh_dims).map(one).collect();
        all.join(",")
    }

    /// A tensor of this shape.
    fn tensor(&mut self, shape: &[usize], partials: bool) -> String {
        let placements = self.placements(shape.len(), partials);
        tensor(shape, &placements)
    }

    /// A list of tensors of these shapes.
    fn list(&mut self, shapes: &[Vec<usize>], partials: bool) -> String {
        let ndim = shapes.first().map_or(0, Vec::len);
        let one = self.placements(ndim, partials);
        let tensors = shapes.iter().map(|shape| match self.kind {
            "equal" => tensor(shape, &one),
            _ => self.tensor(shape, partials),
        });
        braces(tensors)
    }
}

fn tensor(shape: &[usize], placements: &str) -> String {
    let shape: Vec<_> = shape.iter().map(usize::to_string).collect();
    format!("f32[{}] @ {placements}", shape.join(","))
}

fn braces(tensors: impl Iterator<Item = String>) -> String {
    format!("{{{}}}", tensors.collect::<Vec<_>>().join(";"))
}

/// The shape of each entry, all different, with shards for every mesh dim.
fn shapes(tensors: usize) -> Vec<Vec<usize>> {
    let shape = |i| vec![64 * (1 + i % 7), 64 * (1 + i / 7 % 7), 64 * (1 + i / 49)];
    (0..tensors).map(shape).collect()
}

/// Arguments for an op on lists, by its schema.
fn of_lists(schema: &str, tensors: usize, draw: &mut Draw) -> Vec<String> {
    let (op, parameters) = schema.split_once('(').unwrap_or((schema, ""));
    let parameters = parameters.trim_end_matches(')').split(", ");
    let name = op.split('.').next().unwrap_or(op);
    let (fused, in_place) = (op.contains("_fused_"), name.ends_with('_'));
    let entries = shapes(tensors);
    // All that one entry of a fused optimizer writes lies alike.
    let once = draw.placements(3, false);
    let own: Vec<String> = (entries.iter())
        .map(|_| match draw.kind {
            "equal" => once.clone(),
            _ => draw.placements(3, false),
        })
        .collect();
    let mut args = Vec::new();
    for parameter in parameters.filter(|p| *p != "*") {
        let (kind, name) = parameter.split_once(' ').unwrap_or((parameter, ""));
        let written = name == "out" || in_place && args.is_empty();
        args.push(match kind {
            "Tensor[]" if name == "state_steps" => {
                let step = tensor(&[], &vec!["R"; draw.mesh_dims].join(","));
                braces(vec![step; tensors].into_iter())
            }
            "Tensor[]" if fused && in_place && name != "grads" => {
                braces(entries.iter().zip(&own).map(|(shape, p)| tensor(shape, p)))
            }
            "Tensor[]" if op.ends_with("_mm") => {
                let pair = |e: &Vec<usize>| match name {
                    "self" => vec![e[0], e[1]],
                    _ => vec![e[1], e[2]],
                };
                draw.list(&entries.iter().map(pair).collect::<Vec<_>>(), true)
            }
            "Tensor[]" if written && name == "out" && reduces(op) => {
                draw.list(&vec![Vec::new(); tensors], false)
            }
            "Tensor[]" => draw.list(&entries, !written),
            "Tensor" if name == "scalars" => {
                tensor(&[tensors], &vec!["R"; draw.mesh_dims].join(","))
            }
            "Tensor" if name == "found_inf" || name == "inv_scale" => {
                tensor(&[1], &vec!["R"; draw.mesh_dims].join(","))
            }
            "Tensor" => draw.tensor(&[], true),
            "Scalar[]" => format!("[{}]", vec!["0.5"; tensors].join(",")),
            "Scalar" | "Scalar ord" | "float" => "2.0".into(),
            "bool" => "false".into(),
            _ => "none".into(),
        });
    }
    args
}

/// Whether an op on lists makes a number of each entry.
fn reduces(op: &str) -> bool {
    ["_foreach_norm", "_foreach_max.", "_foreach_powsum"]
        .iter()
        .any(|name| op.contains(name))
}

/// Ops that are no ops on lists, with many tensors, dims or letters.
const OTHERS: &[&str] = &[
    "aten::cat",
    "aten::cat.out",
    "aten::stack",
    "aten::stack.out",
    "aten::index.Tensor",
    "aten::index_put",
    "aten::index_put_",
    "aten::einsum/8-letters",
    "aten::einsum/26-letters",
    "aten::split.Tensor",
    "aten::unbind.int",
    "aten::add.Tensor/24-dims",
    "aten::add.Tensor/64-dims",
    "aten::where.self",
    "aten::addcmul",
    "aten::sum.dim_IntList/24-dims",
    "aten::permute/24-dims",
    "aten::bmm",
    "aten::baddbmm",
    "aten::convolution_backward",
    "aten::native_layer_norm_backward",
    "aten::native_batch_norm_backward",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_efficient_attention_backward",
];

/// Arguments for one of [`OTHERS`].
fn of_others(case: &str, tensors: usize, draw: &mut Draw) -> Vec<String> {
    let alike = vec![vec![64, 64, 64]; tensors];
    let many = |dims: usize, size: usize| vec![size; dims];
    match case {
        "aten::cat" => {
            let shape = |i: usize| vec![64 * (1 + i), 64, 64];
            vec![draw.list(&(0..tensors).map(shape).collect::<Vec<_>>(), true)]
        }
        "aten::cat.out" => vec![
            draw.list(&alike, true),
            "0".into(),
            draw.tensor(&[64 * tensors, 64, 64], false),
        ],
        "aten::stack" => vec![draw.list(&alike, true), "1".into()],
        "aten::stack.out" => vec![
            draw.list(&alike, true),
            "0".into(),
            draw.tensor(&[tensors, 64, 64, 64], false),
        ],
        "aten::index.Tensor" | "aten::index_put" | "aten::index_put_" => {
            let index = |draw: &mut Draw| draw.tensor(&[64, 64], false).replace("f32", "i64");
            let written = case.ends_with('_');
            let whole = draw.tensor(&many(8, 64)[..5], !written);
            let indices = braces((0..4).map(|_| index(draw)));
            match case {
                "aten::index.Tensor" => vec![whole, indices],
                _ => vec![whole, indices, draw.tensor(&[64, 64, 64], true)],
            }
        }
        "aten::einsum/8-letters" => vec![
            "'abcd,cdef,efgh,ah->bg'".into(),
            braces(
                [4, 4, 4, 2]
                    .map(|n| draw.tensor(&many(n, 64), true))
                    .into_iter(),
            ),
        ],
        "aten::einsum/26-letters" => vec![
            "'abcdefghij,fghijklmno,klmnopqrst,pqrstuvwxyz->abcdeuvwxyz'".into(),
            braces(
                [10, 10, 10, 11]
                    .map(|n| draw.tensor(&many(n, 8), true))
                    .into_iter(),
            ),
        ],
        "aten::split.Tensor" => vec![draw.tensor(&[64 * tensors, 64, 64], true), "64".into()],
        "aten::unbind.int" => vec![draw.tensor(&[tensors, 64, 64], true), "0".into()],
        "aten::add.Tensor/24-dims" => {
            vec![
                draw.tensor(&many(24, 4), true),
                draw.tensor(&many(24, 4), true),
            ]
        }
        "aten::add.Tensor/64-dims" => {
            let mut shape = many(64, 1);
            shape[..8].fill(64);
            vec![draw.tensor(&shape, true), draw.tensor(&shape, true)]
        }
        "aten::where.self" => vec![
            draw.tensor(&many(3, 64), false).replace("f32", "bool"),
            draw.tensor(&many(3, 64), true),
            draw.tensor(&many(3, 64), true),
        ],
        "aten::addcmul" => (0..3).map(|_| draw.tensor(&many(3, 64), true)).collect(),
        "aten::sum.dim_IntList/24-dims" => {
            vec![draw.tensor(&many(24, 4), true), "[0,2,4,6,8,10,12]".into()]
        }
        "aten::permute/24-dims" => {
            let order: Vec<_> = (0..24).rev().map(|d: usize| d.to_string()).collect();
            vec![
                draw.tensor(&many(24, 4), true),
                format!("[{}]", order.join(",")),
            ]
        }
        "aten::bmm" => (0..2).map(|_| draw.tensor(&many(3, 64), true)).collect(),
        "aten::baddbmm" => (0..3).map(|_| draw.tensor(&many(3, 64), true)).collect(),
        "aten::convolution_backward" => vec![
            draw.tensor(&[64, 64, 64, 64], true),
            draw.tensor(&[64, 64, 64, 64], true),
            draw.tensor(&[64, 64, 1, 1], true),
            "[64]".into(),
            "[1,1]".into(),
            "[0,0]".into(),
            "[1,1]".into(),
            "false".into(),
            "[0,0]".into(),
            "1".into(),
            "[1,1,1]".into(),
        ],
        "aten::native_layer_norm_backward" => vec![
            draw.tensor(&[64, 64, 64], true),
            draw.tensor(&[64, 64, 64], true),
            "[64]".into(),
            draw.tensor(&[64, 64, 1], false),
            draw.tensor(&[64, 64, 1], false),
            draw.tensor(&[64], true),
            draw.tensor(&[64], true),
            "[1,1,1]".into(),
        ],
        "aten::native_batch_norm_backward" => vec![
            draw.tensor(&[64, 64, 64], true),
            draw.tensor(&[64, 64, 64], true),
            draw.tensor(&[64], true),
            draw.tensor(&[64], false),
            draw.tensor(&[64], false),
            draw.tensor(&[64], false),
            draw.tensor(&[64], false),
            "true".into(),
            "1e-5".into(),
            "[1,1,1]".into(),
        ],
        "aten::_scaled_dot_product_flash_attention" => (0..3)
            .map(|_| draw.tensor(&[64, 64, 64, 64], true))
            .collect(),
        "aten::_scaled_dot_product_efficient_attention_backward" => {
            let mut args: Vec<_> = (0..4)
                .map(|_| draw.tensor(&[64, 64, 64, 64], true))
                .collect();
            args.push(draw.tensor(&[64, 64, 64, 64], true));
            args.push(draw.tensor(&[64, 64, 64, 64], true));
            args.push(draw.tensor(&[64, 64, 64], false));
            args.extend(["i64[]".into(), "i64[]".into()]);
            args.extend(["0.0".into(), "[1,1,1,0]".into()]);
            args
        }
        _ => vec![draw.list(&alike, true)],
    }
}

/// A row of the table.
struct Row {
    op: String,
    kind: &'static str,
    dims: usize,
    ms: f64,
    answer: String,
}

fn measure(
    case: &str,
    schema: Option<&str>,
    options: &Options,
    kind: &'static str,
    dims: usize,
) -> Row {
    let on = vec!["2"; dims].join(",");
    let mesh = Mesh::parse(&on).expect("a mesh");
    let topology = Topology::one_node(&mesh);
    let rules = standard_rules().expect("rules");
    let mut draw = Draw {
        random: Random::of(&format!("{case} {kind} {dims}"), options.seed),
        mesh_dims: dims,
        kind,
    };
    let texts = match schema {
        Some(schema) => of_lists(schema, options.tensors, &mut draw),
        None => of_others(case, options.tensors, &mut draw),
    };
    let args: Vec<_> = texts
        .iter()
        .map(|a| Arg::parse(a, &mesh).expect("an argument"))
        .collect();
    let op = case.split('/').next().unwrap_or(case);
    let query = Query { op, args: &args };
    let mut times = Vec::new();
    let mut answer = String::new();
    for _ in 0..options.runs {
        let start = Instant::now();
        let found = propagate(rules, &query, &mesh, &topology);
        times.push(start.elapsed().as_secs_f64() * 1e3);
        answer = match found {
            Ok(found) => {
                let mut hasher = Xxh3::new();
                hasher.write(format!("{found:?}").as_bytes());
                format!("{:>14.2} {:016x}", found.cost_us, hasher.finish())
            }
            Err(error) => {
                let text: String = error.to_string().chars().take(60).collect();
                format!("refused: {text}")
            }
        };
    }
    times.sort_by(f64::total_cmp);
    Row {
        op: case.to_owned(),
        kind,
        dims,
        ms: times[times.len() / 2],
        answer,
    }
}

fn main() -> ExitCode {
    let options = match Options::read() {
        Ok(options) => options,
        Err(error) => {
            eprintln!("propagation_growth: {error}");
            return ExitCode::from(2);
        }
    };
    let lists = SCHEMAS.lines().filter(|line| {
        let on_lists = line.contains("foreach_") || line.contains("_fused_");
        on_lists && line.contains("(Tensor[]") || line.contains("(Scalar self, Tensor[]")
    });
    let lists = lists.map(|line| (line.split('(').next().unwrap_or(line), Some(line)));
    let cases = lists.chain(OTHERS.iter().map(|case| (*case, None)));
    let head = ["op", "tensors", "dims", "kind", "ms", "cost_us", "digest"];
    let [op, tensors, dims, kind, ms, cost, digest] = head;
    println!("{op:<54} {tensors:>7} {dims:>4} {kind:<8} {ms:>9} {cost:>14} {digest}");
    let mut slow = 0;
    for (case, schema) in cases.filter(|(case, _)| case.contains(&options.op)) {
        for kind in KINDS {
            for dims in options.dims.map_or(1..=6, |dims| dims..=dims) {
                let row = measure(case, schema, &options, kind, dims);
                slow += usize::from(row.ms > LIMIT_MS);
                if row.ms < options.above_ms {
                    continue;
                }
                let Row {
                    op,
                    kind,
                    dims,
                    ms,
                    answer,
                } = row;
                let tensors = options.tensors;
                println!("{op:<54} {tensors:>7} {dims:>4} {kind:<8} {ms:>9.3} {answer}");
            }
        }
    }
    println!("{slow} questions took more than {LIMIT_MS} ms");
    ExitCode::SUCCESS
}

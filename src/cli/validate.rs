//! `rote validate`: the truth table of sharding rules.

use std::io::{self, BufRead, BufReader, IsTerminal, Write};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Instant;

use clap::Args;
use serde_json::{Value, json};

use super::{Trouble, complain};

/// Judge sharding rules by a truth table.
///
/// Runs the local ops of every placement combination on pieces of random tensors,
/// and compares their results with the op on the whole tensors. A rule is wrong if
/// it claims a combination that is not true. A rule is missing if no rule claims a
/// true combination.
///
/// On a mesh of one dim, inputs and outputs are tried in all combinations of
/// replicated, sharded and partial (sum, avg, max, min, product). If there are more
/// than 2,048 combinations, partials are tried one kind at a time. Claims are also
/// judged with strided shards. On meshes of several dims, the combinations that
/// follow from the rules are judged, and missing rules are not looked for. If there
/// are more than 1,500 combinations, a regular part of them is judged.
///
/// Kernels are PyTorch's, on the CPU. They run in a Python with the packages torch
/// and rote: $ROTE_PYTHON, the python3 beside this program, or the python3 in the
/// path. Floats are judged within 1e-7, in double precision if the op takes it.
/// Integers and truth values are judged exactly. Random and undefined values are
/// judged by their shapes alone.
///
/// The exit status is 1 if a rule is wrong, or is missing without a reason on
/// record, or if the arguments given are none that the op takes.
#[derive(Debug, Args)]
pub(super) struct Validate {
    /// Ops, separated by commas: mm, add.Tensor, aten::mm; or all, for every op that
    /// has samples
    #[arg(long, required = true, value_delimiter = ',')]
    op: Vec<String>,
    /// The number of ranks of a mesh of one dim
    #[arg(long, default_value_t = 2, conflicts_with = "mesh")]
    world: u32,
    /// Ranks per mesh dim, for example 2,2
    #[arg(long)]
    mesh: Option<String>,
    /// The op's arguments, as the samples write them: "f32[8,4] i64[3]<8 1"
    #[arg(long, allow_hyphen_values = true)]
    args: Option<String>,
    /// A Python module to import first, which registers sharding rules; may be repeated
    #[arg(long, value_name = "MODULE")]
    import: Vec<String>,
    /// Also judge with this placement of a class that the modules register, for example
    /// 'RaggedShard(0,1,3)' (shards of any dim) or 'P(LogSumExp)'; may be repeated
    #[arg(long, value_name = "PLACEMENT")]
    placement: Vec<String>,
    /// Only this combination, for example 'S(0),R -> S(0)'; tensors are separated
    /// by semicolons where the mesh has several dims
    #[arg(long)]
    only: Option<String>,
    /// Look for wrong rules only
    #[arg(long)]
    wrong_only: bool,
    /// Also list missing rules that have a reason on record
    #[arg(long)]
    left_out: bool,
    /// Print JSON, one object per op
    #[arg(long)]
    json: bool,
    /// Show progress on stderr even if stderr is not a terminal
    #[arg(long)]
    progress: bool,
}

/// What the interpreter is told to do with the request in its first argument.
const PROGRAM: &str = "
import sys
try:
    from rote._validate import main
except (ImportError, AttributeError, OSError) as error:
    sys.exit(f'rote validate needs torch and this version of rote in {sys.executable}: {error}')
main()
";

/// Numbers over all ops.
#[derive(Default)]
struct Total {
    ops: usize,
    samples: u64,
    tried: u64,
    correct: u64,
    wrong: usize,
    missing: usize,
    left_out: usize,
    unjudged: usize,
}

impl Validate {
    pub(super) fn run(&self, out: &mut impl Write) -> Result<u8, Trouble> {
        let python = interpreter();
        let mut request = json!({
            "ops": self.op,
            "mesh": self.mesh.clone().unwrap_or_else(|| self.world.to_string()),
            "missing": !self.wrong_only,
            "import": self.import,
            "placements": self.placement,
        });
        for (key, text) in [("args", &self.args), ("only", &self.only)] {
            if let Some(text) = text {
                request[key] = text.as_str().into();
            }
        }
        let started = Command::new(&python)
            .args(["-c", PROGRAM, &request.to_string()])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn();
        let mut child = started.map_err(|error| Trouble::Interpreter {
            path: python.clone(),
            error,
        })?;
        let mut total = Total::default();
        let mut progress = Progress::new(self.progress || io::stderr().is_terminal());
        if let Some(lines) = child.stdout.take() {
            for line in BufReader::new(lines).lines() {
                let Ok(event) = serde_json::from_str::<Value>(&line?) else {
                    continue;
                };
                if event.get("start").is_some() {
                    progress.start(&event, &total);
                } else {
                    progress.clear();
                    total.add(&event);
                    self.show(&event, out)?;
                    out.flush()?;
                }
            }
        }
        progress.clear();
        let status = child.wait()?;
        if !status.success() {
            match (status.code(), &progress.op) {
                // It has said why on stderr.
                (Some(_), _) => {}
                (None, Some(op)) => complain(&format!("{op}: the kernel crashed ({status})")),
                (None, None) => complain(&format!("{}: {status}", python.display())),
            }
            return Ok(2);
        }
        if !self.json {
            total.show(out)?;
        }
        let unfit = self.args.is_some() && total.samples == 0;
        Ok(u8::from(total.wrong + total.missing > 0 || unfit))
    }

    fn show(&self, report: &Value, out: &mut impl Write) -> io::Result<()> {
        if self.json {
            return writeln!(out, "{report}");
        }
        let list = |key: &str| report[key].as_array().cloned().unwrap_or_default();
        let op = report["op"].as_str().unwrap_or_default();
        let (wrong, missing, left_out) = (list("wrong"), list("missing"), list("left_out"));
        writeln!(
            out,
            "{op:<40} {:>5} correct {:>3} wrong {:>3} missing {:>3} left out  {:>6} tried",
            report["correct"],
            wrong.len(),
            missing.len(),
            left_out.len(),
            report["tried"]
        )?;
        let text = |f: &Value, key: &str| f[key].as_str().unwrap_or_default().to_owned();
        let untrue = list("untrue");
        let each = [
            ("WRONG", &wrong),
            ("MISSING", &missing),
            ("neither claimed nor true:", &untrue),
        ];
        for (what, findings) in each {
            for f in findings {
                let reason = text(f, "reason");
                let colon = if reason.is_empty() { "" } else { ": " };
                writeln!(out, "  {what} {}{colon}{reason}", text(f, "combination"))?;
                let imports = self.import.iter();
                let imports: String = imports.map(|name| format!(" --import {name}")).collect();
                writeln!(out, "    {}{imports}", text(f, "repro"))?;
            }
        }
        if self.left_out {
            for f in &left_out {
                writeln!(
                    out,
                    "  left out {}: {}",
                    text(f, "combination"),
                    text(f, "reason")
                )?;
            }
        }
        for f in list("unjudged") {
            writeln!(
                out,
                "  not judged {}: {}",
                text(&f, "args"),
                text(&f, "reason")
            )?;
        }
        Ok(())
    }
}

/// The Python that has torch and rote.
fn interpreter() -> PathBuf {
    if let Some(named) = std::env::var_os("ROTE_PYTHON") {
        return named.into();
    }
    let own = std::env::current_exe().ok();
    let beside = own.and_then(|p| Some(p.parent()?.join("python3")));
    beside
        .filter(|p| p.exists())
        .unwrap_or_else(|| "python3".into())
}

impl Total {
    fn add(&mut self, report: &Value) {
        let number = |key: &str| report[key].as_u64().unwrap_or_default();
        let count = |key: &str| report[key].as_array().map_or(0, Vec::len);
        self.ops += usize::from(number("samples") > 0);
        self.samples += number("samples");
        self.tried += number("tried");
        self.correct += number("correct");
        self.wrong += count("wrong");
        self.missing += count("missing");
        self.left_out += count("left_out");
        self.unjudged += count("unjudged");
    }

    fn show(&self, out: &mut impl Write) -> io::Result<()> {
        writeln!(out)?;
        for (what, count) in [
            ("ops judged", self.ops as u64),
            ("samples", self.samples),
            ("placements of inputs tried", self.tried),
            ("claimed and correct", self.correct),
            ("claimed and wrong", self.wrong as u64),
            ("true and missing", self.missing as u64),
            ("true and left out", self.left_out as u64),
            ("not judged, or in part", self.unjudged as u64),
        ] {
            writeln!(out, "{what:<28} {count:>8}")?;
        }
        Ok(())
    }
}

/// One line on stderr that is written over.
struct Progress {
    shown: bool,
    start: Instant,
    op: Option<String>,
}

impl Progress {
    fn new(shown: bool) -> Self {
        Progress {
            shown,
            start: Instant::now(),
            op: None,
        }
    }

    fn start(&mut self, event: &Value, total: &Total) {
        let op = event["start"].as_str().unwrap_or_default();
        let number = event["number"].as_u64().unwrap_or(1);
        let all = event["total"].as_u64().unwrap_or(1);
        if number == 1 {
            // What came before was starting Python.
            self.start = Instant::now();
        }
        self.op = Some(op.to_owned());
        if self.shown {
            let spent = self.start.elapsed().as_secs_f64();
            let done = (number - 1) as f64;
            let left = match number {
                0..=4 => String::new(),
                _ => format!(", {:.0} s left", spent / done * (all as f64 - done)),
            };
            let mut line = io::stderr().lock();
            let _ = write!(
                line,
                "\r\x1b[Kop {number} of {all}, {} combinations{left}: {op}",
                total.tried
            );
            let _ = line.flush();
        }
    }

    fn clear(&self) {
        if self.shown {
            let _ = write!(io::stderr(), "\r\x1b[K");
        }
    }
}

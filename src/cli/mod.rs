//! The commands of `rote`, one module each.

mod check;
mod diff;
mod ops;
mod passes;
mod propagate;
mod show;
mod validate;

use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use rote_plans::{PlanError, PlanFile, PlanStore};

/// Shows plans that Rote has recorded, and how ops change placements.
#[derive(Debug, Parser)]
#[command(name = "rote", version, propagate_version = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Show(show::Show),
    Check(check::Check),
    Diff(diff::Diff),
    Propagate(propagate::Propagate),
    Validate(validate::Validate),
    Passes(passes::Passes),
}

/// Reads the arguments, runs the command and says how it went.
pub fn main() -> ExitCode {
    let mut out = io::BufWriter::new(io::stdout().lock());
    let (ran, trouble) = match Cli::parse().command {
        Command::Show(show) => (show.run(&mut out), 1),
        Command::Check(check) => (check.run(&mut out), 1),
        Command::Diff(diff) => (diff.run(&mut out), 2),
        Command::Propagate(propagate) => (propagate.run(&mut out), 1),
        Command::Validate(validate) => (validate.run(&mut out), 2),
        Command::Passes(passes) => (passes.run(&mut out), 1),
    };
    match ran.and_then(|code| {
        out.flush()?;
        Ok(code)
    }) {
        Ok(code) => ExitCode::from(code),
        // Whoever reads has seen enough, as `head` does.
        Err(Trouble::Output(e)) if e.kind() == ErrorKind::BrokenPipe => ExitCode::SUCCESS,
        Err(trouble_met) => {
            complain(&trouble_met.to_string());
            ExitCode::from(trouble)
        }
    }
}

/// Why a command could not do its work.
#[derive(Debug, thiserror::Error)]
enum Trouble {
    #[error("{}", problem(path, error))]
    Plan { path: PathBuf, error: PlanError },
    #[error("{path}: holds no plan", path = path.display())]
    NoPlan { path: PathBuf },
    #[error("{path}: holds {count} plans: name one of them", path = path.display())]
    ManyPlans { path: PathBuf, count: usize },
    #[error("cannot start {path} to run PyTorch's kernels: {error} (set ROTE_PYTHON to a Python with torch)", path = path.display())]
    Interpreter { path: PathBuf, error: io::Error },
    #[error("cannot write the output: {0}")]
    Output(#[from] io::Error),
}

/// One line for what is wrong with a file, which the system's errors name
/// themselves.
fn problem(path: &Path, error: &PlanError) -> String {
    match error {
        PlanError::Io { .. } | PlanError::NotAFile { .. } => error.to_string(),
        _ => format!("{}: {error}", path.display()),
    }
}

/// A line on stderr; nobody may be listening.
fn complain(line: &str) {
    let _ = writeln!(io::stderr(), "{line}");
}

fn open(path: &Path) -> Result<PlanFile, Trouble> {
    PlanFile::open(path).map_err(|error| Trouble::Plan {
        path: path.into(),
        error,
    })
}

/// A plan file, and the rank that its name stands for if it lies in a store.
struct Found {
    path: PathBuf,
    rank: Option<u32>,
}

/// The plan files under a path: the file itself, or those of a plan store or of
/// one of its keys.
fn find(path: &Path) -> Result<Vec<Found>, Trouble> {
    if !path.is_dir() {
        return Ok(vec![Found {
            path: path.into(),
            rank: None,
        }]);
    }
    let failed = |error| Trouble::Plan {
        path: path.into(),
        error,
    };
    let mut found: Vec<_> = PlanStore::files_of_key(path)
        .map_err(failed)?
        .into_iter()
        .map(|(rank, path)| Found {
            path,
            rank: Some(rank),
        })
        .collect();
    let store = PlanStore::open(path).map_err(failed)?;
    let files = store.files().map_err(failed)?.into_iter();
    found.extend(files.map(|(_, rank, path)| Found {
        path,
        rank: Some(rank),
    }));
    Ok(found)
}

/// The one plan file under a path.
fn find_one(path: &Path) -> Result<PathBuf, Trouble> {
    let mut found = find(path)?;
    match (found.len(), found.pop()) {
        (1, Some(only)) => Ok(only.path),
        (0, _) => Err(Trouble::NoPlan { path: path.into() }),
        (count, _) => Err(Trouble::ManyPlans {
            path: path.into(),
            count,
        }),
    }
}

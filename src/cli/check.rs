//! `rote check`: checks plan files.

use std::io::Write;
use std::path::{Path, PathBuf};

use clap::Args;
use rote_plans::PlanFile;

use super::{Found, Trouble, complain, find, problem};

/// Validate plan files: header, checksum, archive, and every id, range and alias
/// of the tables.
///
/// Prints a line for each valid plan, and a summary. Prints a line on stderr for
/// each problem, and exits with 1 if there is a problem.
#[derive(Debug, Args)]
pub(super) struct Check {
    /// Plan files or plan stores
    #[arg(required = true, value_name = "PLAN|DIR")]
    paths: Vec<PathBuf>,
}

impl Check {
    pub(super) fn run(&self, out: &mut impl Write) -> Result<u8, Trouble> {
        let (mut whole, mut problems) = (0_usize, 0_usize);
        for path in &self.paths {
            let found = match find(path) {
                Ok(found) => found,
                Err(trouble) => {
                    complain(&trouble.to_string());
                    problems += 1;
                    continue;
                }
            };
            for Found { path, rank } in found {
                match check(&path, rank) {
                    Ok(()) => {
                        writeln!(out, "{}: ok", path.display())?;
                        whole += 1;
                    }
                    Err(line) => {
                        complain(&line);
                        problems += 1;
                    }
                }
            }
        }
        let plans = if whole == 1 { "plan" } else { "plans" };
        let bad = if problems == 1 { "problem" } else { "problems" };
        writeln!(out, "{whole} {plans} ok, {problems} {bad}")?;
        Ok(u8::from(problems > 0))
    }
}

/// Checks a file; the error is the line to print.
fn check(path: &Path, rank: Option<u32>) -> Result<(), String> {
    let file = PlanFile::open(path).map_err(|error| problem(path, &error))?;
    let recorded = file.plan().fingerprint.rank.to_native();
    match rank {
        Some(named) if named != recorded => Err(format!(
            "{}: the name of the file says rank {named}, the plan was recorded on rank {recorded}",
            path.display()
        )),
        _ => Ok(()),
    }
}

//! `rote diff`: how two plans differ.

use std::io::Write;
use std::path::PathBuf;

use clap::Args;
use rote_plans::diff::diff;

use super::{Trouble, find_one, open};

/// Say in words how two plans differ: where they were recorded, bindings,
/// guards, collectives, instructions, memory, global ops.
///
/// Exits with 0 if the plans do the same, 1 if they differ, 2 if a plan cannot be read.
#[derive(Debug, Args)]
pub(super) struct Diff {
    /// A plan file, or a store with one plan
    a: PathBuf,
    /// Another plan file, or a store with one plan
    b: PathBuf,
}

impl Diff {
    pub(super) fn run(&self, out: &mut impl Write) -> Result<u8, Trouble> {
        let a = open(&find_one(&self.a)?)?;
        let b = open(&find_one(&self.b)?)?;
        let differences = diff(a.plan(), b.plan());
        for line in &differences {
            writeln!(out, "{line}")?;
        }
        Ok(u8::from(!differences.is_empty()))
    }
}

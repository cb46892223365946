//! `rote passes`: the passes that run over a plan before it is replayed.

use std::io::{self, Write};

use clap::Args;
use rote_passes::PASSES;
use serde_json::json;

use super::Trouble;

/// List the passes that run over a plan before it is replayed, in their order.
///
/// Choose passes with rote.capture(..., passes=...) or ROTE_PASSES. The choice is a list
/// separated by commas: all (the passes that keep the bits of eager), none, default, or
/// names of passes. - before a name leaves the pass out of the default, + adds it.
#[derive(Debug, Args)]
pub(super) struct Passes {
    /// Print only the names of the passes that keep the bits of eager
    #[arg(long)]
    names: bool,
    /// Print JSON
    #[arg(long, conflicts_with = "names")]
    json: bool,
}

impl Passes {
    pub(super) fn run(&self, out: &mut impl Write) -> Result<u8, Trouble> {
        if self.json {
            let rows = PASSES.iter().map(|p| {
                json!({
                    "name": p.name,
                    "about": p.about,
                    "by_default": p.by_default,
                    "alters_collectives": p.alters_collectives,
                    "keeps_bits": p.keeps_bits,
                })
            });
            let rows: Vec<_> = rows.collect();
            serde_json::to_writer_pretty(&mut *out, &rows).map_err(io::Error::from)?;
            writeln!(out)?;
            return Ok(0);
        }
        for pass in PASSES {
            if self.names {
                if pass.keeps_bits {
                    writeln!(out, "{}", pass.name)?;
                }
            } else {
                let state = if pass.by_default { "on " } else { "off" };
                let ranks = if pass.alters_collectives {
                    " (alters collectives: ranks agree first)"
                } else {
                    ""
                };
                writeln!(out, "{:<12} {state}  {}{ranks}", pass.name, pass.about)?;
            }
        }
        Ok(0)
    }
}

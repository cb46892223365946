//! `rote show`: a summary of a plan.

use std::io::Write;
use std::path::{Path, PathBuf};

use clap::Args;
use rote::{opinion, optimized};
use rote_aten_ops::AtenOps;
use rote_passes::{Selection, optimize};
use rote_plans::{PlanFile, PlanStore, describe};
use serde_json::{Value, json};

use super::{Found, Trouble, complain, find, open, problem};

/// Print a summary of a plan: where it was recorded, what it binds and returns, its
/// collectives by mesh dim, its memory and its guards. The summary also lists global
/// ops for which a cheaper strategy would have moved fewer bytes.
///
/// Values are numbered (%0, %1, ...). A local tensor is written f32[4,8], with
/// strides f32[8,8]{1,8} when it is not contiguous and an offset +16 into its
/// storage. A distributed tensor is written with its placements, one per mesh
/// dim: R replicated, S(0) sharded on dim 0, _S(0,2) a strided shard, P(sum)
/// partial.
#[derive(Debug, Args)]
pub(super) struct Show {
    /// A plan file (KEY/rank0.rote), or a plan store: its only plan, or a list of them
    plan: PathBuf,
    /// List the instructions, under the global ops that they come from
    #[arg(long)]
    ops: bool,
    /// List the global ops with placements, redistributions and source lines
    #[arg(long)]
    strategies: bool,
    /// Run passes over the plan, as a session does before it replays it, and
    /// print what each did; with --ops, list the instructions that are left. Passes
    /// may use the ops that PyTorch has.
    /// PASSES is all, none, default, or names separated by commas, with - before
    /// those to leave out and + before those to add; with --json, what each pass did
    #[arg(long, conflicts_with = "strategies", value_name = "PASSES", num_args = 0..=1, require_equals = true, default_missing_value = "default")]
    passes: Option<Selection>,
    /// Print all of it as JSON
    #[arg(long, conflicts_with_all = ["ops", "strategies"])]
    json: bool,
}

impl Show {
    pub(super) fn run(&self, out: &mut impl Write) -> Result<u8, Trouble> {
        let found = find(&self.plan)?;
        match found.as_slice() {
            [] => Err(Trouble::NoPlan {
                path: self.plan.clone(),
            }),
            [only] => {
                let file = open(&only.path)?;
                self.show(&file, &only.path, out)?;
                Ok(0)
            }
            many => self.list(many, out),
        }
    }

    /// What passes make of the plan.
    fn optimized(
        &self,
        file: &PlanFile,
        chosen: Selection,
        out: &mut impl Write,
    ) -> Result<(), Trouble> {
        let (program, report) = optimize(file.to_plan(), chosen, &AtenOps);
        if self.json {
            serde_json::to_writer_pretty(&mut *out, &optimized::json(&report, chosen))
                .map_err(std::io::Error::from)?;
            writeln!(out)?;
            return Ok(());
        }
        write!(out, "{}", optimized::section(&report))?;
        if self.ops {
            let path = || PathBuf::from("the plan after its passes");
            let after = PlanFile::from_plan(&program.plan).map_err(|error| Trouble::Plan {
                path: path(),
                error,
            })?;
            write!(out, "{}", describe::ops(after.plan()))?;
        }
        Ok(())
    }

    fn show(&self, file: &PlanFile, path: &Path, out: &mut impl Write) -> Result<(), Trouble> {
        if let Some(chosen) = self.passes {
            return self.optimized(file, chosen, out);
        }
        let plan = file.plan();
        if self.json {
            let mut json = describe::json(plan);
            json["second_opinion"] = opinion::json(plan);
            for (role, path) in others_of_region(file, path) {
                json[role] = match &json[role] {
                    Value::Array(known) => known.iter().cloned().chain([text_of(&path)]).collect(),
                    _ => vec![text_of(&path)].into(),
                };
            }
            serde_json::to_writer_pretty(&mut *out, &json).map_err(std::io::Error::from)?;
            writeln!(out)?;
            return Ok(());
        }
        if !self.ops && !self.strategies {
            write!(out, "{}{}", describe::summary(plan), opinion::section(plan))?;
            for (role, path) in others_of_region(file, path) {
                writeln!(out, "{role:<12} {}", path.display())?;
            }
        }
        if self.strategies {
            write!(out, "{}", describe::strategies(plan))?;
        }
        if self.ops {
            write!(out, "{}", describe::ops(plan))?;
        }
        Ok(())
    }

    /// One line for each plan of a store; those that do not open go to stderr.
    fn list(&self, found: &[Found], out: &mut impl Write) -> Result<u8, Trouble> {
        let mut code = 0;
        let mut rows = Vec::new();
        for Found { path, .. } in found {
            let file = match PlanFile::open(path) {
                Ok(file) => file,
                Err(error) => {
                    complain(&problem(path, &error));
                    code = 1;
                    continue;
                }
            };
            let plan = file.plan();
            let at = &plan.fingerprint;
            if self.json {
                rows.push(json!({
                    "path": path.to_string_lossy(),
                    "function": plan.function.as_str(),
                    "rank": at.rank.to_native(),
                    "world_size": at.world_size.to_native(),
                    "instructions": plan.instrs.len(),
                }));
                continue;
            }
            writeln!(
                out,
                "{}  {}, rank {} of world size {}, {} instructions, {}",
                path.display(),
                describe::text(&plan.function),
                at.rank,
                at.world_size,
                plan.instrs.len(),
                describe::Bytes(file.as_bytes().len() as u64),
            )?;
        }
        if self.json {
            serde_json::to_writer_pretty(&mut *out, &rows).map_err(std::io::Error::from)?;
            writeln!(out)?;
        }
        Ok(code)
    }
}

fn text_of(path: &Path) -> Value {
    path.to_string_lossy().into()
}

/// The plans that belong to one of a region, each with what it is: the backwards of a forward, or the forward of a
/// backward. They lie in the same store. The name of a backward ends with the key of its forward (`_region.py`).
fn others_of_region(file: &PlanFile, path: &Path) -> Vec<(&'static str, PathBuf)> {
    let Some((key, store, name)) = in_store(path) else {
        return Vec::new();
    };
    if let Some(forward) = forward_of(&file.plan().function) {
        let path = store.join(forward).join(name);
        return if path.is_file() {
            vec![("forward", path)]
        } else {
            Vec::new()
        };
    }
    let files = PlanStore::open(&store).and_then(|store| store.files());
    let mut backwards: Vec<(String, PathBuf)> = (files.unwrap_or_default().into_iter())
        .filter(|(_, _, path)| path.file_name() == Some(name.as_ref()))
        .filter_map(|(_, _, path)| {
            let function = PlanFile::open(&path).ok()?.plan().function.to_string();
            (forward_of(&function) == Some(key.as_str())).then_some((function, path))
        })
        .collect();
    backwards.sort_unstable();
    (backwards.into_iter())
        .map(|(_, path)| ("backward", path))
        .collect()
}

/// The key, the store and the name of the file of a plan that lies in a store.
fn in_store(path: &Path) -> Option<(String, PathBuf, String)> {
    let path = std::path::absolute(path).ok()?;
    let name = path.file_name()?.to_str()?;
    if !(name.starts_with("rank") && name.ends_with(".rote")) {
        return None;
    }
    let key = path.parent()?;
    let key_text = key.file_name()?.to_str()?.to_owned();
    Some((key_text, key.parent()?.to_owned(), name.to_owned()))
}

/// The key of the forward of a backward, by its name: `Block.forward.backward of KEY`, with the number of a piece after
/// `backward` where there are several.
fn forward_of(function: &str) -> Option<&str> {
    let (name, key) = function.rsplit_once(" of ")?;
    let (_, backward) = name.rsplit_once('.')?;
    let number = backward.strip_prefix("backward")?;
    let is_key = !key.is_empty()
        && key
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || byte == b'-');
    (is_key && number.bytes().all(|byte| byte.is_ascii_digit())).then_some(key)
}

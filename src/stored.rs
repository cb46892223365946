//! Stored plans: their names, and whether a stored plan applies to a call.

use std::path::PathBuf;

use rote_plans::{
    Arg, Fingerprint, Guard, GuardKind, Plan, PlanError, PlanFile, PlanStore, Scalar,
};
use rote_replay::{Frontend, ReplayError};
use rote_tracer::compare::{Source, Trace, compare};
use rote_tracer::recorder::checks_come_first;
use rote_tracer::scalars::{AS_WRITTEN, TracedFloats, evaluate};

use crate::facts::NamedFacts;
use crate::places::Places;
use crate::recording::{ActiveRecording, GuardText, Parts};
use crate::session::Config;

/// The plan store, as one captured function of one process sees it.
#[derive(Debug)]
pub struct StoredPlans {
    store: PlanStore,
    function: String,
    fingerprint: Fingerprint,
    scanned: bool,
    /// The keys and paths of this rank's plans that were there when the store was opened. Others in this process may have
    /// written more.
    earlier: Vec<(String, PathBuf)>,
}

impl StoredPlans {
    /// Opens the store, making its directory if need be.
    pub fn open(config: &Config) -> Result<Self, PlanError> {
        let store = PlanStore::open(&config.plans)?;
        let files = store.files().unwrap_or_default().into_iter();
        let mine = files.filter(|(_, rank, _)| *rank == config.fingerprint.rank);
        Ok(StoredPlans {
            earlier: mine.map(|(key, _, path)| (key, path)).collect(),
            store,
            function: config.function.clone(),
            fingerprint: config.fingerprint.clone(),
            scanned: false,
        })
    }

    /// Writes a plan and opens what was written.
    pub fn keep(&self, key: &str, plan: &Plan) -> Result<PlanFile, PlanError> {
        let written = self.store.write(key, plan).and_then(PlanFile::open);
        written.or_else(|error| {
            // The plan itself is good: replay it from memory.
            tracing::warn!(target: "rote::record", "plan {key} could not be stored: {error}");
            PlanFile::from_plan(plan)
        })
    }

    /// Whether there is no plan of this rank.
    pub fn is_empty(&self) -> bool {
        let rank = self.fingerprint.rank;
        let files = self.store.files();
        files.is_ok_and(|files| files.iter().all(|(_, of, _)| *of != rank))
    }

    /// Opens every plan of this rank once and says which cannot be used here.
    pub fn scan(&mut self) {
        if std::mem::replace(&mut self.scanned, true) {
            return;
        }
        let files = match self.store.files() {
            Ok(files) => files,
            Err(error) => {
                tracing::warn!(target: "rote::replay", "{}: {error}", self.function);
                return;
            }
        };
        let rank = self.fingerprint.rank;
        let mine: Vec<_> = files.iter().filter(|(_, of, _)| *of == rank).collect();
        for (_, _, path) in &mine {
            if let Err(error) = PlanFile::open_for(path, &self.fingerprint) {
                tracing::warn!(
                    target: "rote::replay",
                    "{}: stored plan {}: {error}; recording a new plan",
                    self.function,
                    path.display()
                );
            }
        }
    }

    /// The stored plan under this key, if there is one for this process.
    pub fn find(&self, key: &str) -> Option<PlanFile> {
        let path = self.store.path(key, self.fingerprint.rank).ok()?;
        // What is wrong with a file was said when the store was scanned.
        path.exists()
            .then(|| PlanFile::open_for(&path, &self.fingerprint).ok())
            .flatten()
    }

    /// A stored plan under these guards, whatever answers about data its step got, and its key: none of those `known`.
    fn find_any(&self, guard_key: &str, known: &[&str]) -> Option<(String, PlanFile)> {
        let keys = self.store.keys().unwrap_or_default();
        let of_guards = |key: &String| {
            let rest = key.strip_prefix(guard_key);
            rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('-'))
        };
        let mut fitting =
            (keys.into_iter()).filter(|key| of_guards(key) && !known.contains(&key.as_str()));
        fitting.find_map(|key| self.find(&key).map(|file| (key, file)))
    }

    /// A stored plan that applies to the call that is about to be recorded, under no key among those `known`, and its
    /// key. A plan that lets a hyperparameter vary applies if the recording follows that by now.
    pub fn find_trusted<F: Frontend>(
        &self,
        frontend: &F,
        recording: &ActiveRecording<F>,
        known: &[&str],
    ) -> Result<Option<(String, PlanFile)>, ReplayError> {
        let guards = recording.guard_texts();
        let found = self.find_any(&guard_key(&self.function, &guards), known);
        let Some((key, file)) = found else {
            return Ok(None);
        };
        let plan = file.to_plan();
        // What rebuilds views, only a recording holds; and all ranks replay late checks, or none.
        if has_rebuilt_views(&plan.result) || !checks_come_first(&plan) {
            return Ok(None);
        }
        let free = free_of(&plan);
        let pinned = free.iter().find(|path| !recording.is_loose(path));
        let problem = guards_differ(&plan, &guards)
            .or_else(|| {
                pinned.map(|path| {
                    format!("it lets {path} vary, but the script does more than arithmetic with it")
                })
            })
            .or_else(|| {
                let in_tensor = |path: &str| recording.number_in(frontend, path);
                numbers_now(&plan, &recording.facts, in_tensor).err()
            });
        let function = &self.function;
        if let Some(problem) = problem {
            tracing::warn!(target: "rote::replay", "{function}: stored plan {key}: {problem}");
            return Ok(None);
        }
        let places = Places::of::<F>(&plan, &recording.named);
        if let Some(subject) = places.difference(frontend)? {
            tracing::info!(
                target: "rote::replay",
                "{function}: stored plan {key}: it was recorded with another {subject}"
            );
            return Ok(None);
        }
        Ok(Some((key, file)))
    }

    /// Says why stored plans of this function, from before, are not for a call. Each may be
    /// for a later one.
    pub fn explain_strangers(&self, guards: &[GuardText]) {
        for (key, path) in &self.earlier {
            let Ok(file) = PlanFile::open_for(path, &self.fingerprint) else {
                continue;
            };
            let plan = file.to_plan();
            if plan.function != self.function {
                continue;
            }
            if let Some(problem) = guards_differ(&plan, guards) {
                tracing::warn!(
                    target: "rote::replay",
                    "{}: stored plan {key} is not for this call: {problem}; recording another plan",
                    self.function
                );
            }
        }
    }
}

/// Whether a plan returns views that take more than strides to make from their bases.
fn has_rebuilt_views(result: &str) -> bool {
    let result: serde_json::Value = serde_json::from_str(result).unwrap_or_default();
    let views = result["views"].as_array();
    views.is_some_and(|views| views.iter().any(|view| !view["tuple"][3].is_null()))
}

/// The name under which plans with these guards are stored: 128 bits of XXH3
/// over the function and every guard, hyperparameters apart.
pub fn guard_key(function: &str, guards: &[GuardText]) -> String {
    let mut text = function.to_owned();
    for guard in guards.iter().filter(|guard| !guard.hyperparameter) {
        text.push('\n');
        text.push_str(&guard.subject);
        text.push('\0');
        text.push_str(&guard.expected);
    }
    format!("{:032x}", xxhash_rust::xxh3::xxh3_128(text.as_bytes()))
}

/// The name under which a recording is stored: that of its guards, with a part for the answers about data that the
/// step got, if it asked.
pub fn plan_key(guard_key: &str, trace: &Trace) -> String {
    let answers: Vec<String> = trace.answers().map(|answer| answer.to_string()).collect();
    if answers.is_empty() {
        return guard_key.to_owned();
    }
    let hash = xxhash_rust::xxh3::xxh3_64(answers.join("\n").as_bytes());
    format!("{guard_key}-{hash:016x}")
}

/// The first guard of a stored plan that does not hold, both sides named.
pub fn guards_differ(plan: &Plan, guards: &[GuardText]) -> Option<String> {
    // Another model says more than what follows from it.
    let is_state = |guard: &&Guard| guard.kind == GuardKind::State;
    let state = plan.guards.iter().filter(is_state);
    for guard in state.chain(plan.guards.iter().filter(|guard| !is_state(guard))) {
        let (subject, expected) = (plan.str(guard.subject), plan.str(guard.expected));
        let mut found = guards
            .iter()
            .filter(|found| found.subject == subject)
            .peekable();
        let Some(first) = found.peek().map(|found| found.expected.clone()) else {
            return Some(format!(
                "it expects {subject} to be {expected}, this process has no {subject}"
            ));
        };
        // Two objects may go by one name, as closures of two functions do.
        if !found.any(|found| found.expected == expected) {
            return Some(format!(
                "it expects {subject} to be {expected}, this process has {first}"
            ));
        }
    }
    let free = free_of(plan);
    guards
        .iter()
        .find(|g| {
            !free.contains(&g.subject)
                && !plan
                    .guards
                    .iter()
                    .any(|guard| plan.str(guard.subject) == g.subject)
        })
        .map(|g| {
            format!(
                "it has no guard on {} ({} in this process)",
                g.subject, g.expected
            )
        })
}

/// The hyperparameters that a plan reads.
pub fn free_of(plan: &Plan) -> Vec<String> {
    plan.scalars
        .iter()
        .filter_map(|scalar| match scalar {
            Scalar::Read { path } => Some(plan.str(*path).to_owned()),
            _ => None,
        })
        .collect()
}

/// The scalars of a stored plan, computed from today's hyperparameters, and from numbers in tensors of the state:
/// `in_tensor` gives them by path.
pub fn numbers_now<F: Frontend>(
    stored: &Plan,
    facts: &NamedFacts<F>,
    in_tensor: impl Fn(&str) -> Option<f64>,
) -> Result<Vec<f64>, String> {
    let mut failed = None;
    let mut values = Vec::new();
    let done = evaluate(&stored.scalars, &mut values, |i| match stored.scalars[i] {
        Scalar::Read { path } => facts.float(stored.str(path)).unwrap_or_else(|error| {
            failed.get_or_insert(error.to_string());
            f64::NAN
        }),
        Scalar::Tensor { path } => in_tensor(stored.str(path)).unwrap_or_else(|| {
            let path = stored.str(path);
            failed.get_or_insert_with(|| {
                format!("it reads a number from {path}, and this step does not")
            });
            f64::NAN
        }),
        _ => f64::NAN,
    });
    match (failed, done) {
        (Some(error), _) => Err(error),
        (None, Err(_)) => Err(
            "its arithmetic on hyperparameters and step counters does not fit their present values"
                .to_owned(),
        ),
        (None, Ok(())) => Ok(values),
    }
}

/// Whether a stored plan is what was just recorded, bound numbers computed
/// from today's hyperparameters. Gives the hyperparameters it reads.
pub fn same_as_stored<F: Frontend>(
    stored: &Plan,
    trace: &Trace,
    parts: &Parts<F>,
) -> Result<Vec<String>, String> {
    if let Some(problem) = guards_differ(stored, &parts.guards) {
        return Err(problem);
    }
    let free = free_of(stored);
    if let Some(path) = free.iter().find(|path| !trace.floats.is_loose(path)) {
        return Err(format!(
            "it lets {path} vary, but the script now does more than arithmetic with it"
        ));
    }
    let before = |path: &str| trace.floats.in_tensor(path);
    let values = numbers_now(stored, &parts.facts, before)?;
    let mut plan = stored.clone();
    for arg in &mut plan.args {
        if let Arg::Scalar(scalar) = *arg {
            *arg = Arg::Float(values[scalar as usize]);
        }
    }
    let stored_trace = Trace {
        sources: vec![String::new(); plan.instrs.len()],
        plan,
        floats: TracedFloats::default(),
    };
    compare(&stored_trace, &[], trace).map_err(|refusal| refusal.reason)?;
    Ok(free)
}

/// Where the numbers of a stored plan come from, in terms of a new recording
/// that equals it. What the plan computes has been seen to vary, but for what it
/// holds to a constant.
pub fn sources_of(stored: &Plan, trace: &Trace) -> Vec<Source> {
    let computed = |arg: u32| match stored.args.get(arg as usize) {
        Some(Arg::Scalar(scalar)) => {
            !matches!(stored.scalars.get(*scalar as usize), Some(Scalar::Same(..)))
        }
        _ => false,
    };
    let mut sources = trace.sources();
    sources.retain(|source| source.float != AS_WRITTEN || !computed(source.arg));
    sources
}

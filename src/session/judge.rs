//! Judges the recording of a call: whether it is dropped, refused, kept as a candidate,
//! or makes a variant.

use std::rc::Rc;

use rote_replay::{Frontend, ReplayError};
use rote_tracer::Refusal;
use rote_tracer::compare::{Trace, compare};

use super::attempts::Attempts;
use super::candidates::{Candidate, Candidates};
use super::record::{Active, Alike};
use super::variants::Variants;
use super::{Config, Outcome};
use crate::SessionError;
use crate::recording::{ActiveRecording, Parts};
use crate::stored::{StoredPlans, guard_key, plan_key, same_as_stored, sources_of};
use crate::variant::{Confirmed, Variant, final_plan};

/// What recordings are compared with, and what became of earlier ones.
#[derive(Debug)]
pub struct Judge<F: Frontend> {
    pub stored: StoredPlans,
    pub candidates: Candidates<F>,
    pub attempts: Attempts<F>,
    function: String,
    /// How many candidates are kept at most.
    most: usize,
}

/// A recording that is to become a variant.
#[derive(Debug)]
pub struct Accepted<F: Frontend> {
    pub confirmed: Confirmed<F>,
    /// The variant that makes way for it.
    pub replaces: Option<usize>,
    /// Whether its plan was in the store.
    pub stored: bool,
}

/// A recording that a new one may be equal to.
enum Like<'a, F: Frontend> {
    Candidate(&'a Candidate<F>),
    /// And where it is among the variants. It missed because hyperparameters changed.
    Variant(usize, &'a Variant<F>),
}

// The step has run: whatever goes wrong from here on is no error of its.
impl From<SessionError> for Outcome {
    fn from(error: SessionError) -> Self {
        Outcome::Refused(match error {
            SessionError::Refused(refusal) => refusal,
            error => Refusal::step(
                format!("was recorded, but no plan could be made of the recording: {error}"),
                "report this as a bug, with the step; the step stays eager",
            ),
        })
    }
}

impl From<ReplayError> for Outcome {
    fn from(error: ReplayError) -> Self {
        SessionError::from(error).into()
    }
}

impl<F: Frontend> Judge<F> {
    pub fn new(config: &Config) -> Result<Self, SessionError> {
        Ok(Judge {
            stored: StoredPlans::open(config)?,
            candidates: Candidates::new(),
            attempts: Attempts::new(config.max_variants),
            function: config.function.clone(),
            most: config.max_variants,
        })
    }

    /// Why nothing is recorded at a call, if too many recordings were not confirmed.
    pub fn pause(&mut self, frontend: &F, call: u64) -> Result<Option<String>, SessionError> {
        if self.attempts.is_paused(call) {
            return Ok(Some(String::new())); // users know since it began
        }
        // As many kinds of calls as there may be in turn: the first of them comes back.
        if self.attempts.are_too_many() && self.candidates.any_holds(frontend)? {
            return Ok(None);
        }
        let Some((attempts, pause)) = self.attempts.pause(call) else {
            return Ok(None);
        };
        let changing = self.candidates.changing(frontend);
        Ok(Some(format!(
            "{attempts} recordings in a row were made under different guards, so no recording was confirmed by a second \
             one (max_variants): the next {pause} calls that match no plan run eagerly, then Rote records again; the \
             value that changes is {}",
            changing.as_deref().unwrap_or("a host value")
        )))
    }

    /// Finds what may confirm a recording that is about to run. Refuses the recording if nothing can, and a host value is
    /// another one each time.
    pub fn compare_guards(
        &mut self,
        frontend: &F,
        variants: &mut Variants<F>,
        active: &mut Active<F>,
    ) -> Result<(), SessionError> {
        self.candidates.survey = None;
        if active.resumed.is_some() {
            self.attempts.is_steady();
            return Ok(());
        }
        let hyperparameters = active.recording.facts.hyperparameters();
        let near = variants.near(frontend, &hyperparameters)?;
        let (candidates, unsteady) =
            (self.candidates).near(frontend, &self.function, &hyperparameters)?;
        let alone = near.is_empty() && candidates.is_empty();
        match unsteady {
            _ if !alone => self.attempts.is_steady(),
            // One that a plan has was not always another one: it may be the candidate's epoch that is over.
            Some(value) if variants.any_sees(frontend, &value.subject)? => {}
            Some(value) if self.attempts.is_unsteady(&value) => {
                let what = format!("{} (once {})", value.subject, value.was);
                active.recording.refuse(changes_every_call(&what, false));
            }
            _ => {}
        }
        active.alike = Alike {
            variants: near,
            candidates,
            first: alone && self.stored.is_empty(),
        };
        Ok(())
    }

    /// What becomes of a recording: whether it can be kept, then whether another one confirms it.
    pub fn judge(
        &mut self,
        frontend: &F,
        variants: &Variants<F>,
        active: Active<F>,
        result: &str,
    ) -> Result<Accepted<F>, Outcome> {
        let mut recording = active.recording;
        self.stored.scan();
        recording.check_generators(frontend, "")?;
        recording.refuse_race(F::WAITS);
        recording.refuse_late_checks();
        recording.facts.settle_added(frontend)?;
        let changes = recording.facts.changes(frontend)?;
        let unchanged = self.unchanged(&recording, &changes);
        if let Some(refusal) = recording.refusal() {
            // A first call may make state, and do once what it never does again.
            return Err(match unchanged {
                Err(Outcome::Dropped(why)) => Outcome::Dropped(format!("{why}, and {refusal}")),
                _ => Outcome::Refused(refusal.clone()),
            });
        }
        unchanged?;
        self.leaves_nothing(&recording)?;
        let (trace, parts) = recording.into_trace(result);
        let key = plan_key(&guard_key(&self.function, &parts.guards), &trace);
        if let Some(mut candidate) = active.resumed {
            if candidate.trace.decides_as(&trace) {
                return self.confirm(Like::Candidate(&candidate), key, trace, parts);
            }
            candidate.parts.facts = parts.facts; // the next call's may be another recording of its branch
            self.candidates.all.push(candidate);
            let why = "the step went another way than in the recording whose guards hold";
            return Err(Outcome::Dropped(why.to_owned()));
        }
        let alike = active.alike;
        let variant = |i: usize| &variants.all[i];
        // Another branch makes another variant: by answers about data, or by numbers that are computed before a replay.
        // So do other numbers in tensors, or where nothing is known of what the variant computes.
        let same_branch = |&&i: &&usize| !trace.is_other_than(&variant(i).trace);
        if let Some(&i) = alike.variants.iter().find(same_branch) {
            return self.confirm(Like::Variant(i, variant(i)), key, trace, parts);
        }
        let known = &self.candidates.all;
        let same_branch = |&&i: &&usize| known[i].trace.decides_as(&trace);
        if let Some(&i) = alike.candidates.iter().find(same_branch) {
            let candidate = self.candidates.all.remove(i);
            return self.confirm(Like::Candidate(&candidate), key, trace, parts);
        }
        let others = alike.variants.iter().map(|&i| &variant(i).trace);
        let mut others = others.chain(alike.candidates.iter().map(|&i| &known[i].trace));
        match others.find_map(|other| trace.changing_number(other)) {
            Some(refusal) if self.attempts.differs() => Err(Outcome::Refused(refusal)),
            _ => self.adopt(variants, key, trace, parts, alike.first),
        }
    }

    /// A step that changes what is guarded: the recording is dropped once, since the change may be the last one.
    fn unchanged(
        &mut self,
        recording: &ActiveRecording<F>,
        changes: &[String],
    ) -> Result<(), Outcome> {
        let subject = |change: &String| change.split(" (").next().unwrap_or_default().to_owned();
        let again = self.attempts.changed(changes.iter().map(subject).collect());
        match again {
            _ if changes.is_empty() => Ok(()),
            Some(again) => {
                let what = &changes[again];
                let hyperparameters = recording.facts.hyperparameters();
                let is_hyper = hyperparameters.contains(&subject(what));
                Err(Outcome::Refused(changes_every_call(what, is_hyper)))
            }
            None => {
                let changes = changes.join(", ");
                Err(Outcome::Dropped(format!("the step changed {changes}")))
            }
        }
    }

    /// A step that makes tensors which outlive the call and are no result: the recording is dropped, since the first
    /// steps make state; too often in a row it is refused.
    fn leaves_nothing(&self, recording: &ActiveRecording<F>) -> Result<(), Outcome> {
        if let Some(refusal) = recording.leaves_usage() {
            return Err(match self.attempts.is_last_drop() {
                true => Outcome::Refused(refusal),
                false => Outcome::Dropped(refusal.to_string()),
            });
        }
        let survivors = recording.survivors();
        if survivors.is_empty() {
            return Ok(());
        }
        let some: Vec<&str> = survivors.iter().take(3).map(String::as_str).collect();
        let what = format!(
            "{} tensors that outlive the call, among them {}",
            survivors.len(),
            some.join("; ")
        );
        if !self.attempts.is_last_drop() {
            return Err(Outcome::Dropped(format!("the step made {what}")));
        }
        Err(Outcome::Refused(Refusal::step(
            format!("keeps {what}, at every call"),
            if recording.unwaited() > 0 {
                "wait for every collective inside the captured function (in PyTorch wait_tensor(), or .wait()); return \
                 the other tensors, or write them in place to tensors of the state (state= in Python)"
            } else {
                "return these tensors, or write them in place to tensors of the state (state= in Python)"
            },
        )))
    }

    /// Compares a recording with a known one under its guards, hyperparameters apart: an equal one makes a variant.
    fn confirm(
        &mut self,
        known: Like<'_, F>,
        key: String,
        trace: Trace,
        parts: Parts<F>,
    ) -> Result<Accepted<F>, Outcome> {
        let (known, sources, mut free, replaces) = match known {
            Like::Candidate(known) => (&known.trace, known.trace.sources(), Vec::new(), None),
            Like::Variant(i, old) => (&old.trace, old.sources.clone(), old.free.clone(), Some(i)),
        };
        let sources = match compare(known, &sources, &trace) {
            Ok(sources) => sources,
            Err(refusal) => {
                if replaces.is_none() {
                    self.candidates.add(trace, parts); // in place of the other one
                }
                // Once it may be chance: autograd clones a gradient that a collective's thread still holds, and steals
                // it otherwise.
                return Err(match self.attempts.differs() {
                    true => Outcome::Refused(refusal),
                    false => Outcome::Dropped(refusal.to_string()),
                });
            }
        };
        for path in trace.floats.free(&known.floats) {
            if !free.contains(&path) {
                free.push(path);
            }
        }
        free.retain(|path| trace.floats.is_loose(path));
        let plan = final_plan(&trace, &sources, &parts.guards, &free);
        let file = self.stored.keep(&key, &plan).map_err(SessionError::from)?;
        Ok(Accepted {
            confirmed: Confirmed {
                key,
                file: Rc::new(file),
                trace,
                sources,
                free,
                parts,
                optimized: None,
            },
            replaces,
            stored: false,
        })
    }

    /// A recording that nothing in this process confirms: the stored plan may, if it is the same; else it waits for a
    /// second one.
    fn adopt(
        &mut self,
        variants: &Variants<F>,
        key: String,
        trace: Trace,
        parts: Parts<F>,
        first: bool,
    ) -> Result<Accepted<F>, Outcome> {
        let ours = variants.all.iter().any(|variant| variant.key == key);
        let find = !first && !ours;
        let function = &self.function;
        if let Some(file) = find.then(|| self.stored.find(&key)).flatten() {
            let plan = file.to_plan();
            match same_as_stored(&plan, &trace, &parts) {
                Ok(free) => {
                    tracing::info!(target: "rote::record", "{function}: stored plan {key} is the same");
                    return Ok(Accepted {
                        confirmed: Confirmed {
                            sources: sources_of(&plan, &trace),
                            key,
                            file: Rc::new(file),
                            trace,
                            free,
                            parts,
                            optimized: None,
                        },
                        replaces: None,
                        stored: true,
                    });
                }
                Err(difference) => tracing::warn!(
                    target: "rote::record",
                    "{function}: stored plan {key} differs from the recording: {difference}; recording a new plan"
                ),
            }
        } else if variants.all.is_empty() && self.candidates.all.is_empty() {
            self.stored.explain_strangers(&parts.guards);
        }
        if self.candidates.all.len() >= self.most {
            self.candidates.all.remove(0);
        }
        self.attempts.wait();
        self.candidates.add(trace, parts);
        Err(Outcome::Candidate)
    }
}

/// `what`: with its values in brackets, if it is no object.
fn changes_every_call(what: &str, hyperparameter: bool) -> Refusal {
    let is_object = !what.contains(" (");
    let remedy = if hyperparameter {
        "set it before the captured function is called (in Python, host= takes a function for that); the step of a learning rate scheduler may stay inside, if \
         nothing there reads the rate"
    } else if what.contains(".param_groups[") {
        "call the optimizer's step() outside of the captured function, or use an optimizer that counts in tensors, as \
         PyTorch's own do"
    } else if what.starts_with("len(") {
        "collect values outside of the captured function, or write them into a tensor that stays (copy_ in PyTorch); if it \
         does not matter, leave it unguarded (ignore= in Python)"
    } else if is_object {
        "let the step not read an attribute before it sets it, or write into a tensor that stays (copy_ in PyTorch); let \
         other objects stay, and change what they hold; if it does not matter, leave it unguarded (ignore= in Python)"
    } else {
        "make the value a tensor, or pass it as an argument if it has few values; if it does not matter, leave it \
         unguarded (ignore= in Python)"
    };
    let change = if what.starts_with("len(") {
        format!("changes {what}")
    } else if is_object {
        format!("puts a new object into {what}")
    } else {
        format!("changes the host value {what}")
    };
    Refusal::step(
        format!(
            "{change} at every call: a replay changes no host value, and each new value misses its guard"
        ),
        remedy,
    )
}

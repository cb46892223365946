//! Candidates: recordings that wait for an equal one, which makes a plan of them.

use rote_plans::GuardKind;
use rote_replay::{Frontend, first_difference};
use rote_tracer::compare::Trace;

use super::record::Active;
use super::variants::guard_on;
use crate::SessionError;
use crate::recording::{GuardText, Parts};

#[derive(Debug)]
pub struct Candidate<F: Frontend> {
    pub id: u32,
    pub trace: Trace,
    pub parts: Parts<F>,
}

/// A host value that is another one than a candidate's.
pub struct HostValue {
    pub subject: String,
    /// What the candidate has, as users know it.
    pub was: String,
    /// What the candidate has and what there is now. Different values have different texts.
    pub values: [String; 2],
}

/// The candidates of a session, oldest first.
#[derive(Debug)]
pub struct Candidates<F: Frontend> {
    pub all: Vec<Candidate<F>>,
    /// What is guarded of a call that was not recorded, and its number.
    pub survey: Option<(u32, Parts<F>)>,
    next_id: u32,
}

impl<F: Frontend> Candidates<F> {
    pub fn new() -> Self {
        Candidates {
            all: Vec::new(),
            survey: None,
            next_id: 0,
        }
    }

    fn next_id(&mut self) -> u32 {
        self.next_id += 1;
        self.next_id - 1
    }

    /// Adds a recording.
    pub fn add(&mut self, trace: Trace, parts: Parts<F>) {
        let id = self.next_id();
        self.all.push(Candidate { id, trace, parts });
    }

    /// Keeps what is guarded of a call that was not recorded: its number.
    pub fn keep_survey(&mut self, parts: Parts<F>) -> u32 {
        let id = self.next_id();
        self.survey = Some((id, parts));
        id
    }

    /// Has a recording take over the guards of the candidate or survey of this number, if all of them hold
    /// and the candidate's step has asked for no data: whether that is so. The candidate waits no longer.
    pub fn resume(
        &mut self,
        number: u32,
        frontend: &F,
        active: &mut Active<F>,
    ) -> Result<bool, SessionError> {
        let survey = self.survey.take();
        if let Some((_, mut parts)) = survey.filter(|(known, _)| *known == number) {
            let holds = parts.hold(frontend)?;
            if holds {
                active.recording.take_over(frontend, &mut parts);
            }
            return Ok(holds);
        }
        let Some(i) = self.all.iter().position(|known| known.id == number) else {
            return Ok(false);
        };
        let known = &mut self.all[i];
        // Under the same guards, a step that asks for data may go another way, and both need guards then.
        if known.trace.answers().next().is_some() || !known.parts.hold(frontend)? {
            return Ok(false);
        }
        let mut known = self.all.remove(i);
        active.recording.take_over(frontend, &mut known.parts);
        active.resumed = Some(known);
        Ok(true)
    }

    /// Whether all guards of a candidate hold for the call, so that a recording of it may confirm that one.
    pub fn any_holds(&mut self, frontend: &F) -> Result<bool, SessionError> {
        for candidate in &mut self.all {
            if candidate.parts.hold(frontend)? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Where the candidates are that were recorded under the guards of the call, but for `hyperparameters` that only
    /// arithmetic was seen on. And of a candidate whose guard on a host value missed: that value, and what it was.
    pub fn near(
        &mut self,
        frontend: &F,
        function: &str,
        hyperparameters: &[String],
    ) -> Result<(Vec<usize>, Option<HostValue>), SessionError> {
        let (mut near, mut unsteady) = (Vec::new(), None);
        for (i, candidate) in self.all.iter_mut().enumerate() {
            if frontend.difference(&candidate.parts.call)?.is_some() {
                continue;
            }
            let mut loose = hyperparameters.to_vec();
            loose.retain(|path| candidate.trace.floats.is_loose(path));
            match candidate.parts.difference(frontend, &loose)? {
                None => near.push(i),
                Some(subject) => {
                    tracing::info!(
                        target: "rote::record",
                        "{function}: an earlier recording waits, and cannot confirm this one: {subject} is another one"
                    );
                    let entries = &candidate.parts.facts.entries;
                    let entry = entries.iter().find(|entry| entry.subject == subject);
                    if let Some(entry) = entry.filter(|entry| entry.kind == GuardKind::Host) {
                        unsteady = Some(HostValue {
                            was: entry.text.clone(),
                            values: candidate.parts.facts.values(entry.start),
                            subject,
                        });
                    }
                }
            }
        }
        Ok((near, unsteady))
    }

    /// What differs between the last two recordings.
    pub fn changing(&self, frontend: &F) -> Option<String> {
        let mut latest = self.all.iter().rev().map(|candidate| &candidate.parts);
        let (last, before) = (latest.next()?, latest.next()?);
        if let Some(word) = first_difference(&before.call.words, &last.call.words) {
            let subject = last.call.subjects.get(word);
            return Some(frontend.word(word, subject, &last.leaves));
        }
        let differs = |guard: &&GuardText| {
            let same = |other: &GuardText| {
                other.subject == guard.subject && other.expected == guard.expected
            };
            !before.guards.iter().any(same)
        };
        let changed = last.guards.iter().find(differs)?;
        let was = guard_on(&before.guards, &changed.subject);
        Some(match was {
            Some(was) => format!("{}: {was}, then {}", changed.subject, changed.expected),
            None => changed.subject.clone(),
        })
    }
}

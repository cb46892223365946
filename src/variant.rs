//! A variant: a plan, bound, with the facts under which it may run.

use std::rc::Rc;

use hashbrown::{HashMap, HashSet};
use rote_passes::{Program, Report, Selection, optimize};
use rote_plans::binding::ArchivedScalar;
use rote_plans::sequence::Members;
use rote_plans::{ArchivedPlan, Arg, Guard, Plan, PlanFile, Sequence, StrId};
use rote_replay::agreement::Offer;
use rote_replay::{Frontend, Left, ReplayError, TensorOf};
use rote_tracer::compare::{Failed, Source, Trace};
use rote_tracer::recorder::{checks_can_agree, checks_come_first, has_checks};

use crate::SessionError;
use crate::bound::BoundVariant;
use crate::places::Places;
use crate::recording::{ActiveRecording, GuardText, Named, Parts};

/// A plan that can be replayed in this process.
#[derive(Debug)]
pub struct Variant<F: Frontend> {
    /// Its number, never used twice in a session.
    pub id: u32,
    /// The plan file, mapped; equal functions share it.
    pub file: Rc<PlanFile>,
    /// The name under which it is stored.
    pub key: String,
    /// What must hold of a call, and the tensors that the plan binds.
    pub parts: Parts<F>,
    /// Hyperparameters that may change.
    pub free: Vec<String>,
    /// The recording it comes from, every number as it was.
    pub trace: Trace,
    /// Where numbers that hyperparameters may explain come from.
    pub sources: Vec<Source>,
    /// How often it was replayed.
    pub replays: u64,
    /// The number of the last call that it was used for, or made by.
    pub last_used: u64,
    /// Whether it must not be replayed again: a collective of a replay that failed may still use its memory, or an op
    /// has made another result than the plan says.
    pub lost: bool,
    /// What the passes did.
    pub passes: Report,
    /// What a replay that failed has left of each gradient of the plan.
    pub left: Vec<Left<TensorOf<F>>>,
    /// With the chosen passes.
    chosen: BoundVariant<F>,
    /// What the ranks are told of the collectives, if passes may alter them.
    altered: Option<Altered<F>>,
    /// What the ranks are told if a check comes after a collective.
    late: Option<Offer>,
    /// Whether the last replay kept the recorded collectives, which passes had altered.
    kept: bool,
    /// Whether the last replay failed and has left nothing: the call can run eagerly.
    pub(crate) undone: bool,
    /// Where the step asked for data, if the last replay ended there, since the answer is another one now. Such a
    /// replay has left nothing.
    pub(crate) answered: Option<Unanswered>,
    /// How many replays in a row have ended so.
    pub(crate) unanswered: u32,
}

/// A replay that has ended since the step would get another answer about data than the plan is for.
#[derive(Clone, Debug)]
pub struct Unanswered {
    /// The variant.
    pub id: u32,
    /// What was asked, and where, as text.
    pub subject: String,
    /// The check.
    pub failed: Failed,
}

impl Unanswered {
    /// Whether the check has found the recorded answer on this rank, and another rank has ended the replay. `late`:
    /// whether the ranks compare their checks.
    pub fn is_right_here(&self, late: bool) -> bool {
        late && self.failed.found.is_none()
    }
}

/// How plans are bound.
#[derive(Clone, Debug)]
pub struct Terms {
    /// The passes that run over them.
    pub passes: Selection,
    /// The ranks that may agree about checks, if they do.
    pub ranks: Option<Members>,
}

/// What passes that may alter collectives have left of them.
#[derive(Debug)]
struct Altered<F: Frontend> {
    offer: Offer,
    /// Whether they are other ones than those recorded.
    differ: bool,
    /// Whether no other rank takes part in them.
    alone: bool,
    /// The plan with the passes that keep collectives, bound when it is needed.
    kept: Option<BoundVariant<F>>,
    passes: Selection,
}

/// A plan, bound with some passes.
struct Chosen<F: Frontend> {
    bound: BoundVariant<F>,
    report: Report,
    altered: Option<Altered<F>>,
    late: Option<Offer>,
}

impl<F: Frontend> Chosen<F> {
    /// With all the passes, or else with fewer: a framework may have an op and not take what a pass gives it.
    fn bind_some(
        frontend: &F,
        key: &str,
        recorded: &Plan,
        parts: &Parts<F>,
        terms: &Terms,
        mut known: Option<Optimized>,
    ) -> Result<Self, SessionError> {
        let passes = terms.passes;
        let mut fewer = [passes.keeping_collectives(), Selection::NONE].into_iter();
        let mut passes = match has_checks(recorded) {
            // Where a check ends the replay on one rank, this rank goes on eagerly, and the others do not.
            true => passes.keeping_collectives(),
            false => passes,
        };
        loop {
            let known = known.take().filter(|known| known.passes == passes);
            let (program, report) = match known {
                Some(known) => (known.program, known.report),
                None => optimize(recorded.clone(), passes, frontend.ops()),
            };
            let ranks = terms.ranks.as_ref();
            let bound = Chosen::bind(frontend, recorded, parts, passes, (program, report), ranks);
            let other = fewer.find(|fewer| *fewer != passes);
            match (bound, other) {
                (Err(SessionError::Replay(ReplayError::Bind(why))), Some(other)) => {
                    let left = match other == Selection::NONE {
                        true => "passes",
                        false => "passes that alter collectives",
                    };
                    tracing::warn!(target: "rote::replay", "plan {key} is bound without {left}: {why}");
                    passes = other;
                }
                (bound, _) => return bound,
            }
        }
    }

    fn bind(
        frontend: &F,
        recorded: &Plan,
        parts: &Parts<F>,
        passes: Selection,
        (program, report): (Program, Report),
        ranks: Option<&Members>,
    ) -> Result<Self, SessionError> {
        let late = match (checks_come_first(&program.plan), ranks) {
            (true, _) => None,
            (false, Some(ranks)) if checks_can_agree(&program.plan) => {
                let plan = &program.plan;
                let sequence = Sequence::of(recorded, plan, &program.carries, Some(ranks));
                Some(Offer::new(&sequence)?)
            }
            _ => {
                return Err(ReplayError::Bind(
                    "something that lasts runs before a check of a value that the step reads on the host".to_owned(),
                )
                .into());
            }
        };
        let sequence = (passes.alters_collectives())
            .then(|| Sequence::of(recorded, &program.plan, &program.carries, None));
        let bound = BoundVariant::bind(frontend, program, parts)?;
        let altered = match sequence {
            Some(sequence) => Some(Altered {
                offer: Offer::new(&sequence)?,
                differ: sequence != Sequence::recorded(recorded),
                alone: sequence.alone() && Sequence::recorded(recorded).alone(),
                kept: None,
                passes: passes.keeping_collectives(),
            }),
            None => None,
        };
        Ok(Chosen {
            bound,
            report,
            altered,
            late,
        })
    }
}

/// A recording that a second one, or a stored plan, has confirmed.
#[derive(Debug)]
pub struct Confirmed<F: Frontend> {
    /// The name under which its plan is stored.
    pub key: String,
    /// Its plan file, mapped.
    pub file: Rc<PlanFile>,
    /// The recording, every number as it was.
    pub trace: Trace,
    /// Where numbers that hyperparameters may explain come from.
    pub sources: Vec<Source>,
    /// Hyperparameters that may change.
    pub free: Vec<String>,
    /// What it names and the facts it was made under.
    pub parts: Parts<F>,
    /// What passes have made of the plan for an equal function.
    pub optimized: Option<Optimized>,
}

/// What passes have made of a plan.
#[derive(Clone, Debug)]
pub struct Optimized {
    passes: Selection,
    program: Program,
    report: Report,
}

/// The plan of a recording with its bound numbers and guards filled in.
pub fn final_plan(
    trace: &Trace,
    sources: &[Source],
    guards: &[GuardText],
    free: &[String],
) -> rote_plans::Plan {
    let mut plan = trace.plan.clone();
    let mut strings = std::mem::take(&mut plan.strings);
    let mut ids: HashMap<String, StrId> = (0..)
        .zip(&strings)
        .map(|(id, text)| (text.clone(), id))
        .collect();
    let mut intern = |text: &str| -> StrId {
        *ids.entry_ref(text).or_insert_with(|| {
            strings.push(text.to_owned());
            strings.len() as StrId - 1
        })
    };
    let (mut args, mut numbers) = (Vec::new(), Vec::new());
    for of in sources.chunk_by(|a, b| a.arg == b.arg) {
        let arg = of[0].arg as usize;
        if let Arg::Float(value) = plan.args[arg] {
            args.push(arg);
            numbers.push((value, of.iter().map(|source| source.float).collect()));
        }
    }
    let (scalars, at) = trace.floats.scalars(&numbers, free, &mut intern);
    for (arg, scalar) in args.into_iter().zip(at) {
        if let Some(scalar) = scalar {
            plan.args[arg] = Arg::Scalar(scalar);
        }
    }
    plan.scalars = scalars;
    plan.guards = guards
        .iter()
        .filter(|guard| !free.contains(&guard.subject))
        .map(|guard| Guard {
            kind: guard.kind,
            subject: intern(&guard.subject),
            expected: intern(&guard.expected),
        })
        .collect();
    plan.strings = strings;
    plan
}

/// The tensors that a plan binds or reads a number from, and those that its step writes as autograd counts it.
fn bound_ones<T>(mut named: Vec<Named<T>>, plan: &ArchivedPlan) -> Vec<Named<T>> {
    let bound: HashSet<&str> = plan
        .bindings
        .iter()
        .map(|binding| plan.str(binding.path.to_native()))
        .chain(plan.scalars.iter().filter_map(|scalar| match scalar {
            ArchivedScalar::Tensor { path } => Some(plan.str(path.to_native())),
            _ => None,
        }))
        .collect();
    let written = |named: &Named<T>| named.written.is_some_and(|times| times != [0, 0]);
    named.retain(|named| bound.contains(named.path.as_str()) || written(named));
    named
}

impl<F: Frontend> Variant<F> {
    /// Binds an open plan file. Where the framework has not all that passes have made of its ops, fewer passes run.
    pub fn bind(
        frontend: &F,
        id: u32,
        confirmed: Confirmed<F>,
        terms: &Terms,
    ) -> Result<Self, SessionError> {
        let Confirmed {
            key,
            file,
            trace,
            sources,
            free,
            mut parts,
            optimized,
        } = confirmed;
        let recorded = file.to_plan();
        parts.places = Places::of::<F>(&recorded, &parts.named);
        let chosen = Chosen::bind_some(frontend, &key, &recorded, &parts, terms, optimized)?;
        parts.named = bound_ones(parts.named, file.plan());
        Ok(Variant {
            id,
            key,
            parts,
            free,
            trace,
            sources,
            replays: 0,
            last_used: 0,
            lost: false,
            left: Vec::new(),
            undone: false,
            answered: None,
            unanswered: 0,
            passes: chosen.report,
            chosen: chosen.bound,
            altered: chosen.altered,
            late: chosen.late,
            kept: false,
            file,
        })
    }

    /// Whether the plan is one for the call that another session is about to record. `own`: the facts that the caller has
    /// compared, since they are about objects of the two functions' own.
    pub fn is_for(
        &self,
        frontend: &F,
        recording: &ActiveRecording<F>,
        own: &[bool],
    ) -> Result<bool, ReplayError> {
        let follows_numbers = !(self.free.is_empty() && self.trace.floats.is_empty());
        if follows_numbers
            || recording.refusal().is_some()
            || recording.guard_texts() != self.parts.guards
            || !recording.facts.are_as_of(&self.parts.facts, own)
            || frontend.difference(&self.parts.call)?.is_some()
        {
            return Ok(false);
        }
        let places = Places::of::<F>(&self.file.to_plan(), &recording.named);
        Ok(places.difference(frontend)?.is_none())
    }

    /// What passes have made of the plan, until it is known what its ops allocate; none if passes may alter collectives.
    pub fn optimized(&self, passes: Selection) -> Option<Optimized> {
        let program = self.chosen.unplaced_program()?;
        let alike = self.altered.is_none() && self.late.is_none();
        alike.then(|| Optimized {
            passes,
            program,
            report: self.passes.clone(),
        })
    }

    /// How often a replay writes a tensor that an equal function has under the same name.
    pub fn written(&self, named: &Named<TensorOf<F>>) -> [u32; 2] {
        let mut all = self.parts.named.iter();
        let same = all.find(|known| known.kind == named.kind && known.path == named.path);
        same.and_then(|known| known.written).unwrap_or_default()
    }

    /// Whether all facts hold for a call whose words do, but for hyperparameters among
    /// `all` that only arithmetic was seen on: another recording tells what follows from
    /// them.
    pub fn is_near(&mut self, frontend: &F, all: &[String]) -> Result<bool, SessionError> {
        let floats = &self.trace.floats;
        let loose: Vec<String> = (all.iter().filter(|path| floats.is_loose(path)))
            .cloned()
            .collect();
        let known = !floats.is_empty() || self.free.is_empty(); // of a trusted plan, they are not
        Ok(known && self.parts.difference(frontend, &loose)?.is_none())
    }

    /// Whether another recording may make this variant apply, though
    /// the guard on `subject` missed: nothing else has changed, but for
    /// hyperparameters on which only arithmetic was seen.
    pub fn is_near_but_for(&mut self, frontend: &F, subject: &str) -> Result<bool, SessionError> {
        if !self.trace.floats.is_loose(subject) {
            return Ok(false);
        }
        let all = self.parts.facts.hyperparameters();
        self.is_near(frontend, &all)
    }

    /// What the ranks are told of the collectives that a replay would issue;
    /// none when no pass may alter them, and no check comes after one.
    pub fn offer(&self) -> Option<&Offer> {
        let altered = self.altered.as_ref().map(|altered| &altered.offer);
        self.late.as_ref().or(altered)
    }

    /// Whether a check comes after a collective: then all ranks replay, or none.
    pub fn is_late(&self) -> bool {
        self.late.is_some()
    }

    /// Whether its replays check data that the step reads on the host.
    pub fn checks_data(&self) -> bool {
        self.trace.answers().next().is_some()
    }

    /// The first fact that does not hold for a call whose words do. If there is none,
    /// the numbers of its replay are computed.
    pub fn missed(&mut self, frontend: &F) -> Result<Option<String>, SessionError> {
        Ok(match self.parts.difference(frontend, &self.free)? {
            None => self.chosen.compute(frontend, &self.parts.facts),
            found => found,
        })
    }

    /// Whether the chosen passes have altered collectives that other ranks take
    /// part in.
    pub fn needs_agreement(&self) -> bool {
        (self.altered.as_ref()).is_some_and(|altered| altered.differ && !altered.alone)
    }

    /// Replays a call and shows what each instruction makes or writes in place: of the
    /// plan as it was recorded, or else of the program that ran last. A value has its
    /// number in the recorded plan, [`rote_plans::NONE`] if a pass has added it.
    pub fn show(
        &mut self,
        frontend: &F,
        recorded: bool,
        seen: &mut dyn FnMut(u32, u32, TensorOf<F>),
    ) -> Result<(), SessionError> {
        if recorded {
            let (program, _) = optimize(self.file.to_plan(), Selection::NONE, frontend.ops());
            let mut bound = BoundVariant::bind(frontend, program, &self.parts)?;
            return Ok(bound.show(frontend, &self.parts.facts, seen)?);
        }
        let kept = self.altered.as_mut().filter(|_| self.kept);
        let bound = kept.and_then(|altered| altered.kept.as_mut());
        let bound = bound.unwrap_or(&mut self.chosen);
        Ok(bound.show(frontend, &self.parts.facts, seen)?)
    }

    /// Puts another plan in the place of the recorded one, and changes its program as
    /// a pass would.
    #[cfg(feature = "faults")]
    pub(crate) fn spoil(
        &mut self,
        frontend: &F,
        plan: Plan,
        passes: Selection,
        change: &mut dyn FnMut(&mut rote_passes::Program),
    ) -> Result<(), SessionError> {
        self.file = Rc::new(PlanFile::from_plan(&plan)?);
        let (mut program, _) = optimize(plan, passes, frontend.ops());
        change(&mut program);
        self.chosen = BoundVariant::bind(frontend, program, &self.parts)?;
        Ok(())
    }

    /// Replays the plan on the arguments that the frontend has collected: with altered
    /// collectives, if `agreed` or if these concern no other rank. Results:
    /// outputs, then gradients. Of an error, also what the framework raised.
    pub fn replay(
        &mut self,
        frontend: &F,
        agreed: bool,
    ) -> Result<F::Results, (SessionError, Option<F::Exception>)> {
        let needs_agreement = self.needs_agreement();
        self.kept = needs_agreement && !agreed;
        let bound = match &mut self.altered {
            Some(altered) if needs_agreement && !agreed => {
                let bound = match altered.kept.take() {
                    Some(bound) => bound,
                    None => {
                        let (program, _) =
                            optimize(self.file.to_plan(), altered.passes, frontend.ops());
                        BoundVariant::bind(frontend, program, &self.parts)
                            .map_err(|error| (error, None))?
                    }
                };
                altered.kept.insert(bound)
            }
            _ => &mut self.chosen,
        };
        let run = bound.replay(frontend, &self.parts.facts, self.late.is_some());
        let run = run.map_err(|error| (error.into(), bound.exception(frontend)));
        self.lost |= run.is_err() && (bound.lost() || bound.differs());
        self.left = bound.take_left();
        // Ranks that have agreed on other collectives than eager's all run them.
        self.undone = bound.undone() && !(needs_agreement && agreed);
        let answered = bound.answered();
        let id = self.id;
        self.answered = answered.map(|check| {
            let answer = self.trace.answers().nth(check);
            let subject = match answer.filter(|answer| !answer.source.is_empty()) {
                Some(answer) => {
                    let what = answer.shape.map_or("value read", |_| "shape of a result");
                    format!("the {what} at {} (was {answer})", answer.source)
                }
                None => "a value that the step reads on the host".to_owned(),
            };
            let found = frontend.found_answer();
            let failed = Failed { check, found };
            Unanswered {
                id,
                subject,
                failed,
            }
        });
        let is_late = self.late.is_some();
        self.unanswered = match &self.answered {
            None => 0,
            Some(ended) => self.unanswered + u32::from(!ended.is_right_here(is_late)),
        };
        if let Some(done) = self.chosen.arranged.take() {
            let row = self.passes.iter_mut().find(|(name, _)| *name == "arena");
            row.into_iter().for_each(|(_, row)| *row = done.clone());
        }
        self.replays += u64::from(self.answered.is_none());
        run
    }
}

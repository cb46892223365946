//! The ranks with which a session agrees about calls.

use std::ffi::{CStr, CString};

use rote_plans::sequence::Members;
use rote_replay::agreement::{self, Decision, Offer, Ranks};
use rote_replay::{Frontend, ReplayError};

use super::Config;
use super::notices::Notices;
use crate::SessionError;
use crate::stats::Stats;

#[derive(Debug, Default)]
pub struct Agreement {
    /// The process group whose ranks agree about every call.
    ranks: Option<CString>,
    /// Whether the ranks are to agree about checks too.
    pub checks: bool,
    /// How many default process groups had no name that the framework knows.
    unregistered: u64,
    /// Why the ranks' collectives did not fit, once said.
    pub unfit: Option<String>,
}

impl Agreement {
    /// The default process group is another one, or there is none: a number for it. Its ranks have not agreed to agree.
    pub fn enter<F: Frontend>(
        &mut self,
        frontend: &F,
        group: Option<&CStr>,
    ) -> Result<u64, ReplayError> {
        let number = match group {
            None => 0,
            Some(name) => match frontend.group(name)? {
                Some(group) => group.number() + 1,
                None => {
                    self.unregistered += 1;
                    u64::MAX - self.unregistered // never the same again
                }
            },
        };
        self.ranks = None;
        Ok(number)
    }

    /// All ranks are of this process group: whether they agree about every call from now on.
    pub fn join<F: Frontend>(
        &mut self,
        frontend: &F,
        group: &CStr,
        config: &mut Config,
        notices: &mut Notices,
    ) -> Result<bool, ReplayError> {
        if !config.passes.alters_collectives() && !self.checks {
            return Ok(false);
        }
        let Some(found) = frontend.group(group)? else {
            return Ok(false);
        };
        if let Some(why) = found.why_silent() {
            config.passes = config.passes.keeping_collectives();
            let off = match self.checks {
                true => "the ranks do not agree about calls",
                false => "passes that alter collectives stay off",
            };
            notices.tell(format_args!("{off}: {why}"));
            return Ok(false);
        }
        self.ranks = Some(group.to_owned());
        Ok(true)
    }

    /// The process group whose ranks agree, if they do and this process has not left it.
    pub fn group<F: Frontend>(&self, frontend: &F) -> Result<Option<F::Group>, ReplayError> {
        match &self.ranks {
            Some(name) => frontend.group(name),
            None => Ok(None),
        }
    }

    /// The ranks that agree about checks, if they do.
    pub fn of_checks(&self, world_size: u32) -> Option<Members> {
        let group = self.ranks.as_ref().filter(|_| self.checks)?;
        Some(Members {
            name: group.to_string_lossy().into_owned(),
            ranks: (0..world_size).collect(),
        })
    }

    /// Agrees with the other ranks about a call: whether all replay it with altered collectives. `offer`: what this
    /// rank would issue, if it replays.
    pub fn decide<F: Frontend>(
        &mut self,
        frontend: &F,
        offer: Option<&Offer>,
        stats: &mut Stats,
        notices: &mut Notices,
    ) -> Result<bool, SessionError> {
        let Some(group) = self.group(frontend)? else {
            return Ok(false);
        };
        let decided = frontend.unlocked(|| agreement::decide(&group, offer));
        let (decision, exchanged) = decided.and_then(|decided| decided).map_err(|error| {
            SessionError::Agreement(format!(
                "{}: the ranks could not agree about a call (while passes alter collectives, every rank of the job must \
                 make each call): {error}",
                notices.function
            ))
        })?;
        stats.exchanges += u64::from(exchanged);
        if let Decision::Unfit(why) = &decision {
            if self.unfit.is_none() {
                notices.tell(format_args!(
                    "the passes altered collectives, and the collectives of the ranks do not fit together; such calls \
                     keep the collectives of eager: {why}"
                ));
            }
            self.unfit = Some(why.to_string());
        }
        Ok(decision == Decision::Altered)
    }
}

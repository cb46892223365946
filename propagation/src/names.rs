//! What callers register by name, such as kinds of shardings and of partials.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{PoisonError, RwLock};

use super::error::PropagationError;

/// Those of one sort, the last ones last. What is registered stays, since placements name
/// it; what was forgotten is no longer active.
pub(super) struct Names<T: 'static>(RwLock<Vec<&'static Named<T>>>);

/// What was registered.
pub(super) struct Named<T> {
    pub(super) name: String,
    pub(super) is: T,
    active: AtomicBool,
}

impl<T> Named<T> {
    /// Whether its name is still its own.
    pub(super) fn is_active(&self) -> bool {
        self.active.load(Ordering::Relaxed)
    }
}

impl<T: Send + Sync> Names<T> {
    pub(super) const fn new() -> Self {
        Names(RwLock::new(Vec::new()))
    }

    /// Makes something known by a name that `is_free`, too.
    ///
    /// # Errors
    ///
    /// [`PropagationError::Sharding`] when the name is taken.
    pub(super) fn register(
        &self,
        name: &str,
        is: T,
        is_free: impl FnOnce(&str) -> bool,
    ) -> Result<(), PropagationError> {
        let mut all = self.0.write().unwrap_or_else(PoisonError::into_inner);
        if !is_free(name) || active(&all, name).is_some() {
            return Err(PropagationError::Sharding {
                name: name.into(),
                expected: "a name that is not taken".into(),
                found: format!("{name:?}"),
            });
        }
        all.push(Box::leak(Box::new(Named {
            name: name.into(),
            is,
            active: AtomicBool::new(true),
        })));
        Ok(())
    }

    /// Lets a name be free again. Returns whether something had it.
    pub(super) fn forget(&self, name: &str) -> bool {
        let found = self.named(name);
        found.is_some_and(|one| one.active.swap(false, Ordering::Relaxed))
    }

    /// What has a name.
    pub(super) fn named(&self, name: &str) -> Option<&'static Named<T>> {
        active(&self.0.read().unwrap_or_else(PoisonError::into_inner), name)
    }
}

fn active<T>(all: &[&'static Named<T>], name: &str) -> Option<&'static Named<T>> {
    let is = |one: &&&Named<T>| one.is_active() && one.name == name;
    all.iter().rev().find(is).copied()
}

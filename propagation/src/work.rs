//! How much work answers take. It is counted in tests only.

/// What is counted.
#[derive(Clone, Copy, Debug)]
pub(super) enum Work {
    /// A spec that an input is brought into.
    State,
    /// A combination of specs of several inputs.
    Join,
    /// A change of one mesh dim that is looked at.
    Operation,
}

#[cfg(test)]
thread_local! {
    static COUNTS: std::cell::Cell<[u64; 3]> = const { std::cell::Cell::new([0; 3]) };
}

/// Counts one piece of work.
#[inline]
pub(super) fn count(_work: Work) {
    #[cfg(test)]
    COUNTS.with(|counts| {
        let mut all = counts.get();
        all[_work as usize] += 1;
        counts.set(all);
    });
}

/// What something gives, with the states, joins and operations that it takes.
#[cfg(test)]
pub(super) fn counted<T>(run: impl FnOnce() -> T) -> (T, [u64; 3]) {
    COUNTS.set([0; 3]);
    let found = run();
    (found, COUNTS.get())
}

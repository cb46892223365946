//! What users are told, each once.

use std::fmt::Display;

#[derive(Debug)]
pub struct Notices {
    /// The captured function.
    pub function: String,
    /// The next warning.
    pub next: Option<String>,
    /// Whether users know that nothing more is recorded.
    full: bool,
    /// Whether users know that guards could not be checked.
    unguarded: bool,
    /// Whether users know that plans that check data do not pay.
    asking: bool,
}

impl Notices {
    pub fn new(function: &str) -> Self {
        Notices {
            function: function.to_owned(),
            next: None,
            full: false,
            unguarded: false,
            asking: false,
        }
    }

    pub fn tell(&mut self, text: impl Display) {
        self.next = Some(format!("{}: {text}", self.function));
    }

    /// Nothing more is recorded.
    pub fn tell_full(&mut self, why: &str) {
        if !std::mem::replace(&mut self.full, true) {
            self.tell(why);
        }
    }

    /// Plans that check data do not pay.
    pub fn tell_asking(&mut self, why: impl Display) {
        if !std::mem::replace(&mut self.asking, true) {
            self.tell(why);
        }
    }

    /// The guards of a call could not be checked.
    pub fn tell_unguarded(&mut self, error: impl Display) {
        if !std::mem::replace(&mut self.unguarded, true) {
            self.tell(format_args!(
                "the guards of a call could not be checked, so such calls run eagerly: {error}"
            ));
        }
    }
}

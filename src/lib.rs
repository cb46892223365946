//! Rote.

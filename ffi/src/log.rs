//! Messages for the host: `tracing` events, handed to a callback.

use std::ffi::{c_char, c_int};
use std::fmt::Write as _;
use std::sync::OnceLock;

use tracing::field::{Field, Visit};
use tracing::{Event, Level, Metadata, Subscriber, span};

use crate::status::{ROTE_OK, c_string, guarded};

/// Takes a message with its level, its target and its text. The level is 10 for debug, 20 for info, 30 for
/// warning and 40 for error, as in Python's `logging`. The target is `rote::guards`, `rote::record` or
/// `rote::replay`.
pub type RoteLogCallback =
    Option<unsafe extern "C" fn(level: c_int, target: *const c_char, message: *const c_char)>;

static CALLBACK: OnceLock<RoteLogCallback> = OnceLock::new();

/// Sends messages to `callback` from now on. The library calls it on the thread whose call causes the message.
/// The first callback of a process is kept. A null callback is an error.
#[unsafe(no_mangle)]
pub extern "C" fn rote_set_log(callback: RoteLogCallback) -> c_int {
    guarded(|| {
        if callback.is_none() {
            return Err("`callback` is null".into());
        }
        if CALLBACK.set(callback).is_ok() {
            // Another subscriber may be installed by a Rust host; it then has the messages.
            let _ = tracing::subscriber::set_global_default(Forward);
        }
        Ok(ROTE_OK)
    })
}

struct Forward;

#[derive(Default)]
struct Message(String);

impl Visit for Message {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        if field.name() == "message" {
            let _ = write!(self.0, "{value:?}");
        }
    }
}

impl Subscriber for Forward {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target().starts_with("rote")
    }

    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }

    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}

    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}

    fn event(&self, event: &Event<'_>) {
        let Some(callback) = CALLBACK.get().copied().flatten() else {
            return;
        };
        let level = match *event.metadata().level() {
            Level::ERROR => 40,
            Level::WARN => 30,
            Level::INFO => 20,
            Level::DEBUG | Level::TRACE => 10,
        };
        let mut message = Message::default();
        event.record(&mut message);
        let (target, message) = (c_string(event.metadata().target()), c_string(&message.0));
        // SAFETY: the host gave a function of this type; both texts outlive the call.
        unsafe { callback(level, target.as_ptr(), message.as_ptr()) };
    }

    fn enter(&self, _: &span::Id) {}

    fn exit(&self, _: &span::Id) {}
}

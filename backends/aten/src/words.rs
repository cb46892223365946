//! The names of the words of a call.

use rote_replay::WordPlace;

/// What surrounds a call, in the order in which the bridge reads it (`modes.h`).
const MODES: [&str; 12] = [
    "around",
    "grad_mode",
    "inference_mode",
    "autocast",
    "deterministic",
    "default_dtype",
    "backends",
    "default_device",
    "autograd",
    "dispatch_keys",
    "threads",
    "default process group",
];

/// Index of the word that is not 0 while something around a call sees or
/// changes its ops: `modes.h`, `Around`.
pub(crate) const AROUND: usize = 1;

/// Modes whose words say the same in every process of one version of PyTorch,
/// and that no other guard tells as text.
const PORTABLE: [&str; 5] = [
    "backends",
    "default_device",
    "autograd",
    "dispatch_keys",
    "threads",
];

/// Properties of a leaf, as `abi.h` numbers them.
const FIELDS: [&str; 17] = [
    "structure",
    "type",
    "dtype",
    "device",
    "requires_grad",
    "shape",
    "strides",
    "alias",
    "mesh",
    "placements",
    "shape",
    "strides",
    "",
    "grad",
    "grad_fn",
    "layout",
    "attributes",
];

/// What the word at `index` of a call's facts is called.
pub fn name(index: usize, place: Option<&WordPlace>, leaves: &[String]) -> String {
    if index == 0 {
        return "args structure".to_owned();
    }
    if let Some(mode) = MODES.get(index - 1) {
        return (*mode).to_owned();
    }
    let Some(place) = place else {
        return "args structure".to_owned();
    };
    place.name(&FIELDS, leaves)
}

/// The names and values of the modes among a call's words that mean the same in every process.
pub(crate) fn portable(words: &[u64]) -> Vec<(&'static str, String)> {
    let modes = words.get(AROUND..).unwrap_or_default();
    let named = MODES.iter().zip(modes);
    let portable = named.filter(|(name, _)| PORTABLE.contains(name));
    portable
        .map(|(name, word)| (*name, format!("{word:x}")))
        .collect()
}

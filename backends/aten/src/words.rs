//! The names of the words of a call.

use rote_plans::numbered;
use rote_replay::WordSubject;

numbered! {
    "mode";
    /// What surrounds a call (`modes.h`).
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    #[repr(u32)]
    pub enum Mode {
        /// What sees or changes the ops of the call; 0 if nothing does.
        Around = "around",
        /// Whether gradients are computed.
        GradMode = "grad_mode",
        /// Whether tensors are inference tensors.
        InferenceMode = "inference_mode",
        /// Where autocast is on, and its dtypes.
        Autocast = "autocast",
        /// Whether algorithms must be deterministic.
        Deterministic = "deterministic",
        /// The dtype of a tensor that is made without one.
        DefaultDtype = "default_dtype",
        /// The libraries that compute, and how exactly.
        Backends = "backends",
        /// The device of a tensor that is made without one.
        DefaultDevice = "default_device",
        /// How autograd runs.
        Autograd = "autograd",
        /// The dispatch keys of the thread.
        DispatchKeys = "dispatch_keys",
        /// How the thread computes.
        Threads = "threads",
        /// The default process group.
        ProcessGroup = "default process group",
    }
}

impl Mode {
    /// The word of a call that is about the mode.
    pub(crate) const fn word(self) -> usize {
        1 + self as usize
    }

    /// Whether its word says the same in every process of one version of PyTorch, and no other guard tells it as text.
    fn is_portable(self) -> bool {
        matches!(
            self,
            Mode::Backends
                | Mode::DefaultDevice
                | Mode::Autograd
                | Mode::DispatchKeys
                | Mode::Threads
        )
    }
}

numbered! {
    "property of a leaf";
    /// Properties of a leaf of the arguments (`arguments.h`).
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    #[repr(u32)]
    pub enum Field {
        /// The nested structure of the arguments.
        Structure = "structure",
        /// The class of the leaf.
        Type = "type",
        /// The element type.
        DType = "dtype",
        /// The device.
        Device = "device",
        /// What autograd does with it.
        RequiresGrad = "requires_grad",
        /// The local shape.
        Shape = "shape",
        /// The local strides.
        Strides = "strides",
        /// The memory that it shares.
        Alias = "alias",
        /// The mesh of a DTensor.
        Mesh = "mesh",
        /// The placements of a DTensor.
        Placements = "placements",
        /// The shape of a DTensor.
        GlobalShape = "shape",
        /// The strides of a DTensor.
        GlobalStrides = "strides",
        /// The value of a leaf that is no tensor.
        Value = "",
        /// The gradient.
        Grad = "grad",
        /// Whether it has been computed.
        Graph = "grad_fn",
        /// How the storage is to be read.
        StorageFlags = "layout",
        /// Its attributes.
        Attributes = "attributes",
    }
}

/// What the word at `index` of a call's facts is called.
pub fn name(index: usize, subject: Option<&WordSubject>, leaves: &[String]) -> String {
    if index == 0 {
        return "args structure".to_owned();
    }
    if let Some(mode) = Mode::TEXTS.get(index - 1) {
        return (*mode).to_owned();
    }
    let Some(subject) = subject else {
        return "args structure".to_owned();
    };
    subject.name(Field::TEXTS, leaves)
}

/// The names and values of the modes among a call's words that mean the same in every process.
pub(crate) fn portable(words: &[u64]) -> Vec<(&'static str, String)> {
    let words = words.get(1..).unwrap_or_default();
    let portable = (Mode::ALL.iter().zip(words)).filter(|(mode, _)| mode.is_portable());
    portable
        .map(|(mode, word)| (Mode::TEXTS[*mode as usize], format!("{word:x}")))
        .collect()
}

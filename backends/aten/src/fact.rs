//! The kinds of facts that the bridge reads of Python objects. `FactKind` in
//! `ffi/torch/abi.h` has the same numbers, which `backends/aten/tests/abi.rs` holds to
//! these; Python asks for them by name.

macro_rules! kinds {
    ($($(#[$doc:meta])* $kind:ident = $name:literal,)*) => {
        /// What a fact looks at: an object, and a key where the kind has one.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(u32)]
        pub enum FactKind {
            $($(#[$doc])* $kind,)*
        }

        impl FactKind {
            /// All kinds, by their numbers.
            pub const ALL: &[FactKind] = &[$(FactKind::$kind,)*];

            /// The name of a kind, as in `dict_item`.
            pub fn name(self) -> &'static str {
                match self {
                    $(FactKind::$kind => $name,)*
                }
            }
        }
    };
}

kinds! {
    /// The entry of a dict under a key.
    DictItem = "dict_item",
    /// The item of a list at an index.
    ListItem = "list_item",
    /// What a cell of a closure holds.
    Cell = "cell",
    /// The attribute of an object under a name.
    Attribute = "attribute",
    /// The size of a container.
    Size = "size",
    /// A tensor of the state: its address, how it looks, and what autograd knows of it.
    TensorMeta = "tensor_meta",
    /// The gradient of a tensor of the state or of an argument.
    GradMeta = "grad_meta",
    /// The process group under a name.
    Group = "group",
    /// Which keys, members or items a container has, in its order; of a dict the values too, if the key is True.
    Items = "items",
    /// The code, defaults, names and text of a function; without names and text, if the key is True.
    Function = "function",
    /// Format, shape and bytes of an array; where it lies in place of the bytes, if the key is True.
    Buffer = "buffer",
    /// The class of an object.
    TypeOf = "type_of",
    /// The value of a context variable.
    ContextVar = "context_var",
    /// How many attributes of its own an object has; their names and order too, if the key is True.
    Own = "own",
    /// What a descriptor, the key, finds in an object.
    Member = "member",
    /// The container that is an entry of a dict, and its size.
    EntrySize = "entry_size",
    /// The classes that a class inherits from.
    Bases = "bases",
    /// The attributes of a library's class and its bases; the key names the private ones that count.
    Class = "class",
    /// The referent of a weak reference.
    Weak = "weak",
    /// What an object of the interpreter's own classes points to; where an iterator stands, if the key is True.
    Referents = "referents",
    /// How a tensor looks that is no state, and its gradient; the seed of a generator.
    Look = "look",
    /// The memory that gradients share with the state, with arguments and with each other.
    GradMemory = "grad_memory",
    /// The memory that tensors which are no state, their gradients, and buffers share with these.
    ReachMemory = "reach_memory",
    /// Of a container that is an entry of a dict, and may be another one at each call: its class and size.
    EntryCount = "entry_count",
    /// The item of a tuple that is an entry of a dict; the key is (its key, the index, the size of the tuple).
    TupleItem = "tuple_item",
    /// That a dict has none of some names, a tuple that is the key; else, which it has.
    Absent = "absent",
    /// All that a container holds, however deep; the key is the classes of objects whose attributes count.
    Within = "within",
}

impl FactKind {
    /// The kind with a name.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|kind| kind.name() == name)
    }

    /// What the words of a fact of the kind say, if they say different things. Of a tensor, the first two are its
    /// address (`fact.h`, `kTensorMeta`).
    pub fn parts(self) -> &'static [&'static str] {
        match self {
            FactKind::TensorMeta => &[
                "",
                "",
                ".meta",
                ".requires_grad or hooks",
                ".placements",
                ".attributes",
            ],
            _ => &[],
        }
    }

    /// Whether a fact of the kind is about several names of its subject: its text says which is another one now.
    pub fn is_of_names(self) -> bool {
        self == FactKind::Absent
    }

    /// Whether a fact of the kind is about gradients, which steps make.
    pub fn is_of_gradients(self) -> bool {
        matches!(self, FactKind::GradMeta | FactKind::GradMemory)
    }
}

impl TryFrom<u32> for FactKind {
    type Error = String;

    fn try_from(number: u32) -> Result<Self, String> {
        Self::ALL.get(number as usize).copied().ok_or_else(|| {
            format!(
                "{number} is not a kind of fact: expected 0 to {}",
                Self::ALL.len() - 1
            )
        })
    }
}

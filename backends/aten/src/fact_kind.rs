//! The kinds of facts that the bridge reads of Python objects (`fact.h`).

use rote_plans::numbered;

numbered! {
    "kind of fact";
    /// What a fact looks at: an object, and a key where the kind has one.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    #[repr(u32)]
    pub enum FactKind {
        /// The entry of a dict under a key.
        DictItem,
        /// The item of a list at an index.
        ListItem,
        /// What a cell of a closure holds.
        Cell,
        /// The attribute of an object under a name.
        Attribute,
        /// The size of a container.
        Size,
        /// A tensor of the state: its address, how it looks, and what autograd knows of it.
        TensorMeta,
        /// The gradient of a tensor of the state or of an argument.
        GradMeta,
        /// The process group under a name.
        Group,
        /// Which keys, members or items a container has, in its order; of a dict the values too, if the key is True.
        Items,
        /// The code, defaults, names and text of a function; without names and text, if the key is True.
        Function,
        /// Format, shape and bytes of an array; where it lies in place of the bytes, if the key is True.
        Buffer,
        /// The class of an object.
        TypeOf,
        /// The value of a context variable.
        ContextVar,
        /// How many attributes of its own an object has; their names and order too, if the key is True.
        Own,
        /// What a descriptor, the key, finds in an object.
        Member,
        /// The container that is an entry of a dict, and its size.
        EntrySize,
        /// The classes that a class inherits from.
        Bases,
        /// The attributes of a library's class and its bases; the key names the private ones that count.
        Class,
        /// The referent of a weak reference.
        Weak,
        /// What an object of the interpreter's own classes points to; where an iterator stands, if the key is True.
        Referents,
        /// The metadata of a tensor that is no state, and of its gradient; the seed of a generator. Nothing, if the key is
        /// True: of an argument that something else leads to, only the memory counts.
        Metadata,
        /// The memory that gradients share with the state, with arguments and with each other.
        GradMemory,
        /// The memory that tensors which are no state, their gradients, and buffers share with these.
        ReachMemory,
        /// Of a container that is an entry of a dict, and may be another one at each call: its class and size.
        EntryCount,
        /// The item of a tuple that is an entry of a dict; the key is (its key, the index, the size of the tuple).
        TupleItem,
        /// That a dict has none of some names, a tuple that is the key; else, which it has.
        NoneOf,
        /// All that the entries of a container hold; the key is those that may come to hold something else.
        Within,
        /// Whether a reducer of gradients is in the midst of something, and has a communication hook.
        Reducer,
    }
}

impl FactKind {
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
        self == FactKind::NoneOf
    }

    /// Whether a fact of the kind is about gradients, which steps make.
    pub fn is_of_gradients(self) -> bool {
        matches!(self, FactKind::GradMeta | FactKind::GradMemory)
    }
}

//! The rules' error messages.

use std::fmt;

/// One field in the tables of a plan, for example `instrs[12].args`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// The table, as the field of [`crate::Plan`] is called.
    pub table: &'static str,
    /// The entry of the table.
    pub index: usize,
    /// The field of the entry, empty for the entry itself.
    pub field: &'static str,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Place {
            table,
            index,
            field,
        } = self;
        match (*table, *field) {
            ("fingerprint", field) => write!(f, "fingerprint.{field}"),
            ("rng_slots", _) => f.write_str("rng_slots"),
            (table, "") => write!(f, "{table}[{index}]"),
            (table, field) => write!(f, "{table}[{index}].{field}"),
        }
    }
}

/// A rule of [`crate::check`] that a plan breaks.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// An id beyond its table.
    #[error("{at} is {id}, but {table} has {len} entries")]
    Id {
        /// Where.
        at: Place,
        /// The id.
        id: u32,
        /// The table it should lie in.
        table: &'static str,
        /// Entries of that table.
        len: usize,
    },
    /// A range beyond its pool.
    #[error("{at} is {entries} entries from {start}, but {pool} has {len} entries")]
    Range {
        /// Where.
        at: Place,
        /// First entry.
        start: u32,
        /// Number of entries.
        entries: u32,
        /// The pool it should lie in.
        pool: &'static str,
        /// Entries of that pool.
        len: usize,
    },
    /// Lists that share pools without limit.
    #[error("{at} and the lists before it name more entries than the file has bytes")]
    Shared {
        /// The list that is one too many.
        at: Place,
    },
    /// A number outside its span.
    #[error("{at} is {found}, expected {from} or more and less than {to}")]
    Number {
        /// Where.
        at: Place,
        /// The number.
        found: i64,
        /// The least that is allowed.
        from: i64,
        /// The first that is not.
        to: i64,
    },
    /// A tensor larger than any memory.
    #[error("{at} has {most} elements or more")]
    Elements {
        /// Where.
        at: Place,
        /// The first number that is not allowed.
        most: i64,
    },
    /// Tensors that are together larger than any memory.
    #[error("{at} and the tensors before it have {most} bytes or more")]
    Bytes {
        /// The tensor that is one too many.
        at: Place,
        /// The first number that is not allowed.
        most: u64,
    },
    /// A list of the wrong length.
    #[error("{at} has {found} entries, expected {expected} ({what})")]
    Count {
        /// Where.
        at: Place,
        /// Entries found.
        found: usize,
        /// Entries needed.
        expected: usize,
        /// Why that many.
        what: &'static str,
    },
    /// A rank that the world does not have.
    #[error("{at} is rank {rank}, but the world size is {world_size}")]
    Rank {
        /// Where.
        at: Place,
        /// The rank.
        rank: i64,
        /// Ranks in the world.
        world_size: u32,
    },
    /// A mesh with more or fewer ranks than its shape says.
    #[error("{at} has {found} ranks, but its shape has room for {expected}")]
    MeshRanks {
        /// Where.
        at: Place,
        /// Ranks listed.
        found: usize,
        /// The product of the shape.
        expected: u64,
    },
    /// A value and its definition that do not name each other.
    #[error("values[{value}] says that {def} defines it, but {def} does not")]
    Definition {
        /// The value.
        value: u32,
        /// What it names as its definition.
        def: Place,
    },
    /// Values without their instruction, where the culprit is hard to find.
    #[error(
        "{values} values say that an instruction defines them, but the instructions define {defined}"
    )]
    Definitions {
        /// Values that name an instruction.
        values: u64,
        /// Values that instructions define.
        defined: u64,
    },
    /// An instruction that lists its new values out of order or twice.
    #[error("{at} defines %{value} after %{before}, expected increasing ids")]
    Order {
        /// Where.
        at: Place,
        /// The value.
        value: u32,
        /// The new value listed before it.
        before: u32,
    },
    /// A result that something else defines.
    #[error("{at} is %{value}, expected a value that this instruction defines")]
    NotNew {
        /// Where.
        at: Place,
        /// The value.
        value: u32,
    },
    /// A value used or listed as a result before it exists.
    #[error("{at} uses %{value} before instrs[{def}] defines it")]
    Undefined {
        /// Where.
        at: Place,
        /// The value.
        value: u32,
        /// The instruction that defines it.
        def: u32,
    },
    /// A value used after its last use, when it may have been freed.
    #[error("{at} uses %{value} after its last use, instrs[{last_use}]")]
    UsedUp {
        /// Where.
        at: Place,
        /// The value.
        value: u32,
        /// The last use that the value names.
        last_use: u32,
    },
    /// A value used, returned or left behind after it was freed.
    #[error("{at} is %{value}, which was freed before")]
    UsedAfterFree {
        /// Where.
        at: Place,
        /// The value.
        value: u32,
    },
    /// Something freed that the run did not make.
    #[error("{at} frees %{value}, which exists before the run")]
    FreedKept {
        /// Where.
        at: Place,
        /// The value.
        value: u32,
    },
    /// A value freed twice.
    #[error("{at} frees %{value} a second time")]
    FreedTwice {
        /// Where.
        at: Place,
        /// The value.
        value: u32,
    },
    /// Something that outlives the run, with a last use in it.
    #[error("{at} is %{value}, which outlives the run but has its last use at instrs[{last_use}]")]
    Outlives {
        /// Where.
        at: Place,
        /// The value.
        value: u32,
        /// The last use that the value names.
        last_use: u32,
    },
    /// A result of an op in a storage that it does not take.
    #[error("{at} makes %{value} in the storage of %{root}, which none of its arguments lies in")]
    ForeignStorage {
        /// Where.
        at: Place,
        /// The result.
        value: u32,
        /// Its root.
        root: u32,
    },
    /// A root that is itself a view.
    #[error("values[{value}].root is %{root}, whose own root is %{found}")]
    Root {
        /// The value.
        value: u32,
        /// Its root.
        root: u32,
        /// The root's root.
        found: u32,
    },
    /// A root that comes after what looks at it.
    #[error("values[{value}].root is %{root}, which is defined after it")]
    RootLater {
        /// The value.
        value: u32,
        /// Its root.
        root: u32,
    },
    /// A view whose base looks at other storage.
    #[error(
        "{at} makes %{out} a view of %{base}, but their roots are %{out_root} and %{base_root}"
    )]
    View {
        /// Where.
        at: Place,
        /// The value made.
        out: u32,
        /// Its root.
        out_root: u32,
        /// The value it was made from.
        base: u32,
        /// The root of that.
        base_root: u32,
    },
    /// A tensor that reaches beyond its storage.
    #[error("values[{value}] reaches bytes {from} to {to} of its storage, which has {bytes}")]
    Extent {
        /// The value.
        value: u32,
        /// First byte reached.
        from: i128,
        /// Byte after the last one reached.
        to: i128,
        /// Bytes of the storage.
        bytes: u64,
    },
    /// A tensor that reaches elements further from where its root's data starts than
    /// any memory goes.
    #[error("values[{value}] reaches elements {from} to {to}, expected less than {most} away")]
    Far {
        /// The value.
        value: u32,
        /// First element reached.
        from: i128,
        /// Element after the last one reached.
        to: i128,
        /// The first distance that is not allowed.
        most: i64,
    },
    /// Nested arguments that do not lie before the one that holds them.
    #[error("args[{index}] holds args[{inner}], expected entries before it")]
    ArgOrder {
        /// The argument.
        index: usize,
        /// The last argument inside it.
        inner: u64,
    },
    /// A wrapped number that is none.
    #[error("args[{index}] wraps args[{inner}], expected a number")]
    Wrapped {
        /// The argument.
        index: usize,
        /// What it wraps.
        inner: u32,
    },
    /// Arguments that nest too deep.
    #[error("{at} holds lists nested more than {max} deep")]
    ArgDepth {
        /// Where.
        at: Place,
        /// How deep they may nest.
        max: u32,
    },
    /// A scalar computed from itself or from a later one.
    #[error("scalars[{scalar}] is computed from scalars[{operand}], expected one before it")]
    ScalarOrder {
        /// The scalar.
        scalar: usize,
        /// Its operand.
        operand: u32,
    },
    /// A collective without the reduction it needs, or with one it has no use for.
    #[error("{at} is {found}, expected {expected} for this kind of collective")]
    Reduce {
        /// Where.
        at: Place,
        /// What is there.
        found: &'static str,
        /// What should be.
        expected: &'static str,
    },
    /// A collective over a group that this rank is not part of.
    #[error("{at} is a group of which rank {rank} is no member")]
    NotAMember {
        /// Where.
        at: Place,
        /// The plan's rank.
        rank: u32,
    },
    /// A collective that writes over a value other than its input.
    #[error("{at} is %{output}, expected a new value or the input %{input}")]
    CollectiveOutput {
        /// Where.
        at: Place,
        /// Its output.
        output: u32,
        /// Its input.
        input: u32,
    },
    /// A generator slot restored before anything was saved in it.
    #[error("{at} restores generator slot {slot} before it is saved")]
    RngSlot {
        /// Where.
        at: Place,
        /// The slot.
        slot: u32,
    },
    /// A constant with too few bytes for its value.
    #[error("{at} has {found} bytes, its value reaches bytes {from} to {expected}")]
    ConstantBytes {
        /// Where.
        at: Place,
        /// Bytes found.
        found: u64,
        /// First byte that the value reaches.
        from: i128,
        /// Byte after the last one that it reaches.
        expected: i128,
    },
    /// A result structure that is not what docs/plan-format.md says.
    #[error("the result structure is not valid: {detail}")]
    Result {
        /// What is wrong with it.
        detail: String,
    },
}

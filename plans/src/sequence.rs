//! The collectives that a plan issues, in their order, and whether those of all
//! ranks fit together.
//!
//! Ranks whose plans have the recorded collectives issue the collectives of eager.
//! If passes have merged collectives, the ranks must compare their collectives before
//! any rank issues one: [`fit`] says whether they fit together.

use std::fmt::{self, Display};

use hashbrown::HashMap;
use rkyv::rancor;
use rkyv::util::AlignedVec;
use rkyv::{Archive, Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64;

use crate::instr::{Collective, CollectiveKind, Instr, is_check};
use crate::placement::ReduceOp;
use crate::plan::Plan;
use crate::pool::Range;
use crate::value::DType;

/// What one rank issues.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct Sequence {
    /// The captured function.
    pub function: String,
    /// Process groups, in the order of first use.
    pub groups: Vec<Members>,
    /// Collectives, in order.
    pub issued: Vec<Issued>,
}

/// A process group.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq, Hash)]
pub struct Members {
    /// The name under which every member registered it.
    pub name: String,
    /// Global ranks in group order.
    pub ranks: Vec<u32>,
}

/// A collective as all members of its group must see it.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct Issued {
    /// Index into [`Sequence::groups`].
    pub group: u32,
    /// What it does.
    pub kind: CollectiveKind,
    /// The reduction, for reducing kinds.
    pub reduce: Option<ReduceOp>,
    /// The source of a broadcast, counted in the group.
    pub root: u32,
    /// The element type.
    pub dtype: DType,
    /// Elements that this rank puts in.
    pub sent: u64,
    /// Elements that it gets.
    pub received: u64,
    /// All-to-all: elements for each member; empty for an even split.
    pub to: Vec<u64>,
    /// All-to-all: elements from each member, likewise.
    pub from: Vec<u64>,
    /// The recorded collectives that it carries out, in the order of their
    /// elements: the how manieth of this group each was, and how many elements
    /// were put into it.
    pub parts: Vec<(u32, u64)>,
}

/// Why the collectives of ranks do not fit together.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Misfit {
    /// The ranks run different functions.
    #[error("rank 0 replays {ours}, rank {rank} replays {theirs}")]
    Function {
        /// Of rank 0.
        ours: String,
        /// The other rank.
        rank: usize,
        /// Its function.
        theirs: String,
    },
    /// Two members of a group would meet in different collectives, or never.
    #[error("rank {rank} issues {ours}, where rank {other} issues {theirs}")]
    Meeting {
        /// A rank that waits.
        rank: usize,
        /// What it issues.
        ours: String,
        /// The member for which it waits.
        other: usize,
        /// What that one issues.
        theirs: String,
    },
    /// What a rank sent is no sequence.
    #[error("what rank {rank} says of its collectives cannot be read: {why}")]
    Unreadable {
        /// The rank.
        rank: usize,
        /// What is wrong.
        why: String,
    },
}

impl Sequence {
    /// What a plan issues: the collectives of `plan`, each of which carries out
    /// those of `recorded` that `carries` counts. `checked`: the ranks that tell each
    /// other the outcome of each check; none if each rank decides alone.
    pub fn of(
        recorded: &Plan,
        plan: &Plan,
        carries: &[Vec<u32>],
        checked: Option<&Members>,
    ) -> Self {
        let mut in_group: HashMap<u32, u32> = HashMap::new();
        let parts: Vec<(u32, u64)> = collectives(recorded)
            .map(|c| {
                let count = in_group.entry(c.group).or_insert(0);
                *count += 1;
                (*count - 1, elements(recorded, c.input))
            })
            .collect();
        let mut sequence = Sequence {
            function: recorded.function.clone(),
            groups: Vec::new(),
            issued: Vec::new(),
        };
        let mut carries = carries.iter();
        for instr in &plan.instrs {
            if let (Instr::Local { op, .. }, Some(members)) = (instr, checked) {
                if is_check(plan.str(*op)) {
                    sequence.check(members);
                }
            }
            let Instr::Collective(c) = instr else {
                continue;
            };
            let Some(carried) = carries.next() else {
                break;
            };
            let group = sequence.group(plan, c.group);
            sequence.issued.push(Issued {
                group,
                kind: c.kind,
                reduce: c.reduce,
                root: c.root,
                dtype: plan.values[c.input as usize].dtype,
                sent: elements(plan, c.input),
                received: elements(plan, c.output),
                to: split(plan, c.input_splits, c.input),
                from: split(plan, c.output_splits, c.output),
                parts: carried.iter().map(|&at| parts[at as usize]).collect(),
            });
        }
        sequence
    }

    /// What a plan issues as it was recorded.
    pub fn recorded(plan: &Plan) -> Self {
        let carries: Vec<Vec<u32>> = (0..collectives(plan).count() as u32)
            .map(|at| vec![at])
            .collect();
        Sequence::of(plan, plan, &carries, None)
    }

    /// Appends the exchange of a check: one byte of every rank, to all.
    fn check(&mut self, members: &Members) {
        let group = self.members(members.clone());
        self.issued.push(Issued {
            group,
            kind: CollectiveKind::AllGather,
            reduce: None,
            root: 0,
            dtype: DType::U8,
            sent: 1,
            received: members.ranks.len() as u64,
            to: Vec::new(),
            from: Vec::new(),
            parts: Vec::new(),
        });
    }

    fn group(&mut self, plan: &Plan, group: u32) -> u32 {
        let group = &plan.groups[group as usize];
        let members = Members {
            name: plan.strings[group.name as usize].clone(),
            ranks: plan.dims[group.ranks.indices()]
                .iter()
                .map(|rank| *rank as u32)
                .collect(),
        };
        self.members(members)
    }

    /// The index of a group, which is added if it is new.
    fn members(&mut self, members: Members) -> u32 {
        let known = self.groups.iter().position(|other| *other == members);
        known.unwrap_or_else(|| {
            self.groups.push(members);
            self.groups.len() - 1
        }) as u32
    }

    /// Whether no other rank takes part in any of them.
    pub fn alone(&self) -> bool {
        self.groups.iter().all(|group| group.ranks.len() <= 1)
    }

    /// The bytes that ranks exchange, and a token that stands for them: a hash,
    /// never 0.
    ///
    /// # Errors
    ///
    /// When there is no memory.
    pub fn to_bytes(&self) -> Result<(u64, AlignedVec), rancor::Error> {
        let bytes = rkyv::to_bytes::<rancor::Error>(self)?;
        Ok((token_of(&bytes), bytes))
    }

    /// The sequence that a rank sent, for which its token stands.
    ///
    /// # Errors
    ///
    /// [`Misfit::Unreadable`] when the bytes are not those of the token, or none
    /// of a sequence.
    pub fn from_bytes(rank: usize, token: u64, bytes: &[u8]) -> Result<Self, Misfit> {
        let unreadable = |why: String| Misfit::Unreadable { rank, why };
        let hash = token_of(bytes);
        if hash != token {
            return Err(unreadable(format!(
                "its token is {token:#018x}, the bytes have {hash:#018x}"
            )));
        }
        let mut aligned = AlignedVec::<16>::with_capacity(bytes.len());
        aligned.extend_from_slice(bytes);
        let sequence = rkyv::from_bytes::<Sequence, rancor::Error>(&aligned)
            .map_err(|error| unreadable(error.to_string()))?;
        let groups = sequence.groups.len();
        match sequence.issued.iter().find(|c| c.group as usize >= groups) {
            Some(c) => Err(unreadable(format!("group {} of {groups}", c.group))),
            None => Ok(sequence),
        }
    }

    /// A collective for people.
    fn text(&self, at: usize) -> String {
        match self.issued.get(at) {
            Some(c) => format!(
                "{c} over ranks {:?} as its collective {}",
                self.groups[c.group as usize].ranks,
                at + 1
            ),
            None => format!("nothing after its collective {at}"),
        }
    }
}

fn token_of(bytes: &[u8]) -> u64 {
    xxh3_64(bytes).max(1)
}

impl Display for Issued {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.kind {
            CollectiveKind::AllReduce => "all_reduce",
            CollectiveKind::AllGather => "all_gather",
            CollectiveKind::ReduceScatter => "reduce_scatter",
            CollectiveKind::AllToAll => "all_to_all",
            CollectiveKind::Broadcast => "broadcast",
        };
        write!(f, "{kind} of {} {}", self.sent, self.dtype)?;
        if self.parts.is_empty() {
            return write!(f, " (the outcome of a check)");
        }
        let parts: Vec<String> = self.parts.iter().map(|(at, _)| at.to_string()).collect();
        write!(f, " (recorded as {} of the group)", parts.join(", "))
    }
}

/// Whether ranks that issue these collectives, `sequences[rank]` each, all come
/// to their ends, with every collective meeting its like on every member of its
/// group.
///
/// The sequences are run on paper. A collective takes place when it is the next
/// one of every member of its group; then all members go on. Which of several
/// possible ones is taken first makes no difference, since a rank has one next
/// collective only. They fit if nothing is left, and if what met was alike:
/// kind, reduction, element type, sizes, and the recorded collectives that it
/// carries out.
///
/// Why no rank waits forever then: the order in which collectives took place on
/// paper numbers all of them, and every rank issues its own by rising numbers.
/// Suppose ranks are stuck, and let `c` be the unfinished collective with the
/// lowest number. A member that has not started it waits, since nothing else
/// takes forever, for a collective that it issued before: one with a lower
/// number, which is finished. So all members have started `c`. What is ahead of
/// it in the queue of its group was issued before it: finished as well. So
/// nothing holds `c` up.
///
/// A collective over a group without the rank itself is passed over. There are
/// none, but from PyTorch's fake process group, whose ranks all say what the
/// one rank says that there is.
///
/// # Errors
///
/// [`Misfit`] names two ranks and what they issue.
pub fn fit(sequences: &[Sequence]) -> Result<(), Misfit> {
    if let Some(rank) =
        (0..sequences.len()).find(|r| sequences[*r].function != sequences[0].function)
    {
        return Err(Misfit::Function {
            ours: sequences[0].function.clone(),
            rank,
            theirs: sequences[rank].function.clone(),
        });
    }
    let mut numbers: HashMap<&Members, usize> = HashMap::new();
    let groups: Vec<Vec<usize>> = sequences
        .iter()
        .map(|sequence| {
            let number = |group| {
                let next = numbers.len();
                *numbers.entry(group).or_insert(next)
            };
            sequence.groups.iter().map(number).collect()
        })
        .collect();
    let mut arrived = vec![0; numbers.len()];
    let mut next = vec![0; sequences.len()];
    let mut moved: Vec<usize> = (0..sequences.len()).collect();
    while let Some(rank) = moved.pop() {
        let Some(issued) = sequences[rank].issued.get(next[rank]) else {
            continue;
        };
        let members = &sequences[rank].groups[issued.group as usize].ranks;
        if !members.contains(&(rank as u32)) {
            next[rank] += 1;
            moved.push(rank);
            continue;
        }
        let number = groups[rank][issued.group as usize];
        arrived[number] += 1;
        if arrived[number] < members.len() {
            continue;
        }
        arrived[number] = 0;
        let met: Vec<&Issued> = members
            .iter()
            .map(|&member| &sequences[member as usize].issued[next[member as usize]])
            .collect();
        if let Some((i, j)) = unlike(&met) {
            return Err(meeting(
                sequences,
                &next,
                members[i] as usize,
                members[j] as usize,
            ));
        }
        for &member in members {
            next[member as usize] += 1;
            moved.push(member as usize);
        }
    }
    // A rank that waits, and a member of the group that is not there.
    for (rank, sequence) in sequences.iter().enumerate() {
        let Some(issued) = sequence.issued.get(next[rank]) else {
            continue;
        };
        let number = groups[rank][issued.group as usize];
        let there = |member: usize| {
            let other = sequences[member].issued.get(next[member]);
            other.is_some_and(|other| groups[member][other.group as usize] == number)
        };
        let members = sequence.groups[issued.group as usize].ranks.iter();
        let absent = members
            .map(|&member| member as usize)
            .find(|&member| member >= sequences.len() || !there(member));
        return Err(meeting(sequences, &next, rank, absent.unwrap_or(rank)));
    }
    Ok(())
}

fn meeting(sequences: &[Sequence], next: &[usize], rank: usize, other: usize) -> Misfit {
    Misfit::Meeting {
        rank,
        ours: sequences[rank].text(next[rank]),
        other,
        theirs: match sequences.get(other) {
            Some(sequence) => sequence.text(next[other]),
            None => "nothing: there is no such rank".to_owned(),
        },
    }
}

/// Two members of a group, counted in it, whose collectives are not alike.
fn unlike(met: &[&Issued]) -> Option<(usize, usize)> {
    let like = |a: &Issued, b: &Issued| {
        let what = |c: &Issued| (c.kind, c.reduce, c.root, c.dtype);
        let numbers = |c: &Issued| c.parts.iter().map(|part| part.0).collect::<Vec<_>>();
        what(a) == what(b)
            && if a.kind == CollectiveKind::AllToAll {
                numbers(a) == numbers(b)
            } else {
                (a.sent, a.received, &a.parts) == (b.sent, b.received, &b.parts)
            }
    };
    if let Some(other) = (1..met.len()).find(|&i| !like(met[0], met[i])) {
        return Some((0, other));
    }
    if met.first()?.kind != CollectiveKind::AllToAll {
        return None;
    }
    let share = |shares: &[u64], total: u64, member: usize| match shares {
        [] => Some(total / met.len() as u64),
        shares => shares.get(member).copied(),
    };
    let pairs = (0..met.len()).flat_map(|i| (0..met.len()).map(move |j| (i, j)));
    pairs.into_iter().find(|&(i, j)| {
        let sent = share(&met[i].to, met[i].sent, j);
        sent.is_none() || sent != share(&met[j].from, met[j].received, i)
    })
}

fn collectives(plan: &Plan) -> impl Iterator<Item = &Collective> {
    plan.instrs.iter().filter_map(|instr| match instr {
        Instr::Collective(c) => Some(c),
        _ => None,
    })
}

fn shape(plan: &Plan, value: u32) -> &[i64] {
    &plan.dims[plan.values[value as usize].shape.indices()]
}

fn elements(plan: &Plan, value: u32) -> u64 {
    shape(plan, value).iter().product::<i64>().unsigned_abs()
}

/// Rows of dim 0 as elements.
fn split(plan: &Plan, rows: Range, value: u32) -> Vec<u64> {
    let row = shape(plan, value).iter().skip(1).product::<i64>();
    let rows = plan.dims[rows.indices()].iter();
    rows.map(|rows| (rows * row).unsigned_abs()).collect()
}

#[cfg(test)]
mod tests;

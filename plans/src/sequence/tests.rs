//! Sequences that fit and that do not; over random ones, what running them on
//! paper says must be what their order says.

use hashbrown::HashMap;
use proptest::prelude::*;

use super::{Issued, Members, Misfit, Sequence, fit};
use crate::instr::CollectiveKind;
use crate::placement::ReduceOp;
use crate::sample;
use crate::value::DType;

fn issued(group: u32, part: u32) -> Issued {
    Issued {
        group,
        kind: CollectiveKind::AllReduce,
        reduce: Some(ReduceOp::Sum),
        root: 0,
        dtype: DType::F32,
        sent: 8,
        received: 8,
        to: Vec::new(),
        from: Vec::new(),
        parts: vec![(part, 8)],
    }
}

/// A rank's sequence over groups of these ranks: which group each collective is
/// over.
fn sequence(groups: &[&[u32]], order: &[u32]) -> Sequence {
    let mut count = vec![0; groups.len()];
    let members = |ranks: &&[u32]| Members {
        name: format!("{ranks:?}"),
        ranks: ranks.to_vec(),
    };
    Sequence {
        function: "train.py:step".into(),
        groups: groups.iter().map(members).collect(),
        issued: order
            .iter()
            .map(|&group| {
                count[group as usize] += 1;
                issued(group, count[group as usize] - 1)
            })
            .collect(),
    }
}

const TP: &[u32] = &[0, 1];
const DP: &[u32] = &[0, 2];
const TP2: &[u32] = &[2, 3];
const DP2: &[u32] = &[1, 3];

/// Two ranks with these collectives over one group.
fn pair(a: Vec<Issued>, b: Vec<Issued>) -> Result<(), Misfit> {
    let with = |issued| Sequence {
        issued,
        ..sequence(&[TP], &[])
    };
    fit(&[with(a), with(b)])
}

#[test]
fn equal_sequences_on_a_mesh_fit() {
    let order = [0, 1, 1, 0];
    let ranks = [(TP, DP), (TP, DP2), (TP2, DP), (TP2, DP2)];
    let sequences = ranks.map(|(tp, dp)| sequence(&[tp, dp], &order));
    assert_eq!(fit(&sequences), Ok(()));
}

#[test]
fn ranks_of_other_groups_may_issue_more_or_fewer() {
    let sequences = [
        sequence(&[TP], &[0, 0]),
        sequence(&[TP], &[0, 0]),
        sequence(&[TP2], &[0]),
        sequence(&[TP2], &[0]),
    ];
    assert_eq!(fit(&sequences), Ok(()));
}

#[test]
fn two_groups_in_another_order_do_not_fit() {
    let both: &[u32] = &[0, 1];
    let world: &[u32] = &[1, 0];
    let a = sequence(&[both, world], &[0, 1]);
    let b = sequence(&[both, world], &[1, 0]);
    let misfit = fit(&[a, b]).expect_err("each waits for the other");
    let text = misfit.to_string();
    assert!(
        text.contains("rank 0 issues all_reduce of 8 f32") && text.contains("rank 1 issues"),
        "{text}"
    );
}

#[test]
fn a_cycle_over_three_ranks_does_not_fit() {
    let (a, b, c): (&[u32], &[u32], &[u32]) = (&[0, 1], &[1, 2], &[2, 0]);
    let cyclic = [
        sequence(&[a, c], &[0, 1]),
        sequence(&[b, a], &[0, 1]),
        sequence(&[c, b], &[0, 1]),
    ];
    assert!(matches!(fit(&cyclic), Err(Misfit::Meeting { .. })));
    let straight = [
        sequence(&[a, c], &[0, 1]),
        sequence(&[b, a], &[1, 0]),
        sequence(&[c, b], &[1, 0]),
    ];
    assert_eq!(fit(&straight), Ok(()));
}

#[test]
fn one_collective_more_does_not_fit() {
    let sequences = [sequence(&[TP], &[0, 0]), sequence(&[TP], &[0])];
    let text = fit(&sequences).expect_err("one is left").to_string();
    assert!(
        text.contains("rank 1 issues nothing after its collective 1"),
        "{text}"
    );
}

/// What differs between two ranks, one thing at a time.
#[test]
fn everything_that_members_must_share_is_compared() {
    let ours = issued(0, 0);
    assert_eq!(pair(vec![ours.clone()], vec![ours.clone()]), Ok(()));
    let Issued {
        group: _,
        kind: _,
        reduce: _,
        root: _,
        dtype: _,
        sent: _,
        received: _,
        to: _,
        from: _,
        parts: _,
    } = &ours;
    let changes: [fn(&mut Issued); 8] = [
        |c| c.kind = CollectiveKind::Broadcast,
        |c| c.reduce = Some(ReduceOp::Max),
        |c| c.root = 1,
        |c| c.dtype = DType::F64,
        |c| c.sent = 9,
        |c| c.received = 9,
        |c| c.parts[0].0 = 1,
        |c| c.parts[0].1 = 9,
    ];
    for (i, change) in changes.iter().enumerate() {
        let mut theirs = ours.clone();
        change(&mut theirs);
        assert!(
            pair(vec![ours.clone()], vec![theirs]).is_err(),
            "change {i}"
        );
    }
    let other_name = Sequence {
        groups: vec![Members {
            name: "another group of the same ranks".into(),
            ranks: TP.to_vec(),
        }],
        ..sequence(&[TP], &[0])
    };
    assert!(fit(&[sequence(&[TP], &[0]), other_name]).is_err());
    let other_function = Sequence {
        function: "train.py:other".into(),
        ..sequence(&[TP], &[0])
    };
    let misfit = fit(&[sequence(&[TP], &[0]), other_function]);
    assert!(matches!(misfit, Err(Misfit::Function { rank: 1, .. })));
}

/// Of equal sizes and equally many, but other ones put together.
#[test]
fn buckets_of_other_parts_do_not_fit() {
    let bucket = |parts: &[u32]| Issued {
        sent: 16,
        received: 16,
        parts: parts.iter().map(|&part| (part, 8)).collect(),
        ..issued(0, 0)
    };
    let ours = vec![bucket(&[0, 1]), issued(0, 2)];
    assert_eq!(pair(ours.clone(), ours.clone()), Ok(()));
    for parts in [[0, 2], [1, 0]] {
        let theirs = vec![bucket(&parts), issued(0, 1)];
        assert!(pair(ours.clone(), theirs).is_err(), "{parts:?}");
    }
}

#[test]
fn what_is_sent_to_each_member_is_what_it_expects() {
    let exchange = |to: &[u64], from: &[u64]| Issued {
        kind: CollectiveKind::AllToAll,
        reduce: None,
        sent: to.iter().sum(),
        received: from.iter().sum(),
        to: to.to_vec(),
        from: from.to_vec(),
        ..issued(0, 0)
    };
    let ours = exchange(&[1, 2], &[1, 4]);
    assert_eq!(
        pair(vec![ours.clone()], vec![exchange(&[4, 3], &[2, 3])]),
        Ok(())
    );
    assert!(pair(vec![ours.clone()], vec![exchange(&[4, 3], &[1, 3])]).is_err());
    assert!(pair(vec![ours.clone()], vec![exchange(&[4], &[2])]).is_err());
    let even = Issued {
        to: Vec::new(),
        from: Vec::new(),
        sent: 4,
        received: 4,
        ..ours
    };
    assert_eq!(
        pair(vec![even.clone()], vec![exchange(&[2, 1], &[2, 1])]),
        Ok(())
    );
    assert!(pair(vec![even], vec![exchange(&[1, 2], &[2, 1])]).is_err());
}

#[test]
fn groups_that_no_job_has_do_not_fit() {
    for ranks in [&[0, 7][..], &[0, 0], &[0, 1, 1], &[u32::MAX, 0]] {
        let sequences = [sequence(&[ranks], &[0]), sequence(&[ranks], &[0])];
        assert!(fit(&sequences).is_err(), "{ranks:?}");
    }
}

/// PyTorch's fake process group answers with what the one rank says.
#[test]
fn copies_of_one_rank_fit() {
    let ours = sequence(&[TP, DP], &[0, 1, 1, 0]);
    assert_eq!(
        fit(&[ours.clone(), ours.clone(), ours.clone(), ours]),
        Ok(())
    );
}

#[test]
fn a_plan_comes_back_from_its_bytes() {
    let plan = sample::small();
    let sequence = Sequence::recorded(&plan);
    assert!(!sequence.issued.is_empty());
    let (token, bytes) = sequence.to_bytes().expect("bytes");
    assert_eq!(
        Sequence::from_bytes(0, token, &bytes).expect("a sequence"),
        sequence
    );
    assert_eq!(sequence.to_bytes().expect("bytes").0, token);
    for other in 0..sequence.issued.len() {
        let mut changed = sequence.clone();
        changed.issued[other].sent += 1;
        assert_ne!(changed.to_bytes().expect("bytes").0, token);
    }
    for end in 0..bytes.len() {
        let cut = Sequence::from_bytes(3, token, &bytes[..end]);
        assert!(
            matches!(cut, Err(Misfit::Unreadable { rank: 3, .. })),
            "{end} bytes"
        );
    }
}

/// Random orders of three groups on three ranks, most of them almost equal.
fn orders() -> impl Strategy<Value = Vec<Vec<u32>>> {
    let common = prop::collection::vec(0..4_u32, 0..8);
    let swaps = prop::collection::vec((0..3_usize, 0..8_usize), 0..3);
    (common, swaps).prop_map(|(common, swaps)| {
        let mut ranks = vec![common; 3];
        for (rank, at) in swaps {
            if at + 1 < ranks[rank].len() {
                ranks[rank].swap(at, at + 1);
            } else {
                ranks[rank].pop();
            }
        }
        ranks
    })
}

const GROUPS: [&[u32]; 4] = [&[0, 1], &[1, 2], &[0, 2], &[0, 1, 2]];

/// Whether the order of collectives, each rank's own put together, has no
/// cycle: the k-th collective over a group is one for all its members.
fn ordered(orders: &[Vec<u32>]) -> bool {
    let mut before: HashMap<(u32, usize), Vec<(u32, usize)>> = HashMap::new();
    let mut count: HashMap<(usize, u32), usize> = HashMap::new();
    for (rank, order) in orders.iter().enumerate() {
        let mut last = None;
        for &group in order {
            if !GROUPS[group as usize].contains(&(rank as u32)) {
                continue;
            }
            let k = count.entry((rank, group)).or_insert(0);
            before.entry((group, *k)).or_default().extend(last);
            last = Some((group, *k));
            *k += 1;
        }
    }
    let counted = |group: u32| {
        let members = GROUPS[group as usize].iter();
        let mut counts = members.map(|rank| count.get(&(*rank as usize, group)).copied());
        let first = counts.next().flatten();
        counts.all(|other| other == first)
    };
    if !(0..4).all(counted) {
        return false;
    }
    // Longest way to each: longer than there are collectives means a cycle.
    let mut depth: HashMap<(u32, usize), usize> = before.keys().map(|c| (*c, 0)).collect();
    for _ in 0..=before.len() {
        for (c, earlier) in &before {
            let deepest = earlier.iter().map(|e| depth[e] + 1).max().unwrap_or(0);
            depth.insert(*c, deepest);
        }
    }
    depth.values().all(|d| *d < before.len().max(1))
}

const CASES: u32 = if cfg!(miri) { 20 } else { 2000 };

proptest! {
    #![proptest_config(ProptestConfig { cases: CASES, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn sequences_fit_when_their_order_has_no_cycle(orders in orders()) {
        let sequences: Vec<Sequence> = orders.iter().map(|order| sequence(&GROUPS, order)).collect();
        prop_assert_eq!(fit(&sequences).is_ok(), ordered(&orders), "{:?}", fit(&sequences));
    }

    #[test]
    fn any_bytes_are_read_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        if let Ok(sequence) = Sequence::from_bytes(0, super::token_of(&bytes), &bytes) {
            let _ = fit(&[sequence.clone(), sequence]);
        }
    }
}

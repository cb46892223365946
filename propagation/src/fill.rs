//! Filling a rule's sharding placeholders with the shard types of its inputs.

use super::error::PropagationError;
use super::layout::{self, smallest};
use super::partials::PartialId;
use super::placement::{Order, PartialOp, Placement};
use super::redistribute::State;
use super::rule::{Need, Query, Rule, Slot, partial};
use super::sharding::ShardingId;
use super::spec::{MAX_MESH_DIMS, Spec, TensorMeta};

/// The most strategies of one op on one mesh dim.
const MAX_ROWS: usize = 128;
/// The most different placements.
const MAX_PLACEMENTS: usize = 250;

/// One filled strategy: placements as indices into [`Filled::table`].
struct Row {
    strategy: usize,
    /// By how much mesh dims to the left make fewer blocks of a flattened dim.
    divided: u32,
    outputs: Vec<u8>,
    inputs: Vec<u8>,
}

/// A set of rows per mesh dim, as bits.
pub(super) type Masks = [u128; MAX_MESH_DIMS];

/// The strategies of an op on one mesh dim, filled.
pub(super) struct Filled<'a> {
    pub(super) table: Vec<Placement>,
    pub(super) metas: Vec<&'a TensorMeta>,
    pub(super) sources: Vec<State>,
    pub(super) sizes: &'a [u32],
    rule: &'a Rule,
    rows: Vec<Row>,
}

impl<'a> Filled<'a> {
    /// Filled with the shard types of the inputs' placements.
    pub(super) fn new(
        query: &Query<'_>,
        rule: &'a Rule,
        inputs: &[(&'a Spec, &'a TensorMeta)],
        sizes: &'a [u32],
    ) -> Result<Self, PropagationError> {
        Self::with_types(query, rule, inputs, sizes, &[])
    }

    /// Filled with the shard types, the orders of norms and the registered partials of more
    /// placements.
    pub(super) fn with_types(
        query: &Query<'_>,
        rule: &'a Rule,
        inputs: &[(&'a Spec, &'a TensorMeta)],
        sizes: &'a [u32],
        more: &[Placement],
    ) -> Result<Self, PropagationError> {
        let mut filled = Filled {
            table: Vec::with_capacity(16),
            metas: inputs.iter().map(|i| i.1).collect(),
            sources: Vec::with_capacity(inputs.len()),
            sizes,
            rule,
            rows: Vec::with_capacity(16),
        };
        filled.table.push(Placement::Replicate);
        let mut choices = Choices {
            types: Vec::with_capacity(2 + more.len()),
            partials: Vec::new(),
            divisors: products(&sizes[..sizes.len().saturating_sub(1)]),
        };
        for placement in more {
            choices.take_from(*placement, rule);
        }
        for (spec, _) in inputs {
            filled.add_source(spec, &mut choices);
        }
        choices.types.sort_unstable();
        choices.partials.sort_unstable();
        for (strategy, (outputs, inputs)) in rule.strategies().enumerate() {
            filled.add_rows(strategy, outputs, inputs, &choices);
            filled.check_limits(query)?;
        }
        Ok(filled)
    }

    /// Notes how an input lies, and what its placements add to the choices.
    fn add_source(&mut self, spec: &Spec, choices: &mut Choices) {
        let mut state = State::default();
        for (code, placement) in state.iter_mut().zip(&spec.placements) {
            *code = self.code(*placement);
            choices.take_from(*placement, self.rule);
        }
        self.sources.push(state);
    }

    /// Adds the rows of a strategy: one for each way to fill its placeholders.
    fn add_rows(&mut self, strategy: usize, outputs: &[Slot], inputs: &[Slot], choices: &Choices) {
        for filling in choices.fillings(outputs, inputs) {
            let mut codes = |slots: &[Slot]| -> Vec<u8> {
                let filled_with = |s: &Slot| filling.fill(*s);
                slots.iter().map(|s| self.code(filled_with(s))).collect()
            };
            let (outputs, inputs) = (codes(outputs), codes(inputs));
            self.rows.push(Row {
                strategy,
                divided: filling.divided,
                outputs,
                inputs,
            });
        }
    }

    fn check_limits(&self, query: &Query<'_>) -> Result<(), PropagationError> {
        let (rows, table) = (self.rows.len(), self.table.len());
        for (what, limit, found) in [
            ("strategies", MAX_ROWS, rows),
            ("placements", MAX_PLACEMENTS, table),
        ] {
            if found > limit {
                return Err(PropagationError::TooLarge {
                    op: query.op.into(),
                    what,
                    limit,
                    found,
                });
            }
        }
        Ok(())
    }

    fn code(&mut self, placement: Placement) -> u8 {
        let at = self.table.iter().position(|p| *p == placement);
        at.unwrap_or_else(|| {
            self.table.push(placement);
            self.table.len() - 1
        }) as u8
    }

    pub(super) fn rows(&self) -> usize {
        self.rows.len()
    }

    /// In how many ways its strategies combine on a mesh of `dims` dims; an error
    /// beyond `limit`.
    pub(super) fn combinations(
        &self,
        op: &str,
        dims: usize,
        limit: usize,
    ) -> Result<usize, PropagationError> {
        let found = self.rows().checked_pow(dims as u32).unwrap_or(usize::MAX);
        if found > limit {
            return Err(PropagationError::TooLarge {
                op: op.into(),
                what: "combinations of strategies",
                limit,
                found,
            });
        }
        Ok(found)
    }

    /// Whether two strategies take an input in the same placement.
    pub(super) fn same_input(&self, input: usize, one: usize, other: usize) -> bool {
        self.rows[one].inputs[input] == self.rows[other].inputs[input]
    }

    /// The placements of a strategy: the inputs', then the outputs'.
    pub(super) fn row(&self, row: usize) -> (Vec<Placement>, Vec<Placement>) {
        let row = &self.rows[row];
        let shown = |codes: &[u8]| codes.iter().map(|c| self.table[usize::from(*c)]).collect();
        (shown(&row.inputs), shown(&row.outputs))
    }

    /// Every strategy on every mesh dim.
    pub(super) fn every(&self) -> Masks {
        [u128::MAX >> (MAX_ROWS - self.rows.len()); MAX_MESH_DIMS]
    }

    /// The placement codes that strategies take for an input.
    pub(super) fn allowed(&self, input: usize) -> Vec<u8> {
        let mut codes = vec![0];
        for row in &self.rows {
            if !codes.contains(&row.inputs[input]) {
                codes.push(row.inputs[input]);
            }
        }
        codes.sort_unstable();
        codes
    }

    /// Which strategies each mesh dim can use when an input lies so.
    pub(super) fn masks(&self, input: usize, state: &State) -> Masks {
        self.masks_of(state, |row, m| self.rows[row].inputs[input] == state[m])
    }

    /// The same, with partials also of mesh dims that are replicated and were.
    pub(super) fn masks_with_partitions(&self, input: usize, state: &State) -> Masks {
        self.masks_of(state, |row, m| {
            let code = self.rows[row].inputs[input];
            let free = state[m] == 0 && self.sources[input][m] == 0;
            code == state[m] || free && self.is_made_of_copies(input, code)
        })
    }

    /// The strategies that each mesh dim can use of a replicated input: all but those
    /// that take it as a partial that copies do not make.
    pub(super) fn masks_of_replicated(&self, input: usize) -> Masks {
        self.masks_of(&State::default(), |row, _| {
            let code = self.rows[row].inputs[input];
            let placement = self.table[usize::from(code)];
            !matches!(placement, Placement::Partial(_)) || self.is_made_of_copies(input, code)
        })
    }

    fn is_made_of_copies(&self, input: usize, code: u8) -> bool {
        self.table[usize::from(code)].is_made_of_copies(self.metas[input].dtype)
    }

    /// A target without the partials that were made of replicated mesh dims.
    pub(super) fn before_partitions(&self, input: usize, target: &State) -> State {
        let mut state = *target;
        for (code, source) in state.iter_mut().zip(&self.sources[input]) {
            if *source == 0 && self.is_made_of_copies(input, *code) {
                *code = 0;
            }
        }
        state
    }

    fn masks_of(&self, state: &State, takes: impl Fn(usize, usize) -> bool) -> Masks {
        let mut masks = Masks::default();
        let dims = self.sizes.len().min(state.len());
        for (m, mask) in masks.iter_mut().enumerate().take(dims) {
            for row in 0..self.rows.len() {
                *mask |= u128::from(takes(row, m)) << row;
            }
        }
        masks
    }

    /// The strategies one of whose outputs lies as the tensor does that it is
    /// written to.
    pub(super) fn writes(&self, output: usize, state: &State) -> Masks {
        let mut masks = Masks::default();
        for (bit, row) in self.rows.iter().enumerate() {
            for (mask, code) in masks.iter_mut().zip(state).take(self.sizes.len()) {
                if row.outputs[output] == *code {
                    *mask |= 1 << bit;
                }
            }
        }
        masks
    }

    /// What a row per mesh dim makes of the inputs; `None` when a shard lacks
    /// what its strategy needs.
    pub(super) fn targets(&self, rows: &[usize]) -> Option<Vec<State>> {
        let mut targets = vec![State::default(); self.metas.len()];
        for (m, row) in rows.iter().enumerate() {
            for (target, code) in targets.iter_mut().zip(&self.rows[*row].inputs) {
                target[m] = *code;
            }
        }
        let holds = (0..rows.len()).all(|m| self.holds(m, rows, &targets));
        (holds && self.splits_fit(rows, &targets)).then_some(targets)
    }

    /// Whether registered shardings can split the inputs so, and the outputs.
    fn splits_fit(&self, rows: &[usize], targets: &[State]) -> bool {
        if self.table.iter().all(|p| p.registered().is_none()) {
            return true;
        }
        let fits = |meta: &TensorMeta, placements: &[Placement]| {
            let mut dims = meta.shape.iter().enumerate();
            dims.all(|(dim, size)| layout::fits(*size, dim as u32, placements, self.sizes))
        };
        let inputs = self.metas.iter().zip(targets);
        inputs
            .into_iter()
            .all(|(meta, target)| fits(meta, &self.placements(target)))
            && (self.outputs(rows).iter()).all(|output| {
                output
                    .meta
                    .as_ref()
                    .is_none_or(|meta| fits(meta, &output.placements))
            })
    }

    fn placements(&self, state: &State) -> Vec<Placement> {
        (state.iter().take(self.sizes.len()))
            .map(|c| self.table[usize::from(*c)])
            .collect()
    }

    fn holds(&self, m: usize, rows: &[usize], targets: &[State]) -> bool {
        let row = &self.rows[rows[m]];
        let slots = |l: usize| {
            let mut strategies = self.rule.strategies();
            strategies.nth(self.rows[rows[l]].strategy)
        };
        let Some((outputs, inputs)) = slots(m) else {
            return false;
        };
        let place = |input: usize, l: usize| self.table[usize::from(targets[input][l])];
        let output = |l: usize| self.table[usize::from(self.rows[rows[l]].outputs[0])];
        if let Some(Slot::Flattened { leading, .. }) = outputs.first() {
            // The dims are the input's; the output has them flattened.
            if !self.divides_blocks(m, row, *leading, |l| place(0, l)) {
                return false;
            }
        }
        inputs.iter().enumerate().all(|(i, slot)| match *slot {
            Slot::Shard(dim, Need::Divides(whole)) | Slot::Plain(dim, Need::Divides(whole)) => {
                // What a rank has left of it stays whole at every split.
                let left = (0..self.sizes.len()).try_fold(whole, |left, l| {
                    let flat = slots(l).is_some_and(|s| matches!(s.1[i], Slot::Flattened { .. }));
                    match place(i, l).sharded() {
                        Some((d, blocks)) if d == dim && !flat => {
                            let ranks = u64::from(self.sizes[l]);
                            let pieces = ranks.saturating_mul(u64::from(blocks));
                            (left % pieces == 0).then(|| left / ranks)
                        }
                        _ => Some(left),
                    }
                });
                left.is_some()
            }
            Slot::Shard(dim, Need::Filled) | Slot::Plain(dim, Need::Filled) => {
                let placements = self.placements(&targets[i]);
                let size = self.metas[i].shape[dim as usize];
                smallest(size, dim, &placements, self.sizes) > 0
            }
            // The dims are the output's; the input has them flattened.
            Slot::Flattened { leading, need, .. } => {
                let own = output(m).sharded().map(|s| s.0);
                let ranks = (0..rows.len())
                    .filter(|l| output(*l).sharded().map(|s| s.0) == own)
                    .fold(1, |n, l| n * u64::from(self.sizes[l]));
                let even = match need {
                    Need::Divides(whole) => whole % ranks == 0,
                    _ => true,
                };
                even && self.divides_blocks(m, row, leading, output)
            }
            _ => true,
        })
    }

    /// Whether a row has as many blocks as the mesh dims to the left leave of
    /// the leading dims.
    fn divides_blocks(
        &self,
        m: usize,
        row: &Row,
        leading: (u32, u32),
        place: impl Fn(usize) -> Placement,
    ) -> bool {
        let within = |l: &usize| {
            let shard = place(*l).sharded();
            shard.is_some_and(|s| (leading.0..leading.1).contains(&s.0))
        };
        let left = (0..m).filter(within);
        let divided = left.fold(1_u64, |n, l| n.saturating_mul(self.sizes[l].into()));
        divided == u64::from(row.divided)
    }

    /// The first row per mesh dim, in order, whose needs hold for all mesh dims
    /// together; with the inputs' states.
    pub(super) fn choose(
        &self,
        masks: &Masks,
        accept: impl Fn(&[State]) -> bool,
    ) -> Option<(Vec<usize>, Vec<State>)> {
        let n = self.sizes.len();
        let mut left = *masks;
        let mut rows = Vec::with_capacity(n);
        // Needs rarely fail: a few tries, as an odometer.
        for _ in 0..256 {
            while rows.len() < n {
                let mask = left[rows.len()];
                if mask == 0 {
                    left[rows.len()] = masks[rows.len()];
                    let m = rows.len().checked_sub(1)?;
                    rows.pop();
                    left[m] &= left[m] - 1;
                } else {
                    rows.push(mask.trailing_zeros() as usize);
                }
            }
            if let Some(targets) = self.targets(&rows) {
                if accept(&targets) {
                    return Some((rows, targets));
                }
            }
            rows.pop();
            left[n - 1] &= left[n - 1] - 1;
        }
        None
    }

    /// The specs of the outputs that a row per mesh dim gives.
    pub(super) fn outputs(&self, rows: &[usize]) -> Vec<Spec> {
        (self.rule.outputs.iter().enumerate())
            .map(|(o, meta)| Spec {
                meta: Some(meta.clone()),
                placements: (rows.iter())
                    .map(|row| self.table[usize::from(self.rows[*row].outputs[o])])
                    .collect(),
            })
            .collect()
    }

    /// A state as placements.
    pub(super) fn shown(&self, state: &State) -> Vec<Placement> {
        self.placements(state)
    }
}

/// A way to split a dim, which fills a placeholder.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum ShardType {
    Plain,
    Strided(u32),
    Registered(ShardingId),
}

/// Whether a slot says nothing of which indices a shard holds together.
fn any_split(slot: &Slot) -> bool {
    match slot {
        Slot::Shard(_, need) | Slot::Plain(_, need) => {
            matches!(need, Need::Nothing | Need::Filled)
        }
        // The rows of a lookup are counted from the shard's first.
        Slot::Fixed(placement) => *placement != Placement::Partial(PartialOp::Mask),
        Slot::Flattened { .. } => false,
    }
}

/// The products of some of the sizes, each once.
fn products(sizes: &[u32]) -> Vec<u32> {
    let mut all = vec![1_u32];
    for size in sizes {
        for at in 0..all.len() {
            match all[at].checked_mul(*size) {
                Some(product) if !all.contains(&product) => all.push(product),
                _ => {}
            }
        }
    }
    all
}

/// A norm partial of any order.
const ANY_NORM: Slot = partial(PartialOp::Norm(Order::ANY));

/// Any registered partial.
const ANY_REGISTERED: Slot = partial(PartialOp::Registered(PartialId::ANY));

/// What placeholders can be filled with.
struct Choices {
    /// The shard types of the inputs, and more that were asked for.
    types: Vec<ShardType>,
    /// The norms and the registered partials, in the same way.
    partials: Vec<PartialOp>,
    /// By what mesh dims to the left can divide the blocks of a flattened dim.
    divisors: Vec<u32>,
}

impl Choices {
    /// Adds the shard type or the partial of a placement of an input.
    fn take_from(&mut self, placement: Placement, rule: &Rule) {
        let kind = match placement {
            Placement::Shard { .. } => ShardType::Plain,
            Placement::StridedShard { split_factor, .. } => ShardType::Strided(split_factor),
            Placement::Registered { sharding, .. } if rule.takes(sharding) => {
                ShardType::Registered(sharding)
            }
            Placement::Partial(partial @ (PartialOp::Norm(_) | PartialOp::Registered(_))) => {
                if !self.partials.contains(&partial) {
                    self.partials.push(partial);
                }
                return;
            }
            _ => return,
        };
        if !self.types.contains(&kind) {
            self.types.push(kind);
        }
    }

    /// The ways to fill the placeholders of a strategy: one where it has none.
    fn fillings<'c>(
        &'c self,
        outputs: &'c [Slot],
        inputs: &'c [Slot],
    ) -> impl Iterator<Item = Filling> + 'c {
        let slots = move || outputs.iter().chain(inputs);
        let blocks = slots().find_map(|s| match s {
            Slot::Flattened { blocks, .. } => Some(*blocks),
            _ => None,
        });
        let open = slots().any(|s| matches!(s, Slot::Shard(..)));
        let types: &[ShardType] = match (blocks, open) {
            (Some(_), _) | (_, false) => &[ShardType::Plain],
            _ => &self.types,
        };
        let divisors: &[u32] = match blocks {
            Some(_) => &self.divisors,
            None => &[1],
        };
        // A strategy of norms stands for one of each order, one of registered partials for
        // one of each.
        let norms = slots().any(|s| *s == ANY_NORM);
        let open = norms || slots().any(|s| *s == ANY_REGISTERED);
        let partials: &[PartialOp] = if open {
            &self.partials
        } else {
            &[PartialOp::Sum]
        };
        let meant = move |op: &&PartialOp| !open || norms == matches!(op, PartialOp::Norm(_));
        let fits = move |kind: &ShardType| {
            !matches!(kind, ShardType::Registered(_)) || slots().all(any_split)
        };
        let divides = move |divided: &u32| blocks.is_none_or(|blocks| blocks % divided == 0);
        let types = types.iter().filter(move |kind| fits(kind));
        types.flat_map(move |kind| {
            let divisors = divisors.iter().filter(move |divided| divides(divided));
            divisors.flat_map(move |divided| {
                let fill = |partial: &PartialOp| Filling {
                    kind: *kind,
                    divided: *divided,
                    partial: *partial,
                };
                partials.iter().filter(meant).map(fill)
            })
        })
    }
}

/// What stands in place of the placeholders of a strategy.
#[derive(Clone, Copy)]
struct Filling {
    /// For shards.
    kind: ShardType,
    /// The divisor of the blocks of a flattened dim.
    divided: u32,
    /// For norms and registered partials.
    partial: PartialOp,
}

impl Filling {
    fn fill(self, slot: Slot) -> Placement {
        match (slot, self.kind) {
            (ANY_NORM | ANY_REGISTERED, _) => Placement::Partial(self.partial),
            (Slot::Fixed(placement), _) => placement,
            (Slot::Plain(dim, _), _) | (Slot::Shard(dim, _), ShardType::Plain) => {
                Placement::Shard { dim }
            }
            (Slot::Shard(dim, _), ShardType::Strided(split_factor)) => {
                Placement::StridedShard { dim, split_factor }
            }
            (Slot::Shard(dim, _), ShardType::Registered(sharding)) => {
                Placement::Registered { dim, sharding }
            }
            (Slot::Flattened { dim, blocks, .. }, _) => match blocks / self.divided.max(1) {
                1 => Placement::Shard { dim },
                split_factor => Placement::StridedShard { dim, split_factor },
            },
        }
    }
}

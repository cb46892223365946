//! One sample of one op: which placement combinations are true.
//!
//! The local ops run on the pieces of random tensors. The results of the ranks are
//! compared with the op on the whole tensors. A combination is true if they agree in
//! every draw. There are several draws, half of them with signs turned, so that a
//! wrong combination hardly passes by chance.

use std::rc::Rc;

use hashbrown::HashMap;

use crate::samples::Values;
use rote_propagation::{
    Arg, Claims, LocalOp, Lookup, Mesh, PartialOp, Placement, Query, Spec, TensorMeta, claims,
    layout, local::follows_outputs, local_op,
};
use rote_propagation::{PropagationError, Registry};

use super::draw::{Rng, make_non_negative, make_rounded, make_special, whole};
use super::host::{HostTensor, Kind, kind};
use super::kernels::Kernels;
use super::names::{EXACT, ROUNDED, SPECIAL, checks_shapes, stem, unwritten};
use super::pieces::{coordinates, holds, pieces};
use super::registered::{self, Partials, Parts, registered};
use super::run::{clear, draws, look_up, run_whole, try_once};

/// Draws that a combination has to pass. As many after them are without negative
/// numbers, for partials of norms.
const DRAWS: usize = 6;
/// The most placements of the inputs that are tried, besides those claimed.
const MOST: usize = 2048;

/// Placements of each tensor, one per mesh dim.
pub(super) type Placed = Vec<Vec<Placement>>;

/// What is claimed of one placement of the inputs, and what is true.
#[derive(Debug, Default)]
pub(super) struct Verdict {
    /// For each claimed placement of the outputs, why it is wrong if it is.
    pub(super) claimed: Vec<(Placed, Result<(), String>)>,
    /// What else is true, output by output.
    pub(super) open: Vec<Placed>,
    /// Why it could not be tried, if so.
    pub(super) untried: Option<String>,
}

/// The pieces of each input by its placements, unless it cannot lie so.
type Pieces = HashMap<(usize, Vec<Placement>), Option<Rc<Vec<HostTensor>>>>;

/// The outputs of each rank, or why an op did not run.
type Ranks = Result<Vec<Vec<HostTensor>>, String>;

/// A draw of the inputs, with what the op makes of them.
struct Draw {
    wholes: Vec<HostTensor>,
    /// Of inputs that lie in registered partials, the parts.
    parts: Vec<Option<Parts>>,
    outputs: Vec<HostTensor>,
    special: bool,
    pieces: Pieces,
}

/// A sample of an op on a mesh.
pub(super) struct Case<'a> {
    op: &'a str,
    args: Vec<Arg>,
    metas: Vec<TensorMeta>,
    values: &'a [Values],
    mesh: &'a Mesh,
    kernels: &'a mut dyn Kernels,
    /// The registered partials that are tried though no rule names them.
    registered: Vec<Placement>,
    /// The draws for inputs that lie in these registered partials, and those for others.
    draws: Vec<Draw>,
    partials: Partials,
    others: HashMap<Partials, Vec<Draw>>,
    /// What the rules say.
    pub(super) claims: Claims,
    /// Whether the op draws random numbers or leaves its output unwritten, so
    /// that only shapes can be judged.
    pub(super) shapes_only: bool,
    /// Which outputs have two different elements.
    pub(super) varies: Vec<bool>,
}

/// Why a sample cannot be judged.
#[derive(Debug)]
pub(super) enum Unfit {
    /// The rules refuse it.
    Refused(PropagationError),
    /// The op cannot run, or with numbers that cannot be judged.
    Kernel(String),
    /// The rule describes other outputs than the op has.
    Outputs(String),
}

/// The arguments with double precision in place of single.
fn precise(args: &[Arg]) -> Vec<Arg> {
    let wide = |dtype: rote_plans::DType| match dtype {
        rote_plans::DType::F32 => rote_plans::DType::F64,
        rote_plans::DType::C64 => rote_plans::DType::C128,
        _ => dtype,
    };
    let spec = |spec: &Spec| {
        let mut spec = spec.clone();
        if let Some(meta) = &mut spec.meta {
            meta.dtype = wide(meta.dtype);
        }
        spec
    };
    (args.iter())
        .map(|arg| match arg {
            Arg::Tensor(s) => Arg::Tensor(spec(s)),
            Arg::Tensors(list) => Arg::Tensors(list.iter().map(|s| s.as_ref().map(spec)).collect()),
            Arg::DType(dtype) => Arg::DType(wide(*dtype)),
            other => other.clone(),
        })
        .collect()
}

impl<'a> Case<'a> {
    pub(super) fn new(
        rules: &Registry,
        op: &'a str,
        args: &[Arg],
        values: &'a [Values],
        mesh: &'a Mesh,
        kernels: &'a mut dyn Kernels,
        types: &[Placement],
    ) -> Result<Self, Unfit> {
        let mut wide = precise(args);
        let mut first = try_once(op, &wide, values, kernels);
        if first.is_err() {
            // Not every kernel takes every dtype.
            wide = args.to_vec();
            first = try_once(op, &wide, values, kernels);
        }
        let ran = first.map_err(Unfit::Kernel)?;
        let query = Query { op, args: &wide };
        let claims = claims(rules, &query, mesh, types).map_err(Unfit::Refused)?;
        let metas: Option<Vec<_>> = query.inputs().map(|(_, s)| s.meta.clone()).collect();
        let metas = metas.ok_or_else(|| Unfit::Kernel("a tensor without meta".into()))?;
        let random = ran.random && draws(op, &wide, values, kernels, claims.outputs.len());
        let outputs: Vec<_> = ran.outputs.into_iter().flatten().collect();
        let said: Vec<_> = claims
            .outputs
            .iter()
            .filter_map(|o| o.meta.as_ref())
            .collect();
        let fits = said.len() <= outputs.len()
            && said
                .iter()
                .zip(&outputs)
                .all(|(a, b)| a.shape == b.meta.shape);
        if !fits {
            let list = |metas: &mut dyn Iterator<Item = &TensorMeta>| {
                metas
                    .map(ToString::to_string)
                    .collect::<Vec<_>>()
                    .join(", ")
            };
            return Err(Unfit::Outputs(format!(
                "the rule says that the outputs are {}, they are {}",
                list(&mut said.into_iter()),
                list(&mut outputs.iter().map(|o| &o.meta))
            )));
        }
        let varies = vec![false; claims.outputs.len()];
        let shapes_only = random || unwritten(op);
        let registered = types.iter().filter(|p| registered(p).is_some());
        Ok(Case {
            op,
            args: wide,
            partials: vec![None; metas.len()],
            metas,
            values,
            mesh,
            kernels,
            registered: registered.copied().collect(),
            draws: Vec::new(),
            others: HashMap::new(),
            claims,
            shapes_only,
            varies,
        })
    }

    /// That a shard of an input has no elements, which rules need not take.
    pub(super) fn empties(&self, inputs: &Placed) -> Option<String> {
        let sizes = self.mesh.sizes();
        let mut each = inputs.iter().zip(&self.metas).enumerate();
        each.find_map(|(i, (placements, meta))| {
            let empty = (meta.shape.iter().enumerate()).any(|(dim, size)| {
                *size > 0 && layout::smallest(*size, dim as u32, placements, sizes) == 0
            });
            empty.then(|| format!("a rank's shard of input {i} has no elements"))
        })
    }

    /// How many tensors the op takes.
    pub(super) fn inputs(&self) -> usize {
        self.metas.len()
    }

    /// The placements of the inputs to try on one mesh dim, besides those
    /// claimed: all combinations of replicated, sharded and partial, or the
    /// simpler ones where these are too many.
    pub(super) fn open_inputs(&self) -> Vec<Placed> {
        let each: Vec<Vec<Placement>> = (0..self.metas.len()).map(|i| self.options(i)).collect();
        let all = |each: &[Vec<Placement>]| -> Option<Vec<Placed>> {
            let count = each
                .iter()
                .try_fold(1_usize, |n, e| n.checked_mul(e.len()))?;
            if count > MOST {
                return None;
            }
            let mut found: Vec<Placed> = vec![Vec::new()];
            for options in each {
                found = (found.iter())
                    .flat_map(|f| options.iter().map(|p| [f.as_slice(), &[vec![*p]]].concat()))
                    .collect();
            }
            Some(found)
        };
        if let Some(found) = all(&each) {
            return found;
        }
        // One kind of placement at a time, beside replicated tensors.
        let mut kinds: Vec<Placement> = Vec::new();
        for p in each.iter().flatten() {
            if !kinds.contains(p) {
                kinds.push(*p);
            }
        }
        let mut found = Vec::new();
        for kind in kinds {
            let only = |options: &Vec<Placement>| -> Vec<Placement> {
                let keep = |p: &&Placement| **p == Placement::Replicate || **p == kind;
                options.iter().filter(keep).copied().collect()
            };
            let each: Vec<_> = each.iter().map(only).collect();
            for inputs in all(&each).unwrap_or_default() {
                if !found.contains(&inputs) {
                    found.push(inputs);
                }
            }
        }
        found
    }

    /// The placements of one input that are tried.
    fn options(&self, input: usize) -> Vec<Placement> {
        let meta = &self.metas[input];
        let mut all = vec![Placement::Replicate];
        let any = checks_shapes(self.op);
        if any {
            all.extend(shards(meta));
        }
        // Parts of indices may be out of bounds.
        let whole = kind(meta.dtype) == Some(Kind::Whole);
        if (any || !whole) && !self.shapes_only && !matches!(self.values[input], Values::Below(_)) {
            all.extend(partials(meta));
        }
        if !self.shapes_only && self.values[input] == Values::Any {
            all.extend(self.registered_partials(meta));
        }
        all
    }

    /// The registered partials that are tried with a dtype.
    fn registered_partials(&self, meta: &TensorMeta) -> &[Placement] {
        match kind(meta.dtype) {
            Some(Kind::Real | Kind::Whole) => &self.registered,
            _ => &[],
        }
    }

    /// Judges one placement of the inputs. `open`: whether to look for true
    /// combinations that are not claimed.
    pub(super) fn judge(&mut self, inputs: &Placed, claimed: &[Placed], open: bool) -> Verdict {
        let mut verdict = Verdict {
            claimed: claimed.iter().map(|c| (c.clone(), Ok(()))).collect(),
            ..Verdict::default()
        };
        let outputs = self.claims.outputs.len();
        let mut alive: Vec<Placed> = (0..outputs)
            .map(|o| {
                let mut all = if open {
                    self.candidates(o, inputs)
                } else {
                    Vec::new()
                };
                for c in claimed {
                    if !all.contains(&c[o]) {
                        all.push(c[o].clone());
                    }
                }
                all
            })
            .collect();
        let follows = follows_outputs(self.op);
        let mut dead: HashMap<(usize, Vec<Placement>), String> = HashMap::new();
        let first = if norms(inputs) { DRAWS } else { 0 };
        self.draw_for(registered::partials(inputs));
        let special = first > 0 || self.partials.iter().any(Option::is_some);
        for draw in first..first + DRAWS {
            if let Err(reason) = self.draw(draw) {
                verdict.untried = (special && draw == first).then_some(reason);
                break;
            }
            if self.draws[draw].special && partial(inputs) {
                continue;
            }
            let Some(held) = self.held(draw, inputs) else {
                verdict.untried = Some("no tensor can lie so".into());
                break;
            };
            // Candidates whose local ops are the same are judged by one run.
            let groups: Vec<Vec<Placed>> = match follows && outputs == 1 {
                true => (alive[0].iter()).map(|p| vec![vec![p.clone()]]).collect(),
                false => vec![alive.clone()],
            };
            let mut left: Vec<Placed> = vec![Vec::new(); outputs];
            let mut runs: Vec<(Vec<LocalOp>, Ranks)> = Vec::new();
            for group in groups {
                let ops = match self.local(inputs, &group) {
                    Ok(ops) => ops,
                    Err(error) => {
                        bury(&mut dead, &group, &error);
                        continue;
                    }
                };
                let at = runs.iter().position(|r| r.0 == ops).unwrap_or_else(|| {
                    let ran = self.run(&ops, &held, draw);
                    runs.push((ops, ran));
                    runs.len() - 1
                });
                match &runs[at].1 {
                    Err(error) => bury(&mut dead, &group, error),
                    Ok(ranks) => {
                        for (o, candidates) in group.into_iter().enumerate() {
                            for candidate in candidates {
                                match self.check(draw, o, &candidate, ranks) {
                                    Ok(()) => left[o].push(candidate),
                                    Err(error) => {
                                        dead.entry((o, candidate)).or_insert(error);
                                    }
                                }
                            }
                        }
                    }
                }
            }
            alive = left;
            if alive.iter().any(Vec::is_empty) && claimed_are_settled(claimed, &dead) {
                break;
            }
        }
        for (outputs, found) in &mut verdict.claimed {
            let mut each = outputs.iter().enumerate();
            if let Some((o, error)) =
                each.find_map(|(o, p)| dead.get(&(o, p.clone())).map(|e| (o, e)))
            {
                *found = Err(format!("output {o}: {error}"));
            }
        }
        if alive.iter().all(|a| !a.is_empty()) {
            verdict.open = alive;
        }
        verdict
    }

    /// Placements of an output that can turn out to be true.
    fn candidates(&self, output: usize, inputs: &Placed) -> Placed {
        if let Some((input, _)) = self.claims.written.iter().find(|w| w.1 == output) {
            // What is written lies as it lay.
            return vec![inputs[*input].clone()];
        }
        let Some(meta) = self.claims.outputs[output].meta.as_ref() else {
            return Vec::new();
        };
        let mut all = vec![Placement::Replicate];
        all.extend(shards(meta));
        all.extend(partials(meta));
        all.extend(self.registered_partials(meta));
        all.into_iter().map(|p| vec![p]).collect()
    }

    /// Goes on with the draws for inputs that lie in these registered partials.
    fn draw_for(&mut self, partials: Partials) {
        if partials == self.partials {
            return;
        }
        let draws = self.others.remove(&partials).unwrap_or_default();
        let draws = std::mem::replace(&mut self.draws, draws);
        let partials = std::mem::replace(&mut self.partials, partials);
        self.others.insert(partials, draws);
    }

    /// Makes a draw unless it is there.
    fn draw(&mut self, draw: usize) -> Result<(), String> {
        while self.draws.len() <= draw {
            // A draw that the op does not take (a singular matrix) is drawn anew.
            let mut made = self.drawn(0);
            for attempt in 1..5 {
                if made.is_ok() {
                    break;
                }
                made = self.drawn(attempt);
            }
            let made = made?;
            for (varies, output) in self.varies.iter_mut().zip(&made.outputs) {
                *varies |= !made.special && output.varies();
            }
            self.draws.push(made);
        }
        Ok(())
    }

    fn drawn(&mut self, attempt: u64) -> Result<Draw, String> {
        let number = self.draws.len() as u64;
        let mut rng = Rng::new(&[number, attempt]);
        let name = stem(self.op);
        let plain = self.partials.iter().all(Option::is_none);
        let special = plain && number == 1 && SPECIAL.contains(&name);
        let negative = self.draws.len() < DRAWS;
        let (mut wholes, mut parts) = (Vec::new(), Vec::new());
        for ((meta, values), partial) in self.metas.iter().zip(self.values).zip(&self.partials) {
            let turned = number % 2 == 1;
            if let Some(partial) = partial {
                let (mesh, signs) = (self.mesh.sizes(), negative.then_some(turned));
                let (drawn, whole) = Parts::drawn(*partial, meta, *values, mesh, &mut rng, signs)?;
                wholes.push(whole);
                parts.push(Some(drawn));
                continue;
            }
            parts.push(None);
            let mut tensor = whole(meta, *values, &mut rng, turned)
                .ok_or_else(|| format!("no arithmetic for {meta}"))?;
            if special {
                make_special(&mut tensor, *values, &mut rng);
            } else if ROUNDED.contains(&name) {
                make_rounded(&mut tensor, *values);
            }
            if !negative {
                make_non_negative(&mut tensor, *values);
            }
            wholes.push(tensor);
        }
        let ran = run_whole(self.op, &self.args, &wholes, self.kernels)?;
        let mut outputs: Vec<_> = ran.outputs.into_iter().flatten().collect();
        outputs.truncate(self.claims.outputs.len());
        Ok(Draw {
            wholes,
            parts,
            outputs,
            special,
            pieces: HashMap::new(),
        })
    }

    /// What each rank holds of each input.
    fn held(&mut self, draw: usize, inputs: &Placed) -> Option<Vec<Rc<Vec<HostTensor>>>> {
        let (values, mesh) = (self.values, self.mesh.sizes());
        let draw_seed = draw as u64;
        let draw = &mut self.draws[draw];
        let mut held = Vec::with_capacity(inputs.len());
        for (i, placements) in inputs.iter().enumerate() {
            let made = draw
                .pieces
                .entry((i, placements.clone()))
                .or_insert_with(|| {
                    let mut rng = Rng::new(&[draw_seed, 1 + i as u64]);
                    let made = match &draw.parts[i] {
                        Some(parts) => parts.pieces(placements, mesh),
                        None => pieces(&draw.wholes[i], values[i], placements, mesh, &mut rng),
                    };
                    made.map(Rc::new)
                });
            held.push(made.clone()?);
        }
        Some(held)
    }

    /// The local op of each rank.
    fn local(&self, inputs: &Placed, outputs: &[Placed]) -> Result<Vec<LocalOp>, String> {
        let query = Query {
            op: self.op,
            args: &self.args,
        };
        let spec = |(meta, placements): (&TensorMeta, &Vec<Placement>)| Spec {
            meta: Some(meta.clone()),
            placements: placements.clone(),
        };
        let inputs: Vec<_> = self.metas.iter().zip(inputs).map(spec).collect();
        // Of candidates that are judged together, any may stand for all.
        let metas = self.claims.outputs.iter().filter_map(|o| o.meta.as_ref());
        let replicated = vec![Placement::Replicate; self.mesh.sizes().len()];
        let firsts = outputs.iter().map(|o| o.first().unwrap_or(&replicated));
        let outputs: Vec<_> = metas.zip(firsts).map(spec).collect();
        coordinates(self.mesh.sizes())
            .iter()
            .map(|c| local_op(&query, &inputs, &outputs, self.mesh, c).map_err(|e| e.to_string()))
            .collect()
    }

    /// Runs the local ops: the outputs of each rank.
    fn run(&mut self, ops: &[LocalOp], held: &[Rc<Vec<HostTensor>>], draw: usize) -> Ranks {
        let mut ranks: Vec<Vec<HostTensor>> = Vec::with_capacity(ops.len());
        for (rank, op) in ops.iter().enumerate() {
            // Ranks that hold the same do the same; random ops aside.
            let twin = (0..rank).find(|other| {
                !self.shapes_only && ops[*other] == *op && held.iter().all(|h| h[*other] == h[rank])
            });
            if let Some(twin) = twin {
                let same = ranks[twin].clone();
                ranks.push(same);
                continue;
            }
            let mut local: Vec<HostTensor> = held.iter().map(|h| h[rank].clone()).collect();
            let outside = op.lookup.map(|l| look_up(&mut local[l.index], l));
            let mut outputs = match op.lookup {
                // No row to look up: zeros all over.
                Some(Lookup { rows: 0, .. }) => self.draws[draw].outputs.clone(),
                _ => {
                    let ran = run_whole(&op.op, &op.args, &local, self.kernels);
                    let ran = ran.map_err(|e| format!("rank {rank}: {e}"))?;
                    ran.outputs.into_iter().flatten().collect()
                }
            };
            outputs.truncate(self.claims.outputs.len());
            if outputs.len() != self.claims.outputs.len() {
                return Err(format!("rank {rank}: {} outputs", outputs.len()));
            }
            if let (Some(lookup), Some(outside)) = (op.lookup, outside) {
                clear(&mut outputs[0], &outside, lookup.dim);
            }
            ranks.push(outputs);
        }
        Ok(ranks)
    }

    fn check(
        &self,
        draw: usize,
        output: usize,
        placements: &[Placement],
        ranks: &[Vec<HostTensor>],
    ) -> Result<(), String> {
        let whole = &self.draws[draw].outputs[output];
        let parts: Vec<_> = ranks.iter().map(|r| r[output].clone()).collect();
        if !self.shapes_only {
            let scale = match EXACT.contains(&stem(self.op)) {
                true => None,
                false => Some(whole.scale()),
            };
            return holds(whole, placements, self.mesh.sizes(), &parts, scale);
        }
        for (part, c) in parts.iter().zip(coordinates(self.mesh.sizes())) {
            let expected = super::pieces::shard(whole, placements, self.mesh.sizes(), &c);
            let other = |e: HostTensor| {
                e.meta.shape != part.meta.shape || e.meta != part.meta && !e.is_empty()
            };
            if expected.is_none_or(other) {
                return Err(format!("rank {c:?}: found {}", part.meta));
            }
        }
        Ok(())
    }
}

fn claimed_are_settled(
    claimed: &[Placed],
    dead: &HashMap<(usize, Vec<Placement>), String>,
) -> bool {
    (claimed.iter()).all(|c| {
        let mut each = c.iter().enumerate();
        each.any(|(o, p)| dead.contains_key(&(o, p.clone())))
    })
}

fn bury(dead: &mut HashMap<(usize, Vec<Placement>), String>, group: &[Placed], error: &str) {
    for (o, candidates) in group.iter().enumerate() {
        for candidate in candidates {
            dead.entry((o, candidate.clone()))
                .or_insert_with(|| error.to_owned());
        }
    }
}

/// Whether any tensor is partial.
fn partial(placed: &Placed) -> bool {
    (placed.iter().flatten()).any(|p| matches!(p, Placement::Partial(_)))
}

/// Whether any tensor is a partial of norms.
fn norms(placed: &Placed) -> bool {
    let norm = |p: &Placement| matches!(p, Placement::Partial(PartialOp::Norm(_)));
    placed.iter().flatten().any(norm)
}

/// The shards of a tensor that mean something: of dims with several elements.
fn shards(meta: &TensorMeta) -> impl Iterator<Item = Placement> {
    let dims = meta
        .shape
        .iter()
        .enumerate()
        .filter(|(_, size)| **size != 1);
    dims.map(|(dim, _)| Placement::Shard { dim: dim as u32 })
}

/// The partials that a dtype has. Truth values have none: collectives do not
/// reduce them.
fn partials(meta: &TensorMeta) -> Vec<Placement> {
    use PartialOp::{Avg, Max, Min, Product, Sum};
    let ops: &[PartialOp] = match kind(meta.dtype) {
        Some(Kind::Real) => &[Sum, Avg, Max, Min, Product],
        Some(Kind::Complex) => &[Sum, Avg],
        Some(Kind::Whole) => &[Sum, Max, Min, Product],
        Some(Kind::Truth) | None => &[],
    };
    ops.iter().map(|op| Placement::Partial(*op)).collect()
}

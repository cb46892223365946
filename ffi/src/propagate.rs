//! Sharding propagation: how an op runs on distributed tensors.

use std::borrow::Cow;
use std::error::Error;
use std::ffi::{c_char, c_int};

use rote::plans::{DType, ReduceOp};
use rote::propagation::{
    Arg, Link, LocalArgs, MEMORY_FORMATS, Mesh, PartialId, PartialOp, Placement, Propagation,
    Query, Rule, ShardingId, Spec, TensorMeta, Topology, contiguous, local_args, local_meta,
    output_strides, propagate, propagate_by, propagate_passing_sums,
    rule::{Need, Slot},
    rule_with, standard_rules, stated,
};
use rote_events::op::{self, tag};
use rote_events::question::{self, Answer, Question, StatedRule, kind};

use crate::status::{ROTE_OK, guarded, out, slice, text};

/// How many dims a tensor has at most, as in PyTorch.
const MAX_DIMS: u32 = 64;

/// Answers questions about one mesh. It may be used by one thread at a time.
pub struct RotePropagator {
    mesh: Mesh,
    topology: Topology,
    coordinate: Option<Vec<u32>>,
    given: Given,
}

/// What the last answer points at.
#[derive(Default)]
struct Given {
    inputs: Vec<question::Placement>,
    outputs: Vec<question::Spec>,
    placements: Vec<question::Placement>,
    dims: Vec<i64>,
    local_shape: Vec<i64>,
}

/// Makes a propagator for a mesh; returns null on failure. `mesh` is a text such as `dp=8,tp=2`. `coordinate` is the
/// place of this process in the mesh, one entry for each mesh dim; null where only placements are asked for. `links` are
/// microseconds per hop and GiB per second of each mesh dim, in pairs; null stands for the links of one node.
///
/// # Safety
/// `mesh` must be a C string; the lists must be null or as long as said.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_propagator_new(
    mesh: *const c_char,
    coordinate: *const u32,
    links: *const f64,
) -> *mut RotePropagator {
    let mut made = std::ptr::null_mut();
    guarded(|| {
        // SAFETY: the caller vouches for the text.
        let mesh = Mesh::parse(unsafe { text(mesh)? })?;
        let dims = mesh.sizes().len() as u32;
        let coordinate = match coordinate.is_null() {
            true => None,
            // SAFETY: an entry for each mesh dim, as the caller vouches.
            false => Some(unsafe { slice(coordinate, dims)? }.to_vec()),
        };
        if let Some(at) = &coordinate {
            if at.iter().zip(mesh.sizes()).any(|(at, size)| at >= size) {
                return Err(format!("{at:?} is no coordinate in the mesh {mesh}").into());
            }
        }
        let topology = match links.is_null() {
            true => Topology::one_node(&mesh),
            false => {
                // SAFETY: a pair for each mesh dim, as the caller vouches.
                let pairs = unsafe { slice(links, 2 * dims)? }.chunks_exact(2);
                let links = pairs.map(|pair| Link {
                    latency_us: pair[0],
                    bandwidth: pair[1],
                });
                Topology::measured(&mesh, &links.collect::<Vec<_>>())
            }
        };
        made = Box::into_raw(Box::new(RotePropagator {
            mesh,
            topology,
            coordinate,
            given: Given::default(),
        }));
        Ok(ROTE_OK)
    });
    made
}

/// From now on a propagator prices redistributions as DTensor runs them: in an order that is not always the cheapest.
///
/// # Safety
/// `propagator` must come from `rote_propagator_new` and not be in use elsewhere.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_propagator_in_dtensors_order(
    propagator: *mut RotePropagator,
) -> c_int {
    guarded(|| {
        // SAFETY: the caller vouches for the pointer.
        let propagator = unsafe { propagator.as_mut() }.ok_or("the propagator is null")?;
        propagator.topology = propagator.topology.clone().in_dtensors_order();
        Ok(ROTE_OK)
    })
}

/// Frees a propagator.
///
/// # Safety
/// `propagator` must come from `rote_propagator_new`, or be null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_propagator_free(propagator: *mut RotePropagator) {
    if !propagator.is_null() {
        // SAFETY: made by `Box::into_raw`, and the caller gives it up.
        drop(unsafe { Box::from_raw(propagator) });
    }
}

/// Whether Rote has a rule for an op of this name (`aten::mm`, `aten::add.Tensor`), of its own or by a decomposition: 1
/// or 0; `ROTE_ERROR` on failure.
///
/// # Safety
/// `op` must be a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_has_rule(op: *const c_char) -> c_int {
    guarded(|| {
        // SAFETY: the caller vouches for the text.
        let op = unsafe { text(op)? };
        Ok(c_int::from(standard_rules()?.base(op).is_some()))
    })
}

/// Whether a rank gives other arguments than the global ones to an op: 0 if not, 1 if one argument is a size that the rank
/// adjusts to its shards, 2 if they differ in another way; `ROTE_ERROR` on failure. If 1, `at` becomes the position of the
/// argument, and `dim` the dim of the first tensor whose size it is, or -1 if it is the shape of the first result.
///
/// # Safety
/// `op` must be a C string, `at` and `dim` valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_local_args(
    op: *const c_char,
    at: *mut c_int,
    dim: *mut c_int,
) -> c_int {
    guarded(|| {
        // SAFETY: the caller vouches for all.
        let (op, at, dim) = unsafe { (text(op)?, out(at, "at")?, out(dim, "dim")?) };
        Ok(match local_args(op) {
            LocalArgs::Same => 0,
            LocalArgs::Shape(position) => {
                at.set(c_int::try_from(position)?);
                dim.set(-1);
                1
            }
            LocalArgs::Size {
                at: position,
                dim: of,
            } => {
                at.set(c_int::try_from(position)?);
                dim.set(c_int::try_from(of)?);
                1
            }
            LocalArgs::Lookup | LocalArgs::Other => 2,
        })
    })
}

/// Answers how an op runs on distributed tensors: the placements in which it takes its tensors at the least cost, and
/// its results. What `answer` points at lives until the propagator's next question. It is an error if the op has no
/// rule, an argument does not fit the op, or a tensor that the op writes would have to be redistributed.
///
/// # Safety
/// `propagator` must come from `rote_propagator_new` and not be in use elsewhere. Pointers of the question must be null
/// or live, lists as long as they say, with an entry for each mesh dim where they are placements.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rote_propagate(
    propagator: *mut RotePropagator,
    question: *const Question,
    answer: *mut Answer,
) -> c_int {
    guarded(|| {
        // SAFETY: the caller vouches for the pointers.
        let (propagator, asked, answer) = unsafe {
            (
                propagator.as_mut().ok_or("the propagator is null")?,
                question.as_ref().ok_or("the question is null")?,
                out(answer, "answer")?,
            )
        };
        let RotePropagator {
            mesh,
            topology,
            coordinate,
            given,
        } = propagator;
        // SAFETY: the caller vouches for the question.
        let op = unsafe { text(asked.op)? };
        // SAFETY: as above.
        let args = unsafe { arguments(asked, mesh.sizes().len() as u32)? };
        let query = Query { op, args: &args };
        let rules = standard_rules()?;
        // SAFETY: as above.
        let found = match unsafe { asked.rule.as_ref() } {
            None if asked.sums_only != 0 => propagate_passing_sums(rules, &query, mesh, topology)?,
            None => propagate(rules, &query, mesh, topology)?,
            Some(stated) => {
                let rule = match stated.added {
                    // SAFETY: as above.
                    0 => unsafe { own_rule(stated, &query)? },
                    _ => {
                        // SAFETY: as above.
                        let strategies = unsafe { strategies(stated, &query)? };
                        rule_with(rules, &query, strategies, asked.sums_only != 0)?
                    }
                };
                propagate_by(rule, &query, mesh, topology)?
            }
        };
        // SAFETY: as above.
        let strides = unsafe { input_strides(asked, &query)? };
        let strides: Vec<&[i64]> = strides.iter().map(|strides| &**strides).collect();
        given.set(
            &found,
            &output_strides(rules, &query, &strides, &found.outputs),
        );
        let (mut shape_arg, mut other_args) = (-1, 0);
        given.local_shape.clear();
        match local_args(op) {
            // Where indices shift, a masked partial among the results says so.
            LocalArgs::Same | LocalArgs::Lookup => {}
            LocalArgs::Size { .. } | LocalArgs::Other => other_args = 1,
            LocalArgs::Shape(at) => {
                shape_arg = i32::try_from(at)?;
                if let (Some(at), Some(output)) = (&*coordinate, found.outputs.first()) {
                    let local = local_meta(&query, 0, output, mesh, at)?;
                    let dims = local.shape.iter();
                    given.local_shape = dims.map(|d| *d as i64).collect();
                }
            }
        }
        let moved = found.inputs.iter().filter(|input| input.from != input.to);
        let has_local_shape = shape_arg >= 0 && coordinate.is_some();
        answer.set(Answer {
            inputs: given.inputs.as_ptr(),
            outputs: given.outputs.as_ptr(),
            local_shape: match has_local_shape {
                true => given.local_shape.as_ptr(),
                false => std::ptr::null(),
            },
            cost_us: found.cost_us,
            bytes: found.bytes(),
            noutputs: found.outputs.len() as u32,
            moved: moved.count() as u32,
            shape_arg,
            other_args,
            tied: found.tied.into(),
        });
        Ok(ROTE_OK)
    })
}

impl Given {
    fn set(&mut self, found: &Propagation, strides: &[Option<Vec<i64>>]) {
        self.inputs.clear();
        let inputs = found.inputs.iter().flat_map(|input| &input.to);
        self.inputs.extend(inputs.map(|p| told(*p)));
        self.placements.clear();
        self.dims.clear();
        self.outputs.clear();
        // All of both lists first: a list that grows may move.
        for spec in &found.outputs {
            self.placements
                .extend(spec.placements.iter().map(|p| told(*p)));
            let shape = spec.meta.iter().flat_map(|meta| &meta.shape);
            self.dims.extend(shape.map(|d| *d as i64));
        }
        self.dims.extend(strides.iter().flatten().flatten());
        let (mut placements, mut dims) = (self.placements.as_slice(), self.dims.as_slice());
        let ndims = found.outputs.iter();
        let ndims = ndims.map(|spec| spec.meta.as_ref().map_or(0, |meta| meta.shape.len()));
        let mut known = &dims[ndims.sum()..];
        for (spec, strides) in found.outputs.iter().zip(strides) {
            let ndim = spec.meta.as_ref().map_or(0, |meta| meta.shape.len());
            self.outputs.push(question::Spec {
                shape: dims.as_ptr(),
                strides: match strides {
                    Some(_) => known.as_ptr(),
                    None => std::ptr::null(),
                },
                placements: placements.as_ptr(),
                ndim: ndim as u32,
                dtype: spec.meta.as_ref().map_or(0, |meta| meta.dtype.0),
            });
            dims = &dims[ndim..];
            known = &known[strides.as_ref().map_or(0, Vec::len)..];
            placements = &placements[spec.placements.len()..];
        }
    }
}

/// A placement as C has it.
fn told(placement: Placement) -> question::Placement {
    let none = question::Placement {
        kind: kind::REPLICATE,
        reduce: 0,
        dim: 0,
        split_factor: 0,
        order: 0.0,
    };
    match placement {
        Placement::Replicate => none,
        Placement::Shard { dim } => question::Placement {
            kind: kind::SHARD,
            dim,
            ..none
        },
        Placement::Registered { dim, sharding } => question::Placement {
            kind: kind::REGISTERED_SHARD,
            dim,
            split_factor: sharding.number(),
            ..none
        },
        Placement::StridedShard { dim, split_factor } => question::Placement {
            kind: kind::STRIDED_SHARD,
            dim,
            split_factor,
            ..none
        },
        Placement::Partial(PartialOp::Mask) => question::Placement {
            kind: kind::MASK_PARTIAL,
            ..none
        },
        Placement::Partial(PartialOp::Norm(order)) => question::Placement {
            kind: kind::NORM_PARTIAL,
            order: order.p(),
            ..none
        },
        Placement::Partial(PartialOp::Registered(partial)) => question::Placement {
            kind: kind::REGISTERED_PARTIAL,
            split_factor: partial.number(),
            ..none
        },
        Placement::Partial(partial) => question::Placement {
            kind: kind::PARTIAL,
            reduce: partial.reduce_op() as u8,
            ..none
        },
    }
}

/// The rule that a question states.
///
/// # Safety
/// As [`rote_propagate`].
unsafe fn own_rule(stated: &StatedRule, query: &Query<'_>) -> Result<Rule, Box<dyn Error>> {
    // SAFETY: the caller vouches for the lists.
    let (outputs, written) = unsafe {
        (
            slice(stated.outputs, stated.noutputs)?,
            slice(stated.written, stated.nwritten)?,
        )
    };
    let tensors = query.inputs().count();
    // SAFETY: as above.
    let strategies = unsafe { strategies(stated, query)? };
    let outputs = outputs.iter();
    // SAFETY: as above.
    let outputs = outputs.map(|output| unsafe { meta(output) });
    let outputs: Vec<TensorMeta> = outputs.collect::<Result<_, _>>()?;
    let noutputs = outputs.len();
    let mut rule = stated::rule(query, outputs, strategies)?;
    for one in written {
        let tensor = one.tensor as usize;
        let output = usize::try_from(one.output).ok();
        if tensor >= tensors || output.is_some_and(|output| output >= noutputs) {
            return Err(format!(
                "tensor {tensor} is written as result {}, of {tensors} tensors and {noutputs} results",
                one.output
            )
            .into());
        }
        match output {
            Some(output) => rule.returns(tensor, output),
            None => rule.writes(tensor),
        }
    }
    Ok(rule)
}

/// The strategies of a rule that C has told.
///
/// # Safety
/// As [`rote_propagate`].
unsafe fn strategies(
    stated: &StatedRule,
    query: &Query<'_>,
) -> Result<Vec<Vec<Slot>>, Box<dyn Error>> {
    let width = stated.noutputs as usize + query.inputs().count();
    let slots = width.checked_mul(stated.nstrategies as usize);
    let slots = slots.and_then(|n| u32::try_from(n).ok());
    let slots = slots.ok_or("more strategies than memory holds")?;
    // SAFETY: the caller vouches for the list.
    let slots = unsafe { slice(stated.strategies, slots)? };
    let slots: Vec<Slot> = slots.iter().map(slot).collect::<Result<_, _>>()?;
    let strategies = slots.chunks_exact(width.max(1));
    Ok(strategies.map(<[Slot]>::to_vec).collect())
}

/// A placement of a strategy that C has told.
fn slot(placement: &question::Placement) -> Result<Slot, String> {
    let dim = placement.dim;
    Ok(match placement.kind {
        kind::PLACEHOLDER => Slot::Shard(dim, Need::Nothing),
        kind::SHARD => Slot::Plain(dim, Need::Nothing),
        _ => Slot::Fixed(heard(placement)?),
    })
}

/// A placement that C has told.
fn heard(placement: &question::Placement) -> Result<Placement, String> {
    let &question::Placement {
        kind,
        reduce,
        dim,
        split_factor,
        order,
    } = placement;
    Ok(match kind {
        kind::REPLICATE => Placement::Replicate,
        kind::SHARD => Placement::Shard { dim },
        kind::STRIDED_SHARD => Placement::StridedShard { dim, split_factor },
        kind::REGISTERED_SHARD => {
            let sharding = ShardingId::numbered(split_factor)
                .ok_or_else(|| format!("{split_factor} is not the number of a sharding"))?;
            Placement::Registered { dim, sharding }
        }
        kind::REGISTERED_PARTIAL => {
            let partial = PartialId::numbered(split_factor)
                .ok_or_else(|| format!("{split_factor} is not the number of a partial"))?;
            Placement::Partial(PartialOp::Registered(partial))
        }
        kind::MASK_PARTIAL => Placement::Partial(PartialOp::Mask),
        kind::NORM_PARTIAL => Placement::Partial(
            PartialOp::of_norm(order)
                .ok_or_else(|| format!("{order} is not the order of a norm"))?,
        ),
        kind::PARTIAL => {
            let op = ReduceOp::ALL.get(usize::from(reduce)).copied();
            let op = op.ok_or_else(|| format!("{reduce} is not the number of a reduction"))?;
            Placement::Partial(op.into())
        }
        kind => return Err(format!("{kind} is not a kind of placement")),
    })
}

/// A tensor that C has told.
///
/// # Safety
/// As [`rote_propagate`].
unsafe fn spec(spec: &question::Spec, mesh_dims: u32) -> Result<Spec, String> {
    // SAFETY: the caller vouches for the lists.
    let (meta, placements) = unsafe { (meta(spec)?, slice(spec.placements, mesh_dims)?) };
    Ok(Spec {
        meta: Some(meta),
        placements: placements.iter().map(heard).collect::<Result<_, _>>()?,
    })
}

/// Element type and shape of a tensor that C has told.
///
/// # Safety
/// As [`rote_propagate`].
unsafe fn meta(spec: &question::Spec) -> Result<TensorMeta, String> {
    if spec.ndim > MAX_DIMS {
        return Err(format!(
            "a tensor has {} dims, expected 0 to {MAX_DIMS}",
            spec.ndim
        ));
    }
    // SAFETY: the caller vouches for the list.
    let shape = unsafe { slice(spec.shape, spec.ndim)? };
    let size = |d: &i64| u64::try_from(*d).map_err(|_| format!("{d} is not the size of a dim"));
    Ok(TensorMeta {
        dtype: DType(spec.dtype),
        shape: shape.iter().map(size).collect::<Result<_, _>>()?,
    })
}

/// The strides of a question's tensors.
///
/// # Safety
/// As [`rote_propagate`].
unsafe fn input_strides<'a>(
    asked: &'a Question,
    query: &Query<'_>,
) -> Result<Vec<Cow<'a, [i64]>>, String> {
    // SAFETY: the caller vouches for the list.
    let tensors = unsafe { slice(asked.tensors, asked.ntensors)? }.iter();
    let one = |(told, (_, spec)): (&'a question::Spec, (usize, &Spec))| {
        if told.strides.is_null() {
            let shape = spec.meta.as_ref().map_or(&[][..], |meta| &meta.shape);
            return Ok(Cow::Owned(contiguous(shape)));
        }
        // SAFETY: as above.
        unsafe { slice(told.strides, told.ndim) }.map(Cow::Borrowed)
    };
    tensors.zip(query.inputs()).map(one).collect()
}

/// The arguments of a question. Those at the end that are not given are left out.
///
/// # Safety
/// As [`rote_propagate`].
unsafe fn arguments(asked: &Question, mesh_dims: u32) -> Result<Vec<Arg>, String> {
    // SAFETY: the caller vouches for the lists.
    let (args, tensors) = unsafe {
        (
            slice(asked.args, asked.nargs)?,
            slice(asked.tensors, asked.ntensors)?,
        )
    };
    let mut specs = tensors.iter();
    let mut next = 0;
    let mut found = Vec::with_capacity(args.len());
    for arg in args {
        // Tensors stand in the order of the arguments, so that the answer names them by place.
        let mut tensor = |place: i64| -> Result<Option<Spec>, String> {
            if place == -1 {
                return Ok(None);
            }
            if place != next {
                return Err(format!(
                    "expected tensor {next} next among the arguments, found {place}"
                ));
            }
            next += 1;
            let told = specs
                .next()
                .ok_or_else(|| format!("there is no tensor {place}"))?;
            // SAFETY: the caller vouches for the tensor.
            unsafe { spec(told, mesh_dims) }.map(Some)
        };
        // SAFETY: the tag says which member is set; the caller vouches for what it points at.
        let made = unsafe {
            match arg.tag {
                tag::VALUE => tensor(arg.payload.i)?.map_or(Arg::None, Arg::Tensor),
                tag::VALUES => {
                    let places = slice(arg.payload.ints, arg.len)?.iter();
                    Arg::Tensors(
                        places
                            .map(|place| tensor(*place))
                            .collect::<Result<_, _>>()?,
                    )
                }
                _ => plain(arg)?,
            }
        };
        found.push(made);
    }
    if next != i64::from(asked.ntensors) {
        return Err(format!(
            "{} tensors, of which the arguments name {next}",
            asked.ntensors
        ));
    }
    let given = found.iter().rposition(|arg| *arg != Arg::None);
    found.truncate(given.map_or(0, |last| last + 1));
    Ok(found)
}

/// An argument that is no tensor.
///
/// # Safety
/// As [`rote_propagate`].
unsafe fn plain(arg: &op::Arg) -> Result<Arg, String> {
    let payload = &arg.payload;
    // SAFETY: the tag says which member is set; the caller vouches for what it points at.
    Ok(unsafe {
        match arg.tag {
            // Where results lie, and how, does not decide their placements.
            tag::NONE | tag::DEVICE | tag::LAYOUT | tag::OTHER => Arg::None,
            tag::BOOL => Arg::Bool(payload.i != 0),
            tag::INT => Arg::Int(payload.i),
            tag::FLOAT => Arg::Float(payload.f),
            tag::STR => Arg::Text(text(payload.s)?.to_owned()),
            tag::DTYPE => Arg::DType(DType(
                u8::try_from(payload.i).map_err(|_| format!("{} is not a dtype", payload.i))?,
            )),
            tag::MEMORY_FORMAT => {
                let name = usize::try_from(payload.i).ok();
                let name = name.and_then(|at| MEMORY_FORMATS.get(at));
                let name = name.ok_or_else(|| format!("{} is not a memory format", payload.i))?;
                Arg::Text((*name).to_owned())
            }
            tag::INTS => Arg::Ints(slice(payload.ints, arg.len)?.to_vec()),
            tag::WRAPPED => match slice(payload.list, 1)? {
                [inner] if inner.tag != tag::WRAPPED => plain(inner)?,
                _ => return Err("a number in a number".to_owned()),
            },
            tag::LIST => list(slice(payload.list, arg.len)?)?,
            other => return Err(format!("an argument has the tag {other}")),
        }
    })
}

/// A list of numbers or truth values.
///
/// # Safety
/// As [`rote_propagate`].
unsafe fn list(items: &[op::Arg]) -> Result<Arg, String> {
    let whole = items
        .iter()
        .all(|item| matches!(item.tag, tag::INT | tag::BOOL));
    // SAFETY: the tag says which member is set.
    unsafe {
        if whole {
            return Ok(Arg::Ints(items.iter().map(|item| item.payload.i).collect()));
        }
        let number = |item: &op::Arg| match item.tag {
            tag::INT => Ok(item.payload.i as f64),
            tag::FLOAT => Ok(item.payload.f),
            _ => Err("a list of other things than numbers".to_owned()),
        };
        Ok(Arg::Floats(
            items.iter().map(number).collect::<Result<_, _>>()?,
        ))
    }
}

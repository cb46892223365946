//! The sections of `rote show`.

use std::fmt::{self, Display, Formatter};

use super::figures::{collectives, instructions, memory};
use super::notation::{
    Bytes, binding_kind, binding_marks, guard_kind, instr, placements, scalar, spec, tensor, text,
};
use crate::describe::{Instructions, Memory};
use crate::plan::ArchivedPlan;
use crate::pool::NONE;

/// What a plan is: where it was recorded, what it binds and returns, its
/// collectives by group, its memory, its guards.
pub fn summary(plan: &ArchivedPlan) -> impl Display {
    Section(plan, write_summary)
}

/// The instructions, one line each, under the global op that they come from.
pub fn ops(plan: &ArchivedPlan) -> impl Display {
    Section(plan, write_ops)
}

/// The global ops in order: source line, op, placements of its inputs and
/// outputs, and the redistributions made for it.
pub fn strategies(plan: &ArchivedPlan) -> impl Display {
    Section(plan, write_strategies)
}

type Write = fn(&mut Formatter<'_>, &ArchivedPlan) -> fmt::Result;

struct Section<'a>(&'a ArchivedPlan, Write);

impl Display for Section<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        (self.1)(f, self.0)
    }
}

/// `1 view`, `2 views`.
fn counted(count: u64, one: &str) -> String {
    match count {
        1 => format!("1 {one}"),
        _ => format!("{count} {one}s"),
    }
}

fn write_summary(f: &mut Formatter<'_>, plan: &ArchivedPlan) -> fmt::Result {
    let at = &plan.fingerprint;
    writeln!(f, "plan         {}", text(&plan.function))?;
    writeln!(
        f,
        "recorded     rote {}, {}, rank {} of world size {}",
        text(&at.rote),
        text(&at.framework),
        at.rank,
        at.world_size
    )?;
    for mesh in plan.meshes.iter() {
        let shape: Vec<_> = plan.dims[mesh.shape.indices()]
            .iter()
            .map(|d| d.to_native())
            .collect();
        let names = plan.ids[mesh.dim_names.indices()].iter();
        let names: Vec<_> = names
            .map(|n| text(plan.str(n.to_native())).to_string())
            .collect();
        let device = text(plan.str(mesh.device_type.to_native()));
        writeln!(f, "mesh         {device} {shape:?} {}", names.join(", "))?;
    }
    let Instructions {
        local,
        views,
        collectives: issued,
        waits,
        rng,
        frees,
    } = instructions(plan);
    writeln!(
        f,
        "program      {}: {}, {}, {}, {}, {}, {}",
        counted(plan.instrs.len() as u64, "instruction"),
        counted(local, "local op"),
        counted(views, "view"),
        counted(issued, "collective"),
        counted(waits, "wait"),
        counted(rng, "generator state"),
        counted(frees, "free"),
    )?;
    let moved = plan
        .redistributions
        .iter()
        .fold(0_u64, |sum, r| sum.saturating_add(r.bytes.to_native()));
    writeln!(
        f,
        "propagation  {}, {} ({})",
        counted(plan.strategies.len() as u64, "global op"),
        counted(plan.redistributions.len() as u64, "redistribution"),
        Bytes(moved)
    )?;
    writeln!(f, "result       {}", text(&plan.result))?;
    write_bindings(f, plan)?;
    write_collectives(f, plan)?;
    write_memory(f, plan)?;
    writeln!(f, "guards       {}", plan.guards.len())?;
    for guard in plan.guards.iter() {
        let (subject, expected) = (guard.subject.to_native(), guard.expected.to_native());
        writeln!(
            f,
            "  {:<9}  {} is {}",
            guard_kind(guard.kind),
            text(plan.str(subject)),
            text(plan.str(expected))
        )?;
    }
    Ok(())
}

fn write_bindings(f: &mut Formatter<'_>, plan: &ArchivedPlan) -> fmt::Result {
    writeln!(f, "bindings     {}", plan.bindings.len())?;
    for binding in plan.bindings.iter() {
        let path = text(plan.str(binding.path.to_native()));
        let value = binding.value.to_native();
        write!(
            f,
            "  {:<9}  %{value} {path}: {}",
            binding_kind(binding.kind),
            tensor(plan, value)
        )?;
        write_spec(f, plan, binding.spec.to_native())?;
        let root = plan.values[value as usize].root.to_native();
        if root != value {
            write!(f, ", in the storage of %{root}")?;
        }
        writeln!(f, "{}", binding_marks(binding))?;
    }
    writeln!(f, "outputs      {}", plan.outputs.len())?;
    for output in plan.outputs.iter() {
        let (path, value) = (
            text(plan.str(output.path.to_native())),
            output.value.to_native(),
        );
        write!(f, "  %{value} {path}: {}", tensor(plan, value))?;
        write_spec(f, plan, output.spec.to_native())?;
        writeln!(
            f,
            "{}",
            if output.requires_grad {
                ", requires grad"
            } else {
                ""
            }
        )?;
    }
    writeln!(f, "gradients    {}", plan.grads.len())?;
    for grad in plan.grads.iter() {
        let path = text(plan.str(grad.path.to_native()));
        match grad.value.to_native() {
            NONE => write!(f, "  {path}.grad becomes None")?,
            value => write!(f, "  {path}.grad becomes %{value}: {}", tensor(plan, value))?,
        }
        write_spec(f, plan, grad.spec.to_native())?;
        writeln!(f)?;
    }
    if !plan.scalars.is_empty() {
        writeln!(f, "scalars      {}", plan.scalars.len())?;
        for (index, entry) in plan.scalars.iter().enumerate() {
            writeln!(f, "  ${index} = {}", scalar(plan, *entry))?;
        }
    }
    Ok(())
}

fn write_spec(f: &mut Formatter<'_>, plan: &ArchivedPlan, id: u32) -> fmt::Result {
    match id {
        NONE => Ok(()),
        id => write!(f, ", {}", spec(plan, id)),
    }
}

fn write_collectives(f: &mut Formatter<'_>, plan: &ArchivedPlan) -> fmt::Result {
    let totals = collectives(plan);
    let count = totals.iter().map(|t| t.count).sum();
    let bytes = totals
        .iter()
        .fold(0_u64, |sum, t| sum.saturating_add(t.bytes));
    writeln!(
        f,
        "collectives  {}, {} put in by this rank",
        counted(count, "call"),
        Bytes(bytes)
    )?;
    for total in &totals {
        let kind = match total.reduce {
            Some(reduce) => format!("{} {reduce}", total.kind),
            None => total.kind.into(),
        };
        let calls = counted(total.count, "call");
        let group = text(&total.group).to_string();
        writeln!(
            f,
            "  {group:<9}  {kind:<18}  {calls:>10}  {:>10}",
            Bytes(total.bytes)
        )?;
    }
    Ok(())
}

fn write_memory(f: &mut Formatter<'_>, plan: &ArchivedPlan) -> fmt::Result {
    let Memory {
        arguments,
        state,
        gradients,
        constants,
        peak,
        peak_at,
    } = memory(plan);
    writeln!(
        f,
        "memory       results: {} live at most, at instruction {peak_at}",
        Bytes(peak)
    )?;
    for (what, bytes) in [
        ("arguments", arguments),
        ("state", state),
        ("gradients", gradients),
        ("constants", constants),
    ] {
        writeln!(f, "  {what:<9}  {:>10}", Bytes(bytes))?;
    }
    Ok(())
}

fn write_ops(f: &mut Formatter<'_>, plan: &ArchivedPlan) -> fmt::Result {
    // Strategies by the instruction that they begin with.
    let mut starts: Vec<(u32, usize)> = plan
        .strategies
        .iter()
        .enumerate()
        .filter(|(_, strategy)| strategy.instrs.len != 0)
        .map(|(index, strategy)| (strategy.instrs.start.to_native(), index))
        .collect();
    starts.sort_unstable();
    let mut starts = starts.into_iter().peekable();
    let width = plan.instrs.len().saturating_sub(1).to_string().len();
    for index in 0..plan.instrs.len() as u32 {
        while let Some((_, strategy)) = starts.next_if(|(start, _)| *start == index) {
            let strategy = &plan.strategies[strategy];
            let (op, source) = (strategy.op.to_native(), strategy.source.to_native());
            writeln!(f, "# {}  {}", text(plan.str(op)), text(plan.str(source)))?;
        }
        writeln!(f, "{index:>width$}  {}", instr(plan, index))?;
    }
    Ok(())
}

fn write_strategies(f: &mut Formatter<'_>, plan: &ArchivedPlan) -> fmt::Result {
    for strategy in plan.strategies.iter() {
        let specs = |range: crate::pool::ArchivedRange| {
            let ids = plan.ids[range.indices()].iter();
            let specs: Vec<_> = ids
                .map(|id| placements(plan, id.to_native()).to_string())
                .collect();
            specs.join("; ")
        };
        let (start, len) = (
            strategy.instrs.start.to_native(),
            strategy.instrs.len.to_native(),
        );
        writeln!(
            f,
            "{}  {}  ({}) -> ({})  instructions {start}..{}",
            source(plan, strategy.source.to_native()),
            text(plan.str(strategy.op.to_native())),
            specs(strategy.inputs),
            specs(strategy.outputs),
            start + len,
        )?;
        for redistribution in &plan.redistributions[strategy.redistributions.indices()] {
            let (from, to) = (
                redistribution.from.to_native(),
                redistribution.to.to_native(),
            );
            writeln!(
                f,
                "    redistributes {} -> {}, {}, {}",
                placements(plan, from),
                spec(plan, to),
                Bytes(redistribution.bytes.to_native()),
                source(plan, redistribution.source.to_native()),
            )?;
        }
    }
    Ok(())
}

/// A source line, or that there is none.
fn source(plan: &ArchivedPlan, id: u32) -> String {
    match plan.str(id) {
        "" => "(no source line)".into(),
        line => text(line).to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::file::PlanFile;
    use crate::sample;

    #[test]
    fn the_ops_of_the_sample() {
        let file = PlanFile::from_plan(&sample::small()).expect("valid");
        let expected = r#"0  save the cpu generator in slot 0
1  restore the cpu generator from slot 0
2  %2 f32[8,8]{1,8} = view %1
# aten::mm  train.py:12
3  %3 f32[4,8] = aten::mm(%0, %2) grad
4  %3 = all_reduce(%3, sum) over tp
5  wait %3
6  %4 f32[4,8] = aten::add(%3, %3, 1)
7  free %4
8  %5 f32[] = test::every_argument(None, [%0, None, %3], true, 1.0-1.0j, [1, 2], [3, $2, wrapped(2.0)], "mean", f32, cpu, strided, preserve)
9  %1 = aten::mul_(%1, wrapped(2.0))
"#;
        assert_eq!(ops(file.plan()).to_string(), expected);
    }

    #[test]
    fn the_strategies_of_the_sample() {
        let file = PlanFile::from_plan(&sample::small()).expect("valid");
        let expected = "train.py:12  aten::mm  (-; S(1)) -> (P(sum))  instructions 3..6\n    \
             redistributes P(sum) -> R of [4,8], 128 B, train.py:12\n";
        assert_eq!(strategies(file.plan()).to_string(), expected);
    }

    #[test]
    fn the_summary_of_the_sample() {
        let file = PlanFile::from_plan(&sample::small()).expect("valid");
        let expected = r#"plan         train.py:train_step
recorded     rote 0.1.0, torch 2.15.0, rank 1 of world size 2
mesh         cpu [2] tp
program      10 instructions: 4 local ops, 1 view, 1 collective, 1 wait, 2 generator states, 1 free
propagation  1 global op, 1 redistribution (128 B)
result       {"dict":[[{"c":"loss"},{"t":0}],[{"c":1},{"tuple":[{"b":"args[0]"},{"f":"nan"},{"list":[]}]}]]}
bindings     2
  argument   %0 args[0]: f32[4,8]
  state      %1 model.weight: f32[8,8], S(1) of [8,16], written
outputs      1
  %5 result['loss']: f32[], requires grad
gradients    2
  model.weight.grad becomes %3: f32[4,8], _S(0,2) of [8,16]
  model.weight.grad becomes None
scalars      7
  $0 = opt.param_groups[0]['lr']
  $1 = -1.0
  $2 = $0 * $1
  $3 = opt.state[0].step
  $4 = $3 + $1
  $5 = f32($4)
  $6 = $5 not < $1
collectives  1 call, 128 B put in by this rank
  tp         all_reduce sum          1 call       128 B
memory       results: 256 B live at most, at instruction 6
  arguments       128 B
  state           256 B
  gradients         0 B
  constants         8 B
guards       1
  argument   args[0].shape is (4, 8)
"#;
        assert_eq!(summary(file.plan()).to_string(), expected);
    }

    #[test]
    fn control_characters_do_not_reach_the_terminal() {
        let mut plan = sample::small();
        plan.function = "\u{1b}[2Jstep\n".into();
        let file = PlanFile::from_plan(&plan).expect("valid");
        let first = summary(file.plan()).to_string();
        assert!(
            first.starts_with("plan         \\u{1b}[2Jstep\\n\n"),
            "{first}"
        );
    }
}

//! Replays that show every result, to find a wrong instruction.

use rote_passes::liveness::for_each_value;
use rote_plans::describe;
use rote_plans::{Arg, Instr, NONE, Scalar, ValueId};
use rote_replay::{Frontend, TensorOf};
use rote_tracer::compare::first_difference;
use rote_tracer::scalars::evaluate;
use serde_json::{Value, json};

use crate::SessionError;
use crate::session::Session;
use crate::variant::Variant;

impl<F: Frontend> Session<F> {
    /// Replays a call with a variant and shows what each instruction makes or writes in
    /// place: of the plan as it was recorded, or else of the program that ran last.
    pub fn show(
        &mut self,
        id: u32,
        args: F::Args,
        recorded: bool,
        seen: &mut dyn FnMut(u32, u32, TensorOf<F>),
    ) -> Result<(), SessionError> {
        let (frontend, variant) = self.collected(id, args)?;
        variant.show(frontend, recorded, seen)
    }

    /// Ends the recording in progress without a variant. Where it differs from the plan
    /// of a variant: the instruction, and what it is in the plan and now.
    pub fn compare_with(
        &mut self,
        id: u32,
        result: &str,
    ) -> Result<Option<(usize, String, String)>, SessionError> {
        let recording = self.take_recording().ok_or(SessionError::NoRecording)?;
        let variant = self.variant(id).ok_or(SessionError::NoVariant)?;
        let (trace, _) = recording.into_trace(result);
        let mut plan = variant.file.to_plan();
        let mut numbers = Vec::new();
        let done = evaluate(&plan.scalars, &mut numbers, |i| match plan.scalars[i] {
            Scalar::Read { path } => {
                (variant.parts.facts.float(plan.str(path))).unwrap_or(f64::NAN)
            }
            Scalar::Tensor { path } => (trace.floats.in_tensor(plan.str(path))).unwrap_or(f64::NAN),
            _ => f64::NAN,
        });
        if done.is_err() {
            numbers.resize(plan.scalars.len(), f64::NAN); // differ from all that was recorded
        }
        for arg in &mut plan.args {
            if let Arg::Scalar(scalar) = *arg {
                *arg = Arg::Float(numbers[scalar as usize]);
            }
        }
        Ok(first_difference(&plan, &trace.plan))
    }
}

/// The instructions of a variant's plan: for each its text, its line, the roots that
/// it reads, and what it shows: values made, then written ones, each with its root.
pub fn program<F: Frontend>(variant: &Variant<F>) -> Value {
    let plan = variant.file.to_plan();
    let root = |value: ValueId| plan.values[value as usize].root;
    let sources = &variant.trace.sources;
    let rows = plan.instrs.iter().enumerate().map(|(at, instr)| {
        let mut reads = Vec::new();
        for_each_value(&plan, instr, |value| reads.push(root(value)));
        let shown: Vec<u32> = match instr {
            Instr::Local { outs, writes, .. } => [*outs, *writes]
                .iter()
                .flat_map(|range| plan.ids(*range))
                .copied()
                .collect(),
            Instr::View { out, .. } => vec![*out],
            Instr::Wait { value } => vec![*value],
            _ => Vec::new(),
        };
        let counted = matches!(instr, Instr::Local { .. } | Instr::Wait { .. });
        let outs = match instr {
            Instr::Local { outs, .. } => outs.len,
            _ => 0,
        };
        json!({
            "text": describe::instr(variant.file.plan(), at as u32).to_string(),
            "source": sources.get(at).cloned().unwrap_or_default(),
            "counted": counted,
            "view": matches!(instr, Instr::View { .. }),
            "outs": outs,
            "reads": reads,
            "shown": shown.iter().map(|&value| match value {
                NONE => json!([NONE, NONE]),
                value => json!([value, root(value)]),
            }).collect::<Vec<_>>(),
        })
    });
    Value::Array(rows.collect())
}

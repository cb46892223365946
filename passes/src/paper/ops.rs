//! Local ops on paper: what they read, make and write.

use std::hash::{DefaultHasher, Hash, Hasher};

use rote_plans::schedule::{COPIES, Into};
use rote_plans::{Arg, Def, Instr, NONE, Value, ValueId};

use super::{Paper, Place, Symbol, UNDEFINED, symbol, width};
use crate::ops::ALLOCATORS;

/// Ops of the tests that look at nothing but shapes.
const META_ONLY: &[&str] = &["aten::ones_like", "aten::zeros_like", "aten::new_zeros"];
/// Ops of the tests that read an element before they write the same element.
const ELEMENT_WISE: &[&str] = &[
    "aten::neg",
    "aten::exp",
    "aten::add",
    "aten::mul",
    "aten::maximum",
];

impl Paper<'_> {
    pub(super) fn local(&mut self, at: usize) -> Result<(), String> {
        let plan = self.plan;
        let Instr::Local {
            op,
            overload,
            args,
            outs,
            writes,
            seeded,
            grad,
        } = plan.instrs[at]
        else {
            return Ok(());
        };
        let name = plan.str(op);
        let into = self.schedule.into(at);
        let made: Vec<ValueId> = (plan.ids(outs).iter().copied())
            .filter(|v| *v != NONE && plan.values[*v as usize].def == Def::Instr(at as u32))
            .collect();
        let list = &plan.args[args.indices()];
        if ALLOCATORS.contains(&name) {
            return made.iter().try_for_each(|v| self.define(*v));
        }
        let meta_only = META_ONLY.contains(&name);
        let mut written = plan.ids(writes).to_vec();
        written.extend(&made);
        let overload = plan.str(overload);
        let (results, read) = self.compute(name, overload, list, &written, seeded, grad)?;
        let looked: Vec<(ValueId, Vec<Place>)> = (read.iter())
            .map(|v| Ok((*v, self.bytes(*v)?)))
            .collect::<Result<_, String>>()?;
        for (value, symbols) in written.iter().zip(&results) {
            if made.contains(value) {
                let root = plan.values[*value as usize].root;
                self.define(*value)?;
                if root != *value && !made.contains(&root) {
                    continue; // a view of what was there
                }
                let places = self.bytes(*value)?;
                for (argument, read) in &looked {
                    let one_by_one = read == &places && ELEMENT_WISE.contains(&name);
                    if read.iter().any(|p| places.contains(p)) && !one_by_one && !meta_only {
                        return Err(format!(
                            "%{value} is written over %{argument}, which {name} reads"
                        ));
                    }
                }
                if matches!(into, Some(Into::Nothing)) {
                    return Err(format!("{name} is left out, but it writes"));
                }
            }
            self.write_to(*value, symbols)?;
        }
        Ok(())
    }

    /// What an op makes of its arguments for each value that it writes, and what it
    /// reads. Everything is read before anything is written.
    fn compute(
        &mut self,
        name: &str,
        overload: &str,
        list: &[Arg],
        written: &[ValueId],
        seeded: bool,
        grad: bool,
    ) -> Result<(Vec<Vec<Symbol>>, Vec<ValueId>), String> {
        let plan = self.plan;
        // What it reads, and a symbol of everything that decides its results.
        let meta_only = META_ONLY.contains(&name);
        let mut read = Vec::new();
        let mut undefined = false;
        let mut key = DefaultHasher::new();
        // A number and a tensor that wraps it are the same to these kernels.
        let overload = if overload == "Scalar" {
            "Tensor"
        } else {
            overload
        };
        (name, overload, grad).hash(&mut key);
        for arg in list {
            self.argument(arg, meta_only, &mut key, &mut read, &mut undefined)?;
        }
        if seeded {
            self.generator.hash(&mut key);
            self.generator = symbol(("next", self.generator));
        }
        let key = key.finish();
        if seeded || !name.starts_with("aten::") {
            self.seen.acts.push((name.to_owned(), key));
        }
        let source = match (COPIES.contains(&name) || name == "aten::copy_", list) {
            (true, [Arg::Value(_), Arg::Value(source), ..]) if name == "aten::copy_" => {
                Some(*source)
            }
            (true, [Arg::Value(source), ..]) => Some(*source),
            _ => None,
        };
        let mut results = Vec::new();
        for (nth, value) in written.iter().enumerate() {
            let bytes = plan.values[*value as usize];
            let count = self.elements(&bytes).len() * width(&bytes) as usize;
            let copied = source.filter(|s| {
                let s = &plan.values[*s as usize];
                s.dtype == bytes.dtype && self.elements(s).len() == self.elements(&bytes).len()
            });
            let joined = match list {
                [Arg::Values(pieces), Arg::Int(dim)] if name == "aten::cat" => {
                    self.joined(plan.ids(*pieces), *dim, &bytes)?
                }
                _ => None,
            };
            results.push(match (copied, joined) {
                (Some(source), _) => self.read(source)?,
                (None, Some(joined)) => joined,
                _ if undefined => vec![UNDEFINED; count],
                _ => (0..count).map(|byte| symbol((key, nth, byte))).collect(),
            });
        }
        Ok((results, read))
    }

    /// What pieces are, joined along a dim; nothing where they do not make the result.
    fn joined(
        &self,
        pieces: &[ValueId],
        dim: i64,
        result: &Value,
    ) -> Result<Option<Vec<Symbol>>, String> {
        let shape = |value: &Value| self.plan.dims(value.shape).to_vec();
        let whole = shape(result);
        let dim = dim.rem_euclid(whole.len().max(1) as i64) as usize;
        let mut along = 0;
        for piece in pieces {
            let piece = &self.plan.values[*piece as usize];
            let mut of = shape(piece);
            if piece.dtype != result.dtype || of.len() != whole.len() {
                return Ok(None);
            }
            along += of[dim];
            of[dim] = whole[dim];
            if of != whole {
                return Ok(None);
            }
        }
        if whole.get(dim) != Some(&along) {
            return Ok(None);
        }
        let inner = whole[dim + 1..].iter().product::<i64>() * width(result);
        let mut parts = Vec::new();
        for piece in pieces {
            let run = shape(&self.plan.values[*piece as usize])[dim] * inner;
            parts.push((self.read(*piece)?, run as usize));
        }
        let outer: i64 = whole[..dim].iter().product();
        let rows = (0..outer as usize).flat_map(|row| {
            parts
                .iter()
                .flat_map(move |(part, run)| &part[row * run..(row + 1) * run])
        });
        Ok(Some(rows.copied().collect()))
    }

    fn argument(
        &self,
        arg: &Arg,
        meta_only: bool,
        key: &mut DefaultHasher,
        read: &mut Vec<ValueId>,
        undefined: &mut bool,
    ) -> Result<(), String> {
        let plan = self.plan;
        let mut tensor = |value: ValueId, key: &mut DefaultHasher| -> Result<(), String> {
            if value == NONE {
                NONE.hash(key);
                return Ok(());
            }
            let meta = &plan.values[value as usize];
            (plan.dims(meta.shape), plan.dims(meta.strides)).hash(key);
            (meta.dtype.0, meta.marks).hash(key);
            let symbols = self.read(value)?;
            if !meta_only {
                // Kernels may take other ways on data that is aligned otherwise.
                (meta.offset * width(meta) % 64).hash(key);
                *undefined |= symbols.contains(&UNDEFINED);
                symbols.hash(key);
                read.push(value);
            }
            Ok(())
        };
        match arg {
            Arg::Value(value) => tensor(*value, key)?,
            Arg::Values(range) => {
                for value in plan.ids(*range) {
                    tensor(*value, key)?;
                }
            }
            Arg::List(range) => {
                for inner in &plan.args[range.indices()] {
                    self.argument(inner, meta_only, key, read, undefined)?;
                }
            }
            Arg::Wrapped(inner) => {
                let inner = &plan.args[*inner as usize];
                self.argument(inner, meta_only, key, read, undefined)?;
            }
            Arg::Scalar(number) => ("read anew", number, self.run).hash(key),
            Arg::Ints(range) => plan.dims(*range).hash(key),
            Arg::Str(text) => plan.str(*text).hash(key),
            other => format!("{other:?}").hash(key),
        }
        Ok(())
    }
}

//! What the sharding system decided: global ops and redistributions.

use rote_plans::{Range, Redistribution, Strategy};

use super::Recorder;
use crate::event::SpecEvent;
use rote_passes::liveness;

impl Recorder {
    /// A global op begins: what follows until [`Recorder::global_end`] is what
    /// it became.
    pub fn global_begin(&mut self, op: &str, inputs: &[Option<SpecEvent>], source: &str) {
        let inputs: Vec<u32> = inputs
            .iter()
            .map(|spec| self.tables.optional_spec(spec.as_ref()))
            .collect();
        let strategy = Strategy {
            op: self.tables.str(op),
            source: self.tables.str(source),
            args: Range::default(),
            inputs: self.tables.ids(&inputs),
            outputs: Range::default(),
            instrs: Range {
                start: self.next_instr(),
                len: 0,
            },
            redistributions: Range {
                start: self.tables.plan.redistributions.len() as u32,
                len: 0,
            },
        };
        let index = self.tables.plan.strategies.len() as u32;
        self.tables.plan.strategies.push(strategy);
        self.open_strategies.push(index);
    }

    /// Says all arguments of the innermost global op, in schema order and in the
    /// notation of `rote propagate`: what is redistributed for it can then be
    /// judged.
    pub fn global_args<'a>(&mut self, args: impl IntoIterator<Item = &'a str>) {
        let Some(&index) = self.open_strategies.last() else {
            return;
        };
        let args: Vec<u32> = args.into_iter().map(|arg| self.tables.str(arg)).collect();
        self.tables.plan.strategies[index as usize].args = self.tables.ids(&args);
    }

    /// The innermost global op has run.
    pub fn global_end(&mut self, outputs: &[Option<SpecEvent>]) {
        let Some(index) = self.open_strategies.pop() else {
            return;
        };
        let outputs: Vec<u32> = outputs
            .iter()
            .map(|spec| self.tables.optional_spec(spec.as_ref()))
            .collect();
        let outputs = self.tables.ids(&outputs);
        let end = self.next_instr();
        let redistributions = self.tables.plan.redistributions.len() as u32;
        let strategy = &mut self.tables.plan.strategies[index as usize];
        strategy.outputs = outputs;
        strategy.instrs.len = end - strategy.instrs.start;
        strategy.redistributions.len = redistributions - strategy.redistributions.start;
    }

    /// A redistribution begins.
    pub fn redistribute_begin(&mut self, from: &SpecEvent, to: &SpecEvent, source: &str) {
        let entry = Redistribution {
            from: self.tables.spec(from),
            to: self.tables.spec(to),
            source: self.tables.str(source),
            bytes: 0,
            instrs: Range {
                start: self.next_instr(),
                len: 0,
            },
        };
        self.open_redistributions
            .push(self.tables.plan.redistributions.len() as u32);
        self.tables.plan.redistributions.push(entry);
    }

    /// The innermost redistribution has run.
    pub fn redistribute_end(&mut self) {
        let Some(index) = self.open_redistributions.pop() else {
            return;
        };
        let end = self.next_instr();
        let start = self.tables.plan.redistributions[index as usize]
            .instrs
            .start;
        let bytes = (start..end)
            .map(|i| liveness::collective_bytes(&self.tables.plan, i))
            .sum();
        let entry = &mut self.tables.plan.redistributions[index as usize];
        entry.instrs.len = end - start;
        entry.bytes = bytes;
    }
}

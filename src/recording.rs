//! A recording in progress: what the framework reports while a step runs.

use std::rc::Rc;

use hashbrown::HashMap;
use rote_plans::{BindingKind, Comparison, Device, Fingerprint, GuardKind, RngAction};
use rote_replay::frontend::Describe;
use rote_replay::{CallFacts, Frontend, ReplayError, TensorOf};
use rote_tracer::compare::Trace;
use rote_tracer::contents::Contents;
use rote_tracer::scalars::{Origin, TracedFloats, UnknownFloat};
use rote_tracer::{OpEvent, Recorder, Refusal, SpecEvent};

use crate::facts::NamedFacts;
use crate::places::Places;

/// A tensor that the plan may bind.
#[derive(Debug)]
pub struct Named<T> {
    /// Whose it is.
    pub kind: BindingKind,
    /// Its path; of a gradient, the path of its owner.
    pub path: String,
    /// The tensor; of a gradient, its owner. Held for state only.
    pub tensor: Option<T>,
    /// Which leaf of the arguments it is, for arguments and their gradients.
    pub leaf: Option<u32>,
    /// Its storage.
    pub storage: u64,
    /// The bytes of its storage.
    pub storage_bytes: u64,
    /// How often the step has written it as autograd counts it, and its local tensor; none where
    /// that was not seen.
    pub written: Option<[u32; 2]>,
}

/// The tensor of the state under a path.
pub(crate) fn state_tensor<'a, T>(named: &'a [Named<T>], path: &str) -> Option<&'a T> {
    let mut state = (named.iter()).filter(|named| named.kind == BindingKind::State);
    state.find(|named| named.path == path)?.tensor.as_ref()
}

/// How a tensor is named.
#[derive(Clone, Copy, Debug)]
pub struct NewTensor<'a> {
    /// Whose it is.
    pub kind: BindingKind,
    /// Its path; of a gradient, the path of its owner.
    pub path: &'a str,
    /// The number of its spec, `None` for a plain tensor.
    pub spec: Option<u32>,
    /// Which leaf of the arguments it is, for arguments and their gradients.
    pub leaf: Option<u32>,
}

/// A guard, as text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GuardText {
    /// Where it looks.
    pub kind: GuardKind,
    /// What it looks at.
    pub subject: String,
    /// What it expects.
    pub expected: String,
    /// A hyperparameter: no part of the guard key.
    pub hyperparameter: bool,
}

/// One step while it is recorded.
#[derive(Debug)]
pub struct ActiveRecording<F: Frontend> {
    describer: F::Describer,
    recorder: Recorder,
    /// Facts about objects that outlive the call.
    pub facts: NamedFacts<F>,
    floats: TracedFloats,
    contents: Contents,
    /// Tensors that have a name.
    pub named: Vec<Named<TensorOf<F>>>,
    specs: Vec<SpecEvent>,
    /// Guards of the call and its modes, as text.
    pub guards: Vec<GuardText>,
    /// Facts of the call.
    pub call: Rc<CallFacts<F::Held>>,
    /// Names of the leaves of the arguments.
    pub leaves: Vec<String>,
    refusal: Option<Refusal>,
    generators: HashMap<Device, u64>,
}

impl<F: Frontend> ActiveRecording<F> {
    /// Begins a recording for a call with these facts.
    pub fn new(
        frontend: &F,
        fingerprint: Fingerprint,
        function: &str,
        call: Rc<CallFacts<F::Held>>,
    ) -> Self {
        let mut recorder = Recorder::new(fingerprint, function);
        if F::CHECKS {
            recorder.let_host_ask();
        }
        ActiveRecording {
            describer: frontend.describer(),
            recorder,
            facts: NamedFacts::new(frontend),
            floats: TracedFloats::default(),
            contents: Contents::default(),
            named: Vec::new(),
            specs: Vec::new(),
            guards: Vec::new(),
            call,
            leaves: Vec::new(),
            refusal: None,
            generators: HashMap::new(),
        }
    }

    /// Lets the step read values on the host after collectives, about which the ranks agree.
    pub fn let_ranks_agree(&mut self) {
        self.recorder.let_ranks_agree();
    }

    /// Why it cannot be kept, if something has been refused.
    pub fn refusal(&self) -> Option<&Refusal> {
        self.refusal.as_ref()
    }

    /// Refuses the recording; the first reason counts.
    pub fn refuse(&mut self, refusal: Refusal) {
        self.refusal.get_or_insert(refusal);
    }

    /// Adds a guard that is text only: modes, structure, world.
    pub fn guard(&mut self, kind: GuardKind, subject: &str, expected: &str) {
        self.guards.push(GuardText {
            kind,
            subject: subject.to_owned(),
            expected: expected.to_owned(),
            hyperparameter: false,
        });
    }

    /// Takes over the guards of another recording, all of which hold.
    pub(crate) fn take_over(&mut self, frontend: &F, other: &mut Parts<F>) {
        self.facts = std::mem::replace(&mut other.facts, NamedFacts::new(frontend));
        // What `guard_texts` has added.
        let told = (self.facts.entries.iter()).filter(|entry| !entry.text.is_empty());
        let told = told.count();
        self.guards = other.guards.clone();
        self.guards.truncate(other.guards.len() - told);
    }

    /// Registers a spec; returns its number.
    pub fn spec(&mut self, spec: SpecEvent) -> u32 {
        self.specs.push(spec);
        self.specs.len() as u32 - 1
    }

    fn spec_at(&self, spec: Option<u32>) -> Result<Option<SpecEvent>, ReplayError> {
        let Some(number) = spec else { return Ok(None) };
        let found = self.specs.get(number as usize).cloned();
        let unknown = || ReplayError::Bind(format!("no spec has the number {number}"));
        found.ok_or_else(unknown).map(Some)
    }

    fn specs_at(&self, specs: &[u32]) -> Vec<Option<SpecEvent>> {
        specs
            .iter()
            .map(|&i| self.specs.get(i as usize).cloned())
            .collect()
    }

    /// Names a tensor. `local` is the local tensor, `bound` what is bound
    /// (for a gradient: its owner).
    pub fn name_tensor(
        &mut self,
        frontend: &F,
        tensor: NewTensor<'_>,
        bound: F::Ref<'_>,
        local: F::Ref<'_>,
    ) -> Result<(), ReplayError> {
        let NewTensor {
            kind,
            path,
            spec,
            leaf,
        } = tensor;
        let spec = self.spec_at(spec)?;
        let event = self.describer.tensor(local)?;
        let place = match (kind, leaf) {
            (BindingKind::Arg, Some(_)) if !event.opaque => Some(frontend.place(bound, true)?),
            _ => None,
        };
        (self.recorder).name_tensor(kind, path, &event, spec.as_ref(), place);
        let number = match (kind, &spec, event.numel()) {
            (BindingKind::State, None, 1) if event.storage_bytes > 0 => frontend.number(bound),
            _ => None,
        };
        self.contents
            .name(&event, number.map(|number| (path, number)));
        let (storage, storage_bytes) = (event.storage, event.storage_bytes);
        let tensor = leaf.is_none().then(|| frontend.hold(bound));
        self.named.push(Named {
            kind,
            path: path.to_owned(),
            tensor,
            leaf,
            storage,
            storage_bytes,
            written: None,
        });
        Ok(())
    }

    /// The number in a tensor of the state, now.
    pub fn number_in(&self, frontend: &F, path: &str) -> Option<f64> {
        frontend.number(F::borrow(state_tensor(&self.named, path)?))
    }

    /// Says how often the step has written each named tensor, in the order of their naming, as
    /// autograd counts it, and its local tensor. Refuses when no recorded op has.
    pub fn written(&mut self, times: impl Iterator<Item = [u32; 2]>) {
        for (named, times) in self.named.iter_mut().zip(times) {
            named.written = Some(times);
            self.recorder.counted(named.storage, &named.path, times);
            let seen = times == [0, 0] || named.storage_bytes == 0;
            if !seen && !self.recorder.has_written(named.storage) {
                let refusal = Refusal::op(
                    "",
                    "",
                    format!("writes to {} without a recorded op", named.path),
                    "write to it by an op, or outside the captured function",
                );
                self.refusal.get_or_insert(refusal);
            }
        }
    }

    /// Says where the step can reach a storage that no named tensor has.
    pub fn reaches(&mut self, storage: u64, place: &str) {
        self.recorder.reaches(storage, place);
    }

    /// The storages without a name that the step can reach and that an op has met.
    pub fn met(&self) -> &[u64] {
        self.recorder.met()
    }

    /// Code of the framework's own has resized a storage, outside of ops, from and to so many bytes; see
    /// [`Recorder::resized`].
    pub fn resized(&mut self, storage: u64, bytes: [u64; 2], source: &str) {
        if self.refusal.is_some() {
            return;
        }
        self.contents.lost(storage);
        if let Err(refusal) = self.recorder.resized(storage, bytes, source) {
            self.refusal = Some(refusal);
        }
    }

    /// The step asks how a tensor lies in its storage: the plan depends on that.
    /// Returns whether the tensor's storage exists before the step.
    pub fn anchor(&mut self, local: F::Ref<'_>) -> Result<bool, ReplayError> {
        let storage = self.describer.tensor(local)?.storage;
        self.recorder.anchor(storage);
        Ok(!self.recorder.is_made(storage))
    }

    /// Notes where a device's generator stands.
    pub fn watch_generator(&mut self, frontend: &F, device: Device) -> Result<(), ReplayError> {
        let digest = frontend.generator(device)?;
        self.generators.insert(device, digest);
        Ok(())
    }

    /// Refuses when a generator was moved by something that was not recorded.
    pub fn check_generators(&mut self, frontend: &F, source: &str) -> Result<(), ReplayError> {
        for (&device, &known) in &self.generators {
            if frontend.generator(device)? != known {
                let refusal = Refusal::op(
                    "a random generator",
                    source,
                    format!(
                        "the {device} generator's state was set or advanced outside of recorded ops"
                    ),
                    "seed the generator outside the captured function; inside it, tell Rote when you save or restore its \
                     state (torch.get_rng_state and torch.set_rng_state in PyTorch)",
                );
                self.refusal.get_or_insert(refusal);
            }
        }
        Ok(())
    }

    /// Records an op that has run, as `describe` tells of it: what it tells may lie in the describer or elsewhere.
    pub fn op<'a>(
        &'a mut self,
        frontend: &F,
        describe: impl FnOnce(&'a mut F::Describer) -> Result<OpEvent<'a>, ReplayError>,
    ) -> Result<(), ReplayError> {
        if self.refusal.is_some() {
            return Ok(());
        }
        let event = describe(&mut self.describer)?;
        let seeded = event.seeded;
        match self.recorder.op(&event) {
            Ok(()) => self.contents.observe(&event, &mut self.floats),
            Err(refusal) => self.refusal = Some(refusal),
        }
        if seeded {
            settle(&mut self.generators, frontend)?;
        }
        Ok(())
    }

    /// The describer, for what only it knows.
    pub fn describer(&mut self) -> &mut F::Describer {
        &mut self.describer
    }

    /// Records that the step has waited with the handle of a collective, by its number; see [`Recorder::waited`].
    pub fn waited(&mut self, handle: i64, source: &str) {
        if self.refusal.is_some() {
            return;
        }
        if let Err(refusal) = self.recorder.waited(handle, source) {
            self.refusal = Some(refusal);
        }
    }

    /// What is known of the op that was recorded last.
    pub fn last_op(&self) -> &Recorder {
        &self.recorder
    }

    /// The step handles errors of the last op at `handler`, which a replay could not: it must be able to begin anew there,
    /// or the recording is refused.
    pub fn handled(&mut self, handler: &str) {
        let refusal = self.recorder.handled(handler);
        if !self.recorder.put_off_until_last(&refusal) {
            self.refuse(refusal);
        }
    }

    /// The gradient that a tensor had before the step was gone when the last op ran.
    pub fn gradient_gone(&mut self, path: &str) {
        self.recorder.gradient_gone(path);
    }

    /// How many local ops and waits are recorded.
    pub fn executed(&self) -> usize {
        self.recorder.executed()
    }

    /// Records a save or restore of generator state. Returns the slot.
    pub fn rng(
        &mut self,
        frontend: &F,
        action: RngAction,
        device: Device,
        slot: Option<u32>,
        source: &str,
    ) -> Result<u32, ReplayError> {
        let slot = self.recorder.rng(action, device, slot, source);
        settle(&mut self.generators, frontend)?;
        Ok(slot)
    }

    /// A global op begins.
    pub fn global_begin(&mut self, op: &str, inputs: &[u32], source: &str) {
        let inputs = self.specs_at(inputs);
        self.recorder.global_begin(op, &inputs, source);
    }

    /// Says all arguments of the innermost global op.
    pub fn global_args(&mut self, args: &str) {
        self.recorder.global_args(args.lines());
    }

    /// The innermost global op has run.
    pub fn global_end(&mut self, outputs: &[u32]) {
        let outputs = self.specs_at(outputs);
        self.recorder.global_end(&outputs);
    }

    /// A redistribution begins.
    pub fn redistribute_begin(&mut self, from: u32, to: u32, source: &str) {
        let spec = |number: u32| self.specs.get(number as usize).cloned();
        if let (Some(from), Some(to)) = (spec(from), spec(to)) {
            self.recorder.redistribute_begin(&from, &to, source);
        }
    }

    /// The innermost redistribution has run.
    pub fn redistribute_end(&mut self) {
        self.recorder.redistribute_end();
    }

    /// Follows a float. Returns its number.
    pub fn float(&mut self, origin: Origin, value: f64) -> Result<u32, UnknownFloat> {
        let index = self.floats.add(origin, value)?;
        self.check_floats();
        Ok(index)
    }

    /// Follows the number in a tensor of one element, which the step reads. Returns the number of the float, and its
    /// value; `None` if it is not known how what is there came about.
    pub fn item(
        &mut self,
        frontend: &F,
        tensor: F::Ref<'_>,
    ) -> Result<Option<(u32, f64)>, ReplayError> {
        let Some(value) = frontend.number(tensor) else {
            return Ok(None);
        };
        let event = self.describer.tensor(tensor)?;
        let found = self.contents.read(&event, value, &mut self.floats);
        Ok(found.map(|index| (index, value)))
    }

    /// The step has decided by a comparison of two followed floats.
    pub fn compare_floats(
        &mut self,
        how: Comparison,
        a: u32,
        b: u32,
        holds: bool,
    ) -> Result<(), UnknownFloat> {
        self.floats.compare(how, a, b, holds)?;
        self.check_floats();
        Ok(())
    }

    /// Refuses the recording if the step has looked at a number in a tensor in a way that no replay can repeat.
    fn check_floats(&mut self) {
        if self.floats.pins_a_tensor() {
            self.refuse(Refusal::step(
                "uses a number that it has read from a tensor for more than arithmetic and comparisons",
                "only compute with the number (+ - * / **) and compare it, or return the tensor and read it outside the \
                 captured function",
            ));
        }
    }

    /// Whether a hyperparameter is followed, and nothing pins it so far.
    pub fn is_loose(&self, path: &str) -> bool {
        self.floats.is_loose(path)
    }

    /// A followed float was compared or converted.
    pub fn pin_float(&mut self, index: u32) -> Result<(), UnknownFloat> {
        self.floats.pin(index)?;
        self.check_floats();
        Ok(())
    }

    /// The process groups that recorded collectives use.
    pub fn group_names(&self) -> Vec<String> {
        self.recorder.group_names()
    }

    /// Describes a process group.
    pub fn describe_group(&mut self, name: &str, ranks: &[i64], label: &str) {
        self.recorder.describe_group(name, ranks, label);
    }

    /// Names a tensor of the result.
    pub fn output(
        &mut self,
        path: &str,
        local: F::Ref<'_>,
        spec: Option<u32>,
        requires_grad: bool,
    ) -> Result<(), ReplayError> {
        let spec = self.spec_at(spec)?;
        let event = self.describer.tensor(local)?;
        if let Err(refusal) = self
            .recorder
            .output(path, &event, spec.as_ref(), requires_grad)
        {
            self.refuse(refusal);
        }
        Ok(())
    }

    /// Says what the step left in a `.grad`: a local tensor, or `None`.
    pub fn grad(
        &mut self,
        path: &str,
        local: Option<F::Ref<'_>>,
        spec: Option<u32>,
    ) -> Result<(), ReplayError> {
        let spec = self.spec_at(spec)?;
        let event = match local {
            Some(local) => Some(self.describer.tensor(local)?),
            None => None,
        };
        let gradient = event.as_ref().map(|event| (event, spec.as_ref()));
        if let Err(refusal) = self.recorder.grad(path, gradient) {
            self.refuse(refusal);
        }
        Ok(())
    }

    /// What the step made, did not return, and something still holds.
    pub fn survivors(&self) -> Vec<String> {
        let mut alive: Vec<String> = self
            .recorder
            .made()
            .into_iter()
            .filter(|(storage, _)| self.describer.is_alive(*storage))
            .map(|(_, maker)| maker)
            .collect();
        alive.sort();
        alive
    }

    /// How many collectives the step has not waited for.
    pub fn unwaited(&self) -> usize {
        self.recorder.unwaited()
    }

    /// Refuses a step that uses the memory of a collective without having waited for the collective. `waits`: the
    /// framework waits at the first use, but for collectives that the step calls by hand.
    pub fn refuse_race(&mut self, waits: bool) {
        if let Err(refusal) = self.recorder.settle() {
            self.refuse(refusal);
        }
        if let Some(refusal) = self.recorder.race(waits) {
            self.refuse(refusal);
        }
    }

    /// Refuses a step that writes what a plan cannot put off ahead of a value that it reads on the host.
    pub fn refuse_late_checks(&mut self) {
        if let Some(refusal) = self.recorder.late_check() {
            self.refuse(refusal);
        }
    }

    /// The refusal of a step that leaves something to later steps where a replay leaves nothing, at every call.
    pub fn leaves_usage(&self) -> Option<Refusal> {
        self.recorder.leaves_usage()
    }

    /// All guards, as text, facts included.
    pub fn guard_texts(&self) -> Vec<GuardText> {
        let facts = self
            .facts
            .entries
            .iter()
            .filter(|entry| !entry.text.is_empty())
            .map(|entry| GuardText {
                kind: entry.kind,
                subject: entry.subject.clone(),
                expected: entry.text.clone(),
                hyperparameter: entry.hyperparameter,
            });
        self.guards.iter().cloned().chain(facts).collect()
    }

    /// Ends the recording. `result` is the structure of the result as JSON.
    pub fn into_trace(self, result: &str) -> (Trace, Parts<F>) {
        let guards = self.guard_texts();
        let (plan, sources) = self.recorder.finish(result);
        let places = Places::of::<F>(&plan, &self.named);
        (
            Trace {
                plan,
                sources,
                floats: self.floats,
            },
            Parts {
                facts: self.facts,
                named: self.named,
                guards,
                call: self.call,
                leaves: self.leaves,
                places,
            },
        )
    }

    /// What a stored plan needs to be bound without a recording.
    pub fn into_parts(self) -> Parts<F> {
        self.into_trace("").1
    }
}

/// Notes where generators stand now.
fn settle<F: Frontend>(
    generators: &mut HashMap<Device, u64>,
    frontend: &F,
) -> Result<(), ReplayError> {
    for (&device, known) in generators {
        *known = frontend.generator(device)?;
    }
    Ok(())
}

/// What a recording knows besides the plan.
#[derive(Debug)]
pub struct Parts<F: Frontend> {
    /// Facts about objects that outlive the call.
    pub facts: NamedFacts<F>,
    /// Tensors that have a name.
    pub named: Vec<Named<TensorOf<F>>>,
    /// Guards as text.
    pub guards: Vec<GuardText>,
    /// Facts of the call.
    pub call: Rc<CallFacts<F::Held>>,
    /// Names of the leaves of the arguments.
    pub leaves: Vec<String>,
    /// Where arguments must lie in their storages.
    pub places: Places,
}

impl<F: Frontend> Parts<F> {
    /// Whether the call that was handled last looks as this one, and all facts hold.
    pub(crate) fn hold(&mut self, frontend: &F) -> Result<bool, ReplayError> {
        Ok(frontend.difference(&self.call)?.is_none() && self.difference(frontend, &[])?.is_none())
    }

    /// The first fact that does not hold for a call whose words do; `free`
    /// hyperparameters may change.
    pub(crate) fn difference(
        &mut self,
        frontend: &F,
        free: &[String],
    ) -> Result<Option<String>, ReplayError> {
        Ok(match self.facts.difference(frontend, free)? {
            None => self.places.difference(frontend)?.map(str::to_owned),
            found => found,
        })
    }
}

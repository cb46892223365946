//! A captured step beside its twin, which runs every call eagerly on a model of its own: whatever the session does, both
//! must return the same and leave the same, bit for bit.

use std::cell::{Cell, RefCell};
use std::path::Path;
use std::rc::Rc;

use rote::facts::NewFact;
use rote::passes::Selection;
use rote::plans::{BindingKind, Fingerprint, GuardKind, NONE};
use rote::recording::NewTensor;
use rote::replay::Left;
use rote::tracer::scalars::Origin;
use rote::{Config, Next, Outcome, Session, SessionError};

use super::eager::Eager;
use super::facts::Fact;
use super::fake::{Machine, Tensor};
use super::ranks::Rank;
use super::{Argument, CPU, Leaf, Plain};

/// What a step can reach besides its arguments.
#[derive(Clone, Debug)]
pub struct Model {
    pub weight: Rc<RefCell<Tensor>>,
    /// A hyperparameter.
    pub rate: Rc<Cell<f64>>,
    /// Values of the host.
    pub scale: Rc<Cell<f64>>,
    pub note: Rc<RefCell<Rc<str>>>,
    /// What no fact tells of.
    pub unseen: Rc<Cell<u32>>,
    pub kept: Rc<RefCell<Vec<Tensor>>>,
}

impl Model {
    fn new() -> Self {
        let weight = (0..16).map(|i| (i % 5) as f32 / 4.0 - 0.5).collect();
        Model {
            weight: Rc::new(RefCell::new(Tensor::new(weight, &[4, 4]))),
            rate: Rc::new(Cell::new(0.125)),
            scale: Rc::new(Cell::new(3.0)),
            note: Rc::new(RefCell::new(Rc::from("as it was"))),
            unseen: Rc::default(),
            kept: Rc::default(),
        }
    }

    pub fn weight(&self) -> Tensor {
        self.weight.borrow().clone()
    }

    /// The bits of the weight and its gradient.
    fn bits(&self) -> (Vec<u32>, Option<Vec<u32>>) {
        let weight = self.weight();
        let gradient = weight.grad.borrow();
        (bits(&weight), gradient.as_ref().map(bits))
    }

    /// The facts of a recording: how each is called, what it is, and its text.
    fn facts(&self) -> [(NewFact<'static>, Fact, String); 5] {
        let host = |subject| NewFact {
            kind: GuardKind::Host,
            subject,
            text: "",
            hyperparameter: subject == "optimizer.rate",
            gradient: false,
            names: false,
            parts: &[],
        };
        let state = |subject| NewFact {
            kind: GuardKind::State,
            gradient: subject == "model.weight.grad",
            ..host(subject)
        };
        let shape = format!("f32{:?}", self.weight.borrow().shape);
        let (rate, scale) = (self.rate.get().to_string(), self.scale.get().to_string());
        let gradient = self.weight.borrow().grad.borrow().is_some().to_string();
        let note = self.note.borrow().to_string();
        [
            (
                state("model.weight"),
                Fact::Tensor(self.weight.clone()),
                shape,
            ),
            (
                state("model.weight.grad"),
                Fact::Grad(self.weight.clone()),
                gradient,
            ),
            (host("optimizer.rate"), Fact::Float(self.rate.clone()), rate),
            (host("config.scale"), Fact::Float(self.scale.clone()), scale),
            (host("config.note"), Fact::Text(self.note.clone()), note),
        ]
    }
}

fn bits(tensor: &Tensor) -> Vec<u32> {
    tensor.elements().into_iter().map(f32::to_bits).collect()
}

/// The bits of the arguments that are tensors.
fn elements(arguments: &[Argument]) -> Vec<Vec<u32>> {
    let tensors = arguments.iter().filter_map(|argument| match argument {
        Argument::Tensor(tensor) => Some(bits(tensor)),
        _ => None,
    });
    tensors.collect()
}

/// A step: its ops, on a model and the arguments of a call.
pub type Step = fn(&mut Eager<'_>, &Model, &[Argument]) -> Result<Vec<Tensor>, String>;

/// How a call was handled.
#[derive(Clone, Debug, PartialEq)]
pub enum How {
    Replayed(u32),
    Recorded(Outcome),
    /// A plan of the store was bound in place of a recording, and replayed.
    Trusted,
    Eager,
    /// The step failed: in a replay, in a recording, or eagerly.
    Failed(String),
}

/// A captured step.
#[derive(Debug)]
pub struct Captured {
    pub session: Session<Plain>,
    pub model: Model,
    pub machine: Rc<Machine>,
    pub twin: Model,
    pub twin_machine: Rc<Machine>,
    /// Whether plans of the store are trusted.
    pub trusting: bool,
    /// How many recordings have taken over the guards of a candidate.
    pub resumed: usize,
    /// Whether something has looked at the hyperparameter before the step runs.
    pub looked_at: bool,
    /// Whether the caller writes to what calls return.
    pub scribbling: bool,
    /// What earlier calls have returned, and its bits: nothing that follows changes them.
    returned: Vec<(Tensor, Vec<u32>)>,
    /// Whether something sees each op.
    pub watched: Rc<Cell<bool>>,
    /// Whether arguments cannot be read.
    pub unreadable: Rc<Cell<bool>>,
    step: Step,
}

/// What a session is made of, in tests: a plan store here, no pass, and one rank of two.
pub fn config(plans: &Path) -> Config {
    Config {
        function: "train.py:step".to_owned(),
        fingerprint: Fingerprint {
            rote: "0.1.0".to_owned(),
            framework: "plain 1".to_owned(),
            world_size: 2,
            rank: 0,
        },
        plans: plans.to_owned(),
        max_variants: 4,
        passes: Selection::NONE,
    }
}

impl Captured {
    pub fn new(step: Step, config: Config) -> Self {
        Captured::on_rank(None, step, config)
    }

    pub fn on_rank(rank: Option<Rank>, step: Step, config: Config) -> Self {
        let machine = || {
            let network = rank.clone().map(|rank| Box::new(rank) as _);
            Rc::new(Machine {
                network,
                ..Machine::default()
            })
        };
        let (machine, twin_machine) = (machine(), machine());
        let plain = Plain::new(machine.clone(), rank);
        let (watched, unreadable) = (plain.watched.clone(), plain.unreadable.clone());
        Captured {
            session: Session::new(config, plain).expect("a session"),
            model: Model::new(),
            machine,
            twin: Model::new(),
            twin_machine,
            trusting: false,
            resumed: 0,
            looked_at: false,
            scribbling: false,
            returned: Vec::new(),
            watched,
            unreadable,
            step,
        }
    }

    /// The same step and models in a session of their own, as of another process.
    #[must_use]
    pub fn in_a_later_session(self, config: Config) -> Self {
        let plain = Plain::new(self.machine.clone(), None);
        Captured {
            watched: plain.watched.clone(),
            unreadable: plain.unreadable.clone(),
            session: Session::new(config, plain).expect("a session"),
            ..self
        }
    }

    /// Changes the model and its twin.
    pub fn change(&self, change: impl Fn(&Model)) {
        change(&self.model);
        change(&self.twin);
    }

    /// Calls the step as often as it takes until a plan is kept.
    pub fn learn(&mut self, arguments: impl Fn() -> Vec<Argument>) -> u32 {
        for _ in 0..3 {
            if let How::Recorded(Outcome::Kept(id)) = self.call(&arguments) {
                return id;
            }
        }
        panic!("nothing is kept: {:?}", self.session.stats());
    }

    /// Lets an op fail once, of the captured step and of its twin.
    pub fn fail(&self, op: &'static str) {
        self.machine.failing.borrow_mut().push(op);
        self.twin_machine.failing.borrow_mut().push(op);
    }

    /// Calls the step and its twin, each with arguments of its own, and compares what they return and leave.
    pub fn call(&mut self, arguments: impl Fn() -> Vec<Argument>) -> How {
        self.call_on(|_| arguments())
    }

    /// The same, with arguments that may be made of the model.
    pub fn call_on(&mut self, arguments: impl Fn(&Model) -> Vec<Argument>) -> How {
        let ours: Rc<[Argument]> = arguments(&self.model).into();
        let theirs = arguments(&self.twin);
        let (how, returned) = self.handle(&ours);
        let mut twin = Eager::new(&self.twin_machine);
        let expected = match (self.step)(&mut twin, &self.twin, &theirs) {
            Ok(expected) => expected,
            Err(error) => {
                let same = matches!(&how, How::Failed(ours) if ours.contains(&error));
                assert!(same, "eager fails, {error}; the step is {how:?}");
                Vec::new()
            }
        };
        let all = |tensors: &[Tensor]| tensors.iter().map(bits).collect::<Vec<_>>();
        assert_eq!(all(&returned), all(&expected), "{how:?}");
        assert_eq!(elements(&ours), elements(&theirs), "arguments: {how:?}");
        for (earlier, were) in &self.returned {
            assert_eq!(bits(earlier), *were, "returned earlier: {how:?}");
        }
        for tensor in returned.iter().chain(&expected) {
            if self.scribbling {
                tensor.write(&vec![-0.75; tensor.elements().len()]);
            }
        }
        let returned = returned
            .into_iter()
            .map(|tensor| (tensor.clone(), bits(&tensor)));
        self.returned.extend(returned);
        assert_eq!(
            self.model.bits(),
            self.twin.bits(),
            "weight, gradient: {how:?}"
        );
        let generator = self.twin_machine.generator.get();
        assert_eq!(self.machine.generator.get(), generator, "{how:?}");
        how
    }

    fn handle(&mut self, arguments: &Rc<[Argument]>) -> (How, Vec<Tensor>) {
        match self.session.call(arguments.clone()) {
            Ok(Next::Record) => self.record(arguments),
            next => self.follow(next, arguments),
        }
    }

    /// Does what the session says of a call that is not recorded.
    fn follow(
        &mut self,
        next: Result<Next<Vec<Tensor>>, SessionError>,
        arguments: &[Argument],
    ) -> (How, Vec<Tensor>) {
        match next {
            Ok(Next::Replayed(id, results)) => (How::Replayed(id), self.deliver(id, results)),
            Ok(_) => match (self.step)(&mut Eager::new(&self.machine), &self.model, arguments) {
                Ok(results) => (How::Eager, results),
                Err(error) => (How::Failed(error), Vec::new()),
            },
            Err(error) => {
                self.leave();
                (How::Failed(error.to_string()), Vec::new())
            }
        }
    }

    /// Puts gradients where a step does, and returns the outputs.
    fn deliver(&mut self, id: u32, mut results: Vec<Tensor>) -> Vec<Tensor> {
        let variant = self
            .session
            .variant(id)
            .expect("the variant that was replayed");
        let plan = variant.file.plan();
        let mut gradients = results.split_off(plan.outputs.len()).into_iter();
        for gradient in plan.grads.iter() {
            let new = (gradient.value != NONE).then(|| gradients.next().expect("a gradient"));
            self.model.weight().grad.replace(new);
        }
        results
    }

    /// Leaves of gradients what eager does, after a replay that failed.
    fn leave(&mut self) {
        for left in self
            .session
            .take_left()
            .map(|(_, left)| left)
            .unwrap_or_default()
        {
            match left {
                Left::Made(gradient) => _ = self.model.weight().grad.replace(Some(gradient)),
                Left::Nothing => _ = self.model.weight().grad.take(),
                Left::AsItWas => {}
            }
        }
    }

    fn record(&mut self, arguments: &Rc<[Argument]>) -> (How, Vec<Tensor>) {
        self.describe(arguments);
        if self.trusting && self.session.trust().expect("the store answers") {
            let next = self.session.replay_last();
            return match self.follow(next, arguments) {
                (How::Replayed(_), results) => (How::Trusted, results),
                other => other,
            };
        }
        let before = self.model.weight().grad.borrow().clone();
        let mut eager = Eager::recorded(&self.machine, &mut self.session);
        let results = match (self.step)(&mut eager, &self.model, arguments) {
            Ok(results) => results,
            Err(error) => {
                self.session.abort();
                return (How::Failed(error), Vec::new());
            }
        };
        let (frontend, recording) = self.session.active().expect("a recording");
        let count = frontend.rank.as_ref().map_or(2, |rank| rank.ranks);
        let ranks: Vec<i64> = (0..count.into()).collect();
        for group in recording.group_names() {
            recording.describe_group(&group, &ranks, "all");
        }
        for (at, result) in results.iter().enumerate() {
            let output =
                recording.output(&format!("result[{at}]"), Leaf::Tensor(result), None, false);
            output.expect("a result is described");
        }
        let weight = self.model.weight();
        let after = weight.grad.borrow();
        let same = match (&before, &*after) {
            (Some(before), Some(after)) => Rc::ptr_eq(&before.memory, &after.memory),
            (before, after) => before.is_none() && after.is_none(),
        };
        if !same {
            let gradient = recording.grad("model.weight", after.as_ref().map(Leaf::Tensor), None);
            gradient.expect("a gradient is described");
        }
        drop(before);
        let nodes: Vec<String> = (0..results.len())
            .map(|at| format!("{{\"t\":{at}}}"))
            .collect();
        let structure = format!("{{\"list\":[{}]}}", nodes.join(","));
        let outcome = self.session.finish(&structure).expect("a recording ends");
        (How::Recorded(outcome), results)
    }

    /// Names everything that the step may use, and what is guarded.
    fn describe(&mut self, arguments: &Rc<[Argument]>) {
        self.session.begin().expect("a recording begins");
        let names: Vec<String> = (0..arguments.len())
            .map(|at| format!("args[{at}]"))
            .collect();
        for (name, argument) in names.iter().zip(arguments.iter()) {
            let named = self.session.name_leaf(name, Some(argument.leaf()));
            named.expect("a recording is in progress");
        }
        let candidate = self.session.newest_candidate();
        let resumed = candidate
            .is_some_and(|number| self.session.resume(number).expect("guards are checked"));
        self.resumed += usize::from(resumed);
        let (frontend, recording) = self.session.active().expect("a recording");
        recording
            .watch_generator(frontend, CPU)
            .expect("a generator");
        let tensor = |kind, path, leaf| NewTensor {
            kind,
            path,
            spec: None,
            leaf,
        };
        for ((at, name), argument) in (0..).zip(&names).zip(arguments.iter()) {
            let text = match argument {
                Argument::Tensor(tensor) => format!("f32{:?}", tensor.shape),
                Argument::Number(number) => number.to_string(),
                Argument::Text(text) => text.to_string(),
            };
            if !resumed {
                recording.guard(GuardKind::Argument, name, &text);
            }
            if let Argument::Tensor(_) = argument {
                let (new, leaf) = (tensor(BindingKind::Arg, name, Some(at)), argument.leaf());
                let named = recording.name_tensor(frontend, new, leaf, leaf);
                named.expect("an argument is named");
            }
        }
        let weight = self.model.weight();
        let (new, leaf) = (
            tensor(BindingKind::State, "model.weight", None),
            Leaf::Tensor(&weight),
        );
        let named = recording.name_tensor(frontend, new, leaf, leaf);
        named.expect("the weight is named");
        if let Some(gradient) = &*weight.grad.borrow() {
            let new = tensor(BindingKind::Grad, "model.weight", None);
            let named = recording.name_tensor(frontend, new, leaf, Leaf::Tensor(gradient));
            named.expect("the gradient is named");
        }
        let facts = self.model.facts().into_iter().filter(|_| !resumed);
        for (new, fact, text) in facts {
            let new = NewFact {
                text: &text,
                parts: fact.parts(),
                ..new
            };
            let added = recording.facts.add(new, |facts| Ok(facts.add(fact)));
            added.expect("a fact is added");
        }
        let read = Origin::Read("optimizer.rate".to_owned());
        let followed = recording.float(read, self.model.rate.get());
        let followed = followed.expect("a hyperparameter is followed");
        if self.looked_at {
            let pinned = recording.pin_float(followed);
            pinned.expect("it is followed");
        }
        self.session.ready().expect("facts are read");
    }
}

/// An argument of these elements.
pub fn rows(rows: i64, first: f32) -> Argument {
    let elements = (0..rows * 4).map(|i| first + (i % 7) as f32 / 8.0);
    Argument::Tensor(Tensor::new(elements.collect(), &[rows, 4]))
}

/// The tensor that an argument is.
pub fn tensor(arguments: &[Argument], at: usize) -> Result<&Tensor, String> {
    match arguments.get(at) {
        Some(Argument::Tensor(tensor)) => Ok(tensor),
        other => Err(format!("expected a tensor, got {other:?}")),
    }
}

/// A matrix with its sides exchanged: a view, which is no op.
pub fn transposed(matrix: &Tensor) -> Tensor {
    let reversed = |dims: &[i64]| dims.iter().rev().copied().collect::<Vec<_>>();
    matrix.view(&reversed(&matrix.shape), &reversed(&matrix.strides), 0)
}

/// A training step: returns `x @ weight` times what a host value says, leaves a gradient and moves the weight along it.
pub fn train(
    eager: &mut Eager<'_>,
    model: &Model,
    arguments: &[Argument],
) -> Result<Vec<Tensor>, String> {
    let (x, weight) = (tensor(arguments, 0)?, model.weight());
    weight.grad.take();
    let y = eager.op("aten::mm", &[x, &weight], &[])?;
    let gradient = eager.op("aten::mm", &[&transposed(x), &y], &[])?;
    weight.grad.replace(Some(gradient.clone()));
    let rate = eager.read("optimizer.rate", model.rate.get())?;
    let along = eager.negated(rate)?;
    eager.op("aten::add_", &[&weight, &gradient], &[along.value])?;
    Ok(vec![eager.op(
        "aten::add",
        &[&y, &y],
        &[model.scale.get()],
    )?])
}

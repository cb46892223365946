//! Ops as a step calls them: each runs, and is told to the recording if there is one.

use rote::Session;
use rote::plans::BindingKind;
use rote::recording::ActiveRecording;
use rote::tracer::scalars::Origin;
use rote::tracer::{ArgEvent, Argument, OpEvent};

use super::fake::{Machine, Tensor};
use super::{Leaf, Plain, WORLD};

/// Runs the ops of one step.
#[derive(Debug)]
pub struct Eager<'a> {
    machine: &'a Machine,
    session: Option<&'a mut Session<Plain>>,
    /// Tensors that had a gradient before the step, by their paths.
    had_gradients: Vec<(String, Tensor)>,
}

/// A float of the host, which may follow from hyperparameters.
#[derive(Clone, Copy, Debug)]
pub struct Followed {
    pub value: f64,
    float: Option<u32>,
}

/// A collective that was started.
#[derive(Debug)]
pub struct Started {
    pub output: Tensor,
    sum: Vec<f32>,
}

impl<'a> Eager<'a> {
    /// Ops that nobody records.
    pub fn new(machine: &'a Machine) -> Self {
        Eager {
            machine,
            session: None,
            had_gradients: Vec::new(),
        }
    }

    /// Ops that the session's recording is told.
    pub fn recorded(machine: &'a Machine, session: &'a mut Session<Plain>) -> Self {
        let named = session
            .active()
            .into_iter()
            .flat_map(|(_, recording)| &recording.named);
        let gradients = named.filter(|named| named.kind == BindingKind::Grad);
        let had_gradients = gradients
            .filter_map(|named| Some((named.path.clone(), named.tensor.clone()?)))
            .collect();
        Eager {
            machine,
            session: Some(session),
            had_gradients,
        }
    }

    fn recording(&mut self) -> Option<(&Plain, &mut ActiveRecording<Plain>)> {
        self.session.as_mut()?.active()
    }

    /// Runs an op: what it has made, or the tensor that it has written.
    pub fn op(
        &mut self,
        name: &str,
        tensors: &[&Tensor],
        numbers: &[f64],
    ) -> Result<Tensor, String> {
        let given: Vec<Tensor> = tensors.iter().map(|&tensor| tensor.clone()).collect();
        let made = self.machine.run(name, &given, numbers)?;
        let out = made.unwrap_or_else(|| given[0].clone());
        let numbers = numbers.iter().map(|number| ArgEvent::Float(*number));
        self.tell(name, tensors, numbers.collect(), &out)?;
        Ok(out)
    }

    fn tell(
        &mut self,
        name: &str,
        tensors: &[&Tensor],
        others: Vec<ArgEvent<'_>>,
        out: &Tensor,
    ) -> Result<(), String> {
        let gone = self.had_gradients.iter();
        let gone = gone.filter(|(_, tensor)| tensor.grad.borrow().is_none());
        let gone: Vec<String> = gone.map(|(path, _)| path.clone()).collect();
        let Some((frontend, recording)) = self.recording() else {
            return Ok(());
        };
        let told = recording.op(frontend, |storages| {
            let args = tensors
                .iter()
                .map(|tensor| ArgEvent::Tensor(storages.meet(tensor)));
            let args = args.chain(others).enumerate().map(|(at, value)| Argument {
                value,
                written: at == 0 && name.ends_with('_'),
            });
            Ok(OpEvent {
                name,
                overload: "",
                args: args.collect(),
                outs: vec![ArgEvent::Tensor(storages.meet(out))],
                seeded: name.contains("rand"),
                data_dependent: false,
                inplace_view: false,
                hidden: false,
                internal: false,
                grad: false,
                source: "",
            })
        });
        gone.iter().for_each(|path| recording.gradient_gone(path));
        told.map_err(|error| error.to_string())
    }

    /// Asks where a tensor lies in its storage.
    pub fn place(&mut self, tensor: &Tensor) -> Result<i64, String> {
        if let Some((_, recording)) = self.recording() {
            let asked = recording.anchor(Leaf::Tensor(tensor));
            asked.map_err(|error| error.to_string())?;
        }
        Ok(tensor.offset)
    }

    /// Moves the generator by what is no op.
    pub fn draw_unseen(&self) {
        let moved = self.machine.generator.get() + 1;
        self.machine.generator.set(moved);
    }

    /// Starts to sum a tensor over all ranks.
    pub fn all_reduce(&mut self, sent: &Tensor) -> Result<Started, String> {
        let sum = self.machine.sum(sent)?;
        let output = Tensor::new(vec![f32::NAN; sum.len()], &sent.shape);
        let group = WORLD.to_str().map_err(|error| error.to_string())?;
        let others = vec![ArgEvent::Str("sum"), ArgEvent::Str(group)];
        self.tell("_c10d_functional::all_reduce", &[sent], others, &output)?;
        Ok(Started { output, sum })
    }

    /// Waits for such a sum.
    pub fn wait(&mut self, started: Started) -> Result<Tensor, String> {
        started.output.write(&started.sum);
        let output = started.output;
        self.tell(
            "_c10d_functional::wait_tensor",
            &[&output],
            Vec::new(),
            &output,
        )?;
        Ok(output)
    }

    fn follow(&mut self, origin: Origin, value: f64) -> Result<Followed, String> {
        let float = match self.recording() {
            Some((_, recording)) => {
                let float = recording.float(origin, value);
                Some(float.map_err(|error| error.to_string())?)
            }
            None => None,
        };
        Ok(Followed { value, float })
    }

    /// Reads a hyperparameter.
    pub fn read(&mut self, path: &str, value: f64) -> Result<Followed, String> {
        self.follow(Origin::Read(path.to_owned()), value)
    }

    pub fn negated(&mut self, of: Followed) -> Result<Followed, String> {
        match of.float {
            Some(float) => self.follow(Origin::Neg(float), -of.value),
            None => Ok(Followed {
                value: -of.value,
                float: None,
            }),
        }
    }

    /// The float itself, for what is no arithmetic.
    pub fn looked_at(&mut self, at: Followed) -> Result<f64, String> {
        if let (Some((_, recording)), Some(float)) = (self.recording(), at.float) {
            recording
                .pin_float(float)
                .map_err(|error| error.to_string())?;
        }
        Ok(at.value)
    }
}

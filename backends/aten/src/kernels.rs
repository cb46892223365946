//! PyTorch's kernels for the truth table of sharding rules.

use rote_plans::DType;
use rote_propagation::TensorMeta;
use rote_validation::{HostTensor, Kernels, Ran, Value};

use crate::eager::{CallArg, HostData, call};

/// PyTorch's kernels on the CPU, through the bridge, which must be loaded.
#[derive(Debug)]
pub struct Aten;

impl Kernels for Aten {
    fn run(&mut self, op: &str, args: &[Value<'_>]) -> Result<Ran, String> {
        let mut held: Vec<HostData> = Vec::new();
        for arg in args {
            match arg {
                Value::Tensor(tensor) => held.push(data(tensor)?),
                Value::Tensors(list) => {
                    for tensor in list.iter().flatten() {
                        held.push(data(tensor)?);
                    }
                }
                _ => {}
            }
        }
        let mut rest = held.iter();
        let given: Vec<CallArg<'_>> = (args.iter())
            .map(|arg| match arg {
                Value::None => CallArg::None,
                Value::Tensor(_) => rest.next().map_or(CallArg::None, CallArg::Tensor),
                Value::Tensors(list) => {
                    let entries = list.iter().map(|t| t.and_then(|_| rest.next()));
                    CallArg::Tensors(entries.collect())
                }
                Value::Bool(value) => CallArg::Bool(*value),
                Value::Int(value) => CallArg::Int(*value),
                Value::Float(value) => CallArg::Float(*value),
                Value::Ints(values) => CallArg::Ints(values),
                Value::Floats(values) => CallArg::Floats(values),
                Value::Text(text) => CallArg::Text(text),
                Value::DType(dtype) => CallArg::DType(dtype.0),
            })
            .collect();
        let (name, overload) = op.split_once('.').unwrap_or((op, ""));
        let overload = if overload == "default" { "" } else { overload };
        let ran = call(name, overload, &given).map_err(|error| first_line(&error.to_string()))?;
        let outputs = ran.results.into_iter().map(|r| r.map(host).transpose());
        Ok(Ran {
            outputs: outputs.collect::<Result<_, _>>()?,
            random: ran.seeded,
        })
    }
}

fn first_line(text: &str) -> String {
    text.lines().next().unwrap_or_default().to_owned()
}

fn data(tensor: &HostTensor) -> Result<HostData, String> {
    let shape = &tensor.meta.shape;
    Ok(HostData {
        dtype: tensor.meta.dtype.0,
        shape: shape
            .iter()
            .map(|s| i64::try_from(*s).unwrap_or(i64::MAX))
            .collect(),
        bytes: tensor
            .to_bytes()
            .ok_or_else(|| format!("no arithmetic for {}", tensor.meta))?,
    })
}

fn host(data: HostData) -> Result<HostTensor, String> {
    let meta = TensorMeta {
        dtype: DType(data.dtype),
        shape: data.shape.iter().map(|s| s.unsigned_abs()).collect(),
    };
    let shown = meta.to_string();
    HostTensor::from_bytes(meta, &data.bytes).ok_or_else(|| format!("no arithmetic for {shown}"))
}

//! Copies and factories: in the memory format that is asked for, which may be
//! that of a tensor (`aten/src/ATen/native/TensorFactories.cpp`).

use super::super::rule::Arg;
use super::{Call, dense};

#[derive(Clone, Copy, Debug)]
pub(super) enum Kind {
    /// A copy of the first tensor as it lies, or in the memory format at a
    /// position.
    Copy(usize),
    /// The same, where a step in between may give other strides to dims of size 1.
    Converted(usize),
    /// A new tensor in the order of the first one's dims, or in the memory format
    /// at a position.
    Like(usize),
    /// Contiguous, or in the memory format at a position.
    New(usize),
    /// The strides at a position.
    Given(usize),
    /// The first tensor if it is contiguous already, else a contiguous copy; in
    /// the memory format at a position.
    Contiguous(usize),
}

pub(super) const OPS: &[(&str, Kind)] = &[
    ("aten::clone", Kind::Copy(1)),
    ("aten::empty_like", Kind::Like(5)),
    ("aten::zeros_like", Kind::Like(5)),
    ("aten::ones_like", Kind::Like(5)),
    ("aten::full_like", Kind::Like(6)),
    ("aten::rand_like", Kind::Like(5)),
    ("aten::randn_like", Kind::Like(5)),
    ("aten::randint_like", Kind::Like(6)),
    ("aten::randint_like.low_dtype", Kind::Like(7)),
    ("aten::_to_copy", Kind::Converted(6)),
    ("aten::empty.memory_format", Kind::New(5)),
    ("aten::new_empty_strided", Kind::Given(2)),
    ("aten::contiguous", Kind::Contiguous(1)),
];

/// `torch.memory_format`, of those that have strides of their own.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Format {
    Contiguous,
    Preserve,
    /// For tensors of this many dims.
    ChannelsLast(usize),
}

impl Format {
    /// The format at a position.
    fn at(call: &Call<'_>, position: usize, default: Format) -> Option<Format> {
        match call.query.args.get(position) {
            None | Some(Arg::None) => Some(default),
            Some(Arg::Text(name)) => match name.as_str() {
                "contiguous_format" => Some(Format::Contiguous),
                "preserve_format" => Some(Format::Preserve),
                "channels_last" => Some(Format::ChannelsLast(4)),
                "channels_last_3d" => Some(Format::ChannelsLast(5)),
                _ => None,
            },
            _ => None,
        }
    }

    /// The strides of a new tensor. Without elements, those of channels last are
    /// not stated.
    fn strides(self, shape: &[u64]) -> Option<Vec<i64>> {
        match self {
            Format::Contiguous => Some(dense::contiguous(shape)),
            Format::ChannelsLast(ndim) if shape.len() == ndim && !shape.contains(&0) => {
                Some(dense::channels_last(shape))
            }
            _ => None,
        }
    }
}

pub(super) fn strides(kind: Kind, call: &Call<'_>, output: usize) -> Option<Vec<i64>> {
    let shape = call.shape(output)?;
    match kind {
        Kind::Copy(at) | Kind::Converted(at) | Kind::Like(at) => {
            let input = call.tensor(0)?;
            let copy = || dense::like(input.shape, input.strides);
            let sorted = || dense::empty_like(input.shape, input.strides);
            match (Format::at(call, at, Format::Preserve)?, kind) {
                (Format::Preserve, Kind::Copy(_)) => Some(copy()),
                (Format::Preserve, Kind::Converted(_)) => Some(copy()).filter(|c| *c == sorted()),
                (Format::Preserve, _) => Some(sorted()),
                (format, _) => format.strides(shape),
            }
        }
        Kind::New(at) => Format::at(call, at, Format::Contiguous)?.strides(shape),
        Kind::Given(at) => Some(call.query.list(at).ok()?.to_vec()),
        Kind::Contiguous(at) => {
            let input = call.tensor(0)?;
            let format = Format::at(call, at, Format::Contiguous)?;
            let fits = match format {
                Format::Contiguous => dense::is_contiguous(input.shape, input.strides),
                Format::ChannelsLast(n) => dense::is_channels_last(input.shape, input.strides, n),
                Format::Preserve => false,
            };
            match fits {
                true => Some(input.strides.to_vec()),
                false => format.strides(shape),
            }
        }
    }
}

//! Arguments that ops of PyTorch write, although their schemas do not say so.
//!
//! `tests/torch/test_op_tables.py` finds such ops by running all that PyTorch has
//! samples for.

use crate::event::{ArgEvent, OpEvent};

/// An op that writes arguments which its schema declares as read.
struct Undeclared {
    name: &'static str,
    /// Positions of the arguments that it writes.
    writes: [usize; 2],
    /// Position of the argument without which it writes nothing.
    if_true: Option<usize>,
}

const fn op(name: &'static str, writes: [usize; 2], if_true: Option<usize>) -> Undeclared {
    Undeclared {
        name,
        writes,
        if_true,
    }
}

/// The running statistics of batch norm; an allocation that only says on which device a barrier is. In inference mode,
/// composite ops are recorded as they are: the first three.
const UNDECLARED: &[Undeclared] = &[
    op("aten::batch_norm", [3, 4], Some(5)),
    op("aten::instance_norm", [3, 4], Some(5)),
    op("aten::_batch_norm_impl_index", [3, 4], Some(5)),
    op("aten::native_batch_norm", [3, 4], Some(5)),
    op("aten::cudnn_batch_norm", [3, 4], Some(5)),
    op("aten::miopen_batch_norm", [3, 4], Some(5)),
    op("aten::batch_norm_update_stats", [1, 2], None),
    op("aten::batch_norm_gather_stats", [3, 4], None),
    op("aten::batch_norm_gather_stats_with_counts", [3, 4], None),
    op("c10d::barrier", [0, 0], None),
];

/// The op with all that it writes marked as written, if its schema does not say all.
pub(super) fn marked<'a>(op: &OpEvent<'a>) -> Option<OpEvent<'a>> {
    let known = UNDECLARED.iter().find(|known| known.name == op.name)?;
    let writes = known.if_true.is_none_or(|at| {
        let flag = op.args.get(at).map(|arg| &arg.value);
        !matches!(flag, Some(ArgEvent::Bool(false)))
    });
    writes.then(|| {
        let mut op = op.clone();
        for at in known.writes {
            if let Some(arg) = op.args.get_mut(at) {
                arg.written = true;
            }
        }
        op
    })
}

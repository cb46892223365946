//! Facts about ops, by their names, that the judge needs.

/// Ops about NaN and infinities, of which one draw is given some.
#[rustfmt::skip]
pub(super) const SPECIAL: &[&str] = &[
    "isnan", "isinf", "isfinite", "isposinf", "isneginf", "isreal", "nan_to_num", "nansum",
    "signbit", "sign", "sgn",
];

/// Ops that treat zeros or equal numbers apart, which random floats are not.
#[rustfmt::skip]
pub(super) const ROUNDED: &[&str] = &[
    "heaviside", "xlogy", "special_xlog1py", "sign", "sgn", "eq", "ne", "ge", "gt", "le", "lt",
    "isclose", "equal", "isin", "logical_not", "logical_and", "logical_or", "logical_xor", "mode",
];

/// Ops whose results differ by less than any tolerance.
pub(super) const EXACT: &[&str] = &["nextafter"];

/// Parts of the names of ops whose kernels may reach out of bounds where shapes
/// do not fit.
const UNCHECKED: &[&str] = &[
    "backward",
    "batch_norm",
    "flash_attention",
    "fractional",
    "ldl_solve",
    "lu_solve",
    "lu_unpack",
    "nll_loss",
];

/// Whether the op's kernel can be run on any shapes.
pub(super) fn checks_shapes(op: &str) -> bool {
    !UNCHECKED.iter().any(|part| stem(op).contains(part))
}

/// Ops whose outputs have no defined values.
pub(super) fn unwritten(op: &str) -> bool {
    let name = op.rsplit("::").next().unwrap_or(op);
    name.starts_with("empty") || name.starts_with("new_empty")
}

/// The name of an op without namespace, overload and the mark of its in-place
/// form.
pub(super) fn stem(op: &str) -> &str {
    let name = op.rsplit("::").next().unwrap_or(op);
    let name = name.split('.').next().unwrap_or(name);
    name.strip_suffix('_').unwrap_or(name)
}

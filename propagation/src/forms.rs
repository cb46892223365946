//! Forms of an op: which functional op an in-place or `out=` name stands for.

/// Which form of an op a name stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// It makes new tensors, or views.
    Functional,
    /// It writes its first argument, a tensor or a list of tensors.
    InPlace,
    /// It writes its last arguments, one per output.
    Out,
    /// It does what the op does to every entry of lists.
    Each,
}

/// `out=` overloads whose names do not say which op they are a form of.
#[rustfmt::skip]
const OUT: &[(&str, &str)] = &[
    ("aten::_linalg_det.result", "aten::_linalg_det"),
    ("aten::_linalg_eigh.eigenvalues", "aten::_linalg_eigh"),
    ("aten::_linalg_slogdet.sign", "aten::_linalg_slogdet"),
    ("aten::_linalg_solve_ex.result", "aten::_linalg_solve_ex"),
    ("aten::_linalg_svd.U", "aten::_linalg_svd"),
    ("aten::all.all_out", "aten::all"),
    ("aten::all.out", "aten::all.dim"),
    ("aten::any.all_out", "aten::any"),
    ("aten::any.out", "aten::any.dim"),
    ("aten::div.out_mode", "aten::div.Tensor_mode"),
    ("aten::geqrf.a", "aten::geqrf"),
    ("aten::kthvalue.values", "aten::kthvalue"),
    ("aten::linalg_cholesky_ex.L", "aten::linalg_cholesky_ex"),
    ("aten::linalg_inv_ex.inverse", "aten::linalg_inv_ex"),
    ("aten::max.dim_max", "aten::max.dim"),
    ("aten::max.out", "aten::max.other"),
    ("aten::max.unary_out", "aten::max"),
    ("aten::mean.dtype_out", "aten::mean"),
    ("aten::mean.out", "aten::mean.dim"),
    ("aten::median.dim_values", "aten::median.dim"),
    ("aten::min.dim_min", "aten::min.dim"),
    ("aten::min.out", "aten::min.other"),
    ("aten::min.unary_out", "aten::min"),
    ("aten::mode.values", "aten::mode"),
    ("aten::nanmedian.dim_values", "aten::nanmedian.dim"),
    ("aten::prod.int_out", "aten::prod.dim_int"),
    ("aten::sort.values", "aten::sort"),
    ("aten::sort.values_stable", "aten::sort.stable"),
    ("aten::sum.IntList_out", "aten::sum.dim_IntList"),
    ("aten::topk.values", "aten::topk"),
    ("aten::triangular_solve.X", "aten::triangular_solve"),
    ("aten::xlogy.OutScalar_Other", "aten::xlogy.Scalar_Other"),
    ("aten::xlogy.OutScalar_Self", "aten::xlogy.Scalar_Self"),
    ("aten::xlogy.OutTensor", "aten::xlogy.Tensor"),
];

/// In-place ops whose names do not say so, or whose overloads are called
/// otherwise.
#[rustfmt::skip]
const IN_PLACE: &[(&str, &str)] = &[
    ("aten::float_power_.Scalar", "aten::float_power.Tensor_Scalar"),
    ("aten::float_power_.Tensor", "aten::float_power.Tensor_Tensor"),
    ("aten::ldexp_", "aten::ldexp.Tensor"),
    ("aten::pow_.Scalar", "aten::pow.Tensor_Scalar"),
    ("aten::pow_.Tensor", "aten::pow.Tensor_Tensor"),
    ("prims::copy_to", "aten::copy"),
];

/// Overloads that are called after what they write.
const WRITTEN: [&str; 2] = ["grad_input", "output"];

/// The form that a name says it is, whether or not there is an op of which it is
/// one; functional where it says nothing.
pub(super) fn form(op: &str) -> Form {
    let (name, overload) = op.split_once('.').unwrap_or((op, ""));
    let listed = |table: &[(&str, &str)]| table.iter().any(|row| row.0 == op);
    let trailing = (name.strip_suffix('_')).is_some_and(|n| !n.ends_with([':', '_']));
    let operator = name.contains("::__i") && name.ends_with("__");
    if overload == "out" || overload.ends_with("_out") || WRITTEN.contains(&overload) || listed(OUT)
    {
        Form::Out
    } else if trailing || operator || listed(IN_PLACE) {
        Form::InPlace
    } else {
        Form::Functional
    }
}

/// The functional ops that a name may be a form of, most exact first.
pub(super) fn bases(op: &str) -> Vec<(String, Form)> {
    let op = op.strip_suffix(".default").unwrap_or(op);
    let mut bases = vec![(op.to_owned(), Form::Functional)];
    for (table, form) in [(OUT, Form::Out), (IN_PLACE, Form::InPlace)] {
        if let Some((_, base)) = table.iter().find(|row| row.0 == op) {
            bases.push(((*base).to_owned(), form));
            return bases;
        }
    }
    let (name, overload) = op.split_once('.').unwrap_or((op, ""));
    let mut add = |name: &str, overload: &str, form| {
        let dot = if overload.is_empty() { "" } else { "." };
        bases.push((format!("{name}{dot}{overload}"), form));
    };
    if let Some((space, name)) = name.split_once("::__i").filter(|n| n.1.ends_with("__")) {
        add(&format!("{space}::__{name}"), overload, Form::InPlace);
    } else if let Some(base) = name.strip_suffix('_').filter(|n| !n.ends_with([':', '_'])) {
        add(base, overload, Form::InPlace);
    } else if let Some(base) = overload.strip_suffix("_out") {
        add(name, base, Form::Out);
    } else if overload == "out" {
        add(name, "", Form::Out);
        add(name, "Tensor", Form::Out);
    } else if WRITTEN.contains(&overload) {
        add(name, "", Form::Out);
    } else if overload.is_empty() {
        add(name, "Tensor", Form::Functional);
        add(name, "int", Form::Functional);
    }
    bases
}

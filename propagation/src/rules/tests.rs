//! Placements that DTensor's rules (torch 2.15) let pass although they give
//! wrong numbers, each with numbers that show it.

#![allow(clippy::unwrap_used, reason = "tests")]

use super::super::{Arg, Mesh, Query, Topology, propagate, standard_rules};

/// The placements that an op takes its inputs in, on two ranks.
fn taken(op: &str, args: &[&str]) -> Vec<String> {
    let mesh = Mesh::parse("d=2").unwrap();
    let args: Vec<_> = args.iter().map(|a| Arg::parse(a, &mesh).unwrap()).collect();
    let query = Query { op, args: &args };
    let rules = standard_rules().unwrap();
    let found = propagate(rules, &query, &mesh, &Topology::one_node(&mesh)).unwrap();
    found.inputs.iter().map(|i| i.to[0].to_string()).collect()
}

#[test]
fn what_changes_elements_takes_no_partial() {
    // max(|-5|, |1|) = 5, but |max(-5, 1)| = 1.
    let max = ["f32[8] @ P(max)", "inf"];
    assert_eq!(taken("aten::linalg_vector_norm", &max), ["R"]);
    // 1^2 + 2^2 = 5, but (1 + 2)^2 = 9.
    let sum = ["f32[8] @ P(sum)", "2"];
    assert_eq!(taken("aten::linalg__powsum", &sum), ["R"]);
    // NaN + 3 counts as 0, but 0 + 3 = 3.
    assert_eq!(taken("aten::nansum", &["f32[8] @ P(sum)"]), ["R"]);
    // Of [1, 0] and [0, 1] the maximum is [1, 1] with transform [2, 0]; theirs
    // are [1, 1] and [1, -1].
    let transform = ["f32[8] @ P(max)", "[0]", "0", "true"];
    assert_eq!(taken("aten::_fft_r2c", &transform), ["R"]);
}

#[test]
fn indices_that_reach_less_far_than_the_input_stay_whole() {
    // Row 2 of the indices reads row 2 of the input, which rank 1 of two has
    // in its first row if it has half of four rows, and not if of six.
    let moved = ["f32[6,5] @ S(0)", "1", "i64[4,3] @ S(0)"];
    assert_eq!(taken("aten::gather", &moved), ["R", "R"]);
    let fits = ["f32[6,5] @ S(0)", "1", "i64[6,3] @ S(0)"];
    assert_eq!(taken("aten::gather", &fits), ["S(0)", "S(0)"]);
    let source = ["f32[6,5] @ S(0)", "1", "i64[6,2] @ S(0)", "f32[8,3] @ S(0)"];
    assert_eq!(taken("aten::scatter_add", &source), ["R", "R", "R"]);
}

#[test]
fn a_matrix_never_becomes_a_batch_of_vectors() {
    // On half the batch, [3,3,3] and [3,3] would be three systems of one vector.
    let args = ["f32[6,3,3] @ S(0)", "f32[3,3]"];
    assert_eq!(taken("aten::_linalg_solve_ex", &args), ["R", "R"]);
    let args = ["f32[6,3,3] @ S(0)", "f32[6,3] @ S(0)"];
    assert_eq!(taken("aten::_linalg_solve_ex", &args), ["S(0)", "S(0)"]);
}

#[test]
fn batch_dims_are_counted_from_the_right() {
    // Dim 0 of one system's right-hand sides is no batch.
    let args = ["f32[3,5,5]", "f32[5,4] @ S(1)", "true"];
    assert_eq!(taken("aten::linalg_solve_triangular", &args), ["R", "S(1)"]);
    let args = ["f32[4,5,5] @ S(0)", "f32[5,4]", "true"];
    assert_eq!(taken("aten::linalg_solve_triangular", &args), ["S(0)", "R"]);
}

#[test]
fn a_histogram_of_unknown_limits_is_that_of_the_whole() {
    // Equal limits stand for the extrema of the values.
    let args = ["f32[8] @ S(0)", "4", "0", "0"];
    assert_eq!(taken("aten::histc", &args), ["R"]);
    let args = ["f32[8] @ S(0)", "4", "-1", "1"];
    assert_eq!(taken("aten::histc", &args), ["S(0)"]);
}

//! The `rote` command line.

fn main() {}

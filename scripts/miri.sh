#!/bin/sh
# Runs tests of the Rust code under Miri, which sees undefined behaviour: plans and what reads them,
# the recorder, passes, and what crosses to the bridge and back.
#
#     scripts/miri.sh [arguments of the tests, such as a part of their names]
#
# Needs nightly Rust with Miri; without it the script says so and is skipped. Tests that loop over many
# cases try fewer here (`cfg!(miri)`), and those that Miri cannot run are ignored with their reason.
# Miri maps no files and loads no libraries: plans are read from memory, and the bridge is one in Rust
# (backends/aten/tests/pointers.rs).
set -eu
cd "$(dirname "$0")/.."
cargo +nightly miri --version >/dev/null 2>&1 || {
  echo "miri: nightly Rust or Miri is not installed (rustup toolchain install nightly --component miri,rust-src); skipped" >&2
  exit 0
}
# Tests write plans to temporary directories, and compare floats bit for bit. Addresses of storages
# cross the border as numbers.
common="${MIRIFLAGS:-} -Zmiri-disable-isolation -Zmiri-deterministic-floats -Zmiri-permissive-provenance"
miri() {
  echo "miri: $*"
  cargo +nightly miri test --quiet "$@"
}
# Stacked borrows are stricter; rkyv, which reads plans, holds to tree borrows alone.
export MIRIFLAGS="$common"
miri --package rote-aten --test pointers -- --skip plan --skip a_run "$@"
miri --package rote-events --test described_ops -- "$@"
export MIRIFLAGS="$common -Zmiri-tree-borrows"
miri --package rote-replay --lib -- "$@"
miri --package rote-callbacks --test pointers -- "$@"
miri --package rote-aten --lib --test pointers -- "$@"
miri --package rote-tracer --lib -- "$@"
miri --package rote-passes --lib --test hostile_plans -- "$@"
miri --package rote-plans --lib --test hostile_files -- "$@"

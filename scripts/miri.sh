#!/bin/sh
# Runs the unit tests of plans, the recorder, the passes and the executor under Miri, which sees undefined
# behaviour in unsafe code. What reads files that are mapped, or starts processes, is left out: Miri has neither.
#
#     scripts/miri.sh
#
# Needs nightly Rust with Miri; without it, it says so and stops.
set -eu
cd "$(dirname "$0")/.."
cargo +nightly miri --version >/dev/null 2>&1 || {
  echo "miri: needs nightly Rust with Miri: rustup toolchain install nightly --component miri,rust-src" >&2
  exit 1
}
export MIRIFLAGS="-Zmiri-disable-isolation" PROPTEST_CASES=4

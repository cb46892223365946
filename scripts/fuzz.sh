#!/bin/sh
# Fuzzes what reads bytes or calls that come from elsewhere: plan files, and the C ABI that records.
#
#     scripts/fuzz.sh [seconds for each target, 1200 by default]
#
# Needs nightly Rust and cargo-fuzz (`cargo install cargo-fuzz`); without them it says so and is skipped.
# Each target runs alone under AddressSanitizer; a finding stops the script and lies in fuzz/artifacts/.
set -eu
cd "$(dirname "$0")/.."
seconds=${1:-1200}
cargo +nightly fuzz --version >/dev/null 2>&1 || {
  echo "fuzz: nightly Rust or cargo-fuzz is not installed (rustup toolchain install nightly; cargo install cargo-fuzz); skipped" >&2
  exit 0
}
(cd fuzz && cargo +nightly run --quiet --release --bin seeds corpus/plan_file)
mkdir -p fuzz/corpus/recorder
targets=$(cargo +nightly fuzz list)
for target in $targets; do
  echo "fuzz: $target for $seconds s"
  cargo +nightly fuzz run "$target" -- -max_total_time="$seconds" -timeout=20 -rss_limit_mb=4096 -max_len=16384 -len_control=0
done

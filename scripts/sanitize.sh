#!/usr/bin/env bash
# Runs tests with the bridge under AddressSanitizer: what a replay reads and writes
# stays inside the storages of its tensors.
#
#     scripts/sanitize.sh [arguments of pytest]
#
# The bridge is compiled into a cache of its own. PyTorch itself is not instrumented:
# its allocations are, so that what lies beyond a storage is caught where the bridge,
# or a function of the C library, touches it. Leaks are Python's and PyTorch's own.
set -euo pipefail
cd "$(dirname "$0")/.."
compiler=${CXX:-g++}
asan=$("$compiler" -print-file-name=libasan.so)
test -e "$asan" || { echo "sanitize: $compiler has no libasan.so; skipped" >&2; exit 0; }
stdcxx=$("$compiler" -print-file-name=libstdc++.so.6)
cache=${ROTE_CACHE:-target}/sanitized
mkdir -p "$cache"
wrapper=$cache/compiler
cat >"$wrapper" <<WRAPPER
#!/bin/sh
exec $compiler -fsanitize=address -fno-omit-frame-pointer -g1 "\$@"
WRAPPER
chmod +x "$wrapper"
tests=("$@")
if test $# -eq 0; then
  tests=(tests/torch/test_storage.py tests/torch/test_aliasing.py tests/torch/test_hostile_plans.py)
fi
# PyTorch's own sanitized builds set these too; the first is what catches a heap overflow.
export ASAN_OPTIONS=detect_leaks=0:halt_on_error=1:abort_on_error=1:detect_odr_violation=0:allocator_may_return_null=1
export PYTHONMALLOC=malloc ROTE_CACHE=$cache CXX=$PWD/$wrapper
case $wrapper in /*) export CXX=$wrapper ;; esac
python=${PYTHON:-.venv/bin/python}
LD_PRELOAD="$asan $stdcxx" exec "$python" -m pytest -q -p no:cacheprovider "${tests[@]}"

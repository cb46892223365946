#!/bin/sh
# Every check that needs a GPU, in one go: `scripts/gpu_checks.sh [python]`.
#
# 1. the cases themselves: eager equals eager on this GPU (else they prove nothing)
# 2. replay equals eager: kernels, generator, streams, optimizers, NCCL (one rank)
# 3. a training step in time, beside eager DTensor
#
# The Python must have torch, pytest and rote (default: .venv of `make setup`).
# Without a GPU it says so and succeeds; with GPU_REQUIRED=1 it fails instead.
# Not checked here: NCCL between several ranks.
set -eu
cd "$(dirname "$0")/.."
python=${1:-.venv/bin/python}
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

found=$("$python" -c '
import torch, torch.distributed as dist
if not torch.cuda.is_available():
    print("SKIPPED: torch.cuda.is_available() is False")
elif not dist.is_nccl_available():
    print("SKIPPED: this torch was built without NCCL")
else:
    print(torch.cuda.get_device_name(), "with torch", torch.__version__)')
case $found in
SKIPPED*)
    echo "no GPU check has run. $found" >&2
    exit "${GPU_REQUIRED:-0}"
    ;;
esac
echo "GPU checks on $found"

# Later checks say something even where earlier ones fail.
failed=""
ROTE_TEST_ORACLE_ONLY=1 "$python" -m pytest tests/torch/test_cuda.py || failed="$failed cases"
"$python" -m pytest tests/torch/test_cuda.py || failed="$failed equality"
"$python" benches/overhead_cuda.py || failed="$failed time"

if [ -n "$failed" ]; then
    echo "FAILED on $found:$failed" >&2
    exit 1
fi
echo "all GPU checks passed on $found"

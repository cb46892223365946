#!/bin/sh
# Tests on every supported version of PyTorch: `scripts/test_versions.sh PYTHON TEST...`.
#
# For each version: a virtual environment with that torch from PyPI, the bridge
# compiled against it, the tests. The newest is the one that the project pins.
# A case that a version's eager cannot run is skipped with eager's reason.
#
#   ROTE_VERSIONS="2.11.0 2.13.0"   only these
#   ROTE_KEEP_VERSIONS=1            keeps the environments (some 6 GB each)
set -u
cd "$(dirname "$0")/.."
python=$1
shift
pinned() { sed -n "s/^$1==//p" requirements.txt; }
versions=${ROTE_VERSIONS:-2.11.0 2.12.1 2.13.0 2.14.1 $(pinned torch)}
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
export PYTHONPATH="$PWD/ffi/python" ROTE_LIBRARY="$PWD/ffi/python/rote/librote.so" ROTE_CACHE="$PWD/target/versions/bridges"
mkdir -p target/versions
summary=target/versions/summary.txt
: > "$summary"
failed=""

for version in $versions; do
    place=target/versions/$version
    echo "== torch $version" >&2
    test -x "$place/bin/python" || "$python" -m venv "$place"
    if ! "$place/bin/python" -m pip install --quiet --disable-pip-version-check \
        "torch==$version" "numpy==$(pinned numpy)" "pytest==$(pinned pytest)"; then
        failed="$failed $version"
        echo "torch $version: could not be installed" >> "$summary"
        continue
    fi
    if ! "$place/bin/python" -c "from rote import _bridge; _bridge.build()"; then
        failed="$failed $version"
        echo "torch $version: the bridge does not compile" >> "$summary"
        continue
    fi
    "$place/bin/python" -m pytest --quiet --durations=0 --durations-min=60 "$@" > "target/versions/$version.log" 2>&1 || failed="$failed $version"
    grep -E "^(FAILED|ERROR|SKIPPED)" "target/versions/$version.log"
    echo "torch $version: $(tail -n 1 "target/versions/$version.log")" | tee -a "$summary"
    test -n "${ROTE_KEEP_VERSIONS:-}" || rm -rf "$place"
done

echo
cat "$summary"
if [ -n "$failed" ]; then
    echo "FAILED on torch:$failed (logs: target/versions/*.log)" >&2
    exit 1
fi

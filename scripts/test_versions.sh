#!/bin/sh
# Tests on every supported version of PyTorch and of Python: `scripts/test_versions.sh PYTHON TEST...`.
#
# For each version of PyTorch: a virtual environment of PYTHON with that torch from
# PyPI, the bridge compiled against it, the tests. The newest is the one that the
# project pins; it is taken once more with each other Python that is found here.
# A case that a version's eager cannot run is skipped with eager's reason.
#
#   ROTE_VERSIONS="2.11.0 2.13.0"           only these of PyTorch
#   ROTE_PYTHONS="python3.12 python3.13"    only these others of Python ("" for none)
#   ROTE_KEEP_VERSIONS=1                    keeps the environments (some 6 GB each)
set -u
cd "$(dirname "$0")/.."
python=$1
shift
pinned() { sed -n "s/^$1==\([^ ]*\).*/\1/p" requirements.txt; }
named() { "$1" -c 'import sys; print("python%d.%d" % sys.version_info[:2])' 2>/dev/null; }
newest=$(pinned torch)
versions=${ROTE_VERSIONS-2.11.0 2.12.1 2.13.0 2.14.1 $newest}
pythons=${ROTE_PYTHONS-python3.11 python3.12 python3.13 python3.14}
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
export PYTHONPATH="$PWD/ffi/python" ROTE_LIBRARY="$PWD/ffi/python/rote/librote.so" ROTE_CACHE="$PWD/target/versions/bridges"
mkdir -p target/versions
summary=target/versions/summary.txt
: > "$summary"
failed=""

# test_with TORCH PYTHON TEST...
test_with() {
    what="$1-$(named "$2")"
    place=target/versions/$what
    torch=$1
    interpreter=$2
    shift 2
    echo "== torch $what" >&2
    test -x "$place/bin/python" || "$interpreter" -m venv "$place"
    if ! "$place/bin/python" -m pip install --quiet --disable-pip-version-check \
        "torch==$torch" "numpy==$(pinned numpy)" "pytest==$(pinned pytest)" \
        "expecttest==$(pinned expecttest)" "xxhash==$(pinned xxhash)"; then
        failed="$failed $what"
        echo "torch $what: could not be installed" >> "$summary"
        return
    fi
    if ! "$place/bin/python" -c "from rote import _bridge; _bridge.build()"; then
        failed="$failed $what"
        echo "torch $what: the bridge does not compile" >> "$summary"
        return
    fi
    "$place/bin/python" -m pytest --quiet --durations=0 --durations-min=60 "$@" > "target/versions/$what.log" 2>&1 || failed="$failed $what"
    grep -E "^(FAILED|ERROR|SKIPPED)" "target/versions/$what.log"
    echo "torch $what: $(tail -n 1 "target/versions/$what.log")" | tee -a "$summary"
    test -n "${ROTE_KEEP_VERSIONS:-}" || rm -rf "$place"
}

for version in $versions; do
    test_with "$version" "$python" "$@"
done
for other in $pythons; do
    test -n "$(named "$other")" || continue
    test "$(named "$other")" = "$(named "$python")" || test_with "$newest" "$other" "$@"
done

echo
cat "$summary"
if [ -n "$failed" ]; then
    echo "FAILED on torch:$failed (logs: target/versions/*.log)" >&2
    exit 1
fi

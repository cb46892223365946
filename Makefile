# make setup   .venv/ with pinned torch and the rote wheel in it
# make demo    a small Llama trained on 2 processes, eager and replayed
# make test    every test, Rust and Python, with a few of `make test-wild`
# make test-versions  the bridge and the tests of soundness on each supported
#              version of PyTorch, and on each Python from 3.11 on that is found
#              (about 5 GB of downloads each, one after the other)
# make test-wild  models of Hugging Face (one in twelve architectures), and the loops
#              of torchtitan, transformers, accelerate and Lightning, unedited (installs
#              requirements-wild.txt into target/wild/)
# make test-all  what takes long too: hours
# make bench   overhead against eager DTensor and torch.compile over models,
#              sizes, layers, meshes and wrappers; memory; propagation against
#              DTensor's; instructions per op and of guards; recordings; regions; Rust benches
#              (BENCH=--quick: fewer of them)
# make test-passes  each pass that keeps bits by itself, over the tests of
#              equality, aliasing, guards, refusals and soundness
# make lint    formatting, clippy, ruff, mypy, freshness of the C header
# make clean   removes what was built here; .venv/ and ~/.cache/rote stay
#
# Each target does its own set-up and needs only a Rust toolchain, a C++
# compiler and Python 3.11 or later (PYTHON=... picks one).

PYTHON ?= $(firstword $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p; done))
TARGET := $(or $(CARGO_TARGET_DIR),target)
BIN := .venv/bin
PACKAGE := ffi/python/rote

# Two stamps: the pinned packages, and the installed rote wheel.
DEPS := .venv/.stamp-requirements
ROTE := .venv/.stamp-rote
SOURCES := pyproject.toml Cargo.toml Cargo.lock README.md \
	$(shell find plans propagation validation passes tracer replay backends ffi src -name '*.rs' -o -path '*/bridge/*' -o -name 'Cargo.toml' -o -name 'cbindgen.toml' -o -name '*.txt') \
	$(shell find $(PACKAGE) -name '*.py' -o -name '*.pyi' -o -name 'py.typed')

# One thread per process: the examples and tests run several on few cores.
export OMP_NUM_THREADS ?= 1

# Files of tests side by side, the longest first (conftest.py); a file's tests share processes.
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# What eager and a replay leave must be equal, bit for bit, with the passes of
# ROTE_PASSES, or else with the usual and either without passes or with all; and what must
# hold besides, with any passes.
KEPT := tests/torch/test_equality.py tests/torch/test_aliasing.py
HELD := tests/torch/test_guards.py tests/torch/test_refusals.py tests/torch/test_soundness.py
# The same of every place where a step may keep a value.
PLACES := tests/torch/test_state_sweep.py::test_each_place_holder_read_and_sort_of_values_once
# Tests of which `make test` runs a part.
SWEPT := $(shell grep -lE 'EVERYTHING|mark\.sampled' tests/torch/test_*.py)

.PHONY: setup demo check test test-rust bridge test-all test-passes test-versions test-wild bench lint clean

setup: $(ROTE)

demo: setup
	$(BIN)/torchrun --standalone --nproc-per-node 2 examples/train_llama.py --plans target/demo/plans

# What to run before each commit: lints, types, Rust, what replays keep, what is guarded and refused.
check: lint
	cargo test --workspace --exclude rote-ffi
	ROTE_PASSES=default $(PYTEST) -q $(KEPT) $(HELD)

test: setup
	$(MAKE) --jobs 2 test-rust bridge target/wild/.stamp
	$(PYTEST) tests/torch
	target/wild/bin/python -m pytest -q -n 2 $(foreach test,$(WILD_SLICE),'$(test)')

# The first needs both cores only while it compiles; so the others, which wait for one
# compiler and for downloads, run beside it.
test-rust: setup
	MAKEFLAGS= ROTE_LIBRARY=$(abspath $(TARGET))/release/librote.so cargo test --workspace

bridge: setup
	$(BIN)/python -c "from rote import _bridge; _bridge.build()"

# Every pass that keeps bits by itself, over all that holds whatever the passes
# are: about an hour.
test-passes: setup
	for passes in none all $$($(TARGET)/release/rote passes --names); do \
	  echo "ROTE_PASSES=$$passes"; \
	  ROTE_PASSES=$$passes $(PYTEST) -q $(KEPT) $(HELD) $(PLACES) || exit 1; \
	done

test-all: test test-passes test-wild
	ROTE_TEST_EVERYTHING=1 $(BIN)/python -m pytest $(SWEPT)
	PYTHON=$(BIN)/python scripts/sanitize.sh
	scripts/miri.sh
	scripts/fuzz.sh
	scripts/audit.sh

# One of each framework.
WILD_SLICE := $(addprefix tests/torch/test_integrations.py::, test_accelerate test_trainer_of_hugging_face \
  test_lightning test_sft_trainer_of_trl test_torchtitan test_stable_baselines[PPO-2560] test_graph_network[GCNConv]) \
  $(addprefix tests/torch/test_loops_of_accelerate.py::test_replayed, [sums_and_logs-1] [within_accumulate-2])

# In a virtual environment of its own, which finds torch and rote in .venv/.
test-wild: setup target/wild/.stamp
	target/wild/bin/python -m pytest -q tests/torch/test_hugging_face.py tests/torch/test_integrations.py \
	  tests/torch/test_architectures.py tests/torch/test_loops_of_accelerate.py \
	  tests/torch/test_module_regions.py::test_models_of_transformers

target/wild/.stamp: requirements-wild.txt requirements-wild-alone.txt requirements.txt
	$(BIN)/python -m venv --clear target/wild
	$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" > $$(target/wild/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/main.pth
	target/wild/bin/python -m pip install --quiet --disable-pip-version-check -r requirements-wild.txt
	target/wild/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements-wild-alone.txt
	@touch $@

# What reads code, objects and what DTensor has of its own, which differ by version.
OF_VERSIONS := $(addprefix tests/torch/test_,plans.py modes_inside.py regions.py fsdp.py ddp.py literals.py \
  custom_partials.py unread.py counters.py bytecode.py containers.py much_code.py late_numbers.py)
# Each version in a virtual environment of its own, below target/versions.
test-versions: setup
	ROTE_PASSES=default scripts/test_versions.sh $(PYTHON) $(KEPT) $(HELD) $(PLACES) $(OF_VERSIONS)

bench: setup
	$(BIN)/python benches/overhead.py --out target/bench $(BENCH)
	$(BIN)/python benches/propagation.py --out target/bench --rote $(TARGET)/release/rote
	$(BIN)/python benches/first_steps.py --out target/bench
	cargo test --quiet --package rote-aten --test instructions -- --nocapture
	$(BIN)/python benches/guard_instructions.py
	$(firstword $(wildcard target/wild/bin/python) $(BIN)/python) benches/recordings.py
	$(BIN)/python benches/regions.py
	cargo bench --workspace

lint: setup
	cargo fmt --all --check
	cargo clippy --workspace --all-targets -- -D warnings
	cargo clippy --package rote-ffi --features faults -- -D warnings
	cargo test --package rote-ffi
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	cargo clean
	rm -rf target $(PACKAGE)/librote.so $(ROTE)
	rm -rf .pytest_cache .mypy_cache .ruff_cache

$(DEPS): requirements.txt
	@command -v cargo >/dev/null || { echo "rote needs a Rust toolchain: cargo was not found" >&2; exit 1; }
	@command -v $${CXX:-c++} >/dev/null || { echo "rote needs a C++ compiler: $${CXX:-c++} was not found (set CXX)" >&2; exit 1; }
	@test -n "$(PYTHON)" || { echo "rote needs Python 3.11 or later: none was found (set PYTHON)" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --disable-pip-version-check -r requirements.txt
	@touch $@

$(ROTE): $(DEPS) $(SOURCES)
	cargo build --release --workspace
	cp $(TARGET)/release/librote.so $(PACKAGE)/
	rm -rf $(TARGET)/wheels
	$(BIN)/maturin build --quiet --release --interpreter $(BIN)/python --out $(TARGET)/wheels
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --force-reinstall $(TARGET)/wheels/rote-*.whl
	@touch $@

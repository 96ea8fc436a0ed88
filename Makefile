# Two commands: `make run` and `make test`. Both set up a virtual environment first; nothing else is needed but Python.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
OVERRIDES ?= demo --fresh
# More words for pip, for example where to find the CPU build of torch (see the README).
PIP_ARGS ?=

.PHONY: run test test-deploy check lint mutants bench reliability reproduce test-reproduction setup clean

setup: $(STAMP)

# The full pinned set comes from constraints.txt; bytecode is compiled now so that the first start is quick.
$(STAMP): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "fedgraft needs Python 3.11 or newer; set PYTHON=/path/to/python3.11"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt $(PIP_ARGS) --editable '.[dev]'
	-$(BIN)/python -m compileall -q -j 0 $(VENV)/lib src >/dev/null 2>&1
	touch $(STAMP)

run: $(STAMP)
	$(BIN)/fedgraft run $(OVERRIDES)

lint: $(STAMP)
	$(BIN)/ruff check src tests examples benchmarks recipes reproduction
	$(BIN)/ruff format --check src tests examples benchmarks recipes reproduction
	$(BIN)/mypy
	$(BIN)/lint-imports

# Test files side by side, one to a core; each computes on one thread.
TESTS := $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile

check: lint
	$(TESTS) -m "not slow and not deploy"

test: lint
	$(TESTS) -m "not deploy"

# More of real servers and nodes than the gate's few cases: every algorithm, faults, Ray.
test-deploy: $(STAMP)
	$(BIN)/python -m pytest tests/deploy -m deploy

# Small bugs, one at a time, against the tests that should notice them: docs/mutants.md. MUTANTS names some of them.
mutants: $(STAMP)
	$(BIN)/python -m tests.mutants --jobs 2 $(MUTANTS)

# BENCH names some of them, for example `make bench BENCH=peers`; all take about fifty minutes.
bench: $(STAMP)
	$(BIN)/python -m benchmarks $(BENCH)

reliability: $(STAMP)
	$(BIN)/python -m benchmarks.reliability

# For example `make reproduce NAME=editing SCALE=tiny`, or `make reproduce NAME=q3 DATA=FOLDER MODEL=FOLDER`; see docs/reproduce.md.
SCALE ?= laptop
reproduce: $(STAMP)
	$(BIN)/python -m reproduction $(NAME) --scale $(SCALE) $(if $(DATA),--data $(DATA)) $(if $(MODEL),--model $(MODEL)) $(ARGS)

# Every experiment and question from end to end at tiny scale; the gate runs three of them.
test-reproduction: $(STAMP)
	ALL_PRESETS=1 $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist worksteal tests/reproduction/test_reproduce.py

clean:
	rm -rf $(VENV) runs .mypy_cache .ruff_cache .pytest_cache .import_linter_cache

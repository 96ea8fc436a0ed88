# Two commands: `make run` and `make test`. Both set up a virtual environment first; nothing else is needed but Python.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
LIBRARY := $(VENV)/.library
STAMP := $(VENV)/.ready
# Real images where there are some: `make run DATA=FOLDER MODEL=FOLDER`, else $FEDGRAFT_DATA, else data/; else the digits inside.
# SIZE=112 lets the network see smaller images than it was trained on: a quarter of the work, and worse.
DATA ?= $(or $(FEDGRAFT_DATA),$(wildcard data))
QUICK := name=demo trainable.kind=last_blocks rounds.total=10 rounds.evaluate_every=1 data.limit=2000
OVERRIDES ?= $(if $(DATA),'$(DATA)' $(QUICK),demo) $(if $(MODEL),model.name='$(MODEL)') $(if $(SIZE),data.image_size=$(SIZE)) --fresh
# Bytecode is kept whatever the environment says: each process that a test starts would compile the package anew.
unexport PYTHONDONTWRITEBYTECODE
# More words for pip, for example where to find the CPU build of torch (see the README).
PIP_ARGS ?=

.PHONY: docs dist run test test-only test-deploy check check-only lint mutants mutants-systematic bench reliability reproduce test-reproduction setup clean

setup: $(STAMP)

# The full pinned set comes from constraints.txt; bytecode is compiled now so that the first start is quick (a few files of
# other packages are for other Pythons and do not compile). `make run` needs the library alone, everything else the tools.
define install
	@command -v $(PYTHON) >/dev/null || { echo "fedgraft needs Python 3.11 or newer; set PYTHON=/path/to/python3.11"; exit 1; }
	@echo "installing into $(VENV): a minute or two, once"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install $(if $(CI),--quiet) --disable-pip-version-check --constraint constraints.txt $(PIP_ARGS) --editable '$(1)'
	@$(BIN)/python -m compileall -q -j 0 $(VENV)/lib src >/dev/null 2>&1 || true
	@touch $@
endef

$(LIBRARY): pyproject.toml constraints.txt
	$(call install,.)

$(STAMP): pyproject.toml constraints.txt
	$(call install,.[dev])
	@touch $(LIBRARY)

run: $(LIBRARY)
	$(BIN)/fedgraft run $(OVERRIDES)

lint: $(STAMP)
	$(BIN)/ruff check src tests examples benchmarks recipes reproduction
	$(BIN)/ruff format --check src tests examples benchmarks recipes reproduction
	$(BIN)/mypy
	$(BIN)/lint-imports

# Tests side by side, each on one thread; a worker that is done takes over from the others. There is one more of them than
# cores, because tests of servers and killed processes wait most of their time.
WORKERS := $(shell expr `getconf _NPROCESSORS_ONLN` + 1)
TESTS := $(BIN)/python -m pytest -n $(WORKERS) --maxprocesses 5 --dist worksteal

# Types take one core for most of a minute where nothing is kept of the last time: beside the tests, not before them.
check test: $(STAMP)
	@$(MAKE) --no-print-directory -j2 lint $@-only

check-only: $(STAMP)
	$(TESTS) tests/unit tests/laws -m "not slow and not deploy"

test-only: $(STAMP)
	$(TESTS) -m "not deploy"

# More of real servers and nodes than the gate's few cases: every algorithm, faults, Ray; and the long checks of reliability.
test-deploy: $(STAMP)
	$(BIN)/python -m pytest -m deploy -n 2 --dist loadfile

# Small bugs, one at a time, against the tests that should notice them: docs/mutants.md. MUTANTS names some of them.
mutants: $(STAMP)
	$(BIN)/python -m tests.mutants --jobs 2 $(MUTANTS)

# Mutants by rule, a sample of 1,500: hours, resumed where it was stopped; the first time the tests' lines are recorded.
mutants-systematic: $(STAMP)
	test -e runs/mutants/coverage.json || $(BIN)/python -m tests.mutants.systematic record
	test -e runs/mutants/coverage-slow.json || $(BIN)/python -m tests.mutants.systematic record --slow
	$(BIN)/python -m tests.mutants.systematic run --sample 1500 --seed 0
	$(BIN)/python -m tests.mutants.systematic report

# BENCH names some of them, for example `make bench BENCH=peers`; all take about fifty minutes.
bench: $(STAMP)
	$(BIN)/python -m benchmarks $(BENCH)

reliability: $(STAMP)
	$(BIN)/python -m benchmarks.reliability

# For example `make reproduce NAME=q3 SCALE=tiny`, or `make reproduce NAME=q3 DATA=FOLDER MODEL=FOLDER`; see docs/reproduce.md.
SCALE ?= laptop
reproduce: $(STAMP)
	$(BIN)/python -m reproduction $(NAME) --scale $(SCALE) $(if $(DATA),--data $(DATA)) $(if $(MODEL),--model $(MODEL)) $(ARGS)

# Every experiment and question from end to end at tiny scale; the gate runs three of them.
test-reproduction: $(STAMP)
	ALL_PRESETS=1 $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist worksteal tests/reproduction/test_reproduce.py

# The documentation site in site/, links checked; it opens without a server and without a network.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

# The wheel and the source archive in dist/.
dist: $(STAMP)
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .
	$(BIN)/python -m hatchling build -t sdist -d dist

clean:
	rm -rf $(VENV) runs site dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache

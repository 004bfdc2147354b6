# `make run` and `make test` set everything up for themselves; nothing else needs to be installed by hand.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
PIP = $(BIN)/python -m pip --disable-pip-version-check
STAMP = $(VENV)/.installed
DEV_STAMP = $(VENV)/.installed-dev

.PHONY: run test moved test-slow lint format docs notebooks bench bench-digits bench-engine bench-scale bench-stages bench-prepare bench-mixture bench-audit bench-flower bench-privacy bench-detection bench-conditions bench-misjudged same clean

run: $(STAMP)
	$(BIN)/fednoro run $(ARGS)

test: $(DEV_STAMP)
	$(BIN)/ruff check -q .
	$(BIN)/ruff format -q --check .
	$(BIN)/mypy
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not slow" $(ARGS)

test-slow: $(DEV_STAMP)
	$(BIN)/pytest -m slow $(ARGS)

lint: $(DEV_STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(DEV_STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The site is in build/site; its pages open from the disk, and `mkdocs serve` has the search too.
docs: $(DEV_STAMP)
	$(BIN)/mkdocs build --strict

# Runs the notebooks anew and keeps what they show.
notebooks: $(DEV_STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python notebooks/execute.py

# Each takes a few minutes on two cores. ARGS are for one of them: make bench-engine ARGS="--network cnn --kd"
bench: bench-digits bench-engine bench-scale bench-stages bench-mixture

bench-digits bench-engine bench-scale bench-stages bench-prepare bench-mixture bench-audit bench-flower bench-privacy bench-detection bench-conditions bench-misjudged: bench-%: $(DEV_STAMP)
	$(BIN)/python -m benchmarks.$* $(ARGS)

# Checks that a refactoring changes no result: make same BASE=main ARGS="--without flower"
same: $(if $(BASE),$(DEV_STAMP))
	@test -n "$(BASE)" || { echo "make same needs a git revision to compare with: make same BASE=main"; exit 1; }
	$(BIN)/python -m benchmarks.same $(BASE) $(ARGS)

# Checks that moved, split or renamed code is the same code: make moved BASE=main
moved: $(if $(BASE),$(DEV_STAMP))
	@test -n "$(BASE)" || { echo "make moved needs a git revision to compare with: make moved BASE=main"; exit 1; }
	$(BIN)/python -m benchmarks.moved $(BASE) $(ARGS)

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "fednoro needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version). Use: make run PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(STAMP): $(BIN)/python pyproject.toml constraints.txt
	$(PIP) install -q -c constraints.txt -e .
	@touch $@

$(DEV_STAMP): $(STAMP)
	$(PIP) install -q -c constraints.txt -e '.[dev]'
	@touch $@

# make test   everything that gates: lint, types, tests        make demo   train on built-in icons, five minutes
# make test-all   the slow tests too                           make bench  the benchmark of README (about an hour)
# make docs   the documentation as a site in site/             make kernels   what kernels use of each GPU, compiled here
# make coverage   branch coverage of make test                 make clean  remove what the others made

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/ready
export PIP_CONSTRAINT := $(abspath constraints.txt)
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# One worker per core; each may start several ranks, which need memory. WORKERS=0 runs all tests in one process.
WORKERS ?= logical
PYTEST := -m pytest --numprocesses $(WORKERS) --maxprocesses 4
# Checks run side by side; where make can, it prints the output of one after the other.
SIDE_BY_SIDE := --jobs 2 $(if $(filter output-sync,$(.FEATURES)),--output-sync)

.PHONY: test test-all checks coverage lint types demo bench kernels docs clean

test: checks
	$(BIN)/python $(PYTEST) -m "not slow"

test-all: checks
	$(BIN)/python $(PYTEST)

checks: $(READY)
	$(MAKE) --no-print-directory $(SIDE_BY_SIDE) types lint docs

coverage: $(READY)
	$(BIN)/coverage erase
	$(BIN)/coverage run $(PYTEST) -m "not slow"
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

demo: $(READY)
	$(BIN)/contratile train --config recipes/icons.toml --out out/demo

bench: $(READY)
	$(BIN)/contratile bench loss --out out/bench

kernels: $(READY)
	$(BIN)/python -m tests.engine.kernels.resources

docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:
	rm -rf .venv out site .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage .coverage.*

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv --clear .venv
	$(BIN)/pip install --quiet --editable ".[dev]"
	touch $@

# make test   everything that gates: lint, types, tests        make demo   train on built-in icons, about four minutes
# make test-all   the slow tests too                           make bench  the benchmark of README (about an hour)
# make test-core TORCH=2.6.0   the core, with any torch
# make docs   the documentation as a site in site/             make kernels   what kernels use of each GPU, compiled here
# make coverage   branch coverage of make test                 make clean  remove what the others made

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/ready
DEMO := .venv/demo-ready
export PIP_CONSTRAINT := $(abspath constraints.txt)
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Tests start many processes, which need not compile the package each time.
unexport PYTHONDONTWRITEBYTECODE
# One worker per core; each may start several ranks, which need memory. WORKERS=0 runs all tests in one process.
WORKERS ?= logical
PYTEST := -m pytest --numprocesses $(WORKERS) --maxprocesses 4
# Checks run side by side; where make can, it prints the output of one after the other.
SIDE_BY_SIDE := --jobs 2 $(if $(filter output-sync,$(.FEATURES)),--output-sync)

.PHONY: test test-all test-core checks coverage lint types demo bench kernels docs clean

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

demo: $(DEMO)
	$(BIN)/contratile train --config icons --out out/demo

# The tests that need nothing but torch, with any version of it, in an environment of their own. Warnings of other torch
# versions do not fail them.
CORE_TESTS := tests/engine/test_*.py tests/losses tests/ring tests/test_keywords.py tests/test_printable.py \
	tests/test_reference.py
TORCH ?= 2.13.0
test-core:
	$(PYTHON) -m venv --clear .venv-core
	PIP_CONSTRAINT= .venv-core/bin/pip install --quiet --editable ".[test]" torch==$(TORCH)
	.venv-core/bin/python -m pytest -W default -m "not slow and not peers" $(CORE_TESTS)

bench: $(READY)
	$(BIN)/contratile bench loss --out out/bench

kernels: $(READY)
	$(BIN)/python -m tests.engine.kernels.costs
	$(BIN)/python -m tests.engine.kernels.resources

docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:
	rm -rf .venv .venv-core out site .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage .coverage.*

# The demo needs far less than the tests, so it has a stamp of its own; both install into the same .venv, in any order.
$(READY): pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/pip install --quiet --editable ".[dev]"
	touch $(DEMO) $@

$(DEMO): pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/pip install --quiet --editable ".[demo]"
	touch $@

$(BIN)/python:
	$(PYTHON) -m venv .venv

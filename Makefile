# make test   everything that gates: lint, types, tests        make demo   train on built-in icons, five minutes
# make test-all   the slow tests too                           make bench  the benchmark of README (about an hour)
# make docs   the documentation as a site in site/             make kernels   what kernels use of each GPU, compiled here
# make clean  remove what the others made

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/ready
export PIP_CONSTRAINT := $(abspath constraints.txt)
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: test test-all lint types demo bench kernels docs clean

test: lint types docs
	$(BIN)/pytest -m "not slow"

test-all: lint types docs
	$(BIN)/pytest

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
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

clean:
	rm -rf .venv out site .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv --clear .venv
	$(BIN)/pip install --quiet --editable ".[dev]"
	touch $@

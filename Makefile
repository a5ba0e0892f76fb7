# `make quickstart` and `make test` do all their own set-up in .venv.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
CONSTRAINTS ?= .ci/constraints.txt
PYTEST_FLAGS ?= -n 2 --dist loadfile
BIN := .venv/bin
PIP_FLAGS := --quiet --disable-pip-version-check

.PHONY: quickstart test lint types tests clean

quickstart: .venv/.runtime
	$(BIN)/tuner tune cpu_quickstart

test: lint types tests

lint: .venv/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/.dev
	$(BIN)/mypy

tests: .venv/.dev
	$(BIN)/pytest $(PYTEST_FLAGS)

.venv/bin/python:
	$(PYTHON) -c 'import sys; sys.exit("Python 3.10 to 3.13 is needed, this is " + sys.version.split()[0] + ": set PYTHON=python3.11" if not (3, 10) <= sys.version_info[:2] <= (3, 13) else 0)'
	$(PYTHON) -m venv .venv

.venv/.runtime: .venv/bin/python pyproject.toml $(CONSTRAINTS)
	$(BIN)/python -m pip install $(PIP_FLAGS) -c $(CONSTRAINTS) -e .
	touch $@

.venv/.dev: .venv/bin/python pyproject.toml $(CONSTRAINTS)
	$(BIN)/python -m pip install $(PIP_FLAGS) -c $(CONSTRAINTS) -e '.[dev]'
	touch .venv/.runtime $@

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis .cache

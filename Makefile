# Every target makes its own virtual environment first (.venv); nothing else has to be installed but Python 3.10-3.13.
#
#   make test PYTHON=python3.12        another interpreter
#   make venv PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu"     torch without CUDA on Linux

PYTHON ?= python3
VENV ?= .venv
PIP_ARGS ?=
WORKERS ?= 2
PYTEST_ARGS ?=

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PYTEST := $(BIN)/python -m pytest --timeout=900 $(PYTEST_ARGS)
# One thread a worker: two workers with a thread each finish sooner than one with two, and do not fight over cores.
PARALLEL := env OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false

.DEFAULT_GOAL := help
.PHONY: help venv demo test test-slow test-cuda lint format tables clean

help:
	@echo "make demo | test | test-slow | test-cuda | lint | format | tables | venv | clean"

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c constraints.txt -e ".[dev]"
	touch $@

venv: $(STAMP)

# Threads that wait passively cost nothing on a free machine, and a great deal less on a busy one.
demo: $(STAMP)
	env OMP_WAIT_POLICY=PASSIVE $(BIN)/python examples/quickstart.py

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test: lint
	$(PARALLEL) $(PYTEST) -n $(WORKERS) -m "not slow and not cuda" --nbmake tests examples

test-slow: $(STAMP)
	$(PARALLEL) $(PYTEST) -n $(WORKERS) -m "slow and not cuda" tests

test-cuda: $(STAMP)
	$(PYTEST) -m cuda tests

# The tables of README.md from the results in examples/results.
tables: $(STAMP)
	$(BIN)/python examples/make_tables.py

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

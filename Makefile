# make quickstart   train a LoRA adapter with GRPO on this machine's CPU and show the reward rise
# make test         lint, then every test; then the second megatron-core where Python 3.12 is there; then the real SGLang
# make help         the rest
#
# Variables:
#   PYTHON=/path/to/python3.11   the interpreter for .venv (found by scripts/find-python otherwise)
#   PIP_ARGS="..."               extra arguments for `pip install`, for example an index that has CPU-only torch wheels
#   SKIP_MCORE_019=1             leave the second megatron-core out of `make test` (it says so loudly)
#   PYTEST_ARGS="..."            extra arguments for pytest, for example "-k pack -x"
#   WORKERS=2                    test files run at the same time (each may start up to four processes); 0 for one by one
#   QUICKSTART_ARGS="..."        extra arguments for `lora-grpo quickstart`, for example "--seed 1"

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.NOTPARALLEL:

PIP_ARGS ?=
PYTEST_ARGS ?=
QUICKSTART_ARGS ?=
SKIP_MCORE_019 ?=
WORKERS ?= 2

VENV := .venv
BIN := $(VENV)/bin
VENV_019 := .venv-mcore019
BIN_019 := $(VENV_019)/bin
# SGLang pins another torch and another transformers than .venv has.
VENV_SGLANG := .venv-sglang
BIN_SGLANG := $(VENV_SGLANG)/bin
SGLANG := sglang==0.5.23
# Tests start several processes on few cores: one thread each is faster than many that fight.
TEST_ENV := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
# Whole files: their tests share engines, models and what the conformance kit has seen. In the order of tests/conftest.py.
PARALLEL = -n $(WORKERS) --dist loadfile --no-loadscope-reorder
PIP_INSTALL := -m pip install -qq --disable-pip-version-check $(PIP_ARGS)

.PHONY: help setup setup-dev setup-sglang quickstart quickstart-sglang test lint format pytest test-mcore-019 \
	mcore-019-if-possible test-sglang mutants bench docs build clean

help:
	@sed -n '/^##/s/^## //p' Makefile

## setup            .venv with what a run needs (no SGLang, no development tools)
setup: $(VENV)/.run
## setup-dev        .venv with the development tools as well
setup-dev: $(VENV)/.dev

$(BIN)/python:
	@python="$${PYTHON:-$$(scripts/find-python 3.11)}" || python=""; \
	if [ -z "$$python" ]; then \
	  echo "make: no Python 3.11 with venv found on PATH or in pyenv; install one, or pass PYTHON=/path/to/python3.11" >&2; exit 1; \
	fi; \
	echo "== set-up: $(VENV) with $$python"; \
	"$$python" -m venv $(VENV); \
	$(BIN)/python $(PIP_INSTALL) --upgrade pip

$(VENV)/.run: $(BIN)/python pyproject.toml constraints/py311.txt
	@echo "== set-up: installing what a run needs (a few minutes the first time)"
	@$(BIN)/python $(PIP_INSTALL) --constraint constraints/py311.txt --editable ".[harness]"
	@touch $@

$(VENV)/.dev: $(VENV)/.run
	@echo "== set-up: installing the development tools"
	@$(BIN)/python $(PIP_INSTALL) --constraint constraints/py311.txt --editable ".[dev]"
	@touch $@

$(VENV_SGLANG)/.run: pyproject.toml constraints/py311-sglang.txt
	@python="$${PYTHON:-$$(scripts/find-python 3.11)}" || python=""; \
	if [ -z "$$python" ]; then \
	  echo "make: no Python 3.11 with venv found on PATH or in pyenv; install one, or pass PYTHON=/path/to/python3.11" >&2; exit 1; \
	fi; \
	echo "== set-up: $(VENV_SGLANG) with $$python: $(SGLANG) and its torch: 6.5 GB, 2 to 15 minutes the first time"; \
	[ -x $(BIN_SGLANG)/python ] || "$$python" -m venv $(VENV_SGLANG)
	@$(BIN_SGLANG)/python $(PIP_INSTALL) --upgrade pip
	@$(BIN_SGLANG)/python $(PIP_INSTALL) --requirement constraints/py311-sglang.txt
	@$(BIN_SGLANG)/python $(PIP_INSTALL) --no-deps $(SGLANG)
	@$(BIN_SGLANG)/python $(PIP_INSTALL) --no-deps --editable .
	@touch $@

## setup-sglang     .venv-sglang: SGLang for a CPU, with what a run on it needs (6.5 GB)
setup-sglang: $(VENV_SGLANG)/.run

## quickstart       GRPO on a small Qwen3 that is made here: reward before and after, plot, PEFT adapter
quickstart: setup
	$(BIN)/lora-grpo quickstart --output runs/quickstart $(QUICKSTART_ARGS)

## quickstart-sglang  the same with its rollouts on SGLang
quickstart-sglang: setup-sglang
	$(BIN_SGLANG)/lora-grpo quickstart --engine sglang --mode adapter --output runs/quickstart-sglang $(QUICKSTART_ARGS)

## test             lint, every test, the second megatron-core where Python 3.12 is there, the real SGLang
test: lint pytest mcore-019-if-possible test-sglang

## lint             ruff, pyright, import contracts
lint: setup-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports --no-cache

## format           rewrite the code as ruff wants it
format: setup-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

## pytest           every test, without lint
pytest: setup-dev
	$(TEST_ENV) $(BIN)/python -m pytest $(PARALLEL) $(PYTEST_ARGS)

$(VENV_019)/.run: pyproject.toml constraints/py312-mcore019.txt
	@python="$$(scripts/find-python 3.12)" || { echo "make: no Python 3.12 with venv found on PATH or in pyenv" >&2; exit 1; }; \
	echo "== set-up: $(VENV_019) with $$python and megatron-core 0.19.2 (torch here is the platform's default build, it may be large)"; \
	[ -x $(BIN_019)/python ] || "$$python" -m venv $(VENV_019)
	@$(BIN_019)/python $(PIP_INSTALL) --upgrade pip
	@$(BIN_019)/python $(PIP_INSTALL) --constraint constraints/py312-mcore019.txt --editable ".[matrix]"
	@touch $@

## test-mcore-019   tests of the host, attach and the plugins with megatron-core 0.19.2 on Python 3.12
test-mcore-019: $(VENV_019)/.run
	@echo "== megatron-core 0.19.2 on Python 3.12"
	$(TEST_ENV) $(BIN_019)/python -m pytest -m mcore_matrix $(PARALLEL) $(PYTEST_ARGS)

mcore-019-if-possible:
	@if [ -n "$(SKIP_MCORE_019)" ]; then \
	  echo "== megatron-core 0.19.2 NOT TESTED: SKIP_MCORE_019 is set"; \
	elif ! scripts/find-python 3.12 >/dev/null; then \
	  echo "== megatron-core 0.19.2 NOT TESTED: no Python 3.12 on this machine"; \
	else \
	  $(MAKE) --no-print-directory test-mcore-019 && echo "== megatron-core 0.19.2 tested"; \
	fi

## test-sglang      tests of the real SGLang on the CPU, in .venv-sglang; none may be skipped
test-sglang: setup setup-sglang
	@echo "== $(SGLANG)"
	$(TEST_ENV) LORA_TRAINER_PYTHON=$(abspath $(BIN)/python) $(BIN_SGLANG)/python -m pytest -m sglang tests/sglang $(PARALLEL) $(PYTEST_ARGS)
	@echo "== $(SGLANG) tested"

## mutants          seeded faults, and which check of the conformance kit kills each
mutants: setup-dev
	$(TEST_ENV) PYTHONPATH=tests $(BIN)/python -W ignore -m mutants

## bench            the ratios of benchmarks/, one run each, medians
bench: setup
	$(BIN)/python -m benchmarks

## docs             rewrite the generated parts of docs/
docs: setup
	$(BIN)/python docs/generate.py

## build            wheel and source archive in dist/
build: setup-dev
	$(BIN)/python $(PIP_INSTALL) build
	$(BIN)/python -m build

## clean            remove the environments, builds and caches (not runs/)
clean:
	rm -rf $(VENV) $(VENV_019) $(VENV_SGLANG) dist build .pytest_cache .ruff_cache .import_linter_cache .hypothesis

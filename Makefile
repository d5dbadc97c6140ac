# make setup        .venv with the package and the test tools; runs once, and again when what it installs changes
# make test         everything that must pass: lint, types, layers, tests
# make quickstart   trains a small model from scratch:  make quickstart OUT=out/mine SEED=3
# make quickstart-flow   the same for a model of pictures; OUT and SEED as above
# make lint         ruff, mypy, import-linter          make format   rewrites the layout of the code
#
# Python is the first of python3, python3.13, python3.12 and python3.11 that is 3.11 to 3.13; PYTHON=... names another.
# torch is the version of constraints/cpu.txt. TORCH=installed keeps the one that this Python already has instead:
#     make setup TORCH=installed
# On Linux, PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu gets torch without its CUDA libraries.

VENV   ?= .venv
TORCH  ?= $(shell cat $(VENV)/.torch 2>/dev/null || echo pinned)
SEED   ?= 0
JOBS   ?= 2
PYTEST ?=

ifndef PYTHON
PYTHON := $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null \
	&& echo $$p && break; done)
endif

BIN   := $(VENV)/bin
STAMP := $(VENV)/.installed-$(TORCH)
SHELL := /bin/bash

VENV_FLAGS_pinned    :=
VENV_FLAGS_installed := --system-site-packages
PIP_FLAGS_pinned     := -c constraints/cpu.txt
PIP_FLAGS_installed  :=

.PHONY: setup test unit quickstart quickstart-flow lint format clean
.DEFAULT_GOAL := test

setup: $(STAMP)

$(STAMP): pyproject.toml constraints/cpu.txt
	@test -n "$(PYTHON)" || { echo "make setup needs Python 3.11, 3.12 or 3.13 with the venv module; name one with PYTHON=/path/to/python3" >&2; exit 1; }
	@test -n "$(filter $(TORCH),pinned installed)" || { echo "TORCH is 'pinned' or 'installed', received '$(TORCH)'" >&2; exit 1; }
	@echo "Setting up $(VENV) (once; a few minutes where torch must be downloaded)"
	@$(PYTHON) -m venv $(VENV_FLAGS_$(TORCH)) $(VENV)
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-input $(PIP_FLAGS_$(TORCH)) -e '.[test]'
	@rm -f $(VENV)/.installed-*
	@echo $(TORCH) > $(VENV)/.torch
	@touch $@

test: lint unit

unit: $(STAMP)
	OMP_NUM_THREADS=1 TRITON_INTERPRET=1 $(BIN)/python -m pytest -n $(JOBS) --typeguard-packages=areno_fn $(PYTEST)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

format: $(STAMP)
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .

quickstart: $(STAMP)
	$(BIN)/python -m areno_fn.run specs/quickstart.toml --out $(or $(OUT),out/quickstart) --overwrite --set seed=$(SEED)

quickstart-flow: $(STAMP)
	$(BIN)/python -m areno_fn.run specs/flow.toml --out $(or $(OUT),out/flow) --overwrite --set seed=$(SEED)

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

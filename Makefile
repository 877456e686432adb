# `make demo` and `make test` create .venv, install what they need into it and run. Nothing else has to be set up.
#
# Variables, given on the command line (`make test PYTHON=python3.12`):
#   PYTHON               interpreter that creates .venv; 3.11 or later
#   TORCH_VERSION        exact torch version to install
#   TORCHVISION_VERSION  the torchvision built for it; empty: install neither torchvision nor timm, and the tests
#                        that need them are skipped
#   PYTEST_ARGS          more arguments for pytest, such as `-k zero3` or `-m full`
#   TEST_THREADS         how many threads each process of a test computes with
#   TEST_PROCESSES       how many processes run test files side by side; 0: all in one, as for a debugger

PYTHON ?= python3
TORCH_VERSION ?= 2.14.1
TORCHVISION_VERSION ?= 0.29.1
PYTEST_ARGS ?=
TEST_PROCESSES ?= 2
TEST_THREADS ?= 1

VENV := .venv
BIN := $(VENV)/bin
# The stamp is named after the versions, so that a change of versions installs again; it is written when the install
# is complete, and `.installing` exists while one is under way, so that an interrupted one starts over.
INSTALLED := $(VENV)/.installed-torch-$(TORCH_VERSION)-torchvision-$(or $(TORCHVISION_VERSION),none)
INSTALLING := $(VENV)/.installing
ifeq ($(strip $(TORCHVISION_VERSION)),)
EXTRAS := dev
TORCH_PACKAGES := "torch==$(TORCH_VERSION)"
else
EXTRAS := dev,large-batch
TORCH_PACKAGES := "torch==$(TORCH_VERSION)" "torchvision==$(TORCHVISION_VERSION)"
endif

.DEFAULT_GOAL := help
.PHONY: help demo test lint format types benchmark clean

help:
	@echo "make demo       train a small GPT on 2 processes and show what it cost (under 3 minutes after installation)"
	@echo "make test       run the tests"
	@echo "make lint       ruff: rules and format"
	@echo "make types      mypy"
	@echo "make benchmark  step time and peak memory against stock strategies"
	@echo "make clean      remove .venv, caches and the demo's runs"

demo: $(INSTALLED)
	$(BIN)/lightning-effi fit --config configs/demo.yaml
	$(BIN)/python -m examples.report runs/demo
	$(BIN)/python -m examples.sample runs/demo

test: $(INSTALLED)
	TEST_THREADS=$(TEST_THREADS) $(BIN)/python -m pytest --numprocesses=$(TEST_PROCESSES) --dist=loadfile $(PYTEST_ARGS)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(INSTALLED)
	$(BIN)/mypy

benchmark: $(INSTALLED)
	$(BIN)/python -m benchmarks overhead

clean:
	rm -rf $(VENV) build dist runs .pytest_cache .ruff_cache .mypy_cache

$(INSTALLED): pyproject.toml Makefile
	@$(PYTHON) -c 'import sys; v = "%d.%d" % sys.version_info[:2]; sys.version_info >= (3, 11) or sys.exit(\
	"lightning-effi needs Python 3.11 or later, but \"$(PYTHON)\" is Python " + v + \
	". Name another one: make $(MAKECMDGOALS) PYTHON=python3.11")'
	@if [ -e $(INSTALLING) ] || ! $(BIN)/python -m pip --version >/dev/null 2>&1; then \
		echo "Creating $(VENV)"; $(PYTHON) -m venv --clear $(VENV); \
	fi
	@rm -f $(VENV)/.installed-*
	@touch $(INSTALLING)
ifeq ($(strip $(TORCHVISION_VERSION)),)
	$(BIN)/python -m pip uninstall --yes --quiet torchvision timm
endif
	$(BIN)/python -m pip install $(TORCH_PACKAGES) --editable ".[$(EXTRAS)]"
	@rm -f $(INSTALLING)
	@touch $@

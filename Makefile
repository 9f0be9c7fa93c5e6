# Everything here runs in .venv, which the first target that needs it makes (see scripts/setup.sh).
#
#   make demo               on a processor
#   make demo BACKEND=vllm  on a GPU

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.NOTPARALLEL:

PYTHON ?= python3
VENV ?= .venv
BACKEND ?= cpu
OUT ?= out/story
# Per cent of src/omni_trio, branches included, below which "make test" fails. What runs in forked children (engines,
# workers, the zygote) is tested but not counted: they end without the interpreter's exit, which would write it down.
COVERAGE_MIN ?= 91
PYTEST_ARGS ?=

BIN := $(VENV)/bin
CODE := $(wildcard src tests property_tests benchmarks examples scripts)
# What flake8-async knows and ruff does not, less the rules that look at one function only and so take every cleanup
# that shields itself somewhere below for one that does not (102, 103, 104, 120).
ASYNC_RULES := ASYNC101,ASYNC111,ASYNC112,ASYNC113,ASYNC118,ASYNC119,ASYNC121,ASYNC122,ASYNC123,ASYNC124,ASYNC126,ASYNC128,ASYNC900,ASYNC911

export PYTHON VENV BACKEND

.PHONY: help
help:  ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

.PHONY: setup
setup:  ## Make .venv with all that the other targets need (once; minutes)
	@bash scripts/setup.sh "$(BACKEND)"

.PHONY: demo
demo: setup  ## Let a language model tell a story and a voice read it: out/story/
	@$(BIN)/python examples/story/story.py --out $(OUT)

.PHONY: test
test: setup  ## Run all tests under coverage
	@rm -f .coverage .coverage.*
	@$(BIN)/coverage run -m pytest $(PYTEST_ARGS)
	@$(BIN)/coverage combine --quiet
	@$(BIN)/coverage report --fail-under=$(COVERAGE_MIN)

.PHONY: check
check: setup  ## Run the linters and the type checker
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/flake8-async --enable $(ASYNC_RULES) $$(find src examples -name '*.py')

.PHONY: bench
bench: setup  ## Measure, and write out/bench/report.md
	@$(BIN)/python -m benchmarks

.PHONY: docs
docs: setup  ## Build the documentation into site/
	@$(BIN)/python -m pip --quiet install --editable '.[docs]'
	@$(BIN)/mkdocs build --strict

.PHONY: clean
clean:  ## Remove what was made here, except .venv and the converted model
	rm -rf out build dist site .coverage .coverage.* .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

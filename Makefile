# Baton's tasks. `make` alone lists them.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
ARGS   ?=

.DEFAULT_GOAL := help
.PHONY: help install nixl serve test test-unit test-slow check proto clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-10s %s\n", $$1, $$2}' Makefile

install: $(STAMP)  ## make .venv with exact versions (once; again when pyproject.toml or constraints.txt change)

$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt -e '.[dev]'
	@touch $@

nixl: $(STAMP)  ## add the NIXL transport to .venv (70 MB; tests that need it are skipped without)
	$(BIN)/python -m pip install --disable-pip-version-check -q --no-deps 'nixl>=1.5,<2' 'nixl-cu12>=1.5,<2'

serve: $(STAMP)  ## fetch the small model once and serve it; more flags: make serve ARGS='--prefill 2 --decode 2'
	@exec $(BIN)/baton serve $(ARGS)

test: $(STAMP)  ## unit and end-to-end tests, without the slow ones
	$(BIN)/python -m pytest -q -m 'not slow and not gpu' $(ARGS)

test-unit: $(STAMP)  ## tests without real processes
	$(BIN)/python -m pytest -q -n auto -m 'not e2e and not slow and not gpu' $(ARGS)

test-slow: $(STAMP)  ## the tests that are too long for every change
	$(BIN)/python -m pytest -q -m 'slow and not gpu' $(ARGS)

check: $(STAMP)  ## lint, types, import rules, freshness of generated code
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m rpc.generate --check

proto: $(STAMP)  ## generate rpc/v1 from proto/
	$(BIN)/python -m rpc.generate

clean:  ## remove caches and build outputs (not .venv)
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

# Two commands matter: `make serve` and `make test`. Both set up everything they need.
#   ARGS=...       passed on to coterie serve / coterie bench / pytest
#   PIP_FLAGS=...  passed on to pip, e.g. an extra index with CPU builds of torch
#   PYTHON=...     the interpreter .venv is made with (3.11 or newer)

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.PHONY: help install serve pull test test-all check bench clean

ARGS ?=
PIP_FLAGS ?=
PYTHON ?=
BIN := .venv/bin
STAMP := .venv/.installed

help:
	@echo "make serve     install, fetch the demo model, serve it on 127.0.0.1:8000 (ARGS=...)"
	@echo "make test      install, run the default test suite (ARGS=...)"
	@echo "make test-all  the slow and soak tests too"
	@echo "make check     format, lint, types, layer contract"
	@echo "make bench     measure the demo model (ARGS=...)"
	@echo "make install   only set up .venv; make clean removes caches and build outputs"

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@check='import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))'; \
	if [ ! -x $(BIN)/python ]; then \
	  found=""; \
	  for candidate in $(or $(PYTHON),python3.11 python3.12 python3.13 python3); do \
	    if "$$candidate" -c "$$check" >/dev/null 2>&1; then found="$$candidate"; break; fi; \
	  done; \
	  if [ -z "$$found" ]; then \
	    echo "Coterie needs Python 3.11 or newer with the venv module" \
	      "(tried: $(or $(PYTHON),python3.11 python3.12 python3.13 python3))." \
	      "Install it, or name it: make PYTHON=/path/to/python3.11 ..." >&2; \
	    exit 1; \
	  fi; \
	  "$$found" -m venv .venv; \
	fi
	@echo "Installing into .venv: about two minutes, without further output"
	$(BIN)/python -m pip install --disable-pip-version-check --quiet $(PIP_FLAGS) \
	  -c constraints.txt -e '.[dev]'
	@touch $@

pull: install
	@$(BIN)/coterie pull --pip-flags="$(PIP_FLAGS)"

serve: install pull
	@exec $(BIN)/coterie serve $(ARGS)

test: install
	$(BIN)/python -m pytest --durations=15 $(ARGS)

test-all: install pull
	$(BIN)/python -m pytest --durations=25 -m 'not gpu' $(ARGS)

check: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: install pull
	@exec $(BIN)/coterie bench $(ARGS)

clean:
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

# make demo · make test · make check · make docs · make bench: each sets up .venv by itself; a second run installs nothing.

.DEFAULT_GOAL := help
.PHONY: help demo test check docs bench clean
.DELETE_ON_ERROR:

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# The first interpreter that starts and is new enough; a version manager may leave names that do not start.
PYTHON ?= $(shell for name in python3.11 python3 python3.12 python3.13; do \
	$$name -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$name && break; done)
TORCH := $(shell grep '^torch==' requirements-dev.txt)
PROJECTS := pyproject.toml $(wildcard plugins/*/pyproject.toml)

help:
	@echo "make demo   generate with and without drafts on the small checkpoint and compare"
	@echo "make test   the ordinary tests (not slow, not gpu)"
	@echo "make check  format, lint and types"
	@echo "make docs   the documentation site, into build/site"
	@echo "make bench  benchmarks"
	@echo "make clean  remove .venv and caches"

demo: $(VENV)/runtime.stamp
	$(BIN)/specdec demo qwen3.8-flash

# One thread for each of the two workers: the models of the tests are too small to share among threads.
test: $(VENV)/dev.stamp
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m "not slow and not gpu" -q

check: $(VENV)/dev.stamp
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

docs: $(VENV)/dev.stamp
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "open build/site/index.html"

bench: $(VENV)/dev.stamp
	$(BIN)/python tests/benchmarks/run.py

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "specdec needs Python 3.11 or newer: make PYTHON=/path/to/python3" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# torch first and pinned, so that the pin and not the newest release decides which wheel is taken.
$(VENV)/runtime.stamp: $(PROJECTS) requirements-dev.txt | $(BIN)/python
	$(PIP) install --quiet "$(TORCH)"
	$(PIP) install --quiet $(foreach project,$(PROJECTS),-e ./$(patsubst %/,%,$(dir $(project))))
	@touch $@

$(VENV)/dev.stamp: $(PROJECTS) requirements-dev.txt requirements-oracle.txt | $(BIN)/python
	$(PIP) install --quiet "$(TORCH)"
	$(PIP) install --quiet -r requirements-dev.txt
	$(PIP) install --quiet --no-deps -r requirements-oracle.txt
	@touch $(VENV)/runtime.stamp $@

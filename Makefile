# One word for each thing a developer does.  Everything is installed into .venv, and nowhere else.

PYTHON ?= python3
BIN := .venv/bin
# Bytecode is made of what is imported, which is a small part of what is installed.
PIP := $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check --constraint constraints.txt
# Tests run in parallel and in random order; a run prints the seed of its order as `--randomly-seed`.  Some tests wait
# for other processes, so three workers keep two cores busy.
WORKERS ?= 3
PYTEST := $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal --durations 12
COVERAGE := --cov --cov-report term:skip-covered

TEST_DEVICE ?= cuda

.PHONY: demo test test-all test-long test-gpu mutants coverage check dist release-check docs bench clean

demo: .venv/installed                  ## train on scikit-learn's digits and write the report into demo/
	$(BIN)/python examples/demo.py --out demo

test: .venv/installed-dev              ## the quick tests: about five minutes on two cores
	$(PYTEST) -m "not full and not long"

test-all: .venv/installed-dev          ## also the tests on Ray and of killed processes
	$(PYTEST) -m "not long"

test-long: .venv/installed-dev         ## the tests that wait for many processes: kills of every kind, transcripts, notebooks
	$(PYTEST) -m long

test-gpu: .venv/installed-dev          ## the tests of tests/devices on a GPU, which `make test-all` runs on a pretended one
	PIEBALD_TEST_DEVICE=$(TEST_DEVICE) $(BIN)/python -m pytest tests/devices --durations 12

mutants: .venv/installed-dev           ## small faults in a copy of the package, which the tests must find: an hour
	$(BIN)/python tests/mutants.py

coverage: .venv/installed-dev          ## all tests, and which lines the quick ones and all of them run
	$(PYTEST) -m "not full and not long" $(COVERAGE) --cov-fail-under 85
	$(PYTEST) -m "full or long" $(COVERAGE) --cov-append --cov-fail-under 93

check: .venv/installed-dev             ## style, types, and who may import whom
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

dist: .venv/installed-dev              ## a wheel and a source archive in dist/
	rm -rf dist
	$(BIN)/python -m hatchling build -d dist

release-check: dist                    ## what RELEASING.md asks for before a release: archives, and the wheel on each Python
	$(PIP) twine
	$(BIN)/python -m twine check --strict dist/*
	$(BIN)/python tests/release_check.py dist

docs: .venv/installed-dev              ## the documentation as a site, in build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: .venv/installed-dev             ## every benchmark, one folder a claim
	for claim in benchmarks/*/run.py; do $(BIN)/python "$$claim" || exit; done

clean:                                 ## what the targets above made, and tools' caches
	rm -rf .venv demo build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis .coverage*
	find piebald tests examples benchmarks -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

# The stamps are newer than what they depend on once an install has gone through, so it happens once.
.venv/installed: pyproject.toml constraints.txt | .venv/bin/python
	$(PIP) --editable .
	@touch $@

.venv/installed-dev: pyproject.toml constraints.txt | .venv/bin/python
	$(PIP) --editable '.[dev]'
	@touch $@ .venv/installed

.venv/bin/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; (3, 11) <= v < (3, 14) or sys.exit( \
	  "Piebald needs Python 3.11, 3.12 or 3.13 but $(PYTHON) is %d.%d: try make PYTHON=python3.12" % v)'
	$(PYTHON) -m venv .venv

# One front door. CI calls the same targets.
.DEFAULT_GOAL := help
SHELL := /bin/bash
VENV := .venv
PY := $(VENV)/bin/python
PYTEST_ARGS ?=

.PHONY: help setup quickstart test test-native test-python conformance lint bench lab docs

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## Install what is missing (Debian packages, venv, native programs); safe to repeat
	@tools/setup.sh

quickstart: setup ## Set up everything, then run a sandbox's whole life through the official E2B SDK
	@$(PY) tools/quickstart.py

test: setup ## All tests: native, unit, and end to end on real microVMs
	@tools/setup.sh tests
	@$(MAKE) --no-print-directory --jobs=2 test-native test-python

test-native:
	cd native && env -u MAKEFLAGS cargo test --locked --workspace # cargo cannot use make's job server for doc tests, and warns

test-python: # two workers: all that needs the node in one (see tests/conftest.py), the rest beside it
	$(PY) -m pytest tests -n 2 $(PYTEST_ARGS)

conformance: setup ## Every scenario with every official client, old and new; writes docs/conformance.md
	AENV_CONFORMANCE=all $(PY) -m pytest tests/conformance $(PYTEST_ARGS); ended=$$?; $(PY) tools/gen_docs.py; exit $$ended

lint: setup ## ruff, mypy, import-linter, rustfmt, clippy, freshness of generated pages
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports
	$(PY) tools/gen_docs.py --check
	cd native && cargo fmt --check && cargo clippy --locked --workspace --all-targets -- -D warnings

bench: setup ## Measure against the limit, side by side; prints tables and writes bench.json (about 20 minutes; AENV_BENCH_N=10: some)
	@tools/setup.sh bench
	@$(PY) tests/bench/run.py

lab: setup ## Production path (ublk), inside a sandbox with emulated KVM; HOST=1: on this machine; CHECKS=...: some
	@tools/setup.sh tests
	@$(if $(HOST),true,tools/setup.sh lab)
	@$(PY) tests/lab/run.py $(if $(HOST),--host) $(CHECKS)

docs: setup ## Regenerate the pages made from code
	$(PY) tools/gen_docs.py

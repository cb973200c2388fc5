# The two commands of the README: `make demo` and `make test`. Everything lives in .venv.
PYTHON ?= python3
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test lint types test-slow test-gpu drill speed docs clean

demo: .venv/installed  ## learn ten kinds of digits one after another, two seeds at once, and write a report
	$(BIN)/boovae train --replicas 2 --out runs/demo

test: .venv/test lint types  ## lint, types and the whole test suite, on two cores
	$(BIN)/python -m pytest -n 2 --dist worksteal

lint: .venv/test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/test
	$(BIN)/mypy

test-slow: .venv/test  ## the long numeric checks
	$(BIN)/python -m pytest -m slow

test-gpu: .venv/test  ## the checks that need a CUDA device
	$(BIN)/python -m pytest -m gpu

drill: .venv/test  ## kills, hostile files and requests, bad input, 200 tasks in sequence; ends with 1 on any loss
	$(BIN)/python benchmarks/drill.py

speed: .venv/installed  ## the engine against a plain loop and against the floor
	$(BIN)/python benchmarks/speed.py

docs: .venv/installed  ## the documentation as a site, in site/
	$(INSTALL) --editable '.[docs]'
	$(BIN)/mkdocs build --strict
	cp -r results site/

clean:
	rm -rf .venv runs site .mypy_cache .ruff_cache .pytest_cache .hypothesis

# torch comes first and by its exact version: any looser requirement may pull another build.
.venv/installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(INSTALL) "$$(grep '^torch==' constraints.txt)"
	$(INSTALL) --editable .
	touch $@

.venv/test: .venv/installed
	$(INSTALL) --editable '.[test]'
	touch $@

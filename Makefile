# The developer interface of kvstrata. `make` alone lists the recipes.
#
# Settings: PYTHON (interpreter to build the environment with), VENV (where it goes), ARGS (passed on to the command).

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules

VENV ?= .venv
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest
ARGS ?=

# An environment is made anew when the project's requirements changed, or when the clone was moved (it holds paths).
RUN_STAMP := $(VENV)/.installed-run
DEV_STAMP := $(VENV)/.installed-dev
MOVED := $(if $(findstring [$(CURDIR)],$(shell cat $(DEV_STAMP) $(RUN_STAMP) 2>/dev/null)),,moved)

$(RUN_STAMP): pyproject.toml tools/environment.sh $(MOVED)
	@tools/environment.sh "$(VENV)" "."
	@echo "[$(CURDIR)]" > $@

$(DEV_STAMP): pyproject.toml tools/environment.sh $(MOVED)
	@tools/environment.sh "$(VENV)" ".[dev]"
	@echo "[$(CURDIR)]" > $(RUN_STAMP)
	@echo "[$(CURDIR)]" > $@

ENGINE := .venvs/engine
ENGINE_STAMP := $(ENGINE)/.installed
$(ENGINE_STAMP): pyproject.toml requirements/engine.txt tools/engine_environment.sh
	tools/engine_environment.sh "$(ENGINE)"
	@touch $@

.PHONY: moved
moved:

##@ Use

.PHONY: replay
replay: $(RUN_STAMP) ## Run the main job on the built-in workload and print the report (ARGS="--model ... trace.jsonl")
	$(BIN)/kvstrata replay $(ARGS)

.PHONY: bench
bench: $(RUN_STAMP) ## Measure the core: first resolve, waiting requests' steps, stores and loads, memory (a minute)
	$(BIN)/kvstrata bench first
	$(BIN)/kvstrata bench step
	$(BIN)/kvstrata bench memory
	$(BIN)/kvstrata bench waiting
	$(BIN)/kvstrata bench resolve --rows "*/*/20/32768"

.PHONY: bench-vllm
bench-vllm: $(ENGINE_STAMP) ## Measure resolve beside vLLM in one process (an hour for all rows; ARGS="--rows ... --budget ...")
	$(ENGINE)/bin/kvstrata bench resolve --vs vllm $(ARGS)

##@ Develop

.PHONY: install
install: $(DEV_STAMP) ## Create the environment with everything that tests and checks need

.PHONY: test
test: $(DEV_STAMP) ## Run all tests but the soak (ARGS="-k name")
	$(PYTEST) -m "not soak and not engine and not services" $(ARGS)

# Servers come with the requirements, or by tools/services.sh from Debian; a test whose server is missing is skipped by
# its name, unless KVSTRATA_REQUIRE names the server (KVSTRATA_REQUIRE=object,redis).
SERVICES_STAMP := $(VENV)/.installed-services
$(SERVICES_STAMP): $(DEV_STAMP) tools/services.sh
	@tools/environment.sh "$(VENV)" ".[dev,services]"
	@for stamp in "$(RUN_STAMP)" "$(DEV_STAMP)" "$@"; do echo "[$(CURDIR)]" > "$$stamp"; done

.PHONY: test-services
test-services: $(SERVICES_STAMP) ## Run the tests against real servers on loopback (Redis, S3, Mooncake); installs them if it may
	VENV="$(VENV)" tools/services.sh
	$(PYTEST) -m "services" tests/services $(ARGS)

.PHONY: check
check: $(DEV_STAMP) ## Format, lint, types, import layers, glossary
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/python -m mypy
	$(PYTEST) tests/arch

.PHONY: format
format: $(DEV_STAMP) ## Put the code into its format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

SEEDS ?=
FROM ?= 0
JOBS ?= 2

# The second line runs the property tests again with the examples of the soak profile (tests/conftest.py).
.PHONY: soak
soak: $(DEV_STAMP) ## Run the long tests, or SEEDS=N seeds of the simulation (FROM=K JOBS=2)
ifneq ($(SEEDS),)
	$(BIN)/python -m kvstrata.testing.simulation $(SEEDS) --from $(FROM) --jobs $(JOBS) $(ARGS)
else
	KVSTRATA_PROFILE=soak $(PYTEST) -m soak --timeout 7200 -o faulthandler_timeout=7100 $(ARGS)
	KVSTRATA_PROFILE=soak $(PYTEST) -m "not soak" --timeout 7200 -o faulthandler_timeout=7100 tests/property $(ARGS)
	$(MAKE) mutants
endif

.PHONY: mutants
mutants: $(DEV_STAMP) ## Put deliberate bugs in, one after the other; the seeds must see each (KVSTRATA_MUTANTS=more.toml)
	$(BIN)/python tests/mutants/mutant_harness.py tests/mutants/mutants.toml --jobs $(JOBS) $(ARGS)

# One process per file: an engine cannot be started twice in one, and a file that hangs takes no other with it.
FILES ?= tests/engine/test_*.py
.PHONY: test-engine
test-engine: $(ENGINE_STAMP) ## Run the tests against a real vLLM, on CPUs (minutes; FILES=..., ARGS="-k name")
	failed=0; for file in $(FILES); do \
	    $(ENGINE)/bin/python -m pytest -m engine --timeout 1800 -o faulthandler_timeout=1700 $$file $(ARGS) || [[ $$? == 5 ]] || failed=1; \
	done; exit $$failed

# A series is added here and in integrations/vllm/versions.py together, once its tests pass.
VERSIONS := 0.30.0 0.31.0 0.32.0
MATRIX_FILES := tests/engine/test_engine_restore.py tests/engine/test_engine_tier.py

.PHONY: test-engine-matrix
test-engine-matrix: ## Run the engine's restore tests with every supported vLLM (not in every CI run)
	failed=0; for version in $(VERSIONS); do \
	    tools/engine_environment.sh ".venvs/engine-$$version" "$$version"; \
	    for file in $(MATRIX_FILES); do \
	        ".venvs/engine-$$version/bin/python" -m pytest -m engine --timeout 1800 -o faulthandler_timeout=1700 $$file $(ARGS) || failed=1; \
	    done; \
	done; exit $$failed

.PHONY: test-cuda
test-cuda: ## Run the engine tests on an accelerator, with the vLLM that is installed there; "not run" without one
	@if python3 -c "import torch, sys; sys.exit(not torch.cuda.is_available())" 2>/dev/null; then \
	    python3 -m pytest -m engine tests/engine/test_engine_restore.py $(ARGS); \
	else echo "test-cuda: not run: no accelerator"; fi

COVERED := layout policy core
MIN_COVERAGE := 95

.PHONY: coverage
coverage: $(DEV_STAMP) ## Run the tests and fail below $(MIN_COVERAGE) % of lines in layout, policy or core
	$(PYTEST) -m "not soak and not engine and not services" --cov=kvstrata --cov-report= $(ARGS)
	for part in $(COVERED); do \
	    $(BIN)/python -m coverage report --skip-covered --show-missing --fail-under=$(MIN_COVERAGE) \
	        --include="src/kvstrata/$$part/*"; \
	done

.PHONY: clean
clean: ## Remove the environment, caches and build results
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage
	find . -name __pycache__ -type d -not -path "./.git/*" -prune -exec rm -rf {} +

.PHONY: help
help: ## List the recipes
	@awk 'BEGIN {FS = ":.*## "} \
	    /^##@/ {printf "\n%s\n", substr($$0, 5)} \
	    /^[a-z-]+:.*## / {sub(/\$$\(MIN_COVERAGE\)/, "$(MIN_COVERAGE)"); printf "  make %-10s %s\n", $$1, $$2}' \
	    $(firstword $(MAKEFILE_LIST))

# `make demo` and `make test` need Python >= 3.11 and nothing else: the environment is made on the way.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
export RAY_AUTH_MODE := disabled
export RAY_USAGE_STATS_ENABLED := 0
# Else every process of the tests would compile what it imports anew.
unexport PYTHONDONTWRITEBYTECODE
# GPUs are for test-gpu: the other tests ask for more workers than a machine may have of them.
ifneq ($(wildcard /dev/nvidia0),)
unit patient cluster test-faults: export CUDA_VISIBLE_DEVICES :=
endif

# $(call aside,N) runs what follows at priority N: it gets what the rest leaves of the machine. The
# kernel shares that out by session first. An interrupt reaches no other session: it ends with make.
APART := $(shell command -v setsid > /dev/null && echo setsid --wait)
ENDS := $(shell setpriv --pdeathsig TERM true 2> /dev/null && echo setpriv --pdeathsig TERM)
aside = $(APART) $(ENDS) sh -c '{ echo $(1) > /proc/self/autogroup; } 2> /dev/null; exec nice -n $(1) "$$@"' aside
# Tests that compute and look at no clock: simulations, and the bits of ranks. They may take any time.
PATIENT := $(wildcard tests/control/test_*simulation.py) \
  $(patsubst %,tests/control/test_%.py,close_faults resizing) \
  $(patsubst %,tests/workers/test_%.py,backup compilation doubled_blocks fsdp grid_strategy hsdp \
    one_hash pipeline_stages staged_strategy stage_state tiled_strategy)

.PHONY: help demo test suites aside unit patient cluster test-faults test-mutations test-gpu bench docs lint style types format clean
.DEFAULT_GOAL := help

help: ## what can be made
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 14

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python >= 3.11 is needed, $(PYTHON) is older: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv || \
	  { rm -rf .venv; echo "python3 -m venv failed: install the package that has it (Debian: python3-venv)"; exit 2; }
	@echo "installing into .venv (once, and when pyproject.toml or constraints.txt change)"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[test,bench]'
	@touch $@

.venv: $(INSTALLED) ## the environment; nothing to do while pyproject.toml and constraints.txt stay

demo: $(INSTALLED) ## train, SIGKILL a worker, heal, and compare the bits (DIVERGE=1: must say NO)
	$(BIN)/python -m elastic.demo $(if $(DIVERGE),--diverge)

lint: style types ## ruff and pyright

style: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(INSTALLED)
	$(BIN)/pyright

format: $(INSTALLED) ## rewrite the sources as `make lint` wants them
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# All the others wait for part of their time: pyright and the patient tests are computed meanwhile.
test: style ## what CI runs: lint, unit tests, then the tests that start Ray, with the rest aside
	@$(MAKE) --no-print-directory --jobs 3 --output-sync=target suites patient aside

aside: $(INSTALLED)
	$(call aside,19) $(BIN)/pyright

suites:
	@$(MAKE) --no-print-directory unit LATER="$(PATIENT)"
	@$(MAKE) --no-print-directory cluster

# Some wait and some compute: each process begins in another part, and then takes of what is left.
unit: $(INSTALLED) ## the tests that start no Ray
	$(BIN)/pytest tests $(patsubst %,--ignore=%,tests/cluster tests/gpu $(LATER)) -m "not slow" \
	  -n 4 --dist worksteal --durations 10 -rsfE --disable-warnings

patient: $(INSTALLED)
	$(call aside,15) $(BIN)/pytest $(PATIENT) -m "not slow" -n 2 --dist worksteal --timeout 1800 --durations 10 -rsfE --disable-warnings

cluster: $(INSTALLED) ## the tests that start Ray
	$(BIN)/pytest tests/cluster -m "not slow" -n 4 --timeout 600 --durations 10 -rsfE --disable-warnings

test-faults: $(INSTALLED) ## the long suites: random kills, thousands of simulated runs
	$(BIN)/pytest tests --ignore=tests/gpu -m slow --timeout 600 -rsfE --disable-warnings

test-mutations: $(INSTALLED) ## one-line bugs planted in a copy of the tree: each must turn a test red
	$(BIN)/python -m tests.mutations
	$(BIN)/python -m tests.mutations --simulation

# A machine with a GPU may have a torch of its own, and nothing to install from.
test-gpu: ## what one or more GPUs allow (tests/gpu/README.md); NAMES="a1 b2" for some experiments
	@$(if $(wildcard $(INSTALLED)),$(BIN)/python,$(PYTHON)) -m tests.gpu $(NAMES)

bench: $(INSTALLED) ## every benchmark, appended to tests/bench/RESULTS.md (about an hour, idle machine)
	$(BIN)/python -m tests.bench

docs: $(INSTALLED) ## the pages from the code, and the site in build/site; a wrong link fails
	$(BIN)/python docs/generate.py
	$(BIN)/mkdocs build --strict --quiet

clean: ## remove the environment and what tools left
	rm -rf .venv build *.egg-info .pytest_cache .ruff_cache

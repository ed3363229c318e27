# make demo   set up and show speculation on against off, on a real server with the bundled model
# make demo MODEL=smollm2   the same with SmolLM2-135M-Instruct, which tools.real_model fetches; or MODEL=FOLDER
# make test   set up and run the checks and the quick tests: some minutes
# make test-all   all tests
# make load   set up and load a real server with Locust, speculation on against off; writes load_report.html
# make check  the checks and tests in the environment that is there
# make setup  only the virtual environment, with all tools

PYTHON ?= python3
VENV ?= .venv
MODEL = bundled
export PYTHON VENV

.PHONY: help setup demo test test-all check load clean

help:
	@sed -n 's/^# //p' Makefile

# The stamp: packages are installed again only when what they are made from has changed.
$(VENV)/.installed: pyproject.toml constraints.txt scripts/setup
	@scripts/setup

setup: $(VENV)/.installed

# The tools and the GPU kernels' packages are as large again as what a server needs.
$(VENV)/.serves: pyproject.toml constraints.txt scripts/setup
	@scripts/setup ''

demo: $(VENV)/.serves
	@model="$(MODEL)"; \
	if [ "$$model" = smollm2 ]; then model=$$($(VENV)/bin/python -m tools.real_model) || exit; fi; \
	$(VENV)/bin/python -m batchserve.cli demo --model "$$model"

test: setup
	@scripts/check -m "not slow and not extended"

test-all: setup
	@scripts/check

check:
	@scripts/check

load: setup
	@$(VENV)/bin/python -m load_tests.run

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis

# Two commands do everything on a fresh machine: `make run` and `make test`. Both need only Python 3.11 or newer.

# The first that runs and is new enough: a name on the PATH may be a shim for a version that is not there.
PYTHON ?= $(shell for name in python3 python3.14 python3.13 python3.12 python3.11; do \
  "$$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && command -v "$$name" && break; done)
VENV   ?= .venv
BIN    := $(VENV)/bin
# Not with --quiet: MkDocs counts no warning then, so that --strict refuses nothing.
BUILD_SITE = NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
export PIP_DISABLE_PIP_VERSION_CHECK = 1
# Many containers set it. Then every process, and the tests start hundreds, compiles all that it loads.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help run test coverage check bench simulate planted-bugs docs site release lock clean

help:  ## list the commands
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 10

run: $(VENV)/.run  ## start everything in one process: API, engine and sample workers on http://127.0.0.1:8000
	$(BIN)/oraculo dev $(ARGS)

test: check  ## check, then run the tests (LONG=1: those, too, that repeat a proof in another setting)
	$(BIN)/python -m pytest --numprocesses=4 --dist=worksteal $(if $(LONG),-m "") $(ARGS)

coverage: $(VENV)/.dev  ## measure what lines and branches the tests reach, in all their processes
	$(BIN)/coverage erase
	-$(BIN)/coverage run -m pytest --numprocesses=4 --dist=worksteal --timeout=360 $(if $(LONG),-m "") $(ARGS)
	$(BIN)/coverage combine --quiet
	$(BIN)/python -m scripts.coverage_totals

check: $(VENV)/.dev  ## ruff, mypy strict, the import layers, generated files, the site of the docs
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy tests/typing_cases.py
	$(BIN)/lint-imports
	$(BIN)/python -m scripts.check_words
	$(BIN)/python -m scripts.generate_docs --check
	$(BUILD_SITE)

bench: $(VENV)/.dev  ## measure the four workloads on the embedded setup
	$(BIN)/python -m benchmarks $(ARGS)

simulate: $(VENV)/.dev  ## run SEEDS simulated schedules under faults (SEED=n replays one)
	$(BIN)/python -m oraculo.testing.simulation $(if $(SEED),--seed $(SEED),--seeds $(or $(SEEDS),1000) --first $(or $(FIRST),0))

planted-bugs: $(VENV)/.dev  ## count the simulated schedules that it takes to catch each planted bug
	$(BIN)/python -m scripts.measure_planted_bugs $(ARGS)

docs: $(VENV)/.dev  ## write the generated files anew
	$(BIN)/python -m scripts.generate_docs

site: $(VENV)/.dev  ## build the site of the docs into site/
	$(BUILD_SITE)

release: $(VENV)/.dev  ## build wheel and sdist, and try each in a fresh environment
	rm -rf dist && $(BIN)/python -m hatchling build
	$(BIN)/python -m scripts.try_release dist/*

lock: $(VENV)/.dev  ## choose the versions of all dependencies anew
	cd requirements && UV_CUSTOM_COMPILE_COMMAND="make lock" && export UV_CUSTOM_COMPILE_COMMAND && \
	../$(BIN)/uv pip compile -q --universal --generate-hashes --python-version 3.11 --upgrade \
	  --extra servers --group ../pyproject.toml:build ../pyproject.toml -o run.txt && \
	../$(BIN)/uv pip compile -q --universal --generate-hashes --python-version 3.11 --upgrade \
	  --extra servers --extra celery --extra bullmq --group ../pyproject.toml:dev ../pyproject.toml -o dev.txt && \
	../$(BIN)/uv pip compile -q --universal --generate-hashes --python-version 3.11 --upgrade \
	  --group ../pyproject.toml:node -o node.txt

clean:  ## remove what was installed and made here
	rm -rf $(VENV) site .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .schemathesis

# -- installing ------------------------------------------------------------------------------------------------

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed. Name one: make PYTHON=/path/to/python3.11"; exit 2; }
	@$(PYTHON) -m venv $(VENV) \
	  || { echo "Python's venv module is missing; on Debian: apt-get install python3-venv"; rm -rf $(VENV); exit 2; }

$(VENV)/.run: requirements/run.txt pyproject.toml | $(BIN)/python
	@echo "Installing into $(VENV) …"
	@$(BIN)/python -m pip install --quiet --require-hashes -r requirements/run.txt
	@$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation -e .
	@touch $@

$(VENV)/.dev: requirements/dev.txt requirements/node.txt pyproject.toml | $(BIN)/python
	@echo "Installing the development tools into $(VENV) …"
	@$(BIN)/python -m pip install --quiet --require-hashes -r requirements/dev.txt
	@{ command -v node && command -v npm; } >/dev/null \
	  || $(BIN)/python -m pip install --quiet --require-hashes -r requirements/node.txt
	@$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation -e .
	@touch $@ $(VENV)/.run

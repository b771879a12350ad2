# Every target does its own set-up. PY=python3 uses the interpreter and the torch that are there, without a .venv.
SHELL := /bin/bash
.DEFAULT_GOAL := help
PYTHON ?= python3.11
PY = .venv/bin/python
READY = .venv/.ready
ifneq ($(origin PY),file)
READY =
endif
RESULTS ?= results
REPORT ?= build/report
PUBLISHED = 8b 70b 405b published
GLOB_8b = *_8b_*
GLOB_70b = *_70b_*
GLOB_405b = *_405b_*
GLOB_published = *

.PHONY: help setup bench $(PUBLISHED:%=bench-%) budgets test lint slurm-up slurm-down clean

help:  ## this list
	@awk -F ':.*## ' '/^[^\t#].*:.*## / {printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(READY)  ## create .venv with every dependency at its pinned version

.venv/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

# One thread a rank, one rank alone included: then tokens/s of all strategies compare rank by rank.
bench: $(READY)  ## the main job: 18 strategies on this machine's CPU, and the report, in under 10 minutes
	@OMP_NUM_THREADS=1 $(PY) -m sweeps sweep=strategies results=$(RESULTS); code=$$?; \
	[ $$code -le 1 ] || exit $$code; \
	$(PY) -m reports build $(RESULTS)/strategies -o $(REPORT) && exit $$code

bench-8b: $(READY)  ## the published 8B rows: simulated, or on a cluster with CLUSTER=name [DRYRUN=1]
bench-70b: $(READY)  ## the published 70B rows, likewise
bench-405b: $(READY)  ## the published 405B rows, likewise
bench-published: $(READY)  ## every published row, likewise
$(PUBLISHED:%=bench-%): bench-%:
ifdef CLUSTER
	@$(PY) -m sweeps "published=glob('$(GLOB_$*)')" engine=measure hydra/launcher=slurm cluster=$(CLUSTER) results=$(RESULTS)/bench-$* \
	  $(if $(DRYRUN),hydra.launcher.dryrun=build/sbatch)
else
	@$(PY) -m sweeps "published=glob('$(GLOB_$*)')" engine=simulate results=$(RESULTS)/bench-$*; code=$$?; \
	[ $$code -le 1 ] || exit $$code; \
	$(PY) -m reports build $(RESULTS)/bench-$* -o build/report-$* && $(PY) -m reports verdicts $(RESULTS)/bench-$* && exit $$code
endif

budgets: $(READY)  ## measure every promised time and size limit: build/budgets.json
	@$(PY) -m pytest -m budget --timeout 1800

test: $(READY)  ## the whole test suite
	@$(PY) -m pytest

lint: $(READY)  ## ruff and mypy
	@$(PY) -m ruff check . && $(PY) -m mypy

slurm-up:  ## a real SLURM on this one machine, for development and tests; prints its export lines
	@$(PYTHON) tests/slurm/local.py up

slurm-down:  ## stop it
	@$(PYTHON) tests/slurm/local.py down

clean:  ## remove build outputs and caches; results and .venv stay
	@rm -rf build .pytest_cache .mypy_cache .ruff_cache .benchmarks outputs multirun
	@find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

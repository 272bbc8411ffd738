# Everything runs in .venv, made from pinned requirements. Another Python: make PYTHON=python3.12 test

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python -m
INSTALLED := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help quickstart test test-all check bench-rival engine gpu-check

help:  ## show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

quickstart: $(INSTALLED)  ## install, then train and measure a small EAGLE-3 head on this machine
	$(RUN) eagle3_lab fit experiments/quickstart.yaml

# Two processes of one thread each: threads that wait for one another at every product must not share cores.
PYTEST := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(RUN) pytest --numprocesses 2 --dist loadfile --durations 10

test: $(INSTALLED)  ## the quick tests, no accelerator
	$(PYTEST) -m "not slow and not gpu"

test-all: $(INSTALLED)  ## all tests but those for an accelerator: what CI runs
	$(PYTEST) -m "not gpu"

check: $(INSTALLED)  ## format, lint, types
	$(RUN) ruff format --check .
	$(RUN) ruff check .
	$(RUN) pyright

bench-rival:  ## an environment with speculators, for bench train --rival .venv-rival/bin/python
	$(PYTHON) -m venv .venv-rival
	.venv-rival/bin/python -m pip install --quiet -r requirements/bench.txt
	.venv-rival/bin/python -m pip uninstall --quiet --yes torchvision torchaudio

engine:  ## an environment with vLLM for CPUs, for evaluate with an engine; about 3.4 GB
	$(PYTHON) -m venv .venv-engine
	.venv-engine/bin/python -m pip install --quiet --no-deps -r requirements/vllm.txt

gpu-check:  ## everything that needs a GPU, in 8 minutes, as gpu-check.json; installs nothing
	$(or $(wildcard $(VENV)/bin/python),$(PYTHON)) -m eagle3_lab.bench.gpu_check

$(INSTALLED): requirements/quickstart.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, $(PYTHON) is " + sys.version.split()[0] + "; say make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	@echo "installing pinned requirements into $(VENV), about 2 GB"
	$(RUN) pip install --quiet -r requirements/quickstart.txt
	$(RUN) pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

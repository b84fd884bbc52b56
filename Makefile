# The two commands: `make demo` and `make test`. Both make .venv and install what they need.
# `make help` says a line on each target: what stands behind `##`.

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin
# Python compiles what it imports, a tenth of what is installed, when it does.
INSTALL := $(RUN)/python -m pip install --no-compile
# And keeps it, whatever the environment says: else each of some hundred processes would compile torch.
unexport PYTHONDONTWRITEBYTECODE

# This folder on Python's path. Where a clone named firecaffe lies in the current folder, Python would
# take that for the package, before it asks what an editable install has put after its own finders.
# In ASCII, for Python reads such files by the locale's encoding.
define PATH_LINE
import os, pathlib, sysconfig
line = f"import sys; sys.path.append({ascii(os.getcwd())})"
pathlib.Path(sysconfig.get_path("purelib"), "firecaffe_clone.pth").write_text(line)
endef
export PATH_LINE

.DEFAULT_GOAL := help
.PHONY: help demo test lint docs tests install wheel faults soak clean

help: ## say a line on each target
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-8s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

demo: $(VENV)/installed ## two trainings of a real network: how much faster, and the same bits?
	$(RUN)/firecaffe demo recipes/nin_small.toml

# Tests beside formatting, types and docs; then those that measure rates, which have the machine for
# themselves.
test: $(VENV)/installed-dev ## lint, docs and tests: what CI runs; at most 14 minutes on two idle cores
	@$(MAKE) --no-print-directory -j 3 lint docs tests || { \
	  echo "make test: lint, docs or tests failed; see above" >&2; exit 1; }
	$(RUN)/python -m pytest -m 'alone and not slow' tests/cluster

# Files of tests side by side, the longest first (tests/order.py).
tests: $(VENV)/installed-dev ## the tests alone, but for those that measure rates
	$(RUN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder -m 'not slow and not alone and not soak'

soak: $(VENV)/installed-dev ## every composition of a training, under all settings that touch sums: hours
	$(RUN)/python -m pytest -n auto -m soak tests/ranks

faults: $(VENV)/installed-dev ## let every fault happen: 12 minutes; those of links need root
	$(RUN)/python -m benchmarks.faults.scoreboard --page benchmarks/results/faults.md

lint: $(VENV)/installed-dev ## formatting, lint, types, layers, and the English of the pages
	$(RUN)/ruff format --check .
	$(RUN)/ruff check .
	$(RUN)/mypy
	$(RUN)/lint-imports
	$(RUN)/python -m tools.prose

# All pages and the reference as a site. -E: a page that is not read anew would keep its warnings.
docs: $(VENV)/installed-dev ## the pages and the reference as a site, in build/docs
	$(RUN)/python -m sphinx -E -W -q -c docs . build/docs
	@echo build/docs/docs/index.html

install: $(VENV)/installed-dev ## make .venv, with the package and the tools of its tests

wheel: $(VENV)/installed-dev ## a wheel and an sdist, in dist
	$(RUN)/python -m build --outdir dist

# A torch that the Python at hand already has (with its GPU support) is used; else 2.13.0.
$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "firecaffe needs Python 3.11 or later; this is $$($(PYTHON) --version)." \
	         "Give another: make PYTHON=/path/to/python3.11"; exit 2; }
	$(PYTHON) -m venv $$($(PYTHON) -c 'import torch' 2>/dev/null && echo --system-site-packages) $(VENV)

$(VENV)/installed: $(VENV)/bin/python pyproject.toml
	$(RUN)/python -c 'import torch' 2>/dev/null || $(INSTALL) torch==2.13.0
	$(INSTALL) --quiet -e .
	@$(RUN)/python -c "$$PATH_LINE"
	@touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(INSTALL) --quiet -e '.[dev]'
	@touch $@

clean: ## remove .venv and what was built
	rm -rf $(VENV) build dist *.egg-info

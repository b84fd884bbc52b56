# The two commands: `make demo` and `make test`. Both make .venv and install what they need.
# `make faults` lets every fault happen (about 12 minutes; the links' need root); `make soak` tries
# every composition of a training (hours).

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

.PHONY: demo test tests soak faults lint docs clean

demo: $(VENV)/installed
	$(RUN)/firecaffe demo recipes/nin_small.toml

# Tests beside formatting, types and docs; then those that measure rates, which have the machine for
# themselves.
test: $(VENV)/installed-dev
	@$(MAKE) --no-print-directory -j 3 lint docs tests || { \
	  echo "make test: lint, docs or tests failed; see above" >&2; exit 1; }
	$(RUN)/python -m pytest -m 'alone and not slow' tests/cluster

# Files of tests side by side, the longest first (tests/order.py).
tests: $(VENV)/installed-dev
	$(RUN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder -m 'not slow and not alone and not soak'

# Each composition of holding, update, shares and ranks, under all words that touch sums: hours.
soak: $(VENV)/installed-dev
	$(RUN)/python -m pytest -n auto -m soak tests/ranks

faults: $(VENV)/installed-dev
	$(RUN)/python -m benchmarks.faults --page benchmarks/results/faults.md

lint: $(VENV)/installed-dev
	$(RUN)/ruff format --check .
	$(RUN)/ruff check .
	$(RUN)/mypy
	$(RUN)/lint-imports

# All pages and the reference as a site. -E: a page that is not read anew would keep its warnings.
docs: $(VENV)/installed-dev
	$(RUN)/python -m sphinx -E -W -q -c docs . build/docs
	@echo build/docs/docs/index.html

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

clean:
	rm -rf $(VENV) build *.egg-info

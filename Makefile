# Every target sets up what it needs: a virtual environment with the pinned versions of constraints.txt.
PYTHON ?= python3
VENV := .venv
READY := $(VENV)/.ready
NEIGHBOURS := $(VENV)/.neighbours
INSTALL := $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable
PYTEST := $(VENV)/bin/python -m pytest

.PHONY: demo test test-slow test-data test-neighbours lint bench pictures reference clean

demo: $(READY)  ## train, evaluate and show the small model of dates
	$(VENV)/bin/triptych demo

test: $(READY)  ## the quick suite, on all cores
	$(PYTEST) -n auto --dist loadfile

test-slow: $(READY)  ## what takes longer: compiled kernels and steps, the full grids
	$(PYTEST) -m slow

test-data: $(READY)  ## what reads the corpora in the folder TRIPTYCH_DATA
	$(PYTEST) -m data

test-neighbours: $(NEIGHBOURS)  ## the family inside other tools (docs/neighbours.md), which it installs
	$(PYTEST) -m neighbours

bench: $(READY)  ## the family beside transformers' own models, on this machine
	$(VENV)/bin/triptych bench

reference: $(READY)  ## docs/reference.md, from the docstrings
	$(VENV)/bin/python docs/reference.py

pictures: runs/demo/model.safetensors  ## of `triptych inspect`, in docs
	$(VENV)/bin/python docs/pictures.py

lint: $(READY)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

runs/demo/model.safetensors: | $(READY)
	$(VENV)/bin/triptych demo

clean:
	rm -rf $(VENV) .cache build *.egg-info

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed")'
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) '.[test]'
	touch $@

$(NEIGHBOURS): $(READY)
	$(INSTALL) '.[test,neighbours]'
	touch $@

# `make demo` and `make test` need python3 (3.11 or newer), make and a package registry, nothing else.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin

.PHONY: setup demo test bench clean

setup: $(VENV)/installed

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "kvprobe needs python 3.11 or newer, this is " + sys.version)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[test,bench]"
	touch $@

demo: setup            ## the planted-fact probe on the embedded model: table, rows, manifest, figure
	$(BIN)/kvprobe run planted_fact --preset demo --out runs/demo

test: setup            ## every test
	$(BIN)/python -m pytest -n 2 --dist loadfile

bench: setup           ## speed and memory against stock transformers; nothing else should run meanwhile
	$(BIN)/python tests/bench/run.py

clean:
	rm -rf $(VENV) runs build dist *.egg-info

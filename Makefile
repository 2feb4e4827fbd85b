# `make demo` and `make test` need Python >= 3.11, git and make; each does the set-up it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: install demo test lint format clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("dspark needs Python 3.11 or newer, %s is %d.%d: run make PYTHON=python3.11" % (("$(PYTHON)",) + sys.version_info[:2]) if sys.version_info < (3, 11) else 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[bundled,datasets,dev,plots]"
	touch $@

demo: install
	$(BIN)/python -m dspark.bundled.demo --out build/demo

# Files of tests run side by side, each process with one thread.
test: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 8 --dist loadfile

# mypy does not see an editable install whose package is the repository root: it gets a link.
lint: install
	mkdir -p build/typecheck && ln -sfn ../.. build/typecheck/dspark
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf build .pytest_cache .mypy_cache .ruff_cache *.egg-info

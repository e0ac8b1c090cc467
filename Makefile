# The two commands of the README: each makes .venv, installs with pip, then runs.
PYTHON ?= python3
BIN := .venv/bin
INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test test-all slow slow-all lint docs evidence zoo check package clean

demo: .venv/installed
	$(BIN)/potluck run

test: .venv/installed-dev
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 -m "not slow"

test-all: .venv/installed-dev
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 -m "not slow" --all-turns

slow: .venv/installed-dev
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 -m slow

slow-all: .venv/installed-dev
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 -m slow --all-turns

lint: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

docs: .venv/installed-dev
	PYTHONPATH=docs $(BIN)/python -m sitegen

evidence: .venv/installed-dev
	$(BIN)/python -m evidence

zoo: .venv-zoo/installed
	OMP_NUM_THREADS=1 .venv-zoo/bin/python benchmarks/any_module/run.py
	OMP_NUM_THREADS=1 .venv-zoo/bin/python benchmarks/any_module/methods.py

check: lint docs test slow

package: .venv/installed-dev
	$(BIN)/python .ci/package.py

clean:
	rm -rf .venv .venv-zoo docs/_build

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(INSTALL) -e .
	touch $@

.venv/installed-dev: .venv/installed
	$(INSTALL) -e '.[dev]'
	touch $@

.venv-zoo/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-zoo
	$(subst .venv/,.venv-zoo/,$(INSTALL)) -e '.[timm,hf]'
	touch $@

# The two commands of the README: each makes .venv, installs with pip, then runs.
PYTHON ?= python3
BIN := .venv/bin
INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test test-all slow slow-all lint docs evidence zoo check package sbom audit clean

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

# What the image has, and what is known against it. Tools have an environment of their own, and so are not listed.
sbom: .venv-image/installed .venv-audit/installed
	.venv-audit/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible --output-file sbom.json .venv-image

# Asks PyPI's database of vulnerabilities, so that it needs the network. What it does not know fails, too: of versions
# such as torch's 2.13.0+cpu it knows what is before the plus.
audit: .venv-image/installed .venv-audit/installed
	.venv-image/bin/pip list --format freeze --exclude-editable > .venv-image/versions.txt
	sed -i.bak 's/+.*//' .venv-image/versions.txt
	.venv-audit/bin/pip-audit --strict --disable-pip --no-deps --requirement .venv-image/versions.txt

clean:
	rm -rf .venv .venv-zoo .venv-image .venv-audit docs/_build

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

.venv-image/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-image
	$(subst .venv/,.venv-image/,$(INSTALL)) -e '.[flower]'
	touch $@

.venv-audit/installed: pyproject.toml
	$(PYTHON) -m venv .venv-audit
	$(subst .venv/,.venv-audit/,$(INSTALL)) 'cyclonedx-bom>=7,<8' 'pip-audit>=2.9,<3'
	touch $@

# Every target makes the environment first if it is not there: .venv, with what the tests need.

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin
OLD := .venv-transformers-5.17
TESTS ?= tests

.PHONY: env demo test test-old lint bench docs wheel clean

env: $(VENV)/.made

$(VENV)/.made: pyproject.toml setup.py constraints.txt csrc/abi.cpp csrc/statetap.h
	$(PYTHON) -m venv $(VENV)
	$(RUN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt pip setuptools wheel
	$(RUN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(RUN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[all,dev]"
	touch $@

$(OLD)/.made: $(VENV)/.made
	rm -rf $(OLD)
	$(RUN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(OLD) "transformers==5.17.0" "huggingface-hub<2"
	touch $@

demo: env  ## a sweep over the corpus in examples/, then a trace and an edit
	$(RUN)/python examples/demo.py

test: env test-new test-old  ## everything, then tracing and families again on the older transformers

.PHONY: test-new
test-new: env
	$(RUN)/python -m pytest $(TESTS)

test-old: $(OLD)/.made
	PYTHONPATH=$(OLD) $(RUN)/python -m pytest tests/families tests/mixers tests/tracing

lint: env
	$(RUN)/ruff check .
	$(RUN)/ruff format --check .
	$(RUN)/mypy
	$(RUN)/lint-imports --no-cache

bench: env
	$(RUN)/python benchmarks/run.py

docs: env
	$(RUN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[docs]"
	$(RUN)/python -m sphinx -W -q -b html docs docs/_build/html

wheel: env
	$(RUN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .

clean:
	rm -rf $(VENV) $(OLD) build dist docs/_build python/*.egg-info

# Every target makes what it needs first, if it is not there: .venv, and for `test` and `docs` a little more. Afterwards
# none needs the network.

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin
PIP := $(RUN)/python -m pip --disable-pip-version-check --quiet install -c constraints.txt
OLD := .venv-transformers-5.17
TESTS ?= tests

.PHONY: env demo test test-new test-old lint bench docs wheel clean

env: $(VENV)/.made

$(VENV)/.made: pyproject.toml setup.py constraints.txt $(wildcard csrc/*.cpp csrc/*.h)
	$(PYTHON) -m venv $(VENV)
	$(PIP) setuptools wheel -e ".[all,dev]"
	touch $@

# Laid over the same environment by PYTHONPATH: the oldest transformers that is supported.
$(OLD)/.made: | $(VENV)/.made
	rm -rf $(OLD)
	$(RUN)/python -m pip --disable-pip-version-check --quiet install --no-deps --target $(OLD) "transformers==5.17.0" "huggingface-hub==1.33.0"
	touch $@

demo: env  ## a sweep over the corpus in examples/, then a trace and an edit
	$(RUN)/python examples/demo.py

test: test-new test-old  ## everything, then what touches transformers again on its oldest version

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

$(VENV)/.docs: $(VENV)/.made
	$(PIP) -e ".[docs]"
	touch $@

docs: $(VENV)/.docs
	$(RUN)/python -m sphinx -W -q -b html docs docs/_build/html

# build/ is setuptools' own, and would bring back files that are gone.
wheel: env
	rm -rf build
	$(RUN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .

clean:
	rm -rf $(VENV) $(OLD) build dist docs/_build python/*.egg-info python/statetap/ops/libstatetap.*

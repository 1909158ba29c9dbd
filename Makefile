# `make help` lists the targets. Needs GNU make and Python 3.11, 3.12 or 3.13 with its venv module; installs the rest.

.DEFAULT_GOAL := help

VENV ?= .venv
# Which conf/workflow/$(SIZE).yaml `make all` runs.
SIZE ?= full
CORES ?= all
# 1: take torch from the Python that makes the virtual environment (a GPU machine that has its own build).
SYSTEM_SITE ?=
# A wheel index to take torch from, such as PyTorch's own one of CPU builds; empty: the index pip is set up for.
TORCH_INDEX ?=
# Tests run in this many processes, each with its share of the cores; PYTEST_ARGS: what else to tell pytest.
WORKERS ?= 2
PYTEST_ARGS ?=
SNAKEMAKE_ARGS ?=

PYTHON_RANGE := import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))
# The first interpreter that fits, else python3, which the venv rule then rejects by name.
PYTHON ?= $(or $(shell for python in python3 python3.13 python3.12 python3.11; do \
	$$python -c '$(PYTHON_RANGE)' 2>/dev/null && echo $$python && break; done),python3)

# CUDA 13 needs driver 580 or newer.
TARGET ?= $(shell nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null \
	| awk -F. 'NR == 1 { found = 1; print ($$1 >= 580) ? "cu13" : "cu12" } END { if (!found) print "cpu" }')
TORCH := $(shell awk '$$1 == "$(TARGET)" { print $$2 }' torch.lock)
ifeq ($(TORCH),)
$(error TARGET must be one of $(shell awk '!/^\#/ { print $$1 }' torch.lock | paste -sd' '), got '$(TARGET)')
endif

# Everything runs by this interpreter and finds its own programs first, whatever the caller's shell has active.
RUN = PATH="$(abspath $(VENV))/bin:$$PATH"
PY = $(VENV)/bin/python
PIP = $(PY) -m pip --disable-pip-version-check --no-input
# Python compiles the few modules it imports; compiling them all takes as long as the rest of the installation. An image that
# nobody may write to wants it: COMPILE=--compile. Where the caller's shell forbids Python to keep what it compiled, every
# process would compile torch again (15 s): hence the empty value.
COMPILE ?= --no-compile
export PYTHONDONTWRITEBYTECODE :=
INSTALL = $(PIP) install --quiet $(COMPILE)

# Stamps: a second call starts at once, a changed lock or target installs again.
VENV_STAMP := $(VENV)/.made-venv
LOCK_STAMP := $(VENV)/.made-lock
TORCH_STAMP := $(VENV)/.made-torch-$(if $(SYSTEM_SITE),system,$(TARGET)-$(TORCH))
PACKAGE_STAMP := $(VENV)/.made-package
# A CUDA build of torch brings CUDA packages of its own, and a GPU machine its toolkit.
TOOLS_STAMP := $(if $(filter cpu,$(TARGET)),$(VENV)/.made-tools)

.PHONY: all kernels test figures report sync record lint setup deps flashmla lock clean distclean help

all: setup ## run the whole workflow: every figure, table and claim (SIZE=full, short or large)
	@echo "== workflow ($(SIZE))"
	@$(RUN) $(PY) -m snakemake all --configfile "conf/workflow/$(SIZE).yaml" --cores $(CORES) $(SNAKEMAKE_ARGS)

kernels: $(if $(shell command -v $${NVCC:-nvcc}),,$(VENV_STAMP) $(TOOLS_STAMP)) ## compile the CUDA kernels (nvcc 12.4 or newer, or one from the package index; no GPU)
	@$(RUN) kernels/build.sh

figures: setup ## redraw the figures and tables from the result files
	@$(RUN) $(PY) -m snakemake figures --configfile "conf/workflow/$(SIZE).yaml" --cores $(CORES) $(SNAKEMAKE_ARGS)

report: setup ## one HTML of what `make all` made: claims, figures, tables, times (results/report.html)
	@$(RUN) $(PY) -m snakemake all --report report.html --configfile "conf/workflow/$(SIZE).yaml" --cores 1

test: setup ## run the tests; GPU tests skip without a Hopper GPU (PYTEST_ARGS="-k cache")
	@echo "== tests"
	@$(RUN) $(PY) -m pytest -n $(WORKERS) --dist loadscope $(PYTEST_ARGS)

sync: setup ## upload the offline Weights & Biases runs (needs WANDB_API_KEY or wandb login)
	@$(RUN) $(PY) -m snapmla.tracking sync

record: setup ## measure on this machine's Hopper GPU what has not been, and keep it in results/recorded/
	@$(RUN) $(PY) -m snakemake kernel_bench accumulation --configfile "conf/workflow/$(SIZE).yaml" --cores $(CORES) $(SNAKEMAKE_ARGS)
	@$(PY) -m snapmla.record

lint: setup ## check style (ruff), the Dockerfile (hadolint) and the workflow (snakemake --lint)
	@$(PY) -m ruff check .
	@$(VENV)/bin/hadolint Dockerfile
	@$(RUN) $(PY) -m snakemake --lint

setup: $(PACKAGE_STAMP) $(TOOLS_STAMP) ## make the virtual environment with everything in it (TARGET=cpu, cu12 or cu13)

deps: $(LOCK_STAMP) $(TORCH_STAMP) # without this package: a layer of its own in the Dockerfile

$(VENV_STAMP):
	@$(PYTHON) -c '$(PYTHON_RANGE)' 2>/dev/null || { echo "SnapMLA needs Python 3.11, 3.12 or 3.13,\
 got '$(PYTHON)' ($$($(PYTHON) --version 2>&1 | head -n 1)): set PYTHON=/path/to/python." >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "The venv module of '$(PYTHON)' is missing:\
 install it (Debian and Ubuntu: apt-get install python3-venv)." >&2; exit 1; }
	@echo "== virtual environment $(VENV) ($$($(PYTHON) --version))"
	@$(PYTHON) -m venv $(if $(SYSTEM_SITE),--system-site-packages) $(VENV)
	@touch $@

$(LOCK_STAMP): requirements.lock $(VENV_STAMP)
	@echo "== packages of requirements.lock (about a minute)"
	@$(INSTALL) --require-hashes -r requirements.lock
	@touch $@

# After the lock, which already holds what torch itself requires of Python packages.
$(TORCH_STAMP): $(LOCK_STAMP)
	@rm -f $(VENV)/.made-torch-*
ifdef SYSTEM_SITE
	@$(PY) -c 'import torch; print("== torch", torch.__version__, "of this Python")' || { echo "SYSTEM_SITE=1 takes\
 torch from '$(PYTHON)', which cannot import it." >&2; exit 1; }
else
	@echo "== torch $(TORCH) for $(TARGET)"
	@$(INSTALL) $(if $(TORCH_INDEX),--index-url "$(TORCH_INDEX)") torch==$(TORCH)
endif
	@touch $@

$(PACKAGE_STAMP): pyproject.toml $(LOCK_STAMP) $(TORCH_STAMP)
	@echo "== snapmla (editable)"
	@$(INSTALL) --no-deps --no-build-isolation --editable .
	@touch $@

ifneq ($(TOOLS_STAMP),)
$(TOOLS_STAMP): kernels/tools.lock $(VENV_STAMP)
	@echo "== CUDA compiler and disassembler of kernels/tools.lock"
	@$(INSTALL) --no-deps --require-hashes -r kernels/tools.lock
	@touch $@
endif

# The BF16 baseline of the kernel benchmark on CUDA 13. It declares torch >= 2.14.1 but runs with 2.11: hence --no-deps.
# On CUDA 12 it has to be built from source: see the Dockerfile.
flashmla: setup ## install FlashMLA, the BF16 baseline (CUDA 13 only)
	@[ "$(TARGET)" = cu13 ] || { echo "make flashmla needs TARGET=cu13, got '$(TARGET)'." >&2; exit 1; }
	@$(INSTALL) --no-deps sgl-flash-mla==1.0.0

# torch is resolved, so that its own requirements are locked, and then dropped with its CUDA packages: torch.lock pins it.
lock: $(VENV_STAMP) ## write requirements.lock anew from pyproject.toml (UV_ARGS=--upgrade for newer versions)
	@$(INSTALL) "uv>=0.9"
	@cp requirements.lock $(VENV)/requirements.lock 2>/dev/null || true
	@$(PY) -m uv pip compile pyproject.toml --extra dev --extra launchers --extra slurm --extra kubernetes --universal --python-version 3.11 --generate-hashes \
		--quiet --custom-compile-command "make lock" --output-file $(VENV)/requirements.lock $(UV_ARGS)
	@awk '/^[^ #]/ { keep = !/^(torch|triton|nvidia-[a-z0-9-]+|cuda-[a-z]+)==/ } /^#/ || keep' \
		$(VENV)/requirements.lock > requirements.lock
	@$(PY) -m uv pip compile kernels/tools.in --universal --python-version 3.11 --generate-hashes --quiet \
		--custom-compile-command "make lock" --output-file kernels/tools.lock
	@echo "requirements.lock: $$(grep -c == requirements.lock) packages"

clean: ## remove what the tools cache; results/ and the virtual environment stay
	@rm -rf .pytest_cache .ruff_cache build dist
	@find . -name __pycache__ -type d -not -path './.venv/*' -prune -exec rm -rf {} +

distclean: clean ## clean, and remove the virtual environment
	@rm -rf $(VENV)

help: ## this list
	@awk -F':.*## ' '/^[a-z]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# syntax=docker/dockerfile:1
# Two images from one recipe, by torch.lock's targets:
#   docker build -t snapmla .                                     GPU: CUDA 12.8, torch 2.10, FlashMLA as the BF16 baseline
#   docker build -t snapmla-cpu --build-arg TARGET=cpu \
#       --build-arg TORCH_INDEX=URL .                             no GPU; URL: PyTorch's wheel index of CPU builds
#                                                                 (without it torch's larger CUDA build is installed)
# Running writes to the results folder and nowhere else, and works as any user:
#   mkdir -p results
#   docker run --rm --gpus all --user "$(id -u):$(id -g)" -v "$PWD/results:/results" snapmla snakemake all
#
# Bases, packages and sources can come from mirrors: see the ARGs. Digests have no default: look up the one that your
# registry serves and pin it, --build-arg GPU_BASE_DIGEST=@sha256:… (with the @).
ARG TARGET=cu12
ARG GPU_BASE=nvidia/cuda:12.8.1-devel-ubuntu24.04
ARG GPU_BASE_DIGEST=
ARG CPU_BASE=python:3.12.8-slim-bookworm
ARG CPU_BASE_DIGEST=

# --- System packages. g++: torch.compile builds its CPU code with it.
FROM ${CPU_BASE}${CPU_BASE_DIGEST} AS base-cpu
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends ca-certificates g++ make \
    && rm -rf /var/lib/apt/lists/*

FROM ${GPU_BASE}${GPU_BASE_DIGEST} AS base-cu12
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends \
        ca-certificates g++ git make ninja-build python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

# --- The lock and torch, installed as on any machine.
# hadolint ignore=DL3006
FROM base-${TARGET} AS deps
ARG TARGET
ARG PIP_INDEX_URL
ARG TORCH_INDEX
ARG PIP_NO_CACHE_DIR=1
WORKDIR /opt/snapmla
COPY Makefile requirements.lock torch.lock ./
RUN make deps TARGET="${TARGET}" VENV=/opt/venv COMPILE=--compile

# --- The BF16 baseline: none without a GPU; with CUDA 12, FlashMLA built from source. Pinned to the last commit
# (2026-04-29) before its release of 2026-09-30, which removed the Hopper kernels; that commit pins CUTLASS. Its SM100
# kernels need nvcc 12.9 and are left out.
FROM deps AS baseline-cpu

FROM deps AS flashmla
ARG FLASHMLA_REPOSITORY=https://github.com/deepseek-ai/FlashMLA.git
ARG FLASHMLA_COMMIT=9241ae3ef9bac614dd25e45e507e089f888280e0
ARG CUTLASS_REPOSITORY=https://github.com/NVIDIA/cutlass.git
ARG MAX_JOBS=4
WORKDIR /build/flashmla
RUN git init --quiet . \
    && git fetch --quiet --depth 1 "${FLASHMLA_REPOSITORY}" "${FLASHMLA_COMMIT}" \
    && git checkout --quiet FETCH_HEAD \
    && git submodule init csrc/cutlass \
    && git config submodule.csrc/cutlass.url "${CUTLASS_REPOSITORY}" \
    && git submodule update --quiet --depth 1 csrc/cutlass \
    && FLASH_MLA_DISABLE_SM100=1 NVCC_THREADS=2 MAX_JOBS="${MAX_JOBS}" \
        /opt/venv/bin/python -m pip wheel --no-deps --no-build-isolation --wheel-dir /wheels .

FROM deps AS baseline-cu12
RUN --mount=type=bind,from=flashmla,source=/wheels,target=/wheels \
    /opt/venv/bin/python -m pip install --no-deps /wheels/*.whl

# --- This package.
# hadolint ignore=DL3006
FROM baseline-${TARGET} AS snapmla
WORKDIR /opt/snapmla
ARG TARGET
ARG PIP_NO_CACHE_DIR=1
COPY . .
RUN make setup TARGET="${TARGET}" VENV=/opt/venv \
    && if command -v nvcc; then make kernels; fi \
    && /opt/venv/bin/python -m compileall -q snapmla \
    && mkdir -m 1777 /results
# The commit for the provenance of results: the image has no .git (--build-arg SNAPMLA_COMMIT="$(git rev-parse HEAD)").
ARG SNAPMLA_COMMIT
# No home, no passwd entry, a read-only source: what libraries cache and their temporary files go below /results (also with
# docker run --read-only), and the user's name, which some of them ask for, comes from the environment.
ENV SNAPMLA_COMMIT=${SNAPMLA_COMMIT} \
    SNAPMLA_RESULTS=/results \
    PATH=/opt/venv/bin:${PATH} \
    HOME=/results/.home \
    XDG_CACHE_HOME=/results/.cache \
    MPLCONFIGDIR=/results/.cache/matplotlib \
    TORCHINDUCTOR_CACHE_DIR=/results/.cache/torchinductor \
    TMPDIR=/results \
    USER=snapmla \
    LOGNAME=snapmla \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
# What it finds while the container runs, with a sentence of advice, is in `docker inspect`.
HEALTHCHECK --interval=10m --timeout=60s --retries=1 CMD ["/opt/venv/bin/python", "-m", "snapmla.preflight", "--running"]
ENTRYPOINT ["/usr/bin/env"]
CMD ["snakemake", "all"]

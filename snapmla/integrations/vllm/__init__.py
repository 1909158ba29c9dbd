"""SnapMLA in vLLM: an MLA attention backend with the 644-byte cache, for Hopper GPUs.

    vllm serve MODEL --attention-backend CUSTOM

vLLM finds it by the entry point `vllm.general_plugins`, in every process. The cache is SnapMLA's whatever --kv-cache-dtype
says ("auto" or "fp8"). What the files may touch: `pages.py` no vLLM, `backend.py` and `decode_bench.py` vLLM's
interfaces of the versions in `SUPPORTED`, this one its registry only.
"""

from __future__ import annotations

SUPPORTED = "0.25"
"""vLLM's versions that the backend is written for, as their first two numbers; others are refused when it is selected."""

BACKEND = "snapmla.integrations.vllm.backend.SnapMLABackend"


def register() -> None:
    """The entry point: name the backend to vLLM. Imports neither it nor CUDA, and may run again."""
    try:
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
    except ImportError:  # an older vLLM, in which nobody can select it, and which must start all the same
        return
    register_backend(AttentionBackendEnum.CUSTOM, BACKEND)


def check_version(version: str) -> None:
    """Raises ImportError for a vLLM that is not supported."""
    if version.split(".")[:2] != SUPPORTED.split("."):
        raise ImportError(f"snapmla's attention backend needs vLLM {SUPPORTED}, got {version}.")

"""What every test runs under: few threads, no tracking, own results, GPU tests only on a Hopper GPU."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
THREADS = max(1, (os.cpu_count() or 1) // WORKERS)

# Before torch is imported, here or in a child process: xdist's workers share the cores.
os.environ["OMP_NUM_THREADS"] = str(THREADS)
# Tests of the tracking ask for another mode themselves; no other test may start a run.
os.environ["WANDB_MODE"] = "disabled"
os.environ["WANDB_SILENT"] = "true"
# A caller's own settings must not reach the tests.
for name in ("SNAPMLA_COMMIT", "SNAPMLA_RUN_GROUP", "WANDB_API_KEY"):
    os.environ.pop(name, None)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests marked gpu, with the reason, unless a Hopper GPU is there; ask only if needed."""
    gpu_tests = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_tests and (reason := why_no_hopper()):
        for item in gpu_tests:
            item.add_marker(pytest.mark.skip(reason=reason))


def why_no_hopper() -> str | None:
    """Why GPU tests cannot run here, or None."""
    import torch

    if not torch.cuda.is_available():
        return "needs a Hopper GPU, got none"
    capability = torch.cuda.get_device_capability()
    if capability != (9, 0):
        return f"needs a Hopper GPU (compute capability 9.0), got {capability[0]}.{capability[1]}"
    return None


@pytest.fixture(scope="session", autouse=True)
def _results_of_the_session(tmp_path_factory: pytest.TempPathFactory) -> None:
    """For fixtures of a wider scope than a test: no test reads or writes the checkout's results/."""
    os.environ["SNAPMLA_RESULTS"] = str(tmp_path_factory.mktemp("results"))


@pytest.fixture(autouse=True)
def _results_of_the_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A results folder for each test, so that none finds another's."""
    monkeypatch.setenv("SNAPMLA_RESULTS", str(tmp_path / "results"))

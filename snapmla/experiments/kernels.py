"""Compile the CUDA kernels ahead of time (kernels/build.sh): the workflow's first step; needs nvcc, no GPU.

    python -m snapmla.experiments.kernels nvcc=/usr/local/cuda-12.9/bin/nvcc

Writes results/kernels/: the library, which the workflow's other steps use, and kernels.csv. Without a compiler the
package's own library is taken (an image has one), and without that the row says "not run".
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from omegaconf import MISSING

from snapmla import native, results
from snapmla.experiments._app import BaseConfig, Run, application

COLUMNS = ("file", "bytes", "sha256", "nvcc", "seconds", "status", "reason", "source")


@dataclass
class KernelsConfig(BaseConfig):
    nvcc: str | None = MISSING


def build(folder: Path, nvcc: str | None) -> dict:
    """Put the library into `folder` and return its row; RuntimeError where the compiler refuses the code."""
    library = folder / native.LIBRARY.name
    row = dict.fromkeys(COLUMNS) | {"file": library.name, "source": "measured"}
    script = results.REPOSITORY / "kernels" / "build.sh" if results.REPOSITORY else None
    compiler, why_not = _compiler(script, nvcc)
    if compiler:
        started = time.monotonic()
        done = _run([script, library], nvcc)
        if done.returncode:
            raise RuntimeError(f"kernels/build.sh failed:\n{done.stdout}{done.stderr}")
        row |= {
            "seconds": round(time.monotonic() - started, 1),
            "nvcc": _version(compiler),
            "status": "built",
        }
    elif native.LIBRARY.is_file():
        shutil.copy(native.LIBRARY, library)
        row |= {"status": "prebuilt", "reason": why_not}
    else:
        return row | {"status": "not run", "reason": why_not}
    return row | {"bytes": library.stat().st_size, "sha256": hashlib.sha256(library.read_bytes()).hexdigest()}


def _compiler(script: Path | None, nvcc: str | None) -> tuple[str | None, str | None]:
    """The nvcc that build.sh would take, or None and why there is none."""
    if script is None:
        return None, "The package is installed without the kernels' source."
    done = _run([script, "--nvcc"], nvcc)
    return (None, done.stderr.strip()) if done.returncode else (done.stdout.strip(), None)


def _run(command: list, nvcc: str | None) -> subprocess.CompletedProcess[str]:
    environment = os.environ | ({"NVCC": nvcc} if nvcc else {})
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def _version(compiler: str) -> str | None:
    found = re.search(r"V(\d+\.\d+\.\d+)", _run([compiler, "--version"], None).stdout)
    return found.group(1) if found else None


@application("kernels", KernelsConfig)
def main(cfg: KernelsConfig, run: Run) -> None:
    row = build(run.out, cfg.nvcc)
    run.write_table("kernels.csv", [row])
    run.progress(f"{row['file']}: {row['status']}{': ' + row['reason'] if row['reason'] else ''}")


if __name__ == "__main__":
    main()

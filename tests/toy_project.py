"""A small copy of this project for tests: the real workflow and infrastructure around experiments that take
no time."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent

EXPERIMENTS = {  # name: (what it needs, what it makes)
    "kernels": ([], ["kernels.csv"]),
    "probe": ([], ["model/config.json", "model/model.safetensors", "training.csv", "corpus.json"]),
    "latents": (["probe/model"], ["latents.safetensors", "latents.json", "heldout.csv"]),
    "distribution": (["latents/latents.json"], ["ranges.csv", "histogram.csv", "mse.csv"]),
    "fidelity": (["latents/latents.json", "probe/model"], ["layer_error.csv", "kernels.csv"]),
    "quality": (["probe/model"], ["quality.csv"]),
    "drift": (["probe/model"], ["drift.csv"]),
    "ablation": (["latents/latents.json"], ["ablation.csv", "accumulation.csv"]),
    "accumulation": (["kernels/kernels.csv"], ["accumulation.csv", "kernels.csv"]),
    "kernel_bench": (
        ["kernels/kernels.csv"],
        ["kernel_bench.csv", "latency.csv", "ceilings.csv", "roofline.csv"],
    ),
    "throughput": (["kernels/kernels.csv"], ["throughput.csv", "step_kernels.csv"]),
    "serving": (["kernels/kernels.csv", "probe/model"], ["serving.csv"]),
}
ON_REQUEST = {"benchmarks": ([], ["benchmarks.csv"])}  # what `snakemake all` leaves out
MEASURING = ("kernel_bench", "throughput", "serving")
FIGURES = ("fig1", "fig1b", "fig2", "fig3", "fig4", "fig4b", "fig5", "fig6", "fig7", "algorithm1", "fig_accumulation", "fig_drift")
TABLES = ("table1", "table2", "table_kernels", "table_ablation", "table_serving")
DRAWN = {  # and the files of each
    **{name: [f"figures/{name}.{kind}" for kind in ("svg", "pdf", "png")] for name in FIGURES},
    **{name: [f"tables/{name}.{kind}" for kind in ("html", "csv", "md", "tex")] for name in TABLES},
    "claims": ["claims.html", "claims.csv", "claims.md"],
}

EXPERIMENT = '''"""A stand-in for the experiment {name}."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field

from omegaconf import MISSING

from snapmla.experiments import helper
from snapmla.experiments._app import BaseConfig, Run, application


@dataclass
class Inner:
    steps: int = MISSING


@dataclass
class ToyConfig(BaseConfig):
    rows: int = MISSING
    sizes: list[int] = MISSING
    inner: Inner = field(default_factory=Inner)


@application("{name}", ToyConfig)
def main(cfg: ToyConfig, run: Run) -> None:
    for needed in {needs}:
        run.input(*needed.split("/", 1))
    begin = time.time() % 100_000  # tables keep nine digits
    time.sleep({seconds})
    rows = [dict(row=i, value=random.random(), source="measured") for i in range(cfg.rows)]
    if {seconds}:
        rows = [dict(begin=begin, end=time.time() % 100_000, source="measured")]
    for file in {makes}:
        if file.endswith(".csv"):
            run.write_table(file, rows)
        else:
            path = run.out / file
            path.parent.mkdir(exist_ok=True)
            path.write_text(f"{{file}} {{cfg.rows}} {{helper.VALUE}}")


if __name__ == "__main__":
    main()
'''

FIGURE = """import sys
from pathlib import Path

name = Path(__file__).stem
root = Path(sys.argv[sys.argv.index("--results") + 1])
if "--print" in sys.argv:
    print("the claims:", (root / "claims.csv").read_text())
    raise SystemExit
for file in {files}:
    path = root / file
    path.parent.mkdir(exist_ok=True)
    path.write_text("<svg xmlns='http://www.w3.org/2000/svg'/>" if file.endswith("svg") else "a,b\\n1,2\\n")
"""


def build(folder: Path) -> Path:
    """Makes the project in ``folder`` and returns it."""
    skip = shutil.ignore_patterns("__pycache__", ".snakemake")
    shutil.copytree(REPOSITORY / "workflow", folder / "workflow", ignore=skip)
    shutil.copytree(REPOSITORY / "conf" / "workflow", folder / "conf" / "workflow")
    shutil.copy(REPOSITORY / "conf" / "base.yaml", folder / "conf")
    experiments = folder / "snapmla" / "experiments"
    experiments.mkdir(parents=True)
    (folder / "snapmla" / "__init__.py").touch()
    for name in (
        "results.py",
        "provenance.py",
        "tracking.py",
        "experiments/__init__.py",
        "experiments/_app.py",
    ):
        shutil.copy(REPOSITORY / "snapmla" / name, folder / "snapmla" / name)
    (experiments / "helper.py").write_text("VALUE = 1\n")
    # The applications seed torch: a stand-in spares each process two seconds of importing it.
    (folder / "torch.py").write_text("def manual_seed(seed): pass\n")
    for name, (needs, makes) in (EXPERIMENTS | ON_REQUEST).items():
        seconds = 1.0 if name in MEASURING else 0
        module = EXPERIMENT.format(name=name, needs=needs, makes=makes, seconds=seconds)
        (experiments / f"{name}.py").write_text(module)
        (folder / "conf" / f"{name}.yaml").write_text("rows: 3\nsizes: [1, 2]\ninner:\n  steps: 7\n")
    figures = folder / "paper_figures"
    (figures / "published").mkdir(parents=True)
    (figures / "published" / "claims.toml").write_text("x = 1\n")
    for name, files in DRAWN.items():
        (figures / f"{name}.py").write_text(FIGURE.format(files=files))
    return folder


def environment(**changes: str | None) -> dict[str, str]:
    """This process's environment, no results folder and import path, with ``changes`` (None removes)."""
    merged = {**os.environ, "SNAPMLA_RESULTS": None, "PYTHONPATH": None, **changes}
    return {name: value for name, value in merged.items() if value is not None}


def run(
    *command: str | Path, cwd: Path, timeout: float = 120, **changes: str | None
) -> subprocess.CompletedProcess[str]:
    """`unattended`, of ``python -m …``."""
    return unattended([sys.executable, "-m", *command], timeout, cwd=cwd, env=environment(**changes))


def unattended(
    command: Sequence[str | Path], timeout: float, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Runs without a terminal; stdout and stderr come together in ``stdout``."""
    return subprocess.run(
        [*map(str, command)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        check=False,
        **options,
    )

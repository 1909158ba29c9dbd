"""Keep the measurements of a GPU in results/recorded/<gpu>/, for machines that have none like it.

    python -m snapmla.record [--results results] [--recorded results/recorded]

Copies what the last run measured on a Hopper GPU (kernel_bench, and the kernels' errors from accumulation), with every
row's source turned into "recorded", the run.json that says who measured, and a manifest of digests. The folder is
replaced as a whole.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from snapmla import results

TABLES = {
    "kernel_bench.csv": "kernel_bench/kernel_bench.csv",
    "latency.csv": "kernel_bench/latency.csv",
    "ceilings.csv": "kernel_bench/ceilings.csv",
    "flat_attention.csv": "accumulation/kernels.csv",
}
"""Name in the recorded folder -> result file."""


def record(source: Path, recorded: Path) -> Path:
    """Write the folder of the GPU that `source` was measured on and return it; ValueError where none was."""
    tables = {}
    for name, file in TABLES.items():
        table = results.read_csv(source / file, ["source", "status", "gpu"])
        if (table["status"] == "ok").any():
            tables[name] = table.assign(source="recorded")
    if "kernel_bench.csv" not in tables:
        raise ValueError(
            f"{source / 'kernel_bench'} must hold measured rows, got none: measure on a Hopper GPU first."
        )
    gpus = {gpu for table in tables.values() for gpu in table["gpu"].dropna().unique()}
    if len(gpus) != 1:
        raise ValueError(f"all tables must come from one GPU, got {', '.join(sorted(gpus))}.")
    folder = recorded / folder_name(gpus.pop())
    with results.atomic_path(folder) as partial:
        partial.mkdir(parents=True)
        for name, table in tables.items():
            results.write_csv(partial / name, table)
        run = results.read_json(source / "kernel_bench" / "run.json")
        results.write_json(partial / "run.json", run)
        digests = {
            path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(partial.iterdir())
        }
        rows = {name: len(table) for name, table in tables.items()}
        results.write_json(partial / "manifest.json", {"rows": rows, "sha256": digests})
    return folder


def folder_name(gpu: str) -> str:
    """ "NVIDIA H200" -> "h200"."""
    words = re.sub(r"(?i)nvidia|hbm\S*|[^\w]+", " ", gpu).split()
    return "-".join(words).lower()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=results.results_root(None))
    parser.add_argument(
        "--recorded", type=Path, default=None, help="default: the repository's results/recorded"
    )
    given = parser.parse_args(argv)
    recorded = given.recorded or (results.REPOSITORY or Path.cwd()) / "results" / "recorded"
    try:
        print(record(given.results, recorded))
    except (ValueError, OSError) as error:
        print(f"snapmla.record: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

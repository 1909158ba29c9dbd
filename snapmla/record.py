"""Keep the measurements of a GPU in results/recorded/<gpu>/, for machines that have none like it.

    python -m snapmla.record [--results results …] [--recorded results/recorded] [--add]

Copies what was measured on a Hopper GPU: kernel_bench, the kernels' errors from accumulation, throughput and serving in
vLLM, and quality, fidelity, drift and ablation where the model ran on the GPU. Every row's source turns into "recorded".
Beside each table lies the run.json that says who measured (run.json itself is kernel_bench's), and a manifest of digests.
Tables that were recorded before and that these runs have not measured stay. The rows of several runs, say of several
contexts, make one table; its run file is the first one's, with the others' in `more_runs`. With --add, points of vLLM's tables
that were recorded before and that these runs have not measured stay as well, their run first.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from snapmla import results

TABLES = {
    "kernel_bench.csv": "kernel_bench/kernel_bench.csv",
    "latency.csv": "kernel_bench/latency.csv",
    "ceilings.csv": "kernel_bench/ceilings.csv",
    "flat_attention.csv": "accumulation/kernels.csv",
    "throughput.csv": "throughput/throughput.csv",
    "step_kernels.csv": "throughput/step_kernels.csv",
    "serving.csv": "serving/serving.csv",
    "quality.csv": "quality/quality.csv",
    "fidelity.csv": "fidelity/layer_error.csv",
    "fidelity_kernels.csv": "fidelity/kernels.csv",
    "drift.csv": "drift/drift.csv",
    "ablation.csv": "ablation/ablation.csv",
    "ablation_accumulation.csv": "ablation/accumulation.csv",
}
"""Name in the recorded folder -> result file."""

POINTS = {
    "throughput.csv": ["variant", "model", "layout", "scope", "routing", "pool_gb", "context"],
    "step_kernels.csv": ["variant", "model", "layout", "scope", "routing", "context"],
    "serving.csv": ["backend", "speculative_tokens", "against"],
}
"""What tells a point of these tables, whose engines take minutes each, from the others."""


def measured(source: Path, file: str) -> pd.DataFrame | None:
    """A result file, its rows marked as recorded; None where no GPU made it."""
    if not (source / file).is_file():
        return None
    table = results.read_csv(source / file, ["source", "status", "gpu"])
    table = table[table["source"] == "measured"]  # throughput.csv has modelled rows as well
    if not ((table["status"] == "ok") & table["gpu"].notna()).any():
        return None
    return table.assign(source="recorded")


def joined(old: pd.DataFrame, new: pd.DataFrame, point: list[str]) -> pd.DataFrame:
    """The rows of both; of a point in both the new ones, unless they did not run."""

    def among(rows: pd.DataFrame, others: pd.DataFrame) -> pd.Series:
        found = rows[point].merge(others[point].drop_duplicates(), how="left", indicator=True)
        return (found["_merge"] == "both").set_axis(rows.index)

    ok = new["status"] == "ok"
    return pd.concat([old[~among(old, new[ok])], new[ok | ~among(new, old)]], ignore_index=True)


def record(sources: Sequence[Path], recorded: Path, *, add: bool = False) -> Path:
    """Write the folder of the GPU that `sources` were measured on and return it; ValueError where none was.

    add: to the points of `POINTS` that are recorded there.
    """
    tables, runs = {}, {}
    for name, file in TABLES.items():
        found = {source: table for source in sources if (table := measured(source, file)) is not None}
        if found:
            tables[name] = pd.concat(found.values(), ignore_index=True)
            runs[run_file(name)] = one_run(
                [results.read_json((source / file).with_name("run.json")) for source in found]
            )
    if not tables:
        raise ValueError(
            f"{', '.join(map(str, sources))} must hold rows measured on a Hopper GPU, got none."
        )
    gpus = {gpu for table in tables.values() for gpu in table["gpu"].dropna().unique()}
    if len(gpus) != 1:
        raise ValueError(f"all tables must come from one GPU, got {', '.join(sorted(gpus))}.")
    folder = recorded / folder_name(gpus.pop())
    for name in POINTS if add else ():
        if name in tables and (folder / name).is_file():
            tables[name] = joined(results.read_csv(folder / name, POINTS[name]), tables[name], POINTS[name])
            runs[run_file(name)] = one_run([results.read_json(folder / run_file(name)), runs[run_file(name)]])
    with results.atomic_path(folder) as partial:
        if folder.is_dir():
            shutil.copytree(folder, partial)
        partial.mkdir(parents=True, exist_ok=True)
        for name, table in tables.items():
            results.write_csv(partial / name, table)
        for name, run in runs.items():
            results.write_json(partial / name, run)
        manifest = partial / "manifest.json"
        manifest.unlink(missing_ok=True)
        kept = sorted(partial.iterdir())
        rows = {path.name: len(results.read_csv(path, ["source"])) for path in kept if path.suffix == ".csv"}
        digests = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in kept}
        results.write_json(manifest, {"rows": rows, "sha256": digests})
    return folder


def one_run(runs: Sequence[dict]) -> dict:
    """The run file of a table that several runs have made: the first one, the others behind it in `more_runs`."""
    alone = [one for run in runs for one in (run, *run.get("more_runs", ()))]
    first, *more = [{key: part for key, part in one.items() if key != "more_runs"} for one in alone]
    return first | ({"more_runs": more} if more else {})


def run_file(table: str) -> str:
    """Name of the recorded run.json of a table."""
    return "run.json" if TABLES[table].startswith("kernel_bench/") else f"{Path(table).stem}.json"


def folder_name(gpu: str) -> str:
    """ "NVIDIA H200" -> "h200"."""
    words = re.sub(r"(?i)nvidia|hbm\S*|[^\w]+", " ", gpu).split()
    return "-".join(words).lower()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, nargs="+", default=[results.results_root(None)])
    parser.add_argument(
        "--recorded", type=Path, default=None, help="default: the repository's results/recorded"
    )
    parser.add_argument(
        "--add", action="store_true", help="keep the recorded points of vLLM's tables that were not measured again"
    )
    given = parser.parse_args(argv)
    recorded = given.recorded or (results.REPOSITORY or Path.cwd()) / "results" / "recorded"
    try:
        print(record(given.results, recorded, add=given.add))
    except (ValueError, OSError) as error:
        print(f"snapmla.record: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""One table of a Hydra sweep's runs, with a column for each key that they differ in.

    python -m snapmla.experiments.throughput -m engine.gpu=H20,H200 measure.enabled=no
    python -m snapmla.sweep throughput                  # writes results/sweeps/throughput.csv

The columns `config.KEY` come from each run's resolved configuration; `run` is its folder, where its run.json says who made it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from snapmla import results


def collect(folder: Path, file: str) -> pd.DataFrame:
    """The tables `file` of all runs below `folder`, one below the other. Raises ValueError where there is none."""
    runs = {path.parent: flat(results.read_json(path)["config"]) for path in sorted(folder.glob("*/run.json"))}
    runs = {run: config for run, config in runs.items() if (run / file).is_file()}
    if not runs:
        raise ValueError(f"{folder} must hold a sweep's runs with {file}, got none.")
    every = dict.fromkeys(key for config in runs.values() for key in config)
    differ = [key for key in every if len({json.dumps(config.get(key)) for config in runs.values()}) > 1]
    tables = []
    for run, config in runs.items():
        table = results.read_csv(run / file)
        own = {f"config.{key}": _cell(config.get(key)) for key in differ} | {"run": run.name}
        tables.append(pd.concat([pd.DataFrame([own] * len(table)), table], axis=1))
    return pd.concat(tables, ignore_index=True)


def flat(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}."""
    found = {}
    for key, value in config.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return found


def _cell(value: Any) -> Any:
    """A list as it is written on the command line."""
    return json.dumps(value) if isinstance(value, list) else value


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("experiment")
    parser.add_argument("--file", help="of each run's tables (default: <experiment>.csv)")
    parser.add_argument("--results", type=Path, help="default: SNAPMLA_RESULTS, else the repository's results")
    given = parser.parse_args(argv)
    file, sweeps = given.file or f"{given.experiment}.csv", results.results_root(given.results) / "sweeps"
    try:
        table = collect(sweeps / given.experiment, file)
    except (ValueError, OSError) as error:
        print(f"snapmla.sweep: {error}", file=sys.stderr)
        return 1
    print(results.write_csv(sweeps / file, table))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Reading of result files, and the label that says where a number comes from.

Figures read result files (the contract is in ARCHITECTURE.md) and ``published/`` only: nothing is computed
here that an experiment could have written. Bad input ends as one sentence (``InputError``) and exit code 1.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tomllib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

PUBLISHED = Path(__file__).resolve().parent / "published"
REPOSITORY_RECORDED = Path(__file__).resolve().parent.parent / "results" / "recorded"
# Strongest evidence first:
KINDS = ("measured", "recorded", "modelled", "paper", "diagram", "not run")
NOT_RUN = "not run"
MODELS = {  # what "modelled" means in the results of an experiment
    "accumulation": "the tensor core's additions emulated on a CPU",
    "throughput": "memory and roofline formulas, nothing timed: shares of the data sheet in conf/throughput.yaml",
}


class InputError(Exception):
    """A result file that is missing or not as the contract says; its text is one sentence for the user."""


@dataclass(frozen=True)
class Source:
    """Where numbers come from: ``kind`` is one of ``KINDS``, ``where`` the device, ``detail`` the rest."""

    kind: str
    where: str = ""
    detail: str = ""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InputError(
                f"Unknown source of a number: expected one of {', '.join(KINDS)}, got {self.kind!r}."
            )

    @property
    def short(self) -> str:
        """The badge's text: the kind, and for recorded numbers the GPU and date."""
        kind = "NOT RUN" if self.kind == NOT_RUN else self.kind
        return f"{kind} {self.where}" if self.kind == "recorded" else kind

    @property
    def long(self) -> str:
        """The text of the figure's last line and of table columns."""
        rest = ", ".join(part for part in (self.where, self.detail) if part)
        kind = {NOT_RUN: "NOT RUN", "measured": "measured here"}.get(self.kind, self.kind)
        return f"{kind} ({rest})" if rest else kind


PAPER = Source("paper", detail="printed in arXiv 2602.10718")
LARGE = "the large probe model"
"""Whose quality, fidelity and drift are recorded (conf/size/large.yaml)."""
DIAGRAM = Source("diagram", detail="drawn from the method's structure, no data")


class Results:
    """The result folder of one run: tables with the columns that a figure needs, and their provenance."""

    def __init__(self, root: Path, recorded: Path | None = None) -> None:
        if not root.is_dir():
            raise InputError(
                f"--results must be a folder with result files, got {root}, which does not exist."
            )
        if recorded is not None and not recorded.is_dir():
            raise InputError(
                f"--recorded must be a folder with one folder per GPU, got {recorded}, which does not exist."
            )
        self.root = root
        self.recorded = recorded

    def table(self, experiment: str, filename: str, columns: Iterable[str]) -> pd.DataFrame:
        """A result table that has ``columns`` and at least one row; otherwise ``InputError``."""
        path = self.root / experiment / filename
        if not path.is_file():
            raise InputError(
                f"{experiment}/{filename} is missing in {self.root}: run `python -m "
                f"snapmla.experiments.{experiment}` first."
            )
        return read_table(path, f"{experiment}/{filename}", columns)

    def measured(self, experiment: str, gpu: str = "") -> Source:
        """The label of what this run measured: ``gpu``, or the CPU of its run.json, and the commit."""
        provenance = self._run(experiment, "provenance")
        commit = str(provenance.get("commit") or "unknown")[:7]
        commit += "+changes" if provenance.get("dirty") else ""
        return Source("measured", gpu or cpu_name(provenance), f"commit {commit}")

    def machines(self, experiments: Iterable[str]) -> pd.DataFrame:
        """Who measured each experiment of this run: machine, date, commit and versions; without those that did not run."""
        rows = []
        for name in experiments:
            if told := self._run(name, "provenance"):
                gpus = ", ".join(gpu["name"] for gpu in told.get("gpus") or ())
                versions = (f"{package} {told[package]}" for package in ("python", "torch") if told.get(package))
                label = self.measured(name, gpus)
                rows.append((name, label.where, str(told.get("date", ""))[:10], label.detail.removeprefix("commit "), ", ".join(versions)))
        return pd.DataFrame(rows, columns=["Experiment", "Machine", "Date", "Commit", "Versions"])

    def model(self, experiment: str) -> str:
        """The model that an experiment measured: the path in its configuration, or the probe model."""
        return (self._run(experiment, "config").get("source") or {}).get("path") or "the probe model"

    def label(self, experiment: str, table: pd.DataFrame) -> list[Source]:
        """One label per kind of source in ``table``."""
        labels = []
        for kind in sorted(table["source"].dropna().unique()):
            if kind == "measured":
                labels.append(self.measured(experiment))
            elif kind == "modelled":
                gpu = str((self._run(experiment, "config").get("engine") or {}).get("gpu", ""))
                labels.append(Source("modelled", gpu, MODELS.get(experiment, f"{experiment} experiment")))
            else:
                labels.append(PAPER if kind == "paper" else Source(kind))
        return labels

    def recorded_tables(self, filename: str, columns: Iterable[str]) -> list[tuple[Source, pd.DataFrame]]:
        """Tables kept as ``<recorded>/<gpu>/<filename>``, each with its label (GPU and date).

        Looked up in ``--recorded`` if given, else in the result folder's ``recorded/``, else in the
        repository's.
        """
        choices = [self.recorded] if self.recorded else [self.root / "recorded", REPOSITORY_RECORDED]
        for folder in choices:
            paths = sorted(folder.glob(f"*/{filename}"))
            if paths:
                return [
                    (self._recorded_source(path), read_table(path, f"{path.parent.name}/{filename}", columns))
                    for path in paths
                ]
        return []

    def timed_tables(
        self, experiment: str, filename: str, columns: Iterable[str], recorded_as: str = ""
    ) -> list[tuple[Source, pd.DataFrame]]:
        """What a GPU measured, each with its label: the rows of this run first, then those of each recorded GPU
        (``recorded_as``: the recorded file's name, if another). Tables without a number are left out."""
        rows = ran(self.table(experiment, filename, columns))
        rows = rows[rows["source"] == "measured"]
        tables = [
            (self.measured(experiment, gpu=str(gpu)), group) for gpu, group in rows.groupby("gpu", sort=False)
        ]
        recorded = self.recorded_tables(recorded_as or filename, columns)
        return tables + [(label, kept) for label, table in recorded if len(kept := ran(table))]

    def _recorded_source(self, path: Path) -> Source:
        own = path.with_suffix(".json")  # of the experiment that made this table, if not kernel_bench
        first = self._run_json(own if own.is_file() else path.parent / "run.json")
        of_runs = [run.get("provenance", {}) for run in (first, *first.get("more_runs", ()))]
        dates = sorted({str(run.get("date") or "date unknown")[:10] for run in of_runs})
        commits = list(dict.fromkeys(str(run.get("commit") or "unknown")[:7] for run in of_runs))
        date = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
        return Source("recorded", f"{path.parent.name.upper()}, {date}", f"commit {', '.join(commits)}")

    def _run(self, experiment: str, part: str) -> dict:
        return self._run_json(self.root / experiment / "run.json").get(part, {})

    @staticmethod
    def _run_json(path: Path) -> dict:
        if not path.is_file():
            return {}
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except json.JSONDecodeError as error:
            raise InputError(
                f"{path.parent.name}/{path.name} must be JSON, got a syntax error in line {error.lineno}."
            ) from None


def read_table(path: Path, name: str, columns: Iterable[str]) -> pd.DataFrame:
    try:
        table = pd.read_csv(path)
    except (pd.errors.EmptyDataError, pd.errors.ParserError):
        raise InputError(
            f"{name} must be a CSV file with a header, got a file that does not parse."
        ) from None
    missing = [column for column in columns if column not in table.columns]
    if missing:
        raise InputError(f"{name} must have the column {missing[0]!r}, got {', '.join(table.columns)}.")
    if table.empty:
        raise InputError(f"{name} must have at least one row, got none.")
    return table


def cpu_name(provenance: dict) -> str:
    """The processor of a run.json in words, without trademarks and clock."""
    name = re.sub(
        r"\((R|TM)\)|\bCPU\b|\d+-Core Processor|@.*", "", str(provenance.get("cpu") or "CPU unknown")
    )
    cores = f" ({provenance['cores']} cores)" if provenance.get("cores") else ""
    return re.sub(r"\s+", " ", name).strip() + cores


def ran(table: pd.DataFrame) -> pd.DataFrame:
    """The rows of ``table`` that hold a number, that is, all but those with the status "not run"."""
    return table[table["status"].fillna("") != NOT_RUN] if "status" in table.columns else table


def best_evidence(table: pd.DataFrame) -> pd.DataFrame:
    """The rows of the strongest kind of source in ``table``: measured before recorded before modelled."""
    kinds = [Source(kind).kind for kind in table["source"].unique()]
    return table[table["source"] == min(kinds, key=KINDS.index)] if kinds else table


def reason(table: pd.DataFrame) -> str:
    """Why the rows of ``table`` did not run: their reasons, the most frequent first."""
    rows = table[table["status"].fillna("") == NOT_RUN]
    reasons = rows["reason"].dropna().value_counts()
    return str(reasons.index[0]) if len(reasons) else "no reason recorded"


def published_table(filename: str) -> pd.DataFrame:
    return pd.read_csv(PUBLISHED / filename)


def published(filename: str) -> dict:
    return tomllib.loads((PUBLISHED / filename).read_text(encoding="utf-8"))


def arguments(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--results",
        type=Path,
        required=True,
        help="folder with the experiments' results; outputs go there too",
    )
    parser.add_argument("--recorded", type=Path, help="folder with earlier measurements, one folder per GPU")
    return parser


def run(
    build: Callable[[Results], object],
    argv: Sequence[str] | None,
    description: str | None,
) -> int:
    """Parse ``--results`` and ``--recorded``, call ``build`` and turn bad input into one sentence and exit
    code 1.
    """
    options = arguments(description or "").parse_args(argv)
    try:
        build(Results(options.results, options.recorded))
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0

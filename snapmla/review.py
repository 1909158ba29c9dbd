"""A Weights & Biases workspace for reviewers: claims and figures, then the kernels', fidelity, throughput and quality panels.

    python -m snapmla.review --entity TEAM [--project snapmla]

Makes a saved view of a project that has runs of this workflow (`wandb login` first; `make sync` uploads offline ones), with the
runs grouped by workflow, and prints its address. Wants the extra `review`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import wandb_workspaces.reports.v2 as panels
from wandb_workspaces import workspaces

NAME = "SnapMLA: claims and evidence"


@dataclass(frozen=True)
class Section:
    """What a part of the page shows, by the names that runs log: see `Run.log`, `Run.write_table` and `tracking.log_figures`.

    Attributes:
        figures: pictures.
        tables: tables of rows.
        metrics: a pattern of numbers: lines where a run has several steps, else bars.
    """

    name: str
    figures: tuple[str, ...] = ()
    tables: tuple[str, ...] = ()
    metrics: str | None = None


SECTIONS = (
    Section("Claims and figures", figures=("fig1", "fig3", "fig4", "fig5", "fig6", "fig_accumulation"), tables=("claims",)),
    Section("Kernels", figures=("fig5", "fig6"), tables=("kernel_bench", "latency", "ceilings", "table_kernels"), metrics=r"^tflops/.*"),
    Section(
        "Fidelity",
        figures=("fig4", "fig_accumulation", "fig_drift"),
        tables=("layer_error", "table2", "table_ablation"),
        metrics=r"^(teacher_forced|accumulated)/.*/relative_l2$",
    ),
    Section("Throughput", figures=("fig1", "fig1b"), tables=("throughput", "serving"), metrics=r"^(measured|modelled)_speedup/.*"),
    Section("Quality", tables=("quality", "table1"), metrics=r"^(bits_per_byte|next_byte_\w+|recall|last|needles|copy|addition)/.*"),
)


def workspace(entity: str, project: str) -> workspaces.Workspace:
    return workspaces.Workspace(
        entity=entity,
        project=project,
        name=NAME,
        sections=[workspaces.Section(name=section.name, panels=_panels(section), is_open=True) for section in SECTIONS],
        runset_settings=workspaces.RunsetSettings(groupby=[workspaces.Metric("Group")]),
    )


def _panels(section: Section) -> list:
    found: list = []
    if section.figures:
        found.append(panels.MediaBrowser(title="Figures", media_keys=list(section.figures), num_columns=2))
    if section.metrics:
        found.append(panels.LinePlot(title=section.metrics, metric_regex=section.metrics))
    return found + [panels.WeavePanelSummaryTable(table_name=table) for table in section.tables]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--entity", required=True, help="the W&B team or user")
    parser.add_argument("--project", default="snapmla")
    given = parser.parse_args(argv)
    print(workspace(given.entity, given.project).save().url)
    return 0


if __name__ == "__main__":
    sys.exit(main())

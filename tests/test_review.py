"""The W&B workspace: its panels show what runs log. Wants the extra `review`."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
from toy_project import EXPERIMENTS, FIGURES, REPOSITORY, TABLES

internal = pytest.importorskip("wandb_workspaces.workspaces.internal")

from snapmla import review

RUNS = REPOSITORY / "results" / "wandb"
NEEDS_A_GPU = re.compile(r"tflops|latency")


def test_every_name_is_a_figure_or_a_table() -> None:
    tables = {file.removesuffix(".csv") for _, makes in EXPERIMENTS.values() for file in makes if file.endswith(".csv")}
    for section in review.SECTIONS:
        assert set(section.figures) <= set(FIGURES)
        assert set(section.tables) <= tables | set(TABLES) | {"claims"}


def test_the_command_saves_a_view_grouped_by_workflow(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    saved = []

    def upsert(view):
        saved.append(json.loads(view.model_dump_json(by_alias=True)))
        return {"upsertView": {"view": {"name": "nw-1-v", "id": "1"}}}

    monkeypatch.setattr(internal, "upsert_view2", upsert)
    address = property(lambda view: f"{view.entity}/{view.project}")  # the real one asks the server for its name
    monkeypatch.setattr(review.workspaces.Workspace, "url", address)
    assert review.main(["--entity", "team"]) == 0
    assert "team/snapmla" in capsys.readouterr().out
    (view,) = saved
    assert view["spec"]["section"]["runSets"][0]["grouping"] == [{"section": "run", "name": "group"}]
    sections = view["spec"]["section"]["panelBankConfig"]["sections"]
    assert [section["name"] for section in sections] == [section.name for section in review.SECTIONS]
    for section, wanted in zip(sections, review.SECTIONS, strict=True):
        assert len(section["panels"]) == bool(wanted.figures) + bool(wanted.metrics) + len(wanted.tables)


@pytest.mark.skipif(not RUNS.is_dir(), reason="results/wandb is missing: make all")
def test_every_panel_finds_what_the_workflow_has_logged() -> None:
    logged: set[str] = set()
    for run in RUNS.glob("offline-run-*"):
        command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(run)]
        shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
        for line in shown.stdout.splitlines():
            logged |= {key.removesuffix("._type") for key in json.loads(line).get("history", {}).get("item", {})}
    for section in review.SECTIONS:
        missing = {*section.figures, *section.tables} - logged
        assert {name for name in missing if not NEEDS_A_GPU.search(name)} == set(), section.name
        pattern = section.metrics
        assert pattern is None or NEEDS_A_GPU.search(pattern) or any(re.search(pattern, name) for name in logged), pattern

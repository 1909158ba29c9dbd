"""Tracking with Weights & Biases: complete where it works, harmless where it does not (cases 20 and 21)."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import toy_project

from snapmla import tracking

KEY = "0" * 40
UNREACHABLE = "http://127.0.0.1:9"


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy_project.build(tmp_path_factory.mktemp("tracked") / "project")


def experiment(project: Path, results: Path, **changes: str | None) -> subprocess.CompletedProcess[str]:
    """The toy probe, as in a container: HOME cannot be made, there is no terminal, tracking is on."""
    changes = {"HOME": "/proc/nowhere", "WANDB_MODE": None, "WANDB_SILENT": None, **changes}
    return toy_project.run(
        "snapmla.experiments.probe",
        "rows=2",
        cwd=results,
        PYTHONPATH=str(project),
        SNAPMLA_RESULTS=str(results),
        **changes,
    )


def records(results: Path) -> list[dict[str, Any]]:
    """Everything that the one offline run below ``results`` holds."""
    (run,) = (results / "wandb").glob("offline-run-*")
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(run)]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    return [json.loads(line) for line in shown.stdout.splitlines()]


def test_an_offline_run_holds_configuration_group_tables_and_files(project: Path, tmp_path: Path) -> None:
    done = experiment(project, tmp_path, SNAPMLA_RUN_GROUP="workflow 7")
    assert done.returncode == 0, done.stdout
    assert "W&B" not in done.stdout and "wandb:" not in done.stdout
    assert {path.name for path in tmp_path.iterdir()} == {"probe", "wandb"}
    found = records(tmp_path)
    (run,) = (record["run"] for record in found if record["type"] == "run")
    config = {key: value for key, value in run["config"]["update"].items() if key != "_wandb"}
    written = json.loads((tmp_path / "probe/run.json").read_text())["config"]
    assert config == written and config["rows"] == 2
    assert run["run_group"] == "workflow 7" and run["job_type"] == "probe" and run["project"] == "snapmla"
    text = json.dumps(found[1:2])
    assert "${" not in text and "???" not in text and str(tmp_path) not in text
    types = {record["artifact"]["type"] for record in found if record["type"] == "artifact"}
    assert types == {"run_table", "result"}
    assert found[-1]["exit"]["exit_code"] == 0


def test_what_a_run_reads_is_the_artifact_that_another_has_made(project: Path, tmp_path: Path) -> None:
    """Lineage, also offline: W&B knows an artifact by its digest. From raw rows to what is drawn of them."""

    def artifacts(*command: str) -> dict[str, dict[str, Any]]:
        shutil.rmtree(tmp_path / "wandb", ignore_errors=True)
        places = {"PYTHONPATH": str(project), "SNAPMLA_RESULTS": str(tmp_path), "WANDB_MODE": None}
        done = toy_project.run(*command, cwd=tmp_path, **places)
        assert done.returncode == 0 and "W&B" not in done.stdout, done.stdout
        kept = [record["artifact"] for record in records(tmp_path) if record["type"] == "artifact"]
        return {artifact["name"]: artifact for artifact in kept if artifact["type"] == "result"}

    made = artifacts("snapmla.experiments.probe", "rows=2")
    read = artifacts("snapmla.experiments.latents", "rows=2")
    assert set(made) == {"probe"} and not made["probe"].get("use_after_commit")
    assert set(read) == {"probe", "latents"} and read["probe"]["use_after_commit"]
    assert read["probe"]["digest"] == made["probe"]["digest"] != read["latents"]["digest"]
    (tmp_path / "claims.csv").write_text("claim,status\na,PASS\n")
    drawn = artifacts("snapmla.tracking", "log-figures", "--mode", "offline")
    assert {name for name, artifact in drawn.items() if artifact.get("use_after_commit")} == {"probe", "latents"}
    assert all(drawn[name]["digest"] == read[name]["digest"] for name in ("probe", "latents"))


def test_a_key_without_a_network_makes_an_offline_run_and_one_line(project: Path, tmp_path: Path) -> None:
    done = experiment(project, tmp_path, WANDB_API_KEY=KEY, WANDB_BASE_URL=UNREACHABLE)
    assert done.returncode == 0, done.stdout
    (warning,) = (line for line in done.stdout.splitlines() if line.startswith("W&B: "))
    assert "no connection to 127.0.0.1" in warning
    assert records(tmp_path)[-1]["exit"]["exit_code"] == 0
    assert (tmp_path / "probe/run.json").is_file()


def test_a_results_folder_without_room_for_tracking_does_not_matter(project: Path, tmp_path: Path) -> None:
    (tmp_path / "wandb").write_text("a file where the folder should be")
    done = experiment(project, tmp_path)
    assert done.returncode == 0, done.stdout
    assert (tmp_path / "probe/run.json").is_file()


class Broken:
    """A W&B run of which every call fails."""

    def __getattr__(self, name: str) -> Any:
        def fail(*_arguments: Any, **_named: Any) -> None:
            raise OSError(f"{name}: the service\nhas died")

        return fail


def test_no_call_can_fail_and_each_kind_warns_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.csv").write_text("x\n1\n")
    tracker = tracking.Tracker(Broken())
    for _ in range(2):
        tracker.log({"x": 1.0})
        tracker.table(tmp_path / "a.csv")
        tracker.image("a", tmp_path / "missing.png")
        tracker.files("a", [tmp_path / "a.csv"])
        tracker.uses("a", [tmp_path / "a.csv"])
        tracker.finish()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 6 and all(line.startswith("W&B: ") for line in lines)


def test_disabled_does_nothing(tmp_path: Path) -> None:
    tracker = tracking.start(
        "disabled", "snapmla", None, name="n", job_type="j", config={}, results_dir=tmp_path
    )
    tracker.log({"x": 1.0})
    tracker.finish()
    assert not list(tmp_path.iterdir())


def test_an_unknown_mode_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"tracking\.mode must be one of auto, .*, got 'on'"):
        tracking.start("on", "snapmla", None, name="n", job_type="j", config={}, results_dir=tmp_path)


def test_sync_without_runs_and_without_a_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["sync", "--results", str(tmp_path)]
    assert tracking.main(arguments) == 0
    assert "no offline runs" in capsys.readouterr().out
    (tmp_path / "wandb" / "offline-run-1").mkdir(parents=True)
    monkeypatch.setattr(tracking, "_unreachable", lambda: "no connection to the server")
    assert tracking.main(arguments) == 1
    assert "cannot be uploaded: no connection to the server" in capsys.readouterr().err


def test_log_figures_keeps_every_file_as_an_artifact(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["log-figures", "--results", str(tmp_path), "--mode", "offline"]
    assert tracking.main(arguments) == 1
    assert "no figures or tables" in capsys.readouterr().err
    for file in ("figures/fig1.svg", "figures/fig1.pdf", "tables/table1.md", "claims.md"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text("x")
    (tmp_path / "claims.csv").write_text("claim,status\na,PASS\n")
    assert tracking.main(arguments) == 0
    artifacts = [record["artifact"] for record in records(tmp_path) if record["type"] == "artifact"]
    (result,) = (artifact for artifact in artifacts if artifact["type"] == "result")
    logged = {item["path"] for item in result["manifest"]["contents"]}
    assert logged == {"figures/fig1.svg", "figures/fig1.pdf", "tables/table1.md", "claims.md", "claims.csv"}
    assert any(artifact["type"] == "run_table" for artifact in artifacts)

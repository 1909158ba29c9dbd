"""The application of experiments: where it writes, what it refuses, what it records (cases 19, 20 and 22)."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy
import pandas
import pytest
import torch
import toy_project
from omegaconf import MISSING

from snapmla import results, sweep
from snapmla.experiments._app import BaseConfig, Run, application, as_overrides, check_overrides

YAML = "rows: 3\nsizes: [1, 2]\npath: null\ninner:\n  steps: ${rows}\n"


@dataclass
class Inner:
    steps: int = MISSING


@dataclass
class ToyConfig(BaseConfig):
    rows: int = MISSING
    sizes: list[int] = MISSING
    path: str | None = None
    inner: Inner = field(default_factory=Inner)


def toy(cfg: ToyConfig, run: Run) -> None:
    if cfg.path:
        run.input("probe", cfg.path)
    run.write_table(
        "toy.csv", [{"row": i, "steps": cfg.inner.steps, "source": "measured"} for i in range(cfg.rows)]
    )
    run.log({"last": cfg.rows}, step=1)
    if cfg.rows == 13:
        raise ValueError("rows must not be 13, got 13.")
    if cfg.rows == 14:
        raise RuntimeError("a fault of the program")


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with a toy experiment's configuration, in the place of the real one."""
    folder = tmp_path / "a checkout"
    (folder / "conf").mkdir(parents=True)
    base = (toy_project.REPOSITORY / "conf" / "base.yaml").read_text()
    (folder / "conf" / "base.yaml").write_text(base)
    (folder / "conf" / "toy.yaml").write_text(YAML)
    monkeypatch.setattr(results, "REPOSITORY", folder)
    return folder


@pytest.fixture
def start(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Starts the toy experiment with command-line arguments; returns its exit code."""

    def call(*arguments: str, function: Callable[[ToyConfig, Run], None] = toy) -> int:
        monkeypatch.setattr(sys, "argv", ["toy", *arguments])
        try:
            application("toy", ToyConfig)(function)()
        except SystemExit as end:
            return int(end.code or 0)
        return 0

    return call


def files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_a_run_writes_its_tables_and_run_json_and_nothing_else(
    start: Callable[..., int], tmp_path: Path, checkout: Path
) -> None:
    assert start("rows=2") == 0
    assert files(tmp_path / "results") == {"toy/toy.csv", "toy/run.json"}
    assert files(checkout) == {"conf/base.yaml", "conf/toy.yaml"}
    assert (tmp_path / "results/toy/toy.csv").read_text() == "row,steps,source\n0,2,measured\n1,2,measured\n"


def test_run_json_holds_the_resolved_configuration_without_absolute_paths(
    start: Callable[..., int], tmp_path: Path
) -> None:
    probe = tmp_path / "results" / "probe" / "model"
    probe.mkdir(parents=True)
    assert start("rows=5", f"path={probe}", "seed=3") == 0
    text = (tmp_path / "results/toy/run.json").read_text()
    assert "${" not in text and "???" not in text and str(tmp_path) not in text
    record = json.loads(text)
    assert record["experiment"] == "toy"
    assert record["provenance"]["torch"] == torch.__version__
    expected = {"rows": 5, "sizes": [1, 2], "path": "results/probe/model", "inner": {"steps": 5}, "seed": 3}
    assert {key: record["config"][key] for key in expected} == expected


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("rowz=1", "rowz"),
        ("inner.stepz=1", "stepz"),
        ("tracking.modus=offline", "modus"),
        ("+rowz=1", "rowz"),
        ("rows=many", "rows"),
        ("sizes=3", "sizes"),
        ("rows=13", "rows"),
        ("tracking.mode=sometimes", "tracking.mode"),
    ],
)
def test_a_wrong_override_is_one_sentence_that_names_the_key(
    start: Callable[..., int], tmp_path: Path, capfd: pytest.CaptureFixture[str], override: str, named: str
) -> None:
    assert start(override) == 1
    shown = capfd.readouterr().err
    assert "Traceback" not in shown
    message = shown.splitlines()[-1]
    assert message.startswith("toy: ") and named in message
    assert files(tmp_path / "results") == set()


@pytest.mark.parametrize(
    ("yaml", "named"),
    [
        (YAML + "rowz: 1\n", "rowz"),
        (YAML.replace("rows: 3", "seed: 0"), "rows"),
        (YAML + "seed: x\n", "seed"),
    ],
)
def test_a_wrong_yaml_file_is_one_sentence_that_names_the_key(
    start: Callable[..., int], checkout: Path, capfd: pytest.CaptureFixture[str], yaml: str, named: str
) -> None:
    (checkout / "conf" / "toy.yaml").write_text(yaml)
    assert start() == 1
    shown = capfd.readouterr().err
    assert "Traceback" not in shown and named in shown.splitlines()[-1]


def test_a_missing_input_names_the_command_that_makes_it(
    start: Callable[..., int], capfd: pytest.CaptureFixture[str]
) -> None:
    assert start("path=model") == 1
    message = capfd.readouterr().err.splitlines()[-1]
    assert "probe/model is missing" in message and "python -m snapmla.experiments.probe" in message


def test_a_failed_run_leaves_the_previous_results(start: Callable[..., int], tmp_path: Path) -> None:
    assert start("rows=2") == 0
    before = {path: (tmp_path / "results" / path).read_bytes() for path in files(tmp_path / "results")}
    assert start("rows=13") == 1
    with pytest.raises(RuntimeError, match="a fault of the program"):  # a bug keeps its traceback
        start("rows=14")
    assert {
        path: (tmp_path / "results" / path).read_bytes() for path in files(tmp_path / "results")
    } == before


def test_a_new_run_replaces_the_folder(start: Callable[..., int], tmp_path: Path) -> None:
    assert start() == 0
    (tmp_path / "results/toy/of_an_older_version.csv").touch()
    assert start() == 0
    assert files(tmp_path / "results/toy") == {"toy.csv", "run.json"}


def test_a_sweep_writes_one_folder_per_value(
    start: Callable[..., int], tmp_path: Path, checkout: Path
) -> None:
    assert start("-m", "rows=1,2", "tracking.mode=disabled") == 0
    sweeps = tmp_path / "results" / "sweeps" / "toy"
    for rows in (1, 2):
        assert files(sweeps / f"rows={rows}") == {"toy.csv", "run.json"}
        assert json.loads((sweeps / f"rows={rows}" / "run.json").read_text())["config"]["rows"] == rows
    assert {path.name for path in checkout.iterdir()} == {"conf"}


def test_results_dir_wins_over_the_environment(
    start: Callable[..., int], tmp_path: Path, checkout: Path
) -> None:
    assert start(f"results_dir={tmp_path / 'else where'}") == 0
    assert files(tmp_path / "else where") == {"toy/toy.csv", "toy/run.json"}
    assert start("results_dir=relative") == 0
    assert files(checkout / "relative") == {"toy/toy.csv", "toy/run.json"}
    assert not (tmp_path / "results").exists()


def test_the_seed_reaches_every_generator(start: Callable[..., int]) -> None:
    drawn = []

    def draw(cfg: ToyConfig, run: Run) -> None:
        drawn.append((random.random(), numpy.random.rand(), torch.rand(1).item()))

    for seed in (1, 1, 2):
        assert start(f"seed={seed}", function=draw) == 0
    assert drawn[0] == drawn[1]
    assert all(first != second for first, second in zip(drawn[0], drawn[2]))


def test_overrides_from_mappings() -> None:
    values = {
        "rows": 3,
        "inner": {"steps": 1},
        "a.b": [1, 2.5, "x y"],
        "flag": True,
        "none": None,
        "text": "it's, {a}",
    }
    expected = [
        "rows=3",
        "inner.steps=1",
        "a.b=[1,2.5,'x y']",
        "flag=true",
        "none=null",
        "text='it\\'s, {a}'",
    ]
    assert as_overrides(values) == expected


def test_overrides_of_the_real_experiments_are_checked() -> None:
    check_overrides("throughput", as_overrides({"contexts": [1024], "engine": "h200"}))
    with pytest.raises(ValueError, match="throughput.*contextz"):
        check_overrides("throughput", ["contextz=[1024]"])
    with pytest.raises(ValueError, match="throughput.*contexts"):
        check_overrides("throughput", ["contexts=[many]"])


def test_the_same_place_from_every_directory(tmp_path: Path) -> None:
    project = toy_project.build(tmp_path / "a project")
    spaced = tmp_path / "an empty folder"
    spaced.mkdir()
    written = []
    for cwd in (Path("/"), project, spaced):
        done = toy_project.run("snapmla.experiments.probe", "rows=1", cwd=cwd, PYTHONPATH=str(project))
        assert done.returncode == 0, done.stdout
        written.append(json.loads((project / "results/probe/run.json").read_text())["config"])
        (project / "results/probe/run.json").unlink()
    assert written[0] == written[1] == written[2]
    assert not list(spaced.iterdir())
    assert not {"outputs", "multirun"} & {path.name for path in (*project.iterdir(), *Path("/").iterdir())}


@pytest.mark.parametrize("launcher", ["joblib", "submitit_local"])
def test_a_parallel_sweep_makes_one_table(tmp_path: Path, launcher: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip(f"hydra_plugins.hydra_{launcher.split('_')[0]}_launcher")
    project = toy_project.build(tmp_path / "project")
    arguments = ("-m", "rows=1,2", "sizes=[4],[5,6]", "seed=3", f"hydra/launcher={launcher}")
    done = toy_project.run("snapmla.experiments.probe", *arguments, cwd=tmp_path, PYTHONPATH=str(project))
    assert done.returncode == 0, done.stdout
    assert sweep.main(["probe", "--file", "training.csv", "--results", str(project / "results")]) == 0
    table = pandas.read_csv(project / "results/sweeps/training.csv")
    assert list(table)[:3] == ["config.rows", "config.sizes", "run"]  # not the seed, which all have
    counts = table.groupby(["config.rows", "config.sizes"]).size()
    assert counts.to_dict() == {(1, "[4]"): 1, (1, "[5, 6]"): 1, (2, "[4]"): 2, (2, "[5, 6]"): 2}
    run = json.loads((project / "results/sweeps/probe" / table["run"].iloc[-1] / "run.json").read_text())
    assert run["config"]["rows"] == table["config.rows"].iloc[-1]
    assert sweep.main(["quality", "--results", str(project / "results")]) == 1
    assert "must hold a sweep's runs with quality.csv, got none" in capsys.readouterr().err


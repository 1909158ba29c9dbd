"""The workflow: what it makes, when it makes it again, and what it refuses (cases 18, 19 and 22)."""

from __future__ import annotations

import csv
import itertools
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import toy_project
from toy_project import EXPERIMENTS, FIGURES, MEASURING, TABLES

JOB = re.compile(r"^Job \d+: (?:Experiment|Drawing) (\w+)$", re.MULTILINE)
NOTHING = "Nothing to be done"
MADE = ("fig4", "table1", "fig_accumulation")  # what the toy project makes once, for all tests of this module


def snakemake(
    project: Path, *arguments: str, cwd: Path | None = None, **changes: str | None
) -> subprocess.CompletedProcess[str]:
    place = () if cwd is None else ("--snakefile", project / "workflow" / "Snakefile")
    return toy_project.run("snakemake", *place, *arguments, cwd=cwd or project, **changes)


def planned(project: Path, *arguments: str, **changes: str | None) -> set[str]:
    """The experiments and figures that a dry run would make."""
    done = snakemake(project, "--dry-run", *arguments, **changes)
    assert done.returncode == 0, done.stdout
    jobs = set(JOB.findall(done.stdout))
    assert jobs or NOTHING in done.stdout, done.stdout
    return jobs


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toy project in a folder with a space, after a run of ``MADE``."""
    project = toy_project.build(tmp_path_factory.mktemp("made") / "a project")
    done = snakemake(project, *MADE)
    assert done.returncode == 0, done.stdout
    return project


@pytest.fixture
def changed(made: Path) -> Iterator[Path]:
    """The same project, for a test that edits its sources: they are put back."""
    kept = made.parent / "kept"
    shutil.copytree(made, kept, ignore=shutil.ignore_patterns("results"))
    yield made
    for file in kept.rglob("*.*"):
        if file.is_file():
            shutil.copy(file, made / file.relative_to(kept))
    shutil.rmtree(kept)


def edit(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


def test_all_plans_every_experiment_figure_and_table(tmp_path: Path) -> None:
    """The real project: the scripts that the rules name are there, and so are the keys of the short
    configuration."""
    short = str(toy_project.REPOSITORY / "conf/workflow/short.yaml")
    planned_jobs = planned(
        toy_project.REPOSITORY, "all", "--configfile", short, SNAPMLA_RESULTS=str(tmp_path)
    )
    assert planned_jobs == {*EXPERIMENTS, *FIGURES, *TABLES, "claims"}


def test_lint_is_clean(made: Path) -> None:
    done = snakemake(made, "--lint")
    assert done.returncode == 0, done.stdout


def test_results_logs_and_times_lie_in_the_results_folder(made: Path) -> None:
    results = made / "results"
    for name in ("kernels", "probe", "latents", "fidelity", "quality", "accumulation", *MADE):
        assert (results / "logs" / f"{name}.log").is_file()
        assert (results / "logs" / f"{name}.tsv").is_file()
    assert {path.name for path in results.iterdir()} == {
        ".snakemake", "logs", "figures", "tables",
        "kernels", "probe", "latents", "fidelity", "quality", "accumulation",
    }  # fmt: skip
    assert not (made / "outputs").exists() and not (made / "multirun").exists()


def test_a_second_run_has_nothing_to_do_and_stays_where_it_was(made: Path, tmp_path: Path) -> None:
    assert NOTHING in snakemake(made, *MADE, cwd=tmp_path).stdout
    assert not {"results", "outputs"} & {path.name for path in tmp_path.iterdir()}


def test_a_fresh_clone_elsewhere_has_nothing_to_do(made: Path, tmp_path: Path) -> None:
    """New times, another folder, the same results."""
    clone = tmp_path / "a clone"
    shutil.copytree(made, clone, ignore=shutil.ignore_patterns("results"), copy_function=shutil.copyfile)
    assert planned(clone, *MADE, "--config", f"results_dir={made / 'results'}") == set()


def test_a_changed_key_reruns_its_experiment_and_what_depends_on_it(made: Path) -> None:
    config = ("tracking=offline", "experiments={latents: {inner: {steps: 8}}}")
    assert planned(made, *MADE, "--config", *config) == {"latents", "fidelity", "fig4"}


def test_a_changed_source_reruns_what_it_makes(changed: Path) -> None:
    edit(changed / "snapmla/experiments/throughput.py", "value=", "value=2 *")  # makes nothing of MADE
    edit(changed / "paper_figures/fig4.py", "a,b", "a,c")
    edit(changed / "conf/quality.yaml", "rows: 3", "rows: 4")
    assert planned(changed, *MADE) == {"fig4", "quality", "table1"}
    edit(changed / "snapmla/experiments/accumulation.py", "value=", "value=2 *")
    assert planned(changed, *MADE) == {"fig4", "quality", "table1", "accumulation", "fig_accumulation"}


def test_a_changed_module_reruns_all_that_import_it(changed: Path) -> None:
    edit(changed / "snapmla/experiments/helper.py", "1", "2")
    everything = {"kernels", "probe", "latents", "fidelity", "quality", "accumulation", *MADE}
    assert planned(changed, *MADE) == everything


def test_figures_only_redraws(changed: Path) -> None:
    """Nothing is computed for `snakemake figures`, even where a source of an experiment has changed."""
    edit(changed / "conf/probe.yaml", "rows: 3", "rows: 4")
    results = changed / "results"
    folders = ("throughput", "serving", "kernel_bench", "distribution", "drift", "ablation")
    for name in folders:
        (results / name).mkdir()
        for file in (*EXPERIMENTS[name][1], "run.json"):
            (results / name / file).write_text("a\n1\n")
    try:
        drawn = planned(changed, "figures")
        assert drawn == {*FIGURES, *TABLES, "claims"} - set(MADE)
    finally:
        for name in folders:
            shutil.rmtree(results / name)


def test_measurements_never_overlap(made: Path, tmp_path: Path) -> None:
    files = [f"{name}/{name}.csv" for name in MEASURING]
    done = snakemake(
        made, "--cores", "2", "--target-files-omit-workdir-adjustment", *files, SNAPMLA_RESULTS=str(tmp_path)
    )
    assert done.returncode == 0, done.stdout
    times = []
    for file in files:
        with (tmp_path / file).open() as lines:
            row = next(csv.DictReader(lines))
            times.append((float(row["begin"]), float(row["end"])))
    times.sort()
    assert all(before[1] < after[0] for before, after in itertools.pairwise(times))


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ("seeed=1", "seeed"),
        ("tracking=perhaps", "perhaps"),
        ("experiments={fidelty: {rows: 1}}", "fidelty"),
        ("experiments={fidelity: {inner: {stepz: 1}}}", "stepz"),
    ],
)
def test_a_misspelt_key_is_refused_by_name(made: Path, config: str, named: str) -> None:
    done = snakemake(made, "--dry-run", *MADE, "--config", config)
    assert done.returncode != 0
    assert named in done.stdout and "Building DAG" not in done.stdout


def test_a_misspelt_key_in_a_config_file_is_refused_by_name(made: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("result_dir: elsewhere\n")
    done = snakemake(made, "--dry-run", *MADE, "--configfile", str(tmp_path / "mine.yaml"))
    assert done.returncode != 0 and "result_dir" in done.stdout


def test_a_failing_experiment_fails_the_workflow(made: Path, tmp_path: Path) -> None:
    """Also through the pipe that shows and keeps its output."""
    config = "experiments={accumulation: {rows: 0}}"
    done = snakemake(made, "fig_accumulation", "--config", config, SNAPMLA_RESULTS=str(tmp_path))
    assert done.returncode != 0
    assert "accumulation.csv needs at least one row, got none." in done.stdout
    assert not (tmp_path / "accumulation").exists() or not list((tmp_path / "accumulation").iterdir())


def test_every_item_has_a_caption_in_the_report() -> None:
    captions = {path.stem for path in (toy_project.REPOSITORY / "workflow" / "report").glob("*.rst")}
    assert captions == {*FIGURES, *TABLES, "claims", "workflow"}


def test_report(made: Path, tmp_path: Path) -> None:
    done = snakemake(made, *MADE, "--report", str(tmp_path / "report.html"))
    assert done.returncode == 0, done.stdout
    text = (tmp_path / "report.html").read_text()
    assert "fig4.svg" in text and "SnapMLA" in text

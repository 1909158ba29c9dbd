"""The paper's benchmarks through a served model: what is run, what is read, what is refused. No harness and no model is
needed: both are played by stand-ins."""

from __future__ import annotations

import importlib
import json
import re
import shlex
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import hydra
import pandas
import pytest
import toy_project
from figure_data import Fake, write_run_json
from omegaconf import OmegaConf

from snapmla import results
from snapmla.experiments import benchmarks

PUBLISHED = toy_project.REPOSITORY / "paper_figures" / "published" / "table1.csv"
MODEL = "toy/model"

# What lm_eval 0.4.13 writes (lm_eval/result_schema.py), shortened: a group of two tasks.
DOCUMENT = {
    "results": {
        "mmlu_pro_math": {"alias": "math", "sample_len": 6, "exact_match,custom-extract": 0.5},
        "mmlu_pro_law": {"alias": "law", "sample_len": 2, "exact_match,custom-extract": 1.0},
        "mmlu_pro": {
            "alias": "mmlu_pro", "name": "mmlu_pro", "sample_len": 8,
            "exact_match,custom-extract": 0.625, "exact_match_stderr,custom-extract": 0.125,
            "sample_count": {"exact_match,custom-extract": 8},
        },
    },
    "groups": {"mmlu_pro": {"exact_match,custom-extract": 0.625}},
    "n-samples": {
        "mmlu_pro_math": {"original": 1351, "effective": 6},
        "mmlu_pro_law": {"original": 1101, "effective": 2},
    },
    "config": {"model": "local-chat-completions", "model_args": {"model": MODEL, "seed": 3}, "limit": None},
    "lm_eval_version": "0.4.13",
}  # fmt: skip

# A harness that knows five tasks, keeps its command line, and scores the seed as so many thousandths.
HARNESS = """import json, pathlib, sys

known = {"mmlu_pro", "mmlu_redux_generative", "ifeval", "minerva_math500", "aime24", "aime25", "gpqa_diamond_cot_zeroshot"}
options = dict(zip(sys.argv[2::2], sys.argv[3::2]))
if sys.argv[1] == "validate":
    if missing := [task for task in options["--tasks"].split(",") if task not in known]:
        print("Tasks not found:", ", ".join(missing))
        sys.exit(1)
    sys.exit()
arguments = json.loads(options["--model_args"])
if options["--tasks"] == "ifeval":
    sys.exit("ImportError: langdetect is missing")
metric = {"aime24": "exact_match,none", "mmlu_pro": "exact_match,custom-extract"}[options["--tasks"]]
folder = pathlib.Path(options["--output_path"]) / "toy__model"
folder.mkdir(parents=True)
scores = {metric: arguments["seed"] / 1000, metric.replace(",", "_stderr,"): "N/A"}
(folder / "results_2026-01-01T00-00-00.000000.json").write_text(json.dumps({
    "results": {options["--tasks"]: scores},
    "n-samples": {options["--tasks"]: {"original": 30, "effective": 30}},
    "config": {"model_args": arguments},
    "lm_eval_version": "stand-in",
}))
"""


def compose(*overrides: str) -> benchmarks.BenchmarksConfig:
    with hydra.initialize_config_dir(str(results.conf_dir()), version_base="1.3"):
        config = hydra.compose("benchmarks_application", ["endpoint.variant=snapmla", *overrides])
    return OmegaConf.to_object(config)


def configured(name: str, *overrides: str) -> tuple[benchmarks.BenchmarksConfig, benchmarks.Benchmark]:
    cfg = compose(*overrides)
    [found] = [benchmark for benchmark in cfg.benchmarks if benchmark.name == name]
    return cfg, found


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Starts the application with command-line arguments; returns its exit code."""

    def call(*arguments: str) -> int:
        monkeypatch.setattr(
            sys, "argv", ["benchmarks", "endpoint.variant=snapmla", f"endpoint.model={MODEL}", *arguments]
        )
        try:
            benchmarks.main()
        except SystemExit as end:
            return int(end.code or 0)
        return 0

    return call


@pytest.fixture
def no_harness(tmp_path: Path) -> str:
    """Makes harness.python a Python that certainly has no lm_eval."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -S -E "$@"\n')
    python.chmod(0o755)
    return f"harness.python={python}"


@pytest.fixture
def harness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in is the lm_eval that this Python finds."""
    package = tmp_path / "stand-in" / "lm_eval"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(HARNESS)
    monkeypatch.setenv("PYTHONPATH", str(package.parent))


@pytest.fixture
def endpoint() -> Iterator[str]:
    """Serves MODEL, as an OpenAI-compatible endpoint says it; counts what else is asked of it in ``others``."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps({"object": "list", "data": [{"id": MODEL, "object": "model"}]}).encode()
            self.send_response(200 if self.path == "/v1/models" else 404)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"endpoint.base_url=http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    server.server_close()
    thread.join()


def table(tmp_path: Path) -> pandas.DataFrame:
    return results.read_csv(tmp_path / "results/benchmarks/benchmarks.csv", benchmarks.COLUMNS)


def test_every_benchmark_of_table_1_is_configured_with_its_repeats() -> None:
    published = pandas.read_csv(PUBLISHED).drop_duplicates("benchmark").set_index("benchmark")["metric"]
    cfg = compose()
    benchmarks.check(cfg)
    assert [b.name for b in cfg.benchmarks] == list(published.index)
    repeats = {name: re.fullmatch(r"Mean@(\d+)", metric) for name, metric in published.items()}
    assert {b.name: b.repeats for b in cfg.benchmarks} == {
        name: int(found[1]) if found else 1 for name, found in repeats.items()
    }


def test_commands_hold_seeds_and_settings(tmp_path: Path) -> None:
    cfg, aime = configured("AIME-24", "seed=5", "limit=7", "endpoint.base_url=http://gpu:1/v1/")
    planned = list(benchmarks.evaluations(cfg, aime, tmp_path))
    assert [e.seed for e in planned] == list(range(5, 37))
    assert len({e.place for e in planned}) == 32
    for evaluation in planned:
        command = evaluation.command
        assert command[:4] == [sys.executable, "-m", "lm_eval", "run"] and "--apply_chat_template" in command

        def option(name: str, command: list[str] = command) -> str:
            return command[command.index(name) + 1]

        arguments = json.loads(option("--model_args"))
        assert option("--model") == "local-chat-completions" and option("--tasks") == "aime24"
        assert arguments["base_url"] == "http://gpu:1/v1/chat/completions"
        # The harness sends this one with each request: without it, all repeats would be one.
        assert arguments["seed"] == evaluation.seed == int(option("--seed"))
        assert (
            json.loads(option("--gen_kwargs")).items()
            >= {"temperature": 1.0, "top_p": 0.95, "top_k": -1}.items()
        )
        assert option("--limit") == "7" and r"\boxed{}" in option("--system_instruction")
        assert Path(option("--output_path")) == evaluation.place


def test_completions_send_no_chat_settings(tmp_path: Path) -> None:
    cfg, aime = configured("AIME-24", "endpoint.chat=false", "generation.top_k=null", "generation.until=null")
    command = benchmarks.command(cfg, aime, 0, tmp_path)
    text = shlex.join(command)
    assert "local-completions" in command and "/v1/completions" in text
    for absent in (
        "--apply_chat_template",
        "chat_template_kwargs",
        "think_end_token",
        "top_k",
        "until",
        "--limit",
    ):
        assert absent not in text


def test_settings_and_models_have_their_own_places(tmp_path: Path) -> None:
    """Another endpoint of the same model and variant goes on with what is there; other settings do not."""

    def place(*overrides: str) -> Path:
        cfg, aime = configured("AIME-24", *overrides)
        return next(benchmarks.evaluations(cfg, aime, tmp_path)).place

    assert place() == place("endpoint.base_url=http://gpu:1/v1", "endpoint.num_concurrent=1", "repeats=1")
    changes = ("limit=1", "generation.temperature=0.5", "endpoint.chat=false", "endpoint.model=a/b", "seed=1")
    assert len({place(), place("endpoint.variant=bf16"), *(place(change) for change in changes)}) == 7
    assert place().parent.parent == place("endpoint.variant=bf16").parent.parent


def test_a_result_file_becomes_a_row_in_percent(tmp_path: Path) -> None:
    cfg, mmlu = configured("MMLU-Pro", "seed=3")
    [evaluation] = benchmarks.evaluations(cfg, mmlu, tmp_path)
    row = benchmarks.row(evaluation, "snapmla", DOCUMENT)
    assert tuple(row) == benchmarks.COLUMNS
    assert row == {
        "benchmark": "MMLU-Pro", "task": "mmlu_pro", "model": MODEL, "variant": "snapmla", "seed": 3,
        "metric": "exact_match,custom-extract", "score": 62.5, "stderr": 12.5, "n": 8, "harness": "0.4.13",
        "source": "measured", "status": "ok", "reason": None,
    }  # fmt: skip
    without = {**DOCUMENT, "results": {"mmlu_pro": {"acc,none": 0.5, "acc_stderr,none": 0.1}}}
    with pytest.raises(ValueError, match=r"'exact_match,custom-extract', got acc,none\.$"):
        benchmarks.row(evaluation, "snapmla", without)


def test_a_dry_run_sends_nothing_and_needs_neither_harness_nor_endpoint(
    start: Callable[..., int], no_harness: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert start("dry_run=true", no_harness, "endpoint.base_url=http://127.0.0.1:9/v1") == 0
    shown = capfd.readouterr()
    assert "not installed" in shown.err
    commands = [shlex.split(line) for line in shown.out.splitlines() if "lm_eval" in line]
    rows = table(tmp_path)
    assert len(commands) == 4 + 32 + 32 + 16 == (rows["reason"] == "dry run").sum()
    assert set(rows["status"]) == {"not run"} and rows["score"].isna().all()
    needs = rows[rows["task"].isna()].set_index("benchmark")["reason"]
    assert set(needs.index) == {"Arena-Hard", "BeyondAIME", "ZebraLogic", "LiveCodeBench 24.08-25.05"}
    assert needs.str.startswith("needs ").all()
    assert not (tmp_path / "results" / "harness").exists()


def test_a_run_measures_and_the_next_one_goes_on(
    start: Callable[..., int], harness: None, endpoint: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = (endpoint, "only=[AIME-24,IFEval]", "repeats=3")
    assert start(*arguments, "endpoint.variant=bf16", "seed=1") == 0
    assert start(*arguments) == 0
    rows = table(tmp_path)
    done = rows[rows["status"] == "ok"]
    assert set(done["benchmark"]) == {"AIME-24"} and done["n"].eq(30).all() and done["stderr"].isna().all()
    # Seeds 1 and 2 were measured for both variants; seed 3 is not among those of the second run.
    assert list(zip(done["seed"], done["variant"], done["score"])) == [
        (0, "snapmla", 0.0), (1, "bf16", 0.1), (1, "snapmla", 0.1), (2, "bf16", 0.2), (2, "snapmla", 0.2),
    ]  # fmt: skip
    failed = rows[rows["benchmark"] == "IFEval"]
    assert set(failed["reason"]) == {"the harness ended with exit code 1: ImportError: langdetect is missing"}
    assert set(rows.loc[rows["benchmark"] == "MMLU-Pro", "reason"]) == {"left out by the key only"}
    capfd.readouterr()
    assert start(*arguments, "dry_run=true") == 0  # keeps what is measured
    assert "3 of 6 evaluations to run" in capfd.readouterr().err
    again = table(tmp_path)
    pandas.testing.assert_frame_equal(again[again["status"] == "ok"], done)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("endpoint.variant=fp8",), "endpoint.variant must be one of bf16, snapmla, got 'fp8'"),
        (("only=[AIME]",), "got 'AIME'"),
        (("benchmarks=[{name: X, task: y}]",), "The benchmark X must have a task and a metric"),
        (("benchmarks=[{name: X}]",), "say what it needs"),
        (("benchmarks=[{name: X, task: aime26, metric: m}]",), "got aime26"),
        (("benchmarks=[{name: X, task: aime26, metric: m}]", "dry_run=true"), "got aime26"),
        (("endpoint.model=another",), f"serves ({MODEL}), got 'another'"),
        (("harness.python=/no/python",), "got '/no/python'"),
    ],
)
def test_what_cannot_run_is_one_sentence_before_anything_runs(
    start: Callable[..., int], harness: None, endpoint: str, tmp_path: Path, capfd: pytest.CaptureFixture[str],
    arguments: tuple[str, ...], named: str,
) -> None:  # fmt: skip
    assert start(endpoint, *arguments) == 1
    shown = capfd.readouterr().err
    assert "Traceback" not in shown and named in shown.splitlines()[-1]
    assert (
        not (tmp_path / "results" / "harness").exists() and not (tmp_path / "results" / "benchmarks").exists()
    )


@pytest.mark.parametrize("url", ["http://127.0.0.1:9/v1", "localhost:8000", "{served}/nothing"])
def test_an_endpoint_that_does_not_answer_is_one_sentence(
    start: Callable[..., int],
    harness: None,
    endpoint: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    url: str,
) -> None:
    served = endpoint.removeprefix("endpoint.base_url=")
    assert start(f"endpoint.base_url='{url.format(served=served)}'") == 1
    shown = capfd.readouterr().err
    assert "Traceback" not in shown and "The endpoint must answer GET" in shown.splitlines()[-1]
    assert not (tmp_path / "results" / "harness").exists()


def test_a_missing_harness_names_the_extra(
    start: Callable[..., int],
    no_harness: str,
    endpoint: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert start(endpoint, no_harness) == 1
    shown = capfd.readouterr().err
    assert "Traceback" not in shown and ".[benchmarks]" in shown.splitlines()[-1]
    assert not (tmp_path / "results" / "harness").exists()


@pytest.fixture
def table1() -> Iterator[Callable[[Path], str]]:
    """Draws Table 1 from a result folder and returns its Markdown."""
    folder = str(PUBLISHED.parent.parent)
    sys.path.insert(0, folder)

    def draw(root: Path) -> str:
        assert importlib.import_module("table1").main(["--results", str(root)]) == 0
        return (root / "tables" / "table1.md").read_text()

    yield draw
    sys.path.remove(folder)


def test_table_1_shows_measured_benchmarks_and_what_the_others_need(
    table1: Callable[[Path], str], tmp_path: Path
) -> None:
    root = Fake().write(tmp_path / "made up")
    plain = table1(root)
    assert "served model" not in plain
    common = dict.fromkeys(benchmarks.COLUMNS) | {"model": MODEL, "harness": "0.4.13", "source": "measured"}
    scores = [("AIME-24", "bf16", 0, 90.0), ("AIME-24", "bf16", 1, 92.0), ("AIME-24", "snapmla", 0, 89.5)]
    rows = [
        common
        | {"benchmark": name, "variant": variant, "seed": seed, "score": score, "stderr": 5.0, "status": "ok"}
        for name, variant, seed, score in scores
    ]
    rows.append(
        common | {"benchmark": "ZebraLogic", "variant": "bf16", "status": "not run", "reason": "needs a key"}
    )
    folder = root / "benchmarks"
    folder.mkdir()
    results.write_csv(folder / "benchmarks.csv", rows)
    write_run_json(folder, "benchmarks")
    lines = [re.sub(r"\s*\|\s*", "|", line) for line in table1(root).splitlines()]
    assert f"|{MODEL}|AIME-24|91.00 ± 1.00 (2 runs)|89.50 ± 5.00|measured|" in lines
    assert f"|{MODEL}|ZebraLogic|–|–|not run: needs a key|" in lines
    tidy = pandas.read_csv(root / "tables" / "table1.csv")
    assert list(tidy.loc[tidy["model"] == MODEL, "score"]) == [90.0, 92.0, 89.5]
    (folder / "benchmarks.csv").unlink()
    assert table1(root) == plain


def planned(results_dir: Path, *arguments: str) -> str:
    done = toy_project.run(
        "snakemake", "--dry-run", *arguments, cwd=toy_project.REPOSITORY, SNAPMLA_RESULTS=str(results_dir)
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_only_its_own_target_starts_the_benchmarks(tmp_path: Path) -> None:
    """Also not where an earlier run's table is there, older than the code."""
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "benchmarks.csv").write_text("benchmark\nAIME-24\n")
    assert "Experiment benchmarks" not in planned(tmp_path, "all")
    config = "experiments={benchmarks: {endpoint: {variant: bf16}, dry_run: true}}"
    shown = planned(tmp_path, "benchmarks", "--config", config)
    assert re.findall(r"^Job \d+: (.*)$", shown, re.MULTILINE) == ["Experiment benchmarks"]


def test_a_changed_benchmarks_table_redraws_table_1_and_nothing_else(tmp_path: Path) -> None:
    project = toy_project.build(tmp_path / "project")
    assert toy_project.run("snakemake", "table1", cwd=project).returncode == 0
    file = project / "results" / "benchmarks" / "benchmarks.csv"
    file.parent.mkdir()
    file.write_text("a\n1\n")
    shown = toy_project.run("snakemake", "--dry-run", "table1", cwd=project).stdout
    assert re.findall(r"^Job \d+: (.*)$", shown, re.MULTILINE) == ["Drawing table1"]

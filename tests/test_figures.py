"""Figures, tables and claims from invented result folders (figure_data.py): files, bytes, labels, errors,
verdicts.
"""

from __future__ import annotations

import ast
import html
import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from figure_data import FAKE_CPU, FAKE_GPU, Fake, kernel_bench, quality, timed, timed_errors, write_run_json

FOLDER = Path(__file__).resolve().parent.parent / "paper_figures"
FIGURES = ("fig1", "fig1b", "fig2", "fig3", "fig4", "fig4b", "fig5", "fig6", "fig7", "algorithm1", "fig_accumulation", "fig_drift")
TABLES = ("table1", "table2", "table_kernels", "table_ablation", "table_serving")
INPUTS = {
    "fig1": "throughput/throughput.csv",
    "fig1b": "throughput/throughput.csv",
    "fig3": "distribution/mse.csv",
    "fig4": "fidelity/layer_error.csv",
    "fig4b": "fidelity/kernels.csv",
    "fig5": "kernel_bench/kernel_bench.csv",
    "fig6": "kernel_bench/roofline.csv",
    "fig_accumulation": "accumulation/accumulation.csv",
    "fig_drift": "drift/drift.csv",
    "table1": "quality/quality.csv",
    "table2": "fidelity/layer_error.csv",
    "table_ablation": "ablation/ablation.csv",
    "table_serving": "serving/serving.csv",
}
PANELS = {
    "fig1": 6, "fig1b": 1, "fig2": 1, "fig3": 3, "fig4": 6, "fig4b": 1, "fig5": 6, "fig6": 8, "fig7": 4, "algorithm1": 2,
    "fig_accumulation": 2, "fig_drift": 2,
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def scripts():
    """The scripts import each other as top-level modules, as they do when run by path."""
    sys.path.insert(0, str(FOLDER))
    yield
    sys.path.remove(str(FOLDER))


def draw(name: str, root: Path, *options: str) -> int:
    """Draw from these results and, unless told otherwise, from nothing that the repository keeps."""
    nothing = root / "nothing recorded"
    if root.is_dir():
        nothing.mkdir(exist_ok=True)
    recorded = () if "--recorded" in options else ("--recorded", str(nothing))
    return importlib.import_module(name).main(["--results", str(root), *recorded, *options])


def outputs(root: Path) -> dict[str, bytes]:
    files = [path for folder in ("figures", "tables") for path in (root / folder).glob("*")]
    return {path.name: path.read_bytes() for path in files + list(root.glob("claims.*"))}


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = Fake().write(tmp_path_factory.mktemp("results of figures"))
    for name in (*FIGURES, *TABLES, "claims"):
        assert draw(name, root) == 0
    return root


def test_every_item_is_written_in_every_format(drawn: Path) -> None:
    expected = {f"{name}.{suffix}" for name in FIGURES for suffix in ("pdf", "svg", "png")}
    expected |= {f"{name}.{suffix}" for name in TABLES for suffix in ("csv", "md", "html", "tex")}
    expected |= {f"claims.{suffix}" for suffix in ("csv", "md", "html")}
    assert set(outputs(drawn)) == expected  # and no temporary file is left


def test_pages_have_what_the_tables_have(drawn: Path) -> None:
    claims, page = pd.read_csv(drawn / "claims.csv"), (drawn / "claims.html").read_text()
    assert re.findall(r"<b style=.*?>([A-Z ]+)</b>", page) == claims["status"].tolist()
    assert all(html.escape(text) in page for text in (*claims["claim"], *claims["tolerance"], *claims["detail"]))
    assert "<td>fidelity</td><td>FAKE-9000 (2 cores)</td>" in page  # the environment, of run.json
    for name in TABLES:
        text, page = ((drawn / "tables" / f"{name}.{suffix}").read_text() for suffix in ("md", "html"))
        shown = [line for line in text.splitlines() if line.startswith("|") and not line.startswith("|:")]
        assert page.count("<tr>") == len([line for line in shown if not re.fullmatch(r"[|:-]+", line)]), name


def test_a_second_process_writes_the_same_bytes(drawn: Path, tmp_path: Path) -> None:
    again = Fake().write(tmp_path)
    (again / "nothing recorded").mkdir()
    names = [*FIGURES, *TABLES, "claims"]
    code = (
        "import importlib, sys\n"
        "options = ['--results', sys.argv[1], '--recorded', sys.argv[1] + '/nothing recorded']\n"
        "for name in sys.argv[2:]: assert importlib.import_module(name).main(options) == 0"
    )
    subprocess.run([sys.executable, "-c", code, str(again), *names], cwd=FOLDER, check=True)
    first, second = outputs(drawn), outputs(again)
    assert [name for name in first if first[name] != second.get(name)] == []


@pytest.mark.parametrize("name", FIGURES)
def test_every_panel_has_a_badge_and_fonts_are_embedded(drawn: Path, name: str) -> None:
    svg = (drawn / "figures" / f"{name}.svg").read_text()
    badges = re.findall(r'id="source-\d+-([a-z-]+)"', svg)
    assert len(badges) == PANELS[name]
    assert "<text" not in svg  # glyphs are paths
    pdf = (drawn / "figures" / f"{name}.pdf").read_bytes()
    assert b"/FontFile2" in pdf and b"/Type3" not in pdf and b"CreationDate" not in pdf


def test_badges_follow_the_data(drawn: Path, tmp_path: Path) -> None:
    def kinds(root: Path, name: str) -> set[str]:
        return set(re.findall(r'id="source-\d+-([a-z-]+)"', (root / "figures" / f"{name}.svg").read_text()))

    assert kinds(drawn, "fig6") == {"not-run"} and kinds(drawn, "fig4") == {"measured"}
    fake = Fake()
    fake.tables["kernel_bench", "kernel_bench.csv"] = timed(kernel_bench(), "measured", "NVIDIA H200", 0.9)
    assert draw("fig6", fake.write(tmp_path)) == 0
    assert kinds(tmp_path, "fig6") == {"measured"}


def test_kernel_times_stand_beside_least_times(tmp_path: Path) -> None:
    fake = Fake()
    for name in ("kernel_bench.csv", "latency.csv"):
        fake.tables["kernel_bench", name] = timed(
            fake.tables["kernel_bench", name], "measured", "NVIDIA H200", 0.5
        )
    root = fake.write(tmp_path)
    assert draw("table_kernels", root) == 0
    text = (root / "tables" / "table_kernels.md").read_text()
    assert "measured here (NVIDIA H200" in text and "modelled, nothing timed" in text
    assert f"{934 / 600:.2f}" in text  # SnapMLA at half of 1868 TFLOPS over FlashMLA at 600
    tidy = pd.read_csv(root / "tables" / "table_kernels.csv")
    assert set(tidy["batch"]) == {1, 32} and set(tidy["source"]) == {"measured"}


@pytest.mark.parametrize(
    ("size", "error", "lower", "named"),
    [
        (644, 0.5, 7, True),
        (580, 0.5, 7, True),
        (645, 0.5, 7, False),  # more bytes
        (644, 0.5, 5, True),  # 30 of 42 queries, more than 27.5
        (644, 0.5, 4, False),  # 24 of 42 may be chance
        (644, 0.996, 7, False),  # a ratio that is printed as 1.00
        (644, 1.2, 7, False),
    ],
)
def test_the_ablation_names_a_winner_only_where_there_is_one(
    size: int, error: float, lower: int, named: bool, tmp_path: Path
) -> None:
    fake = Fake()
    table = fake.tables["ablation", "ablation.csv"]
    winner = table.query("format == 'snapmla'").assign(
        format="fake_other",
        label="FAKE other",
        bytes_per_token=size,
        relative_l2=lambda rows: rows["relative_l2"] * error,
        queries_lower=lower,
    )
    fake.tables["ablation", "ablation.csv"] = pd.concat([table, winner])
    root = fake.write(tmp_path)
    assert draw("table_ablation", root) == 0
    caption = (root / "tables" / "table_ablation.md").read_text().split("\n\n")[0]
    assert (f"FAKE other ({error:.2f}x, FP8 products, {6 * lower} of 42 queries)" in caption) == named
    assert ("Nothing here has a lower error" in caption) != named
    assert "FAKE large (" not in caption and "FAKE small (" not in caption
    tidy = pd.read_csv(root / "tables" / "table_ablation.csv").set_index("format")
    assert tidy.loc["fake_other", "ratio_to_snapmla"] == pytest.approx(error)
    assert tidy.loc["snapmla", "mean_relative_l2"] == pytest.approx(0.0125)
    assert tidy.loc["fake_other", ["queries_lower", "queries"]].tolist() == [6 * lower, 42]
    assert tidy.loc["snapmla", "worst_relative_l2"] == pytest.approx(0.015)


def test_the_ablation_needs_its_base(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fake = Fake()
    fake.tables["ablation", "ablation.csv"] = fake.tables["ablation", "ablation.csv"].query("format != 'snapmla'")
    assert draw("table_ablation", fake.write(tmp_path)) == 1
    assert "must have rows of the format 'snapmla'" in capsys.readouterr().err


def test_measured_kernels_are_drawn_beside_the_model(tmp_path: Path) -> None:
    fake = Fake()
    fake.tables["accumulation", "kernels.csv"] = timed_errors(0.0015)
    root = fake.write(tmp_path / "measured")
    assert draw("fig_accumulation", root) == 0
    plain = Fake().write(tmp_path / "plain")
    assert draw("fig_accumulation", plain) == 0
    drawings = [(r / "figures" / "fig_accumulation.svg").read_bytes() for r in (root, plain)]
    assert drawings[0] != drawings[1]
    module, sources = importlib.import_module("fig_accumulation"), importlib.import_module("sources")
    label, table = module.kernels(sources.Results(root, tmp_path))
    assert label.kind == "measured" and set(table["batch"]) == {128} and len(table) == 8
    assert module.kernels(sources.Results(plain, tmp_path)) is None


def test_recorded_rows_are_drawn_only_where_nothing_was_measured(tmp_path: Path) -> None:
    recorded = tmp_path / "elsewhere" / "h200"
    recorded.mkdir(parents=True)
    timed(kernel_bench(), "recorded", "NVIDIA H200", 0.5).to_csv(recorded / "kernel_bench.csv", index=False)
    write_run_json(recorded, "kernel_bench")
    root = Fake().write(tmp_path / "results")
    assert draw("fig5", root, "--recorded", str(recorded.parent)) == 0
    assert "source-0-recorded" in (root / "figures" / "fig5.svg").read_text()

    sources, plots = importlib.import_module("sources"), importlib.import_module("kernel_plots")
    data = plots.load(sources.Results(root, recorded.parent), "H20")
    assert data.source.short == "recorded H200, 1999-12-31" and data.gpu == "H200"
    run = json.loads((recorded / "run.json").read_text())
    later = {"provenance": {"date": "2000-01-02T00:00:00", "commit": "second-commit"}}
    (recorded / "run.json").write_text(json.dumps(run | {"more_runs": [later, run, later]}))
    of_all = plots.load(sources.Results(root, recorded.parent), "H20").source
    assert of_all.short == "recorded H200, 1999-12-31 to 2000-01-02" and of_all.detail.endswith(", second-")
    assert of_all.detail.count(",") == 1  # each commit once
    fake = Fake()
    fake.tables["kernel_bench", "kernel_bench.csv"] = timed(kernel_bench(), "measured", "NVIDIA H20", 0.1)
    fake.write(root)
    data = plots.load(sources.Results(root, recorded.parent), "H20")
    assert data.source.kind == "measured" and data.gpu == "H20" and set(data.rows["source"]) == {"measured"}


def test_labels_name_the_device_the_commit_and_the_model(tmp_path: Path) -> None:
    sources = importlib.import_module("sources")
    results = sources.Results(Fake().write(tmp_path))
    rows = pd.DataFrame({"source": ["modelled", "measured", "measured"]})
    measured, modelled = results.label("throughput", rows)
    assert measured.long == f"measured here ({FAKE_CPU} (2 cores), commit fa4e000)"
    assert modelled.long.startswith(f"modelled ({FAKE_GPU}, ") and "nothing timed" in modelled.long
    assert results.model("quality") == "the probe model"


def test_a_panel_without_badge_is_refused(tmp_path: Path) -> None:
    style = importlib.import_module("style")
    fig, _ = style.plt.subplots()
    with pytest.raises(ValueError, match="must have a source badge, got none on panel 0"):
        style.save(fig, tmp_path, "unlabelled")
    assert not any(tmp_path.rglob("*.*"))


def test_a_failing_write_leaves_the_old_files(
    drawn: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    style, sources = importlib.import_module("style"), importlib.import_module("sources")
    root = Fake().write(tmp_path)
    assert draw("fig7", root) == 0
    before = outputs(root)
    fig, ax = style.plt.subplots()
    style.badge(ax, sources.DIAGRAM)
    monkeypatch.setattr(
        style.FigureCanvasSVG, "print_svg", lambda *a, **k: (_ for _ in ()).throw(OSError("disk full"))
    )
    with pytest.raises(OSError, match="disk full"):
        style.save(fig, root, "fig7")
    assert outputs(root) == before and not list((root / "figures").glob(".*"))


@pytest.mark.parametrize("name", INPUTS)
def test_missing_and_malformed_input_is_one_sentence(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = Fake().write(tmp_path)
    path = root / INPUTS[name]
    table = pd.read_csv(path)
    for spoil, pattern in (
        (
            lambda: path.unlink(),
            rf"error: {INPUTS[name]} is missing in .*: run `python -m snapmla\.experiments\.\w+` first\.",
        ),
        (lambda: path.write_text(""), rf"error: {INPUTS[name]} must be a CSV file with a header, got .*"),
        (
            lambda: table.head(0).to_csv(path, index=False),
            rf"error: {INPUTS[name]} must have at least one row, got none\.",
        ),
        (
            lambda: table.drop(columns="source").to_csv(path, index=False),
            rf"error: {INPUTS[name]} must have the column 'source', got .*",
        ),
        (
            lambda: table.assign(source="guessed").to_csv(path, index=False),
            None
            if name in ("fig1b", "fig4b", "fig5", "fig6", "table_serving")
            else r"error: Unknown source of a number: expected one of .*, got 'guessed'\.",
        ),
    ):
        spoil()
        if pattern:
            assert draw(name, root) == 1
            assert re.fullmatch(pattern + "\n", capsys.readouterr().err)
            assert outputs(root) == {}


def test_table1_is_the_mean_over_seeds_with_its_interval() -> None:
    table1 = importlib.import_module("table1")
    rows = [
        {"task": "recall", "context": 4096, "variant": variant, "seed": seed, "score": score, "ci95": half, "n": 20, "source": "measured"}
        for variant, seed, score, half in (("bf16", 0, 0.8, 0.06), ("bf16", 1, 1.0, 0.08), ("snapmla", 0, 0.7, 0.0), ("snapmla", 1, 0.9, None))
    ]  # fmt: skip
    row = table1.our_part(pd.DataFrame(rows)).loc[0]
    assert row["BF16"] == "0.9000 ± 0.0500" and row["SnapMLA"] == "0.8000"
    assert (row["k"], row["n"], row["task"]) == ("2", "20", "recall: the value of a key")


def test_table1_shows_a_recorded_gpus_quality(tmp_path: Path) -> None:
    root, recorded = Fake().write(tmp_path / "results"), tmp_path / "recorded" / "h200"
    recorded.mkdir(parents=True)
    quality().assign(task="recall", source="recorded").to_csv(recorded / "quality.csv", index=False)
    write_run_json(recorded, "quality")
    (recorded / "run.json").rename(recorded / "quality.json")
    (recorded / "run.json").write_text('{"provenance": {"date": "1998-01-01"}}')
    assert draw("table1", root, "--recorded", str(recorded.parent)) == 0
    text = (root / "tables" / "table1.md").read_text()
    assert "Table 1b" in text and "recall: the value of a key" in text and "1999-12-31" in text and "1998" not in text
    assert text.count("by more than the interval") == 2
    tidy = pd.read_csv(root / "tables" / "table1.csv")
    assert set(tidy["source"]) == {"paper", "measured", "recorded"}


@pytest.mark.parametrize(
    ("task", "score", "half", "sentence"),
    [
        ("recall", 0.85, 0.04, "Worse than BF16 by more than the interval: A on recall (4096)."),
        ("recall", 0.85, 0.06, "No variant is worse than BF16 by more than the interval."),
        ("recall", 0.95, 0.01, "No variant is worse than BF16 by more than the interval."),
        ("bits_per_byte", 0.95, 0.01, "Worse than BF16 by more than the interval: A on bits_per_byte (4096)."),
        ("bits_per_byte", 0.85, 0.01, "No variant is worse than BF16 by more than the interval."),
        ("next_byte_agreement", 0.1, 0.01, "No variant is worse than BF16 by more than the interval."),
    ],
)
def test_table1_says_which_variants_are_worse(task: str, score: float, half: float, sentence: str) -> None:
    table1 = importlib.import_module("table1")
    rows = [
        {"task": task, "context": 4096, "variant": variant, "seed": seed, "score": mean, "ci95": ci95}
        for seed in (0, 1)
        for variant, mean, ci95 in (("bf16", 0.9, 0.5), ("snapmla", 0.9, None), ("config_a", score, half * 2**0.5))
    ]  # fmt: skip
    assert table1.worse(pd.DataFrame(rows)) == sentence


def recorded_fidelity(folder: Path) -> Path:
    """Two contexts measured on a GPU, A in the first one only; returns the folder of all GPUs."""
    fake, h200 = Fake(), folder / "h200"
    h200.mkdir(parents=True)
    on_gpu = {"source": "recorded", "status": "ok", "gpu": "NVIDIA H200"}
    errors = fake.tables["fidelity", "layer_error.csv"].assign(**on_gpu)
    kernels = fake.tables["fidelity", "kernels.csv"].assign(relative_l2=0.02, from_emulation=3e-4, **on_gpu)
    for name, table in (("fidelity", errors), ("fidelity_kernels", kernels)):
        longer = table[table["config"] != "config_a"].assign(context=65536)
        pd.concat([table, longer]).to_csv(h200 / f"{name}.csv", index=False)
    write_run_json(h200, "fidelity")
    return folder


def test_fig4b_draws_what_a_gpu_measured_or_else_recorded(tmp_path: Path) -> None:
    recorded = recorded_fidelity(tmp_path / "recorded")
    root = Fake().write(tmp_path / "results")
    svg = root / "figures" / "fig4b.svg"
    assert draw("fig4b", root, "--recorded", str(recorded)) == 0
    assert re.findall(r'id="source-\d+-([a-z-]+)"', svg.read_text()) == ["recorded"] * 3
    fake = Fake()
    for name in ("layer_error.csv", "kernels.csv"):
        fake.tables["fidelity", name] = fake.tables["fidelity", name].assign(
            relative_l2=0.01, from_emulation=1e-3, status="ok", gpu="NVIDIA H100"
        )
    assert draw("fig4b", fake.write(tmp_path / "results"), "--recorded", str(recorded)) == 0
    assert re.findall(r'id="source-\d+-([a-z-]+)"', svg.read_text()) == ["measured"] * 2


def test_what_vllm_measured_stands_in_its_table(tmp_path: Path) -> None:
    fake = Fake()
    table = fake.tables["serving", "serving.csv"]
    root = fake.write(tmp_path)
    assert draw("table_serving", root) == 0
    text = (root / "tables" / "table_serving.md").read_text()
    assert "NOT RUN (FAKE reason: no such GPU.)" in text and "%" not in text
    fake.tables["serving", "serving.csv"] = table.assign(
        agreement=0.99512, n=1024, prompts=4, cached_tokens=640, kv_tokens=6400, early_bytes=2**20, late_bytes=3 * 2**20,
        long_steps=2000, tokens_per_step=1.253, status="ok", reason=None, gpu="NVIDIA H200",
    )  # fmt: skip
    assert draw("table_serving", fake.write(root)) == 0
    text = (root / "tables" / "table_serving.md").read_text()
    assert "measured here (NVIDIA H200" in text and "at the end of 2000 decoded tokens" in text
    assert re.search(r"SnapMLA +\| +2 \| SnapMLA +\| +99.51% \| +1024 \| +640 \| +6400 \| +1.25 \| +2.0 \|", text)


def test_the_time_of_a_token_is_attention_and_the_rest(tmp_path: Path) -> None:
    fig1b = importlib.import_module("fig1b")
    rows = [
        {"variant": variant, "context": context, "batch": batch, "step_ms": step, "attention_ms": attention}
        for variant, context, batch, step, attention in (
            ("bf16", 1024, 10, 30.0, 12.0), ("snapmla", 1024, 20, 30.0, 10.0), ("bf16", 2048, 5, 30.0, 9.0), ("snapmla", 4096, 5, 30.0, 9.0),
        )
    ]  # fmt: skip
    found = fig1b.time_of_a_token(pd.DataFrame(rows))
    assert found.index.tolist() == [(1024, "bf16"), (1024, "snapmla")]
    assert found.to_numpy() == pytest.approx(pd.DataFrame([[0.4, 0.6], [1 / 6, 1 / 3]]).to_numpy())
    fake = Fake()
    engine_measured(fake)
    whole = fake.tables[THROUGHPUT].query("source == 'measured'")
    smaller = whole.assign(pool_gb=20.0, tokens_per_s=whole["tokens_per_s"] / 2)
    fake.tables[THROUGHPUT] = pd.concat([whole.assign(layout="DP4/TP2"), fake.tables[THROUGHPUT], smaller])
    root = fake.write(tmp_path)
    assert draw("fig1b", root) == 0
    svg = (root / "figures" / "fig1b.svg").read_text()
    assert ", DP8/TP1" in svg and "DP4/TP2" not in svg  # the paper's best layout of what was measured
    assert re.findall(r'id="source-\d+-([a-z-]+)"', svg) == ["measured"] * 2


@pytest.mark.parametrize("scope", ["rank", "node"])
def test_a_node_is_not_called_one_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scope: str) -> None:
    fake = Fake()
    engine_measured(fake)
    table = fake.tables[THROUGHPUT]
    fake.tables[THROUGHPUT] = table.assign(scope=table["scope"].where(table["scope"].isna(), scope))
    root, claims = fake.write(tmp_path), importlib.import_module("claims")
    notes = []
    for name in ("fig1", "fig1b"):
        monkeypatch.setattr(importlib.import_module(name), "footer", lambda fig, note="": notes.append(note))
        assert draw(name, root) == 0
    sources = importlib.import_module("sources")
    row = claims.judge(sources.Results(root, root / "nothing recorded")).iloc[0]
    for text in (*notes, row["detail"]):
        assert ("send each other" in text) == (scope == "rank")


def test_one_rank_is_held_against_the_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All GPUs were measured in one layout, one rank in all of them: the node's bars are drawn, and what the rank would have said."""
    fake, fig1, notes = Fake(), importlib.import_module("fig1"), []
    engine_measured(fake)
    ranks = fake.tables[THROUGHPUT].query("source == 'measured' and layout == 'DP8/TP1'")
    nodes = ranks.assign(scope="node", tokens_per_s=ranks["tokens_per_s"] * 0.8)
    elsewhere = nodes.assign(layout="DP4/TP2", gpu="NVIDIA H20")
    fake.tables[THROUGHPUT] = pd.concat([fake.tables[THROUGHPUT], nodes])
    root = fake.write(tmp_path)
    monkeypatch.setattr(fig1, "footer", lambda fig, note="": notes.append(note))
    assert draw("fig1", root) == 0
    assert "all GPUs of the layout (DP8/TP1); one rank of the layout" in notes[0] and "left out (DP1/TP8, DP4/TP2);" in notes[0]
    assert f"One rank, times the ranks, is +25% to +25% off at {len(ranks)} of all GPUs' bars." in notes[0]
    results = importlib.import_module("sources").Results(root, root / "nothing recorded")
    _, rows = fig1.measured(results)
    assert set(rows.loc[rows["layout"] == "DP8/TP1", "scope"]) == {"node"} and set(rows["scope"]) == {"node", "rank"}
    assert fig1.rank_off(results, elsewhere).empty  # of another GPU


def test_the_model_is_held_against_what_was_measured() -> None:
    fig1 = importlib.import_module("fig1")
    point = {"model": "M", "layout": "DP8/TP1", "variant": "bf16"}
    measured = pd.DataFrame([point | {"context": c, "tokens_per_s": 100.0} for c in (1024, 2048)] + [point | {"context": 1024, "variant": "fp8"}])
    modelled = pd.DataFrame([point | {"context": c, "tokens_per_s": t} for c, t in ((1024, 110.0), (2048, 95.0), (4096, 1.0))])
    assert fig1.off(modelled, measured).tolist() == pytest.approx([0.1, -0.05])


def test_measured_bars_stand_beside_the_model(tmp_path: Path) -> None:
    fake = Fake()
    engine_measured(fake)
    third = fake.tables[THROUGHPUT].query("source == 'measured' and variant == 'bf16' and layout == 'DP8/TP1'")
    fake.tables[THROUGHPUT] = pd.concat([fake.tables[THROUGHPUT], third.assign(variant="fp8")])
    root = fake.write(tmp_path / "results")
    assert draw("fig1", root) == 0
    found = set(re.findall(r'id="source-\d+-([a-z-]+)"', (root / "figures" / "fig1.svg").read_text()))
    assert found == {"measured", "not-run"}
    recorded = tmp_path / "recorded" / "h200"
    recorded.mkdir(parents=True)
    rows = fake.tables[THROUGHPUT].query("source == 'measured' and layout == 'DP8/TP1'")
    rows.assign(source="recorded").to_csv(recorded / "throughput.csv", index=False)
    write_run_json(recorded, "throughput")
    Fake().write(root)
    assert draw("fig1", root, "--recorded", str(recorded.parent)) == 0
    found = re.findall(r'id="source-\d+-([a-z-]+)"', (root / "figures" / "fig1.svg").read_text())
    assert sorted(found) == ["modelled", "modelled", "modelled", "not-run", "recorded", "recorded"]


def test_a_recorded_decode_is_drawn_below_a_cpus(tmp_path: Path) -> None:
    fake, h200 = Fake(), tmp_path / "recorded" / "h200"
    h200.mkdir(parents=True)
    table = fake.tables["drift", "drift.csv"]
    table.assign(source="recorded", gpu="NVIDIA H200").to_csv(h200 / "drift.csv", index=False)
    write_run_json(h200, "drift")
    root = fake.write(tmp_path / "results")
    for gpu, kinds in ((None, ["measured"] * 2 + ["recorded"] * 2), ("NVIDIA H100", ["measured"] * 2)):
        fake.tables["drift", "drift.csv"] = table.assign(gpu=gpu)
        fake.write(root)
        assert draw("fig_drift", root, "--recorded", str(h200.parent)) == 0
        svg = (root / "figures" / "fig_drift.svg").read_text()
        assert re.findall(r'id="source-\d+-([a-z-]+)"', svg) == kinds


def test_the_ablation_shows_recorded_contexts_apart(tmp_path: Path) -> None:
    fake, h200 = Fake(), tmp_path / "recorded" / "h200"
    h200.mkdir(parents=True)
    for name, table in (("ablation", "ablation.csv"), ("ablation_accumulation", "accumulation.csv")):
        rows = fake.tables["ablation", table].assign(source="recorded")
        pd.concat([rows, rows.assign(context=131072)]).to_csv(h200 / f"{name}.csv", index=False)
    write_run_json(h200, "ablation")
    root = fake.write(tmp_path / "results")
    assert draw("table_ablation", root, "--recorded", str(h200.parent)) == 0
    text = (root / "tables" / "table_ablation.md").read_text()
    captions = re.findall(r"^(Formats|Ways).*(probe model).*Source: (\w+)", text, re.MULTILINE)
    assert [caption[::2] for caption in captions] == [
        ("Formats", "measured"), ("Ways", "measured"), ("Formats", "recorded"), ("Formats", "recorded"), ("Ways", "recorded"),
    ]  # fmt: skip
    tidy = pd.read_csv(root / "tables" / "table_ablation.csv")
    assert set(tidy[tidy["source"] == "recorded"]["context"]) == {32768, 131072}


def test_missing_folder_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert draw("claims", tmp_path / "nowhere") == 1
    assert re.fullmatch(
        r"error: --results must be a folder with result files, got .*nowhere, .*\n", capsys.readouterr().err
    )


def test_scripts_run_by_path_from_elsewhere(tmp_path: Path) -> None:
    root = Fake().write(tmp_path / "with space")
    nothing = ("--recorded", str(tmp_path))  # so that the claim about throughput stays open
    command = [sys.executable, str(FOLDER / "claims.py"), "--results", str(root), *nothing, "--print"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "PASS" in done.stdout and "NOT RUN" in done.stdout and done.stderr == ""


def test_scripts_never_import_the_package() -> None:
    for path in FOLDER.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(name.split(".")[0] in ("snapmla", "torch") for name in names), path.name


def test_tables_show_paper_and_ours_apart(drawn: Path) -> None:
    table = pd.read_csv(drawn / "tables" / "table1.csv")
    paper = table[table["source"] == "paper"]
    assert len(paper) == 44 and set(paper["model"]) == {"DeepSeek-V3.1", "LongCat-Flash-Thinking"}
    assert set(table.loc[table["model"] == "the probe model", "source"]) == {"measured"}
    assert FAKE_CPU in (drawn / "tables" / "table1.md").read_text()
    configs = pd.read_csv(drawn / "tables" / "table2.csv").set_index("config")
    errors = (
        Fake().tables["fidelity", "layer_error.csv"].query("config == 'config_a' and panel == 'accumulated'")
    )
    captions = re.findall(r"\\caption{(.*)}\n", (drawn / "tables" / "table1.tex").read_text())
    assert len(captions) == 2 and not re.search(r"(?<!\\)[%&#_]", " ".join(captions))  # % starts a comment
    assert configs.loc["config_a", "accumulated_rmse"] == pytest.approx(errors["rmse"].mean())


# Claims: (name in claims.toml, change of the tables, status).


def scale(key: tuple[str, str], query: str, column: str, factor: float):
    def change(fake: Fake) -> None:
        table = fake.tables[key]
        table.loc[table.query(query).index, column] *= factor

    return change


def put(key: tuple[str, str], **columns):
    def change(fake: Fake) -> None:
        fake.tables[key] = fake.tables[key].assign(**columns)

    return change


def drop(*key: str):
    return lambda fake: fake.tables.pop(key)


def kernels(share: float, spoil_heads: int | None = None):
    def change(fake: Fake) -> None:
        table = timed(kernel_bench(), "measured", "NVIDIA H200", share)
        spoilt = (table["heads"] == spoil_heads) & (table["variant"] == "snapmla")
        table.loc[spoilt, "tflops"] *= 0.5
        table.loc[spoilt, "time_us"] *= 2.0
        fake.tables["kernel_bench", "kernel_bench.csv"] = table

    return change


def kernels_err(error: float):
    def change(fake: Fake) -> None:
        fake.tables["accumulation", "kernels.csv"] = timed_errors(error)

    return change


def shrinking_a(fake: Fake) -> None:
    """A is far worse than SnapMLA, but its error falls with depth."""
    table = fake.tables[ERRORS]
    of_a = table["config"] == "config_a"
    table.loc[of_a, "relative_l2"] = 0.5 - 0.05 * table.loc[of_a, "layer"]


def without_b(fake: Fake) -> None:
    fake.tables[ERRORS] = fake.tables[ERRORS].query("config != 'config_b'")


def engine_measured(fake: Fake, pool_gb: float | None = None) -> None:
    """Beside each modelled row one that was measured, at 0.9 of its tokens/s."""
    table = fake.tables[THROUGHPUT].query("status == 'ok'")
    measured = table.assign(source="measured", gpu="NVIDIA H200", scope="rank", pool_gb=pool_gb, tokens_per_s=table["tokens_per_s"] * 0.9)
    fake.tables[THROUGHPUT] = pd.concat([fake.tables[THROUGHPUT], measured], ignore_index=True)


def slow_measured(fake: Fake) -> None:
    engine_measured(fake)
    scale(THROUGHPUT, "variant == 'snapmla' and source == 'measured'", "tokens_per_s", 0.9)(fake)


def partly_measured(fake: Fake) -> None:
    """One measured pair without a gain: the modelled pairs beside it do not count."""
    table = fake.tables[THROUGHPUT]
    pair = table.query("model == 'FAKE-A' and layout == 'DP8/TP1' and context == 16384")
    measured = pair.assign(source="measured", gpu="NVIDIA H200", scope="rank", tokens_per_s=5000.0)
    fake.tables[THROUGHPUT] = pd.concat([table, measured], ignore_index=True)


def unchanged(fake: Fake) -> None:
    pass


ERRORS, MSE = ("fidelity", "layer_error.csv"), ("distribution", "mse.csv")
THROUGHPUT, QUALITY = ("throughput", "throughput.csv"), ("quality", "quality.csv")
ACCUMULATION = ("accumulation", "accumulation.csv")
DRIFT = ("drift", "drift.csv")
ONE_GROWS = "rule == 'promoted' and keys == 65536 and value_mean == 0"
CASES = [
    ("throughput", unchanged, "NOT RUN"),
    ("throughput", engine_measured, "PASS"),
    ("throughput", lambda fake: engine_measured(fake, 20.0), "NOT RUN"),  # a smaller pool is not the paper's case
    ("throughput", slow_measured, "FAIL"),
    ("throughput", partly_measured, "FAIL"),
    ("throughput", drop(*THROUGHPUT), "NOT RUN"),
    ("kernel_peak", unchanged, "NOT RUN"),
    ("kernel_peak", kernels(0.83), "PASS"),
    ("kernel_peak", kernels(0.7), "FAIL"),
    ("kernel_peak", kernels(0.9, spoil_heads=128), "FAIL"),
    ("kernel_peak", kernels(0.9, spoil_heads=32), "PASS"),
    ("kernel_peak_measured", unchanged, "NOT RUN"),
    ("kernel_peak_measured", kernels(0.83), "PASS"),  # of a measured peak that is as high as the data sheet's
    ("kernel_peak_measured", kernels(0.7), "FAIL"),
    ("kernel_over_bf16", unchanged, "NOT RUN"),
    ("kernel_over_bf16", kernels(0.83), "PASS"),
    ("kernel_over_bf16", kernels(0.3), "FAIL"),
    ("kernel_over_bf16", kernels(0.83, spoil_heads=16), "PASS"),
    ("kernel_over_bf16", kernels(0.5, spoil_heads=16), "FAIL"),
    ("kernel_over_fp8", kernels(0.83), "NOT RUN"),
    ("cache_bytes", unchanged, "PASS"),
    ("cache_bytes", scale(THROUGHPUT, "variant == 'snapmla'", "bytes_per_token", 2), "FAIL"),
    ("cache_bytes", put(THROUGHPUT, bytes_per_token=np.nan), "NOT RUN"),
    ("a_explodes", unchanged, "PASS"),
    ("a_explodes", scale(ERRORS, "config == 'config_a'", "relative_l2", 0.2), "FAIL"),
    ("a_explodes", shrinking_a, "FAIL"),
    ("snapmla_lowest", unchanged, "PASS"),
    (
        "snapmla_lowest",
        scale(ERRORS, "config == 'config_c' and layer == 2", "one_minus_cosine", 0.01),
        "FAIL",
    ),
    ("d_slightly_worse", unchanged, "PASS"),
    ("d_slightly_worse", scale(ERRORS, "config == 'config_d'", "relative_l2", 0.9), "FAIL"),
    ("d_slightly_worse", scale(ERRORS, "config == 'config_d'", "relative_l2", 3), "FAIL"),
    ("bc_worse", unchanged, "PASS"),
    ("bc_worse", scale(ERRORS, "config == 'config_b'", "relative_l2", 0.1), "FAIL"),
    ("bc_worse", drop(*ERRORS), "NOT RUN"),
    ("bc_worse", without_b, "NOT RUN"),
    ("rope_mse", unchanged, "PASS"),
    ("rope_mse", scale(MSE, "part == 'rope'", "mse", 0.1), "FAIL"),
    ("quality", unchanged, "PASS"),
    ("quality", scale(QUALITY, "variant == 'snapmla' and context == 4096", "score", 1.1), "FAIL"),
    ("quality", scale(QUALITY, "variant == 'snapmla' and task == 'bits_per_byte'", "score", 1.015), "FAIL"),
    ("accumulation", unchanged, "PASS"),
    ("accumulation", scale(ACCUMULATION, ONE_GROWS, "relative_l2", 2), "FAIL"),
    ("accumulation", drop(*ACCUMULATION), "NOT RUN"),
    ("drift", unchanged, "PASS"),
    ("drift", scale(DRIFT, "variant == 'snapmla' and step_from >= 600", "kl", 2), "FAIL"),
    ("drift", scale(DRIFT, "variant == 'config_a' and step_from >= 600", "kl", 2), "PASS"),
    ("drift", drop(*DRIFT), "NOT RUN"),
    ("kernel_accumulation", unchanged, "NOT RUN"),
    ("kernel_accumulation", kernels_err(0.0015), "PASS"),
    ("kernel_accumulation", kernels_err(0.03), "FAIL"),
]


@pytest.mark.parametrize(
    ("claim", "change", "status"), CASES, ids=[f"{name}-{n}-{s}" for n, (name, _, s) in enumerate(CASES)]
)
def test_the_data_decide_a_claim(claim: str, change, status: str, tmp_path: Path) -> None:
    claims, sources = importlib.import_module("claims"), importlib.import_module("sources")
    fake = Fake()
    change(fake)
    (tmp_path / "recorded").mkdir()
    table = claims.judge(sources.Results(fake.write(tmp_path), tmp_path / "recorded")).set_index("claim")
    row = table.loc[sources.published("claims.toml")[claim]["claim"]]
    assert row["status"] == status, row["detail"]
    assert row["detail"] and (row["ours"] != "") == (status != "NOT RUN")


def test_a_modelled_speedup_is_no_evidence_but_is_told(drawn: Path) -> None:
    row = pd.read_csv(drawn / "claims.csv").iloc[0]
    assert row["status"] == "NOT RUN" and "1.80x" in row["detail"] and pd.isna(row["ours"])


def test_every_claim_has_a_judge() -> None:
    claims, sources = importlib.import_module("claims"), importlib.import_module("sources")
    assert list(claims.JUDGES) == list(sources.published("claims.toml"))


def test_algorithm1_keeps_the_enforced_order() -> None:
    module = importlib.import_module("algorithm1")
    steps = module.snapmla(3)
    times = module.schedule(steps)
    for pair in range(3):
        even, odd = 2 * pair, 2 * pair + 1
        for half in ("left", "right"):
            assert times[f"pv{even}{half}"][1] <= times[f"pv{odd}{half}"][0]
            assert times[f"pv{odd}{half}"][0] >= times[f"softmax{odd}"][1]
    inverted = module.schedule(module.flashmla(1))
    assert inverted["pv1right"][1] <= inverted["pv0right"][0]

"""The claims table: each claim with the paper's value, ours, the tolerance, and PASS, FAIL or NOT RUN.

    python paper_figures/claims.py --results results           # writes claims.csv and claims.md
    python paper_figures/claims.py --results results --print   # prints them, too

Claims and tolerances are data (published/claims.toml). Each has one function below that reads result files
and decides. Only numbers that were measured (here, or recorded with their provenance) can pass or fail a
claim about speed: a modelled number leaves it NOT RUN and stands in the detail. A claim whose experiment is
missing is NOT RUN.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pages
import pandas as pd
import sources
from fig1 import COLUMNS as THROUGHPUT
from fig1 import COMMUNICATION, of_nodes, one_rank
from fig1 import measured as measured_throughput
from fig_accumulation import kernels as kernel_errors
from kernel_plots import BENCH, ROOFLINE, normal
from rich.box import HORIZONTALS
from rich.console import Console
from rich.table import Table
from rich.text import Text
from sources import InputError, Results, Source
from style import context_name, label_of, markdown, write_text

PASS, FAIL, NOT_RUN = "PASS", "FAIL", "NOT RUN"
COLUMNS = ["claim", "paper_value", "ours", "tolerance", "status", "source", "detail"]
METRICS = {"rmse": "RMSE", "one_minus_cosine": "1 - cosine", "relative_l2": "relative L2"}
FP8_CONFIGS = ["snapmla", "config_a", "config_b", "config_c", "config_d"]


@dataclass(frozen=True)
class Verdict:
    status: str
    ours: str
    source: str
    detail: str


class NotRun(Exception):
    """A claim that the results cannot decide; its text says why."""


def verdict(holds: bool, ours: str, labels: Sequence[Source], detail: str) -> Verdict:
    return Verdict(PASS if holds else FAIL, ours, "; ".join(label.long for label in labels), detail)


def throughput(results: Results, limit: dict) -> Verdict:
    if found := measured_throughput(results):
        label, rows = found
        ratio = gains(rows, limit["layout"])
        if len(ratio):
            detail = f"best ratio: {best(ratio)}; lowest {ratio.min():.2f}x"
            detail += equal_pools(results, label, limit["layout"])
            if one_rank(rows[rows["layout"] == limit["layout"]]):
                detail += f". One rank in vLLM; {COMMUNICATION}"
            return verdict(ratio.max() >= limit["at_least"], f"{ratio.max():.2f}x", [label], detail)
    table = results.table("throughput", "throughput.csv", THROUGHPUT)
    ratio = gains(sources.ran(table[table["source"] == "modelled"]), limit["layout"])
    if len(ratio):
        raise NotRun(f"no engine was run; the memory and roofline model gives {ratio.max():.2f}x ({best(ratio)})")
    raise NotRun(f"no pair of rows for {limit['layout']}")


def equal_pools(results: Results, label: Source, layout: str) -> str:
    """The same where both have an equal cache pool, the largest that was measured: our backend leaves the cache more memory."""
    tables = results.timed_tables("throughput", "throughput.csv", THROUGHPUT)
    rows = next(rows for source, rows in tables if source == label)
    equal = rows[(rows["pool_gb"] == rows["pool_gb"].max()) & (rows["routing"] != "weights")]
    ratio = gains(of_nodes(equal), layout)
    return f"; in equal pools of {equal['pool_gb'].max():g} GB {ratio.min():.2f} to {ratio.max():.2f}x" if len(ratio) else ""


def gains(rows: pd.DataFrame, layout: str) -> pd.Series:
    """Tokens/s of SnapMLA over BF16 in a layout, by model and context, where there are both."""
    speed = rows[rows["layout"] == layout].pivot_table(
        index=["model", "context"], columns="variant", values="tokens_per_s"
    )
    speed = speed.reindex(columns=["bf16", "snapmla"])
    return (speed["snapmla"] / speed["bf16"]).dropna()


def best(ratio: pd.Series) -> str:
    model, context = ratio.idxmax()
    return f"{model} at {context_name(int(context))}"


def timed_kernels(results: Results) -> tuple[Source, pd.DataFrame]:
    """The kernel benchmark's timed rows: measured by this run, else recorded; ``NotRun`` where there are none."""
    for label, table in results.timed_tables("kernel_bench", "kernel_bench.csv", BENCH):
        if (table["variant"] == "snapmla").any():
            return label, table
    planned = results.table("kernel_bench", "kernel_bench.csv", BENCH)
    own = planned[planned["variant"] == "snapmla"]
    raise NotRun(sources.reason(own) if len(own) else "no row of the variant snapmla")


def longest(table: pd.DataFrame) -> pd.DataFrame:
    """The rows of each head count at its longest context."""
    return table[table["context"] == table.groupby("heads")["context"].transform("max")]


def share_of(peak: float, table: pd.DataFrame, label: Source, limit: dict) -> Verdict:
    """Whether SnapMLA's best rate at each head count reaches its share of ``peak``."""
    rows = longest(table[(table["variant"] == "snapmla") & (table["heads"] >= limit["heads"])])
    if rows.empty:
        raise NotRun(f"no timed row of {limit['heads']} or more heads")
    share = rows.groupby("heads")["tflops"].max() / peak
    per_head = ", ".join(f"H = {heads:.0f}: {value:.0%}" for heads, value in share.items())
    detail = f"{per_head} of {peak:.0f} TFLOPS"
    return verdict(share.min() >= limit["at_least"], f"{share.min():.0%}", [label], detail)


def kernel_peak(results: Results, limit: dict) -> Verdict:
    label, table = timed_kernels(results)
    roofline = results.table("kernel_bench", "roofline.csv", ROOFLINE)
    peaks = roofline[roofline["format"] == "snapmla"].assign(gpu=roofline["gpu"].map(normal)).groupby("gpu")
    peaks = peaks["effective_peak_tflops"].max()
    gpu = normal(table["gpu"].iloc[0])
    if gpu not in peaks:
        raise NotRun(f"measured on {gpu}, which roofline.csv has no effective peak for")
    return share_of(peaks[gpu], table, label, limit)


def kernel_peak_measured(results: Results, limit: dict) -> Verdict:
    label, table = timed_kernels(results)
    if not {"flops", "ideal_measured_us"} <= set(table):
        raise NotRun("the timed rows have no ideal time by measured ceilings")
    own = table[table["variant"] == "snapmla"]
    # Where the tensor cores bound the ideal time, its rate is the measured effective peak: the largest of all rows.
    return share_of((own["flops"] / own["ideal_measured_us"]).max() * 1e-6, table, label, limit)


def kernel_over(peer: str) -> Callable[[Results, dict], Verdict]:
    """Whether SnapMLA's kernel is faster than ``peer`` at every head count (Fig 6's shapes, s_q 1)."""

    def judge_ratio(results: Results, limit: dict) -> Verdict:
        label, table = timed_kernels(results)
        grid = longest(table[table["model"].isna() & (table["s_q"] == 1)])
        times = grid.pivot_table(index=["heads", "context"], columns="variant", values="time_us")
        if peer not in times:
            raise NotRun(f"{label_of(peer)} was not timed")
        ratio = (times[peer] / times["snapmla"]).dropna()
        detail = ", ".join(
            f"H = {heads:.0f} at {context_name(int(context))}: {value:.2f}x"
            for (heads, context), value in ratio.items()
        )
        return verdict(
            ratio.min() >= limit["at_least"], f"{ratio.min():.2f}x to {ratio.max():.2f}x", [label], detail
        )

    return judge_ratio


def cache_bytes(results: Results, limit: dict) -> Verdict:
    table = results.table("throughput", "throughput.csv", ("variant", "source"))
    if "bytes_per_token" not in table:
        raise NotRun("throughput.csv has no column bytes_per_token")
    rows = table.dropna(subset="bytes_per_token").groupby("variant")["bytes_per_token"]
    values = {variant: set(column) for variant, column in rows}
    if not {"snapmla", "bf16"} <= set(values):
        raise NotRun("throughput.csv has no bytes_per_token for both snapmla and bf16")
    ours, bf16 = (
        ", ".join(f"{value:g}" for value in sorted(values[variant])) for variant in ("snapmla", "bf16")
    )
    holds = values["snapmla"] == {limit["snapmla"]} and values["bf16"] == {limit["bf16"]}
    ratio = max(values["bf16"]) / max(values["snapmla"])
    label = Source(
        "modelled", detail="bytes that the memory calculator counts with: this package's cache layout"
    )
    return verdict(holds, f"{ours} against {bf16}", [label], f"BF16 over SnapMLA: {ratio:.2f}")


def layer_errors(results: Results, *configs: str) -> tuple[pd.DataFrame, list[Source]]:
    """Teacher-forced rows at the longest context; ``NotRun`` if one of ``configs`` is not among them."""
    table = results.table(
        "fidelity", "layer_error.csv", ("config", "panel", "layer", "context", *METRICS, "source")
    )
    table = table[(table["panel"] == "teacher_forced") & (table["context"] == table["context"].max())]
    missing = [config for config in configs if config not in set(table["config"])]
    if missing:
        raise NotRun(f"fidelity/layer_error.csv has no teacher-forced rows of {missing[0]}")
    return table, results.label("fidelity", table)


def by_layer(table: pd.DataFrame, metric: str) -> pd.DataFrame:
    """Rows: layers in order; columns: configurations."""
    return table.pivot_table(index="layer", columns="config", values=metric).sort_index()


def a_explodes(results: Results, limit: dict) -> Verdict:
    table, labels = layer_errors(results, "snapmla", "config_a")
    curves = by_layer(table, "relative_l2")
    third = max(1, len(curves) // 3)
    deep, shallow = curves.iloc[-third:].mean(), curves.iloc[:third].mean()
    ratio = deep["config_a"] / deep["snapmla"]
    holds = ratio >= limit["at_least"] and deep["config_a"] > shallow["config_a"]
    detail = (
        f"relative L2, deepest {third} of {len(curves)} layers: A {deep['config_a']:.2e}, SnapMLA "
        f"{deep['snapmla']:.2e}; "
        f"first {third}: A {shallow['config_a']:.2e}"
    )
    return verdict(holds, f"{ratio:.2f}x", labels, detail)


def snapmla_lowest(results: Results, limit: dict) -> Verdict:
    table, labels = layer_errors(results, *FP8_CONFIGS)
    places, details = [], []
    for metric, name in METRICS.items():
        curves = by_layer(table, metric)[FP8_CONFIGS]
        lowest = curves.idxmin(axis=1)
        places += list(lowest == "snapmla")
        others = lowest[lowest != "snapmla"].value_counts()
        if len(others):
            details.append(
                f"{name}: "
                + ", ".join(f"{label_of(c).split(':')[0]} in {n} layers" for c, n in others.items())
            )
    detail = "lowest elsewhere: " + "; ".join(details) if details else "in every layer and metric"
    return verdict(all(places), f"{sum(places)} of {len(places)} (layer, metric) pairs", labels, detail)


def mean_ratio(results: Results, *configs: str) -> tuple[pd.Series, list[Source]]:
    """Mean relative L2 over layers of ``configs``, in units of SnapMLA's."""
    table, labels = layer_errors(results, "snapmla", *configs)
    means = by_layer(table, "relative_l2").mean()
    return means / means["snapmla"], labels


def d_slightly_worse(results: Results, limit: dict) -> Verdict:
    ratio, labels = mean_ratio(results, "config_d")
    value = ratio["config_d"]
    return verdict(
        limit["above"] < value <= limit["at_most"],
        f"{value:.3f}x",
        labels,
        "D's mean relative L2 over SnapMLA's",
    )


def bc_worse(results: Results, limit: dict) -> Verdict:
    ratio, labels = mean_ratio(results, "config_b", "config_c")
    b, c = ratio["config_b"], ratio["config_c"]
    holds = b > limit["above"] and c > limit["above"]
    return verdict(holds, f"B {b:.3f}x, C {c:.3f}x", labels, "mean relative L2 over SnapMLA's")


def rope_mse(results: Results, limit: dict) -> Verdict:
    table = results.table("distribution", "mse.csv", ("layer", "part", "mse", "source"))
    ranges = results.table("distribution", "ranges.csv", ("layer", "part", "absmax", "source"))
    mse = table.pivot_table(index="layer", columns="part", values="mse")
    ratio = mse["rope"] / mse["content"]
    largest = ranges.groupby("part")["absmax"].max()
    paper = sources.published("method.toml")["range"]
    detail = (
        f"layers from {ratio.min():.2g}x to {ratio.max():.2g}x; largest magnitude here: content "
        f"{largest['content']:.3g}, RoPE {largest['rope']:.3g} "
        f"(paper, {paper['model']}: about {paper['content']:g} and {paper['rope']:g})"
    )
    labels = results.label("distribution", table)
    return verdict(ratio.median() >= limit["at_least"], f"{ratio.median():.2g}x", labels, detail)


def quality(results: Results, limit: dict) -> Verdict:
    table = results.table("quality", "quality.csv", ("task", "context", "variant", "score", "ci95", "source"))
    # BF16 agrees with itself: that task has no interval to lie in.
    table = table[table["task"] != "next_byte_agreement"]
    scores = table.pivot_table(index=["task", "context"], columns="variant", values=["score", "ci95"])
    needed = [("score", "bf16"), ("score", "snapmla"), ("ci95", "bf16"), ("ci95", "snapmla")]
    if not set(needed) <= set(scores.columns) or (scores := scores[needed].dropna()).empty:
        raise NotRun("quality.csv has no task with scores and intervals of both bf16 and snapmla")
    inside, details = [], []
    for (task, context), (bf16, ours, half, paired) in scores.iterrows():
        inside.append(abs(ours - bf16) <= min(half, limit["relative"] * abs(bf16)))
        difference = f"difference {ours - bf16:+.4f} ± {paired:.4f} (paired)"
        details.append(f"{task} at {context:.0f}: BF16 {bf16:.4f} ± {half:.4f}, {difference}")
    detail = f"{results.model('quality')}, held-out bytes; " + "; ".join(details)
    ours = f"{sum(inside)} of {len(inside)} (task, context) pairs"
    return verdict(all(inside), ours, results.label("quality", table), detail)


def accumulation(results: Results, limit: dict) -> Verdict:
    columns = ("value_mean", "value_std", "keys", "rule", "relative_l2", "source")
    table = results.table("accumulation", "accumulation.csv", columns)
    index = ["value_mean", "value_std", "rule"]
    errors = table.pivot_table(index=index, columns="keys", values="relative_l2").dropna(axis=1)
    if len(errors.columns) < 2:
        raise NotRun("accumulation.csv has fewer than two contexts that every rule was run at")
    short, long = errors.columns[0], errors.columns[-1]
    growth = (errors[long] / errors[short]).unstack("rule")
    if "promoted" not in growth:
        raise NotRun("accumulation.csv has no rows of the rule 'promoted'")
    ours = growth["promoted"].max()
    others = ", ".join(f"{rule} {growth[rule].max():.3g}x" for rule in growth if rule != "promoted")
    span = f"{context_name(int(short))} to {context_name(int(long))} keys"
    detail = f"worst growth of the error from {span}; other rules: {others}"
    return verdict(ours <= limit["at_most"], f"{ours:.2f}x", results.label("accumulation", table), detail)


def drift(results: Results, limit: dict) -> Verdict:
    columns = ("variant", "step_from", "step_to", "kl", "top1_agreement", "source")
    table = results.table("drift", "drift.csv", columns)
    steps, quarters = table["step_to"].max(), {}
    for variant, rows in table.groupby("variant"):
        first, last = rows[rows["step_to"] <= steps / 4], rows[rows["step_from"] >= 3 * steps / 4]
        if len(first) and len(last):
            quarters[variant] = first["kl"].mean(), last["kl"].mean()
    if "snapmla" not in quarters:
        raise NotRun("drift.csv has no rows of snapmla in the first and the last quarter of its steps")
    means = ", ".join(
        f"{label_of(v).split(':')[0]} {a:.1e} and {b:.1e} nats ({b / a:.2f}x)" for v, (a, b) in quarters.items()
    )
    agreement = table[table["variant"] == "snapmla"]["top1_agreement"].mean()
    detail = f"{results.model('drift')}, {steps} steps, first and last quarter: {means}; top-1 agreement {agreement:.1%}"
    first, last = quarters["snapmla"]
    ours = f"{last / first:.2f}x"
    return verdict(last <= limit["at_most"] * first, ours, results.label("drift", table), detail)


def kernel_accumulation(results: Results, limit: dict) -> Verdict:
    found = kernel_errors(results)
    if found is None or "snapmla" not in set(found[1]["variant"]):
        planned = results.table("accumulation", "kernels.csv", ("variant", "status", "reason"))
        raise NotRun(sources.reason(planned[planned["variant"] == "snapmla"]))
    label, table = found
    worst = table.groupby("variant")["relative_l2"].max()
    contexts = sorted(table["keys"].unique())
    others = ", ".join(f"{label_of(v)} {error:.2%}" for v, error in worst.items() if v != "snapmla")
    span = f"{context_name(int(contexts[0]))} to {context_name(int(contexts[-1]))} keys"
    detail = f"largest relative L2 over {span}, all value distributions; {others or 'no peer was measured'}"
    return verdict(worst["snapmla"] <= limit["at_most"], f"{worst['snapmla']:.2%}", [label], detail)


JUDGES: dict[str, tuple[Callable[[Results, dict], Verdict], tuple[str, ...]]] = {  # and the files each needs
    "throughput": (throughput, ("throughput/throughput.csv",)),
    "kernel_peak": (kernel_peak, ("kernel_bench/kernel_bench.csv", "kernel_bench/roofline.csv")),
    "kernel_peak_measured": (kernel_peak_measured, ("kernel_bench/kernel_bench.csv",)),
    "kernel_over_bf16": (kernel_over("flashmla_bf16"), ("kernel_bench/kernel_bench.csv",)),
    "kernel_over_fp8": (kernel_over("flashmla_fp8"), ("kernel_bench/kernel_bench.csv",)),
    "cache_bytes": (cache_bytes, ("throughput/throughput.csv",)),
    "a_explodes": (a_explodes, ("fidelity/layer_error.csv",)),
    "snapmla_lowest": (snapmla_lowest, ("fidelity/layer_error.csv",)),
    "d_slightly_worse": (d_slightly_worse, ("fidelity/layer_error.csv",)),
    "bc_worse": (bc_worse, ("fidelity/layer_error.csv",)),
    "rope_mse": (rope_mse, ("distribution/mse.csv", "distribution/ranges.csv")),
    "quality": (quality, ("quality/quality.csv",)),
    "accumulation": (accumulation, ("accumulation/accumulation.csv",)),
    "drift": (drift, ("drift/drift.csv",)),
    "kernel_accumulation": (kernel_accumulation, ("accumulation/kernels.csv",)),
}


def judge(results: Results) -> pd.DataFrame:
    """The claims table, one row per claim of published/claims.toml."""
    rows = []
    for key, claim in sources.published("claims.toml").items():
        function, files = JUDGES[key]
        missing = [name for name in files if not (results.root / name).is_file()]
        try:
            if missing:
                raise NotRun(f"{missing[0]} is missing")
            answer = function(results, claim)
        except NotRun as why:
            answer = Verdict(NOT_RUN, "", "", str(why))
        rows.append(
            {
                "claim": claim["claim"],
                "paper_value": claim["paper_value"],
                "ours": answer.ours,
                "tolerance": claim["tolerance"].format(**claim),
                "status": answer.status,
                "source": f"{claim['source']}; ours: {answer.source or 'none'}",
                "detail": answer.detail,
            }
        )
    return pd.DataFrame(rows, columns=COLUMNS)


def build(results: Results) -> pd.DataFrame:
    table = judge(results)
    counts = ", ".join(f"{(table['status'] == status).sum()} {status}" for status in (PASS, FAIL, NOT_RUN))
    shown = table.map(lambda cell: str(cell).replace("|", "\\|") or "–")
    write_text(results.root / "claims.csv", table.to_csv(index=False, lineterminator="\n"))
    experiments = sorted({file.split("/")[0] for _, files in JUDGES.values() for file in files})
    write_text(results.root / "claims.html", pages.claims(table, counts, results.machines(experiments)))
    write_text(results.root / "claims.md", f"# Claims: {counts}\n\n{markdown(shown)}\n")
    return table


def show(table: pd.DataFrame) -> None:
    """Print the claims as a terminal table; claims.md has the sources, too."""
    console = Console(width=None if sys.stdout.isatty() else 160)
    colors = {PASS: "green", FAIL: "red", NOT_RUN: "yellow"}
    view = Table(title="Claims", box=HORIZONTALS, show_lines=True, expand=True)
    columns = {"Claim": 4, "Paper": 2, "Ours": 2, "Tolerance": 4, "Status": None, "Detail": 6}
    for name, ratio in columns.items():
        view.add_column(name, ratio=ratio, no_wrap=name == "Status")
    for row in table.itertuples():
        cells = [row.claim, row.paper_value, row.ours or "–", row.tolerance, row.status, row.detail]
        view.add_row(*(Text(cell, style=colors.get(cell, "")) for cell in cells))
    console.print(view)


def main(argv: Sequence[str] | None = None) -> int:
    parser = sources.arguments(__doc__)
    parser.add_argument("--print", action="store_true", dest="print_table", help="print the table, too")
    options = parser.parse_args(argv)
    try:
        table = build(Results(options.results, options.recorded))
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if options.print_table:
        show(table)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

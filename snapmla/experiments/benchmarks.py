"""The paper's own benchmarks (Table 1) on a model that somebody serves: lm-evaluation-harness against an endpoint.

    vllm serve deepseek-ai/DeepSeek-V3.1
    python -m snapmla.experiments.benchmarks endpoint.variant=bf16 dry_run=true

The harness (EleutherAI's lm_eval) runs as a program of its own, once for each benchmark and seed: Mean@k is k seeds.
Its result files stay in results/harness/, below a digest of the settings. A run of days can thus go on after an
interruption, and the table also holds what another variant's run has measured with the same settings.

Writes results/benchmarks/benchmarks.csv. The numbers are the harness's; its prompts need not be the paper's, which are
not published.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import shlex
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import MISSING

from snapmla import results
from snapmla.experiments._app import BaseConfig, Run, application

VARIANTS = ("bf16", "snapmla")
COLUMNS = (
    "benchmark", "task", "model", "variant", "seed", "metric", "score", "stderr", "n", "harness", "source",
    "status", "reason",
)  # fmt: skip
ANSWER_SECONDS = 10
"""How long the endpoint may take to say which models it serves."""


@dataclass
class EndpointConfig:
    variant: str = MISSING
    base_url: str = MISSING
    model: str = MISSING
    chat: bool = MISSING
    num_concurrent: int = MISSING
    timeout: int = MISSING
    think_end_token: str | None = None


@dataclass
class HarnessConfig:
    python: str | None = None
    include_path: str | None = None


@dataclass
class GenerationConfig:
    temperature: float = MISSING
    top_p: float = MISSING
    top_k: int | None = None
    max_gen_toks: int = MISSING
    until: list[str] | None = None
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass
class Benchmark:
    """A row of Table 1 and the harness's task for it, or what it needs where there is none."""

    name: str = MISSING
    task: str | None = None
    metric: str | None = None
    repeats: int = 1
    num_fewshot: int | None = None
    instruction: str | None = None
    needs: str | None = None


@dataclass
class BenchmarksConfig(BaseConfig):
    """Keys of conf/benchmarks.yaml, where each has its value and the reason for it."""

    dry_run: bool = MISSING
    only: list[str] | None = None
    repeats: int | None = None
    limit: int | None = None
    endpoint: EndpointConfig = field(default_factory=EndpointConfig)
    harness: HarnessConfig = field(default_factory=HarnessConfig)
    generation: GenerationConfig = field(default_factory=GenerationConfig)
    benchmarks: list[Benchmark] = MISSING

    def seeds(self, benchmark: Benchmark) -> range:
        return range(self.seed, self.seed + (self.repeats or benchmark.repeats))


@dataclass(frozen=True)
class Evaluation:
    """One run of the harness: a benchmark with one seed."""

    benchmark: Benchmark
    seed: int
    folder: Path
    """Where evaluations of these settings and this seed lie, by variant and model."""
    place: Path
    """The one of this run's variant and model."""
    command: list[str]


def check(cfg: BenchmarksConfig) -> None:
    """Raises ValueError for a configuration that cannot be run."""
    if cfg.endpoint.variant not in VARIANTS:
        raise ValueError(
            f"endpoint.variant must be one of {', '.join(VARIANTS)}, got {cfg.endpoint.variant!r}."
        )
    names = [benchmark.name for benchmark in cfg.benchmarks]
    if unknown := set(cfg.only or []) - set(names):
        raise ValueError(f"only must name some of {', '.join(names)}, got {min(unknown)!r}.")
    for benchmark in cfg.benchmarks:
        if bool(benchmark.task) != bool(benchmark.metric) or bool(benchmark.task) == bool(benchmark.needs):
            raise ValueError(
                f"The benchmark {benchmark.name} must have a task and a metric or say what it needs, got task "
                f"{benchmark.task!r}, metric {benchmark.metric!r}, needs {benchmark.needs!r}."
            )


def settings(cfg: BenchmarksConfig, benchmark: Benchmark) -> dict[str, Any]:
    """What decides a score beside the served model and the seed: a digest of it names the folder of the results."""
    generation = cfg.generation
    sampling = {"do_sample": True, "temperature": generation.temperature, "top_p": generation.top_p}
    sampling |= {"max_gen_toks": generation.max_gen_toks}
    sampling |= {"top_k": generation.top_k} if generation.top_k is not None else {}
    sampling |= {"until": generation.until} if generation.until is not None else {}
    if cfg.endpoint.chat and generation.chat_template_kwargs:
        sampling["chat_template_kwargs"] = generation.chat_template_kwargs
    return {
        "task": benchmark.task,
        "gen_kwargs": sampling,
        "num_fewshot": benchmark.num_fewshot,
        "instruction": benchmark.instruction,
        "limit": cfg.limit,
        "chat": cfg.endpoint.chat,
        "think_end_token": cfg.endpoint.think_end_token if cfg.endpoint.chat else None,
    }


def command(cfg: BenchmarksConfig, benchmark: Benchmark, seed: int, place: Path) -> list[str]:
    """The harness's command line for one benchmark and seed; it writes its result file below ``place``."""
    endpoint, chosen = cfg.endpoint, settings(cfg, benchmark)
    model_args = {
        "model": endpoint.model,
        "base_url": f"{endpoint.base_url.rstrip('/')}/{'chat/completions' if endpoint.chat else 'completions'}",
        "num_concurrent": endpoint.num_concurrent,
        "timeout": endpoint.timeout,
        "seed": seed,  # sent with each request; --seed alone would have every repeat sample the same answers
        "tokenizer_backend": "none",  # the endpoint tokenizes
        "tokenized_requests": False,
    }
    if chosen["think_end_token"] is not None:
        model_args["think_end_token"] = chosen["think_end_token"]
    optional = {
        "--num_fewshot": chosen["num_fewshot"],
        "--system_instruction": chosen["instruction"],
        "--limit": chosen["limit"],
        "--include_path": cfg.harness.include_path,
    }
    return [
        cfg.harness.python or sys.executable, "-m", "lm_eval", "run",
        "--model", "local-chat-completions" if endpoint.chat else "local-completions",
        "--model_args", json.dumps(model_args),
        "--tasks", str(benchmark.task),
        "--gen_kwargs", json.dumps(chosen["gen_kwargs"]),
        "--seed", str(seed),
        "--output_path", str(place),
        *(["--apply_chat_template"] if endpoint.chat else []),
        *(text for key, value in optional.items() if value is not None for text in (key, str(value))),
    ]  # fmt: skip


def evaluations(cfg: BenchmarksConfig, benchmark: Benchmark, results_dir: Path) -> Iterator[Evaluation]:
    """The runs of the harness that a benchmark consists of; none where the harness has no task for it."""
    if benchmark.task is None:
        return
    digest = hashlib.sha256(json.dumps(settings(cfg, benchmark), sort_keys=True).encode()).hexdigest()[:12]
    for seed in cfg.seeds(benchmark):
        folder = results_dir / "harness" / f"{benchmark.task}-{digest}" / f"seed{seed}"
        place = folder / cfg.endpoint.variant / cfg.endpoint.model.replace("/", "--")
        yield Evaluation(benchmark, seed, folder, place, command(cfg, benchmark, seed, place))


def result_file(place: Path) -> Path | None:
    """The newest result file of the harness below ``place``."""
    return max(place.rglob("results_*.json"), key=lambda path: path.name, default=None)


def measured(evaluation: Evaluation) -> list[dict[str, Any]]:
    """The rows of every variant and model that has been evaluated with these settings and this seed."""
    places = sorted(path for path in evaluation.folder.glob("*/*") if path.is_dir())
    files = {place: file for place in places if (file := result_file(place))}
    return [row(evaluation, place.parent.name, results.read_json(file)) for place, file in files.items()]


def row(evaluation: Evaluation, variant: str, document: dict[str, Any]) -> dict[str, Any]:
    """A row of benchmarks.csv from a result file of the harness: score and its standard error in percent, n questions.

    Its format is lm_eval/result_schema.py's. Raises ValueError where the file lacks the benchmark's metric.
    """
    benchmark = evaluation.benchmark
    scores = document.get("results", {}).get(benchmark.task, {})
    if benchmark.metric not in scores:
        found = ", ".join(key for key in scores if "," in key and "_stderr," not in key) or "nothing"
        raise ValueError(
            f"The harness's results of the task {benchmark.task} must hold the metric {benchmark.metric!r}, got {found}."
        )
    stderr = scores.get(str(benchmark.metric).replace(",", "_stderr,", 1))
    return dict.fromkeys(COLUMNS) | {
        "benchmark": benchmark.name,
        "task": benchmark.task,
        "model": document["config"]["model_args"]["model"],
        "variant": variant,
        "seed": evaluation.seed,
        "metric": benchmark.metric,
        "score": 100 * scores[benchmark.metric],
        "stderr": 100 * stderr if isinstance(stderr, int | float) else None,  # "N/A" for a single question
        "n": sum(count["effective"] for count in document["n-samples"].values()),  # a group has several
        "harness": document.get("lm_eval_version"),
        "source": "measured",
        "status": "ok",
    }


def not_run(cfg: BenchmarksConfig, benchmark: Benchmark, seed: int | None, reason: str) -> dict[str, Any]:
    return dict.fromkeys(COLUMNS) | {
        "benchmark": benchmark.name,
        "task": benchmark.task,
        "model": cfg.endpoint.model,
        "variant": cfg.endpoint.variant,
        "seed": seed,
        "metric": benchmark.metric,
        "source": "measured",
        "status": "not run",
        "reason": reason,
    }


def check_harness(cfg: BenchmarksConfig) -> bool:
    """Whether the harness is installed. Raises ValueError where it lacks a configured task or does not start."""
    python = cfg.harness.python or sys.executable
    if shutil.which(python) is None:
        raise ValueError(f"harness.python must be a Python that can be run, got {python!r}.")
    tasks = dict.fromkeys(benchmark.task for benchmark in cfg.benchmarks if benchmark.task)
    include = ["--include_path", cfg.harness.include_path] if cfg.harness.include_path else []
    done = subprocess.run(
        [python, "-m", "lm_eval", "validate", "--tasks", ",".join(tasks), *include],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == 0:
        return True
    if "No module named lm_eval" in done.stderr:
        return False
    if missing := [line for line in done.stdout.splitlines() if line.startswith("Tasks not found: ")]:
        raise ValueError(
            f"Every task must be one of the installed harness, got {missing[0].partition(': ')[2]}: "
            "conf/benchmarks.yaml names those of lm_eval 0.4.13."
        )
    raise ValueError(f"The harness must start, got: {last_line(done.stderr)}")


def check_endpoint(endpoint: EndpointConfig) -> None:
    """Raises ValueError unless the endpoint answers and serves the model."""
    url = f"{endpoint.base_url.rstrip('/')}/models"
    key = os.environ.get("OPENAI_API_KEY")
    try:
        request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"} if key else {})
        with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as answer:
            served = [str(model["id"]) for model in json.load(answer)["data"]]
    except (OSError, ValueError, TypeError, KeyError, http.client.HTTPException) as error:
        raise ValueError(
            f"The endpoint must answer GET {url} with its models, got {type(error).__name__}: {error}."
        ) from error
    if endpoint.model not in served:
        raise ValueError(
            f"endpoint.model must be one that {endpoint.base_url} serves ({', '.join(served) or 'none'}), got "
            f"{endpoint.model!r}."
        )


def evaluate(evaluation: Evaluation) -> str | None:
    """Runs the harness; why it failed, or None. What it prints is kept beside its result file."""
    evaluation.place.mkdir(parents=True, exist_ok=True)
    log = evaluation.place / "harness.log"
    with log.open("w", encoding="utf-8") as output:
        done = subprocess.run(evaluation.command, stdout=output, stderr=subprocess.STDOUT, check=False)
    if done.returncode == 0 and result_file(evaluation.place):
        return None
    said = last_line(log.read_text(encoding="utf-8", errors="replace"))
    return f"the harness ended with exit code {done.returncode}: {said}"


def last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:200] if lines else "nothing printed"


@application("benchmarks", BenchmarksConfig)
def main(cfg: BenchmarksConfig, run: Run) -> None:
    check(cfg)
    planned = {b.name: list(evaluations(cfg, b, run.results_dir)) for b in cfg.benchmarks}
    chosen = [e for name, part in planned.items() if cfg.only is None or name in cfg.only for e in part]
    waiting = [e for e in chosen if result_file(e.place) is None]
    run.progress(f"{len(waiting)} of {len(chosen)} evaluations to run, the others lie in harness/")
    reasons = {}
    if cfg.dry_run:
        if not check_harness(cfg):
            run.progress("the harness is not installed: the names of the tasks were not checked")
        for evaluation in waiting:
            print(shlex.join(evaluation.command), flush=True)
        reasons = {e.place: "dry run" for e in waiting}
    elif waiting:
        if not check_harness(cfg):
            raise ValueError(
                "The benchmarks need lm-evaluation-harness, got a Python without lm_eval: install the extra "
                "`benchmarks` (pip install -e '.[benchmarks]') or name another Python in harness.python."
            )
        check_endpoint(cfg.endpoint)
        for number, evaluation in enumerate(waiting, 1):
            run.progress(f"{number} of {len(waiting)}: {evaluation.benchmark.name}, seed {evaluation.seed}")
            if reason := evaluate(evaluation):
                reasons[evaluation.place] = reason
                run.progress(f"not run: {reason} (all of it: {evaluation.place / 'harness.log'})")
    rows = []
    for benchmark in cfg.benchmarks:
        if benchmark.needs:
            rows.append(not_run(cfg, benchmark, None, f"needs {benchmark.needs}"))
        for evaluation in planned[benchmark.name]:
            rows += measured(evaluation)
            if result_file(evaluation.place) is None:
                reason = reasons.get(evaluation.place, "left out by the key only")
                rows.append(not_run(cfg, benchmark, evaluation.seed, reason))
    run.write_table("benchmarks.csv", rows)
    for name in planned:
        scores = [
            r["score"]
            for r in rows
            if r["benchmark"] == name and r["variant"] == cfg.endpoint.variant and r["status"] == "ok"
        ]
        if scores:
            run.log({f"{name}/{cfg.endpoint.variant}": sum(scores) / len(scores)})


if __name__ == "__main__":
    main()

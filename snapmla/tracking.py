"""Weights & Biases: every experiment is a run with its configuration, metrics, tables and files.

Science first: tracking never prompts, never waits for long and never makes a run fail. It is offline unless a
key is there (``WANDB_API_KEY``) or a mode was chosen; everything it keeps lies under ``<results>/wandb``; a
call that fails costs one line of warning. The runs of one workflow share a group (``SNAPMLA_RUN_GROUP``).

    python -m snapmla.tracking sync           uploads the offline runs (after `wandb login`)
    python -m snapmla.tracking log-figures    logs the drawn figures, the tables and the claims as one run
"""

from __future__ import annotations

import argparse
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from snapmla import results

MODES = ("auto", "online", "offline", "disabled")
CONNECT_TIMEOUT = 3
"""Seconds to wait for a first answer of the server."""
INIT_TIMEOUT = 20
"""Seconds that a start may take; a server that does not answer by then makes the run an offline one."""
FINISH_TIMEOUT = 120
"""Seconds that the last upload may take; what is left lies on the disk, for ``sync``."""
SYNC_TIMEOUT = 1800


class Tracker:
    """A W&B run whose calls cannot fail, or nothing (``run`` None: tracking is off or could not start)."""

    def __init__(self, run: Any = None):
        self._run = run
        self._warned: set[str] = set()

    def log(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Logs scalars, at ``step`` if given."""
        self._guard("log", lambda run: run.log(dict(metrics), step=step))

    def table(self, path: Path) -> None:
        """Logs a CSV file as a table named after it."""

        def call(run: Any) -> None:
            import wandb

            # Cells as text where a column mixes types, and empty where the file is: W&B wants one type per
            # column.
            frame = results.read_csv(path)
            run.log({path.stem: wandb.Table(dataframe=frame, allow_mixed_types=True)})

        self._guard("table", call)

    def image(self, name: str, path: Path) -> None:
        """Logs a picture."""

        def call(run: Any) -> None:
            import wandb

            run.log({name: wandb.Image(str(path))})

        self._guard("image", call)

    def files(self, name: str, paths: Sequence[Path], root: Path | None = None) -> None:
        """Keeps copies of files as an artifact, named by their paths below ``root`` (default: by their names
        alone)."""
        self._guard("files", lambda run: run.log_artifact(_artifact(name, paths, root)))

    def uses(self, name: str, paths: Sequence[Path]) -> None:
        """Notes that this run has read the files of ``files(name, paths)``: W&B knows an artifact by its contents."""

        def call(run: Any) -> None:
            # What use_artifact does with an artifact that W&B has not got yet; itself it refuses offline runs, which `sync`
            # uploads as they are.
            run._log_artifact(_artifact(name, paths), is_user_created=True, use_after_commit=True)

        self._guard("uses", call)

    def finish(self, succeeded: bool = True) -> None:
        """Ends the run; waits at most ``FINISH_TIMEOUT`` seconds for an upload."""
        self._guard("finish", lambda run: run.finish(exit_code=0 if succeeded else 1))

    def _guard(self, what: str, call: Callable[[Any], None]) -> None:
        if self._run is None:
            return
        try:
            call(self._run)
        except Exception as error:  # noqa: BLE001 - whatever W&B raises must not end an experiment
            if what not in self._warned:
                warn(f"{what} failed", error)
            self._warned.add(what)


def result_files(folder: Path) -> list[Path]:
    """What is kept of an experiment's folder: its tables, and the run.json that says where they come from."""
    return sorted((*folder.glob("*.csv"), *folder.glob("*.json")))


def _artifact(name: str, paths: Sequence[Path], root: Path | None = None) -> Any:
    import wandb

    artifact = wandb.Artifact(re.sub(r"[^\w.-]", "_", name), type="result")
    for path in paths:
        artifact.add_file(str(path), name=path.relative_to(root).as_posix() if root else path.name)
    return artifact


def start(
    mode: str,
    project: str,
    entity: str | None,
    *,
    name: str,
    job_type: str,
    config: dict[str, Any],
    results_dir: Path,
) -> Tracker:
    """Starts a run; ValueError if ``mode`` is none of ``MODES``, a warning for whatever W&B cannot do."""
    if mode not in MODES:
        raise ValueError(f"tracking.mode must be one of {', '.join(MODES)}, got {mode!r}.")
    if mode == "auto":
        mode = "online" if os.environ.get("WANDB_API_KEY") else "offline"
    if mode == "disabled":
        return Tracker()
    _environment(results_dir)
    for attempt in dict.fromkeys((mode, "offline")):
        try:
            if attempt == "online" and (reason := _unreachable()):
                raise ConnectionError(f"{reason}, `python -m snapmla.tracking sync` uploads the run later")
            return Tracker(_init(attempt, project, entity, name, job_type, config, results_dir))
        except Exception as error:  # noqa: BLE001
            warn(f"the {attempt} start failed", error)
    return Tracker()


def warn(what: str, error: BaseException | None = None) -> None:
    """One line on stderr, with the beginning of the error."""
    detail = "" if error is None else ": " + (" ".join(str(error).split())[:150] or type(error).__name__)
    print(f"W&B: {what}{detail} (the run goes on).", file=sys.stderr, flush=True)


def sync(results_dir: Path) -> int:
    """Uploads the offline runs below ``results_dir``; returns an exit code."""
    runs = sorted((results_dir / "wandb").glob("offline-run-*"))
    if not runs:
        print(f"There are no offline runs in {results_dir / 'wandb'}.")
        return 0
    if reason := _unreachable():
        print(f"The runs in {results_dir / 'wandb'} cannot be uploaded: {reason}.", file=sys.stderr)
        return 1
    # `wandb sync` skips what it has uploaded before. It may not prompt: without a key it fails with its own
    # message.
    command = [sys.executable, "-m", "wandb", "sync", "--yes", *map(str, runs)]
    try:
        return subprocess.run(command, check=False, stdin=subprocess.DEVNULL, timeout=SYNC_TIMEOUT).returncode
    except subprocess.TimeoutExpired:
        print(
            f"The upload took longer than {SYNC_TIMEOUT} s and was stopped: run it again for the rest.",
            file=sys.stderr,
        )
        return 1


def log_figures(results_dir: Path, mode: str, project: str, entity: str | None) -> None:
    """Logs every figure (PNG), table and claim below ``results_dir``, and all their files as one artifact, made of the
    experiments' ones."""
    figures = sorted((results_dir / "figures").glob("*.png"))
    tables = [*sorted((results_dir / "tables").glob("*.csv")), *results_dir.glob("claims.csv")]
    if not figures and not tables:
        raise FileNotFoundError(
            f"There are no figures or tables in {results_dir}: make them with `snakemake figures`."
        )
    everything = [
        *(path for kind in ("figures", "tables") for path in sorted((results_dir / kind).glob("*.*"))),
        *sorted(results_dir.glob("claims.*")),
    ]
    tracker = start(
        mode, project, entity, name="figures", job_type="figures", config={}, results_dir=results_dir
    )
    for path in figures:
        tracker.image(path.stem, path)
    for path in tables:
        tracker.table(path)
    for run in sorted(results_dir.glob("*/run.json")):
        tracker.uses(run.parent.name, result_files(run.parent))
    tracker.files("figures", everything, results_dir)
    tracker.finish()


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line, see the module's first lines; returns an exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m snapmla.tracking", description="Weights & Biases runs of this project."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, summary in (
        ("sync", "upload the offline runs"),
        ("log-figures", "log figures, tables and claims as a run"),
    ):
        command = commands.add_parser(name, help=summary)
        command.add_argument(
            "--results", help="the results folder (default: $SNAPMLA_RESULTS, else <repository>/results)"
        )
        if name == "log-figures":
            command.add_argument("--mode", choices=MODES, default=os.environ.get("WANDB_MODE", "auto"))
            command.add_argument("--project", default="snapmla")
            command.add_argument("--entity")
    options = parser.parse_args(arguments)
    results_dir = results.results_root(options.results)
    if options.command == "sync":
        return sync(results_dir)
    try:
        log_figures(results_dir, options.mode, options.project, options.entity)
    except (ValueError, FileNotFoundError) as error:
        print(f"log-figures: {error}", file=sys.stderr)
        return 1
    return 0


def _unreachable() -> str | None:
    """Why the W&B server cannot be reached, found out within seconds; W&B itself would go on trying for
    minutes."""
    import wandb

    if any(
        os.environ.get(name)
        for name in ("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "ALL_PROXY")
    ):
        return None  # only the proxy can know
    url = urlsplit(wandb.setup().settings.base_url)
    try:
        socket.create_connection(
            (url.hostname, url.port or {"http": 80}.get(url.scheme, 443)), CONNECT_TIMEOUT
        ).close()
    except OSError as error:
        return f"no connection to {url.hostname} ({error})"
    return None


def _environment(results_dir: Path) -> None:
    """Keeps W&B's own files out of HOME, which need not be writable, unless the user has placed them."""
    for variable, folder in (
        ("WANDB_CACHE_DIR", "cache"),
        ("WANDB_CONFIG_DIR", "config"),
        ("WANDB_DATA_DIR", "data"),
    ):
        os.environ.setdefault(variable, str(results_dir / "wandb" / folder))


def _init(
    mode: str, project: str, entity: str | None, name: str, job_type: str, config: dict, results_dir: Path
) -> Any:
    import wandb  # late: it takes half a second and reads the variables that _environment sets

    (results_dir / "wandb").mkdir(parents=True, exist_ok=True)

    return wandb.init(
        mode=mode,
        project=project,
        entity=entity,
        name=name,
        job_type=job_type,
        group=os.environ.get("SNAPMLA_RUN_GROUP", "single runs"),
        config=config,
        dir=str(results_dir),
        settings=wandb.Settings(
            silent=True,
            console="off",
            init_timeout=INIT_TIMEOUT,
            finish_timeout=FINISH_TIMEOUT,
            # run.json says what matters about the machine; W&B would add the host, the user and absolute
            # paths, and its monitor would poll the GPU during a measurement.
            host="-",
            x_disable_meta=True,
            x_disable_machine_info=True,
            x_disable_stats=True,
            x_save_requirements=False,
            disable_git=True,
            save_code=False,
        ),
    )


if __name__ == "__main__":
    sys.exit(main())

"""What every experiment has in common: ``@application`` makes a Hydra application of its ``main(cfg, run)``.

    @dataclass
    class FidelityConfig(BaseConfig):
        context: int = MISSING          # the value stands in conf/fidelity.yaml

    @application("fidelity", FidelityConfig)
    def main(cfg: FidelityConfig, run: Run) -> None:
        latents = run.input("latents", "latents.safetensors")
        run.write_table("layer_error.csv", rows)

    if __name__ == "__main__":
        main()

``python -m snapmla.experiments.fidelity context=4096`` then writes ``results/fidelity/``, and ``-m
context=1024,4096`` writes ``results/sweeps/fidelity/context=1024/`` and so on. The dataclass is the schema: a
key or type that it does not know is an error, in the YAML file as on the command line.

An experiment writes into a temporary folder that becomes its result folder when it has succeeded: a failed
run leaves the previous results as they were, and a result folder never mixes two runs.
"""

from __future__ import annotations

import functools
import importlib
import os
import random
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from snapmla import provenance, results, tracking

if TYPE_CHECKING:
    import pandas

USER_ERRORS = (HydraException, OmegaConfBaseException, ValueError, TypeError, FileNotFoundError)
"""Shown as one sentence; anything else is a fault of the program and keeps its traceback."""

OmegaConf.register_new_resolver("results_root", lambda path: str(results.results_root(path)), replace=True)


@dataclass
class TrackingConfig:
    """Weights & Biases, see ``snapmla.tracking``."""

    mode: str = MISSING
    project: str = MISSING
    entity: str | None = None


@dataclass
class BaseConfig:
    """The keys of every experiment; their values stand in conf/base.yaml."""

    seed: int = MISSING
    results_dir: str = MISSING
    tracking: TrackingConfig = field(default_factory=TrackingConfig)


class Run:
    """One run of an experiment: its folder, its inputs, its tables, its progress."""

    def __init__(self, experiment: str, out: Path, results_dir: Path, tracker: tracking.Tracker):
        self.experiment = experiment
        self.out = out
        """The folder to write into. It becomes ``results/<experiment>/`` (or a sweep's folder) on success."""
        self.results_dir = results_dir
        self._tracker = tracker
        self._started = time.monotonic()
        self._used: set[str] = set()

    @property
    def seconds(self) -> float:
        """Time since the run began."""
        return time.monotonic() - self._started

    def input(self, experiment: str, filename: str) -> Path:
        """The result file ``filename`` of another experiment; FileNotFoundError names the command that makes
        it."""
        path = self.results_dir / experiment / filename
        if not path.exists():
            raise FileNotFoundError(
                f"The input {experiment}/{filename} is missing in {self.results_dir}: "
                f"make it with `python -m snapmla.experiments.{experiment}`."
            )
        if experiment not in self._used:
            self._used.add(experiment)
            self._tracker.uses(experiment, tracking.result_files(self.results_dir / experiment))
        return path

    def write_table(self, filename: str, rows: Sequence[Mapping[str, Any]] | pandas.DataFrame) -> Path:
        """Writes a tidy table (``results.write_csv``) into ``out``, logs it to W&B, returns its path."""
        path = results.write_csv(self.out / filename, rows)
        self._tracker.table(path)
        return path

    def log(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Logs scalars to W&B; ``step`` counts up within a run."""
        self._tracker.log(metrics, step)

    def progress(self, message: str) -> None:
        """One line with the elapsed time on stderr."""
        print(f"[{self.experiment} {self.seconds:6.1f} s] {message}", file=sys.stderr, flush=True)


def check_names(key: str, given: Collection[str], known: Collection[str]) -> None:
    """Raises ValueError where a key's value names what there is not."""
    if unknown := [name for name in given if name not in known]:
        raise ValueError(f"{key} must be among {', '.join(known)}, got {unknown[0]!r}.")


def application(
    experiment: str, schema: type[BaseConfig]
) -> Callable[[Callable[[Any, Run], None]], Callable[[], None]]:
    """Decorates ``main(cfg, run)`` of an experiment; the result takes no argument and reads the command line.

    ``main`` gets an instance of ``schema`` with every value resolved. conf/<experiment>.yaml holds the values
    of its fields and may have a defaults list of its own (config groups).
    """

    def decorate(function: Callable[[Any, Run], None]) -> Callable[[], None]:
        node = OmegaConf.structured(
            schema
        )  # here: a sweep's worker process could not resolve the annotations
        _register(experiment, node)

        @functools.wraps(function)
        def task(config: DictConfig) -> None:
            _run(experiment, function, _checked(config, node))

        @functools.wraps(function)
        def entry() -> None:
            full_error = os.environ.get("HYDRA_FULL_ERROR")
            os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then hands exceptions on instead of printing them
            # An absolute path: Hydra would otherwise look beside the module that was started.
            conf = str(results.conf_dir())
            start = hydra.main(version_base="1.3", config_path=conf, config_name=_primary(experiment))
            try:
                start(task)()
            except USER_ERRORS as error:
                if full_error not in (None, "", "0"):
                    raise
                print(f"{experiment}: {one_line(error)} (HYDRA_FULL_ERROR=1 shows where.)", file=sys.stderr)
                sys.exit(1)
            finally:
                del os.environ["HYDRA_FULL_ERROR"]
                if full_error is not None:
                    os.environ["HYDRA_FULL_ERROR"] = full_error

        del entry.__wrapped__  # type: ignore[attr-defined]  # its signature is (), not the experiment's
        return entry

    return decorate


def check_overrides(experiment: str, overrides: Sequence[str]) -> None:
    """Composes the experiment's configuration with Hydra ``overrides`` and raises ValueError if that is
    impossible.

    The workflow calls it before anything runs. The message names the experiment and the key.
    """
    importlib.import_module(f"snapmla.experiments.{experiment}")
    try:
        with hydra.initialize_config_dir(str(results.conf_dir()), version_base="1.3"):
            config = hydra.compose(_primary(experiment), list(overrides))
        schema = ConfigStore.instance().load(f"{experiment}_schema.yaml").node
        OmegaConf.to_object(_checked(config, schema))
    except (HydraException, OmegaConfBaseException) as error:
        raise ValueError(
            f"The overrides of the experiment {experiment} are wrong: {one_line(error)}"
        ) from error


def as_overrides(values: Mapping[str, Any]) -> list[str]:
    """A mapping of (dotted or nested) keys to YAML scalars or lists, as Hydra overrides."""
    overrides = []
    for key, value in values.items():
        if isinstance(value, Mapping):
            overrides += [f"{key}.{override}" for override in as_overrides(value)]
        else:
            overrides.append(f"{key}={_override_value(value)}")
    return overrides


def one_line(error: BaseException) -> str:
    """The message of an error as one line; of Hydra's and OmegaConf's, the cause and the key too and no
    internals."""
    text = str(error)
    if isinstance(error, HydraException) and error.__cause__ is not None:
        text += f"\n{error.__cause__}"
    lines = [line.strip().rstrip(".:") for line in text.splitlines()]
    noise = ("object_type=", "reference_type=", "full_key", "To append to your", "See https://")
    kept = dict.fromkeys(line for line in lines if line and not line.startswith(noise))
    keys = [line.removeprefix("full_key: ") for line in lines if line.startswith("full_key: ")]
    where = f" (key {keys[-1]})" if keys else ""
    return f"{'; '.join(kept)}{where}." if kept else type(error).__name__


def _override_value(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ",".join(_override_value(item) for item in value) + "]"
    if isinstance(value, str):
        return "'" + value.replace("'", "\\'") + "'"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _checked(config: DictConfig, schema: DictConfig) -> DictConfig:
    """``config`` merged into the schema again, which refuses what Hydra's ``+key=value`` has added to it."""
    return OmegaConf.merge(schema, OmegaConf.to_container(config))


def _primary(experiment: str) -> str:
    return f"{experiment}_application"


def _register(experiment: str, schema: DictConfig) -> None:
    """Puts together schema, conf/base.yaml, conf/<experiment>.yaml and where Hydra may write."""
    store = ConfigStore.instance()
    store.store(name=f"{experiment}_schema", node=schema)
    folder = "${results_root:${results_dir}}"
    store.store(
        name=_primary(experiment),
        node={
            "defaults": [
                f"{experiment}_schema",
                "base",
                experiment,
                "_self_",
                {"override hydra/job_logging": "stdout"},  # no log file: the workflow keeps the output
            ],
            "hydra": {
                "job": {
                    "name": experiment,
                    "chdir": False,
                    "config": {"override_dirname": {"exclude_keys": ["results_dir", "tracking.mode"]}},
                },
                "output_subdir": None,  # no .hydra/: run.json holds the resolved configuration
                "run": {"dir": f"{folder}/{experiment}"},
                "sweep": {"dir": f"{folder}/sweeps/{experiment}", "subdir": "${hydra.job.override_dirname}"},
            },
        },
    )


def _run(experiment: str, function: Callable[[Any, Run], None], config: DictConfig) -> None:
    cfg = OmegaConf.to_object(config)  # resolves, checks and makes the dataclass; a missing value is an error
    results_dir = results.results_root(cfg.results_dir)
    final = Path(HydraConfig.get().runtime.output_dir)
    record = {"experiment": experiment, "config": recorded_config(config, results_dir)}
    _seed(cfg.seed)
    tracker = tracking.start(
        cfg.tracking.mode,
        cfg.tracking.project,
        cfg.tracking.entity,
        name=final.name,  # the experiment's, or the sweep's overrides
        job_type=experiment,
        config=record["config"],
        results_dir=results_dir,
    )
    succeeded = False
    try:
        with results.atomic_path(final) as out:
            out.mkdir()
            run = Run(experiment, out, results_dir, tracker)
            run.progress("started")
            function(cfg, run)
            made_by = {**provenance.collect(), "seconds": round(run.seconds, 1)}
            results.write_json(out / "run.json", {**record, "provenance": made_by})
            tracker.files(experiment, tracking.result_files(out))
        succeeded = True
        run.progress(f"wrote {final}")
    finally:
        tracker.finish(succeeded)
        if not succeeded and final.is_dir() and not any(final.iterdir()):
            final.rmdir()  # Hydra made it


def recorded_config(config: DictConfig, results_dir: Path) -> dict[str, Any]:
    """The configuration as it stands in run.json and in W&B: resolved, without absolute paths.

    ``results_dir`` is left out (where results lie did not make them).
    """
    plain = OmegaConf.to_container(config, resolve=True, throw_on_missing=True, enum_to_str=True)
    plain.pop("results_dir")
    roots = {"results": results_dir, **({"repository": results.REPOSITORY} if results.REPOSITORY else {})}
    return provenance.portable(plain, roots)


def _seed(seed: int) -> None:
    import numpy
    import torch

    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)

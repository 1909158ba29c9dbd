"""Who made a result: the commit, the versions and the machine, and a digest of the sources it depends on.

Nothing here initialises CUDA, and nothing it returns names a host, a user or an absolute path.
"""

from __future__ import annotations

import ast
import hashlib
import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import yaml

from snapmla.results import REPOSITORY, conf_dir

PACKAGES = ("snapmla", "torch", "transformers", "numpy")
"""The distributions whose versions stand in every run.json."""


def collect() -> dict[str, Any]:
    """Date (UTC), commit, versions, CPU and GPUs of this process, as plain JSON values; None where
    unknown."""
    commit, dirty = git_commit()
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit,
        "dirty": dirty,
        "python": platform.python_version(),
        **{package: _version(package) for package in PACKAGES},
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "gpus": gpus(),
    }


def git_commit(folder: Path | None = REPOSITORY) -> tuple[str | None, bool | None]:
    """The commit of the checkout ``folder`` and whether its tracked or new files differ from that commit.

    ``SNAPMLA_COMMIT`` is the answer where it is set (a container has no .git); a trailing "-dirty" marks a
    changed tree.
    """
    if named := os.environ.get("SNAPMLA_COMMIT"):
        return named.removesuffix("-dirty"), named.endswith("-dirty")
    # A wheel may be installed somewhere inside a stranger's repository: its commit would not be ours.
    if folder is None or (top := _output("git", "-C", str(folder), "rev-parse", "--show-toplevel")) is None:
        return None, None
    if not os.path.samefile(top, folder):
        return None, None
    commit = _output("git", "-C", str(folder), "rev-parse", "--verify", "HEAD")
    status = _output("git", "-C", str(folder), "status", "--porcelain")
    return commit, None if commit is None or status is None else bool(status)


def cpu_name() -> str | None:
    """The processor's marketing name, or what the platform calls it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or None


def gpus() -> list[dict[str, str]]:
    """Name, driver, power limit and CUDA version (of PyTorch's build) of each GPU, asked of nvidia-smi."""
    fields = ("name", "driver_version", "power.limit")
    answer = _output("nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader")
    if not answer:
        return []
    import torch  # importing it does not initialise CUDA

    rows = [dict(zip(fields, (part.strip() for part in line.split(",")))) for line in answer.splitlines()]
    return [{**row, "cuda": torch.version.cuda or "none"} for row in rows]


def portable(value: Any, roots: dict[str, Path]) -> Any:
    """``value`` with absolute paths made portable: beneath a root of ``roots`` as "name/rest", else the last
    part only.

    A recorded configuration says which file was used without telling where somebody keeps their files.
    """
    if isinstance(value, dict):
        return {key: portable(item, roots) for key, item in value.items()}
    if isinstance(value, list):
        return [portable(item, roots) for item in value]
    if isinstance(value, str) and os.path.isabs(value):
        for name, root in roots.items():
            if Path(value).is_relative_to(root):
                return (Path(name) / Path(value).relative_to(root)).as_posix()
        return Path(value).name
    return value


def digest(root: Path, script: Path, *data: Path) -> str:
    """A short digest of ``script``, of the modules beneath ``root`` that it imports, and of the files
    ``data``.

    It depends on their contents and on their paths below ``root``, not on times nor on where ``root`` lies.
    """
    sha = hashlib.sha256()
    for file in sorted({*source_files(script, root), *(path.resolve() for path in data)}):
        sha.update(file.relative_to(root.resolve()).as_posix().encode() + b"\0")
        sha.update(hashlib.sha256(file.read_bytes()).digest())
    return sha.hexdigest()[:16]


def source_files(script: Path, root: Path) -> list[Path]:
    """``script`` and every Python file beneath ``root`` that it imports, directly or through others, sorted.

    Imports are read from the syntax tree (those inside functions too) and looked up from ``root`` and beside
    the importing file.
    Of a package that only leads to a submodule, ``__init__.py`` does not count: it hands nothing on.
    """
    found: set[Path] = set()
    waiting = [script.resolve()]
    root = root.resolve()
    while waiting:
        file = waiting.pop()
        if file in found:
            continue
        found.add(file)
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                targets = [[_module(file, root, 0, alias.name)] for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                name = node.module or ""
                package = _module(file, root, node.level, name)
                # `from package import name`: a submodule, or something that the package itself defines
                targets = [
                    [_module(file, root, node.level, f"{name}.{a.name}".lstrip(".")), package]
                    for a in node.names
                ]
            else:
                continue
            waiting += [hit for target in targets if (hit := next(filter(None, target), None))]
    return sorted(found)


def conf_files(experiment: str) -> list[Path]:
    """The YAML files that an experiment's configuration may be composed of: base, its own, its groups."""
    own = conf_dir() / f"{experiment}.yaml"
    defaults = yaml.safe_load(own.read_text(encoding="utf-8")).get("defaults", [])
    groups = [group for entry in defaults if isinstance(entry, dict) for group in entry]
    return [
        conf_dir() / "base.yaml",
        own,
        *(path for group in groups for path in (conf_dir() / group).glob("*.yaml")),
    ]


def _module(file: Path, root: Path, level: int, name: str) -> Path | None:
    """The file beneath ``root`` that ``import name`` in ``file`` finds; ``level`` counts the dots of a
    relative import."""
    parts = name.split(".") if name else []
    for base in [file.parents[level - 1]] if level else [root, file.parent]:
        target = base.joinpath(*parts)
        for path in (target.with_suffix(".py"), target / "__init__.py"):
            if path.is_file():
                return path
    return None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _output(*command: str) -> str | None:
    """What a command printed, or None where it is missing, fails or takes too long."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()

"""The image of the Dockerfile's CPU target, built without a Docker engine, and the workflow in it as any user.

Case 23: only the results folder is writable, HOME is not, there is no network and no terminal. buildah builds and runs the
image on a base that debootstrap makes, the Dockerfile's Debian with its Python, since no registry of images is asked. Needs
Debian's buildah and debootstrap, root, 5 GB of disk and minutes of all cores: .ci/run installs them and runs this file at its
end.
"""

from __future__ import annotations

import ast
import configparser
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from toy_project import DRAWN, REPOSITORY, unattended

# What a command mounts and starts ends with it, also when it is killed.
NAMESPACES = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
NO_NETWORK = ("unshare", "--net")
USER = 12345
COMMIT = "c" * 40

# Its arguments: Debian's release, the buildah to call. apt-get is faster than debootstrap in resolving what Python needs.
MAKE_BASE = """
set -eu
suite=$1; shift
container=$("$@" from scratch)
debootstrap --variant=minbase "$suite" "$("$@" mount "$container")"
"$@" umount "$container"
"$@" run --isolation=chroot "$container" -- sh -c \
    "apt-get update -qq && apt-get install -qq --yes --no-install-recommends ca-certificates python3-venv"
"$@" commit --quiet "$container" base
"$@" rm "$container"
"""


def run(*command: str | Path, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    return unattended(command, timeout)


def output(*command: str | Path, timeout: float = 60) -> str:
    done = run(*command, timeout=timeout)
    assert done.returncode == 0, f"{command} exited with {done.returncode}:\n{done.stdout}"
    return done.stdout


def why_not() -> str | None:
    """What keeps this run from building images, or None."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        return "takes all cores for minutes, hence not beside other tests: pytest tests/test_container.py"
    if missing := [tool for tool in ("buildah", "debootstrap", "unshare") if shutil.which(tool) is None]:
        return f"not installed: {', '.join(missing)}"
    if os.geteuid() != 0:
        return "building with chroots wants root"
    done = run(*NAMESPACES, *NO_NETWORK, "mount", "-t", "tmpfs", "none", "/tmp")
    return None if done.returncode == 0 else f"root may not mount here: {done.stdout.strip()}"


WHY_NOT = why_not()
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))


def pip_volumes(folder: Path) -> list[str]:
    """buildah's options for a pip in the container that is set up as this one, files that its settings name included."""
    settings = configparser.RawConfigParser()
    paths = set()
    # Variables of the environment (":env:") come last, as they win.
    for line in sorted(output(sys.executable, "-m", "pip", "config", "list").splitlines(), reverse=True):
        name, value = line.split("=", 1)
        section, key = name.replace(":env:", "global").rsplit(".", 1)
        words = str(ast.literal_eval(value)).split()
        settings.setdefault(section, {})[key] = " ".join(words)
        # The pages of an index in a folder name files beside that folder.
        paths |= {Path(urlsplit(word).path).parent if word.startswith("file:") else Path(word) for word in words}
    with (folder / "pip.conf").open("w") as file:
        settings.write(file)
    volumes = [f"{path}:{path}:ro" for path in sorted(paths) if path.is_absolute() and path.exists()]
    return [f"--volume={volume}" for volume in (f"{folder}/pip.conf:/etc/pip.conf:ro", *volumes)]


@pytest.fixture(scope="module")
def buildah(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """The command with a storage of its own, which ends with the module."""
    folder = tmp_path_factory.mktemp("buildah")
    command = [*NAMESPACES, "buildah", f"--root={folder}/root", f"--runroot={folder}/runroot", "--storage-driver"]
    overlay = run(*command, "overlay", "info").returncode == 0
    yield [*command, "overlay" if overlay else "vfs"]
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def image(buildah: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict:
    """Builds the image ``snapmla`` and returns its configuration."""
    suite = re.search(r"^ARG CPU_BASE=python:\S+-(\w+)$", (REPOSITORY / "Dockerfile").read_text(encoding="utf-8"), re.MULTILINE)
    bare = buildah[len(NAMESPACES) :]
    output(*NAMESPACES, "bash", "-c", MAKE_BASE, "-", suite[1], *bare, timeout=600)
    arguments = {
        "TARGET": "cpu",
        "CPU_BASE": "localhost/base",
        "SNAPMLA_COMMIT": COMMIT,
        "TORCH_INDEX": os.environ.get("TORCH_INDEX", ""),
    }
    # Docker's format, because the other one has no HEALTHCHECK.
    output(
        *(*buildah, "build", "--isolation=chroot", "--format=docker", "--pull=never", "--tag=snapmla"),
        *(f"--build-arg={name}={value}" for name, value in arguments.items()),
        *pip_volumes(tmp_path_factory.mktemp("pip")),
        REPOSITORY,
        timeout=1800,
    )
    return json.loads(output(*buildah, "inspect", "--type=image", "snapmla"))["Docker"]["config"]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of the user's, in which the image's HOME is somebody else's."""
    folder = tmp_path_factory.mktemp("mounted")
    (folder / ".home").mkdir()
    os.chown(folder, USER, USER)
    return folder


@pytest.fixture(scope="module")
def container(buildah: list[str], image: dict, results: Path) -> list[str]:
    """The command that runs its arguments in the image as the user, by the image's entry point."""
    name = output(*buildah, "from", "--pull-never", "snapmla").strip()
    enter = [*buildah, "run", "--isolation=chroot"]
    # As with `docker run --read-only`: /tmp and its like are nobody's.
    output(*enter, name, "--", "find", "/", "-xdev", "-type", "d", "-perm", "-1002", "-exec", "chmod", "755", "{}", "+")
    return [*NO_NETWORK, *enter, f"--user={USER}:{USER}", f"--volume={results}:/results", name, "--", *image["Entrypoint"]]


def test_the_user_may_write_only_to_results(container: list[str]) -> None:
    # find ends with 1, since some folders are closed to the user: its complaints do not begin with a slash.
    found = run(*container, "find", "/", "-xdev", "(", "-type", "d", "-o", "-type", "f", ")", "-writable").stdout
    assert re.findall(r"^/.*", found, re.MULTILINE) == ["/results"], found


def test_processes_have_the_image_s_environment(container: list[str], image: dict) -> None:
    """Docker sets HOME to / for a user without a name, and pip's settings stay out of the image."""
    variables = dict(line.split("=", 1) for line in image["Env"])
    got = dict(line.split("=", 1) for line in output(*container).splitlines())
    assert {name: got.get(name) for name in variables} == variables
    assert set(got) - set(variables) <= {"HOSTNAME", "TERM"}
    folders = {name: value for name, value in got.items() if name.endswith(("HOME", "DIR", "RESULTS"))}
    assert {"HOME", "XDG_CACHE_HOME", "MPLCONFIGDIR", "TMPDIR", "SNAPMLA_RESULTS"} <= set(folders)
    assert {name: value for name, value in folders.items() if not f"{value}/".startswith("/results/")} == {}


def test_health_check_finds_no_fault(container: list[str], image: dict) -> None:
    kind, *command = image["Healthcheck"]["Test"]
    assert kind == "CMD"
    assert "ok    results folder" in output(*container, *command)


def test_the_workflow_runs_and_then_has_nothing_to_do(container: list[str], image: dict, results: Path) -> None:
    command = [*container, *image["Cmd"], "--configfile", "conf/workflow/short.yaml"]
    output(*command, timeout=1800)
    wanted = [file for files in DRAWN.values() for file in files]
    assert [name for name in wanted if not (results / name).is_file()] == []
    assert json.loads((results / "fidelity" / "run.json").read_text())["provenance"]["commit"] == COMMIT
    made = [path for path in results.rglob("*") if path != results / ".home"]
    owners = {path: (path.lstat().st_uid, path.lstat().st_gid) for path in made}
    assert {path: owner for path, owner in owners.items() if owner != (USER, USER)} == {}
    assert [*results.glob("tmp*"), *results.glob("snakemake*")] == []  # temporary files end with their programs

    assert "Nothing to be done" in output(*command, timeout=300)

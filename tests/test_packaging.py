"""The package as a thing to install: what importing it does, and that the files which pin it agree."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
import zipfile
from functools import cache
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import snapmla

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
LOCK = (ROOT / "requirements.lock").read_text(encoding="utf-8")
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
MAX_LINES = 800
UNLOCKED = {"benchmarks", "browser", "review"}
"""Extras that only few want; `make lock` locks the others."""


def torch_targets() -> dict[str, str]:
    lines = (ROOT / "torch.lock").read_text(encoding="utf-8").splitlines()
    return dict(line.split() for line in lines if line and not line.startswith("#"))


def source_files() -> list[Path]:
    """What git tracks or would track; without git (a container), every file outside its ignored folders."""
    command = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        names = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\0")
        files = [ROOT / name for name in names if name]
    except (OSError, subprocess.CalledProcessError):
        hidden = re.compile(r"^(results|build|dist|\.(?!ci|gitignore|dockerignore).*|.*/__pycache__)(/|$)")
        files = [path for path in ROOT.rglob("*") if not hidden.search(path.relative_to(ROOT).as_posix())]
    return [path for path in files if path.is_file()]


@cache
def text_files() -> dict[str, str]:
    """Path in the checkout -> text, of every file that is text."""
    texts = {}
    for path in source_files():
        try:
            texts[path.relative_to(ROOT).as_posix()] = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
    return texts


def test_import_is_light() -> None:
    """Case 17: importing the package neither initialises CUDA nor loads what only experiments need."""
    heavy = ["wandb", "hydra", "transformers", "matplotlib", "pandas", "snakemake"]
    program = (
        "import sys, json, snapmla, torch\n"
        f"print(json.dumps([torch.cuda.is_initialized(), [name for name in {heavy} if name in sys.modules]]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert json.loads(done.stdout) == [False, []]


def test_versions_agree() -> None:
    version = PYPROJECT["project"]["version"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    releases = re.findall(
        r"^## \[(\d[^\]]*)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert {snapmla.__version__, citation["version"], releases[0]} == {version}


def test_every_supported_python_is_named() -> None:
    """pyproject.toml's range, its classifiers and the Makefile's check are one range."""
    assert PYPROJECT["project"]["requires-python"] == ">=3.11,<3.14"
    minors = [
        c.removeprefix("Programming Language :: Python :: ")
        for c in PYPROJECT["project"]["classifiers"]
        if ":: 3." in c
    ]
    assert minors == ["3.11", "3.12", "3.13"]
    assert "(3, 11) <= sys.version_info < (3, 14)" in (ROOT / "Makefile").read_text(encoding="utf-8")


def locked() -> dict[str, str]:
    """Package -> its block of the lock."""
    blocks = re.split(r"^(?=[A-Za-z0-9])", LOCK, flags=re.MULTILINE)[1:]
    return {canonicalize_name(block.split("==")[0]): block for block in blocks}


def direct_requirements() -> list[Requirement]:
    project = PYPROJECT["project"]
    extras = {name: lines for name, lines in project["optional-dependencies"].items() if name not in UNLOCKED}
    return [Requirement(line) for lines in (project["dependencies"], *extras.values()) for line in lines]


@pytest.mark.parametrize(
    "requirement", [r for r in direct_requirements() if r.name != "torch"], ids=lambda r: r.name
)
def test_lock_satisfies(requirement: Requirement) -> None:
    versions = re.findall(rf"^{re.escape(requirement.name)}==(\S+)", LOCK, re.MULTILINE)
    assert versions, f"{requirement.name} is missing from requirements.lock: run make lock"
    assert all(version in requirement.specifier for version in versions), (
        f"{requirement}, locked {versions}: run make lock"
    )


def test_make_lock_names_every_extra_that_is_locked() -> None:
    named = re.findall(r"--extra (\w+)", (ROOT / "Makefile").read_text(encoding="utf-8"))
    assert set(named) == set(PYPROJECT["project"]["optional-dependencies"]) - UNLOCKED


def test_lock_is_hashed_and_names_no_torch_and_no_index() -> None:
    blocks = locked()
    assert [name for name, block in blocks.items() if "--hash=sha256:" not in block] == []
    assert [name for name in blocks if re.match(r"torch$|triton$|nvidia-|cuda-", name)] == []
    assert "://" not in LOCK and "--index-url" not in LOCK and "--find-links" not in LOCK
    # What every torch requires of Python packages is there: installing torch adds only CUDA's.
    assert {"filelock", "typing-extensions", "sympy", "networkx", "jinja2", "fsspec", "setuptools"} <= set(
        blocks
    )


def test_torch_targets_are_supported() -> None:
    [torch] = [r for r in direct_requirements() if r.name == "torch"]
    targets = torch_targets()
    assert set(targets) == {"cpu", "cu12", "cu13"}
    assert [
        f"{target} {version}" for target, version in targets.items() if version not in torch.specifier
    ] == []


def test_torch_is_pinned_in_one_place() -> None:
    pins = {
        name: re.findall(r"torch==\d[\w.]*", text)
        for name, text in text_files().items()
        if name in ("Makefile", "Dockerfile", ".ci/run")
    }
    assert set(pins) == {"Makefile", "Dockerfile", ".ci/run"} and not any(pins.values())


def test_dockerfile_pins() -> None:
    arguments = dict(re.findall(r"^ARG (\w+)=(.*)$", DOCKERFILE, re.MULTILINE))
    assert re.fullmatch(r"nvidia/cuda:12\.\d+\.\d+-devel-ubuntu\d\d\.\d\d", arguments["GPU_BASE"])
    assert re.fullmatch(r"python:3\.1[123]\.\d+-slim-\w+", arguments["CPU_BASE"])
    # a digest cannot be known without the registry: none is better than a wrong one
    assert (
        arguments["GPU_BASE_DIGEST"] == arguments["CPU_BASE_DIGEST"] == ""
        and "@sha256:" not in DOCKERFILE.split("\nARG ", 1)[1]
    )
    assert re.fullmatch(r"[0-9a-f]{40}", arguments["FLASHMLA_COMMIT"])
    assert arguments["TARGET"] in torch_targets()


def test_apptainer_definition() -> None:
    """From the image that the workflow names, with sections that Apptainer knows and its shell reads."""
    text = (ROOT / "apptainer.def").read_text(encoding="utf-8")
    header, *sections = re.split(r"^%", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE), flags=re.MULTILINE)
    image = re.search(r'^container: "docker-daemon://(.+)"$', (ROOT / "workflow/Snakefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert header.split() == ["Bootstrap:", "docker-daemon", "From:", image[1]]
    bodies = dict(section.split("\n", 1) for section in sections)
    assert list(bodies) == ["help", "environment", "runscript", "test"]
    for name in ("environment", "runscript", "test"):
        done = subprocess.run(["sh", "-n"], input=bodies[name], capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"%{name}: {done.stderr}"
    # What the image sets and the definition repeats is the same.
    of_image = dict(re.findall(r"^(?:ENV|   ) (\w+)=(\S+)", DOCKERFILE, re.MULTILINE))
    repeated = dict(re.findall(r"\b([A-Z]\w+)=(\S+)", bodies["environment"]))
    assert "SNAPMLA_RESULTS" in repeated
    assert {name: value for name, value in repeated.items() if name in of_image} == {
        name: of_image[name] for name in repeated if name in of_image
    }


def test_wheel_holds_the_package_and_its_configurations(tmp_path: Path) -> None:
    """Where there is no checkout, snapmla.results.conf_dir looks beside the package."""
    pytest.importorskip("hatchling")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    [wheel] = tmp_path.glob("snapmla-*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    expected = [name for name in text_files() if name.startswith(("conf/", "snapmla/"))]
    assert {name if name.startswith("snapmla/") else f"snapmla/{name}" for name in expected} <= names
    assert [name for name in names if not re.match(r"snapmla(-[\d.]+\.dist-info)?/", name)] == []


def test_no_long_files() -> None:
    generated = {"requirements.lock"}
    counts = {
        name: text.count("\n")
        for name, text in text_files().items()
        if name not in generated and not name.endswith(".csv")
    }
    assert {name: lines for name, lines in counts.items() if lines > MAX_LINES} == {}


def test_no_machine_paths_and_no_index_hosts() -> None:
    """A file that names somebody's folder or a package index works on one machine only."""
    pattern = re.compile(r"/(?:home|root|Users|work)/\w|(?:pypi|pythonhosted|pytorch|anaconda)\.(?:org|com)")
    found = {name: hits for name, text in text_files().items() if (hits := pattern.findall(text))}
    assert found == {}


def test_the_cuda_tools_lock_follows_its_list() -> None:
    wanted = [
        Requirement(line)
        for line in (ROOT / "kernels" / "tools.in").read_text(encoding="utf-8").splitlines()
        if line and not line.startswith("#")
    ]
    lock = (ROOT / "kernels" / "tools.lock").read_text(encoding="utf-8")
    locked = dict(re.findall(r"^([a-z0-9-]+)==([0-9.]+) ", lock, re.MULTILINE))
    assert {r.name: str(r.specifier).removeprefix("==") for r in wanted} == locked
    assert lock.count("--hash=sha256:") >= len(locked)

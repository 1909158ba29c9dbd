"""Provenance and result files: what they record, what they leave out, and that nothing is half written."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch

from snapmla import provenance, results


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=test", "-c", "user.email=test@example.org"]
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_collect_is_json_without_host_and_paths() -> None:
    record = provenance.collect()
    text = json.dumps(record)
    assert json.loads(text) == record
    assert record["torch"] == torch.__version__
    assert record["date"].endswith("+00:00") and record["cpu"] and record["cores"] >= 1
    assert str(Path.home()) not in text and str(Path.cwd()) not in text


def test_collect_does_not_initialise_cuda() -> None:
    code = "import torch, snapmla.provenance as p; p.collect(); print(torch.cuda.is_initialized())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_commit_comes_from_git_and_knows_a_changed_tree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SNAPMLA_COMMIT", raising=False)
    git(tmp_path, "init", "--quiet")
    assert provenance.git_commit(tmp_path) == (None, None)  # no commit yet
    (tmp_path / "file").write_text("1")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "--quiet", "-m", "first")
    head = git(tmp_path, "rev-parse", "HEAD")
    assert provenance.git_commit(tmp_path) == (head, False)
    (tmp_path / "file").write_text("2")
    assert provenance.git_commit(tmp_path) == (head, True)
    inside = tmp_path / "inside"  # such as site-packages in somebody's repository
    inside.mkdir()
    assert provenance.git_commit(inside) == (None, None)


def test_commit_of_a_container_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SNAPMLA_COMMIT", "abc")
    assert provenance.git_commit(None) == ("abc", False)
    monkeypatch.setenv("SNAPMLA_COMMIT", "abc-dirty")
    assert provenance.git_commit(None) == ("abc", True)


def test_portable_keeps_no_absolute_path(tmp_path: Path) -> None:
    config = {
        "model": str(tmp_path / "results" / "probe"),
        "other": ["/somewhere/else/weights", "plain", 3, None],
    }
    assert provenance.portable(config, {"results": tmp_path / "results"}) == {
        "model": "results/probe",
        "other": ["weights", "plain", 3, None],
    }


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    package = tmp_path / "package"
    (package / "deep").mkdir(parents=True)
    (package / "__init__.py").write_text("from package import unused\n")
    (package / "unused.py").write_text("")
    (package / "main.py").write_text("import json\nfrom package import helper\nfrom .deep import name\n")
    (package / "helper.py").write_text("def late():\n    import package.late\n")
    (package / "late.py").write_text("from package import main\n")  # a circle
    (package / "deep" / "__init__.py").write_text("name = 1\n")
    return tmp_path


def test_source_files_are_those_that_a_script_imports(sources: Path) -> None:
    found = provenance.source_files(sources / "package/main.py", sources)
    names = [path.relative_to(sources).as_posix() for path in found]
    assert names == ["package/deep/__init__.py", "package/helper.py", "package/late.py", "package/main.py"]


def test_digest_follows_contents_not_times_or_places(
    sources: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    def digest(root: Path) -> str:
        return provenance.digest(root, root / "package/main.py", root / "data.yaml")

    (sources / "data.yaml").write_text("a: 1\n")
    before = digest(sources)
    clone = tmp_path_factory.mktemp("clone") / "moved"
    sources.rename(clone)
    (clone / "package/main.py").touch()
    (clone / "package/unused.py").write_text("changed = True\n")
    assert digest(clone) == before
    (clone / "data.yaml").write_text("a: 2\n")
    assert digest(clone) != before
    (clone / "data.yaml").write_text("a: 1\n")
    (clone / "package/late.py").write_text("changed = True\n")
    assert digest(clone) != before


def test_conf_files_include_the_groups_of_an_experiment() -> None:
    names = {path.relative_to(results.conf_dir()).as_posix() for path in provenance.conf_files("throughput")}
    assert {"base.yaml", "throughput.yaml", "engine/h200.yaml"} <= names
    assert not any(name.startswith("workflow/") for name in names)


def test_results_root_is_the_same_from_every_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SNAPMLA_RESULTS")
    default = results.results_root()
    assert default == results.REPOSITORY / "results"
    monkeypatch.chdir(tmp_path)
    assert results.results_root() == default
    assert results.results_root("other") == results.REPOSITORY / "other"
    monkeypatch.setenv("SNAPMLA_RESULTS", str(tmp_path / "a b"))
    assert results.results_root() == tmp_path / "a b"
    assert results.results_root(str(tmp_path)) == tmp_path


def test_csv_is_the_same_bytes_for_the_same_rows(tmp_path: Path) -> None:
    rows = [
        {"layer": 0, "rmse": 1 / 3, "note": None, "source": "measured"},
        {"layer": 1, "rmse": None, "note": "x", "source": "paper"},
    ]
    path = results.write_csv(tmp_path / "deep" / "table.csv", rows)
    expected = b"layer,rmse,note,source\n0,0.333333333,,measured\n1,,x,paper\n"
    assert path.read_bytes() == expected
    assert results.write_csv(path, pd.DataFrame(rows)).read_bytes() == expected
    assert [file.name for file in path.parent.iterdir()] == ["table.csv"]


@pytest.mark.parametrize(
    ("rows", "message"),
    [([], "at least one row"), ([{"x": 1, "source": "guessed"}], "measured, modelled, recorded, paper, got")],
)
def test_csv_refuses_bad_rows_and_keeps_the_old_file(tmp_path: Path, rows: list[dict], message: str) -> None:
    (tmp_path / "table.csv").write_text("old")
    with pytest.raises(ValueError, match=f"table.csv.*{message}"):
        results.write_csv(tmp_path / "table.csv", rows)
    assert (tmp_path / "table.csv").read_text() == "old"
    assert len(list(tmp_path.iterdir())) == 1


def test_atomic_path_replaces_a_folder_whole_or_not_at_all(tmp_path: Path) -> None:
    folder = tmp_path / "experiment"
    folder.mkdir()
    (folder / "old").write_text("old")
    with pytest.raises(RuntimeError), results.atomic_path(folder) as partial:
        partial.mkdir()
        (partial / "new").write_text("half")
        raise RuntimeError
    assert [path.name for path in tmp_path.rglob("*")] == ["experiment", "old"]
    with results.atomic_path(folder) as partial:
        partial.mkdir()
        (partial / "new").write_text("whole")
    assert [path.name for path in tmp_path.rglob("*")] == ["experiment", "new"]


def test_json_and_tensors_round_trip(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    value = {"a": [1, 2.5, None], "b": "µ"}
    assert results.read_json(results.write_json(tmp_path / "run.json", value)) == value
    with pytest.raises(ValueError):
        results.write_json(tmp_path / "nan.json", {"a": float("nan")})
    assert not (tmp_path / "nan.json").exists()
    tensor = torch.arange(6).reshape(2, 3).T  # not contiguous
    path = results.write_tensors(tmp_path / "t.safetensors", {"t": tensor})
    assert torch.equal(load_file(path)["t"], tensor)


def test_reading_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"none\.csv does not exist"):
        results.read_csv(tmp_path / "none.csv")
    results.write_csv(tmp_path / "table.csv", [{"a": 1}])
    with pytest.raises(ValueError, match=r"table\.csv lacks the columns \['b'\], it has \['a'\]"):
        results.read_csv(tmp_path / "table.csv", ["a", "b"])
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(ValueError, match=r"run\.json must be JSON"):
        results.read_json(tmp_path / "run.json")

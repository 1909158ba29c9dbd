"""Result files: where they lie, and writing them so that a reader never meets half of one.

Every writer makes a temporary neighbour and renames it: a run that is interrupted leaves the old file or
none.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas
    import torch

PACKAGE = Path(__file__).resolve().parent
REPOSITORY: Path | None = PACKAGE.parent if (PACKAGE.parent / "conf" / "base.yaml").is_file() else None
"""The checkout that this package runs from; None when it was installed as a wheel."""

SOURCES = ("measured", "modelled", "recorded", "paper")
"""Where a number can come from: the values of the column ``source`` (see ARCHITECTURE.md)."""


def conf_dir() -> Path:
    """The folder of Hydra configurations: the checkout's ``conf/``, or the copy inside an installed wheel."""
    folder = REPOSITORY / "conf" if REPOSITORY else PACKAGE / "conf"
    if not folder.is_dir():
        raise FileNotFoundError(f"The configuration folder is missing: expected {folder}, got nothing.")
    return folder


def results_root(path: str | os.PathLike[str] | None = None) -> Path:
    """The folder of all results, absolute: ``path``, else ``SNAPMLA_RESULTS``, else ``results``.

    A relative path starts at the checkout, so that every entry point means the same folder whatever directory
    it was started in; for an installed wheel, which has no checkout, it starts at the current directory.
    """
    chosen = Path(path or os.environ.get("SNAPMLA_RESULTS") or "results").expanduser()
    return Path(os.path.abspath((REPOSITORY or Path.cwd()) / chosen))


@contextmanager
def atomic_path(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yields a temporary neighbour of ``path`` to make a file or a folder of; on success it is ``path``.

    An exception in the block deletes it and leaves ``path`` as it was. A folder replaces an older one whole.
    """
    final = Path(path)
    final.parent.mkdir(parents=True, exist_ok=True)
    # The suffix stays last: some writers choose their format by it.
    partial = final.with_name(f".{final.stem}.partial-{os.getpid()}{final.suffix}")
    try:
        yield partial
        if partial.is_dir() and final.is_dir():  # os.replace cannot replace a folder that holds something
            shutil.rmtree(final)
        os.replace(partial, final)
    finally:
        if partial.is_dir():
            shutil.rmtree(partial)
        else:
            partial.unlink(missing_ok=True)


def write_csv(path: str | os.PathLike[str], rows: Sequence[Mapping[str, Any]] | pandas.DataFrame) -> Path:
    """Writes a tidy table as CSV and returns its path.

    Floats carry nine significant digits (a float32 survives), a missing value is an empty field, lines end in
    "\\n": equal tables are equal bytes. Raises ValueError for a table without rows and for a ``source``
    outside ``SOURCES``.
    """
    import pandas

    frame = rows if isinstance(rows, pandas.DataFrame) else pandas.DataFrame(list(rows))
    name = Path(path).name
    if frame.empty:
        raise ValueError(f"{name} needs at least one row, got none.")
    if "source" in frame and (unknown := set(frame["source"]) - set(SOURCES)):
        raise ValueError(
            f"{name}: source must be one of {', '.join(SOURCES)}, got {sorted(map(str, unknown))}."
        )
    with atomic_path(path) as partial:
        frame.to_csv(partial, index=False, float_format="%.9g", lineterminator="\n")
    return Path(path)


def read_csv(path: str | os.PathLike[str], columns: Sequence[str] = ()) -> pandas.DataFrame:
    """Reads a table; raises FileNotFoundError if there is none and ValueError if one of ``columns`` is
    missing."""
    import pandas

    frame = pandas.read_csv(existing(path))
    if missing := [column for column in columns if column not in frame]:
        raise ValueError(f"{path} lacks the columns {missing}, it has {list(frame.columns)}.")
    return frame


def write_json(path: str | os.PathLike[str], value: Any) -> Path:
    """Writes ``value`` as indented JSON and returns the path; NaN and infinity are refused (ValueError)."""
    with atomic_path(path) as partial:
        partial.write_text(json.dumps(value, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    return Path(path)


def read_json(path: str | os.PathLike[str]) -> Any:
    """Reads a JSON file; raises FileNotFoundError if there is none and ValueError if it is not JSON."""
    try:
        return json.loads(existing(path).read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} must be JSON, but it does not parse: {error}.") from error


def write_tensors(path: str | os.PathLike[str], tensors: Mapping[str, torch.Tensor]) -> Path:
    """Writes named CPU tensors as a safetensors file and returns its path."""
    from safetensors.torch import save_file

    with atomic_path(path) as partial:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, partial)
    return Path(path)


def existing(path: str | os.PathLike[str]) -> Path:
    """``path`` if it is there, else FileNotFoundError in one sentence."""
    if not Path(path).exists():
        raise FileNotFoundError(f"The file {path} does not exist.")
    return Path(path)

"""Real text that every machine has: the Python standard library's sources and the topics of ``help()``.

The bytes depend on the Python version and on how it was packaged, so each result records ``sha256``.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import sysconfig
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

SEPARATOR = b"\0"
"""Begins every document; no Python source may contain it."""
HELDOUT_SHARE = 16
"""One document in 16 is held out."""

# Installed packages, tests and what an installation writes about its own machine are no part of the text; the
# topics are read as text, not as the source that holds them.
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "pydoc_data"}
_SKIPPED_FILES = ("_sysconfigdata", "sitecustomize", "usercustomize")


@dataclass(frozen=True)
class Corpus:
    """Bytes as uint8 tensors [n]; whole documents are either in ``train`` or in ``heldout``."""

    train: Tensor
    heldout: Tensor
    sha256: str
    documents: int


def load() -> Corpus:
    """Read the corpus in a fixed order. A document is held out by a hash of its name, so files that one
    Python version has and another has not do not move the others."""
    parts: dict[bool, list[bytes]] = {False: [], True: []}
    digest = hashlib.sha256()
    documents = _documents()
    for name, text in documents:
        heldout = hashlib.sha256(name.encode()).digest()[0] % HELDOUT_SHARE == 0
        parts[heldout].append(SEPARATOR + text)
        digest.update(name.encode() + SEPARATOR + text)
    train, heldout = (
        torch.from_numpy(np.frombuffer(b"".join(parts[k]), np.uint8).copy()) for k in (False, True)
    )
    return Corpus(train, heldout, digest.hexdigest(), len(documents))


def window(stream: Tensor, start: int, length: int) -> Tensor:
    """int64 [length] tokens of a byte stream. Raises ValueError if the stream is too short."""
    if start + length > len(stream):
        raise ValueError(f"context: expected a text of at least {start + length} bytes, got {len(stream)}")
    return stream[start : start + length].to(torch.int64)


def spread(stream: Tensor, windows: int, length: int) -> Tensor:
    """int64 [windows, length]: windows at even distances over the stream, whole and deterministic."""
    last = len(stream) - length
    starts = [last * i // max(windows - 1, 1) for i in range(windows)]
    return torch.stack([window(stream, start, length) for start in starts])


def _documents() -> list[tuple[str, bytes]]:
    """(name, bytes), sorted by name."""
    root = Path(sysconfig.get_path("stdlib"))
    found = {}
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in _SKIPPED_FOLDERS]
        for file in files:
            if file.endswith(".py") and not file.startswith(_SKIPPED_FILES):
                path = Path(folder, file)
                found[path.relative_to(root).as_posix()] = path.read_bytes()
    with suppress(ImportError):  # a few distributions package it apart
        topics = importlib.import_module("pydoc_data.topics").topics
        found.update({f"topics/{name}": text.encode() for name, text in topics.items()})
    return sorted(found.items())

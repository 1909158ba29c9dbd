"""Tasks whose answers must be found exactly in a long context, as text for a byte-level model.

    recall    lines "abcd=wxyz", and "abcd?" asks for the four letters behind a key; keys differ in a letter or two
    last      the same, but keys come again with other letters, and the last ones are asked for: nothing but position tells
    needles   lines of recall strewn over real text
    copy      a string of random letters comes again; after its first eight letters the rest is known
    addition  "417+385=2080": the sum of two numbers, its lowest digit first

Training documents ask all along, so that most of a document teaches; an `Example` asks once, at its end. Wrong positions
and blurred keys cost whole answers, which is what an FP8 cache is tried with.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

Array = np.ndarray

LETTERS = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz", np.uint8)
KEY = 4
"""Letters of a key, and of its value."""
KEY_LETTERS = LETTERS[:12]
"""Of which keys are made: 32k tokens name a sixth of all 20,736 keys, and each of those has seven others that are off by a letter."""
AGAIN = 8
"""How often a key of the task `last` comes, on average."""
COPIED, PREFIX = 32, 8
"""Letters of a copied string, and how many of them come before its rest can be known."""
_PAIR = 2 * KEY + 2


class Document(NamedTuple):
    """tokens: uint8 [length]. taught: bool [length], the tokens that can be known from those before."""

    tokens: Array
    taught: Array


class Example(NamedTuple):
    """prompt: uint8 [length]; answer: uint8 [1 … 8], what a right model goes on with."""

    prompt: Array
    answer: Array


def _letters(rng: np.random.Generator, *shape: int) -> Array:
    return LETTERS[rng.integers(len(LETTERS), size=shape)]


def _keys(rng: np.random.Generator, n: int) -> Array:
    """uint8 [n, 4], all different."""
    of = rng.choice(len(KEY_LETTERS) ** KEY, n, replace=False)
    return KEY_LETTERS[of[:, None] // len(KEY_LETTERS) ** np.arange(KEY) % len(KEY_LETTERS)]


def _pairs(keys: Array, values: Array, asks: Array | bool = False) -> Array:
    """uint8 [n, 10]: lines of key, sign and value, the sign being that of a question where a line asks."""
    lines = np.empty((len(keys), _PAIR), np.uint8)
    lines[:, :KEY], lines[:, KEY + 1 : -1], lines[:, -1] = keys, values, ord("\n")
    lines[:, KEY] = np.where(asks, ord("?"), ord("="))
    return lines


def _asking(rng: np.random.Generator, lines: int) -> tuple[Array, Array]:
    """So many lines, of which half, but not the first, ask for one of the pairs before; and which do."""
    asks = rng.random(lines) < 0.5
    asks[0] = False
    asked = np.flatnonzero(~asks)  # the pairs
    before = np.cumsum(~asks)
    of = np.where(asks, asked[(rng.random(lines) * before).astype(np.int64)], np.arange(lines))
    keys, values = _keys(rng, lines), _letters(rng, lines, KEY)
    return _pairs(keys[of], values[of], asks), asks


def _answers_taught(lines: Array, asks: Array, length: int) -> Document:
    """Lines as `_pairs` makes them, cut to the length, that teach what they answer."""
    taught = np.zeros(lines.shape, bool)
    taught[asks, KEY + 1 : -1] = True
    return _cut(lines, taught, length)


def _cut(lines: Array, taught: Array, length: int) -> Document:
    return Document(lines.reshape(-1)[:length].copy(), taught.reshape(-1)[:length].copy())


def recall_document(rng: np.random.Generator, length: int, text: Array) -> Document:
    return _answers_taught(*_asking(rng, -(-length // _PAIR)), length)


def last_document(rng: np.random.Generator, length: int, text: Array) -> Document:
    lines = -(-length // _PAIR)
    keys, values = _keys(rng, max(lines // AGAIN, 1)), _letters(rng, lines, KEY)
    of, asks = rng.integers(len(keys), size=lines), rng.random(lines) < 0.5
    latest = np.full(len(keys), -1)
    for i in range(lines):
        asks[i] &= latest[of[i]] >= 0
        if asks[i]:
            values[i] = values[latest[of[i]]]
        else:
            latest[of[i]] = i
    return _answers_taught(_pairs(keys[of], values, asks), asks, length)


def needles_document(rng: np.random.Generator, length: int, text: Array) -> Document:
    count = max(2, min(length // 128, 256))
    lines, asks = _asking(rng, count)
    tokens, taught = text[:length].copy(), np.ones(length, bool)
    width = _PAIR + 1  # a line feed before
    slots = np.sort(rng.choice(length // width, count, replace=False)) * width
    for slot, line, asking in zip(slots, lines, asks, strict=True):
        tokens[slot], tokens[slot + 1 : slot + width] = ord("\n"), line
        taught[slot : slot + width] = False
        taught[slot + 2 + KEY : slot + width - 1] = asking
    return Document(tokens, taught)


def copy_document(rng: np.random.Generator, length: int, text: Array) -> Document:
    strings = -(-length // COPIED)
    lines = _letters(rng, strings, COPIED)
    again = rng.random(strings) < 0.5
    again[0] = False
    of = np.where(again, (rng.random(strings) * np.arange(strings)).astype(np.int64), np.arange(strings))
    while (again[of]).any():  # of a copy the original
        of = of[of]
    taught = np.zeros(lines.shape, bool)
    taught[again, PREFIX:] = True
    return _cut(lines[of], taught, length)


def _sums(rng: np.random.Generator, count: int) -> Array:
    """uint8 [count, 13]: lines "417+385=2080"."""
    a, b = rng.integers(100, 1000, size=(2, count))
    lines = np.full((count, 13), ord("\n"), np.uint8)
    for place in range(3):
        lines[:, 2 - place] = ord("0") + a // 10**place % 10
        lines[:, 6 - place] = ord("0") + b // 10**place % 10
    lines[:, 3], lines[:, 7] = ord("+"), ord("=")
    for place in range(4):
        lines[:, 8 + place] = ord("0") + (a + b) // 10**place % 10
    return lines


def addition_document(rng: np.random.Generator, length: int, text: Array) -> Document:
    lines = _sums(rng, -(-length // 13))
    taught = np.zeros(lines.shape, bool)
    taught[:, 8:12] = True
    return _cut(lines, taught, length)


def recall_example(rng: np.random.Generator, length: int, text: Array) -> Example:
    pairs = (length - KEY - 1) // _PAIR
    keys, values = _keys(rng, pairs), _letters(rng, pairs, KEY)
    asked = rng.integers(pairs)
    return _asked(_pairs(keys, values), keys[asked], values[asked], length)


def _asked(lines: Array, key: Array, value: Array, length: int) -> Example:
    """Lines and a question behind them, filled up to the length in front."""
    question = np.append(key, np.uint8(ord("?")))
    filler = np.full(length - lines.size - len(question), ord("\n"), np.uint8)
    return Example(np.concatenate([filler, lines.reshape(-1), question]), value)


def last_example(rng: np.random.Generator, length: int, text: Array) -> Example:
    pairs = (length - KEY - 1) // _PAIR
    keys, values = _keys(rng, max(pairs // AGAIN, 1)), _letters(rng, pairs, KEY)
    of = rng.integers(len(keys), size=pairs)
    asked = of[rng.integers(pairs)]
    return _asked(_pairs(keys[of], values), keys[asked], values[np.flatnonzero(of == asked)[-1]], length)


def needles_example(rng: np.random.Generator, length: int, text: Array) -> Example:
    """Eight needles in real text, at even shares of it, one of which is asked for."""
    needles, width = 8, _PAIR + 1
    keys, values = _keys(rng, needles), _letters(rng, needles, KEY)
    question = np.concatenate([[np.uint8(ord("\n"))], keys[asked := rng.integers(needles)], [np.uint8(ord("?"))]])
    tokens = text[: length - len(question)].copy()
    share = len(tokens) // needles
    for i, line in enumerate(_pairs(keys, values)):
        at = i * share + rng.integers(share - width)
        tokens[at], tokens[at + 1 : at + width] = ord("\n"), line
    return Example(np.concatenate([tokens, question]), values[asked])


def copy_example(rng: np.random.Generator, length: int, text: Array) -> Example:
    strings = (length - PREFIX) // COPIED
    lines = _letters(rng, strings, COPIED)
    asked = lines[rng.integers(strings)]
    filler = _letters(rng, length - PREFIX - strings * COPIED)
    return Example(np.concatenate([filler, lines.reshape(-1), asked[:PREFIX]]), asked[PREFIX : 2 * PREFIX])


def addition_example(rng: np.random.Generator, length: int, text: Array) -> Example:
    lines = _sums(rng, (length + 5) // 13 + 1).reshape(-1)
    return Example(lines[-5 - length : -5], lines[-5:-1])


class Task(NamedTuple):
    """Both take a generator, a length in bytes and real text of at least that many bytes."""

    document: Callable[[np.random.Generator, int, Array], Document]
    example: Callable[[np.random.Generator, int, Array], Example]


TASKS: dict[str, Task] = {
    "recall": Task(recall_document, recall_example),
    "last": Task(last_document, last_example),
    "needles": Task(needles_document, needles_example),
    "copy": Task(copy_document, copy_example),
    "addition": Task(addition_document, addition_example),
}

"""Where the experiments' weights and text come from: the probe model, or any local Hugging Face MLA
checkpoint."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from snapmla.integrations import transformers as hf
from snapmla.probe import corpus
from snapmla.probe.train import VOCABULARY


@dataclass(frozen=True)
class Source:
    """A model in evaluation mode and the held-out text in its tokens.

    tokens: int64 [n]. bytes_of: how many bytes of text given tokens stand for. name: for labels;
    weights_source: where the weights come from, in words."""

    model: PreTrainedModel
    tokens: Tensor
    bytes_of: Callable[[Tensor], int]
    name: str
    weights_source: str
    corpus_sha256: str


def load(path: str | os.PathLike, *, probe: bool, device: torch.device | str = "cpu") -> Source:
    """The checkpoint at ``path``, on a GPU in BF16, as engines serve it; ``probe`` says that it is the probe model and not
    somebody's own.

    A checkpoint without a tokenizer is read as a byte-level model if its vocabulary has 256 entries.
    Raises as ``integrations.transformers.load`` does, and ValueError if a tokenizer is needed and there is
    none.
    """
    folder = Path(path)
    device = torch.device(device)
    model = hf.load(folder, "auto" if device.type == "cpu" else torch.bfloat16).to(device)
    text = corpus.load()
    if probe:
        name, weights_source = "probe", "trained by this workflow"
    else:
        name, weights_source = folder.resolve().name, f"local {model.config.model_type} checkpoint"
    if (tokenizer := hf.load_tokenizer(folder)) is not None:
        ids = tokenizer(bytes(text.heldout.numpy()).decode(errors="replace"), add_special_tokens=False)[
            "input_ids"
        ]

        def bytes_of(tokens: Tensor) -> int:
            return len(tokenizer.decode(tokens.tolist()).encode())

        return Source(model, torch.tensor(ids), bytes_of, name, weights_source, text.sha256)
    if model.config.vocab_size != VOCABULARY:
        raise ValueError(
            f"source.path: expected a tokenizer beside a model with {model.config.vocab_size} tokens, "
            f"got none in {folder}"
        )
    return Source(model, text.heldout.to(torch.int64), len, name, weights_source, text.sha256)

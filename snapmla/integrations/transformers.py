"""Hugging Face MLA models, seen as absorbed decoders over a latent cache.

Any causal model of ``transformers`` whose attention has the DeepSeek projections (``kv_a_layernorm``,
``kv_b_proj``) with kv_lora_rank 512 and qk_rope_head_dim 64 works: deepseek_v2, deepseek_v3, glm4_moe_lite,
longcat_flash. Nothing of the model is written a second time: it runs its own forward, and only the attention
function is exchanged through the ``AttentionInterface`` of transformers. So the rotary convention,
q_lora_rank, LongCat's LoRA scaling and the softmax scale with YaRN's mscale² are the model's own. The
function is handed the queries and keys after the rotary embedding; the content is what ``kv_b_proj`` is
given. What is left to do here is the absorption (DeepSeek-V2, section 2.1.3):

    q_latent[h] = [W_UK[h]^T q_nope[h], q_rope[h]]        576 wide, against the row [content, rope] of a token
    o[h]        = W_UV[h] · (Σ_t p[h, t] content[t])      the values are the content itself

`enable` makes a model decode so for good, on a paged FP8 or BF16 cache: `generate` works as before. `latents` and
`absorbed_forward` are for experiments: whole texts, and any attention in latent space.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from snapmla.integrations.transformers_cache import PagedLatents, Pages
from snapmla.layout import KV_LORA_RANK, MAX_QUERIES, QK_HEAD_DIM, QK_ROPE_HEAD_DIM
from snapmla.quantization import SNAPMLA

Attend = Callable[[int, Tensor, Tensor, Tensor, float], Tensor]
"""``attend(layer, q, content, rope, softmax_scale) -> out``: one layer's attention in latent space.

q [n, heads, 576], content [P + n, 512], rope [P + n, 64] (not divided by any scale), out [n, heads, 512] in
any floating type. Query i is at position P + i and sees the keys 0 … P + i (causal, aligned bottom-right)."""

IMPLEMENTATION = "snapmla"
"""Name of the attention implementation registered here; by itself, it is ``causal_attention`` of whole texts."""
CACHE = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"
"""What this version of transformers calls a model's cache, among its arguments and outputs."""
_UNQUANTIZED = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
# (module, query [b, heads, n, qk], key [b, heads, n, qk], value [b, heads, n, v], scaling) -> as value
_Attention = Callable[[nn.Module, Tensor, Tensor, Tensor, float], Tensor]


@dataclass
class Latents:
    """What an MLA model caches of a text, one list entry per attention layer.

    content: [tokens, 512], after kv_a_layernorm (and LongCat's scaling); rope: [tokens, 64], after the rotary
    embedding; query: absorbed queries [queries, heads, 576], or no entries. softmax_scale includes YaRN's
    mscale². hidden: the final hidden states [tokens, hidden_size] that ``lm_head`` takes, in the model's own
    type."""

    softmax_scale: float
    content: list[Tensor] = field(default_factory=list)
    rope: list[Tensor] = field(default_factory=list)
    query: list[Tensor] = field(default_factory=list)
    hidden: Tensor | None = None

    @property
    def tokens(self) -> int:
        return self.content[0].shape[0]

    def first(self, tokens: int) -> Latents:
        """The first ``tokens`` tokens' content and rope, as views."""
        return Latents(
            self.softmax_scale, [c[:tokens] for c in self.content], [r[:tokens] for r in self.rope]
        )


@dataclass
class Decoded:
    """logits [n, vocab] in the model's type; per layer: outputs [n, heads, 512] as ``attend`` returned them,
    and the absorbed queries [n, heads, 576] it was given."""

    logits: Tensor
    outputs: list[Tensor] = field(default_factory=list)
    queries: list[Tensor] = field(default_factory=list)


def load(path: str | os.PathLike, dtype: torch.dtype | str = "auto") -> PreTrainedModel:
    """Load a local Hugging Face MLA checkpoint for inference; nothing is fetched from a network.

    dtype: the type of the weights, "auto" for the one they are stored in.
    Raises FileNotFoundError if ``path`` is not a folder with a config.json, ValueError if it is not an MLA
    model of the supported dimensions.
    """
    path = Path(path)
    if not (path / "config.json").is_file():
        raise FileNotFoundError(f"source.path: expected a folder with a Hugging Face config.json, got {path}")
    config = AutoConfig.from_pretrained(path, local_files_only=True)
    _check_config(config)
    model = AutoModelForCausalLM.from_pretrained(path, config=config, dtype=dtype, local_files_only=True)
    attention_layers(model)
    return model.eval()


def load_tokenizer(path: str | os.PathLike) -> PreTrainedTokenizerBase | None:
    """The tokenizer in a checkpoint's folder, None where there is none."""
    if not any((Path(path) / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        return None
    return AutoTokenizer.from_pretrained(path, local_files_only=True)


def attention_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The MLA attention modules in cache order (LongCat-Flash has two in each decoder layer).

    Raises ValueError if the model has none, or not of the supported dimensions.
    """
    _check_config(model.config)
    found = [m for m in model.modules() if hasattr(m, "kv_b_proj") and hasattr(m, "kv_a_layernorm")]
    found.sort(key=lambda module: module.layer_idx)
    indices = [module.layer_idx for module in found]
    if not found or indices != list(range(len(found))):
        raise ValueError(
            f"model: expected MLA attention with layer_idx 0, 1, …, got {indices} in {type(model).__name__}"
        )
    weight = found[0].kv_b_proj.weight
    if weight.dtype not in _UNQUANTIZED:  # its scales lie elsewhere: absorbing the bare weight would be wrong
        raise ValueError(f"model: expected kv_b_proj in one of {_UNQUANTIZED}, got {weight.dtype}")
    return found


@torch.no_grad()
def latents(
    model: PreTrainedModel,
    input_ids: Tensor,
    query_positions: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Latents:
    """Latents of a text, from one ordinary prefill forward.

    input_ids: int64 [tokens]. query_positions: int64 [queries], positions whose absorbed queries are kept as
    well. dtype: rounding of what is returned; the forward itself runs in the model's type. Memory: O(tokens),
    one layer's expanded keys and values at a time.
    """
    layers = attention_layers(model)
    _check_input_ids(input_ids)
    found = Latents(softmax_scale=layers[0].scaling)

    def attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        found.content.append(contents[module.layer_idx].to(dtype))
        found.rope.append(key[0, 0, :, -QK_ROPE_HEAD_DIM:].to(dtype, copy=True))
        if query_positions is not None:
            found.query.append(_absorb(module, query[0, :, query_positions]).to(dtype))
        return causal_attention(module, query, key, value, scaling)

    with _exchanged(model) as contents:
        out = model.base_model(input_ids[None], use_cache=False, snapmla_attention=attention)
    found.hidden = out.last_hidden_state[0]
    return found


@torch.no_grad()
def absorbed_forward(
    model: PreTrainedModel,
    input_ids: Tensor,
    prefix: Latents,
    attend: Attend,
    dtype: torch.dtype = torch.bfloat16,
) -> Decoded:
    """Run the model on tokens behind a cached prefix, with ``attend`` in every layer.

    input_ids: int64 [n], the tokens at positions P … P + n − 1. prefix: latents of the P tokens before them
    (P may be 0). attend: see ``Attend``; called once per layer, in order. dtype: what queries and latents are
    rounded to before ``attend``; BF16 as in a served model, float32 to test exactness.
    Raises ValueError if input_ids or the number of layers in ``prefix`` does not fit.
    """
    layers = attention_layers(model)
    _check_input_ids(input_ids)
    if len(prefix.content) != len(layers):
        raise ValueError(f"prefix: expected latents of {len(layers)} layers, got {len(prefix.content)}")
    decoded = Decoded(logits=torch.empty(0))

    def attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        layer = module.layer_idx
        q = _absorb(module, query[0]).to(dtype)
        content = torch.cat([prefix.content[layer].to(dtype), contents[layer].to(dtype)])
        rope = torch.cat([prefix.rope[layer].to(dtype), key[0, 0, :, -QK_ROPE_HEAD_DIM:].to(dtype)])
        out = attend(layer, q, content, rope, scaling)
        decoded.queries.append(q)
        decoded.outputs.append(out)
        _, w_uv = _up_projections(module)
        return torch.einsum("nhc,hvc->hnv", out.float(), w_uv).to(query.dtype)[None]

    positions = torch.arange(prefix.tokens, prefix.tokens + len(input_ids), device=input_ids.device)
    with _exchanged(model) as contents:
        decoded.logits = model(
            input_ids[None], position_ids=positions[None], use_cache=False, snapmla_attention=attention
        ).logits[0]
    return decoded


def causal_attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    """Causal attention of a whole text.

    V is padded to the width of Q and K: unequal widths leave torch's fast path for one that materializes
    tokens × tokens (24 GiB at 32k). Raises ValueError unless there are as many queries as keys.
    """
    if query.shape[2] != key.shape[2]:
        raise ValueError(f"attention: expected {key.shape[2]} queries, one per key, got {query.shape[2]}")
    return _padded_attention(query, key, value, scaling, is_causal=True)


def _padded_attention(query: Tensor, key: Tensor, value: Tensor, scaling: float, **mask) -> Tensor:
    """Torch's attention with V padded to the width of Q and K."""
    padded = F.pad(value, (0, query.shape[-1] - value.shape[-1]))
    out = F.scaled_dot_product_attention(query, key, padded, scale=scaling, **mask)
    return out[..., : value.shape[-1]]


def enable(
    model: PreTrainedModel, pages: str | Callable[[torch.device], Pages] = SNAPMLA.name, max_tokens: int = 0
) -> Enabled:
    """Make a model decode absorbed, on a paged latent cache; `generate` and plain forwards work as before. For inference.

    A prompt is prefilled in the model's own type and cached by Fused-K-Append. Up to 8 tokens behind a cached text go
    through the decode kernel; more are prefilled on what Fused-Fetch-Dequant reads back of it. Sequences of a batch may
    have different lengths: give an attention_mask. A `PagedLatents` may be given as the model's cache, or be taken from
    its outputs, to go on behind a cached text.

    Args:
        model: a causal MLA model; changed in place.
        pages: how tokens are stored (`transformers_cache.PAGES`): "snapmla", 644 bytes a token and layer; "bf16", 1152, the
            baseline; "config_a" … "config_d", Table 2's others, for comparison. Or a class like those.
        max_tokens: room for so many tokens of each sequence is made at once; 0: as needed.

    Returns:
        A handle whose `disable()` puts the model back, at the end of a `with` block by itself.

    Raises ValueError for a model that is not MLA, not of the supported dimensions, or enabled already.
    """
    return Enabled(model, pages, max_tokens)


class Enabled:
    """A model that decodes on a paged latent cache, until `disable`; made by `enable`."""

    def __init__(
        self, model: PreTrainedModel, pages: str | Callable[[torch.device], Pages], max_tokens: int
    ) -> None:
        if model.config._attn_implementation == IMPLEMENTATION:
            raise ValueError(f"model: expected another attention than {IMPLEMENTATION!r}, which is on already")
        self._model = model
        self._new_cache = partial(PagedLatents, len(attention_layers(model)), pages, max_tokens)
        self._exchange = _Exchange(model)
        self._hook = model.base_model.register_forward_pre_hook(self._before_forward, with_kwargs=True)

    def disable(self) -> None:
        self._hook.remove()
        self._exchange.undo()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error) -> None:
        self.disable()

    def _before_forward(self, _model: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Puts a cache of this kind in the place of an empty one that `generate` or the model would use."""
        name = CACHE if kwargs.get("past_key_values") is None else "past_key_values"
        cache, mask = kwargs.get(name), kwargs.get("attention_mask")
        tokens = kwargs.get("input_ids", args[0] if args else None)
        batch, n = (kwargs["inputs_embeds"] if tokens is None else tokens).shape[:2]
        if mask is not None and mask.dim() != 2:
            raise ValueError(f"attention_mask: expected [batch, tokens], got {tuple(mask.shape)}")
        use_cache = kwargs.get("use_cache")
        if cache is None and (self._model.config.use_cache if use_cache is None else use_cache):
            cache = self._new_cache()
        elif cache is not None and not isinstance(cache, PagedLatents):
            if cache.get_seq_length() > 0:
                raise ValueError(f"cache: expected PagedLatents or an empty cache, got {type(cache).__name__}")
            cache = self._new_cache()
        real = None
        if cache is not None:
            cache.begin(batch, n, mask, next(self._model.parameters()).device)
            kwargs[name], real = cache, cache.paging.real
        elif mask is not None and not bool(mask.all()):
            real = mask.bool()
        kwargs["snapmla_attention"] = partial(self._attention, cache, real)
        return args, kwargs

    def _attention(
        self,
        cache: PagedLatents | None,
        real: Tensor | None,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
    ) -> Tensor:
        n, layer = query.shape[2], module.layer_idx
        if cache is None:
            return _prefill(module, query, key, value, scaling, real)
        pages, paging = cache.pages[layer], cache.paging
        rope = key[:, 0, :, -QK_ROPE_HEAD_DIM:]
        content = self._exchange.contents.pop(layer).detach()
        pages.append(content, rope.detach().flatten(0, 1), paging)
        if paging.columns == n:
            return _prefill(module, query, key, value, scaling, real)
        if n > MAX_QUERIES or real is not None:
            lengths = enumerate(paging.before.tolist())
            past = [pages.fetch(paging.slots_of(i, length)).to(key.dtype) for i, length in lengths]
            return _prefill(module, query, key, value, scaling, real, past)
        q = _absorb(module, query, query.dtype)
        out = pages.decode(q, paging, scaling)
        _, w_uv = _up_projections(module, query.dtype)
        return torch.einsum("bnhc,hvc->bhnv", out.to(query.dtype), w_uv)


@torch.no_grad()
def forced(
    model: PreTrainedModel, cache: PagedLatents, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]
) -> Iterator[Tensor]:
    """Logits of an enabled model for each token of the answers, behind those before it: [sequences, n, vocab] for n tokens at
    a time.

    All but the last token of each prompt is prefilled, the rest goes through the decode calls. cache: an empty one. Answers
    have one length; prompts have at least one token, or two where their lengths differ.
    """
    width = max(map(len, prompts)) - 1
    tokens = torch.zeros(len(prompts), width + len(answers[0]), dtype=torch.int64)
    mask = torch.zeros_like(tokens)
    for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        text = torch.tensor([*prompt, *answer[:-1]])
        tokens[i, -len(text) :], mask[i, -len(text) :] = text, 1
    tokens, mask = tokens.to(model.device), mask.to(model.device)
    position = (mask.cumsum(1) - 1).clamp_min(0)
    for start, stop in pieces(width, tokens.shape[1]):
        places = {"attention_mask": mask[:, :stop], "position_ids": position[:, start:stop]}
        kept = stop - start if start >= width else 1
        logits = model(tokens[:, start:stop], **places, use_cache=True, logits_to_keep=kept, **{CACHE: cache}).logits
        if stop > width:
            yield logits


def pieces(first: int, end: int) -> list[tuple[int, int]]:
    """Which tokens go through a model at once: those before `first` in a prefill, then as many as a decode call takes."""
    starts = range(first, end, MAX_QUERIES)
    return [(0, first)] * (first > 0) + [(start, min(start + MAX_QUERIES, end)) for start in starts]


def _prefill(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float,
    real: Tensor | None,
    past: list[Tensor] | None = None,
) -> Tensor:
    """Causal attention of new tokens, those hidden by `real` [batch, n] left out, behind each sequence's past [tokens,
    576]: [batch, heads, n, v_head_dim]."""
    if real is None and past is None:
        return causal_attention(module, query, key, value, scaling)
    out = value.new_zeros(*query.shape[:3], value.shape[-1])
    for i in range(len(query)):
        kept = slice(None) if real is None else real[i].nonzero()[:, 0]
        q, k, v = query[i, :, kept], key[i, :, kept], value[i, :, kept]
        if past is not None:
            k, v = (torch.cat(x, 1) for x in zip(_expand(module, past[i]), (k, v), strict=True))
        mask = causal_lower_right(q.shape[1], k.shape[1])
        out[i, :, kept] = _padded_attention(q[None], k[None], v[None], scaling, attn_mask=mask)[0]
    return out


def _expand(module: nn.Module, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Keys [heads, n, qk_nope_head_dim + 64] and values [heads, n, v_head_dim] of cached tokens [n, 576]."""
    content, rope = tokens.split([KV_LORA_RANK, QK_ROPE_HEAD_DIM], dim=-1)
    w_uk, w_uv = _up_projections(module, tokens.dtype)
    k = torch.einsum("nc,hdc->hnd", content, w_uk)
    return torch.cat([k, rope.expand(len(k), -1, -1)], -1), torch.einsum("nc,hvc->hnv", content, w_uv)


def _call_attention(
    module,
    query,
    key,
    value,
    attention_mask,
    scaling,
    snapmla_attention: _Attention = causal_attention,
    **kwargs,
):
    """The registered function; the model call's keyword ``snapmla_attention`` arrives here."""
    return snapmla_attention(module, query, key, value, scaling).transpose(1, 2), None


# A name without a registered mask function gets no mask from transformers: no T × T tensor exists anywhere.
ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, _call_attention)


@contextmanager
def _exchanged(model: PreTrainedModel) -> Iterator[dict[int, Tensor]]:
    """Within: the model calls ``snapmla_attention``; the dict holds each layer's newest content [n, 512]."""
    exchange = _Exchange(model)
    try:
        yield exchange.contents
    finally:
        exchange.undo()


class _Exchange:
    """The model calls the registered attention function, and `contents` has each layer's newest content [n, 512]."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.contents: dict[int, Tensor] = {}
        self._before = model.config._attn_implementation
        self._hooks = [
            layer.kv_b_proj.register_forward_pre_hook(partial(self._keep, layer.layer_idx))
            for layer in attention_layers(model)
        ]
        model.set_attn_implementation(IMPLEMENTATION)

    def _keep(self, layer: int, _module: nn.Module, args: tuple[Tensor, ...]) -> None:
        self.contents[layer] = args[0].reshape(-1, KV_LORA_RANK)

    def undo(self) -> None:
        self.model.set_attn_implementation(self._before)
        for hook in self._hooks:
            hook.remove()


def _up_projections(module: nn.Module, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """``kv_b_proj`` as W_UK [heads, qk_nope_head_dim, 512] and W_UV [heads, v_head_dim, 512]."""
    weight = module.kv_b_proj.weight
    weight = weight.to(dtype).view(-1, module.qk_nope_head_dim + module.v_head_dim, KV_LORA_RANK)
    return weight[:, : module.qk_nope_head_dim], weight[:, module.qk_nope_head_dim :]


def _absorb(module: nn.Module, query: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """[..., heads, n, qk_nope_head_dim + 64] -> [..., n, heads, 576]."""
    nope, rope = query.to(dtype).split([module.qk_nope_head_dim, QK_ROPE_HEAD_DIM], dim=-1)
    w_uk, _ = _up_projections(module, dtype)
    q = torch.cat([torch.einsum("...hnd,hdc->...nhc", nope, w_uk), rope.transpose(-3, -2)], dim=-1)
    assert q.shape[-1] == QK_HEAD_DIM
    return q


def _check_config(config) -> None:
    expected = {"kv_lora_rank": KV_LORA_RANK, "qk_rope_head_dim": QK_ROPE_HEAD_DIM}
    got = {name: getattr(config, name, None) for name in expected}
    if got != expected:
        raise ValueError(
            f"model: expected an MLA model with {expected}, got model_type {config.model_type!r} with {got}"
        )


def _check_input_ids(input_ids: Tensor) -> None:
    if input_ids.dim() != 1 or input_ids.dtype != torch.int64 or len(input_ids) == 0:
        raise ValueError(
            f"input_ids: expected int64 [n] with n >= 1, got {input_ids.dtype} {tuple(input_ids.shape)}"
        )

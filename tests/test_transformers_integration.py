"""The absorbed view of Hugging Face MLA models against the models' own eager forward."""

from __future__ import annotations

import math

import pytest
import torch
import transformers

from snapmla.integrations import transformers as hf
from snapmla.layout import KV_LORA_RANK, QK_ROPE_HEAD_DIM

COMMON = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": KV_LORA_RANK,
    "qk_rope_head_dim": QK_ROPE_HEAD_DIM,
    "qk_nope_head_dim": 32,
    "v_head_dim": 48,
    "max_position_embeddings": 256,
    "pad_token_id": None,
    "initializer_range": 0.1,  # large enough that attention is far from uniform
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 40.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "original_max_position_embeddings": 64,
}
LONGCAT = {
    "vocab_size": 97,
    "hidden_size": 64,
    "num_layers": 2,  # two attention sublayers each
    "num_attention_heads": 4,
    "ffn_hidden_size": 96,
    "expert_ffn_hidden_size": 32,
    "n_routed_experts": 4,
    "zero_expert_num": 2,
    "moe_topk": 2,
    "q_lora_rank": 24,
    "kv_lora_rank": KV_LORA_RANK,
    "qk_rope_head_dim": QK_ROPE_HEAD_DIM,
    "qk_nope_head_dim": 32,
    "v_head_dim": 48,
    "max_position_embeddings": 256,
    "pad_token_id": None,
    "initializer_range": 0.1,
}

CASES = {
    "v2": (transformers.DeepseekV2Config, dict(COMMON, q_lora_rank=None)),
    "v2-q-lora": (transformers.DeepseekV2Config, dict(COMMON, q_lora_rank=24)),
    "v2-yarn": (transformers.DeepseekV2Config, dict(COMMON, q_lora_rank=None, rope_parameters=YARN)),
    "v3": (transformers.DeepseekV3Config, dict(COMMON, q_lora_rank=24)),
    "v3-no-q-lora": (transformers.DeepseekV3Config, dict(COMMON, q_lora_rank=None)),
    "v3-not-interleaved": (
        transformers.DeepseekV3Config,
        dict(COMMON, q_lora_rank=24, rope_interleave=False),
    ),
    "v3-yarn": (transformers.DeepseekV3Config, dict(COMMON, q_lora_rank=24, rope_parameters=YARN)),
    "glm": (transformers.Glm4MoeLiteConfig, dict(COMMON, q_lora_rank=24)),
    "longcat": (transformers.LongcatFlashConfig, LONGCAT),
}


def build(case: str) -> transformers.PreTrainedModel:
    config_class, values = CASES[case]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config_class(**values), attn_implementation="eager")
    with torch.no_grad():  # norm weights of 1 would hide a content taken before the norm's weight
        for layer in hf.attention_layers(model):
            layer.kv_a_layernorm.weight.uniform_(0.5, 2.0)
    return model.float().eval()


def exact(layer, q, content, rope, softmax_scale):
    n, keys = len(q), len(content)
    scores = torch.einsum("nhd,td->nht", q, torch.cat([content, rope], dim=-1)) * softmax_scale
    hidden = torch.arange(keys)[None, :] > torch.arange(keys - n, keys)[:, None]
    p = scores.masked_fill(hidden[:, None, :], float("-inf")).softmax(-1)
    return torch.einsum("nht,tc->nhc", p, content)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("prefix", [0, 1, 37, 100])
def test_absorbed_forward_equals_the_eager_model(case: str, prefix: int) -> None:
    model = build(case)
    input_ids = torch.randint(0, 97, (prefix + 9,), generator=torch.Generator().manual_seed(prefix))
    with torch.no_grad():
        expected = model(input_ids[None]).logits[0, prefix:]
    cached = hf.latents(model, input_ids, dtype=torch.float32).first(prefix)
    decoded = hf.absorbed_forward(model, input_ids[prefix:], cached, exact, dtype=torch.float32)
    torch.testing.assert_close(decoded.logits, expected, atol=2e-5, rtol=2e-5)
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize("case", ["v2-yarn", "v3-yarn"])
def test_softmax_scale_includes_mscale_squared(case: str) -> None:
    mscale = 0.1 * math.log(40.0) + 1.0
    found = hf.latents(build(case), torch.arange(3), dtype=torch.float32)
    assert found.softmax_scale == pytest.approx((32 + 64) ** -0.5 * mscale**2)


def test_queries_of_the_prefill_are_those_of_decoding() -> None:
    model = build("v3")
    input_ids = torch.arange(40) % 97
    found = hf.latents(model, input_ids, query_positions=torch.tensor([30, 39]), dtype=torch.float32)
    decoded = hf.absorbed_forward(model, input_ids[30:], found.first(30), exact, dtype=torch.float32)
    for layer in range(3):
        assert found.query[layer].shape == (2, 4, 576)
        torch.testing.assert_close(found.query[layer], decoded.queries[layer][[0, 9]], atol=2e-5, rtol=2e-5)


def test_latents_are_bf16_and_detached_from_the_model() -> None:
    found = hf.latents(build("v2"), torch.arange(11))
    assert found.tokens == 11 and len(found.content) == len(found.rope) == 3
    for content, rope in zip(found.content, found.rope):
        assert content.dtype == rope.dtype == torch.bfloat16
        assert content.shape == (11, 512) and rope.shape == (11, 64)
        assert rope.untyped_storage().nbytes() == 11 * 64 * 2  # not a view that keeps all expanded keys alive


def test_what_attend_returns_is_what_the_model_uses() -> None:
    model = build("v3")
    found = hf.latents(model, torch.arange(20))
    same = hf.absorbed_forward(model, torch.arange(20, 25), found, exact)
    other = hf.absorbed_forward(model, torch.arange(20, 25), found, lambda *args: exact(*args) * 1.5)
    assert not torch.allclose(same.logits, other.logits, atol=1e-3)


def test_prefill_uses_the_fast_attention_path() -> None:
    """Unequal QK and V widths would make torch materialize tokens × tokens."""
    model = build("v3")
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        hf.latents(model, torch.arange(50) % 97)


def test_the_implementation_by_itself_is_causal_attention() -> None:
    model, input_ids = build("v3"), torch.arange(2 * 30).view(2, 30) % 97
    with torch.no_grad():
        expected = model(input_ids, use_cache=False).logits
        model.set_attn_implementation(hf.IMPLEMENTATION)
        torch.testing.assert_close(model(input_ids, use_cache=False).logits, expected, atol=2e-5, rtol=2e-5)
        with pytest.raises(ValueError, match="expected 13 queries, one per key, got 1"):
            model.generate(input_ids[:1, :12], max_new_tokens=2, do_sample=False)


def test_bad_input_is_named(tmp_path) -> None:
    with pytest.raises(FileNotFoundError, match="source.path"):
        hf.load(tmp_path / "absent")
    transformers.LlamaConfig(hidden_size=8, num_attention_heads=2).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="kv_lora_rank.*llama"):
        hf.load(tmp_path)
    model = build("v2")
    with pytest.raises(ValueError, match="input_ids.*int32"):
        hf.latents(model, torch.arange(4, dtype=torch.int32))
    quantized = build("v2")
    for layer in hf.attention_layers(quantized):
        layer.kv_b_proj.weight = torch.nn.Parameter(
            layer.kv_b_proj.weight.to(torch.float8_e4m3fn), requires_grad=False
        )
    with pytest.raises(ValueError, match="kv_b_proj.*float8_e4m3fn"):
        hf.latents(quantized, torch.arange(4))
    with pytest.raises(ValueError, match="prefix.*3 layers, got 0"):
        hf.absorbed_forward(model, torch.arange(4), hf.Latents(softmax_scale=1.0), exact)


def test_a_saved_model_loads(tmp_path) -> None:
    model = build("v3")
    model.save_pretrained(tmp_path)
    loaded = hf.load(tmp_path)
    first, second = (hf.latents(m, torch.arange(7)) for m in (model, loaded))
    assert torch.equal(first.content[2], second.content[2])

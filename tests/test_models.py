"""Model shapes against published parameter counts and against Transformers' own models."""

from __future__ import annotations

import math

import pytest

from snapmla.models import (
    DEEPSEEK_V2_LITE,
    DEEPSEEK_V3_1,
    GLM_4_7_FLASH,
    KIMI_K2,
    LONGCAT_FLASH_THINKING,
    MODELS,
    ParallelLayout,
    get_model,
)


@pytest.mark.parametrize(
    ("model", "total", "active"),
    [  # billions, from the models' papers or cards; LongCat-Flash activates 18.6 to 31.3, 27 on average
        (DEEPSEEK_V3_1, 671, 37),
        (LONGCAT_FLASH_THINKING, 560, 27),
        (DEEPSEEK_V2_LITE, 15.7, 2.4),
        (KIMI_K2, 1000, 32),
    ],
)
def test_published_parameter_counts(model, total, active):
    assert model.total_parameters / 1e9 == pytest.approx(total, rel=0.03)
    assert model.active_parameters / 1e9 == pytest.approx(active, rel=0.03)


def test_glm_flash_is_of_its_size_class():
    """Its card says 30B-A3B: a class; the active part is no rounded count (3.3 without the output head)."""
    assert GLM_4_7_FLASH.total_parameters / 1e9 == pytest.approx(30, rel=0.02)
    assert 3.0 < GLM_4_7_FLASH.active_parameters / 1e9 < 3.7


@pytest.mark.parametrize(
    ("model", "width", "mscale"),
    [
        (DEEPSEEK_V3_1, 192, 0.1 * math.log(40) + 1),
        (DEEPSEEK_V2_LITE, 192, 0.0707 * math.log(40) + 1),
        (KIMI_K2, 192, 0.1 * math.log(32) + 1),
        (LONGCAT_FLASH_THINKING, 192, 1.0),
        (GLM_4_7_FLASH, 256, 1.0),
    ],
)
def test_softmax_scale(model, width, mscale):
    assert model.softmax_scale == pytest.approx(width**-0.5 * mscale**2, rel=1e-12)


def test_softmax_scale_equals_the_attention_modules_own():
    """The scale that Transformers' DeepSeek-V3 attention computes from the same YaRN parameters."""
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

    yarn = {"rope_type": "yarn", "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0}
    yarn |= {"original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1, "rope_theta": 10000.0}
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "q_lora_rank": 16, "num_key_value_heads": 2}
    config = DeepseekV3Config(**sizes, rope_parameters=yarn, rope_scaling=yarn)
    assert DeepseekV3Attention(config, layer_idx=0).scaling == pytest.approx(DEEPSEEK_V3_1.softmax_scale)


@pytest.mark.parametrize(
    ("model", "module"),
    [
        (DEEPSEEK_V3_1, "DeepseekV3Config"),
        (LONGCAT_FLASH_THINKING, "LongcatFlashConfig"),
        (GLM_4_7_FLASH, "Glm4MoeLiteConfig"),
    ],
)
def test_shapes_equal_the_defaults_of_transformers(model, module):
    """Where a configuration class has the model's own values as defaults (not so for V2-Lite and Kimi-K2)."""
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, module):
        pytest.skip(f"this version of transformers has no {module}")
    config = getattr(transformers, module)()
    same = {
        "hidden_size": model.hidden_size,
        "num_attention_heads": model.heads,
        "q_lora_rank": model.q_lora_rank,
        "kv_lora_rank": model.kv_lora_rank,
        "qk_rope_head_dim": model.qk_rope_head_dim,
        "qk_nope_head_dim": model.qk_nope_head_dim,
        "v_head_dim": model.v_head_dim,
        "vocab_size": model.vocab_size,
        "n_routed_experts": model.routed_experts,
        "num_experts_per_tok": model.experts_per_token,
        "intermediate_size": model.dense_intermediate_size,
        "moe_intermediate_size": model.moe_intermediate_size,
        "num_hidden_layers": model.attention_layers,
    }
    assert {key: getattr(config, key) for key in same} == same


def test_parameters_equal_a_model_that_transformers_builds():
    """Counted on tensors without storage, so the real depth and width are used."""
    import torch
    from transformers import AutoModelForCausalLM, DeepseekV3Config

    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(DeepseekV3Config())
    count = sum(parameter.numel() for parameter in built.parameters())
    assert DEEPSEEK_V3_1.total_parameters == pytest.approx(count, rel=1e-5)  # norms are not counted


def test_longcat_has_two_caches_a_layer():
    assert (LONGCAT_FLASH_THINKING.layers, LONGCAT_FLASH_THINKING.attention_layers) == (28, 56)
    assert DEEPSEEK_V3_1.attention_layers == DEEPSEEK_V3_1.layers == 61


def test_heads_per_gpu():
    layouts = [ParallelLayout(1, 8), ParallelLayout(4, 2), ParallelLayout(8, 1)]
    models = (DEEPSEEK_V3_1, LONGCAT_FLASH_THINKING)
    heads = [model.heads_per_gpu(layout) for model in models for layout in layouts]
    assert heads == [16, 64, 128, 8, 32, 64]
    with pytest.raises(ValueError, match="tp must divide the 20 heads of GLM-4.7-Flash, got 8"):
        GLM_4_7_FLASH.heads_per_gpu(ParallelLayout(1, 8))


def test_weights_of_a_layout():
    """Expert weights do not depend on the attention's layout; the others shrink with tp, but not to 1/tp."""
    dp8, tp8 = ParallelLayout.parse("DP8/TP1"), ParallelLayout.parse("DP1/TP8")
    assert DEEPSEEK_V3_1.routed_weight_bytes(dp8) == DEEPSEEK_V3_1.routed_weight_bytes(tp8)
    replicated, shared = (DEEPSEEK_V3_1.resident_weight_bytes(layout) for layout in (dp8, tp8))
    assert replicated / 8 < shared < replicated / 4
    one = ParallelLayout(1, 1)
    assert DEEPSEEK_V3_1.weight_bytes(one) > DEEPSEEK_V3_1.total_parameters  # FP8, and some in BF16


def test_weights_read_grow_with_the_tokens_that_pick_experts():
    layout = ParallelLayout(8, 1)
    few, many = (DEEPSEEK_V3_1.decode_read_bytes(layout, tokens) for tokens in (1, 10_000))
    always = DEEPSEEK_V3_1.decode_read_bytes(layout, 0)
    routed = DEEPSEEK_V3_1.routed_weight_bytes(layout)
    assert few - always == pytest.approx(routed * 8 / 256)
    assert many - always == pytest.approx(routed)
    assert many < DEEPSEEK_V3_1.weight_bytes(layout)


def test_unknown_names():
    with pytest.raises(ValueError, match="model must be one of DeepSeek-V3.1, .*got 'DeepSeek-R2'"):
        get_model("DeepSeek-R2")
    with pytest.raises(ValueError, match="name such as DP8/TP1, got 'TP8'"):
        ParallelLayout.parse("TP8")
    with pytest.raises(ValueError, match="at least 1, got DP0/TP8"):
        ParallelLayout.parse("DP0/TP8")
    assert str(ParallelLayout.parse("DP4/TP2")) == "DP4/TP2"
    assert all(get_model(name).name == name for name in MODELS)

"""Other formats of the cache: what each stores, that rotations and shifts cost nothing by themselves, and the experiment."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pandas as pd
import pytest
import torch
import yaml
from paging import latents, queries
from safetensors.torch import save_file

from snapmla.experiments.ablation import contexts, crest_factor, spread
from snapmla.metrics import relative_l2
from snapmla.quantization import (
    CONFIGS,
    E4M3,
    E4M3_MAX,
    Quantized,
    dequantize,
    quantize_key,
    quantize_query,
    scale_from_amax,
)
from snapmla.reference import (
    ALGORITHM_1,
    KERNEL_FLOAT32_ADDS,
    Rules,
    attend,
    emulated_attention,
    exact_attention,
)
from snapmla.reference import alternatives as formats
from snapmla.reference.alternatives import ALTERNATIVES, Inputs

SCALE = 192**-0.5
CONF = Path(__file__).resolve().parent.parent / "conf"
BF16_STEP, E4M3_STEP, E5M2_STEP = (half / (1 + half) for half in (2.0**-8, 2.0**-4, 2.0**-3))
"""Largest relative errors of rounding: half of a last place, of a value just above a power of two."""


def inputs(
    keys: int = 300, *, mean: float = 0.0, rope: float = 1.0, dtype: torch.dtype = torch.bfloat16
) -> Inputs:
    """Gaussian latents around `mean`; five queries of four heads, each of which sees other keys."""
    content, rope_part = latents(keys, rope=rope)
    content = (content.float() + mean * torch.linspace(-1, 1, 512)).to(dtype)
    q = queries(1, 5, 4)[0].to(dtype)
    visible = torch.tensor([1, keys // 3, keys // 2, keys - 1, keys])
    return Inputs(q, content, rope_part.to(dtype), SCALE, visible, content.float().mean(0).to(dtype))


def exact(x: Inputs) -> torch.Tensor:
    return exact_attention(*x[:4], visible=x.visible)[0]


def error(name: str, x: Inputs) -> float:
    return relative_l2(ALTERNATIVES[name].attend(x), exact(x))


class TestRoundTrips:
    @pytest.mark.parametrize(
        ("quantize", "stored", "content_step", "rope_step"),
        [
            (quantize_key, E4M3, E4M3_STEP, BF16_STEP),
            (formats.power_of_two, E4M3, E4M3_STEP, 0.0),  # aligning RoPE to it is exact
            (formats.rope_e4m3, E4M3, E4M3_STEP, E4M3_STEP),
            (partial(quantize_key, config=CONFIGS["config_a"]), E4M3, E4M3_STEP, E4M3_STEP),
            (formats.e5m2, torch.float8_e5m2, E5M2_STEP, BF16_STEP),
        ],
        ids=["snapmla", "power_of_two", "rope_e4m3", "config_a", "e5m2"],
    )
    def test_floating_point_formats_round_relative_to_the_value(
        self, quantize, stored, content_step, rope_step
    ):
        content, rope = latents(400, rope=30.0)
        content[::7] *= 100
        found = quantize(content, rope)
        assert found.content.dtype == stored
        values = dequantize(found).double()
        for ours, value, step in (
            (values[:, :512], content.double(), content_step),
            (values[:, 512:], rope.double(), rope_step),
        ):
            large = value.abs() > value.abs().amax(-1, keepdim=True) / 1000  # above every format's subnormals
            relative = ((ours - value).abs() / value.abs())[large].max().item()
            assert relative == pytest.approx(step, rel=0.05)

    def test_int8_rounds_to_the_scale(self):
        content, rope = latents(400)
        content[::7] *= 100
        found = formats.int8(content, rope)
        assert found.content.dtype == torch.int8 and found.content.min() >= -127  # symmetric
        assert (found.content.abs().amax(-1) == 127).all()  # the largest value has the largest integer
        steps = (dequantize(found)[:, :512] - content.float()).abs() / found.scale[:, None]
        assert 0.49 < steps.max() < 0.501
        torch.testing.assert_close(dequantize(found)[:, 512:], rope.float(), rtol=BF16_STEP, atol=0)

    def test_groups_have_scales_of_their_own(self):
        content, _ = latents(50)
        together = formats.dequantized_groups(content)
        assert together.dtype == torch.bfloat16 and together.shape == content.shape
        louder = content.clone()
        louder[:, 128:256] *= 2.0**18
        apart = formats.dequantized_groups(louder)
        assert torch.equal(apart[:, :128], together[:, :128]) and torch.equal(
            apart[:, 256:], together[:, 256:]
        )
        assert torch.equal(apart[:, 128:256], together[:, 128:256] * 2.0**18)
        one_scale = dequantize(quantize_key(louder, torch.zeros(50, 64)))[:, :128]
        assert relative_l2(apart[:, :128], louder[:, :128]) < 0.05 < relative_l2(one_scale, louder[:, :128])

    def test_rope_has_a_scale_of_its_own(self):
        content, rope = latents(50)
        errors = [
            relative_l2(dequantize(formats.rope_e4m3(content, rope * size))[:, 512:], rope * size)
            for size in (1.0, 2.0**-20)
        ]
        assert errors[0] == pytest.approx(errors[1], rel=1e-3)
        shared = dequantize(quantize_key(content, rope * 2.0**-20, CONFIGS["config_a"]))[:, 512:]
        assert relative_l2(shared, rope * 2.0**-20) > 0.9

    def test_power_of_two_scales(self):
        """They are powers of two, at most twice the rule's scale, and never so small that a value would be clipped."""
        content, rope = latents(2000)
        content = content.float() * torch.logspace(-8, 8, 2000)[:, None]
        amax = content.abs().amax(-1)
        scale = formats.power_of_two(content, rope).scale
        mantissa, _ = torch.frexp(scale)
        assert (mantissa == 0.5).all()
        assert (amax / scale <= E4M3_MAX).all()
        assert (scale < 2 * scale_from_amax(amax)).all() and (scale >= scale_from_amax(amax)).all()
        exactly = torch.zeros(1, 512)
        exactly[0, 3] = E4M3_MAX / 4
        assert formats.power_of_two(exactly, rope[:1]).scale.item() == 0.25  # a power of two already
        exactly[0, 3] *= 1 + 2**-20
        assert formats.power_of_two(exactly, rope[:1]).scale.item() == 0.5

    @pytest.mark.parametrize(
        "quantize", [formats.power_of_two, formats.e5m2, formats.int8, formats.rope_e4m3]
    )
    def test_a_fault_shows_in_its_token_only(self, quantize):
        content, rope = latents(3)
        content[1, 5] = torch.nan
        values = dequantize(quantize(content, rope))
        assert values[1].isnan().all() and not values[[0, 2]].isnan().any()


def test_bytes_of_a_token():
    sizes = {name: found.bytes_per_token for name, found in ALTERNATIVES.items()}
    expected = {
        "bf16": 2 * 576,
        "groups": 512 + 4 * 4 + 128,
        "rope_e4m3": 512 + 64 + 8,
        "config_a": 512 + 64 + 4,
    }
    assert sizes == {**dict.fromkeys(ALTERNATIVES, 512 + 128 + 4), **expected}


class TestAttention:
    def test_snapmla_is_snapmla(self):
        """Also over keys that were quantized in several parts."""
        x = inputs(formats.KEYS_AT_ONCE + 77)
        for name, variant, rules in (
            ("bf16", "bf16", ALGORITHM_1),
            ("snapmla", "snapmla", ALGORITHM_1),
            ("snapmla_kernel", "snapmla", KERNEL_FLOAT32_ADDS),
            ("config_a", "config_a", ALGORITHM_1),
        ):
            ours = ALTERNATIVES[name].attend(x)
            assert torch.equal(ours, attend(variant, *x[:4], visible=x.visible, rules=rules))

    @pytest.mark.parametrize("name", ALTERNATIVES)
    def test_every_format_is_attention(self, name):
        x = inputs()
        out = ALTERNATIVES[name].attend(x)
        assert out.dtype == torch.float32 and out.shape == (5, 4, 512)
        assert 1e-4 < error(name, x) < 0.15
        changed = x._replace(content=x.content.clone())
        changed.content[x.visible[3] :] = 7.0  # the last query's alone
        assert torch.equal(ALTERNATIVES[name].attend(changed)[:4], out[:4])

    def test_errors_are_in_the_order_of_the_formats_bits(self):
        x = inputs()
        assert error("bf16", x) < error("int8", x) < error("snapmla", x) < error("e5m2", x)
        assert error("groups", x) < error("snapmla", x)

    def test_int8_suffers_from_outliers_and_e4m3_does_not(self):
        x = inputs()
        x.content[:, 17] = 60.0 * (-1.0) ** torch.arange(len(x.content))
        x.q[..., 17] = 0.0
        others = [column for column in range(512) if column != 17]

        def error_of(name: str) -> float:
            return relative_l2(ALTERNATIVES[name].attend(x)[..., others], exact(x)[..., others])

        assert error_of("int8") > 2 * error_of("snapmla")

    def test_running_maximum_loses_what_lies_far_below_it(self):
        """A block 20 bits below the one before, with values 2^15 times as large: 3% of the output."""
        content = torch.full((128, 512), 2.0**-6)
        content[64:] = 2.0**9 * 0.875
        key = Quantized(content, torch.zeros(128, 64), torch.ones(128))
        key.rope[64:, 0] = -20 * torch.log(torch.tensor(2.0))
        query = Quantized(torch.zeros(1, 1, 512), torch.zeros(1, 1, 64), torch.ones(1, 1))
        query.rope[..., 0] = 1.0
        exactly = 2.0**-6 + 448 * 2.0**-20
        by_block, running = (
            emulated_attention(query, key, 1.0, rules=rules)[0].mean().item()
            for rules in (ALGORITHM_1, formats.RUNNING_MAXIMUM)
        )
        assert by_block == pytest.approx(exactly, rel=1e-4)
        assert running == pytest.approx(2.0**-6, rel=1e-4)

    def test_uint8_probabilities_are_integers_up_to_255(self):
        """Weights of 1, 1/2 and 1/255 are exact; one of 1/600 vanishes."""
        weights = torch.tensor([1.0, 0.5 + 0.5 / 255, 1 / 255, 1 / 600])
        key = Quantized(torch.eye(4, 512) * 64, torch.zeros(4, 64), torch.ones(4))
        key.rope[:, 0] = weights.log()
        query = Quantized(torch.zeros(1, 1, 512), torch.zeros(1, 1, 64), torch.ones(1, 1))
        query.rope[..., 0] = 1.0
        out, lse = emulated_attention(query, key, 1.0, rules=formats.UINT8_P)
        expected = 64 * torch.tensor([1.0, 128 / 255, 1 / 255, 0.0]) / weights.sum()
        torch.testing.assert_close(out[0, 0, :4], expected, rtol=1e-5, atol=1e-6)
        assert lse.item() == pytest.approx(weights.sum().log().item(), abs=1e-5)

    def test_uint8_probabilities_suit_flat_attention_better_than_e4m3(self):
        x = inputs()._replace(softmax_scale=SCALE / 4)
        query, key = formats.int8(x.q[..., :512], x.q[..., 512:]), formats.int8(x.content, x.rope)
        unrounded, e4m3, uint8 = (
            emulated_attention(query, key, x.softmax_scale, visible=x.visible, rules=rules)[0]
            for rules in (Rules(p_rule="none"), ALGORITHM_1, formats.UINT8_P)
        )
        assert relative_l2(uint8, unrounded) < relative_l2(e4m3, unrounded) / 2


class TestChangesOfBasis:
    def test_hadamard_is_orthogonal_and_symmetric(self):
        matrix = formats.hadamard(512)
        torch.testing.assert_close(matrix @ matrix, torch.eye(512, dtype=torch.float64), rtol=0, atol=1e-12)
        assert torch.equal(matrix, matrix.T) and matrix.abs().unique().tolist() == pytest.approx([512**-0.5])
        assert formats.hadamard(1).item() == 1.0
        for size in (0, 384):
            with pytest.raises(ValueError, match=f"power of two, got {size}"):
                formats.hadamard(size)

    @pytest.mark.parametrize("change", [formats.rotated, formats.centered])
    def test_without_quantization_it_changes_nothing(self, change):
        x = inputs(mean=3.0, dtype=torch.float64)
        seen = []

        def remembering(changed: Inputs) -> torch.Tensor:
            seen.append(changed)
            return exact(changed)

        assert relative_l2(change(remembering)(x), exact(x)) < 1e-12
        assert relative_l2(seen[0].content, x.content) > 0.5  # it was another content
        torch.testing.assert_close(
            seen[0].content.square().sum(-1) > 0, torch.ones(len(x.content), dtype=torch.bool)
        )

    def test_a_rotation_spreads_an_outlier(self):
        x = inputs()
        x.content[:, 17] = 60.0
        seen = []
        formats.rotated(lambda changed: seen.append(changed) or exact(changed))(x)
        assert crest_factor(x.content) > 15 and crest_factor(seen[0].content) < 8

    def test_a_common_mean_costs_nothing_once_it_is_taken_off(self):
        x = inputs(mean=20.0)
        assert error("centered", x) < error("snapmla", x) / 2


def test_spread_takes_the_last():
    assert spread(40, 4).tolist() == [9, 19, 29, 39] and spread(3, 3).tolist() == [0, 1, 2]
    assert spread(8, 3).tolist()[-1] == 7 and len(set(spread(8, 3).tolist())) == 3
    for count in (0, 9):
        with pytest.raises(ValueError, match=f"from 1 to the 8 of the latents, got {count}"):
            spread(8, count)


def test_contexts_end_at_the_longest():
    assert contexts(1024, 32768) == [1024, 4096, 16384, 32768]
    assert contexts(256, 1024) == [256, 1024] and contexts(1024, 1024) == [1024]
    with pytest.raises(ValueError, match="from 1 to the latents' 512, got 1024"):
        contexts(1024, 512)


def test_crest_factor_is_the_median_tokens():
    content = torch.ones(5, 512)
    assert crest_factor(content) == pytest.approx(1.0)
    content[1:4] = torch.eye(3, 512)
    assert crest_factor(content.bfloat16()) == pytest.approx(512**0.5, rel=1e-3)


LAYERS, CONTEXT, QUERIES = 2, 512, 6


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> Path:
    """A results folder with the latents of two layers."""
    folder = tmp_path_factory.mktemp("results")
    (folder / "latents").mkdir()
    tensors = {"positions": torch.tensor([400, 420, 440, 460, 480, 511])}
    for layer in range(LAYERS):
        content, rope = latents(CONTEXT, seed=layer)
        query = queries(1, QUERIES, 2, seed=layer + 7)[0].contiguous()
        tensors |= {f"content.{layer}": content, f"rope.{layer}": rope, f"query.{layer}": query}
    save_file(tensors, folder / "latents" / "latents.safetensors")
    info = {"softmax_scale": SCALE, "layers": LAYERS, "context": CONTEXT}
    (folder / "latents" / "latents.json").write_text(json.dumps(info))
    return folder


class TestExperiment:
    @staticmethod
    def run(folder: Path, *overrides: str) -> subprocess.CompletedProcess:
        command = [sys.executable, "-m", "snapmla.experiments.ablation", f"results_dir={folder}", *overrides]
        environment = {**os.environ, "WANDB_MODE": "disabled"}
        return subprocess.run(command, env=environment, check=False, capture_output=True, text=True)

    def test_tables(self, results):
        done = self.run(results, "queries=3", "accumulation.shortest=64", "calibration=0.25")
        assert done.returncode == 0, done.stderr
        table = pd.read_csv(results / "ablation" / "ablation.csv")
        assert len(table) == LAYERS * len(ALTERNATIVES) and not table.drop(columns="gpu").isna().any().any()
        assert list(table["format"].unique()) == list(ALTERNATIVES)
        assert set(table["source"]) == {"measured"} and set(table["queries"]) == {3}
        errors = table.set_index(["format", "layer"])["relative_l2"]
        content, rope = latents(CONTEXT, seed=1)
        q = queries(1, QUERIES, 2, seed=8)[0][[1, 3, 5]]
        mean = content[: CONTEXT // 4].float().mean(0)
        x = Inputs(q, content, rope, SCALE, torch.tensor([421, 461, 512]), mean)
        lower = table.set_index(["format", "layer"])["queries_lower"]
        for name in ("int8", "centered"):
            assert errors[name, 1] == pytest.approx(error(name, x), rel=1e-5)
            single = [x._replace(q=x.q[i : i + 1], visible=x.visible[i : i + 1]) for i in range(3)]
            assert lower[name, 1] == sum(error(name, one) < error("snapmla", one) for one in single)
        assert lower["bf16", 0] == 3 and lower["snapmla", 0] == lower["e5m2", 0] == 0

        accumulated = pd.read_csv(results / "ablation" / "accumulation.csv")
        assert set(accumulated["layer"]) == {1} and set(accumulated["keys"]) == {64, 256, 512}
        assert set(accumulated["rule"]) == {"float32", "single", "promoted"} and len(accumulated) == 9
        last = accumulated.query("rule == 'float32' and keys == 256").iloc[0]
        window = q[-1:], content[-256:], rope[-256:], SCALE
        ours = attend("snapmla", *window, rules=KERNEL_FLOAT32_ADDS)
        assert last["relative_l2"] == pytest.approx(relative_l2(ours, exact_attention(*window)[0]), rel=1e-5)
        assert 1e-3 < last["relative_l2_quantized"] < last["relative_l2"] / 2

    @pytest.mark.parametrize(
        ("override", "sentence"),
        [
            ("formats=[snapmla,int4]", "formats must be among bf16, .*, got 'int4'"),
            ("formats=[bf16]", r"formats must include snapmla, .*, got \['bf16'\]"),
            ("accumulation={layer: 2, shortest: 64}", "accumulation.layer must be from 0 to 1, got 2"),
        ],
    )
    def test_bad_values_are_named(self, results, override, sentence):
        done = self.run(results, override)
        assert done.returncode == 1 and "Traceback" not in done.stderr
        assert re.search(sentence, done.stderr), done.stderr

    def test_the_configuration_names_every_format(self):
        settings = yaml.safe_load((CONF / "ablation.yaml").read_text(encoding="utf-8"))
        assert settings["formats"] == list(ALTERNATIVES)


def test_queries_are_quantized_as_by_the_library():
    """`quantized` gives queries to the same function as keys: one scale per head."""
    q = queries(1, 2, 4)[0]
    ours, theirs = (f(q[..., :512], q[..., 512:]) for f in (quantize_key, quantize_query))
    assert all(torch.equal(a.float(), b.float()) for a, b in zip(ours, theirs, strict=True))

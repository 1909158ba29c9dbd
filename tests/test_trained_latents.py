"""The experiments on a trained model's latents: probe -> latents -> distribution, fidelity, each as its
command.

The probe model is trained for a few seconds only: enough that its latents are a trained model's (norms,
directions, a RoPE part that rotates), not enough for its text.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from emulation import Call
from emulation import errors as kernel_errors
from paging import paged
from safetensors.torch import load_file

from snapmla import CONFIGS, LatentCache, decode_schedule, mla_decode_quantized, quantize_q
from snapmla.experiments.accumulation import flat_attention
from snapmla.experiments.distribution import round_trip_error, symlog_edges, value_range
from snapmla.experiments.fidelity import errors
from snapmla.metrics import relative_l2
from snapmla.quantization import quantize_key, quantize_query, to_e4m3
from snapmla.reference import SINGLE_ACCUMULATOR, VARIANTS, Rules, attend, emulated_attention, exact_attention

CONTEXT, QUERIES, LAYERS = 1024, 8, 3


def run(experiment: str, results: Path, *overrides: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", f"snapmla.experiments.{experiment}", f"results_dir={results}", *overrides],
        env={**os.environ, "WANDB_MODE": "disabled"},
        check=False,
        capture_output=True,
        text=True,
    )


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("results")
    sizes = (
        f"shape.layers={LAYERS}",
        *("phases.short.batch=2", "phases.short.steps=40", "phases.long.steps=0", "phases.longest.steps=0"),
        "evaluation={every: 40, sequence: 256, windows: 2}",
    )
    commands = (
        ("probe", *sizes),
        ("latents", f"context={CONTEXT}", f"queries={QUERIES}", "restart=256"),
        ("distribution",),
        ("fidelity", "accumulated_queries=4"),
    )
    for experiment, *overrides in commands:
        done = run(experiment, folder, *overrides)
        assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def latents(results) -> dict:
    return {
        **load_file(results / "latents" / "latents.safetensors"),
        **json.loads((results / "latents" / "latents.json").read_text()),
    }


def layer_of(latents: dict, layer: int):
    names = ("query", "content", "rope")
    return (*(latents[f"{name}.{layer}"] for name in names), latents["softmax_scale"])


@pytest.mark.parametrize("layer", range(LAYERS))
def test_emulation_against_exact_attention_on_trained_latents(latents, layer):
    arguments, visible = layer_of(latents, layer), latents["positions"] + 1
    exact = attend("exact", *arguments, visible=visible)
    bf16, fp8 = (relative_l2(attend(v, *arguments, visible=visible), exact) for v in ("bf16", "snapmla"))
    assert bf16 < 0.01 and bf16 < fp8 < 0.1
    q, content, rope, scale = arguments
    query, key = quantize_query(q[..., :512], q[..., 512:]), quantize_key(content, rope)
    lse = emulated_attention(query, key, scale, visible=visible)[1]
    exact_lse = exact_attention(*arguments, visible=visible)[1]
    torch.testing.assert_close(lse.double(), exact_lse, rtol=0, atol=0.02 * exact_lse.abs().max().item())


@pytest.mark.parametrize("layer", range(LAYERS))
def test_algorithm_1_is_exact_on_trained_latents_when_nothing_is_rounded(latents, layer):
    q, content, rope, scale = layer_of(latents, layer)
    query, key = quantize_query(q[..., :512], q[..., 512:]), quantize_key(content, rope)
    q, content, rope = q.double(), content.double(), rope.double()
    query = query._replace(
        content=q[..., :512] / query.scale[..., None], rope=q[..., 512:] / query.scale[..., None]
    )
    key = key._replace(content=content / key.scale[:, None], rope=rope / key.scale[:, None])
    visible = latents["positions"] + 1
    rules = Rules(p_rule="none")
    out, lse = emulated_attention(query, key, scale, visible=visible, rules=rules, dtype=torch.float64)
    exact, exact_lse = exact_attention(q, content, rope, scale, visible=visible)
    assert relative_l2(out, exact) < 1e-9
    torch.testing.assert_close(lse, exact_lse, rtol=0, atol=1e-9)


@pytest.mark.gpu
@pytest.mark.parametrize("sharpness", [1.0, 4.0])
@pytest.mark.parametrize("layer", range(LAYERS))
def test_the_kernel_on_trained_latents(latents, layer, sharpness):
    """As in test_gpu_decode.py, on values whose attention is peaked."""
    q, content, rope, scale = layer_of(latents, layer)
    sequences = paged([(content, rope)])
    paging = sequences.block_table.cuda(), sequences.cache_seqlens.cuda()
    query = quantize_q((q * sharpness).bfloat16()[None].cuda())
    call = Call(query, LatentCache(sequences.cache.buffer.cuda()), *paging, scale)
    schedule = decode_schedule(call.cache_seqlens, call.block_table, *query.scale.shape[1:])
    kernel_errors(call, *mla_decode_quantized(*call.arguments, schedule=schedule), schedule).check()


def test_queries_see_their_own_past_only(latents):
    """The latents' queries lie anywhere in the last quarter; `visible` is what makes them causal."""
    q, content, rope, scale = layer_of(latents, 0)
    position = int(latents["positions"][0])
    changed = content.clone()
    changed[position + 1 :] = 7.0
    visible = latents["positions"][:1] + 1
    for variant in ("exact", "bf16", "snapmla", "config_a", "config_b"):
        a, b = (attend(variant, q[:1], c, rope, scale, visible=visible) for c in (content, changed))
        assert torch.equal(a, b)
    more = attend("exact", q[:1], changed, rope, scale, visible=visible + 100)
    assert not torch.equal(attend("exact", q[:1], changed, rope, scale, visible=visible), more)


def test_fidelity_table(results, latents):
    table = pd.read_csv(results / "fidelity" / "layer_error.csv")
    assert len(table) == 2 * LAYERS * len(VARIANTS) and set(table["source"]) == {"measured"}
    assert set(table["config"]) == set(VARIANTS) and set(table["panel"]) == {"teacher_forced", "accumulated"}
    assert not table.drop(columns="gpu").isna().any().any() and (table["context"] == CONTEXT).all()
    kernels = pd.read_csv(results / "fidelity" / "kernels.csv").set_index(["config", "layer"])
    assert set(kernels.index) == {(variant, layer) for variant in VARIANTS for layer in range(LAYERS)}
    if torch.cuda.is_available():
        assert table["gpu"].nunique() == 1 and (kernels.loc["snapmla", "from_emulation"] < 2e-3).all()
    else:  # measured on the CPU, and no kernel
        assert table["gpu"].isna().all() and set(kernels["status"]) == {"not run"}
        assert set(kernels["reason"]) == {"no Hopper GPU"} and kernels["relative_l2"].isna().all()
    forced = table[table["panel"] == "teacher_forced"].set_index(["config", "layer"])
    for variant in ("bf16", *CONFIGS):
        arguments, visible = layer_of(latents, 1), latents["positions"] + 1
        expected = errors(
            attend(variant, *arguments, visible=visible), attend("exact", *arguments, visible=visible)
        )
        for metric, value in expected.items():
            assert forced.loc[(variant, 1), metric] == pytest.approx(value, rel=1e-6)
    # The first layer has no error to inherit; what accumulates shows behind it.
    accumulated = table[table["panel"] == "accumulated"].set_index(["config", "layer"])["relative_l2"]
    assert accumulated["snapmla", LAYERS - 1] > accumulated["bf16", LAYERS - 1]


def test_distribution_tables(results, latents):
    ranges = pd.read_csv(results / "distribution" / "ranges.csv").set_index(["layer", "part"])
    mse = pd.read_csv(results / "distribution" / "mse.csv").set_index(["layer", "part"])
    histogram = pd.read_csv(results / "distribution" / "histogram.csv")
    for part in ("content", "rope"):
        values = latents[f"{part}.2"].float()
        assert ranges.loc[(2, part), "absmax"] == pytest.approx(values.abs().max().item())
        assert ranges.loc[(2, part), "p50"] == pytest.approx(values.median().item(), abs=1e-2)
        assert mse.loc[(2, part), "mse"] == pytest.approx(round_trip_error(values)[0], rel=1e-6)
        bars = histogram[(histogram["layer"] == 2) & (histogram["part"] == part)]
        assert (bars["density"] * (bars["bin_high"] - bars["bin_low"])).sum() == pytest.approx(1)


def test_round_trip_error_is_e4m3s():
    exact = torch.tensor([[448.0, 7.0, -0.5], [0.0, 0.0, 0.0]])
    assert round_trip_error(exact)[0] == 0.0
    values = torch.tensor([[448.0, 17.0]])  # 17 is stored as 16
    assert round_trip_error(values) == (0.5, pytest.approx(0.5 / ((448**2 + 17**2) / 2)))


def test_value_range_and_bins():
    row = value_range(torch.arange(-100, 101).bfloat16())
    assert (row["min"], row["max"], row["p50"], row["absmax"]) == (-100, 100, 0, 100)
    edges = symlog_edges(100.0, 21, 0.01)
    assert edges[0] == pytest.approx(-100) and edges[-1] == pytest.approx(100)
    assert (np.diff(edges) > 0).all() and edges[10] == pytest.approx(-edges[11])


def test_a_split_resets_the_accumulator():
    content = to_e4m3(torch.full((4096, 32), 120.0) + torch.randn(4096, 32) * 16)
    exact = content.double().mean(0)
    whole, split = (relative_l2(flat_attention(content, SINGLE_ACCUMULATOR, n), exact) for n in (4096, 512))
    assert split < whole / 5


def test_missing_input_names_the_command(tmp_path):
    done = run("fidelity", tmp_path)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    sentence = done.stderr.splitlines()[-1]
    assert "latents/latents.json" in sentence and "python -m snapmla.experiments.latents" in sentence
    assert not (tmp_path / "fidelity").exists()


def test_bad_values_are_named(results):
    done = run("fidelity", results, f"accumulated_queries={CONTEXT}")
    assert done.returncode == 1 and f"accumulated_queries must be from 1 to {CONTEXT - 1}" in done.stderr
    done = run("fidelity", results, "variants=[config_e]")
    assert done.returncode == 1 and "'config_e'" in done.stderr

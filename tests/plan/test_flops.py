# SPDX-License-Identifier: Apache-2.0
"""Analytic FLOPs against PyTorch's own count of the operations that ran."""

from dataclasses import replace

import pytest
import torch
from diffusers.models.transformers.transformer_qwenimage import QwenImageTransformer2DModel
from peft import LoraConfig, get_peft_model
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tests.models.cases import PROMPTS, Loaded
from verl_digen.hardware.devices import PEAK_TFLOPS
from verl_digen.models import load_model
from verl_digen.models.flops import device_type, forward_flops, peak_flops, utilisation_metrics
from verl_digen.tools.plan.run import empty_condition
from verl_digen.types import Geometry

SIGMAS = torch.tensor([0.9, 0.95])


def count(loaded, geometry, scale):
    """(counted FLOPs, tokens of the longest prompt); attention runs as matrix products, which the counter counts."""
    conditions = loaded.encode(PROMPTS, geometry)
    latents = torch.randn(2, *loaded.model.latent_shape(geometry), generator=torch.Generator().manual_seed(0))
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        others = [{**condition} for condition in reversed(conditions)]  # rows of one prompt may take less
        loaded.model.velocity(loaded.transformer, latents, SIGMAS, conditions, others, scale, geometry)
    return counter.get_total_flops(), max(len(condition["embeds"]) for condition in conditions)


def test_rows_of_one_prompt_compute_its_tokens_once_where_the_network_lets_them(tmp_path):
    loaded = Loaded.tiny("qwen_image21", tmp_path / "c")
    geometry, (one,) = loaded.case.sizes[0], loaded.encode(PROMPTS[:1])
    latents = torch.zeros(4, *loaded.model.latent_shape(geometry))
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        loaded.model.velocity(loaded.transformer, latents, SIGMAS.repeat(2), [one] * 4, None, 1.0, geometry)
    row = forward_flops(loaded.model, loaded.transformer, geometry, len(one["embeds"]))
    # with one product per block, which gives the rows their prompt's keys and values
    gives = 2 * 2 * 4 * (row_tokens := len(one["embeds"]) + len(one["label1"]) + len(one["source"])) * 32 * 2
    assert 4 * row.among(4).forward + gives == pytest.approx(counter.get_total_flops(), rel=0.01)
    assert row_tokens > 20 and row.among(4).forward < 0.6 * row.forward == 0.6 * row.among(1).forward


@pytest.mark.parametrize(("size", "scale"), [(0, 3.0), (1, 1.0)])
def test_a_forward_is_counted_within_one_percent(loaded, size, scale):
    geometry = loaded.case.sizes[size]
    counted, tokens = count(loaded, geometry, scale)
    flops = forward_flops(loaded.model, loaded.transformer, geometry, tokens, num_rows=2, is_guided=scale > 1)
    assert flops.forward == pytest.approx(counted, rel=0.01)
    assert flops.attention > 0 and flops.linear > 0


def test_what_a_larger_picture_adds_is_counted(loaded):
    """Its own tokens alone, of which a small sample has so few that layers of another stream hide them."""
    small = loaded.case.sizes[0]
    counted, calculated = [], []
    for geometry in (small, replace(small, height_px=4 * small.height_px, width_px=4 * small.width_px)):
        flops, tokens = count(loaded, geometry, 1.0)
        counted.append(flops)
        calculated.append(forward_flops(loaded.model, loaded.transformer, geometry, tokens, num_rows=2).forward)
    assert calculated[1] - calculated[0] == pytest.approx(counted[1] - counted[0], rel=0.002)


@pytest.mark.parametrize("is_frozen", [False, True])
def test_training_a_deep_network_is_counted_within_two_percent(tiny_qwen_image, is_frozen):
    """Thirty blocks, so that the first layers, whose inputs need no gradient, matter as little as in the real model."""
    model = load_model(tiny_qwen_image)
    config = dict(model.read_config("transformer/config.json"), num_layers=30)
    network = QwenImageTransformer2DModel.from_config(config)
    network.requires_grad_(not is_frozen)
    for name, value in network.named_parameters():  # stand-in for an adapter: cheap, and in every block
        if name.endswith("norm_q.weight"):
            value.requires_grad_(True)
    geometry = Geometry(256, 256)  # many tokens, so that per-row work is negligible
    condition = empty_condition(model, 16, geometry)
    latents = torch.randn(2, *model.latent_shape(geometry))
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model.velocity(network, latents, SIGMAS, [condition] * 2, None, 1.0, geometry).sum().backward()
    flops = forward_flops(model, network, geometry, 16, num_rows=2)
    assert flops.training(is_frozen=is_frozen, recomputed=0.0) == pytest.approx(counter.get_total_flops(), rel=0.02)


def test_an_adapters_layers_count_too(tiny_qwen_image):
    model = load_model(tiny_qwen_image)
    bare = model.load_transformer(torch.float32, meta=True)
    before = forward_flops(model, bare, Geometry(64, 64), 4).linear
    adapted = get_peft_model(bare, LoraConfig(r=2, target_modules=["attn.to_q"]))  # type: ignore[arg-type]
    added = forward_flops(model, adapted, Geometry(64, 64), 4).linear - before
    num_tokens, num_layers, width, rank = 16, 2, 32, 2
    assert added == 2 * num_tokens * num_layers * (width * rank + rank * width)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA A100 80GB PCIe", "A100"),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H100 NVL", None),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA L40", None),
        ("NVIDIA GeForce RTX 4090", "RTX4090"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("NVIDIA RTX A6000", "A6000"),
        ("NVIDIA A10", "A10"),
        ("NVIDIA A10G", None),
        ("cpu", None),
    ],
)
def test_a_device_is_known_by_its_name_or_not_at_all(name, kind):
    assert device_type(name) == kind
    assert peak_flops(name) == (None if kind is None else PEAK_TFLOPS[kind] * 1e12)


def test_metrics_have_a_utilisation_only_where_the_peak_is_known():
    assert utilisation_metrics("trainer", 8e15, 2.0, 8, None) == {"perf/tflops_per_device/trainer": 500.0}
    known = utilisation_metrics("generator", 989e12, 2.0, 1, "NVIDIA H100 80GB HBM3")
    assert known == {"perf/tflops_per_device/generator": 494.5, "perf/mfu/generator": 0.5}
    assert utilisation_metrics("trainer", 8e15, 0.0, 8, None) == {}

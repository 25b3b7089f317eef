# SPDX-License-Identifier: Apache-2.0
"""fp8 outside the window: products of dequantised factors, exact steps inside, a network that is left as it was."""

from __future__ import annotations

import re
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from tests.engine.harness import LORA_TARGETS
from tests.training_rows import rows_of
from verl_digen.algorithms.outside import EXACT, Outside
from verl_digen.algorithms.window import Window
from verl_digen.inputs import PromptInputs
from verl_digen.models import load_model
from verl_digen.models.base import DiffusionModel
from verl_digen.models.flops import forward_flops
from verl_digen.models.published import checkpoint_folder
from verl_digen.sampling import fp8
from verl_digen.sampling.fp8 import LARGEST, Fp8Layers, require_fp8
from verl_digen.sampling.prefix_cache import PrefixCache, prefix_of
from verl_digen.sampling.recording import initial_seed
from verl_digen.sampling.sampler import Sampler, score_rows
from verl_digen.types import Condition, Geometry, SampleRequest, Sampling, Trajectory

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
NUM_STEPS, RUN_SEED = 8, 7
EIGHT = Sampling(Geometry(64, 64), NUM_STEPS, 1.0, "flow", 0.7, outside=Outside(fp8=True))
EXACTLY = replace(EIGHT, outside=EXACT)
EARLY, LATE = Window((1, 2), (1, 2)), Window((4, 5), (4, 5))
PUBLISHED = {
    "Qwen-Image": ("Qwen/Qwen-Image", 256),
    "FLUX.1-dev": ("black-forest-labs/FLUX.1-dev", 512),
    "Wan2.1-T2V-14B": ("Wan-AI/Wan2.1-T2V-14B-Diffusers", 512),
    "HunyuanVideo": ("hunyuanvideo-community/HunyuanVideo", 256),
}
"""Name in the documents' table -> checkpoint, tokens of a prompt."""


def requests(how: Sampling) -> list[SampleRequest]:
    """Two samples of each of two groups, whose windows differ."""
    return [
        SampleRequest(uid, index, PromptInputs("a red circle"), PromptInputs(" "), window, how)
        for uid, window in (("a", EARLY), ("b", LATE))
        for index in range(2)
    ]


def sample(
    model: DiffusionModel,
    network: nn.Module,
    condition: Condition,
    asked: list[SampleRequest],
    layers: Fp8Layers | None,
    **how: Any,
) -> tuple[list[Trajectory], Tensor]:
    sampler = Sampler(model, network, run_seed=RUN_SEED, device=CPU, latents_dtype=torch.float32, fp8=layers, **how)
    return sampler.sample(asked, [condition] * len(asked), None, version=0)


def dequantised(rows: Tensor) -> Tensor:
    """[N, K] rounded to e4m3 with a scale per row, by arithmetic of its own: 3 bits after the leading one, exponents
    from -6."""
    scale = rows.abs().amax(dim=1, keepdim=True) / LARGEST
    scaled = (rows / scale).double()
    exponent = scaled.abs().clamp(min=2.0**-9).log2().floor().clamp(min=-6)
    step = 2.0 ** (exponent - 3)
    return ((scaled / step).round() * step * scale).float()


@pytest.mark.parametrize("has_bias", [True, False])
def test_a_layer_multiplies_the_dequantised_factors(has_bias):
    torch.manual_seed(0)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(48, 32, bias=has_bias)
            self.odd = nn.Linear(48, 30)

    class Network(nn.Module):
        _repeated_blocks = ("Block",)

        def __init__(self):
            super().__init__()
            self.block, self.head = Block(), nn.Linear(48, 32)

    network, tokens = Network().requires_grad_(False), torch.randn(2, 5, 48) * torch.logspace(-3, 3, 5)[:, None]
    exact = [network.block.layer(tokens), network.block.odd(tokens), network.head(tokens)]
    layers = Fp8Layers(network)
    assert (layers.num_layers, layers.num_bytes) == (1, 48 * 32), "of a block, and of sizes that kernels take"
    with layers.active():
        found = [network.block.layer(tokens), network.block.odd(tokens), network.head(tokens)]
    expected = dequantised(tokens.reshape(-1, 48)) @ dequantised(network.block.layer.weight).T
    expected = expected.reshape(2, 5, 32) + (network.block.layer.bias if has_bias else 0)
    scale = expected.abs().amax(dim=2, keepdim=True)
    assert float(((found[0] - expected).abs() / scale).max()) < 2.0**-8, "bf16's rounding of the product"
    assert float(((found[0] - exact[0]).abs() / scale).max()) > 2.0**-8, "it is not the exact product"
    assert torch.equal(found[1], exact[1]) and torch.equal(found[2], exact[2])


def test_the_network_is_as_before_also_after_an_error(network):
    trained = deepcopy(network)
    layers = Fp8Layers(trained)
    with pytest.raises(KeyError), layers.active():
        raise KeyError("inside")
    assert not any("forward" in vars(module) for module in trained.modules())
    assert list(trained.state_dict()) == list(network.state_dict())


def test_steps_of_a_window_are_exact_whoever_shares_the_batch(model, network, condition):
    """Rows whose step is stochastic replay to their recorded log-probs; the pictures differ from exact ones."""
    together, latents = sample(model, network, condition, requests(EIGHT), Fp8Layers(network))
    _, exact = sample(model, network, condition, requests(EXACTLY), None)
    assert not torch.equal(latents, exact)
    assert float((latents - exact).norm() / exact.norm()) < 0.2
    pairs = [(n, k) for n in range(4) for k in range(2)]
    rows = rows_of(together, pairs, [condition] * 4, None)
    step, _ = score_rows(model, network, rows)
    torch.testing.assert_close(step.log_prob, rows.point.log_probs, atol=1e-5, rtol=0)
    for row, asked in enumerate(requests(EIGHT)):
        _, alone = sample(model, network, condition, [asked], Fp8Layers(network))
        torch.testing.assert_close(latents[row], alone[0], atol=2e-3, rtol=0)


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_the_gradient_is_that_of_exact_sampling_from_the_windows_first_latents(model, network, condition, kind):
    trained, layers = deepcopy(network).requires_grad_(True), None
    layers = Fp8Layers(trained)
    if kind == "lora":
        torch.manual_seed(0)
        config = LoraConfig(r=16, lora_alpha=8, target_modules=LORA_TARGETS, init_lora_weights=False)
        trained = get_peft_model(trained, config)  # type: ignore[arg-type] - a module
    asked = [replace(one, sampling=replace(EIGHT, shared_initial_noise=True)) for one in requests(EIGHT)]
    cheap, _ = sample(model, trained, condition, asked, layers)
    exactly = [replace(one, sampling=replace(one.sampling, outside=EXACT)) for one in asked]
    begins = PrefixCache()
    for one, trajectory in zip(exactly, cheap, strict=True):
        prefix = prefix_of(one, initial_seed(RUN_SEED, one))
        assert prefix is not None
        begins.keep(prefix, 0, trajectory.record.columns()["latents"][0])
    exact, _ = sample(model, trained, condition, exactly, None, prefixes=begins)
    other, _ = sample(model, trained, condition, exactly, None)

    def gradient(trajectories: list[Trajectory]) -> dict[str, Tensor]:
        rows = rows_of(trajectories, [(n, k) for n in range(4) for k in range(2)], [condition] * 4, None)
        trained.zero_grad()
        step, _ = score_rows(model, trained, rows)
        (-torch.linspace(-1, 1, 8) * (step.log_prob - rows.point.log_probs).exp()).mean().backward()
        return {name: one.grad.clone() for name, one in trained.named_parameters() if one.grad is not None}

    found, expected, apart = gradient(cheap), gradient(exact), gradient(other)
    scale = max(float(one.abs().max()) for one in expected.values())
    assert found.keys() == expected.keys() and scale > 1e-3
    for name, one in expected.items():
        torch.testing.assert_close(found[name], one, atol=min(1e-6, 1e-5 * scale), rtol=0)
    assert max(float((apart[name] - found[name]).abs().max()) for name in found) > 1e-4 * scale


def test_copies_follow_the_weights_once_they_are_cleared(model, network, condition):
    trained = deepcopy(network)
    layers = Fp8Layers(trained)
    _, before = sample(model, trained, condition, requests(EIGHT), layers)
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.mul_(1.05)
    layers.clear()
    _, after = sample(model, trained, condition, requests(EIGHT), layers)
    _, fresh = sample(model, trained, condition, requests(EIGHT), Fp8Layers(trained))
    assert torch.equal(after, fresh) and not torch.equal(after, before)


def test_a_generator_without_copies_says_so(model, network, condition):
    with pytest.raises(RuntimeError, match=r"digen\.sampling\.outside\.fp8 needs a generator with fp8 copies"):
        sample(model, network, condition, requests(EIGHT), None)


def test_what_cannot_multiply_in_fp8_is_refused(network, monkeypatch):
    require_fp8(Fp8Layers(network), CPU)
    with pytest.raises(
        ValueError, match=r"digen\.sampling\.outside\.fp8 must be false with a network .* 16, got True; set"
    ):
        require_fp8(Fp8Layers(odd_network()), CPU)
    with pytest.raises(
        ValueError, match=r"outside\.fp8 must be false on this device \(meta\), .*; set it to false, or"
    ):
        monkeypatch.setattr(fp8, "scaled_mm", refuse)
        require_fp8(Fp8Layers(network), torch.device("meta"))


@pytest.mark.long
@pytest.mark.parametrize("name", PUBLISHED)
def test_the_documents_say_what_fp8_can_save(name: str):
    page = (ROOT / "docs" / "algorithms" / "cheap_outside.md").read_text()
    found = re.search(rf"\| {name}, (\d+) x (\d+)(?:, (\d+) frames)? \| (\d+) % \| ([\d.]+).* \| ([\d.]+) GB \|", page)
    assert found is not None
    geometry = Geometry(*(int(number or 1) for number in found.groups()[:3]))
    path, num_tokens = PUBLISHED[name]
    with checkpoint_folder(path) as folder:
        model = load_model(folder)
        network = model.load_transformer(torch.bfloat16, meta=True)
    num_bytes, whole = Fp8Layers(network).num_bytes, forward_flops(model, network, geometry, num_tokens)
    remove_layers(network)
    share = (whole.linear - forward_flops(model, network, geometry, num_tokens).linear) / whole.forward
    said = float(found[4]) / 100, float(found[5]), float(found[6])
    assert said == (round(share, 2), round(1 - share / 2, 2), round(num_bytes / 1e9, 1))


def remove_layers(network: nn.Module) -> None:
    """Put nothing in the place of the layers that multiply in fp8."""
    layers = {id(layer) for layer in fp8._layers_of(network)}
    for parent in [*network.modules()]:
        for name, layer in [*parent.named_children()]:
            if id(layer) in layers:
                setattr(parent, name, nn.Identity())


def odd_network() -> nn.Module:
    class Odd(nn.Module):
        _repeated_blocks = ("Linear",)

        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(24, 24)

    return Odd()


def refuse(*args: Any, **how: Any) -> Tensor:
    raise NotImplementedError("no kernel of this device")

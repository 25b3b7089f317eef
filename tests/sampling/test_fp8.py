# SPDX-License-Identifier: Apache-2.0
"""fp8 outside the window: products of dequantised factors, exact steps inside, a network that is left as it was."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.training_rows import rows_of
from verl_digen.algorithms.outside import EXACT, Outside
from verl_digen.algorithms.window import Window
from verl_digen.inputs import PromptInputs
from verl_digen.models.base import DiffusionModel
from verl_digen.sampling import fp8
from verl_digen.sampling.fp8 import LARGEST, Fp8Layers, require_fp8
from verl_digen.sampling.sampler import Sampler, score_rows
from verl_digen.types import Condition, Geometry, SampleRequest, Sampling, Trajectory

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
NUM_STEPS, RUN_SEED = 8, 7
EIGHT = Sampling(Geometry(64, 64), NUM_STEPS, 1.0, "flow", 0.7, outside=Outside(fp8=True))
EXACTLY = replace(EIGHT, outside=EXACT)
EARLY, LATE = Window((1, 2), (1, 2)), Window((4, 5), (4, 5))


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


def odd_network() -> nn.Module:
    class Odd(nn.Module):
        _repeated_blocks = ("Linear",)

        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(24, 24)

    return Odd()


def refuse(*args: Any, **how: Any) -> Tensor:
    raise NotImplementedError("no kernel of this device")

# SPDX-License-Identifier: Apache-2.0
"""fp8 outside the window: products of dequantised factors, exact steps inside, a network that is left as it was."""

from copy import deepcopy
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn

from tests.sampling.runs import close, run
from verl_digen.algorithms.outside import EXACT, Outside
from verl_digen.algorithms.window import Window
from verl_digen.inputs.images import PromptInputs
from verl_digen.sampling import fp8
from verl_digen.sampling.fp8 import LARGEST, Fp8Layers, require_fp8
from verl_digen.types import Geometry, SampleRequest, Sampling

CPU = torch.device("cpu")
NUM_STEPS = 8
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
    assert (layers.layers, layers.num_bytes) == ([network.block.layer], 48 * 32), (
        "of a block, and of sizes that kernels take"
    )
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


def test_samples_are_close_to_exact_ones_and_depend_on_no_other_of_their_batch(model, network, condition):
    together = run(model, network, requests(EIGHT), condition, fp8=Fp8Layers(network)).latents
    exact = run(model, network, requests(EXACTLY), condition).latents
    assert 0 < float((together - exact).norm() / exact.norm()) < 0.2
    for row, asked in enumerate(requests(EIGHT)):
        close(together[row], run(model, network, [asked], condition, fp8=Fp8Layers(network)).latents[0], 2e-3)


def test_copies_follow_the_weights_once_they_are_cleared(model, network, condition):
    trained = deepcopy(network)
    layers = Fp8Layers(trained)
    before = run(model, trained, requests(EIGHT), condition, fp8=layers).latents
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.mul_(1.05)
    layers.clear()
    after = run(model, trained, requests(EIGHT), condition, fp8=layers).latents
    fresh = run(model, trained, requests(EIGHT), condition, fp8=Fp8Layers(trained)).latents
    assert torch.equal(after, fresh) and not torch.equal(after, before)


def test_a_generator_without_copies_says_so(model, network, condition):
    with pytest.raises(RuntimeError, match=r"digen\.sampling\.outside\.fp8 needs a generator with fp8 copies"):
        run(model, network, requests(EIGHT), condition)


def test_what_cannot_multiply_in_fp8_is_refused(network, monkeypatch):
    layers, odd = Fp8Layers(network), nn.Sequential(nn.Linear(24, 24))
    vars(odd)["_repeated_blocks"] = ("Linear",)
    require_fp8(layers, CPU)
    with pytest.raises(ValueError, match=r"outside\.fp8 must be false with a network .* 16, got True; set"):
        require_fp8(Fp8Layers(odd), CPU)
    monkeypatch.setattr(fp8, "scaled_mm", Mock(side_effect=NotImplementedError("no kernel of this device")))
    with pytest.raises(ValueError, match=r"fp8 must be false on this device \(meta\), .*; set it to false, or"):
        require_fp8(layers, torch.device("meta"))

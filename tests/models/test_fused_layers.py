# SPDX-License-Identifier: Apache-2.0
"""Layers of fewer kernels, against fp64 and against peft's and diffusers' own."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from diffusers.models.normalization import RMSNorm
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import Linear
from torch import Tensor, nn

from verl_digen.models.fused_layers import FusedNorm, LoraLinear, fuse_adapter
from verl_digen.models.kernels import Int8Linear, quantise


def adapted(dtype: torch.dtype, **settings: Any) -> Any:
    """Two layers with adapters of rank 8 and scale 1.5."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
    config = LoraConfig(r=8, lora_alpha=12, target_modules=["0", "2"], init_lora_weights=False, **settings)
    return get_peft_model(network, config).to(dtype)  # type: ignore[arg-type]


def run(network: Any, rows: Tensor) -> list[Any]:
    """Output, gradient of the rows and of each weight; without gradients the output is bitwise the same."""
    rows = rows.clone().requires_grad_()
    output = network(rows)
    with torch.no_grad():
        assert torch.equal(network(rows), output)
    output.square().sum().backward()
    return [output.detach(), rows.grad, *(weight.grad for weight in network.parameters() if weight.grad is not None)]


def errors(found: list[Any], exact: list[Any]) -> list[float]:
    return [((one - other).norm() / other.norm()).item() for one, other in zip(found, exact, strict=True)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_sum_is_nearer_to_fp64_than_pefts(dtype: torch.dtype):
    own = adapted(dtype)
    fused, exact = deepcopy(own), deepcopy(own).double()
    fuse_adapter(fused)
    rows = torch.randn(4, 50, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    expected = run(exact, rows.double())
    assert len(expected) == 6
    bounds = [max(error, 1e-6) for error in errors(run(own, rows), expected)]
    assert all(error <= bound for error, bound in zip(errors(run(fused, rows), expected), bounds, strict=True))


@pytest.mark.parametrize("case", ["dropout", "dora", "bias", "off", "other dtype", "int8 base"])
def test_other_adapters_compute_what_peft_computes(case: str):
    settings = {"dropout": {"lora_dropout": 0.5}, "dora": {"use_dora": True}, "bias": {"lora_bias": True}}
    own = adapted(torch.float32, **settings.get(case, {})).eval()
    if case == "int8 base":
        for layer in [layer.base_layer for layer in own.modules() if isinstance(layer, Linear)]:
            quantise(layer)  # type: ignore[arg-type]
    if case == "other dtype":
        for layer in own.modules():
            if isinstance(layer, Linear):
                layer.lora_A.double()
                layer.lora_B.double()
    fused = deepcopy(own)
    fuse_adapter(fused)
    assert any(type(layer) is LoraLinear for layer in fused.modules()) == (case not in settings)
    assert any(type(layer) is Int8Linear for layer in fused.modules()) == (case == "int8 base")
    for network in (own, fused):
        if case == "off":
            network.disable_adapter_layers()
    rows = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(run(fused, rows), run(own, rows), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("settings", [{}, {"bias": True}, {"elementwise_affine": False}])
@pytest.mark.parametrize("input_dtype", [torch.bfloat16, torch.float32])
def test_pytorchs_norm_rounds_once(settings: dict[str, bool], input_dtype: torch.dtype):
    """Weights in bf16. A weight in another dtype decides the output's, as in diffusers."""
    own = RMSNorm(64, 1e-6, **settings)
    for parameter in own.parameters():
        nn.init.normal_(parameter, mean=1.0, generator=torch.Generator().manual_seed(1))
    own = own.to(torch.bfloat16)
    rows = torch.randn(50, 64, generator=torch.Generator().manual_seed(0)).to(input_dtype)
    exact = rows.double() / (rows.double().square().mean(1, keepdim=True) + 1e-6).sqrt()
    for parameter, combine in zip(own.parameters(), (torch.mul, torch.add), strict=False):
        exact = combine(exact, parameter.double())
    expected = own(rows)
    own.__class__ = FusedNorm
    found = own(rows)
    assert found.dtype == expected.dtype
    assert (found - exact).square().mean() <= (expected - exact).square().mean()

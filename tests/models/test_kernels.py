# SPDX-License-Identifier: Apache-2.0
"""Attention kernels and compiled blocks of every architecture."""

from typing import Any

import pytest
import torch
from diffusers.models.normalization import RMSNorm
from torch import Tensor, nn
from torch.nn import functional

from tests.grid import in_grid
from tests.models.cases import CASES, PROMPTS, Loaded
from verl_digen.models import kernels
from verl_digen.models.checkpoint import networks_of
from verl_digen.models.fused_layers import FusedNorm, fuse_norms
from verl_digen.models.kernels import compute_exactly, repeated_blocks, set_kernels

ONE = (PROMPTS[0], PROMPTS[0], PROMPTS[0])


def run(loaded: Loaded, network: nn.Module, prompts: tuple[str, ...]) -> tuple[Tensor, dict[str, Tensor]]:
    """(velocity, gradients) of guided rows, one for each prompt."""
    model, geometry = loaded.model, loaded.case.sizes[0]
    start = torch.randn(len(prompts), *model.latent_shape(geometry), generator=torch.Generator().manual_seed(0))
    sigmas = torch.linspace(0.95, 0.93, len(prompts))
    network.zero_grad()
    negative = loaded.encode([" "] * len(prompts))
    found = model.velocity(network, start, sigmas, loaded.encode(prompts), negative, 3.0, geometry)
    found.square().mean().backward()
    named = network.named_parameters()
    return found.detach(), {name: parameter.grad for name, parameter in named if parameter.grad is not None}


def assert_same(found: tuple[Tensor, dict[str, Tensor]], expected: tuple[Tensor, dict[str, Tensor]]) -> None:
    torch.testing.assert_close(found[0], expected[0], atol=1e-5, rtol=1e-4)
    unused = found[1].keys() - expected[1].keys()  # zero from compiled code, none from the network itself
    assert expected[1].keys() <= found[1].keys() and not any(found[1][name].any() for name in unused)
    for name, gradient in expected[1].items():
        torch.testing.assert_close(found[1][name], gradient, atol=1e-4 * gradient.abs().max().item() + 1e-7, rtol=1e-3)


def test_a_kernel_can_be_chosen_where_the_network_asks_the_dispatcher(loaded: Loaded):
    network = loaded.model.load_transformer(torch.float32, meta=True)
    found = [module.processor for module in network.modules() if hasattr(module, "processor")]
    processors = [processor for processor in found if hasattr(processor, "_attention_backend")]
    assert found and loaded.model.spec.dispatches_attention == bool(processors)  # HunyuanVideo's refiner has none
    set_kernels(loaded.model, network, side="trainer", attention="_native_math", compiles=False)
    if loaded.model.spec.dispatches_attention:
        assert {processor._attention_backend.value for processor in processors} == {"_native_math"}
    set_kernels(loaded.model, network, side="trainer", attention="native", compiles=False)


def test_pytorchs_norms_compute_what_diffusers_own_do(loaded: Loaded):
    plain, network = loaded.model.load_transformer(torch.float32), loaded.model.load_transformer(torch.float32)
    fuse_norms(network)
    norms = [module for module in plain.modules() if type(module) is RMSNorm]
    assert sum(type(module) is FusedNorm for module in network.modules()) == len(norms)
    assert_same(run(loaded, network, PROMPTS), run(loaded, plain, PROMPTS))


def test_gradients_reach_attention_in_one_layout_per_shape(loaded: Loaded, monkeypatch: pytest.MonkeyPatch):
    """cuDNN would read those of a second layout at wrong places (`verl_digen/patches/attention_gradient.py`)."""
    layouts: dict[tuple[Any, ...], set[tuple[int, ...]]] = {}
    attend = functional.scaled_dot_product_attention

    def spy(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        found = attend(query, key, value, *args, **kwargs)
        plan = tuple((one.shape, one.stride()) for one in (query, key, value))
        if found.requires_grad:
            found.register_hook(lambda gradient: layouts.setdefault(plan, set()).add(gradient.stride()))
        return found

    network = loaded.model.load_transformer(torch.float32)
    set_kernels(loaded.model, network, side="trainer", attention="native", compiles=False)
    monkeypatch.setattr(functional, "scaled_dot_product_attention", spy)
    run(loaded, network, ONE[:1])
    assert layouts and all(len(strides) == 1 for strides in layouts.values()), layouts


@pytest.mark.gpu
def test_cudnn_reads_gradients_of_a_second_layout_at_wrong_places():
    """If this fails, `verl_digen/patches/attention_gradient.py` is no longer needed with this PyTorch."""
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("PyTorch prefers cuDNN's attention from Hopper on")
    queries = torch.randn(1, 144, 24, 64, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    gradient = torch.randn(1, 144, 5 * 24, 64, device="cuda", dtype=torch.bfloat16)[:, :, :24].transpose(1, 2)
    errors = []
    for each in (gradient.transpose(1, 2).contiguous().transpose(1, 2), gradient):  # the first one makes the plan
        found, exact = (
            _gradient_of_attention(queries.to(dtype), each.to(dtype)) for dtype in (torch.bfloat16, torch.float32)
        )
        errors.append(((found - exact).norm() / exact.norm()).item())
    assert errors[0] < 0.02 < 0.5 < errors[1]


def _gradient_of_attention(queries: Tensor, gradient: Tensor) -> Tensor:
    """Gradient [B, H, S, D] in fp64 of attention of `queries` to themselves."""
    leaf = queries.detach().requires_grad_()
    found = functional.scaled_dot_product_attention(leaf, leaf, leaf)
    return torch.autograd.grad(found, leaf, gradient)[0].double()


@pytest.mark.parametrize(
    ("dtype", "allowed", "precision"),
    [(torch.float32, False, "highest"), (torch.bfloat16, True, "high"), (torch.float16, True, "high")],
)
def test_fp32_is_computed_without_tf32_and_half_precision_as_before(monkeypatch, dtype, allowed, precision):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        compute_exactly(dtype)
        assert (torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision()) == (allowed, precision)
    finally:
        torch.set_float32_matmul_precision(before)


def test_texts_are_kept_apart_for_a_kernel_without_masks(loaded: Loaded):
    model = loaded.model
    if not model.spec.dispatches_attention:
        pytest.skip("no kernel can be chosen")
    network = model.load_transformer(torch.float32)
    expected = run(loaded, network, ONE)
    masked = network.zero_grad() or run(loaded, network, PROMPTS)[0]
    set_kernels(model, network, side="trainer", attention="_native_flash", compiles=False)
    try:
        assert_same(run(loaded, network, ONE), expected)
        if model.keeps_lengths_apart:
            with pytest.raises(RuntimeError, match="texts of one forward must be of one length"):
                run(loaded, network, PROMPTS)
        else:
            torch.testing.assert_close(run(loaded, network, PROMPTS)[0], masked, atol=1e-5, rtol=1e-4)
    finally:
        set_kernels(model, network, side="trainer", attention="native", compiles=False)


def test_blocks_that_are_compiled_hold_no_other_one(loaded: Loaded):
    network = loaded.model.load_transformer(torch.float32, meta=True)
    first: Any = network.get_submodule(loaded.model.experts[0]) if len(loaded.model.experts) > 1 else network
    blocks = repeated_blocks(first)
    names = {type(block).__name__ for block in blocks}
    assert blocks
    for block in blocks:
        assert [type(inner).__name__ for inner in block.modules() if type(inner).__name__ in names] == [
            type(block).__name__
        ]


OTHERS = ("flux_dev", "hunyuan_video", "hunyuan_video15", "qwen_image", "qwen_image21", "sd3", "wan2.2_a14b", "z_image")
"""Architectures whose compiled blocks are compared by hand."""


def compiled(case: str, compiler: str, folder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare a network with compiled blocks with an uncompiled one, for tiles of three shapes."""
    monkeypatch.setattr(kernels, "COMPILER", compiler)
    loaded = Loaded.tiny(case, folder)
    plain: Any = loaded.model.load_transformer(torch.float32)
    network: Any = loaded.model.load_transformer(torch.float32)
    names = list(network.state_dict())
    set_kernels(loaded.model, network, side="trainer", attention="native", compiles=True)
    assert list(network.state_dict()) == names
    for each in networks_of(network):
        each.enable_gradient_checkpointing()
    try:
        for prompts in (PROMPTS, ONE, PROMPTS[:1]):
            assert_same(run(loaded, network, prompts), run(loaded, plain, prompts))
        with torch.no_grad():  # weights change in place
            for parameter, own in zip(network.parameters(), plain.parameters(), strict=True):
                own.copy_(parameter.mul_(1.1))
        assert_same(run(loaded, network, PROMPTS), run(loaded, plain, PROMPTS))
    finally:
        torch._dynamo.reset()


@pytest.mark.long
@pytest.mark.parametrize("case", ["wan2.1", *in_grid(OTHERS)])
def test_compiled_blocks_compute_the_same(case: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch):
    compiled(case, "aot_eager", tmp_path / "m", monkeypatch)


@pytest.mark.long
@pytest.mark.grid
def test_compiled_blocks_compute_the_same_with_inductor(tmp_path: Any, monkeypatch: pytest.MonkeyPatch):
    compiled("sd3", "inductor", tmp_path / "m", monkeypatch)


@pytest.mark.long
@pytest.mark.grid
@pytest.mark.parametrize("case", [case.name for case in CASES])
def test_a_compiled_network_has_the_same_velocity_in_sampling_and_in_training(case: str, tmp_path: Any):
    loaded = Loaded.tiny(case, tmp_path / "m")
    model, geometry, (row, *_) = loaded.model, loaded.case.sizes[0], loaded.encode(PROMPTS[:1])
    network: Any = model.load_transformer(torch.bfloat16)
    set_kernels(model, network, side="trainer", attention="native", compiles=True)
    start = torch.randn(3, *model.latent_shape(geometry), generator=torch.Generator().manual_seed(0))

    def velocity() -> Tensor:
        return model.velocity(network, start, torch.linspace(0.95, 0.93, 3), [row] * 3, None, 1.0, geometry).detach()

    try:
        with torch.no_grad():
            sampled = velocity()
        assert torch.equal(velocity(), sampled)
        for each in networks_of(network):
            each.enable_gradient_checkpointing()
        assert torch.equal(velocity(), sampled)
    finally:
        torch._dynamo.reset()

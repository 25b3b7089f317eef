# SPDX-License-Identifier: Apache-2.0
"""The places where FSDP2 keeps a gradient. First to fail when PyTorch's private state changes. And the
projection of a gradient."""

import math
from itertools import product

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from tests.engine.harness import are_equal, full_gradient
from verl_digen.engine import gradients
from verl_digen.engine.fsdp2 import recover
from verl_digen.engine.gradients import project, signs
from verl_digen.hardware.torch_support import FSDP2_ACCUMULATES_IN_GRAD


def make_module(**policy: torch.dtype) -> nn.Module:
    """Two units and layers of the root; one layer is frozen."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    module[1].weight.requires_grad_(False)
    fully_shard(module[0], mp_policy=MixedPrecisionPolicy(**policy))
    fully_shard(module[1], mp_policy=MixedPrecisionPolicy(**policy))
    return fully_shard(module, mp_policy=MixedPrecisionPolicy(**policy))


def backward(module: nn.Module, seed: int, last: bool) -> None:
    rows = torch.randn(5, 3, generator=torch.Generator().manual_seed(seed))
    with gradients.reduced_at_end(module, last):
        module(rows).float().square().sum().backward()


@pytest.fixture(params=["fp32", "bf16 reduced in fp32"])
def policy(request: pytest.FixtureRequest) -> dict[str, torch.dtype]:
    return {} if request.param == "fp32" else {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}


def test_pending_gradient_is_reduced_without_a_backward(one_rank: None, policy: dict):
    module, other = make_module(**policy), make_module(**policy)
    for seed in range(3):
        backward(module, seed, last=False)
        backward(other, seed, last=seed == 2)
    assert full_gradient(module) == {}
    place = "accumulated" if policy and not FSDP2_ACCUMULATES_IN_GRAD else "unsharded"
    assert {key[1] for key in gradients.take(module)} == {place}  # and now it is gone
    for seed in range(3):
        backward(module, seed, last=False)
    gradients.reduce_pending(module)
    assert len(full_gradient(module)) == 5 and are_equal(full_gradient(module), full_gradient(other))
    gradients.reduce_pending(module)  # nothing is pending: nothing happens
    assert are_equal(full_gradient(module), full_gradient(other))


@pytest.mark.parametrize("last", [True, False])
def test_gradient_moved_aside_and_back_is_the_same(one_rank: None, policy: dict, last: bool):
    module, other = make_module(**policy), make_module(**policy)
    aside: gradients.Gradient = {}
    for seed in range(2):
        backward(module, seed, last)
        backward(other, seed, last)
        with gradients.exchanged(module, aside):
            backward(module, seed + 10, last)
            module(torch.zeros(1, 3))
    gradients.reduce_pending(module), gradients.reduce_pending(other)
    assert are_equal(full_gradient(module), full_gradient(other))
    gradients.put(module, aside), gradients.drop(other)
    gradients.reduce_pending(module)
    for seed in range(2):
        backward(other, seed + 10, last)
    gradients.reduce_pending(other)
    assert are_equal(full_gradient(module), full_gradient(other))


def test_gradients_in_different_places_are_added(one_rank: None, policy: dict):
    module = make_module(**policy)
    backward(module, 0, last=True)
    first = full_gradient(module)
    gradients.drop(module)
    backward(module, 1, last=False)
    pending = gradients.take(module)
    backward(module, 0, last=True)
    total = gradients.take(module)
    gradients.add_(total, pending)
    gradients.scale_(total, 0.5)
    gradients.put(module, total)
    gradients.reduce_pending(module)
    backward_of_one = make_module(**policy)
    backward(backward_of_one, 1, last=True)
    second = full_gradient(backward_of_one)
    for name, value in full_gradient(module).items():
        torch.testing.assert_close(value, (first[name] + second[name]) / 2, rtol=1e-6, atol=1e-6)


def test_drop_leaves_nothing_of_any_place(one_rank: None, policy: dict):
    module = make_module(**policy)
    backward(module, 0, last=True)
    backward(module, 1, last=False)
    gradients.drop(module)
    gradients.reduce_pending(module)
    assert gradients.take(module) == {} and full_gradient(module) == {}


def test_module_recovers_from_an_exception_half_way_and_keeps_its_gradient(one_rank: None):
    module, other = make_module(), make_module()
    recover(module)  # before any forward, too
    for seed in range(2):
        backward(module, seed, last=False)
        backward(other, seed, last=False)

    def fail(*unused: object) -> None:
        raise KeyError

    handle = module[1].register_full_backward_pre_hook(fail)
    held = gradients.take(module)
    with pytest.raises(KeyError):
        backward(module, 7, last=True)
    handle.remove()
    recover(module)
    gradients.put(module, held)
    backward(module, 2, last=True), backward(other, 2, last=True)
    assert are_equal(full_gradient(module), full_gradient(other))


def test_size_of_an_unreduced_gradient_counts_what_trains(one_rank: None, policy: dict):
    module = make_module(**policy)
    num_trained = sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
    assert gradients.unreduced_bytes(module) == 4 * num_trained
    assert gradients.unreduced_bytes(make_module(param_dtype=torch.bfloat16)) == 2 * num_trained


def test_the_projection_of_a_reversed_gradient_is_the_opposite_and_a_permuted_one_has_another(one_rank: None):
    module = make_module()
    backward(module, 0, last=True)
    found = gradients.projection(module)
    norm = torch.cat([value.reshape(-1) for value in full_gradient(module).values()]).norm().item()
    assert found == pytest.approx(sum(project(*named).item() for named in full_gradient(module).items()), rel=1e-5)
    assert abs(found) > 1e-2 * norm
    whole = gradients.take(module)
    gradients.scale_(whole, -1.0)
    gradients.put(module, whole)
    assert gradients.projection(module) == pytest.approx(-found, rel=1e-6)
    local = module[0].weight.grad.to_local()
    local.copy_(local.flip(0))
    assert abs(gradients.projection(module) + found) > 1e-2 * norm


def test_parameters_that_never_ran_do_not_stop_a_backward_that_waits(one_rank: None, policy: dict):
    """The second expert's, in the first tile. FSDP2 fails where gradients are cast before they are reduced."""

    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, inputs: Tensor) -> Tensor:
            return self.used(inputs)

    module = First()
    for part in (module.used, module.unused, module):
        fully_shard(part, mp_policy=MixedPrecisionPolicy(**policy))
    with gradients.reduced_at_end(module, False):
        loss = module(torch.ones(1, 2)).float().sum()
        gradients.exempt_unused(module)
        loss.backward()
    gradients.reduce_pending(module)
    assert module.used.weight.grad is not None and module.unused.weight.grad is None


def serial_projection(name, tensor):
    """Element by element, as the definition says."""
    of_axis = [signs(f"{name} {axis}", torch.arange(size)).tolist() for axis, size in enumerate(tensor.shape)]
    return sum(
        math.prod(signs_of[number] for signs_of, number in zip(of_axis, place, strict=True)) * tensor[place].item()
        for place in product(*map(range, tensor.shape))
    )


@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5), (4, 3, 2)], ids=str)
def test_the_projection_is_the_signed_sum_over_all_elements(shape):
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    assert project("w", tensor).item() == pytest.approx(serial_projection("w", tensor), abs=1e-5)


def test_blocks_cut_along_any_axis_add_up_to_the_whole_tensor():
    whole = torch.randn(7, 6, 5, generator=torch.Generator().manual_seed(1))
    blocks = [
        project("w", whole[a : a + 3, b : b + 4, c : c + 2], (a, b, c))
        for a in (0, 3, 6)
        for b in (0, 4)
        for c in (0, 2, 4)
    ]
    blocks.append(project("w", whole[7:], (7, 0, 0)))  # a rank without rows
    assert sum(blocks).item() == pytest.approx(project("w", whole).item(), abs=1e-5)


def test_a_permutation_or_a_changed_sign_or_name_changes_the_projection():
    tensor = torch.randn(64, 32, generator=torch.Generator().manual_seed(3))
    norm, expected = tensor.norm().item(), project("w", tensor).item()
    assert project("w", -tensor).item() == -expected
    for other in (tensor.flip(0), tensor.flip(1), tensor[torch.randperm(64)]):
        assert other.norm().item() == pytest.approx(norm, rel=1e-6)
        assert abs(project("w", other).item() - expected) > 1e-2 * norm
    assert abs(project("v", tensor).item() - expected) > 1e-2 * norm


def test_signs_are_balanced_and_uncorrelated_between_neighbours_and_names():
    count = 100_000
    found = {name: signs(name, torch.arange(count)) for name in ("a.weight", "b.weight", "a.bias")}
    bound = 5 / math.sqrt(count)
    for name, values in found.items():
        assert {*values.tolist()} == {-1.0, 1.0}
        assert abs(values.mean().item()) < bound
        for lag in (1, 2, 64, 1024, 4096):
            assert abs((values[lag:] * values[:-lag]).mean().item()) < bound, (name, lag)
        for other, others in found.items():
            assert other == name or abs((values * others).mean().item()) < bound


def test_the_projection_of_a_random_difference_is_as_large_as_its_norm():
    """Root mean square over many names, whose signs are independent."""
    difference = torch.randn(300, generator=torch.Generator().manual_seed(4))
    squares = [project(f"w{number}", difference).item() ** 2 for number in range(400)]
    assert math.sqrt(sum(squares) / 400) == pytest.approx(difference.norm().item(), rel=0.15)

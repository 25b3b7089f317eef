# SPDX-License-Identifier: Apache-2.0
import math
from itertools import product

import pytest
import torch

from verl_digen.engine.gradients import project, signs


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

# SPDX-License-Identifier: Apache-2.0
"""Choices made from free memory, on a fake device."""

from __future__ import annotations

import random

import pytest
import torch
from verl.plugin.platform import get_platform

from verl_digen.engine import memory


class Device:
    """Peaks of `base + rows * slope` bytes; the first tile leaves memory allocated, as gradients do."""

    def __init__(self, base: int, slope: int, left_behind: int = 0):
        self.base, self.slope, self.left_behind = base, slope, left_behind
        self.tiles: list[int] = []

    def peak_bytes(self, num_rows: int) -> int:
        self.tiles.append(num_rows)
        return self.base + num_rows * self.slope + (self.left_behind if len(self.tiles) > 1 else 0)


def test_rows_that_fit_do_and_one_more_would_not():
    rng = random.Random(0)
    for _ in range(200):
        device = Device(rng.randint(0, 50), rng.randint(1, 9), left_behind=rng.randint(0, 20))
        limit = rng.randint(1, 500)
        rows = memory.rows_that_fit(device.peak_bytes, limit)
        room = int(limit * (1 - memory.MARGIN))
        assert device.tiles == [1, 1, 2]
        assert rows == 1 or device.peak_bytes(rows) <= room
        assert device.peak_bytes(rows + 1) > room
        assert rows >= 1


def test_a_device_on_which_rows_cost_nothing_does_not_divide_by_zero():
    assert memory.rows_that_fit(lambda rows: 10, 100) == 1 + 80


@pytest.mark.parametrize(("gradient", "waits"), [(39, True), (40, True), (41, False)])
def test_gradients_wait_where_they_take_a_stated_share(gradient: int, waits: bool):
    assert memory.gradients_may_wait(gradient, free_bytes=100) is waits


def test_free_memory_of_a_cpu_is_shared_by_its_ranks():
    if get_platform().device_name != "cpu":
        pytest.skip("needs a machine without an accelerator")
    assert memory.free_bytes(4) == pytest.approx(memory.free_bytes(1) / 4, rel=0.2)


@pytest.mark.gpu
def test_measured_rows_fit_a_gpu():
    """A matmul chain whose activations are known: the prediction is within the margin."""
    weight = torch.randn(4096, 4096, device="cuda", requires_grad=True)

    def run(num_rows: int) -> None:
        rows = torch.randn(num_rows * 1024, 4096, device="cuda")
        (rows @ weight).relu().square().sum().backward()

    limit = torch.cuda.memory_allocated() + (2 << 30)
    rows = memory.rows_that_fit(lambda count: memory.peak_of(lambda: run(count)), limit)
    assert rows > 4
    assert memory.peak_of(lambda: run(rows)) <= limit

# SPDX-License-Identifier: Apache-2.0
"""Choices made from free memory, on a fake device."""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from verl.plugin.platform import get_platform

from verl_digen.engine import memory
from verl_digen.platforms import device_memory


class Device:
    """Peaks of `base + rows * slope` bytes, of which `kept` stay between tiles; the first tile leaves memory allocated,
    as workspaces do."""

    def __init__(self, base: int, slope: int, left_behind: int = 0):
        self.base, self.slope, self.left_behind = base, slope, left_behind
        self.tiles: list[int] = []

    def peak_bytes(self, num_rows: int) -> int:
        self.tiles.append(num_rows)
        return self.base + num_rows * self.slope + (self.left_behind if len(self.tiles) > 1 else 0)

    def kept_bytes(self) -> int:
        return self.base + self.left_behind


def test_rows_that_fit_do_and_one_more_would_not():
    rng = random.Random(0)
    for _ in range(200):
        device = Device(rng.randint(0, 50), rng.randint(1, 9), left_behind=rng.randint(0, 20))
        limit = rng.randint(1, 500)
        later = rng.choice([0, rng.randint(1, 50)])
        found = memory.measure_tiles(
            device.peak_bytes, limit, num_rows=64, kept_bytes=device.kept_bytes, later_bytes=later
        )
        rows = found.rows(0)
        room = int(limit * (1 - memory.MARGIN)) - later
        measured = list(device.tiles)
        doubled = [count for count in (2, 4, 8, 16, 32, 64) if device.peak_bytes(count) <= room]
        assert measured == [1, 1, *doubled]
        assert rows == 0 or device.peak_bytes(rows) <= room
        assert device.peak_bytes(rows + 1) > room


def test_a_device_on_which_rows_cost_nothing_does_not_divide_by_zero():
    assert memory.measure_tiles(lambda rows: 10, 100, num_rows=2, kept_bytes=int).rows(0) == 2 + 80


def test_a_peak_that_grows_faster_with_more_rows():
    """One row's peak is where a gradient of 60 bytes is made, beside 1 byte a row; from 16 rows on it is 5 a row."""
    tiles: list[int] = []

    def peak_bytes(rows: int) -> int:
        tiles.append(rows)
        return max(60 + rows, 5 * rows)

    assert memory.measure_tiles(peak_bytes, 1000, num_rows=500, kept_bytes=int).rows(0) == 900 // 5
    assert tiles == [1, 1, 2, 4, 8, 16, 32, 64, 128]
    assert memory.measure_tiles(peak_bytes, 1000, num_rows=3, kept_bytes=int).rows(0) > 3
    assert tiles[9:] == [1, 1, 2, 4]


def beside(device: Device, *theirs: list[int]) -> memory.TileMemory:
    """Measurement of a rank that has room for 31 rows, and of another one, which tells these values."""
    told = iter(theirs)

    def most(values: Sequence[int]) -> list[int]:
        return [max(pair) for pair in zip(values, next(told), strict=True)]

    return memory.measure_tiles(device.peak_bytes, 80, num_rows=2, kept_bytes=device.kept_bytes, most=most)


def test_what_one_rank_cannot_rehearse_none_does_and_the_fullest_one_decides():
    device = Device(10, 2)
    found = beside(device, [1], [-13, 10, 3])  # room for one row, and then for less
    assert device.tiles == [1, 1]
    assert found == memory.TileMemory(room=13, base=10, row=3) and found.rows(0) == 1
    found = beside(Device(10, 2), [0], [-50, 5, 4])
    assert found == memory.TileMemory(room=50, base=10, row=4) and found.rows(0) == 10


class Blocks:
    """Switch of a network whose blocks save so many bytes per row, by what a rehearsal sees of them."""

    def __init__(self, *seen: int):
        self.seen, self.num_blocks = seen, len(seen)

    @contextmanager
    def measured(self) -> Iterator[dict[int, int]]:
        yield dict(enumerate(self.seen))


def test_rows_by_blocks_that_are_not_recomputed():
    """Blocks take a tenth less than was seen. The last one is there anyway while it is recomputed."""
    blocks, tiles = Blocks(30, 20, 10, 10), []

    def peak_bytes(rows: int) -> int:
        tiles.append((rows, min(blocks.num_blocks, 4)))
        return 10 + rows * (5 + sum((27, 18, 9)[min(blocks.num_blocks, 4) :]))

    found = memory.measure_tiles(peak_bytes, 50, num_rows=2, kept_bytes=lambda: 10, blocks=blocks)
    assert tiles == [(1, 4), (1, 4), (2, 4), (1, 1)]  # 35 bytes are free: 5, and 30 of blocks 1 and 2
    assert found == memory.TileMemory(room=45, base=10, row=5, kept=(0, 9, 18, 27))
    assert [found.rows(number) for number in range(5)] == [0, 1, 2, 7, 7]


def test_nothing_is_rehearsed_where_nothing_can_be_kept():
    blocks, tiles = Blocks(30, 20), []

    def peak_bytes(rows: int) -> int:
        tiles.append(rows)
        return 10 + 30 * rows

    found = memory.measure_tiles(peak_bytes, 50, num_rows=2, kept_bytes=lambda: 10, blocks=blocks)
    assert tiles == [1, 1] and [found.rows(number) for number in range(3)] == [0, 1, 1]


@pytest.mark.parametrize(("gradient", "waits"), [(39, True), (40, True), (41, False)])
def test_gradients_wait_where_they_take_a_stated_share(gradient: int, waits: bool):
    assert memory.gradients_may_wait(gradient, free_bytes=100) is waits


def test_free_memory_of_a_cpu_is_shared_by_its_ranks():
    if get_platform().device_name != "cpu":
        pytest.skip("needs a machine without an accelerator")
    assert device_memory.free_bytes(4) == pytest.approx(device_memory.free_bytes(1) / 4, rel=0.2)


@pytest.mark.gpu
def test_measured_rows_fit_a_gpu():
    """A matmul chain whose activations are known: the prediction is within the margin."""
    weight = torch.randn(4096, 4096, device="cuda", requires_grad=True)

    def run(num_rows: int) -> None:
        rows = torch.randn(num_rows * 1024, 4096, device="cuda")
        (rows @ weight).relu().square().sum().backward()

    limit = torch.cuda.memory_allocated() + (2 << 30)
    rows = memory.measure_tiles(
        lambda count: device_memory.peak_of(lambda: run(count)),
        limit,
        num_rows=1000,
        kept_bytes=device_memory.allocated_bytes,
    ).rows(0)
    assert rows > 4
    assert device_memory.peak_of(lambda: run(rows)) <= limit

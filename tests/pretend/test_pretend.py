# SPDX-License-Identifier: Apache-2.0
"""The pretend device punishes what CUDA does, and nothing else."""

import pytest
import torch

from tests.pretend import copies
from tests.pretend.memory import memory
from tests.pretend.process import on_pretend
from tests.pretend.record import Record, recording


def _kinds(record: Record) -> list[str]:
    return sorted(kind for (kind, _), count in record.stalls.items() for _ in range(count))


def _mixing() -> None:
    here, there = torch.ones(3), torch.ones(3, device="pretend")
    assert (there.device.type, there.device.index) == ("pretend", 0)
    with pytest.raises(RuntimeError, match="two devices, pretend:0 and cpu!"):
        there + here
    with pytest.raises(RuntimeError, match="two devices"):
        torch.cat([there, here])
    with pytest.raises(RuntimeError, match="two devices"):
        here[0].add_(there[0])
    with pytest.raises(TypeError, match="can't convert"):
        there.numpy()
    with recording() as record:
        total = there * torch.tensor(2.0) + 1  # a scalar of the host mixes in elementwise operations
        total = torch.where(total > 0, total, 0.0)
    assert not record.stalls
    assert total.cpu().tolist() == [3.0, 3.0, 3.0]


def _stalls() -> None:
    pinned, mask = torch.ones(4).pin_memory(), torch.tensor([True, False, True, False])
    with recording() as record:
        there = pinned.to("pretend", non_blocking=True)
        torch.zeros(2, device="pretend").sum()
        there[1:3].mul_(2).clone()
        there.to("cpu", non_blocking=True)
        there.masked_fill_(there > 1, 0.0)
    assert not record.stalls and there.tolist() == [1.0, 0.0, 0.0, 1.0]
    for kind, stall in {
        "to device": lambda: torch.ones(4).to("pretend", non_blocking=True),  # pageable
        "to device ": lambda: pinned.to("pretend"),
        "to device  ": lambda: pinned.to("pretend", torch.float16, non_blocking=True),
        "to host": lambda: there.cpu(),
        "value": lambda: float(there.sum()),
        "value ": lambda: there.tolist(),
        "value  ": lambda: there.nonzero(),
        "index": lambda: there[(there > 0)],
        "index ": lambda: there[mask],
        "synchronize": lambda: torch.get_device_module("pretend").synchronize(),
    }.items():
        with recording() as record:
            stall()
        assert _kinds(record) == [kind.strip()], kind


def _late_copies() -> None:
    there = torch.arange(4.0, device="pretend")
    late = there.to("cpu", non_blocking=True)
    there.mul_(2)  # after the copy, in the stream
    assert late.is_pinned() and not torch.equal(late, torch.arange(4.0))
    torch.get_device_module("pretend").synchronize()
    assert torch.equal(late, torch.arange(4.0))
    buffer = copies.pin(torch.zeros(4))
    buffer.copy_(there, non_blocking=True)
    assert buffer.sum() != 12
    there.sum().item()  # waits for the device, so everything before it arrives
    assert buffer.sum() == 12


def _memory() -> None:
    device = torch.get_device_module("pretend")
    before = device.memory_allocated()
    with memory.limited(before + 1000):
        kept = torch.zeros(100, device="pretend")
        view = kept[10:]
        assert device.memory_allocated() == before + 400
        assert device.mem_get_info() == (600, before + 1000)
        with pytest.raises(torch.OutOfMemoryError):
            kept.repeat(2)
        del kept
        assert device.memory_allocated() == before + 400  # the view keeps the storage
        del view
        assert device.memory_allocated() == before
    device.reset_peak_memory_stats()
    torch.zeros(50, device="pretend").add(1)
    assert (device.memory_allocated(), device.max_memory_allocated()) == (before, before + 400)


SCENARIOS = (_mixing, _stalls, _late_copies, _memory)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__.strip("_"))
def test_the_device(scenario) -> None:
    on_pretend(scenario)

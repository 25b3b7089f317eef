# SPDX-License-Identifier: Apache-2.0
"""One forward or two for guidance, on a pretended device: the network takes 40 of 100 bytes."""

import pytest
import torch
from torch import Tensor

from tests.pretend_cuda import CAPACITY, FakeCuda
from verl_digen.config import RolloutConfig
from verl_digen.sampling.branches import GuidanceBranches

ACCELERATOR = torch.device("meta")


def choices(
    patch: pytest.MonkeyPatch, setting: bool | str, branch_bytes: int, device: torch.device, kinds: str
) -> list[bool]:
    """True per forward that was split, of batches of these kinds."""
    fake = FakeCuda()
    fake.put_in(patch)
    branches, found = GuidanceBranches(setting, device), []

    def forward(splits: bool) -> Tensor:
        fake.peak = max(fake.peak, fake.network + branch_bytes * (1 if splits else 2))
        assert fake.peak <= CAPACITY, "out of memory"
        found.append(splits)
        return torch.tensor(len(found))

    for number, kind in enumerate(kinds, start=1):
        assert branches.run(kind, forward) == number
    return found


def test_auto_measures_each_kind_of_batch_once_and_joins_branches_that_fit(monkeypatch: pytest.MonkeyPatch):
    """90 of 100 bytes may be used: two branches of 25 fit beside 40, and two of 26 do not."""
    assert choices(monkeypatch, "auto", 25, ACCELERATOR, "aabba") == [True, False, True, False, False]
    assert choices(monkeypatch, "auto", 26, ACCELERATOR, "aabba") == [True] * 5
    assert choices(monkeypatch, "auto", 45, ACCELERATOR, "aa") == [True] * 2


def test_auto_is_one_forward_on_a_cpu_and_a_setting_is_a_setting(monkeypatch: pytest.MonkeyPatch):
    cpu = torch.device("cpu")
    assert choices(monkeypatch, "auto", 25, cpu, "aa") == [False] * 2
    for device in (cpu, ACCELERATOR):
        assert choices(monkeypatch, True, 25, device, "aa") == [True] * 2
        assert choices(monkeypatch, False, 25, device, "aa") == [False] * 2


def test_another_setting_is_refused():
    with pytest.raises(ValueError, match=r"digen.rollout.split_guidance must be auto, true or false, got 'never'"):
        RolloutConfig(split_guidance="never")
    with pytest.raises(ValueError, match=r"digen.rollout.split_guidance must be auto, true or false, got 1"):
        RolloutConfig(split_guidance=1)

# SPDX-License-Identifier: Apache-2.0
"""The step cache against a slow reference, row by row."""

import random

import pytest
import torch
from torch import Tensor

from verl_digen.algorithms.step_cache import StepCache

SHAPE = (3, 4)
ODE = [False, False]


class SlowRow:
    """One row, with the whole list of what happened to it."""

    def __init__(self, threshold: float, max_skips: int):
        self.threshold, self.max_skips = threshold, max_skips
        self.events: list[tuple[str, float, int, Tensor | None]] = []

    def reuses(self, is_sde: bool, sigma: float, expert: int) -> bool:
        if is_sde:
            return False
        evaluations = [index for index, event in enumerate(self.events) if event[0] == "evaluated"]
        if len(evaluations) < 2:
            return False
        since = self.events[evaluations[-1] + 1 :]
        if any(event[0] == "disturbed" for event in since):
            return False
        if sum(event[0] == "reused" for event in since) >= self.max_skips:
            return False
        (_, first_sigma, _, first), (_, last_sigma, last_expert, last) = (self.events[n] for n in evaluations[-2:])
        if last_expert != expert:
            return False
        assert first is not None and last is not None
        change = (last.double() - first.double()).square().sum().sqrt() / last.double().square().sum().sqrt()
        return float(change) / (first_sigma - last_sigma) * (last_sigma - sigma) < self.threshold

    def last(self) -> Tensor:
        return next(event[3] for event in reversed(self.events) if event[0] == "evaluated")  # type: ignore[return-value]


@pytest.mark.parametrize(("threshold", "max_skips"), [(0.05, 1), (0.1, 2), (0.3, 3), (0.0, 2)])
def test_rows_decide_as_the_slow_reference_does_whatever_rows_are_beside_them(threshold, max_skips):
    generator, rng = torch.Generator().manual_seed(0), random.Random(0)
    num_reused = 0
    for _ in range(40):
        cache = StepCache(threshold, max_skips)
        slow = [SlowRow(threshold, max_skips) for _ in range(5)]
        velocity = torch.randn(5, *SHAPE, generator=generator)
        speed = torch.tensor([0.0, 0.1, 0.5, 1.0, 4.0]).view(-1, 1, 1)
        sigmas = sorted((rng.uniform(0.01, 1) for _ in range(12)), reverse=True)
        for step, sigma in enumerate(sigmas):
            gone = sigmas[step - 1] - sigma if step else 0.0
            velocity = velocity + gone * speed * torch.randn(5, *SHAPE, generator=generator)
            rows, expert = sorted(rng.sample(range(5), rng.randint(1, 5))), int(sigma < 0.4)
            is_sde = [rng.random() < 0.15 for _ in rows]
            reused = cache.reusable(rows, is_sde, sigma, expert)
            assert list(reused) == [slow[row].reuses(sde, sigma, expert) for row, sde in zip(rows, is_sde, strict=True)]
            again = [row for row, is_again in zip(rows, reused, strict=True) if is_again]
            fresh = [row for row in rows if row not in again]
            if again:
                taken = cache.take(again, [(row,) for row in again])
                assert torch.equal(taken, torch.stack([slow[row].last() for row in again]))
            cache.put([(row,) for row in fresh], velocity[fresh], sigma, expert)
            disturbed = [row for row, sde in zip(rows, is_sde, strict=True) if sde]
            cache.disturb(disturbed)
            for row in again:
                slow[row].events.append(("reused", sigma, expert, None))
            for row in fresh:
                slow[row].events.append(("evaluated", sigma, expert, velocity[row]))
            for row in disturbed:
                slow[row].events.append(("disturbed", sigma, expert, None))
            num_reused += len(again)
    assert (num_reused > 40) == (threshold > 0)


def test_rows_of_one_lane_know_what_the_first_of_them_evaluated():
    velocity = torch.ones(1, *SHAPE)
    cache = StepCache(0.1, 2)
    for sigma in (0.9, 0.8):
        cache.put([(0, 2)], velocity, sigma, 0)
    assert cache.reusable([0, 1, 2], [False] * 3, 0.7, 0) == (True, False, True)
    assert torch.equal(cache.take([0], [(0, 2)]), velocity)
    cache.take([2], [(2,)])
    assert cache.reusable([0, 2], ODE, 0.6, 0) == (True, False), "row 2 took it twice"


def test_a_velocity_that_does_not_change_is_taken_again_and_one_of_zero_is_not():
    cache = StepCache(0.1, 5)
    for sigma in (0.9, 0.8):
        cache.put([(0,), (1,)], torch.stack([torch.ones(SHAPE), torch.zeros(SHAPE)]), sigma, 0)
    assert cache.reusable([0, 1], ODE, 0.1, 0) == (True, False)

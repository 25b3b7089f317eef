# SPDX-License-Identifier: Apache-2.0
"""A reward that takes turns: when it is made, when it scores, and what it holds while it is asleep."""

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from tests.pretend.process import on_pretend
from tests.reward.samples import make_sample
from verl_digen.reward.base import NoSettings, Reward
from verl_digen.reward.scoring import BatchScorer
from verl_digen.types import RewardInput

QUEUE: dict[str, Any] = {
    "max_retries": 0,
    "timeout_s": 60.0,
    "max_batch_size": 4,
    "batch_wait_s": 0.0,
    "is_asleep": True,
}


class Watched(Reward):
    """Scores value / 100 and fails if that happens while it is asleep; a call waits for `go_on`."""

    def __init__(self) -> None:
        super().__init__(NoSettings(), torch.device("cpu"))
        self.events = ["made"]
        self.is_awake = True
        self.go_on = asyncio.Event()
        self.go_on.set()

    def sleep(self) -> None:
        super().sleep()
        self.is_awake = False
        self.events.append("sleep")

    def wake(self) -> None:
        super().wake()
        self.is_awake = True
        self.events.append("wake")

    async def score(self, batch: Sequence[RewardInput]) -> list[float]:
        assert self.is_awake, "a call began while the reward was asleep"
        self.events.append("score")
        await self.go_on.wait()
        assert self.is_awake, "the reward fell asleep during a call"
        return [int(sample.pixels[0, 0, 0]) / 100 for sample in batch]


def scorer_of(made: list[Watched]) -> BatchScorer:
    def make() -> Watched:
        made.append(Watched())
        return made[-1]

    return BatchScorer("r", make, **QUEUE)


async def idle() -> None:
    """Let every coroutine go on as far as it can; the queue's wait for further samples is 0 s."""
    for _ in range(50):
        await asyncio.sleep(0)


async def test_a_reward_is_made_by_the_first_wake_and_samples_wait_for_it():
    made: list[Watched] = []
    scorer = scorer_of(made)
    assert await scorer.sleep() is None, "it is asleep"
    asked = asyncio.create_task(scorer.score((make_sample(value=7),)))
    await idle()
    assert not asked.done() and not made
    turn = await scorer.wake()
    assert turn is not None and turn.start_s <= turn.end_s
    assert [score.value for score in await asked] == [0.07]
    assert await scorer.wake() is None, "it is awake"
    assert made[0].events == ["made", "score"] and len(made) == 1


async def test_a_sleep_waits_for_the_call_that_runs_and_starts_no_further_one():
    made: list[Watched] = []
    scorer = scorer_of(made)
    await scorer.wake()
    (reward,) = made
    reward.go_on.clear()
    asked = [asyncio.create_task(scorer.score((make_sample(value=value),))) for value in range(4)]
    while "score" not in reward.events:
        await asyncio.sleep(0)
    late = asyncio.create_task(scorer.score((make_sample(value=9),)))
    sleeping = asyncio.create_task(scorer.sleep())
    await idle()
    assert reward.is_awake and not sleeping.done()
    reward.go_on.set()
    await sleeping
    assert [(await one)[0].value for one in asked] == [0.0, 0.01, 0.02, 0.03]
    await idle()
    assert not late.done() and reward.events == ["made", "score", "sleep"]
    await scorer.wake()
    assert (await late)[0].value == 0.09


@pytest.mark.parametrize("seed", range(5))
async def test_whatever_the_order_every_sample_gets_its_score_and_none_is_scored_asleep(seed):
    rng, made = random.Random(seed), []
    scorer = scorer_of(made)
    asked = []
    for number in range(40):
        act = rng.choice(("wake", "sleep", "score", "score", "rest"))
        if act == "score":
            asked.append((number, asyncio.create_task(scorer.score((make_sample(value=number),)))))
        elif act == "rest":
            await asyncio.sleep(0.001)
        else:
            await (scorer.wake() if act == "wake" else scorer.sleep())
    await scorer.wake()
    assert [(await one)[0].value for _, one in asked] == [number / 100 for number, _ in asked]


class Helper:
    """Keeper of a reward's network."""

    def __init__(self, network: nn.Module):
        self._parts = {"networks": [network]}


class Picture(Reward):
    """Scores a picture with a network of its own and with one of its helper's."""

    def __init__(self, device: torch.device):
        super().__init__(NoSettings(), device)
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(48, 32), nn.Tanh(), nn.BatchNorm1d(32)).to(device).eval()
        self.helper = Helper(nn.Linear(32, 1).to(device))

    @torch.no_grad()
    def score(self, batch: Sequence[RewardInput]) -> list[float]:
        pixels = torch.stack([torch.from_numpy(sample.pixels).flatten().float() for sample in batch]).to(self.device)
        (head,) = self.helper._parts["networks"]
        return head(self.body(pixels)).flatten().cpu().tolist()


def test_a_reward_holds_the_modules_of_its_attributes_and_of_its_helpers_once():
    reward = Picture(torch.device("cpu"))
    reward.again = reward.body  # pyright: ignore[reportAttributeAccessIssue]
    assert reward.modules() == [reward.body, *reward.helper._parts["networks"]]


def sleeps_on_the_device() -> None:
    """Two rounds of turns of a reward on the pretend device; bytes are those of its ledger."""
    from tests.pretend.memory import memory

    start = memory.recount()
    samples = [make_sample(index, value=20 * index) for index in range(3)]
    made: list[Picture] = []

    def make() -> Picture:
        made.append(Picture(torch.device("pretend")))
        return made[-1]

    async def run() -> None:
        scorer = BatchScorer("r", make, **QUEUE)

        async def scores() -> list[float]:
            return [score.value for found in await asyncio.gather(*map(ask, samples)) for score in found]

        def ask(sample: RewardInput) -> Any:
            return scorer.score((sample,))

        turn = await scorer.wake()
        before = await scores()
        (reward,) = made
        tensors = [tensor for module in reward.modules() for tensor in module.state_dict().values()]
        num_bytes = sum(tensor.nbytes for tensor in tensors)
        del tensors
        assert num_bytes == 4 * (48 * 32 + 32 + 4 * 32 + 32 + 1) + 8 and memory.recount() - start == num_bytes
        assert turn is not None and turn.held_bytes == start + num_bytes
        for _ in range(2):
            turn = await scorer.sleep()
            assert memory.recount() == start, "asleep, the reward takes no byte of the device"
            assert turn is not None and turn.held_bytes == start
            await scorer.wake()
            assert memory.recount() - start == num_bytes and await scores() == before

    asyncio.run(run())


def test_sleep_frees_the_device_and_waking_restores_bitwise_equal_scores():
    on_pretend(sleeps_on_the_device)

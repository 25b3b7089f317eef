# SPDX-License-Identifier: Apache-2.0
"""One reward in its process: batches of what is queued, and failures of one sample among others."""

import asyncio
import io
import threading
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from PIL import Image

from tests.reward.contract import check_contract
from tests.reward.samples import make_sample
from verl_digen.config.reward import reward_entry
from verl_digen.reward.base import NoSettings, Reward, RewardUnavailable
from verl_digen.reward.functions import reward_of
from verl_digen.reward.named import BUILT_IN, find, make
from verl_digen.reward.scorers import jpeg_compressibility as jpeg
from verl_digen.reward.scoring import BatchScorer, ScoringError
from verl_digen.types import PartScore, RewardInput

BAD = 255
CPU = torch.device("cpu")


class Recorder(Reward):
    """Scores value / 100; a sample of value `BAD` fails its call. Records the sizes of calls."""

    def __init__(self, num_failures: int = 0, failure: Exception | None = None):
        super().__init__(NoSettings(), CPU)
        self.sizes: list[int] = []
        self.num_failures, self.failure = num_failures, failure or OSError("out of memory")

    def take_counts(self):
        return {"retries": len(self.sizes)}

    def score(self, batch: Sequence[RewardInput]):
        self.sizes.append(len(batch))
        if self.num_failures > 0:
            self.num_failures -= 1
            raise self.failure
        values = [int(sample.pixels[0, 0, 0]) for sample in batch]
        if BAD in values:
            return [float("nan") if value == BAD else value / 100 for value in values]
        return [{"score": value / 100, "raw": value, "is_dark": value < 50} for value in values]


class GroupRecorder(Recorder):
    scope = "group"


def scorer_of(reward: Reward, **settings: float) -> BatchScorer:
    given = {"max_retries": 2, "timeout_s": 60.0, "max_batch_size": 8, "batch_wait_s": 0.02} | settings
    return BatchScorer("r", lambda: reward, **given)  # type: ignore[arg-type]


def scores(scorer: BatchScorer, values: Sequence[int]) -> list[PartScore | BaseException]:
    """The outcomes of samples that arrive at the same time."""

    async def run() -> list[PartScore | BaseException]:
        asked = [scorer.score((make_sample(index, value=value),)) for index, value in enumerate(values)]
        found = await asyncio.gather(*asked, return_exceptions=True)
        return [one if isinstance(one, BaseException) else one[0] for one in found]

    return asyncio.run(run())


@pytest.mark.parametrize(("num_samples", "size"), [(96, 8), (97, 64), (1, 8), (9, 1)])
def test_samples_that_wait_together_make_as_few_calls_as_their_batches(num_samples, size):
    reward = Recorder()
    found = scores(scorer_of(reward, max_batch_size=size), range(num_samples))
    assert len(reward.sizes) == -(-num_samples // size) and sum(reward.sizes) == num_samples
    assert [one.value for one in found] == [number / 100 for number in range(num_samples)]  # type: ignore[union-attr]


def test_samples_of_one_call_share_its_facts_and_say_how_many_waited():
    found = scores(scorer_of(Recorder(), max_batch_size=2), [1, 2, 3])
    calls = [one.call for one in found]  # type: ignore[union-attr]
    assert calls[0] == calls[1] != calls[2]
    assert [(call.num_samples, call.num_queued) for call in calls] == [(2, 1), (2, 1), (1, 0)]
    assert calls[0].start_s <= calls[0].end_s <= calls[2].start_s
    assert found[0].details == {"raw": 1.0}  # type: ignore[union-attr]
    assert [call.counts for call in calls] == [(("retries", 1),), (("retries", 1),), (("retries", 2),)]


async def test_samples_that_arrive_during_a_call_wait_for_the_next_one_together():
    reward, began, go_on = Recorder(), threading.Event(), threading.Event()
    plain = reward.score

    def blocking(batch):
        began.set()
        go_on.wait(60)
        return plain(batch)

    reward.score = blocking  # type: ignore[method-assign]
    scorer = scorer_of(reward, max_batch_size=8, batch_wait_s=0.0)
    first = asyncio.create_task(scorer.score((make_sample(0),)))
    await asyncio.to_thread(began.wait, 60)
    others = [asyncio.create_task(scorer.score((make_sample(index),))) for index in range(1, 6)]
    await asyncio.sleep(0)
    go_on.set()
    await asyncio.gather(first, *others)
    assert reward.sizes == [1, 5]


async def test_a_caller_that_is_cancelled_while_it_waits_is_not_scored():
    reward = Recorder()
    scorer = scorer_of(reward, max_batch_size=2, batch_wait_s=0.0)
    asked = [asyncio.create_task(scorer.score((make_sample(value=value),))) for value in (1, 2, 3)]
    await asyncio.sleep(0)
    asked[0].cancel()
    found = await asyncio.gather(*asked[1:])
    assert [one.value for (one,) in found] == [0.02, 0.03] and reward.sizes == [2]


def test_a_sample_without_a_score_fails_alone():
    reward = Recorder()
    found = scores(scorer_of(reward), [1, BAD, 3])
    assert [one.value for one in (found[0], found[2])] == [0.01, 0.03]  # type: ignore[union-attr]
    assert isinstance(found[1], ScoringError) and "finite" in str(found[1])
    assert reward.sizes == [3, 1, 1], "the batch, then the bad one alone, twice"


def test_a_batch_that_fails_once_is_tried_again_sample_by_sample():
    reward = Recorder(num_failures=1)
    found = scores(scorer_of(reward, max_retries=0), [1, 2])
    assert [one.value for one in found] == [0.01, 0.02] and reward.sizes == [2, 1, 1]  # type: ignore[union-attr]


def test_a_batch_of_a_reward_that_is_not_available_is_tried_again_whole_and_fails_whole():
    reward = Recorder(2, RewardUnavailable("no server"))
    found = scores(scorer_of(reward), [1, 2, 3])
    assert [one.value for one in found] == [0.01, 0.02, 0.03] and reward.sizes == [3, 3, 3]  # type: ignore[union-attr]
    reward = Recorder(9, RewardUnavailable("no server"))
    found = scores(scorer_of(reward), [1, 2, 3])
    assert all(isinstance(one, ScoringError) and "no server" in str(one) for one in found) and reward.sizes == [3, 3, 3]


def test_a_bad_sample_fails_alone_after_its_batch_met_a_reward_that_was_not_available():
    reward = Recorder(1, RewardUnavailable("no server"))
    found = scores(scorer_of(reward, max_retries=1), [1, BAD, 3])
    assert [one.value for one in (found[0], found[2])] == [0.01, 0.03]  # type: ignore[union-attr]
    assert isinstance(found[1], ScoringError) and "finite" in str(found[1]) and reward.sizes == [3, 3, 1, 1, 1]


def test_a_group_is_one_call_whatever_the_batch_size_and_is_tried_again_whole():
    reward = GroupRecorder(num_failures=2)
    group = tuple(make_sample(index, value=index) for index in range(5))
    found = asyncio.run(scorer_of(reward, max_batch_size=2, batch_wait_s=1e9).score(group))
    assert [one.value for one in found] == [0.0, 0.01, 0.02, 0.03, 0.04] and reward.sizes == [5, 5, 5]
    with pytest.raises(ScoringError, match="'r' failed 3 times, last with OSError: out of memory"):
        asyncio.run(scorer_of(GroupRecorder(num_failures=9)).score(group))


def test_a_reward_that_returns_too_few_scores_fails_and_one_that_hangs_fails_after_the_time_limit():
    reward = Recorder()
    for returned, told in (([], "got 0 for 1"), (None, "got None for 1"), (0.5, "got 0.5 for 1")):
        reward.score = lambda batch, returned=returned: returned  # type: ignore[method-assign]
        (found,) = scores(scorer_of(reward, max_retries=0), [1])
        assert isinstance(found, ScoringError) and f"one score per sample, {told}" in str(found)

    async def hangs(batch):
        await asyncio.Event().wait()

    reward.score = hangs  # type: ignore[method-assign]
    (found,) = scores(scorer_of(reward, max_retries=0, timeout_s=0.05), [1])
    assert isinstance(found, ScoringError) and "digen.reward.timeout_s=0.05" in str(found)


def test_a_reward_that_awaits_what_it_has_cancelled_fails_and_the_next_sample_is_scored():
    class Cancelling(Recorder):
        async def score(self, batch: Sequence[RewardInput]):  # type: ignore[override]
            self.sizes.append(len(batch))
            if len(self.sizes) == 1:
                task = asyncio.create_task(asyncio.sleep(60))
                task.cancel()
                await task
            return [0.5] * len(batch)

    async def run() -> list[PartScore | BaseException]:
        scorer = scorer_of(Cancelling(), max_retries=0, max_batch_size=1)
        asked = (asyncio.wait_for(scorer.score((make_sample(index),)), 10) for index in range(2))
        found = await asyncio.gather(*asked, return_exceptions=True)
        return [one if isinstance(one, BaseException) else one[0] for one in found]

    failed, scored = asyncio.run(run())
    assert isinstance(failed, ScoringError) and "was cancelled" in str(failed)
    assert isinstance(scored, PartScore) and scored.value == 0.5


def test_a_sync_call_that_hangs_does_not_hold_up_the_next_one():
    reward, go_on = Recorder(), threading.Event()
    plain = reward.score

    def hangs_once(batch):
        reward.score = plain  # type: ignore[method-assign]
        go_on.wait(60)
        return plain(batch)

    reward.score = hangs_once  # type: ignore[method-assign]
    try:
        (found,) = scores(scorer_of(reward, timeout_s=1.0), [7])
    finally:
        go_on.set()
    assert isinstance(found, PartScore) and found.value == 0.07


def test_a_function_with_a_pool_is_called_once_per_sample_with_its_arguments():
    seen = []

    def compute_score(data_source, solution_image, ground_truth, extra_info=None, *, url):
        seen.append((data_source, solution_image.shape, ground_truth, extra_info, url))
        return float(solution_image[0, 0, 0])

    found = scores(scorer_of(reward_of(compute_score)({"url": "http://x"}, CPU)), [1, 2])
    assert [one.value for one in found] == [1.0, 2.0]  # type: ignore[union-attr]
    info = {"tag": "x", "prompt": "a cat", "images": []}
    assert seen == [("test", (4, 4, 3), "cat", info, "http://x")] * 2


@pytest.mark.parametrize("size", [None, 8])
@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda **sample: 1 / 0, "ZeroDivisionError"),
        (lambda **sample: float("nan"), "finite"),
        (lambda **sample: {"value": 1.0}, "'score'"),
        (lambda **sample: None, "reward 'r' must return a number or a dict with 'score', got None; return float(...)"),
        (lambda **sample: np.ones(2), "a dict with 'score', got array([1., 1.]); return float(...)"),
        (lambda **sample: {"score": "good"}, "a dict with 'score', got {'score': 'good'}; return float(...)"),
    ],
)
def test_a_function_that_keeps_failing_fails_the_sample_and_never_scores_zero(function, message, size):
    found = scores(scorer_of(reward_of(function)({}, CPU), max_batch_size=size), [1, 2])
    assert all(isinstance(one, ScoringError) and message in str(one) for one in found)
    assert f"'r' failed {3 if size is None else 2} times" in str(found[0])


def test_an_error_without_a_text_is_not_told_as_a_timeout():
    def asserts(**sample):
        raise AssertionError

    (found,) = scores(scorer_of(reward_of(asserts)({}, CPU)), [1])
    assert "AssertionError" in str(found) and "timeout_s" not in str(found)


async def test_functions_that_share_processes_are_called_at_once_and_get_arguments_of_their_own():
    async def until_both(solution_image, extra_info, **sample):
        solution_image[:] = 0
        extra_info["tag"] = "changed"
        begun.append(sample)
        while len(begun) < 2:
            await asyncio.sleep(0)
        return 1.0

    begun, sample = [], make_sample(value=7)
    scorer = scorer_of(reward_of(until_both)({}, CPU), max_batch_size=None)
    found = await asyncio.gather(*(scorer.score((sample,)) for _ in range(2)))
    assert [one.value for (one,) in found] == [1.0, 1.0]
    assert (sample.pixels == 7).all() and sample.row.extra == {"tag": "x"}


def test_every_built_in_reward_resolves_and_an_unknown_one_lists_them():
    assert all(callable(find(reward_entry(name, 1.0))) for name in BUILT_IN)
    with pytest.raises(ValueError, match=", ".join(sorted(BUILT_IN))) as failure:
        find(reward_entry("beauty", 1.0))
    assert "'beauty'" in str(failure.value)


def test_jpeg_compressibility_is_minus_kilobytes_over_500_at_quality_95():
    pixels = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="JPEG", quality=95)
    expected = -buffer.tell() / 1000 / 500
    assert jpeg.compute_score("x", pixels, None) == expected
    assert jpeg.compute_score("x", np.zeros_like(pixels), None) > expected


def test_a_video_compresses_as_well_as_its_frames_do_on_average():
    noisy = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    flat = np.zeros_like(noisy)
    apart = [jpeg.compute_score("x", frame, None) for frame in (noisy, flat)]
    assert jpeg.compute_score("x", np.stack([noisy, flat]), None) == pytest.approx(np.mean(apart))
    assert jpeg.compute_score("x", np.stack([noisy] * 5), None) == pytest.approx(apart[0]), "length does not count"


# -- built-in rewards without weights keep the contract of `contract.py`, which sees a reward that does not --
@pytest.mark.parametrize("name", ["jpeg_compressibility", "jpeg_incompressibility"])
def test_a_batch_is_its_samples_one_by_one(name):
    check_contract(make(reward_entry(name, 1.0), CPU))

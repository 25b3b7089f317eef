# SPDX-License-Identifier: Apache-2.0
import asyncio
import io

import numpy as np
import pytest
from PIL import Image

from verl_digen.config.reward import reward_entry
from verl_digen.reward.named import BUILT_IN, find
from verl_digen.reward.scorers import jpeg_compressibility as jpeg
from verl_digen.reward.scoring import Scorer, ScoringError, WeightedReward

SAMPLE = {"data_source": "x", "solution_image": np.zeros((8, 8, 3), np.uint8), "ground_truth": "y", "extra_info": {}}


def score(*rewards: WeightedReward, max_retries: int = 1, timeout_s: float = 60.0):
    return asyncio.run(Scorer(tuple(rewards), max_retries, timeout_s).score(**SAMPLE))


def test_the_reward_is_the_weighted_sum_and_each_function_is_reported_alone():
    async def asynchronous(**sample):
        return {"score": 0.5, "colour": 0.25, "comment": "not a number"}

    result = score(WeightedReward("a", lambda **sample: 2.0, 0.5), WeightedReward("b", asynchronous, 2.0))
    assert result.total == 0.5 * 2.0 + 2.0 * 0.5
    assert result.parts == {"a": 2.0, "b": 0.5, "b/colour": 0.25}


def test_a_function_that_fails_once_is_retried_and_its_answer_counts():
    calls = []

    def flaky(**sample):
        calls.append(1)
        if len(calls) == 1:
            raise OSError("connection lost")
        return 1.0

    assert score(WeightedReward("flaky", flaky, 1.0)).total == 1.0
    assert len(calls) == 2


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda **sample: 1 / 0, "ZeroDivisionError"),
        (lambda **sample: float("nan"), "finite"),
        (lambda **sample: {"value": 1.0}, "'score'"),
        (lambda **sample: None, "TypeError"),
    ],
)
def test_a_function_that_keeps_failing_fails_the_sample_and_never_scores_zero(function, message):
    with pytest.raises(ScoringError, match=message) as failure:
        score(WeightedReward("broken", function, 1.0), max_retries=2)
    assert "'broken' failed 3 times" in str(failure.value)


def test_a_function_that_hangs_fails_after_the_time_limit():
    async def hangs(**sample):
        await asyncio.Event().wait()

    with pytest.raises(ScoringError, match="timeout_s"):
        score(WeightedReward("slow", hangs, 1.0), max_retries=0, timeout_s=0.05)


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

# SPDX-License-Identifier: Apache-2.0
"""Sound of a video on its way to rewards of both kinds."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from omegaconf import OmegaConf

from tests.reward.samples import Handle, make_sample
from verl_digen.audio import Audio
from verl_digen.config import DigenConfig, RewardConfig
from verl_digen.reward.functions import call_arguments
from verl_digen.reward.manager import DiffusionRewardManager, RewardPoolWorker
from verl_digen.reward.sample_rewards import SHARED, SampleRewards

PAGE = Path(__file__).parents[2] / "docs" / "rewards.md"
LISTENERS = """
from verl_digen.reward.base import Reward


class Lasting(Reward):
    def score(self, batch):
        return [0.0 if one.audio is None else one.audio.waveform.shape[1] / one.audio.rate_hz for one in batch]


def peak(data_source, solution_image, ground_truth, extra_info=None):
    if "audio" not in extra_info:
        return -1.0
    return {"score": abs(extra_info["audio"].waveform).max(), "channels": len(extra_info["audio"].waveform)}
"""


@pytest.mark.parametrize(
    ("audio", "expected"),
    [(Audio(np.linspace(-0.75, 0.5, 60, dtype=np.float32).reshape(2, 30), 400), (30 / 400, 0.75)), (None, (0.0, -1.0))],
    ids=["sound", "silent"],
)
def test_a_class_and_a_function_get_the_waveform_and_its_rate(
    audio: Audio | None, expected: tuple[float, float], tmp_path: Path
) -> None:
    path = tmp_path / "listeners.py"
    path.write_text(LISTENERS)
    named = {"lasting": {"weight": 1.0, "reward": f"{path}:Lasting"}, "peak": {"weight": 2.0, "reward": f"{path}:peak"}}
    digen = DigenConfig(reward=RewardConfig(named))
    config = OmegaConf.create({"digen": {"reward": {"functions": named}}})

    async def run() -> Any:
        handles = {
            SHARED: [Handle(DiffusionRewardManager(config))],
            "lasting": [Handle(RewardPoolWorker(config, "lasting"))],
        }
        rewards = SampleRewards(handles, digen.reward.weights(has_custom=False), digen)
        return await rewards.score(replace(make_sample(), audio=audio), version=0, group_size=1)

    score, _ = asyncio.run(run())
    assert (score.parts["lasting"], score.parts["peak"]) == expected
    assert score.total == expected[0] + 2.0 * expected[1]
    assert audio is None or score.parts["peak/channels"] == 2


def test_the_function_of_the_page_measures_loudness_and_length() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text().split("\n## Sound\n")[1].split("\n## ")[0], re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(code, PAGE.name, "exec"), names)
    sample = replace(make_sample(), audio=Audio(np.full((2, 30), -0.5, np.float32), rate_hz=400))
    assert names["compute_score"](**call_arguments(sample)) == {"score": 0.5, "seconds": 30 / 400}

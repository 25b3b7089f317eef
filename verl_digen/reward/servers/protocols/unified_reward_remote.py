# SPDX-License-Identifier: Apache-2.0
"""UnifiedReward behind a pickle server, the old form of flow_grpo (`unifiedreward_score_remote` of its rewards.py).

POST of a pickle `{"images": [JPEG], "prompts": [str]}`; answer: a pickle `{"outputs": [score]}`. UnifiedReward behind
vLLM or SGLang is asked as a judge instead.
"""

from __future__ import annotations

from collections.abc import Sequence

from verl_digen.reward.base import Result
from verl_digen.reward.servers.answers import Answer, Request
from verl_digen.reward.servers.jpegs import JpegSettings, jpegs_of, pickled
from verl_digen.reward.servers.pickles import pickle_of
from verl_digen.reward.servers.protocol import Protocol
from verl_digen.reward.servers.values import entry_of, numbers_of
from verl_digen.types import RewardInput


class UnifiedRewardRemote(Protocol):
    """See the module."""

    settings = JpegSettings

    def request(self, batch: Sequence[RewardInput]) -> Request:
        """Encode pictures and prompts."""
        prompts = [sample.row.text for sample in batch]
        return pickled({"images": jpegs_of(batch, self.config.jpeg_quality), "prompts": prompts})

    def read(self, answer: Answer, batch: Sequence[RewardInput]) -> list[Result]:
        """Read `outputs`."""
        return [*numbers_of(entry_of(pickle_of(answer), "outputs"), len(batch), "outputs")]


PROTOCOL = UnifiedRewardRemote

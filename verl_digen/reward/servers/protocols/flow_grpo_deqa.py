# SPDX-License-Identifier: Apache-2.0
"""DeQA, picture quality, of flow_grpo's reward server (github.com/yifan123/reward-server, `app_deqa.py`, port 18086).

POST of a pickle `{"images": [JPEG]}`; answer: a pickle `{"outputs": [score]}`. Prompts do not matter.
"""

from __future__ import annotations

from collections.abc import Sequence

from verl_digen.reward.base import Result
from verl_digen.reward.servers.answers import Answer, Request, entry_of, numbers_of
from verl_digen.reward.servers.pickles import pickle_of
from verl_digen.reward.servers.protocol import JpegSettings, Protocol, jpegs_of, pickled
from verl_digen.types import RewardInput


class Deqa(Protocol):
    """See the module."""

    settings = JpegSettings

    def request(self, batch: Sequence[RewardInput]) -> Request:
        """Encode pictures."""
        return pickled({"images": jpegs_of(batch, self.config.jpeg_quality)})

    def read(self, answer: Answer, batch: Sequence[RewardInput]) -> list[Result]:
        """Read `outputs`."""
        return [*numbers_of(entry_of(pickle_of(answer), "outputs"), len(batch), "outputs")]


PROTOCOL = Deqa

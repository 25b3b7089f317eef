# SPDX-License-Identifier: Apache-2.0
"""UnifiedReward behind a pickle server, the old form of flow_grpo (`unifiedreward_score_remote` of its rewards.py).

POST of a pickle `{"images": [JPEG], "prompts": [str]}`; answer: a pickle `{"outputs": [score]}`. UnifiedReward behind
vLLM or SGLang is asked as a judge instead.
"""

from __future__ import annotations

from collections.abc import Sequence

from verl_digen.reward.servers.answers import Request
from verl_digen.reward.servers.protocol import jpegs_of, pickled
from verl_digen.reward.servers.protocols.flow_grpo_deqa import Deqa
from verl_digen.types import RewardInput


class UnifiedRewardRemote(Deqa):
    """See the module; an answer is as DeQA's."""

    def request(self, batch: Sequence[RewardInput]) -> Request:
        """Encode pictures and prompts."""
        prompts = [sample.row.text for sample in batch]
        return pickled({"images": jpegs_of(batch, self.config.jpeg_quality), "prompts": prompts})


PROTOCOL = UnifiedRewardRemote

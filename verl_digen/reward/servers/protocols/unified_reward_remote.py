# SPDX-License-Identifier: Apache-2.0
"""UnifiedReward behind a pickle server, the old form of flow_grpo (`unifiedreward_score_remote` of its rewards.py).

POST of a pickle `{"images": [JPEG], "prompts": [str]}`; answer: a pickle `{"outputs": [score]}`. UnifiedReward behind
vLLM or SGLang is asked as a judge instead.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from verl_digen.reward.servers.protocol import PickledJpegs
from verl_digen.types import RewardInput


class UnifiedRewardRemote(PickledJpegs):
    scores = "outputs"

    def payload(self, batch: Sequence[RewardInput]) -> Mapping[str, Any]:
        return {"prompts": [sample.row.text for sample in batch]}


PROTOCOL = UnifiedRewardRemote

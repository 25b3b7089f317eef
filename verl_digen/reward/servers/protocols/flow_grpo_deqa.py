# SPDX-License-Identifier: Apache-2.0
"""DeQA, picture quality, of flow_grpo's reward server (github.com/yifan123/reward-server, `app_deqa.py`, port 18086).

POST of a pickle `{"images": [JPEG]}`; answer: a pickle `{"outputs": [score]}`. Prompts do not matter.
"""

from verl_digen.reward.servers.protocol import PickledJpegs


class Deqa(PickledJpegs):
    scores = "outputs"


PROTOCOL = Deqa

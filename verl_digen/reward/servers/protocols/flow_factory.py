# SPDX-License-Identifier: Apache-2.0
"""Remote rewards of Flow-Factory (github.com/X-GenGroup/Flow-Factory, `rewards/my_reward_remote.py`).

- POST `/compute` of JSON `{"prompt": [str], "image": [base64 PNG] or null, "video": [[base64 PNG per frame]] or null,
  "condition_images": [[base64 PNG]] or null, "condition_videos": null, "extra": dict}`.
- Answer: JSON `{"rewards": [number]}` or the list alone; `{"error": str}` fails the samples.
"""

import json
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from verl_digen.reward.base import Result, base64_of, images_of
from verl_digen.reward.servers.answers import Declined, HttpRequest, entry_of, json_of, numbers_of
from verl_digen.reward.servers.protocol import Protocol, ProtocolSettings
from verl_digen.types import RewardInput


@dataclass(frozen=True)
class FlowFactorySettings(ProtocolSettings):
    extra: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the server's `compute_reward`."""


class FlowFactory(Protocol):
    settings = FlowFactorySettings
    takes_videos = True

    def kind(self, sample: RewardInput) -> Hashable:
        """Pictures and videos go separately, and so do prompts with and without images."""
        return sample.pixels.ndim, bool(sample.row.images)

    def request(self, batch: Sequence[RewardInput]) -> HttpRequest:
        frames = [[base64_of(image) for image in images_of(sample)] for sample in batch]
        is_video = batch[0].pixels.ndim == 4
        conditions = [[base64_of(image) for image in sample.sources()] for sample in batch]
        payload = {
            "prompt": [sample.row.text for sample in batch],
            "image": None if is_video else [one for (one,) in frames],
            "video": frames if is_video else None,
            "condition_images": conditions if batch[0].row.images else None,
            "condition_videos": None,
            "extra": self.config.extra,
        }
        return HttpRequest("/compute", json.dumps(payload).encode(), "application/json")

    def read(self, answer: bytes, batch: Sequence[RewardInput]) -> list[Result]:
        found = json_of(answer)
        if isinstance(found, Mapping) and found.get("error"):
            raise Declined(str(found["error"]))
        rewards = found if isinstance(found, list) else entry_of(found, "rewards")
        return [*numbers_of(rewards, len(batch), "rewards")]


PROTOCOL = FlowFactory

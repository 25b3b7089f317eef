# SPDX-License-Identifier: Apache-2.0
"""`server`: the score of a server that runs elsewhere; the server defines meaning and range.

    {my_geneval: {weight: 1.0, reward: server, protocol: flow_grpo_geneval, url: "http://host:18085"}}

Samples of a request that failed fail, with what came; there is no zero.
"""

import asyncio
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from verl_digen.require import settings_of
from verl_digen.reward.base import Result, Reward, frames_of
from verl_digen.reward.servers.client import ServerClient
from verl_digen.reward.servers.protocol import Protocol, ProtocolSettings
from verl_digen.reward.servers.protocols import find
from verl_digen.types import PromptRow, RewardInput


class ServerReward(Reward):
    config_class = ProtocolSettings

    @classmethod
    def settings(cls, arguments: Mapping[str, Any], key: str) -> Any:
        protocol = find(arguments.get("protocol", ""), f"{key}.protocol")
        return settings_of(cls.__name__, protocol.settings, arguments, key)

    @classmethod
    def check_row(cls, arguments: Mapping[str, Any], row: PromptRow) -> None:
        try:
            protocol = find(arguments.get("protocol", ""))
        except ValueError:  # `settings` refuses it
            return
        protocol.check_row(row)

    def __init__(self, config: Any, device: torch.device):
        super().__init__(config, device)
        self._protocol: Protocol = find(config.protocol)(config)
        self._client = ServerClient(config, f"protocol {config.protocol}")

    def take_counts(self) -> Mapping[str, int]:
        return self._client.take_counts()

    async def score(self, batch: Sequence[RewardInput]) -> Sequence[Result | Exception]:
        parts = [self._parts(sample) for sample in batch]
        found = iter(await self._ask([part for own in parts for part in own]))
        return [_mean([next(found) for _ in own]) for own in parts]

    def _parts(self, sample: RewardInput) -> list[RewardInput]:
        """The sample itself, or the frames of a video."""
        if sample.pixels.ndim == 3 or self._protocol.takes_videos:
            return [sample]
        frames = frames_of(sample.pixels, self.config.max_frames)
        return [RewardInput(frame, sample.row, sample.sample_index) for frame in frames]

    async def _ask(self, parts: Sequence[RewardInput]) -> list[Result | Exception]:
        """Ask the servers -> a score or an error per picture or video, once all requests are done."""
        kinds: dict[Hashable, list[int]] = defaultdict(list)
        for number, part in enumerate(parts):
            kinds[self._protocol.kind(part)].append(number)
        size = self.config.samples_per_request
        chunks = [of[start : start + size] for of in kinds.values() for start in range(0, len(of), size)]
        calls = [self._exchange([parts[number] for number in chunk]) for chunk in chunks]
        found: dict[int, Any] = {}
        for chunk, outcome in zip(chunks, await asyncio.gather(*calls, return_exceptions=True), strict=True):
            answers = [outcome] * len(chunk) if isinstance(outcome, BaseException) else outcome
            found.update(zip(chunk, answers, strict=True))
        return [found[number] for number in range(len(parts))]

    async def _exchange(self, batch: Sequence[RewardInput]) -> list[Result]:
        """Ask for one request's samples."""
        request = await asyncio.to_thread(self._protocol.request, batch)
        return await self._client.send(request, partial(self._protocol.read, batch=batch))


def _mean(parts: Sequence[Result | Exception]) -> Result | Exception:
    """Mean of score and details over frames; details that are no numbers stay out. The first error, if there is one."""
    for part in parts:
        if isinstance(part, Exception) or len(parts) == 1:
            return part
    scores: list[Mapping[str, Any]] = [part if isinstance(part, Mapping) else {"score": part} for part in parts]
    names = [name for name, value in scores[0].items() if isinstance(value, int | float)]
    return {name: sum(one[name] for one in scores) / len(scores) for name in names}


REWARD = ServerReward

# SPDX-License-Identifier: Apache-2.0
"""`server`: the score of a server that runs elsewhere; the server defines meaning and range.

    {my_geneval: {weight: 1.0, reward: server, protocol: flow_grpo_geneval, url: "http://host:18085"}}

- A batch is divided into requests of at most `samples_per_request`, which are in flight together.
- A video goes to a server of pictures as `max_frames` pictures; the sample's score and details are their means.
- Scores of equal pictures and prompts are kept (`cache_size`), so that what succeeded in a failed batch is not asked
  for again.
- Samples of a request that failed fail, with what came; there is no zero.
"""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from verl_digen.reward.base import Result, Reward, RewardUnavailable
from verl_digen.reward.pictures import frames_of
from verl_digen.reward.servers.answers import Failed, Refused, RefusedForAll
from verl_digen.reward.servers.cache import content_key
from verl_digen.reward.servers.client import ServerClient
from verl_digen.reward.servers.protocol import Later, Protocol, ProtocolSettings, Request
from verl_digen.reward.servers.protocols import find
from verl_digen.types import RewardInput, SampleLatents

Scores = Mapping[str, float]
"""`score` and details of one picture or video."""


class ServerReward(Reward):
    """See the module."""

    config_class = ProtocolSettings

    @classmethod
    def settings_class(cls, arguments: Mapping[str, Any]) -> type:
        """The settings of the protocol that the entry names."""
        return find(arguments.get("protocol", "")).settings

    @classmethod
    def reads_latents(cls, arguments: Mapping[str, Any]) -> bool:
        """True for protocols of latents."""
        return find(arguments.get("protocol", "")).reads_latents

    def __init__(self, config: Any, device: torch.device):
        super().__init__(config, device)
        self._protocol: Protocol = find(config.protocol)(config)
        self._client = ServerClient(config, f"protocol {config.protocol}")
        self._greeting = self._protocol.hello()
        """Request that the server has not answered yet."""

    def take_counts(self) -> Mapping[str, int]:
        """`retries`, `breaker_openings`, `cache_hits`."""
        return self._client.take_counts()

    async def close(self) -> None:
        """Close the connections. A process that ends does without."""
        await self._client.close()

    async def score(self, batch: Sequence[RewardInput]) -> Sequence[Result]:
        """Ask for what is not known yet."""
        parts = [self._parts(sample) for sample in batch]
        keys = [[self._key(part) for part in one] for one in parts]
        wanted = {key: part for one, own in zip(parts, keys, strict=True) for part, key in zip(one, own, strict=True)}
        known = {key: found for key in wanted if (found := self._client.cache.find(key)) is not None}
        known |= await self._ask({key: part for key, part in wanted.items() if key not in known})
        return [_mean([known[key] for key in own]) for own in keys]

    def _parts(self, sample: RewardInput) -> list[RewardInput]:
        """The sample itself, or the frames of a video."""
        if sample.pixels.ndim == 3 or self._protocol.takes_videos or self._protocol.reads_latents:
            return [sample]
        frames = frames_of(sample.pixels, self.config.max_frames)
        return [RewardInput(frame, sample.row, sample.sample_index) for frame in frames]

    def _key(self, part: RewardInput) -> bytes:
        row = part.row
        facts = json.dumps([row.text, row.images, row.extra], sort_keys=True, default=repr)
        latents = b"" if part.latents is None else _bytes_of(part.latents)
        return content_key(repr(self.config), facts, part.pixels, latents)

    async def _ask(self, wanted: Mapping[bytes, RewardInput]) -> dict[bytes, Scores]:
        """Ask the servers -> scores by key; raises the first error once all requests are done."""
        if wanted and self._greeting is not None:
            await self._greet(self._greeting)
            self._greeting = None
        kinds: dict[Hashable, list[bytes]] = defaultdict(list)
        for key, part in wanted.items():
            kinds[self._protocol.kind(part)].append(key)
        size = self.config.samples_per_request
        chunks = [keys[start : start + size] for keys in kinds.values() for start in range(0, len(keys), size)]
        asked = [self._exchange([wanted[key] for key in keys]) for keys in chunks]
        outcomes = await asyncio.gather(*asked, return_exceptions=True)
        known: dict[bytes, Scores] = {}
        errors: list[BaseException] = []
        for keys, outcome in zip(chunks, outcomes, strict=True):
            if isinstance(outcome, BaseException):
                errors.append(outcome)
                continue
            for key, result in zip(keys, outcome, strict=True):
                known[key] = result if isinstance(result, Mapping) else {"score": float(result)}
                self._client.cache.put(key, known[key])
        errors.sort(key=lambda error: isinstance(error, RewardUnavailable))  # those of single samples first
        if errors:
            raise errors[0]
        return known

    async def _greet(self, greeting: Request) -> None:
        try:
            await self._send(greeting, read=self._protocol.read_hello)
        except Refused as error:
            raise RefusedForAll(str(error)) from error

    async def _exchange(self, batch: Sequence[RewardInput]) -> list[Result]:
        """Ask for one request's samples, and again while the server wants time."""
        began_s = asyncio.get_running_loop().time()
        request = await asyncio.to_thread(self._protocol.request, batch)
        found = await self._send(request, read=partial(self._protocol.read, batch=batch))
        while isinstance(found, Later):
            passed_s = asyncio.get_running_loop().time() - began_s
            if passed_s + found.wait_s > found.deadline_s:
                raise Failed(f"{found.server}: {found.what} had no scores after {found.deadline_s} s")
            await asyncio.sleep(found.wait_s)
            found = await self._send(found.request, only=found.server, read=found.read)
        return found

    async def _send(self, request: Request, **options: Any) -> Any:
        if request.body is None:
            return await self._client.get(request.path, **options)
        return await self._client.post(
            request.path,
            request.body,
            content_type=request.content_type,
            headers=request.headers,
            accept=request.accept,
            **options,
        )


def _bytes_of(latents: SampleLatents) -> bytes:
    """Bytes of the latents; the condition follows from the prompt, which the key has."""
    return latents.final.contiguous().view(torch.uint8).numpy().tobytes()


def _mean(parts: Sequence[Scores]) -> Scores:
    """Mean of score and details over frames; details that are no numbers stay out."""
    if len(parts) == 1:
        return parts[0]
    names = [name for name, value in parts[0].items() if isinstance(value, int | float)]
    return {name: sum(part[name] for part in parts) / len(parts) for name in names}


REWARD = ServerReward

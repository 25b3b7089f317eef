# SPDX-License-Identifier: Apache-2.0
"""Reward service of cosmos-rl (github.com/nvidia-cosmos/cosmos-rl, `reward_service`, port 8080).

- POST `/api/reward/enqueue`: a line of JSON `{"media_type": "image", "prompts": [str], "reward_fn": {reward: weight}}`,
  then a .npy file, uint8 [B, H, W, 3]. Answer: JSON `{"uuid": str}`, with `replica_id` on Lepton.
- POST `/api/reward/pull` of a form `uuid`, `type` (the reward), for each reward: 400 until its scores are there, then
  `{"scores": {name: [number per picture]}, ...}`. With a `replica_id` the header X-Lepton-Replica-Target names it.
- POST `/api/reward/ping` of a form `info_data`, once before the first samples.

The service forgets the oldest jobs when more than 60 wait, without a word: after `job_timeout_s` a job has failed, and
its samples are tried again. Its rewards of videos (`cosmos_reason1`, `dance_grpo`) take latents of Wan2.1's VAE, which
a reward does not see, and `gen_eval` has a form of its own: these are refused. Details: `REWARD/SCORE`.
"""

from __future__ import annotations

import io
import json
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any
from urllib.parse import urlencode

import numpy as np

from verl_digen.require import In, require
from verl_digen.reward.base import Result
from verl_digen.reward.servers.answers import (
    Answer,
    Request,
    UnusableAnswer,
    entry_of,
    json_of,
    numbers_of,
    shown,
)
from verl_digen.reward.servers.protocol import Later, Protocol, WeightedSettings
from verl_digen.types import RewardInput

FORM = "application/x-www-form-urlencoded"
NOT_READY = 400
REFUSED = {
    "cosmos_reason1": "it takes latents of Wan2.1's VAE",
    "dance_grpo": "it takes latents of Wan2.1's VAE",
    "gen_eval": "it takes one picture per request in a form of its own; use protocol: flow_grpo_geneval",
}
"""Rewards of the service that cannot be asked for -> why."""


@dataclass(frozen=True)
class CosmosSettings(WeightedSettings):
    """Settings of `protocol: cosmos_rl`."""

    metrics: dict[str, str] = field(default_factory=lambda: {"ocr": "ocr_reward"})
    """Reward -> score that counts, where it has several and none of its own name."""
    poll_s: Annotated[float, In("(0, inf)")] = 1.0
    """Time between two questions for the scores of a job."""
    job_timeout_s: Annotated[float, In("(0, inf)")] = 200.0
    """Timeout of a job, from its first request on. Below `digen.reward.timeout_s`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.rewards:
            require(name not in REFUSED, f"rewards must not name {name}", name, REFUSED.get(name, ""))


@dataclass(frozen=True)
class _Job:
    """A job whose scores are being asked for."""

    uuid: str
    headers: Mapping[str, str]
    server: str
    num_samples: int
    found: Mapping[str, Mapping[str, list[float]]]
    """Reward -> score -> numbers."""


class Cosmos(Protocol):
    """See the module."""

    settings = CosmosSettings

    def hello(self) -> Request:
        """Ping."""
        info = json.dumps({"reward_fn": dict.fromkeys(self.config.rewards, 1.0)})
        return Request("/api/reward/ping", urlencode({"info_data": info}).encode(), FORM)

    def read_hello(self, answer: Answer) -> None:
        """Check that it is such a service."""
        json_of(answer)

    def kind(self, sample: RewardInput) -> Hashable:
        """Pictures of one request have one size."""
        return sample.pixels.shape

    def request(self, batch: Sequence[RewardInput]) -> Request:
        """Encode pictures of one size."""
        job = {
            "media_type": "image",
            "prompts": [sample.row.text for sample in batch],
            "reward_fn": dict.fromkeys(self.config.rewards, 1.0),  # the service leaves out weights of 0 and below
        }
        file = io.BytesIO()
        np.save(file, np.stack([sample.pixels for sample in batch]), allow_pickle=False)
        return Request("/api/reward/enqueue", json.dumps(job).encode() + b"\n" + file.getvalue())

    def read(self, answer: Answer, batch: Sequence[RewardInput]) -> Later:
        """Read the job's number."""
        found = json_of(answer)
        uuid, replica = entry_of(found, "uuid"), found.get("replica_id")
        is_plain = all(isinstance(one, str) and one.isascii() and one.isprintable() for one in (uuid, replica or ""))
        if not uuid or not is_plain:
            raise UnusableAnswer(f"uuid and replica_id must be plain text, got {shown(uuid)} and {shown(replica)}")
        headers = {"X-Lepton-Replica-Target": replica} if replica else {}
        return self._pull(_Job(uuid, headers, answer.url, len(batch), {}))

    def _pull(self, job: _Job) -> Later:
        """Ask for the first reward that is missing."""
        reward = next(name for name in self.config.rewards if name not in job.found)
        body = urlencode({"uuid": job.uuid, "type": reward}).encode()

        def read(answer: Answer) -> list[Result] | Later:
            if answer.status == NOT_READY:
                return self._pull(job)
            found = {**job.found, reward: _scores(json_of(answer), job.num_samples)}
            done = _Job(job.uuid, job.headers, job.server, job.num_samples, found)
            return self._results(done) if len(found) == len(self.config.rewards) else self._pull(done)

        return Later(
            Request("/api/reward/pull", body, FORM, job.headers, (NOT_READY,)),
            server=job.server,
            what=f"job {job.uuid} of {reward}",
            wait_s=self.config.poll_s,
            deadline_s=self.config.job_timeout_s,
            read=read,
        )

    def _results(self, job: _Job) -> list[Result]:
        return [
            self.config.result(
                {
                    reward: {name: numbers[place] for name, numbers in scores.items()}
                    for reward, scores in job.found.items()
                }
            )
            for place in range(job.num_samples)
        ]


def _scores(found: Any, num_samples: int) -> dict[str, list[float]]:
    """Lists of numbers under `scores`; some rewards have lists of words beside them."""
    scores = entry_of(found, "scores")
    if not isinstance(scores, Mapping):
        raise UnusableAnswer(f"scores must be a mapping, got {shown(scores)}")
    return {
        name: numbers_of(values, num_samples, f"scores.{name}")
        for name, values in scores.items()
        if not (isinstance(values, list) and values and all(isinstance(one, str) for one in values))
        and not isinstance(values, Mapping)
    }


PROTOCOL = Cosmos

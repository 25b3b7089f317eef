# SPDX-License-Identifier: Apache-2.0
"""`Protocol`: how a kind of reward server is asked, without I/O. A file NAME.py in `protocols/` defines

    PROTOCOL = a class of this one

and `digen.reward.functions={mine: {weight: 1.0, reward: server, protocol: NAME, url: ...}}` uses it. Its settings are
keys of the entry beside every server's.
"""

from __future__ import annotations

import math
import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from verl_digen.require import In, require
from verl_digen.reward.base import Result
from verl_digen.reward.pictures import encoded, images_of
from verl_digen.reward.servers.answers import Answer, Request, UnusableAnswer, scores_of
from verl_digen.reward.servers.pickles import pickle_of
from verl_digen.reward.servers.settings import ServerSettings
from verl_digen.types import PromptRow, RewardInput


@dataclass(frozen=True)
class ProtocolSettings(ServerSettings):
    """Settings of `reward: server`, whatever the protocol."""

    protocol: str = ""
    """Name of a file in `verl_digen/reward/servers/protocols/`."""
    samples_per_request: Annotated[int, In("[1, inf]")] = 64
    """Maximum pictures or videos of one request. A batch of more makes several requests, at the same time."""
    max_frames: Annotated[int, In("[1, inf]")] = 8
    """Frames of a video that a server of pictures gets, evenly spaced; the score is their mean."""


@dataclass(frozen=True)
class Later:
    """Reading result of an answer without scores: ask the same server again."""

    request: Request
    server: str
    """`Answer.url`."""
    what: str
    """Name of the job, for messages."""
    wait_s: float
    """Time to wait before."""
    deadline_s: float
    """Maximum time since the first request."""
    read: Callable[[Answer], list[Result] | Later]


class Protocol(ABC):
    """See the module. Samples that `request` gets together have the same `kind`."""

    settings: ClassVar[type[ProtocolSettings]] = ProtocolSettings
    takes_videos: ClassVar[bool] = False
    """False: a video arrives as several pictures."""
    reads_latents: ClassVar[bool] = False
    """True: `request` reads `RewardInput.latents`, of a whole video."""

    @classmethod
    def check_row(cls, row: PromptRow) -> None:
        """Raise ValueError if a prompt lacks what `request` sends of it."""
        return

    def __init__(self, config: Any):
        self.config = config

    def hello(self) -> Request | None:
        """Request that is sent once before the first samples, or None."""
        return None

    def read_hello(self, answer: Answer) -> None:
        """Check the answer to `hello`; raise `Declined` if the server cannot do what is configured."""
        return

    def kind(self, sample: RewardInput) -> Hashable:
        """Property that samples of one request must share."""
        return None

    @abstractmethod
    def request(self, batch: Sequence[RewardInput]) -> Request:
        """Encode samples. Runs in a thread."""

    @abstractmethod
    def read(self, answer: Answer, batch: Sequence[RewardInput]) -> list[Result] | Later:
        """Read one result per sample; raise `UnusableAnswer` or `Declined` if the answer has none."""


@dataclass(frozen=True)
class JpegSettings(ProtocolSettings):
    """Settings of protocols that send JPEG."""

    jpeg_quality: Annotated[int, In("[1, 100]")] = 75
    """Quality of the pictures that the server gets. 75 is what the clients of these servers send, by Pillow's default;
    published scores were made with it."""


class PickledJpegs(Protocol):
    """Servers that get a pickle with JPEG files, and answer with one that has `scores` per picture."""

    settings = JpegSettings
    scores: ClassVar[str]
    """Name of the scores in the answer."""

    def payload(self, batch: Sequence[RewardInput]) -> Mapping[str, Any]:
        """Entries beside `images`."""
        return {}

    def request(self, batch: Sequence[RewardInput]) -> Request:
        """Encode samples. Protocol 4 of pickles is read by Python 3.4 and newer."""
        images = [encoded(images_of(sample)[0], "JPEG", quality=self.config.jpeg_quality) for sample in batch]
        return Request("", pickle.dumps({"images": images, **self.payload(batch)}, protocol=4))

    def read(self, answer: Answer, batch: Sequence[RewardInput]) -> list[Result]:
        """Read the scores."""
        return [*scores_of(pickle_of(answer), self.scores, len(batch))]


@dataclass(frozen=True)
class WeightedSettings(ProtocolSettings):
    """Settings of services with several rewards, each with one or several scores per picture."""

    rewards: dict[str, float] = field(default_factory=dict)
    """Rewards of the service -> weights; the score is the weighted sum."""
    metrics: dict[str, str] = field(default_factory=dict)
    """Reward -> score that counts, where it has several and none of its own name."""

    def __post_init__(self) -> None:
        super().__post_init__()
        remedy = "name the server's rewards with their weights, e.g. rewards: {hpsv2: 1.0}"
        require(len(self.rewards) > 0, "rewards must name at least one reward of the server", {}, remedy)
        for name, weight in self.rewards.items():
            require(math.isfinite(weight), f"rewards.{name} must be a finite number", weight, remedy)

    def result(self, scores: Mapping[str, Mapping[str, float]]) -> Result:
        """Weighted sum of one picture's rewards, with `REWARD/SCORE` of each.

        Args:
            scores: reward -> score -> number.
        """
        total = sum(weight * self._main(scores[reward], reward) for reward, weight in self.rewards.items())
        details = {f"{reward}/{name}": value for reward, own in scores.items() for name, value in own.items()}
        return {**details, "score": total}

    def _main(self, scores: Mapping[str, float], reward: str) -> float:
        """The score that counts: the chosen one, else the one named like the reward, else the only one."""
        name = self.metrics.get(reward, reward)
        if name in scores:
            return scores[name]
        if reward not in self.metrics and len(scores) == 1:
            return next(iter(scores.values()))
        known = ", ".join(scores) or "no number at all"
        raise UnusableAnswer(f"{reward} must have the sub-score {name!r}, got {known}; name one in metrics.{reward}")

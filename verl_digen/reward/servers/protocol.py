# SPDX-License-Identifier: Apache-2.0
"""`Protocol`: how a kind of reward server is asked, without I/O. A class of this one is used with

    digen.reward.functions={mine: {weight: 1.0, reward: server, protocol: FILE.py:NAME, url: ...}}

Its settings are keys of the entry beside every server's.
"""

import pickle
from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from verl_digen.require import In
from verl_digen.reward.base import Result, encoded, images_of
from verl_digen.reward.servers.answers import HttpRequest, scores_of
from verl_digen.reward.servers.client import ServerSettings
from verl_digen.reward.servers.pickles import pickle_of
from verl_digen.types import PromptRow, RewardInput


@dataclass(frozen=True)
class ProtocolSettings(ServerSettings):
    protocol: str = ""
    """Name of a file in `verl_digen/reward/servers/protocols/`, or FILE.py:NAME."""
    samples_per_request: Annotated[int, In("[1, inf]")] = 64
    """Maximum pictures or videos of one request. A batch of more makes several requests, at the same time."""
    max_frames: Annotated[int, In("[1, inf]")] = 8
    """Frames of a video that a server of pictures gets, evenly spaced; the score is their mean."""


class Protocol(ABC):
    """How a kind of server is asked. Samples that `request` gets together have the same `kind`."""

    settings: ClassVar[type[ProtocolSettings]] = ProtocolSettings
    takes_videos: ClassVar[bool] = False
    """False: a video arrives as several pictures."""

    @classmethod
    def check_row(cls, row: PromptRow) -> None:
        """Raise ValueError if a prompt lacks what `request` sends of it."""
        return

    def __init__(self, config: Any):
        self.config = config

    def kind(self, sample: RewardInput) -> Hashable:
        """Property that samples of one request must share."""
        return None

    @abstractmethod
    def request(self, batch: Sequence[RewardInput]) -> HttpRequest:
        """Encode samples. Runs in a thread."""

    @abstractmethod
    def read(self, answer: bytes, batch: Sequence[RewardInput]) -> list[Result]:
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

    def request(self, batch: Sequence[RewardInput]) -> HttpRequest:
        """Encode samples. Protocol 4 of pickles is read by Python 3.4 and newer."""
        images = [encoded(images_of(sample)[0], "JPEG", quality=self.config.jpeg_quality) for sample in batch]
        return HttpRequest("", pickle.dumps({"images": images, **self.payload(batch)}, protocol=4))

    def read(self, answer: bytes, batch: Sequence[RewardInput]) -> list[Result]:
        return [*scores_of(pickle_of(answer), self.scores, len(batch))]

# SPDX-License-Identifier: Apache-2.0
"""`Protocol`: how a kind of reward server is asked, without I/O. A file NAME.py in `protocols/` defines

    PROTOCOL = a class of this one

and `digen.reward.functions={mine: {weight: 1.0, reward: server, protocol: NAME, url: ...}}` uses it. Its settings are
keys of the entry beside those of every server.
"""

from __future__ import annotations

import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from verl_digen.require import In
from verl_digen.reward.base import Result
from verl_digen.reward.pictures import encoded, images_of
from verl_digen.reward.servers.answers import Answer, Request
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


def jpegs_of(batch: Sequence[RewardInput], quality: int) -> list[bytes]:
    """One JPEG file per picture."""
    return [encoded(images_of(sample)[0], "JPEG", quality=quality) for sample in batch]


def pickled(payload: Mapping[str, Any]) -> Request:
    """POST of a pickle to the URL itself. Protocol 4 is read by Python 3.4 and newer."""
    return Request("", pickle.dumps(dict(payload), protocol=4))

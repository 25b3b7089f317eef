# SPDX-License-Identifier: Apache-2.0
"""Protocols that POST a pickle with JPEG files and get a pickle back."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from verl_digen.require import In
from verl_digen.reward.pictures import encoded, images_of
from verl_digen.reward.servers.answers import Request
from verl_digen.reward.servers.protocol import ProtocolSettings
from verl_digen.types import RewardInput


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

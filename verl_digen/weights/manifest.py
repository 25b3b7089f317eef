# SPDX-License-Identifier: Apache-2.0
"""What the sender of a weight update says of it when everything is sent."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Manifest:
    """Written by the sending rank, read by whoever loads the update."""

    version: int
    """Weight version it makes."""
    num_tensors: int
    checksum: int
    """`verl_digen.weights.checksum` over all tensors as they were sent."""

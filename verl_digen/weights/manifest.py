# SPDX-License-Identifier: Apache-2.0
"""Manifest of a weight update, written by the sender after the last tensor."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Manifest:
    """Summary of the tensors sent. Written by the sending rank, read by the engine workers that load the update."""

    version: int
    """Weight version of the update."""
    num_tensors: int
    checksum: int
    """`verl_digen.weights.checksum` over all tensors as they were sent."""

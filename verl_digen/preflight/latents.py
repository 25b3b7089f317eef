# SPDX-License-Identifier: Apache-2.0
"""Rules for rewards that read latents: every sample's must come from a replica."""

from __future__ import annotations

from omegaconf import DictConfig

from verl_digen.config import digen_config
from verl_digen.require import require
from verl_digen.reward.named import reads_latents


def check_latents(config: DictConfig) -> None:
    """Require replicas that have latents to make all samples, if a reward reads them."""
    digen = digen_config(config)
    reading = [entry.key for entry in digen.reward.entries if reads_latents(entry)]
    if not reading:
        return
    require(
        digen.tag.policy == "off",
        f"digen.tag.policy must be off with {reading[0]}, which reads latents: the trainer's samples carry none",
        digen.tag.policy,
        "set digen.tag.policy=off, or use a reward of pixels",
    )

# SPDX-License-Identifier: Apache-2.0
"""Rules for `digen.sampling.outside` that depend on the placement and on the back end."""

from __future__ import annotations

from omegaconf import DictConfig

from verl_digen.config import digen_config
from verl_digen.require import require


def check_outside(config: DictConfig) -> None:
    """Require replicas that can make steps cheaper, and forwards that no other process waits for."""
    digen = digen_config(config)
    outside, rollout = digen.sampling.outside, config.actor_rollout_ref.rollout.name
    if not outside.is_on:
        return
    require(
        rollout != "vllm_omni",
        "digen.sampling.outside must be left out with actor_rollout_ref.rollout.name=vllm_omni, whose pipelines "
        "evaluate the network at every step of their own schedule",
        outside,
        "set actor_rollout_ref.rollout.name=diffusers, or lower digen.sampling.num_steps",
    )
    require(
        outside.cache == 0 or digen.tag.policy == "off",
        f"digen.sampling.outside.cache must be 0 with digen.tag.policy={digen.tag.policy}: every forward of a trainer "
        "gathers weights from all its ranks, whose samples skip other steps",
        outside.cache,
        "set digen.tag.policy=off, or pass over steps with digen.sampling.outside.solver_after, the same on all ranks",
    )
    if outside.fp8:
        _check_fp8(config)


def _check_fp8(config: DictConfig) -> None:
    """Require replicas that generate every sample, with the network's layers as diffusers has them."""
    digen = digen_config(config)
    key, remedy = "digen.sampling.outside.fp8 must be false with", "set it to false"
    require(
        digen.tag.policy == "off",
        f"{key} digen.tag.policy={digen.tag.policy}: a trainer has sharded weights, without copies in fp8",
        True,
        f"{remedy}, or digen.tag.policy=off",
    )
    require(
        not digen.rollout_compiles,
        f"{key} compiled replicas, whose blocks have the layers' code in them",
        True,
        f"{remedy}, or set digen.rollout.compile=false",
    )

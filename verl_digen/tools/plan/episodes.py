# SPDX-License-Identifier: Apache-2.0
"""Episodes of a run: the turns of a sample, and how many episodes there are at the same time.

- An episode is planned with `digen.environment.max_turns` turns, the most that it may have; one that ends early needs
  less. A run without an environment has episodes of one turn.
- A turn has rows, a trajectory and conditions as a sample of its own has. Episodes of a group begin with the same
  instruction, hence share the first turn's conditions; a later turn's, with the picture that it edits, are its
  own.
- Where trainer and replicas take turns all episodes of the batch run at the same time. On separate pools a replica has
  `digen.gap.slots_per_replica` chunks.

Invariant (tests/plan/test_episodes.py): rows, trajectories, conditions and generations equal real episodes'.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from omegaconf import DictConfig

from verl_digen.config import DigenConfig, SamplingConfig
from verl_digen.environments.registry import environment_class
from verl_digen.models.base import DiffusionModel
from verl_digen.sampling.batch_rules import batch_rules
from verl_digen.sampling.requests import planned_geometry
from verl_digen.types import Geometry


@dataclass(frozen=True)
class Episodes:
    """Settings of episodes; without an environment a sample is an episode of one turn."""

    num_turns: int = 1
    """Maximum turns of an episode."""
    edits: bool = False
    """True if turns read the picture of the one before."""
    extra_prompts: int = 0
    """Redundant groups of a step, which may publish before they are dropped; on separate pools."""
    in_slots: int | None = None
    """Episodes that the slots of a replica hold; None: no limit, the pools take turns."""
    num_workers: int = 1
    """Agent loop workers."""
    num_calls: int = 0
    """Calls that the environment's processes run at the same time, num_workers x concurrent."""


def plan_episodes(config: DictConfig, digen: DigenConfig, *, num_replicas: int, is_split: bool) -> Episodes:
    """Read the episodes of a composed config.

    Raises:
        ValueError: the environment's class cannot be loaded.
    """
    rollout, environment = config.actor_rollout_ref.rollout, digen.environment
    return Episodes(
        num_turns=environment.max_turns if environment.is_on else 1,
        edits=environment.is_on and environment_class(environment).edits,
        extra_prompts=digen.queue.extra_prompts if is_split else 0,
        in_slots=_slots_hold(digen, config.data.train_batch_size, rollout.n, num_replicas) if is_split else None,
        num_workers=rollout.agent.num_workers,
        num_calls=environment.num_workers * environment.concurrent if environment.is_on else 0,
    )


def _slots_hold(digen: DigenConfig, num_prompts: int, group_size: int, num_replicas: int) -> int:
    """Episodes in the slots of a replica: the samples of a chunk in each."""
    rules = batch_rules(digen, num_prompts=num_prompts, group_size=group_size, num_trainer_ranks=1)
    return digen.slots_per_replica * rules.slot_chunk_size(digen.slots_per_replica * num_replicas)


def turn_geometry(sampling: SamplingConfig, model: DiffusionModel, episodes: Episodes) -> Geometry:
    """Geometry of a turn: of a prompt, and with one image at least where turns edit pictures."""
    least = model.spec.num_images[0]
    if episodes.edits:
        planned = least if sampling.planned_images is None else sampling.planned_images
        sampling = replace(sampling, planned_images=max(1, planned))
    return planned_geometry(sampling, least)

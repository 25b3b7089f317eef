# SPDX-License-Identifier: Apache-2.0
"""Optimizer steps on a whole batch: mini-batches and epochs, each one logical batch of one fragment.

    for each epoch, for each mini-batch:  begin -> accumulate(all its groups) -> commit

- Mini-batches are whole groups, in order; all share the advantage scale of the whole batch.
- Several optimizer steps compare with the policy before the first: its log-probs are evaluated then, or its weights
  copied for a loss that reads more of it.
- The learning rate moves once per batch.

Invariant (tests/engine/test_updates.py): with one mini-batch and one epoch this is a logical batch of separate pools.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from omegaconf import DictConfig

from verl_digen.algorithms.advantages import advantage_scale, combined_advantages
from verl_digen.algorithms.metric import combine_updates, numbers
from verl_digen.algorithms.objectives import Denominator, Select
from verl_digen.config import AdvantageConfig, DigenConfig
from verl_digen.engine.fragment import FragmentSample, FragmentSpec
from verl_digen.engine.ledger import BATCH_SCALES
from verl_digen.reward.named import has_custom
from verl_digen.store.keys import SampleName
from verl_digen.trainer.ranks import TrainerRanks
from verl_digen.types import GroupTags, SampleFacts, SampleTag

GroupRewards = Callable[[Sequence[SampleTag]], Sequence[float]]
"""Tags of a group's samples -> the rewards that advantages are made of."""


def totals(tags: Sequence[SampleTag]) -> Sequence[float]:
    """`GroupRewards` of one reward per sample."""
    return [tag.reward for tag in tags]


def group_rewards(config: DictConfig, digen: DigenConfig) -> GroupRewards:
    """`GroupRewards` of a run: the samples' rewards, or with `digen.reward.combine=gdpo` what GDPO makes of their
    parts."""
    if digen.reward.combine != "gdpo":
        return totals
    weights = digen.reward.weights(has_custom=has_custom(config))
    trained = {name: weight for name, weight in weights.items() if weight != 0}
    ddof, eps = digen.advantage.ddof, digen.advantage.eps

    def of_group(tags: Sequence[SampleTag]) -> Sequence[float]:
        scored = {name: weight for name, weight in trained.items() if name in tags[0].parts}  # by the group's source
        parts = {name: [tag.parts[name] for tag in tags] for name in scored}
        return combined_advantages(parts, scored, ddof=ddof, eps=eps)

    return of_group


def fragment_samples(
    groups: Mapping[str, GroupTags], select: Select, rewards_of: GroupRewards = totals
) -> tuple[FragmentSample, ...]:
    """Describe complete groups for the ranks.

    Args:
        groups: uid -> sample index -> tag.
        rewards_of: maps samples to their rewards.
        select: the objective's choice. A sample that is not chosen has no rows; its reward counts for its group. In a
            tree it has the rows of shared steps, if it is the first of its node.
    """
    samples = []
    for tags in groups.values():
        ordered = [tag for _, tag in sorted(tags.items())]
        facts = [tag.facts for tag in ordered]
        rewards = rewards_of(ordered)
        chosen = {*select(rewards)}
        samples += [
            FragmentSample(
                key=SampleName.of(tag.facts).key,
                facts=tag.facts,
                reward=rewards[position],
                skipped=skipped_points(facts, position, is_chosen=position in chosen),
                turns=() if tag.episode is None else tag.episode.turns,
            )
            for position, tag in enumerate(ordered)
        ]
    return tuple(samples)


def skipped_points(group: Sequence[SampleFacts], position: int, *, is_chosen: bool) -> frozenset[int]:
    """Points of a sample that do not train: steps that an earlier sample of the group took too, and if it is not chosen
    steps that it took alone. So the steps that several samples share train once, whatever the choice.

    Args:
        group: facts of each sample of the group.
    """
    own = group[position]
    if not own.nodes:
        return frozenset(() if is_chosen else range(own.num_steps))
    skipped = set()
    for point, node in enumerate(own.nodes):
        sharing = [number for number, other in enumerate(group) if other.nodes[point] == node]
        if sharing[0] != position or (len(sharing) == 1 and not is_chosen):
            skipped.add(point)
    return frozenset(skipped)


def mini_batches(samples: Sequence[FragmentSample], num_groups: int) -> list[FragmentSpec]:
    """Cut a batch into fragments of `num_groups` groups each; the last one may have fewer."""
    uids = list(dict.fromkeys(sample.facts.uid for sample in samples))
    cuts = [uids[start : start + num_groups] for start in range(0, len(uids), num_groups)]
    return [
        FragmentSpec(f"m{number}", tuple(sample for sample in samples if sample.facts.uid in {*cut}))
        for number, cut in enumerate(cuts)
    ]


def batch_scale(samples: Sequence[FragmentSample], config: AdvantageConfig) -> float | None:
    """Divisor of the whole batch's centred rewards; None where a group has its own."""
    if config.scale not in BATCH_SCALES:
        return None
    rewards = torch.tensor([sample.reward for sample in samples], dtype=torch.float64)
    groups = [sample.facts.uid for sample in samples]
    return advantage_scale(rewards, groups, scale=config.scale, ddof=config.ddof, eps=config.eps)[0].item()


async def train_batch(
    ranks: TrainerRanks,
    fragments: Sequence[FragmentSpec],
    *,
    num_epochs: int,
    scale: float | None,
    keeps_old: bool,
    old: Denominator,
) -> dict[str, float]:
    """Take one optimizer step per epoch and fragment; returns their metrics, combined.

    Args:
        scale: `batch_scale` of all fragments.
        keeps_old: the objective needs forwards of the policy before the update, see `Objective.reads_old_weights`.
        old: source of the policy before the update, if the loss compares with it.
    """
    num_updates = len(fragments) * num_epochs
    if num_updates > 1 and keeps_old:
        await ranks.keep_old()
    elif num_updates > 1 and old in ("first_pass", "recompute"):
        fragments = await ranks.evaluate(fragments)
    outputs = []
    for number in range(num_updates):
        fragment = fragments[number % len(fragments)]
        await ranks.begin(len(fragment.samples), sum(sample.num_rows for sample in fragment.samples), scale)
        await ranks.accumulate(fragment)
        outputs.append(await ranks.commit(more=number < num_updates - 1))
    return numbers(combine_updates(outputs))

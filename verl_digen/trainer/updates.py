# SPDX-License-Identifier: Apache-2.0
"""Calls of the trainer's ranks, and optimizer steps on a whole batch: mini-batches and epochs, each one logical batch
of one fragment.

    for each epoch, for each mini-batch:  begin -> accumulate(all its groups) -> commit

- Mini-batches are whole groups, in order; all share the advantage scale of the whole batch.
- Several optimizer steps compare with the policy before the first: its log-probs are evaluated then, or its weights
  copied for a loss that reads more of it.
- The learning rate moves once per batch.

Invariant (tests/engine/test_updates.py): with one mini-batch and one epoch this is a logical batch of separate pools.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import nan
from typing import Any

import ray
from omegaconf import DictConfig

from verl_digen.algorithms.advantages import combined_advantages
from verl_digen.algorithms.objectives import Denominator, Select
from verl_digen.algorithms.rows import Metric, combine_updates, from_plain, numbers
from verl_digen.config import DigenConfig
from verl_digen.engine.fragment import FragmentSample, FragmentSpec
from verl_digen.errors import describe
from verl_digen.processes.relays import Together, Work
from verl_digen.require import require
from verl_digen.reward.named import has_custom
from verl_digen.store.keys import TRAIN, SampleName
from verl_digen.types import GroupTags, SampleFacts, SampleRequest, SampleTag

logger = logging.getLogger(__name__)


class TrainerRanks:
    """The trainer's ranks, as one: every call goes to all of them, with names and numbers only; an exception of any
    rank is raised.

    A call is one message per rank, or with many ranks one per relay (`verl_digen.processes.relays`). Fragments and
    requests, which grow with the groups, are put into Ray's object store once, by `put`, and each message holds a
    reference: the driver serialises a fragment once, whatever the number of ranks.
    """

    def __init__(self, ranks: Together, put: Callable[[Any], Any] = ray.put):
        self._ranks, self._put = ranks, put
        self.compute_s = 0.0
        """Seconds spent in training calls since it was set to 0."""

    async def begin(self, num_samples: int, num_rows: int, scale: float | None = None) -> None:
        """Open a logical batch, see `DiffusersFSDPEngine.begin`."""
        await self._on_all("begin", num_samples, num_rows, TRAIN, scale)

    async def accumulate(self, fragment: FragmentSpec) -> None:
        """Add the gradient of complete groups."""
        counts = await self._on_all("accumulate", self._put(fragment))
        self.compute_s += counts["accumulate_s"]

    async def evaluate(self, fragments: Sequence[FragmentSpec]) -> list[FragmentSpec]:
        """Copies of the fragments with the log-probs of their rows under the current weights. RuntimeError if no rank
        evaluated one of the rows."""
        started_s = time.perf_counter()
        found: dict[str, dict[int, float]] = {}
        for part in await self._ranks.call(Work("evaluate", (self._put(fragments), TRAIN)), "all"):
            for key, log_probs in part.items():
                found.setdefault(key, {}).update(log_probs)
        self.compute_s += time.perf_counter() - started_s
        return [
            replace(fragment, samples=tuple(_with_log_probs(sample, found) for sample in fragment.samples))
            for fragment in fragments
        ]

    async def keep_old(self) -> None:
        """Have every rank copy the weights as policy `old` of the optimizer steps that follow."""
        await self._on_all("keep_old")

    async def assist(self, requests: Sequence[SampleRequest], version: int) -> list[list[tuple[str, Any]]]:
        """Have the ranks generate -> of each rank: (uid, reference to its samples of the group). See
        `DiffusionWorker.assist`."""
        return await self._ranks.call(Work("assist", (self._put(tuple(requests)), version)), "all")

    async def commit(self, *, more: bool = False) -> dict[str, Metric]:
        """Take the optimizer step; returns its metrics. See `DiffusersFSDPEngine.commit`."""
        started_s = time.perf_counter()
        metrics = await self._on_all("commit", more)
        self.compute_s += time.perf_counter() - started_s
        return from_plain(metrics)

    async def abort(self) -> None:
        """Have every rank discard the open batch. Logs their exceptions: another one is about to end the run."""
        outcomes = await self._ranks.call(Work("abort"), "outcomes")
        for rank, outcome in enumerate(outcomes):
            if isinstance(outcome, BaseException):
                logger.error("rank %d of the trainer could not forget the open batch: %s", rank, describe(outcome))

    async def _on_all(self, method: str, *args: Any) -> Any:
        """Wait for every rank; return the first one's answer."""
        (answer,) = await self._ranks.call(Work(method, args), "first")
        return answer


def _with_log_probs(sample: FragmentSample, found: dict[str, dict[int, float]]) -> FragmentSample:
    log_probs = found.get(sample.key, {})
    if sorted(log_probs) != list(sample.points):
        raise RuntimeError(
            f"sample {sample.key} has {sample.num_rows} trained steps, but the trainer's ranks evaluated "
            f"{sorted(log_probs)}; every row must be evaluated by one of them"
        )
    return replace(sample, old_log_probs=tuple(log_probs.get(step, nan) for step in range(sample.facts.num_steps)))


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
    """Describe complete groups (uid -> sample index -> tag) for the ranks.

    A sample that the objective does not `select` has no rows; its reward counts for its group. In a tree it has the
    rows of shared steps, if it is the first of its node.
    """
    samples = []
    for tags in groups.values():
        ordered = [tag for _, tag in sorted(tags.items())]
        facts = [tag.facts for tag in ordered]
        rewards = rewards_of(ordered)
        chosen = {*select(rewards)}
        rule = f"select of an objective must return positions in the group, 0 to {len(rewards) - 1}"
        require(chosen <= {*range(len(rewards))}, rule, chosen, "repair it, or digen.loss.name")
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
    steps that it took alone. So the steps that several samples share train once, whatever the choice."""
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

    `scale` is `batch_scale` of all fragments (`engine.ledger`). With `keeps_old` the objective needs forwards of the
    policy before the update, see `Objective.reads_old_weights`; `old` is the source of that policy, if the loss
    compares with it.
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

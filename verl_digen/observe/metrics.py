# SPDX-License-Identifier: Apache-2.0
"""Metrics of one step, computed from the facts in the samples' tags. Pure.

Their meaning and healthy values: docs/metrics.md; for ratios and gradients docs/numerics.md.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, pstdev
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from verl_digen.types import RewardCall, SampleTag  # imports torch, which the timeline's commands do without


def union_s(intervals: Iterable[tuple[float, float]]) -> float:
    """Seconds covered by at least one of the (start, end) intervals."""
    covered, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered


def reward_metrics(tags: Sequence[SampleTag]) -> dict[str, float]:
    """`reward/*` of a batch."""
    rewards = [tag.reward for tag in tags]
    by_group: dict[str, set[float]] = defaultdict(set)
    parts: dict[str, list[float]] = defaultdict(list)
    for tag in tags:
        by_group[tag.facts.uid].add(tag.reward)
        for name, value in tag.parts.items():
            parts[name].append(value)
    found = {
        "reward/mean": fmean(rewards),
        "reward/std": pstdev(rewards),
        "reward/min": min(rewards),
        "reward/max": max(rewards),
        **{f"reward/{name}": fmean(values) for name, values in parts.items()},
    }
    if len(tags) > len(by_group):  # one sample alone has no spread
        found["reward/zero_spread_fraction"] = fmean(len(values) == 1 for values in by_group.values())
    return found


def call_metrics(tags: Sequence[SampleTag]) -> dict[str, float]:
    """`reward_calls/*` of a batch. Samples of one call share it."""
    calls: dict[str, set[RewardCall]] = defaultdict(set)
    for tag in tags:
        for call in tag.calls:
            calls[call.reward].add(call)
    found: dict[str, float] = {}
    for name, made in sorted(calls.items()):
        found |= {
            f"reward_calls/{name}_count": float(len(made)),
            f"reward_calls/{name}_s": fmean(call.end_s - call.start_s for call in made),
            f"reward_calls/{name}_samples": fmean(call.num_samples for call in made),
            f"reward_calls/{name}_queued_max_samples": float(max(call.num_queued for call in made)),
        }
        counts: Counter[str] = Counter()
        for call in made:
            counts.update(dict(call.counts))
        found |= {f"reward_calls/{name}_{what}": float(number) for what, number in sorted(counts.items())}
    return found


def staleness_metrics(tags: Sequence[SampleTag], trained_version: int) -> dict[str, float]:
    """Number of versions by which samples are older than the weights they train: maximum, mean and histogram."""
    ages = [trained_version - tag.facts.version for tag in tags]
    return {
        "rollout/version_age_max_versions": float(max(ages)),
        "rollout/version_age_mean_versions": fmean(ages),
        **{f"staleness/samples_{age}_versions": float(count) for age, count in sorted(Counter(ages).items())},
    }


def spared_metrics(tags: Sequence[SampleTag]) -> dict[str, float]:
    """Shares of the denoising steps that cost no forward: `rollout/shared_step_share`, for which another sample's
    served, where samples start from shared noise; `rollout/skipped_step_share`, of the others, where steps are skipped.
    """
    num_steps, found = sum(tag.facts.sampling.num_steps * len(tag.generations) for tag in tags), dict[str, float]()
    if sharing := [tag for tag in tags if tag.facts.sampling.shared_initial_noise]:
        found["rollout/shared_step_share"] = sum(tag.facts.num_shared_steps for tag in sharing) / num_steps
    if any(tag.facts.sampling.outside.skips for tag in tags):
        found["rollout/skipped_step_share"] = sum(tag.facts.num_skipped_steps for tag in tags) / num_steps
    return found


def tree_metrics(tags: Sequence[SampleTag]) -> dict[str, float]:
    """`branches/*` of groups that are trees: trained edges, and the std of the values of a group's nodes at the depths
    with that many of them, mean over groups. A value is the mean reward of the leaves below a node. {} without trees.
    """
    members: dict[str, list[SampleTag]] = {}
    for tag in tags:
        members.setdefault(tag.facts.uid, []).append(tag)
    num_edges, spreads = 0, {}
    for own in members.values():
        of_group: dict[int, float] = {}
        for nodes in zip(*(tag.facts.nodes for tag in own), strict=True):
            below: dict[int, list[float]] = {}
            for node, tag in zip(nodes, own, strict=True):
                below.setdefault(node, []).append(tag.reward)
            num_edges += len(below)
            of_group[len(below)] = pstdev(map(fmean, below.values()))
        for number, spread in of_group.items():
            spreads.setdefault(number, []).append(spread)
    if not num_edges:
        return {}
    found = {f"branches/value_std_of_{number}_nodes": fmean(values) for number, values in sorted(spreads.items())}
    return {"branches/num_edges": float(num_edges), **found}


def episode_metrics(tags: Sequence[SampleTag]) -> dict[str, float]:
    """`episodes/*` of samples that are episodes; {} without an environment. `idle_share`: share of the time from the
    first turn's begin to the last one's end in which no replica generated."""
    episodes = [tag.episode for tag in tags if tag.episode is not None]
    if not episodes:
        return {}
    turns = [turn for episode in episodes for turn in episode.turns]
    waits = sorted(turn.environment_s for turn in turns)
    spans = [turn.generated for turn in turns]
    extent_s = max(end for _, end in spans) - min(start for start, _ in spans)
    return {
        "episodes/turns_mean": len(turns) / len(episodes),
        "episodes/turns_max": float(max(len(episode.turns) for episode in episodes)),
        "episodes/exceeded": float(sum(episode.is_exceeded for episode in episodes)),
        "episodes/retries": float(sum(episode.num_retries for episode in episodes)),
        "episodes/environment_s": fmean(waits),
        "episodes/environment_p95_s": waits[math.ceil(0.95 * len(waits)) - 1],
        "episodes/idle_share": 1 - union_s(spans) / extent_s if extent_s > 0 else 0.0,
    }


PREFIXES = ("rollout", "advantage")
"""Sections of the engine's numbers that are not `actor/*`, by the first word of a number's name."""


def training_metrics(outputs: Mapping[str, float]) -> dict[str, float]:
    """The engine's numbers as `actor/*`; `rollout_*`, which compare with the rollout, and `advantage_*` apart."""

    def key(name: str) -> str:
        section, _, rest = name.partition("_")
        return f"{section}/{rest}" if section in PREFIXES else f"actor/{name}"

    found = {key(name): float(value) for name, value in outputs.items()}
    for sign in ("positive", "negative"):
        share = found.get(f"advantage/{sign}_fraction")
        if share:  # a sum over rows of this sign, per row of the batch -> their mean
            found[f"actor/ratio_sign_{sign}"] /= share
    return found


def perf_metrics(
    tags: Sequence[SampleTag],
    *,
    step_s: float,
    train_s: float,
    sync_s: float,
    num_devices: int,
    training: Sequence[tuple[float, float]] | None = None,
    since_s: float = 0.0,
) -> dict[str, float]:
    """`perf/*` of a step.

    Args:
        step_s: wall time of the step, checkpoint excluded.
        train_s: compute time of the engine; `sync_s` is wall time of the weight update.
        training: (start, end) of the engine's calls, if it trains during generation; None: they take turns.
        since_s: unix time at which the step began; samples may have been generated before.
    """
    generating = [span for tag in tags for span in tag.generations]
    scoring = [tag.scored for tag in tags]
    images_per_s = len(generating) / step_s
    if training is None:
        busy_s = union_s(generating + scoring) + train_s
    else:
        spans = [*generating, *scoring, *training]
        busy_s = union_s((max(start, since_s), end) for start, end in spans if end > since_s)
    return {
        "perf/step_s": step_s,
        "perf/generate_s": union_s(generating),
        "perf/score_s": union_s(scoring),
        "perf/train_s": train_s,
        "perf/sync_s": sync_s,
        "perf/overhead_s": step_s - busy_s,
        "perf/images_per_s": images_per_s,
        "perf/images_per_s_per_device": images_per_s / num_devices,
    }

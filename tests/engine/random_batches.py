# SPDX-License-Identifier: Apache-2.0
"""Logical batches drawn at random for the toy: settings, weights, recorded samples, and the calls that train them."""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor

from tests.engine.harness import SAMPLING, described, digen_section
from tests.engine.slow_gradient import SIGMAS, leaves, score
from tests.engine.toy import BOUNDARY, LATENTS, LORA, TEXT_WIDTH, toy_weights
from tests.tags import changed, make_facts
from verl_digen.algorithms.tree import Tree
from verl_digen.config import DigenConfig, digen_config
from verl_digen.engine.fragment import FragmentSample, FragmentSpec
from verl_digen.trainer.updates import skipped_points
from verl_digen.types import Sampling

FLAVOURS: dict[str, dict[str, Any]] = {
    "plain": {},
    "experts": {"fsdp": {"reshard_after_forward": False}},
    "lora": {"model": LORA},
    "replicated": {"fsdp": {"fsdp_size": 1}},
}
"""Kind of engine -> arguments of `make_engine` besides the toy's folder. "experts" is the toy with two networks."""
FLAVOURS_ON: dict[int, tuple[str, ...]] = {
    1: ("plain", "experts", "lora"),
    2: ("plain", "experts", "lora", "replicated"),
    3: ("plain", "experts"),
    4: ("lora", "replicated"),
}
"""Number of ranks -> kinds of engines; few, because building an engine takes longer than some batches."""

SHARE_OF_TREES = 0.25
"""Share of the seeds whose groups are trees."""


@dataclass(frozen=True)
class Recorded:
    """One sample, as it was generated."""

    described: FragmentSample
    steps: tuple[int, ...]
    latents: Tensor
    """[6, 3, 1]: latents at every sigma."""
    log_probs: Tensor
    """[K]"""


@dataclass(frozen=True)
class Call:
    """One call on an open logical batch."""

    kind: str
    """train; refuse, a fragment that must be refused without a trace; assist; or failing assist."""
    fragment: FragmentSpec | None = None
    why: str = ""
    """The fault of a fragment that must be refused."""


@dataclass(frozen=True)
class Accident:
    """An exception on all ranks in the first attempt at the batch."""

    where: str
    """fetch, forward or backward."""
    number: int
    """Number of the call that raises, from 0. There may be fewer calls."""


@dataclass(frozen=True)
class RandomBatch:
    """One logical batch: its samples, and how they are trained."""

    seed: int
    num_ranks: int
    flavour: str
    digen: DigenConfig
    weights: dict[str, Tensor]
    """Trainable weights by the checkpoint's names, fp32."""
    conditions: dict[str, tuple[Tensor, Tensor]]
    """By group: embeddings of prompt and negative prompt, [L, 3] each."""
    samples: dict[str, Recorded]
    """Samples that come, by key."""
    calls: tuple[Call, ...]
    num_samples: int
    """Argument of `begin`, as is `num_rows`."""
    num_rows: int
    accident: Accident | None

    @property
    def num_trained_rows(self) -> int:
        """Number of trained rows that come."""
        return sum(sample.described.num_rows for sample in self.samples.values())

    @property
    def fragments(self) -> list[FragmentSpec]:
        """Fragments that train, in order."""
        return [call.fragment for call in self.calls if call.kind == "train" and call.fragment is not None]

    def __str__(self) -> str:
        digen, calls = self.digen, []
        for call in self.calls:
            uids = dict.fromkeys(sample.facts.uid for sample in call.fragment.samples) if call.fragment else ()
            calls.append(" ".join((call.kind, *uids)))
        return (
            f"seed {self.seed}: {self.flavour} on {self.num_ranks} ranks; {len(self.samples)} of {self.num_samples} "
            f"samples, {self.num_trained_rows} rows for {self.num_rows}; {', '.join(calls)}; {self.accident}; "
            f"{digen.loss_name}, {digen.loss['old_log_probs']}, {digen.advantage}, {digen.kl}, {digen.tsp}, "
            f"advantage_clip={digen.loss_settings.advantage_bound}, true_cfg_scale={digen.sampling.true_cfg_scale}"
        )


def draw(seed: int, num_ranks: int) -> RandomBatch:
    """The batch of this seed."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    flavour = rng.choice(FLAVOURS_ON[num_ranks])
    weights, conditions, groups = {}, {}, {}
    for name, value in toy_weights(flavour).items():
        weights[name] = value + 0.3 * torch.randn(value.shape, generator=generator)
    for uid in (f"g{number}" for number in range(rng.randint(1, 5))):
        positive, negative = (torch.randn(rng.randint(1, 4), TEXT_WIDTH, generator=generator) for _ in range(2))
        conditions[uid] = positive, negative
        groups[uid] = _draw_group(rng, uid, flavour, least_steps=int(uid == "g0"))
    has_trees = (tree_rng := random.Random(f"trees of {seed}")).random() < SHARE_OF_TREES
    if has_trees:
        num_steps = tree_rng.randint(1, 4)
        groups = {uid: _draw_tree(tree_rng, uid, flavour, num_steps) for uid in groups}
    num_samples = sum(map(len, groups.values())) + rng.choice([0, 0, 1, 4])
    calls, digen = _draw_calls(rng, groups, num_samples), _draw_settings(rng)
    if has_trees and digen.loss_name == "gspo":  # it compares all steps of a sample
        digen = replace(digen, loss={**digen.loss, "name": "flow_grpo"})
    sampling = replace(SAMPLING, true_cfg_scale=digen.sampling.true_cfg_scale)
    groups = {uid: [changed(sample, sampling=sampling) for sample in group] for uid, group in groups.items()}
    calls = tuple(_sampled(call, sampling) for call in calls)
    accidents = [Accident(where, rng.randint(0, 4)) for where in ("fetch", "forward", "backward")]
    accident = rng.choice([None] * 5 + accidents)
    batch = RandomBatch(
        seed, num_ranks, flavour, digen, weights, conditions, {}, calls, num_samples, num_rows=0, accident=accident
    )
    for sample in (sample for group in groups.values() for sample in group):
        batch.samples[sample.key] = _record(rng, generator, batch, sample)
    return replace(batch, num_rows=max(1, batch.num_trained_rows + rng.choice([0, 0, 3, -2])))


def _sampled(call: Call, sampling: Sampling) -> Call:
    """The call with samples that were generated with `sampling`."""
    if call.fragment is None:
        return call
    samples = tuple(changed(sample, sampling=sampling) for sample in call.fragment.samples)
    return replace(call, fragment=replace(call.fragment, samples=samples))


def _draw_group(rng: random.Random, uid: str, flavour: str, least_steps: int) -> list[FragmentSample]:
    """Samples whose trained steps differ; some have none, and some groups no spread of rewards."""
    spread = rng.choice([0.0, 0.1, 1.0, 6.0])
    group = []
    for number in range(rng.randint(1, 4)):
        # the last step has no noise
        steps = sorted(rng.sample(range(len(SIGMAS) - 2), max(least_steps, rng.choice([0, 1, 1, 2, 3]))))
        key = f"{uid}/{number}/{''.join(map(str, steps))}"
        experts = tuple(int(SIGMAS[step] < BOUNDARY) for step in steps) if flavour == "experts" else ()
        reward = 0.3 + spread * rng.gauss(0, 1)
        group.append(described(key, uid, reward, len(steps), number, experts=experts))
    return group


def _draw_tree(rng: random.Random, uid: str, flavour: str, num_steps: int) -> list[FragmentSample]:
    """Samples that share nodes at `num_steps` trained steps: leaves of a tree with two splits, some of which may be
    missing. What they recorded differs, so that it shows whose record trains."""
    steps = sorted(rng.sample(range(len(SIGMAS) - 2), num_steps))
    tree = Tree(tuple(sorted(rng.sample(range(len(SIGMAS) - 2), 2))), factor=2)
    leaves_there = sorted(rng.sample(range(4), rng.randint(1, 4)))
    nodes = [tuple(tree.node(leaf, step) for step in steps) for leaf in leaves_there]
    group = [make_facts(nodes=own) for own in nodes]
    spread = rng.choice([0.0, 0.1, 1.0, 6.0])
    experts = tuple(int(SIGMAS[step] < BOUNDARY) for step in steps) if flavour == "experts" else ()
    return [
        described(
            f"{uid}/{leaf}/{''.join(map(str, steps))}",
            uid,
            0.3 + spread * rng.gauss(0, 1),
            num_steps,
            leaf,
            experts=experts,
            nodes=nodes[position],
            skipped=skipped_points(group, position, is_chosen=True),
        )
        for position, leaf in enumerate(leaves_there)
    ]


def _record(rng: random.Random, generator: torch.Generator, batch: RandomBatch, sample: FragmentSample) -> Recorded:
    """The sample as weights near the batch's would have generated it; its steps are in its key."""
    steps = tuple(map(int, sample.key.rsplit("/")[-1]))
    recorded = Recorded(sample, steps, torch.randn(len(SIGMAS), *LATENTS, generator=generator), torch.zeros(0))
    weights, log_probs = leaves(batch.weights), []
    for step in steps:
        row = score(batch, recorded, step, weights)
        recorded.latents[step + 1] = row.mean.detach() + row.std * torch.randn(LATENTS, generator=generator)
        gap = rng.choice([-1, 1]) * rng.uniform(0.01, 0.12)  # the ratio's clip binds for some
        log_probs.append(score(batch, recorded, step, weights).log_prob.item() + gap)
    return replace(recorded, log_probs=torch.tensor(log_probs))


def _draw_settings(rng: random.Random) -> DigenConfig:
    base = _base_settings()
    is_parallel = rng.random() < 0.8
    tile = ["auto", 1, 2, 3]
    loss_name = rng.choice(["flow_grpo", "flow_grpo", "gspo", "kimi"])
    return replace(
        base,
        loss={
            "name": loss_name,
            "old_log_probs": rng.choice(["auto", "recompute", "rollout"]) if loss_name == "flow_grpo" else "auto",
            "advantage_clip": rng.choice([math.inf, 1.5, 0.7]),
            **({"tau": 0.4} if loss_name == "kimi" else {"clip_range": 0.05}),
        },
        advantage=replace(
            base.advantage,
            scale=rng.choice(["batch", "batch", "max_group", "group", "none"]),
            ddof=rng.choice([0, 1]),
            eps=rng.choice([1e-4, 1e-2]),
        ),
        kl=replace(base.kl, coef=rng.choice([0.0, 0.3]), kind=rng.choice(["flow_grpo", "exact", "velocity"])),
        sampling=replace(base.sampling, true_cfg_scale=rng.choice([1.0, 1.0, 2.5])),
        tsp=replace(
            base.tsp,
            enable=is_parallel,
            samples_per_tile=rng.choice(tile),
            steps_per_tile=rng.choice(tile if is_parallel else ["auto", 1]),
            reduce=rng.choice(["tile", "fragment", "batch", "auto"]),
        ),
    )


@cache
def _base_settings() -> DigenConfig:
    return digen_config(OmegaConf.create({"digen": digen_section()}))


def _draw_calls(
    rng: random.Random, groups: Mapping[str, Sequence[FragmentSample]], num_samples: int
) -> tuple[Call, ...]:
    """The groups cut into fragments, in random order, with calls in between that must leave no trace."""
    uids = rng.sample(list(groups), len(groups))
    cuts = sorted(rng.sample(range(1, len(uids)), rng.randint(0, len(uids) - 1)))
    calls: list[Call] = []
    came: list[FragmentSpec] = []
    for start, end in zip([0, *cuts], [*cuts, len(uids)], strict=True):
        fragment = FragmentSpec(f"f{start}", tuple(sample for uid in uids[start:end] for sample in groups[uid]))
        if rng.random() < 0.3:
            calls.append(_draw_refused(rng, came, fragment, num_samples))
        if rng.random() < 0.2:
            calls.append(Call(rng.choice(["assist", "failing assist"])))
        calls.append(Call("train", fragment))
        came.append(fragment)
    if rng.random() < 0.2:
        calls.append(Call("refuse", rng.choice(came), "all of it came before"))
    return tuple(calls)


def _draw_refused(rng: random.Random, came: Sequence[FragmentSpec], following: FragmentSpec, num_samples: int) -> Call:
    """A fragment that must be refused: `following`, which comes correctly afterwards, with one fault."""
    good = following.samples
    bad = {
        "not finite": (replace(good[0], reward=math.nan), *good[1:]),
        "twice in one": (*good, good[-1]),
        "experts": (*good, described("x", "x", 0.0, 1, experts=(0, 0))),
        "too many": (*good, *(described(f"x{number}", "x", 9.0, 0) for number in range(num_samples))),
    }
    if came:
        bad["group came before"] = (*good, *rng.choice(came).samples)
        bad["id came before"] = good
    why = rng.choice(list(bad))
    fragment_id = came[0].fragment_id if why == "id came before" else following.fragment_id
    return Call("refuse", FragmentSpec(fragment_id, bad[why]), why)

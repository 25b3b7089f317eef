# SPDX-License-Identifier: Apache-2.0
"""Run one objective's batch in every way that must not matter, on the ranks that there are."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from peft import get_peft_model, set_peft_model_state_dict
from tensordict import TensorDict
from torch import Tensor, nn

from tests.engine.cases import optimizer_state
from tests.engine.harness import (
    all_picks,
    are_equal,
    begin,
    fetch_from,
    fragment,
    gathered,
    peek,
    read_samples,
    samples_of,
    unstepped,
    weights,
)
from tests.engine.objective_cases import (
    CASES,
    GROUP_SIZE,
    REWARDS,
    SEED,
    ObjectiveCase,
    condition_of,
    moved_engine,
    network_of,
    requests_of,
)
from tests.engine.toy import register_toy, toy_weights
from verl_digen.algorithms.rows import numbers
from verl_digen.engine.engine import DiffusersFSDPEngine
from verl_digen.engine.export import plain_name
from verl_digen.engine.fragment import FragmentSample
from verl_digen.engine.ledger import batch_scale
from verl_digen.engine.rows import make_rows
from verl_digen.sampling.sampler import Sampler
from verl_digen.types import Trajectory

NUM_UPDATES = 75
"""Optimizer steps that a run has taken before it is saved, so that decays are not 0."""
Order = tuple[tuple[str, ...], ...]
"""Groups of each fragment."""
WHOLE: Order = (("g0", "g1", "g2"),)
SHAPES: tuple[tuple[int, int, str, Order], ...] = (
    (2, 2, "fragment", (("g1",), ("g2",), ("g0",))),
    (1, 1, "batch", WHOLE),
    (100, 100, "tile", (("g2", "g0"), ("g1",))),
    (3, 1, "auto", (("g0",), ("g2", "g1"))),
)
"""(samples and points of a tile, `digen.tsp.reduce`, fragments in order)."""


def random_order(rng: random.Random) -> Order:
    """The groups in any order, cut anywhere."""
    uids = rng.sample(WHOLE[0], len(WHOLE[0]))
    cut = rng.randint(0, len(uids) - 1)
    return tuple(part for part in (tuple(uids[:cut]), tuple(uids[cut:])) if part)


def reshape(engine: DiffusersFSDPEngine, samples: int, points: int, reduce: str) -> None:
    """Train in tiles of this many samples and points from now on."""
    tsp = replace(engine.digen.tsp, samples_per_tile=samples, steps_per_tile=points, reduce=reduce)
    engine.digen = engine.forward.digen = replace(engine.digen, tsp=tsp)
    engine.planner.tsp, engine._reduce = tsp, None


def start(
    engine: DiffusersFSDPEngine, batch: TensorDict, rewards: Sequence[float] = REWARDS
) -> dict[str, list[FragmentSample]]:
    """Open a logical batch; samples that the objective does not select have no rows."""
    groups = begin(engine, batch, list(rewards))
    return {uid: chosen_of(engine, samples) for uid, samples in groups.items()}


def chosen_of(engine: DiffusersFSDPEngine, samples: Sequence[FragmentSample]) -> list[FragmentSample]:
    chosen = {*engine.digen.select([sample.reward for sample in samples])}
    return [
        replace(sample, skipped=frozenset(() if number in chosen else range(sample.facts.num_steps)))
        for number, sample in enumerate(samples)
    ]


def rehearse(engine: DiffusersFSDPEngine, batch: TensorDict) -> None:
    """Dry run of the largest tile, which leaves nothing."""
    samples = read_samples(batch)
    engine.planner.rehearse(make_rows(engine.points, samples, all_picks(samples)))


@dataclass
class Seen:
    """A batch that was trained without a step, so that the engine stays as it is."""

    gradient: dict[str, Tensor]
    metrics: dict[str, float]


def commit(engine: DiffusersFSDPEngine, *, more: bool = False) -> Seen:
    """Close the batch; the optimizer step is left out."""
    with unstepped(engine) as gradient:
        kept = dict(engine.copies)
        metrics = numbers(engine.commit(more=more)["metrics"])
        engine.copies.update(kept)
    return Seen(gradient, metrics)


def trained(engine: DiffusersFSDPEngine, batch: TensorDict, order: Order = WHOLE) -> Seen:
    """Train fragment by fragment."""
    groups = start(engine, batch)
    for uids in order:
        engine.accumulate(fragment(groups, *uids))
    return commit(engine)


def by_mini_batches(engine: DiffusersFSDPEngine, batch: TensorDict) -> list[Seen]:
    """Train each group as a mini-batch, as colocated training does."""
    groups, found = samples_of(batch, REWARDS), []
    scale = batch_scale([sample for samples in groups.values() for sample in samples], engine.digen.advantage)
    groups = {uid: chosen_of(engine, samples) for uid, samples in groups.items()}
    for uid, samples in groups.items():
        engine.begin(len(samples), sum(sample.facts.num_steps for sample in samples), fetch_from(batch), scale=scale)
        engine.accumulate(fragment(groups, uid))
        found.append(commit(engine, more=uid != "g2"))
    return found


# -- trainer-assisted generation ----------------------------------------------------------------------------
def generate(engine: DiffusersFSDPEngine) -> list[Trajectory]:
    """Samples of one group, generated by the trainer."""
    with engine.assisting() as module:
        return _sample(engine, module)


def generate_as_replica(engine: DiffusersFSDPEngine) -> list[Trajectory]:
    """Generate these samples with a plain network with the weights that the engine sends to replicas."""
    sent = weights(engine)
    network: nn.Module = network_of(toy_weights("plain") if engine._is_lora else sent)
    if engine._is_lora:
        network = get_peft_model(network, engine.model_config.lora_config())  # pyright: ignore[reportArgumentType]
        set_peft_model_state_dict(network, sent)
    return _sample(engine, network)


def _sample(engine: DiffusersFSDPEngine, network: nn.Module) -> list[Trajectory]:
    sampler = Sampler(engine.model, network, run_seed=SEED, device=torch.device("cpu"), latents_dtype=torch.float32)
    requests = requests_of(engine.objective.points, 0)
    return sampler.sample(requests, [condition_of(0)] * GROUP_SIZE, None, version=1)[0]


def assisted(engine: DiffusersFSDPEngine, batch: TensorDict, order: Order) -> tuple[bool, Seen, list[Trajectory]]:
    """(True if generation left the open gradient bitwise as it was, the batch, what was generated)."""
    groups, is_still, made = start(engine, batch), True, []
    for uids in order:
        engine.accumulate(fragment(groups, *uids))
        before = {key: value.clone() for key, value in peek(engine).items()}
        made = generate(engine)
        is_still &= are_equal(peek(engine), before)
    return is_still, commit(engine), made


# -- resumed runs -------------------------------------------------------------------------------------------
@dataclass
class Resumed:
    """A run of two steps, and one that was saved after the first step and continued by a new engine."""

    before: dict[str, dict[str, Tensor]]
    """Policy -> this rank's part of its weights before the first step."""
    between: dict[str, dict[str, Tensor]]
    straight: dict[str, Tensor]
    resumed: dict[str, Tensor]
    """Weights, optimizer, copies and counters after the second step; each a tensor of this rank."""
    metrics: dict[str, float]
    """Metrics of the first step."""


def state_of(engine: DiffusersFSDPEngine) -> dict[str, Tensor]:
    """Everything that a batch changes, copied."""
    found = optimizer_state(engine)
    for policy, values in policies_of(engine).items():
        found |= {f"{policy} {name}": value for name, value in values.items()}
    return found


def policies_of(engine: DiffusersFSDPEngine) -> dict[str, dict[str, Tensor]]:
    """Copies that follow, and the weights that train: policy -> shards of this rank, copied."""
    found = {
        policy: {plain_name(name): shard.clone() for name, shard in engine.copies[policy].shards.items()}
        for policy in engine.digen.loss_settings.copies
    }
    weights_of = optimizer_state(engine)
    found["current"] = {
        name.removeprefix("weight "): value for name, value in weights_of.items() if name.startswith("weight ")
    }
    return found


def step(engine: DiffusersFSDPEngine, batch: TensorDict) -> dict[str, float]:
    """One optimizer step on the batch, by fragments."""
    groups = start(engine, batch)
    for uid in ("g2", "g0", "g1"):
        engine.accumulate(fragment(groups, uid))
    return numbers(engine.commit()["metrics"])


def resume(case: ObjectiveCase, toy: Path, batch: TensorDict, folder: Path) -> Resumed:
    """See `Resumed`."""
    straight, _ = moved_engine(case, toy)
    straight.copies.drop("old")
    straight.state.num_updates = NUM_UPDATES
    before = policies_of(straight)
    metrics = step(straight, batch)
    between = policies_of(straight)
    straight.save_checkpoint(str(folder / "step"))
    resumed = case.make_engine(toy)
    resumed.load_checkpoint(str(folder / "step"), del_local_after_load=False)
    for engine in (straight, resumed):
        step(engine, batch)
    return Resumed(before, between, state_of(straight), state_of(resumed), metrics)


# -- two ranks ----------------------------------------------------------------------------------------------
@dataclass
class OnRanks:
    """Results of several ranks with one objective's batch."""

    seen: Seen
    is_still: bool
    """True if on each rank generation left the open gradient bitwise as it was."""
    is_resumed: bool
    """True if on each rank the resumed run is bitwise the straight one. Run for objectives with copies that follow; the
    others' checkpoints are those of `tests/engine/test_two_ranks.py`."""


def on_the_ranks(toy: Path, folder: Path) -> dict[str, OnRanks]:
    """Every case on the ranks that there are: label -> results."""
    register_toy()
    found: dict[str, OnRanks] = {}
    for number, (label, case) in enumerate(CASES.items()):
        batch = torch.load(folder / f"{label}.pt", weights_only=False)
        engine, _ = moved_engine(case, toy)
        reshape(engine, *SHAPES[number % len(SHAPES)][:3])
        is_still, seen, _ = assisted(engine, batch, random_order(random.Random(number)))
        again = resume(case, toy, without_old(batch), folder / label) if case.decays else None
        parts = gathered((is_still, again is None or are_equal(again.resumed, again.straight)))
        found[label] = OnRanks(seen, all(still for still, _ in parts), all(same for _, same in parts))
    return found


def without_old(batch: TensorDict) -> TensorDict:
    """The batch as the driver sends it for the first of several optimizer steps."""
    return batch.exclude("old_log_probs") if "old_log_probs" in batch else batch

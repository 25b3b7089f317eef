# SPDX-License-Identifier: Apache-2.0
"""Mini-batches and epochs over one batch, on a real engine; ranks answer in this process."""

import asyncio
import math
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from tensordict import TensorDict

from tests.engine.cases import CLIP, REWARDS, Case
from tests.engine.harness import SAMPLING as FITTING
from tests.engine.harness import (
    assert_close,
    assert_equal,
    described,
    fetch_from,
    make_batch,
    make_engine,
    samples_of,
    stepped_gradients,
    weights,
)
from tests.tags import changed, make_tag
from tests.trainer.direct import Direct, as_it_is
from verl_digen.algorithms.objectives import all_samples
from verl_digen.algorithms.rows import plain
from verl_digen.config import AdvantageConfig, DigenConfig, RewardConfig
from verl_digen.engine.engine import DiffusersFSDPEngine
from verl_digen.engine.fragment import FragmentSample, FragmentSpec
from verl_digen.engine.ledger import batch_scale
from verl_digen.trainer.updates import TrainerRanks, fragment_samples, group_rewards, mini_batches, train_batch

pytestmark = pytest.mark.slow


class OneRank:
    """verl's worker group with one rank, whose engine is in this process."""

    def __init__(self, engine: DiffusersFSDPEngine, batch: TensorDict):
        self.engine, self.fetch = engine, fetch_from(batch)
        self.evaluated: list[FragmentSpec] = []
        self.num_kept = 0
        """Calls of `keep_old`."""

    def begin(self, num_samples: int, num_rows: int, partition: str, scale: float | None) -> list[Any]:
        return [answer(self.engine.begin(num_samples, num_rows, self.fetch, scale=scale))]

    def accumulate(self, fragment: FragmentSpec) -> list[Any]:
        return [answer({**self.engine.accumulate(fragment), "accumulate_s": 1.0})]

    def evaluate(self, fragments: Sequence[FragmentSpec], partition: str) -> list[Any]:
        self.evaluated += fragments
        return [answer(self.engine.evaluate(fragments, self.fetch))]

    def keep_old(self) -> list[Any]:
        self.num_kept += 1
        return [answer(self.engine.keep_old())]

    def commit(self, more: bool) -> list[Any]:
        return [answer(plain(self.engine.commit(more=more)["metrics"]))]


async def answer(value: Any) -> Any:
    return value


def all_of(batch: TensorDict) -> list[FragmentSample]:
    return [sample for group in samples_of(batch, REWARDS).values() for sample in group]


def update(
    engine: DiffusersFSDPEngine, batch: TensorDict, *, num_groups: int = 3, num_epochs: int = 1
) -> tuple[dict[str, float], OneRank]:
    """Train as the colocated trainer does; returns the metrics and the rank."""
    group, samples = OneRank(engine, batch), all_of(batch)
    work: Coroutine[Any, Any, dict[str, float]] = train_batch(
        TrainerRanks(Direct(group), put=as_it_is),
        mini_batches(samples, num_groups),
        num_epochs=num_epochs,
        scale=batch_scale(samples, engine.digen.advantage),
        keeps_old=engine.objective.reads_old_weights(engine.digen.loss_settings),
        old=engine.digen.denominator,
    )
    return asyncio.run(work), group


@pytest.fixture(scope="module")
def batch(one_rank: None, tiny_qwen_image: Path) -> TensorDict:
    return Case().make_batch(tiny_qwen_image)


@pytest.mark.parametrize("scale", ["batch", "group"])
def test_one_mini_batch_is_a_logical_batch_of_separate_pools(tiny_qwen_image: Path, batch: TensorDict, scale: str):
    case = Case(scale=scale)
    with stepped_gradients(engine := case.make_engine(tiny_qwen_image)) as found:
        metrics, rank = update(engine, batch)
    gradient, expected = case.committed(tiny_qwen_image)
    assert_close(found, gradient, 1e-5)
    assert not rank.evaluated and metrics["ratio_deviation_max"] == 0.0
    for name in ("policy_loss", "grad_norm", "num_rows", "advantage_abs_mean", "advantage_abs_max"):
        assert metrics[name] == pytest.approx(expected[name], rel=1e-5)


def test_several_updates_compare_with_the_policy_before_the_first(tiny_qwen_image: Path, batch: TensorDict):
    engine = make_engine(tiny_qwen_image, optim={"lr_warmup_steps": 4})
    engine.optimizer.param_groups[0]["lr"] = 1e-3  # no warm-up, so that the first step moves
    metrics, rank = update(engine, batch, num_groups=1, num_epochs=2)
    assert engine.state.num_updates == 6
    assert [fragment.fragment_id for fragment in rank.evaluated] == ["m0", "m1", "m2"]
    assert metrics["num_rows"] == 2 * 18
    assert metrics["ratio_deviation_max"] > 1e-5
    assert metrics["lr"] == pytest.approx((5 * 1e-3 + 1e-3 / 4) / 6)  # it moved once, at the end
    assert engine.lr_scheduler.last_epoch == 1


@pytest.mark.parametrize("tile", [(1, 1), (2, 2)])
def test_the_first_ratio_of_the_first_update_is_exactly_one(
    tiny_qwen_image: Path, batch: TensorDict, tile: tuple[int, int]
):
    digen = {"tsp": {"samples_per_tile": tile[0], "steps_per_tile": tile[1]}}
    engine = make_engine(tiny_qwen_image, digen=digen, optim={"lr": 0.0})
    metrics, rank = update(engine, batch, num_groups=2)
    assert len(rank.evaluated) == 2
    assert metrics["ratio_deviation_max"] == metrics["ratio_deviation_min"] == 0.0


@pytest.mark.parametrize(("loss", "num_forwards"), [("flow_grpo", 3), ("decoupled_ppo", 3), ("tis", 0), ("gspo", 0)])
def test_old_log_probs_are_evaluated_for_losses_that_read_them(
    tiny_qwen_image: Path, batch: TensorDict, loss: str, num_forwards: int
):
    _, rank = update(make_engine(tiny_qwen_image, digen={"loss": {"name": loss}}), batch, num_groups=1)
    assert len(rank.evaluated) == num_forwards


@pytest.mark.parametrize("loss", ["grpo_guard", "flow_dppo"])
def test_a_loss_that_reads_the_old_mean_keeps_the_weights_before_several_updates(
    tiny_qwen_image: Path, batch: TensorDict, loss: str
):
    engine = make_engine(tiny_qwen_image, digen={"loss": {"name": loss}})
    metrics, rank = update(engine, batch)
    assert rank.num_kept == 0 and metrics["ratio_deviation_max"] == metrics["ratio_deviation_min"] == 0.0
    metrics, rank = update(engine, batch, num_epochs=2)
    assert (rank.num_kept, len(rank.evaluated)) == (1, 0) and metrics["ratio_deviation_max"] > 0.0
    assert "old" not in engine.copies


def test_offloaded_weights_stay_between_the_updates_of_a_batch(tiny_qwen_image: Path, batch: TensorDict):
    plain, offloaded = make_engine(tiny_qwen_image), make_engine(tiny_qwen_image, fsdp={"param_offload": True})
    moves: list[str] = []
    to = offloaded.to
    offloaded.to = lambda device, **parts: (moves.append(device), to(device, **parts))  # type: ignore[method-assign]
    for engine in (plain, offloaded):
        update(engine, batch, num_groups=1)
    assert len(moves) == 4  # to the device and back: for the evaluation, and for all updates
    assert_equal(weights(offloaded), weights(plain))


def test_mini_batches_are_whole_groups_in_order():
    samples = [described(f"{uid}{index}", uid, 0.0, 1) for uid in "abcde" for index in range(2)]
    fragments = mini_batches(samples, 2)
    assert [fragment.fragment_id for fragment in fragments] == ["m0", "m1", "m2"]
    assert [[sample.key for sample in fragment.samples] for fragment in fragments] == [
        ["a0", "a1", "b0", "b1"],
        ["c0", "c1", "d0", "d1"],
        ["e0", "e1"],
    ]


def test_samples_are_described_group_after_group():
    tags = [make_tag(0.5, uid=uid, sample_index=index, version=3, num_steps=2) for uid, index in ("b1", "b0", "a0")]
    found = fragment_samples({"b": {1: tags[0], 0: tags[1]}, "a": {0: tags[2]}}, all_samples)
    assert [sample.key for sample in found] == ["b_0_3", "b_1_3", "a_0_3"]
    assert found[0] == FragmentSample("b_0_3", tags[1].facts, 0.5) and found[0].points == (0, 1)


def test_best_of_trains_the_best_and_the_worst_with_the_scale_of_all():
    digen = DigenConfig(advantage=AdvantageConfig(best_of=2, eps=0.5))
    tags = {index: make_tag(reward, version=0, num_steps=2) for index, reward in enumerate([0.5, 2.0, -1.0, 1.0])}
    found = fragment_samples({"a": tags}, digen.select)
    assert [(sample.reward, sample.num_rows) for sample in found] == [(0.5, 0), (2.0, 2), (-1.0, 2), (1.0, 0)]
    std = torch.tensor([0.5, 2.0, -1.0, 1.0]).double().std(correction=0).item()
    assert batch_scale(found, digen.advantage) == pytest.approx(std + 0.5)
    with pytest.raises(ValueError, match=r"digen.advantage.best_of must be null with .*online_dpo, .* got 2"):
        DigenConfig(loss={"name": "online_dpo"}, advantage=AdvantageConfig(best_of=2))


@pytest.mark.parametrize("chosen", [[0, 2], [-1]])
def test_an_objective_that_selects_a_sample_that_the_group_has_not_is_told(chosen):
    tags = {index: make_tag(1.0, num_steps=2) for index in range(2)}
    with pytest.raises(ValueError, match=r"select of an objective must return positions in the group, 0 to 1, got {"):
        fragment_samples({"a": tags}, lambda rewards: chosen)


def test_a_step_that_samples_share_trains_once_and_pruning_by_width_leaves_shared_steps():
    nodes = [(0, 0, 0), (0, 0, 1), (2, 2, 2), (2, 2, 3)]
    tags = {leaf: make_tag(float(leaf), num_steps=3, nodes=own) for leaf, own in enumerate(nodes)}
    found = fragment_samples({"a": tags}, all_samples)
    assert [sample.points for sample in found] == [(0, 1, 2), (2,), (0, 1, 2), (2,)]
    assert [sample.num_rows for sample in found] == [3, 1, 3, 1] and found[3].facts.nodes == (2, 2, 3)
    digen = DigenConfig(advantage=AdvantageConfig(best_of=2))
    found = fragment_samples({"a": tags}, digen.select)  # leaves 0 and 3
    assert [sample.points for sample in found] == [(0, 1, 2), (), (0, 1), (2,)]
    without_first = {leaf: tag for leaf, tag in tags.items() if leaf != 2}
    assert [sample.points for sample in fragment_samples({"a": without_first}, all_samples)][-1] == (0, 1, 2)


def test_several_steps_on_a_tree_evaluate_and_train_each_edge_once(one_rank: None, tiny_qwen_image: Path):
    batch = make_batch(tiny_qwen_image, group_size=4, windows=((0, 1, 2), (0, 1, 2)))
    nodes = [(0, 0, 0), (0, 0, 1), (2, 2, 2), (2, 2, 3)]
    tags = [make_tag(float(number), num_steps=3, nodes=nodes[number % 4]) for number in range(8)]
    samples = [
        changed(replace(sample, key=str(number)), condition_key=f"g{number // 4}", sampling=FITTING)
        for number, sample in enumerate(
            fragment_samples({f"g{number}": dict(enumerate(tags[4 * number :][:4])) for number in (0, 1)}, all_samples)
        )
    ]
    engine = make_engine(tiny_qwen_image, digen={"advantage": {"scale": "batch"}, "loss": {"advantage_clip": CLIP}})
    rank = OneRank(engine, batch)
    (evaluated,) = asyncio.run(TrainerRanks(Direct(rank), put=as_it_is).evaluate([FragmentSpec("all", tuple(samples))]))
    for sample in evaluated.samples:
        there = [point for point, value in enumerate(sample.old_log_probs) if not math.isnan(value)]
        assert there == list(sample.points)
    metrics = asyncio.run(
        train_batch(
            TrainerRanks(Direct(rank), put=as_it_is),
            mini_batches(samples, 1),
            num_epochs=2,
            scale=batch_scale(samples, engine.digen.advantage),
            keeps_old=False,
            old="first_pass",
        )
    )
    assert metrics["num_rows"] == 4 * 8 and math.isfinite(metrics["grad_norm"]) and metrics["grad_norm"] > 0


def test_with_gdpo_the_rewards_of_a_group_are_made_of_its_parts_and_no_others_are_selected_by():
    reward = RewardConfig({"a": 2.0, "gold": {"weight": 0.0}}, custom_weight=1.0, combine="gdpo")
    digen = DigenConfig(reward=reward, advantage=AdvantageConfig(eps=0.5))
    config = OmegaConf.create({"reward": {"custom_reward_function": {"path": "mine.py"}}})
    parts = [{"a": 1.0, "a/detail": 7.0, "custom": 0.0, "gold": 9.0}, {"a": 0.0, "custom": 2.0, "gold": 0.0}]
    tags = {index: make_tag(3.0, num_steps=2, parts=part) for index, part in enumerate(parts)}
    found = fragment_samples({"g": tags}, lambda rewards: [rewards.index(max(rewards))], group_rewards(config, digen))
    # 2 x 0.5 / (0.5 + 0.5) - 1 / (1 + 0.5)
    assert [sample.reward for sample in found] == pytest.approx([1 / 3, -1 / 3])
    assert [sample.num_rows for sample in found] == [2, 0]
    plain = group_rewards(config, DigenConfig(reward=RewardConfig({"a": 2.0})))
    assert plain(list(tags.values())) == [3.0, 3.0]


def test_a_scale_of_the_batch_is_that_of_all_rewards():
    samples = [described(str(n), uid, r, 1) for n, (uid, r) in enumerate([("a", 0.0), ("a", 2.0), ("b", 1.0)])]
    std = torch.tensor([0.0, 2.0, 1.0]).double().std(correction=0).item()
    assert batch_scale(samples, AdvantageConfig(eps=0.5)) == pytest.approx(std + 0.5)
    assert batch_scale(samples, AdvantageConfig(scale="max_group", eps=0.5)) == pytest.approx(1.5)
    assert batch_scale(samples, AdvantageConfig(scale="group")) is None


def test_a_row_that_no_rank_evaluated_is_named():
    class Lacking:
        def evaluate(self, fragments: Sequence[FragmentSpec], partition: str) -> list[Any]:
            return [answer({"x": {0: -1.0}}), answer({})]

    fragment = FragmentSpec("f", (described("x", "g", 0.0, 2),))
    with pytest.raises(RuntimeError, match=r"sample x has 2 trained steps, but the trainer's ranks evaluated \[0\]"):
        asyncio.run(TrainerRanks(Direct(Lacking()), put=as_it_is).evaluate([fragment]))

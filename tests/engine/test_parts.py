# SPDX-License-Identifier: Apache-2.0
"""Samples that train before their group is complete, against whole groups and the serial loop over rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from tests.engine.cases import CASES, REWARDS, Case, optimizer_state
from tests.engine.harness import (
    assert_close,
    assert_equal,
    begin,
    fragment,
    make_engine,
    peek,
    samples_of,
    stepped_gradients,
)
from verl_digen.algorithms.metric import numbers
from verl_digen.engine.engine import DiffusersFSDPEngine
from verl_digen.engine.fragment import FragmentSample, FragmentSpec

pytestmark = [pytest.mark.usefixtures("one_rank"), pytest.mark.slow]

Groups = dict[str, list[FragmentSample]]

CUTS = {
    "one by one": (("g0", 1), ("g0", 0), ("g1", 2)),
    "all but one": (("g2", 0, 2), ("g1", 0, 1)),
    "a whole group": (("g1", 0, 1, 2),),
}
"""Parts, in order: group, and its samples. A group is complete before a part of the next one trains."""


@pytest.fixture(scope="module")
def batch(tiny_qwen_image: Path) -> TensorDict:
    return Case().make_batch(tiny_qwen_image)


def part(groups: Groups, uid: str, *indices: int) -> FragmentSpec:
    samples = tuple(groups[uid][index] for index in indices)
    return FragmentSpec(f"{uid} {indices}", samples, part_of=uid)


def in_parts(engine: DiffusersFSDPEngine, batch: TensorDict, cut: str) -> tuple[dict[str, torch.Tensor], dict]:
    """(gradient that the optimizer step found, metrics) of the batch cut like this."""
    groups, left = begin(engine, batch, REWARDS), ["g0", "g1", "g2"]
    for number, (uid, *indices) in enumerate(CUTS[cut]):
        engine.accumulate(part(groups, uid, *indices))
        following = [other for other, *_ in CUTS[cut][number + 1 :]]
        if uid not in following:
            engine.accumulate(fragment(groups, uid))
            left.remove(uid)
    if left:
        engine.accumulate(fragment(groups, *left))
    with stepped_gradients(engine) as found:
        metrics = numbers(engine.commit()["metrics"])
    return found, metrics


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("name", ["batch_scale", "group_scale", "no_clamping", "full_kl", "lora_kl", "lora_kl_by_tile"])
def test_committed_gradient_is_that_of_the_serial_loop(tiny_qwen_image: Path, batch: TensorDict, name: str, cut: str):
    case = CASES[name]
    found, metrics = in_parts(case.make_engine(tiny_qwen_image), batch, cut)
    loss, expected = case.serial(tiny_qwen_image)
    assert_close(found, expected, 1e-5)
    assert metrics["num_rows"] == 18 and metrics["num_discarded_samples"] == 0
    assert metrics["policy_loss"] + case.beside(metrics) == pytest.approx(loss, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("name", ["group_scale", "full_kl"])
def test_metrics_are_those_of_whole_groups(tiny_qwen_image: Path, batch: TensorDict, name: str):
    case = CASES[name]
    _, metrics = in_parts(case.make_engine(tiny_qwen_image), batch, "one by one")
    _, expected = case.committed(tiny_qwen_image)
    of_calls = {"num_fragments", "num_late_samples", "num_tiles", "num_pad_rows", "text_padding_share"}
    assert metrics.keys() == expected.keys()
    for key in expected.keys() - of_calls:
        assert metrics[key] == pytest.approx(expected[key], rel=1e-4, abs=1e-7), key


@pytest.mark.parametrize("name", ["full_kl", "lora_kl"])
def test_nothing_of_a_dropped_group_is_in_the_gradient(tiny_qwen_image: Path, batch: TensorDict, name: str):
    case = CASES[name]
    engine = case.make_engine(tiny_qwen_image)
    groups = begin(engine, batch, REWARDS)
    engine.accumulate(fragment(groups, "g2"))
    engine.accumulate(part(groups, "g1", 0, 1))
    engine.accumulate(fragment(groups, "g0"))
    with stepped_gradients(engine) as found:
        metrics = numbers(engine.commit()["metrics"])
    expected, whole = case.without_dropped(tiny_qwen_image)
    assert_close(found, expected, 1e-5)
    assert metrics["num_discarded_samples"] == 2
    for key in ("num_rows", "policy_loss", "prompt_tokens", "kl"):
        assert metrics[key] == pytest.approx(whole[key], rel=1e-4, abs=1e-7), key


def test_a_part_leaves_the_batchs_gradient_as_it_is_and_abort_forgets_it(tiny_qwen_image: Path, batch: TensorDict):
    engine = Case(scale="group", kl="flow_grpo").make_engine(tiny_qwen_image)
    before = {name: value.clone() for name, value in optimizer_state(engine).items()}
    groups = begin(engine, batch, REWARDS)
    engine.accumulate(fragment(groups, "g2"))
    gradient = {str(key): piece.clone() for key, piece in peek(engine).items()}
    assert engine.accumulate(part(groups, "g0", 0, 2)) == {"num_rows": 6, "num_held_samples": 0}
    assert_equal({str(key): piece for key, piece in peek(engine).items()}, gradient)
    engine.abort()
    assert not peek(engine)
    assert_equal(optimizer_state(engine), before)
    found, _ = in_parts(engine, batch, "one by one")
    expected, _ = in_parts(Case(scale="group", kl="flow_grpo").make_engine(tiny_qwen_image), batch, "one by one")
    assert_equal(found, expected)


def test_rewards_far_from_zero_do_not_round_the_gradient_away(tiny_qwen_image: Path, batch: TensorDict):
    """Rewards of 1000 and a spread of 1, as a judge's scale may have them."""
    engine, other = (Case(scale="group").make_engine(tiny_qwen_image) for _ in range(2))
    rewards = [1000.0 + reward for reward in REWARDS]
    gradients: list[dict[str, torch.Tensor]] = []
    for trained, comes in ((engine, [("g0", 0), ("g0", 1)]), (other, [])):
        groups = begin(trained, batch, rewards)
        for uid, *indices in comes:
            trained.accumulate(part(groups, uid, *indices))
        trained.accumulate(fragment(groups, "g0", "g1", "g2"))
        with stepped_gradients(trained) as found:
            trained.commit()
        gradients.append(found)
    assert_close(*gradients, rtol=1e-5)


@pytest.mark.parametrize(
    ("loss", "changes", "message"),
    [
        ({"name": "gspo"}, {}, "a loss that is linear in the advantage"),
        ({"old_log_probs": "rollout"}, {}, "a loss that is linear in the advantage"),
        ({}, {"uid": "g1"}, "samples of its group"),
        ({}, {"nodes": (0, 1, 2)}, "samples outside of a tree"),
        ({}, {"old_log_probs": (0.0, 0.0, 0.0)}, "one optimizer step per batch"),
        ({}, {"reward": float("nan")}, "finite rewards"),
    ],
)
def test_a_part_that_may_not_train_is_refused(
    tiny_qwen_image: Path, batch: TensorDict, loss: dict[str, Any], changes: dict[str, Any], message: str
):
    engine = make_engine(tiny_qwen_image, digen={"loss": loss})
    groups = begin(engine, batch, REWARDS)
    bad = replace(groups["g0"][0], **changes)
    with pytest.raises(RuntimeError, match=message):
        engine.accumulate(FragmentSpec("part", (bad,), part_of="g0"))
    assert engine.accumulate(fragment(groups, "g0", "g1", "g2"))["num_rows"] == 18  # the batch is sound
    engine.abort()


def test_a_sample_keeps_the_reward_it_trained_with(tiny_qwen_image: Path, batch: TensorDict):
    engine = Case().make_engine(tiny_qwen_image)
    groups = begin(engine, batch, REWARDS)
    engine.accumulate(part(groups, "g0", 0, 1))
    for wrong in ({"reward": 7.0}, {"key": "another"}):
        samples = [replace(groups["g0"][0], **wrong), *groups["g0"][1:]]
        with pytest.raises(RuntimeError, match="trained before its group g0 was complete"):
            engine.accumulate(FragmentSpec("whole", tuple(samples)))
    assert samples_of(batch, REWARDS)["g0"] == groups["g0"]
    assert engine.accumulate(fragment(groups, "g0"))["num_rows"] > 0
    engine.abort()

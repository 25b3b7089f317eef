# SPDX-License-Identifier: Apache-2.0
"""Forward points in the engine: gradients of every objective against plain modules, copies that follow, resumed runs,
batches of ties, generation with the old policy.

`old`, the reference, other copies and the trained weights are different sets of weights in these tests.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from tests.engine.cases import optimizer_state
from tests.engine.forward_cases import (
    CASES,
    REWARDS,
    SHAPES,
    TIES,
    WHOLE,
    ForwardCase,
    make_clean_batch,
    moved_engine,
    reshape,
    serial_gradient,
    start,
    trained,
)
from tests.engine.harness import (
    LORA,
    assert_close,
    assert_equal,
    begin,
    fragment,
    generate,
    local_weights,
    make_engine,
    peek,
    perturb,
    weights,
)
from tests.engine.off_policy import committed
from verl_digen.algorithms.metric import numbers
from verl_digen.algorithms.objectives import find_objective, objective_names

NFT = CASES["nft"]


@pytest.fixture(scope="module")
def batch(one_rank: None, tiny_qwen_image: Path) -> TensorDict:
    return make_clean_batch(tiny_qwen_image)


def test_every_objective_of_forward_points_has_a_case():
    names = {name for name in objective_names() if find_objective(name).points == "forward"}
    assert {case.name for case in CASES.values()} == names


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_gradient_is_that_of_plain_modules_one_row_at_a_time(
    tiny_qwen_image: Path, batch: TensorDict, case: ForwardCase
):
    """Compare every shape of tiles, order of fragments and way to reduce."""
    engine = moved_engine(tiny_qwen_image, case)
    expected = serial_gradient(engine, tiny_qwen_image, batch)
    for tile, reduce, order in SHAPES:
        reshape(engine, tile, reduce)
        found, metrics = trained(engine, batch, order)
        assert_close(found, expected, 2e-5)
        assert metrics["num_rows"] == (10 if case.name in ("online_dpo", "offline_dpo") else 15)
        assert metrics["num_late_samples"] == (3 if case.scale == "batch" and len(order) == 2 else 0)
        assert not any(name.startswith("rollout_") for name in metrics), "nothing was recorded to compare with"
        for share in ("clip_fraction", "dropped_fraction", "implicit_accuracy"):
            assert 0 < metrics.get(share, 0.5) < 1, share


@pytest.mark.parametrize("name", ["nft", "awm", "dgpo"])
def test_a_resumed_run_continues_bitwise_with_all_copies(
    tiny_qwen_image: Path, batch: TensorDict, tmp_path: Path, name: str
):
    """The engine has taken 75 steps, so that decays are not 0."""
    case = CASES[name]
    straight = moved_engine(tiny_qwen_image, case)
    straight.state.num_updates = 75
    committed(straight, batch, WHOLE, REWARDS)
    straight.save_checkpoint(str(tmp_path / "step"))
    resumed = case.make_engine(tiny_qwen_image)
    resumed.load_checkpoint(str(tmp_path / "step"), del_local_after_load=False)
    copies = (*straight.digen.loss_settings.copies, "current")
    before = [weights(resumed, policy=policy) for policy in copies]
    for engine in (straight, resumed):
        committed(engine, batch, WHOLE, REWARDS)
    for policy, old in zip(copies, before, strict=True):
        found = weights(resumed, policy=policy)
        assert_equal(found, weights(straight, policy=policy))
        assert any(not torch.equal(found[key], value) for key, value in old.items()), policy


def test_a_batch_of_ties_takes_no_step_and_the_next_one_trains(tiny_qwen_image: Path, batch: TensorDict):
    case = CASES["online_dpo"]
    engine, other = (make_engine(tiny_qwen_image, digen=case.digen) for _ in range(2))
    before = optimizer_state(engine)
    for num_planned in (None, 0):  # as on separate pools, and in turn
        groups = start(engine, batch, TIES)
        if num_planned is not None:
            engine.abort()
            engine.begin(len(TIES), num_planned, lambda samples: pytest.fail("a sample without rows was fetched"))
        engine.accumulate(fragment(groups, "g1", "g0"))
        metrics = numbers(engine.commit(more=True)["metrics"])
        assert (metrics["num_empty_updates"], metrics["num_rows"], metrics["grad_norm"]) == (1, 0, 0)
        assert_equal(optimizer_state(engine), before)
    found = []
    for one in (engine, other):
        groups = start(one, batch, REWARDS)
        one.accumulate(fragment(groups, "g0", "g1"))
        found.append(numbers(one.commit()["metrics"]))
    assert found[0] == found[1] and found[0]["num_empty_updates"] == 0 and found[0]["num_rows"] == 10
    assert_equal(optimizer_state(engine), optimizer_state(other))


def test_the_old_policy_follows_each_batch(tiny_qwen_image: Path, batch: TensorDict):
    """Decay 1 - 0.0075 is that of `delayed` after 76 steps; the engine has taken 75."""
    case = replace(NFT, settings=NFT.settings | {"old_policy": "delayed"})
    engine = moved_engine(tiny_qwen_image, case)
    engine.state.num_updates = 75
    before = {name: shard.clone() for name, shard in engine.copies["old"].shards.items()}
    committed(engine, batch, WHOLE, REWARDS)
    trained = local_weights(engine)
    for name, shard in engine.copies["old"].shards.items():
        expected = 0.0075 * before[name] + 0.9925 * trained[name]
        torch.testing.assert_close(shard, expected, rtol=1e-5, atol=1e-7)


def test_a_step_without_a_finite_gradient_and_an_abort_leave_the_old_policy(tiny_qwen_image: Path, batch: TensorDict):
    engine = moved_engine(tiny_qwen_image, NFT)
    before = weights(engine, policy="old")
    groups = begin(engine, batch, REWARDS)
    engine.accumulate(fragment(groups, "g0"))
    engine.abort()
    assert_equal(weights(engine, policy="old"), before)
    broken = batch.clone()
    broken["clean"] = batch["clean"] * torch.nan
    _, metrics = committed(engine, broken, WHOLE, REWARDS)
    assert metrics["num_skipped_updates"] == 1
    assert_equal(weights(engine, policy="old"), before)


@pytest.mark.parametrize("model", ["full", "lora"])
def test_replicas_and_assisting_trainers_generate_with_the_old_policy(
    tiny_qwen_image: Path, batch: TensorDict, model: str
):
    engine = moved_engine(tiny_qwen_image, replace(NFT, model=model))
    assert_equal(weights(engine), weights(engine, policy="old"))  # what is exported if no policy is named
    groups = begin(engine, batch, REWARDS)
    engine.accumulate(fragment(groups, "g0"))
    open_gradient, trained = peek(engine), weights(engine, policy="current")
    assisted = generate(engine)
    after = peek(engine)
    assert all(torch.equal(after[name], open_gradient[name]) for name in open_gradient)
    assert_equal(weights(engine, policy="current"), trained)
    other = make_engine(tiny_qwen_image, model=LORA if model == "lora" else {})
    assert not torch.allclose(assisted, generate(other))
    perturb(other, 0.1 if model == "lora" else 0.02, seed=1)  # the weights of `old`
    torch.testing.assert_close(assisted, generate(other), rtol=1e-4, atol=1e-5)
    engine.abort()

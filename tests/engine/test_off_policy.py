# SPDX-License-Identifier: Apache-2.0
"""Off-policy losses in the engine: recorded, earlier and current log-probs, rewards, trajectories cut into tiles."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from tests.engine.harness import assert_close, assert_equal, log_probs, read_samples, weights
from tests.engine.off_policy import SHAPES, WHOLE, committed, loss_of, old_batch, old_engine, serial, serial_gspo
from tests.engine.serial import plain_transformer
from verl_digen.algorithms.objectives import find_objective, objective_names
from verl_digen.config import DigenConfig
from verl_digen.engine.loss import DiffusionLoss
from verl_digen.engine.points import PathPoints
from verl_digen.engine.rows import make_rows

pytestmark = pytest.mark.slow

OFF_POLICY = [
    name for name in objective_names() if find_objective(name).loss.off_policy and find_objective(name).points == "path"
]


@pytest.fixture(scope="module")
def batch(tiny_qwen_image: Path) -> TensorDict:
    return old_batch(tiny_qwen_image)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("name", OFF_POLICY)
def test_every_loss_has_the_gradient_of_rows_scored_one_by_one(tiny_qwen_image: Path, batch: TensorDict, name: str):
    engine = old_engine(tiny_qwen_image, name)
    module = plain_transformer(tiny_qwen_image, weights(engine))
    expected = serial(module, tiny_qwen_image, batch, name, list(range(9)))
    by_fragment, metrics = committed(engine, batch)
    assert_close(by_fragment, expected, 2e-5)
    found, whole = committed(old_engine(tiny_qwen_image, name), batch, WHOLE)
    assert_close(found, expected, 2e-5)
    assert metrics["policy_loss"] == pytest.approx(whole["policy_loss"], rel=1e-4)
    if name not in ("reinforce", "kimi", "decoupled_ppo"):
        assert metrics["ratio_deviation_max"] > 0.05 and 0 < metrics["clip_fraction"] < 1


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("shape", SHAPES)
def test_gspo_is_the_same_however_trajectories_are_cut_into_tiles(
    tiny_qwen_image: Path, batch: TensorDict, shape: tuple[int, int]
):
    engine = old_engine(tiny_qwen_image, "gspo", shape)
    expected = serial_gspo(plain_transformer(tiny_qwen_image, weights(engine)), tiny_qwen_image, batch)
    samples = read_samples(batch)
    engine.planner.rehearse(make_rows(PathPoints(), samples, samples.all_picks))  # leaves nothing
    found, metrics = committed(engine, batch, WHOLE)
    assert_close(found, expected, 2e-5)
    assert metrics["num_tiles"] == {1: 18, 2: 6, 3: 6, 100: 1}[shape[0]]
    assert_close(committed(old_engine(tiny_qwen_image, "gspo", shape), batch)[0], expected, 2e-5)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("name", ["gspo", "tis", "decoupled_ppo"])
def test_a_kl_term_goes_with_every_loss(tiny_qwen_image: Path, batch: TensorDict, name: str):
    """The reference is swapped in for all tiles of a call: the forwards of gspo must not run with it."""
    plain, _ = committed(old_engine(tiny_qwen_image, name), batch)
    with_kl, _ = committed(old_engine(tiny_qwen_image, name, kl={"coef": 0.3}), batch)
    silent = loss_of(name, advantage_clip=1e-9)
    only_kl, _ = committed(old_engine(tiny_qwen_image, name, kl={"coef": 0.3}, loss=silent), batch)
    assert_close({key: with_kl[key] - only_kl[key] for key in plain}, plain, 1e-4)


@pytest.mark.usefixtures("one_rank")
def test_decoupled_ppo_weighs_the_weights_before_the_update_with_those_that_generated(
    tiny_qwen_image: Path, batch: TensorDict
):
    expected, _ = committed(old_engine(tiny_qwen_image, "flow_grpo"), batch)
    for log_ratio, weight in ((math.log(0.5), 0.5), (1.0, 1.05)):
        engine = old_engine(tiny_qwen_image, "decoupled_ppo")
        shifted = batch.clone()
        shifted["log_probs"] = torch.nested.as_nested_tensor(
            [current - log_ratio for current in log_probs(engine, batch)], layout=torch.jagged
        )
        found, metrics = committed(engine, shifted)
        assert metrics["behaviour_weight"] == pytest.approx(weight, rel=1e-4)
        assert metrics["ratio_deviation_max"] == metrics["ratio_deviation_min"] == 0.0
        assert_close(found, {key: weight * value for key, value in expected.items()}, 1e-4)


@pytest.mark.usefixtures("one_rank")
def test_with_stale_samples_flow_grpo_s_ratio_is_against_the_policy_that_generated(
    tiny_qwen_image: Path, batch: TensorDict
):
    stale, recorded, strict = (
        committed(old_engine(tiny_qwen_image, "flow_grpo", **digen), batch)
        for digen in ({"staleness": {"max_versions": 1}}, {"loss": loss_of("flow_grpo", old_log_probs="rollout")}, {})
    )
    assert_equal(stale[0], recorded[0])
    assert stale[1]["ratio_deviation_max"] > 0.05 and stale[1]["clip_fraction"] > 0
    assert strict[1]["ratio_deviation_max"] == 0.0


def test_settings_that_do_not_go_with_the_loss_are_refused():
    for values, message in (
        (
            {"name": "tis", "old_log_probs": "recompute"},
            "digen.loss.old_log_probs must be auto with digen.loss.name=tis",
        ),
        ({"name": "decoupled_ppo", "old_log_probs": "rollout"}, "digen.loss.old_log_probs must be auto or recompute"),
    ):
        with pytest.raises(ValueError, match=message):
            DiffusionLoss(DigenConfig(loss=values))

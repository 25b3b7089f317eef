# SPDX-License-Identifier: Apache-2.0
"""The comparison of two trainers (`tests.weight_change`) accepts equal training and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from tests.engine.harness import full, local_weights, make_batch, make_engine, select, train
from tests.weight_change import TOLERANCE, assert_same_change, relative_gap

SGD = {
    "optimizer": "SGD",
    "lr": 0.5,
    "weight_decay": 0.0,
    "clip_grad": 1e9,
    "override_optimizer_config": {"momentum": 0.9},
}
NUM_STEPS = 3


def trained(path: Path, batch: TensorDict, num_steps: int = NUM_STEPS, factor: float = 1.0) -> dict[str, torch.Tensor]:
    """Weights after steps on `batch`, its advantages times `factor`."""
    engine = make_engine(path, optim=SGD, digen={"loss": {"advantage_clip": 1e9}})
    batch = batch.clone()
    batch["advantages"] = batch["advantages"] * factor
    train(engine, batch, num_steps)
    return {name: full(value) for name, value in local_weights(engine).items()}


@pytest.fixture(scope="module")
def batch(tiny_qwen_image: Path) -> TensorDict:
    return make_batch(tiny_qwen_image)


@pytest.fixture(scope="module")
def start(tiny_qwen_image: Path, one_rank: None) -> dict[str, torch.Tensor]:
    return {name: full(value) for name, value in local_weights(make_engine(tiny_qwen_image)).items()}


@pytest.fixture(scope="module")
def expected(tiny_qwen_image: Path, one_rank: None, batch: TensorDict) -> dict[str, torch.Tensor]:
    return trained(tiny_qwen_image, batch)


def test_the_same_samples_in_another_order_pass(tiny_qwen_image: Path, start: dict, expected: dict, batch: TensorDict):
    reordered = trained(tiny_qwen_image, select(batch, [5, 3, 1, 0, 2, 4]))
    gap = relative_gap(start, expected, reordered)
    assert 0 < gap <= TOLERANCE / 10, "and there is room for what other machines round"
    assert_same_change(start, expected, reordered, unequal={"untrained": start})


def test_no_training_a_reversed_or_foreign_or_huge_gradient_and_a_lost_step_or_sample_are_rejected(
    tiny_qwen_image: Path, start: dict, expected: dict, batch: TensorDict
):
    wrong = {
        "untrained": start,
        "reversed": trained(tiny_qwen_image, batch, factor=-1.0),
        "times 1000": trained(tiny_qwen_image, batch, factor=1000.0),
        "2 % more": trained(tiny_qwen_image, batch, factor=1.02),
        "one step less": trained(tiny_qwen_image, batch, NUM_STEPS - 1),
        "one sample less": trained(tiny_qwen_image, select(batch, [0, 1, 2, 3, 4])),
        "another seed": trained(tiny_qwen_image, make_batch(tiny_qwen_image, seed=1)),
    }
    for name, weights in wrong.items():
        assert relative_gap(start, expected, weights) > 10 * TOLERANCE, name
        with pytest.raises(AssertionError, match="the changes differ"):
            assert_same_change(start, expected, weights, unequal={})


def test_a_comparison_that_an_unequal_control_would_pass_and_one_of_weights_that_did_not_move_fail(
    start: dict, expected: dict
):
    with pytest.raises(AssertionError, match="the control would pass"):
        assert_same_change(start, expected, expected, unequal={"the control": expected})
    with pytest.raises(AssertionError, match="the changes differ by inf"):
        assert_same_change(start, start, start, unequal={})

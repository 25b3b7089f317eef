# SPDX-License-Identifier: Apache-2.0
"""Adam's step in one kernel, against PyTorch's loop over tensors."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from verl.workers.config import FSDPOptimizerConfig

from tests.engine.harness import assert_equal, local_weights, make_batch, make_engine, perturb, train
from verl_digen.engine.engine import DiffusersFSDPEngine
from verl_digen.engine.optimizer import with_fused

pytestmark = pytest.mark.usefixtures("one_rank")

LOOP = {"override_optimizer_config": {"fused": False, "foreach": False}}
TOLERANCE = 1e-6
"""Difference of a weight after 3 steps of lr 1e-3: the kernel rounds in other places."""


def engine_with(path: Path, optim: dict[str, Any] | None = None) -> DiffusersFSDPEngine:
    engine = make_engine(path, optim=optim)
    perturb(engine)
    return engine


def optimizer_of(engine: DiffusersFSDPEngine) -> torch.optim.Optimizer:
    assert engine.optimizer is not None
    return engine.optimizer


def assert_near(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=TOLERANCE)


def test_fused_steps_are_those_of_the_loop(tiny_qwen_image: Path):
    fused, loop = engine_with(tiny_qwen_image), engine_with(tiny_qwen_image, LOOP)
    assert [optimizer_of(engine).param_groups[0]["fused"] for engine in (fused, loop)] == [True, False]
    batch, before = make_batch(tiny_qwen_image), local_weights(fused)
    for engine in (fused, loop):
        # of rounding only are the gradients of biases that softmax cancels: Adam makes steps of lr of them
        optimizer_of(engine).param_groups[0]["eps"] = 1e-5
        train(engine, batch, 3)
    assert_near(local_weights(fused), local_weights(loop))
    moved = [(value - before[name]).abs().max() for name, value in local_weights(fused).items()]
    assert max(moved) > 1e3 * TOLERANCE


@pytest.mark.parametrize(("before", "after"), [(LOOP, None), (None, LOOP)], ids=["to fused", "to the loop"])
def test_a_checkpoint_of_one_kind_continues_as_the_other(
    tiny_qwen_image: Path, tmp_path: Path, before: dict | None, after: dict | None
):
    batch = make_batch(tiny_qwen_image)
    first, second = engine_with(tiny_qwen_image, before), engine_with(tiny_qwen_image, after)
    train(first, batch, 2)
    first.save_checkpoint(str(tmp_path / "actor"))
    second.load_checkpoint(str(tmp_path / "actor"), del_local_after_load=False)
    assert_equal(local_weights(second), local_weights(first))
    assert optimizer_of(second).param_groups[0]["fused"] is (after is None)
    for engine in (first, second):
        optimizer_of(engine).param_groups[0]["eps"] = 1e-5
        train(engine, batch)
    assert_near(local_weights(second), local_weights(first))
    steps = {float(state["step"]) for state in optimizer_of(second).state.values()}
    assert steps == {3.0}


def test_a_whole_number_is_a_beta(tiny_qwen_image: Path):
    (group,) = optimizer_of(make_engine(tiny_qwen_image, optim={"betas": [0, 0.99]})).param_groups
    assert group["betas"] == (0.0, 0.99)


def config(**changes: Any) -> FSDPOptimizerConfig:
    return FSDPOptimizerConfig(**({"lr": 1e-3, "total_training_steps": 1} | changes))


@pytest.mark.parametrize(
    ("changes", "device", "expected"),
    [
        ({}, "cpu", {"fused": True}),
        ({"override_optimizer_config": {"eps": 1e-5}}, "cpu", {"eps": 1e-5, "fused": True}),
        ({"optimizer": "Adam"}, "cpu", {"fused": True}),
        ({"override_optimizer_config": {"fused": False}}, "cpu", {"fused": False}),
        ({"override_optimizer_config": {"foreach": True}}, "cpu", {"foreach": True}),
        ({"optimizer": "SGD"}, "cpu", None),
        ({"optimizer": "AdamW8bit", "optimizer_impl": "bitsandbytes.optim"}, "cpu", None),
        ({}, "meta", None),
    ],
)
def test_fused_is_for_adam_on_known_devices_unless_the_user_chose(changes: dict, device: str, expected: dict | None):
    parameters = nn.Linear(2, 2, device=device).parameters()
    assert with_fused(config(**changes), parameters).override_optimizer_config == expected

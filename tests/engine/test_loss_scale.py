# SPDX-License-Identifier: Apache-2.0
"""Training in fp16: its gradient, overflow, growth and resume of the loss scale; on one rank and on two."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from tests.engine.harness import (
    assert_equal,
    assert_same_projection,
    gathered,
    gradients,
    local_weights,
    make_batch,
    make_engine,
    on_two_ranks,
    perturb,
    train,
    weights,
)
from tests.tiny_models import build_tiny
from verl_digen.engine.engine import DiffusersFSDPEngine
from verl_digen.engine.optimizer import FIRST_SCALE, GROWTH_STEPS, LARGEST_SCALE, LossScale

FP16 = {"mixed_precision": {"param_dtype": "fp16", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}}
ADAPTER = {"lora_rank": 4, "lora_alpha": 8}
KL = {"kl": {"coef": 0.1}}
POOLED_WIDTH = 24
"""Numbers of a pooled prompt of the tiny Stable Diffusion 3."""
HUGE = 2.0**40
"""Loss scale that overflows fp16."""


@pytest.fixture(scope="module")
def tiny_sd3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny("sd3", tmp_path_factory.mktemp("sd3") / "checkpoint")


@pytest.fixture(scope="module")
def batch(tiny_sd3: Path) -> TensorDict:
    return batch_of(tiny_sd3)


def batch_of(path: Path) -> TensorDict:
    return make_batch(path, group_size=2, pooled_width=POOLED_WIDTH)


def fp16_engine(path: Path, model: dict[str, Any], digen: dict[str, Any] | None = None) -> DiffusersFSDPEngine:
    """Engine in fp16; with LoRA the frozen base is fp16, too."""
    fsdp = FP16 | ({"model_dtype": "fp16"} if model else {})
    engine = make_engine(path, model=model, fsdp=fsdp, digen=digen)
    perturb(engine, scale=0.1 if model else 0.02)
    return engine


def scale_of(engine: DiffusersFSDPEngine) -> LossScale:
    assert engine.state.loss_scale is not None
    return engine.state.loss_scale


def distance(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Norm of the whole gradient's error, relative."""
    assert found.keys() == expected.keys()
    square = sum((found[name] - value).double().square().sum().item() for name, value in expected.items())
    return (square / sum(value.double().square().sum().item() for value in expected.values())) ** 0.5


# -- the scale by itself ----------------------------------------------------------------------------------
def test_scale_halves_at_an_overflow_and_doubles_after_good_steps():
    scale = LossScale(8.0)
    for _ in range(GROWTH_STEPS - 1):
        scale.update(is_finite=True)
    scale.update(is_finite=False)
    assert (scale.value, scale.num_good_steps) == (4.0, 0)
    for _ in range(GROWTH_STEPS):
        assert scale.value == 4.0
        scale.update(is_finite=True)
    assert (scale.value, scale.num_good_steps) == (8.0, 0)


def test_scale_has_bounds():
    largest = LossScale(LARGEST_SCALE, GROWTH_STEPS - 1)
    largest.update(is_finite=True)
    assert largest.value == LARGEST_SCALE
    with pytest.raises(RuntimeError, match=r"digen\.loss\.name .* set .*mixed_precision\.param_dtype=bf16"):
        LossScale(1.0).update(is_finite=False)


# -- one rank ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("reduce", ["tile", "batch"])
@pytest.mark.parametrize("model", [{}, ADAPTER], ids=["full", "lora"])
def test_gradient_in_fp16_is_that_of_fp32(one_rank: None, tiny_sd3: Path, batch: TensorDict, model: dict, reduce: str):
    digen = KL | {"tsp": {"reduce": reduce, "samples_per_tile": 2, "steps_per_tile": 2}}
    plain = make_engine(tiny_sd3, model=model, digen=digen)
    perturb(plain, scale=0.1 if model else 0.02)
    expected, wanted = gradients(plain, batch)
    engine = fp16_engine(tiny_sd3, model, digen)
    found, output = gradients(engine, batch)
    assert 0 < distance(found, expected) < 0.02
    assert output["metrics"]["loss_scale"] == FIRST_SCALE and "loss_scale" not in wanted["metrics"]
    norm = sum(value.double().square().sum().item() for value in found.values()) ** 0.5
    assert_same_projection(output["metrics"] | {"grad_norm": norm}, found)
    masters = {value.dtype for name, value in engine.module.named_parameters() if not model or "lora_" in name}
    assert masters == {torch.float32}


def test_small_gradients_survive_because_of_the_scale(one_rank: None, tiny_sd3: Path, batch: TensorDict):
    small = batch.clone()
    small["advantages"] = batch["advantages"] * 1e-3
    plain = make_engine(tiny_sd3)
    perturb(plain)
    expected = gradients(plain, small)[0]
    engine = fp16_engine(tiny_sd3, {})
    scaled = distance(gradients(engine, small)[0], expected)
    scale_of(engine).value = 1.0
    assert scaled < 0.02 < distance(gradients(engine, small)[0], expected)


def test_clipping_is_of_the_unscaled_gradient(one_rank: None, tiny_sd3: Path, batch: TensorDict):
    engine = fp16_engine(tiny_sd3, {})
    norm = train(engine, batch)[0]["metrics"]["grad_norm"]
    plain = make_engine(tiny_sd3)
    perturb(plain)
    assert norm == pytest.approx(train(plain, batch)[0]["metrics"]["grad_norm"], rel=0.02)


def test_overflow_skips_the_step_and_halves_the_scale(
    one_rank: None, tiny_sd3: Path, batch: TensorDict, caplog: pytest.LogCaptureFixture
):
    engine = fp16_engine(tiny_sd3, ADAPTER, {"ema": {"enable": True, "every_steps": 1}})
    before, average = weights(engine), weights(engine, policy="average")
    scale_of(engine).value = HUGE
    with caplog.at_level(logging.INFO):
        metrics = train(engine, batch)[0]["metrics"]
    assert (metrics["num_skipped_updates"], metrics["loss_scale"]) == (1, HUGE)
    assert scale_of(engine).value == HUGE / 2
    assert "the gradient overflowed fp16" in caplog.text
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]  # it is expected
    assert_equal(weights(engine), before)
    assert_equal(weights(engine, policy="average"), average)
    scale_of(engine).value = FIRST_SCALE
    metrics = train(engine, batch)[0]["metrics"]
    assert metrics["num_skipped_updates"] == 0 and scale_of(engine).num_good_steps == 1
    assert (engine.state.num_updates, engine.state.num_skipped) == (1, 1)


def test_abort_leaves_the_scale(one_rank: None, tiny_sd3: Path, batch: TensorDict):
    engine = fp16_engine(tiny_sd3, ADAPTER)
    scale_of(engine).value, scale_of(engine).num_good_steps = 4.0, 7
    before = weights(engine)

    def fail() -> float:
        raise OSError("out of memory, say")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.optimizer, "step", fail)
        with pytest.raises(OSError, match="say"):
            train(engine, batch)
    engine.abort()
    assert scale_of(engine) == LossScale(4.0, 7)
    assert_equal(weights(engine), before)
    train(engine, batch)  # no mark of the failed step stays
    assert scale_of(engine) == LossScale(4.0, 8)


def test_resumed_run_has_the_scale(one_rank: None, tiny_sd3: Path, tmp_path: Path, batch: TensorDict):
    straight = fp16_engine(tiny_sd3, ADAPTER)
    scale_of(straight).value = HUGE
    train(straight, batch, 1)  # overflows
    scale_of(straight).value = 32.0
    train(straight, batch, 2)
    straight.save_checkpoint(str(tmp_path / "step_3"), global_step=3)
    resumed = fp16_engine(tiny_sd3, ADAPTER)
    resumed.load_checkpoint(str(tmp_path / "step_3"))
    assert resumed.state == straight.state
    assert (scale_of(resumed).value, scale_of(resumed).num_good_steps, resumed.state.num_skipped) == (32.0, 2, 1)
    assert train(resumed, batch)[0]["metrics"] == train(straight, batch)[0]["metrics"]
    assert_equal(weights(resumed), weights(straight))


def test_checkpoint_of_another_precision_starts_a_new_scale(
    one_rank: None, tiny_sd3: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    make_engine(tiny_sd3).save_checkpoint(str(tmp_path / "step_0"), global_step=0)
    engine = fp16_engine(tiny_sd3, {})
    engine.load_checkpoint(str(tmp_path / "step_0"))
    assert scale_of(engine) == LossScale() and "has no loss scale" in caplog.text


# -- two ranks --------------------------------------------------------------------------------------------
def overflow_on_one_rank(path: Path, folder: Path) -> list[Any]:
    """Per rank: what an infinite gradient on one of them left behind, and the step after it."""
    engine, batch = fp16_engine(path, ADAPTER), batch_of(path)
    before = local_weights(engine)
    backward = engine.backward

    def overflowing(loss: torch.Tensor, retain_graph: bool) -> None:
        backward(loss * (HUGE if engine.rank == 1 else 1.0), retain_graph)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "backward", overflowing)
        skipped = train(engine, batch)[0]["metrics"]["num_skipped_updates"]
    same = all(torch.equal(shard, before[name]) for name, shard in local_weights(engine).items())
    halved = scale_of(engine).value
    later = train(engine, batch)[0]["metrics"]
    numbers = (later["num_skipped_updates"], later["loss_scale"], engine.state.num_updates)
    return gathered((same, skipped, halved, *numbers))


def gradient_on_two_ranks(path: Path, folder: Path) -> Any:
    return gradients(fp16_engine(path, {}), batch_of(path))[0]


@pytest.mark.slow
def test_two_ranks_skip_together_and_have_the_gradient_of_one(one_rank: None, tiny_sd3: Path, tmp_path: Path):
    found = on_two_ranks([overflow_on_one_rank, gradient_on_two_ranks], tiny_sd3, tmp_path)
    assert found["overflow_on_one_rank"] == [(True, 1, FIRST_SCALE / 2, 0, FIRST_SCALE / 2, 1)] * 2
    plain = make_engine(tiny_sd3)
    perturb(plain)
    assert distance(found["gradient_on_two_ranks"], gradients(plain, batch_of(tiny_sd3))[0]) < 0.02

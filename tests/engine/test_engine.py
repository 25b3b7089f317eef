# SPDX-License-Identifier: Apache-2.0
"""The engine on one rank against the serial loop."""

import math
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from tests.engine.harness import (
    LORA,
    assert_close,
    assert_equal,
    gradients,
    local_weights,
    log_probs,
    make_batch,
    make_engine,
    perturb,
    train,
    weights,
)
from tests.engine.serial import flow_step, log_density, plain_transformer

pytestmark = [pytest.mark.usefixtures("one_rank"), pytest.mark.slow]


@pytest.fixture(scope="module")
def batch(tiny_qwen_image: Path) -> TensorDict:
    return make_batch(tiny_qwen_image)


def test_recomputed_blocks_do_not_change_the_gradient(tiny_qwen_image: Path, batch: TensorDict):
    plain = make_engine(tiny_qwen_image)
    assert not plain.module.is_gradient_checkpointing  # on a CPU, auto recomputes nothing
    expected, _ = gradients(plain, batch)
    for blocks, share in (("all", 1.0), (1, 0.5), (7, 1.0), ("none", 0.0)):
        found, output = gradients(make_engine(tiny_qwen_image, model={"recompute_blocks": blocks}), batch)
        assert_close(found, expected, 1e-6)
        assert output["metrics"]["recomputed_share"] == share


def test_the_gap_to_the_rollout_is_reported(tiny_qwen_image: Path, batch: TensorDict):
    engine = make_engine(tiny_qwen_image)
    shifted = batch.clone()
    shifted["log_probs"] = batch["log_probs"].clone()
    shifted["log_probs"][2, 1] -= 0.5
    metrics = gradients(engine, shifted)[1]["metrics"]
    assert metrics["rollout_log_prob_gap_max"] == pytest.approx(0.5, abs=1e-5)
    assert metrics["rollout_log_prob_gap_mean"] == pytest.approx(0.5 / 18, abs=1e-5)
    assert metrics["rollout_ratio_deviation_max"] == pytest.approx(math.expm1(0.5), abs=1e-4)


@pytest.mark.parametrize("reshards", [True, False])
def test_forward_without_adapter_does_not_stop_its_training(tiny_qwen_image: Path, batch: TensorDict, reshards: bool):
    options = {
        "model": LORA,
        "digen": {"tsp": {"samples_per_tile": 100, "steps_per_tile": 100}},
        "fsdp": {"reshard_after_forward": reshards},
    }
    untouched, engine = make_engine(tiny_qwen_image, **options), make_engine(tiny_qwen_image, **options)
    perturb(untouched), perturb(engine)
    expected, _ = gradients(untouched, batch)
    for _ in range(2):
        with engine.disable_adapter():
            bare = torch.stack(log_probs(engine, batch))
        torch.testing.assert_close(bare, batch["log_probs"], rtol=0, atol=2e-6)
        found, _ = gradients(engine, batch)
        assert_equal(found, expected)


# -- update -----------------------------------------------------------------------------------------------
def test_ema_follows_its_schedule(tiny_qwen_image: Path, batch: TensorDict):
    engine = make_engine(tiny_qwen_image, digen={"ema": {"enable": True, "every_steps": 2, "max_decay": 0.3}})
    average = local_weights(engine)
    for k in range(5):
        train(engine, batch)
        if (k + 1) % 2 == 0:
            decay = min((1 + k) / (10 + k), 0.3)
            average = {name: decay * average[name] + (1 - decay) * now for name, now in local_weights(engine).items()}
    current = weights(engine)
    found = weights(engine, policy="average")
    for name, value in average.items():
        torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-7)
    assert any(not torch.equal(found[name], current[name]) for name in average)
    assert_equal(weights(engine), current)


# -- settings ---------------------------------------------------------------------------------------------
def test_forward_only_engine_scores_on_a_cpu(tiny_qwen_image: Path, batch: TensorDict):
    engine = make_engine(tiny_qwen_image, fsdp={"forward_only": True})
    assert engine.engine_config.forward_only and engine.optimizer is None
    found = torch.stack(log_probs(engine, batch))
    torch.testing.assert_close(found, batch["log_probs"], rtol=0, atol=2e-6)


def test_serial_reference_has_the_sampler_s_density(tiny_qwen_image: Path, batch: TensorDict):
    """Guard: otherwise the tests above could compare two wrong things."""
    module = plain_transformer(tiny_qwen_image)
    density = log_density(*flow_step(module, tiny_qwen_image, batch, 4, 2, 1.0)[:4])
    assert density.item() == pytest.approx(batch["log_probs"][4, 2].item(), abs=2e-6)

# SPDX-License-Identifier: Apache-2.0
"""Two ranks against one: same gradients, same weights, checkpoints that are whole or absent.

Scenarios run one after another in one pair of processes; the tests compare what rank 0 brought back.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.engine.harness import (
    LORA,
    RefusesToBeWritten,
    assert_close,
    assert_equal,
    gradients,
    log_probs,
    make_batch,
    make_engine,
    on_two_ranks,
    perturb,
    select,
    train,
    weights,
)

pytestmark = [pytest.mark.slow, pytest.mark.long]

UNEVEN = ((0, 1, 2), (1,))
"""Windows of a batch of 6 samples with 12 rows."""
OPTIONS: dict[str, dict[str, Any]] = {
    "full_kl": {"digen": {"tsp": {"samples_per_tile": 1, "steps_per_tile": 2}, "kl": {"coef": 0.3}}},
    "guided": {"digen": {"tsp": {"samples_per_tile": 2, "steps_per_tile": 2}, "sampling": {"true_cfg_scale": 3.0}}},
}
BF16_BASE = {
    "model": LORA,
    "fsdp": {
        "model_dtype": "bf16",
        "mixed_precision": {"param_dtype": "bf16", "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
    },
}
EMA = {"digen": {"tsp": {"samples_per_tile": 2, "steps_per_tile": 2}, "ema": {"enable": True, "every_steps": 1}}}


def batch_for(name: str, path: Path):
    return make_batch(path, windows=UNEVEN, true_cfg_scale=3.0 if name == "guided" else 1.0)


def gradients_after_training(path: Path, folder: Path) -> dict[str, Any]:
    results = {}
    for name, options in OPTIONS.items():
        engine = make_engine(path, **options)
        perturb(engine)
        found, output = gradients(engine, batch_for(name, path))
        loss = sum(output["loss"])
        dist.all_reduce(loss)
        results[name] = found, output["metrics"], loss / dist.get_world_size()
    return results


def gradient_on_bf16_base(path: Path, folder: Path) -> Any:
    engine = make_engine(path, **BF16_BASE)
    perturb(engine, scale=0.1)
    return gradients(engine, make_batch(path))[0]


def ratio_to_evaluated_log_probs(path: Path, folder: Path) -> Any:
    """Ratio metrics of an odd number of rows, where a rank runs a padding tile that repeats a row.

    Several batches, because a row alone and one among others can have the same rounding by chance.
    """
    engine = make_engine(path, digen={"tsp": {"samples_per_tile": 2, "steps_per_tile": 1}})
    metrics = []
    for seed in range(6):
        batch = select(make_batch(path, windows=((1,), (2,)), seed=seed), [0, 1, 2, 3, 4])
        batch["old_log_probs"] = torch.stack(log_probs(engine, batch))
        metrics.append(gradients(engine, batch)[1]["metrics"])
    return metrics


def exports(path: Path, folder: Path) -> Any:
    results = {"untrained": weights(make_engine(path))}
    for name, options in (
        ("full", {}),
        ("replicated", {"fsdp": {"fsdp_size": 1}}),
        ("merged", {"model": LORA | {"lora": {"merge": True}}}),
        ("adapter", {"model": LORA}),
    ):
        engine = make_engine(path, **options, **EMA)
        train(engine, make_batch(path), 2)
        results[name] = weights(engine), weights(engine, policy="average")
    return results


def save_that_fails_on_rank_1(path: Path, folder: Path) -> Any:
    engine = make_engine(path, save=["model", "optimizer", "hf_model"])
    if dist.get_rank() == 1:
        engine.optimizer.state["unsavable"] = RefusesToBeWritten()
    errors = [None, None]
    try:
        engine.save_checkpoint(str(folder / "failed" / "actor"))
    except RuntimeError as error:
        dist.all_gather_object(errors, str(error))
    return errors


SCENARIOS = [
    gradients_after_training,
    gradient_on_bf16_base,
    ratio_to_evaluated_log_probs,
    exports,
    save_that_fails_on_rank_1,
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("two_ranks")


@pytest.fixture(scope="module")
def two_ranks(tiny_qwen_image: Path, folder: Path) -> dict[str, Any]:
    return on_two_ranks(SCENARIOS, tiny_qwen_image, folder)


@pytest.fixture(scope="module")
def one_rank_gradients(one_rank: None, tiny_qwen_image: Path, tmp_path_factory: pytest.TempPathFactory):
    return gradients_after_training(tiny_qwen_image, tmp_path_factory.mktemp("unused"))


@pytest.mark.parametrize("name", OPTIONS)
def test_gradient_is_that_of_one_rank(two_ranks: dict, one_rank_gradients: dict, name: str):
    found, metrics, loss = two_ranks["gradients_after_training"][name]
    expected, expected_metrics, expected_loss = one_rank_gradients[name]
    assert_close(found, expected, 1e-5)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-5, atol=1e-7)
    assert metrics.pop("num_tiles") <= expected_metrics.pop("num_tiles")
    del metrics["text_padding_share"], expected_metrics["text_padding_share"]  # of other tiles
    assert metrics.pop("num_pad_rows") >= expected_metrics.pop("num_pad_rows")
    assert metrics == pytest.approx(expected_metrics, rel=1e-4, abs=1e-7)


def test_gradient_of_an_fp32_adapter_on_a_bf16_base(
    two_ranks: dict, one_rank: None, tiny_qwen_image: Path, tmp_path: Path
):
    found, expected = two_ranks["gradient_on_bf16_base"], gradient_on_bf16_base(tiny_qwen_image, tmp_path)
    assert {value.dtype for value in found.values()} == {torch.float32}
    assert_close(found, expected, 0.05)


def test_ratio_to_evaluated_log_probs_is_exactly_one(two_ranks: dict):
    for metrics in two_ranks["ratio_to_evaluated_log_probs"]:
        assert metrics["num_pad_rows"] > 0
        assert metrics["ratio_deviation_max"] == metrics["ratio_deviation_min"] == 0.0


def test_ranks_that_hold_no_checkpoint_get_it(two_ranks: dict, one_rank: None, tiny_qwen_image: Path):
    assert_equal(two_ranks["exports"]["untrained"], weights(make_engine(tiny_qwen_image)))


def test_weights_and_average_after_training_are_those_of_one_rank(
    two_ranks: dict, one_rank: None, tiny_qwen_image: Path, tmp_path: Path
):
    expected = exports(tiny_qwen_image, tmp_path)
    for name in ("full", "replicated", "merged", "adapter"):
        for found, wanted in zip(two_ranks["exports"][name], expected[name], strict=True):
            assert found.keys() == wanted.keys()
            for key, value in wanted.items():  # Adam turns a gradient of rounding only into a step of lr 1e-3
                torch.testing.assert_close(found[key], value, rtol=0, atol=5e-3)
            differences = torch.cat([(found[key] - value).abs().flatten() for key, value in wanted.items()])
            assert differences.mean() < 2e-5


def test_save_that_fails_on_one_rank_fails_on_all(two_ranks: dict, folder: Path):
    errors = two_ranks["save_that_fails_on_rank_1"]
    assert errors[0] == errors[1] and "1 of 2 ranks failed (rank 1: OSError" in errors[0]
    assert list((folder / "failed").iterdir()) == []

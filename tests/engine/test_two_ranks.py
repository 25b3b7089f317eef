# SPDX-License-Identifier: Apache-2.0
"""Two ranks against one: same gradients, same weights, checkpoints that are whole or absent.

Scenarios run one after another in one pair of processes; the tests compare what rank 0 brought back.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from verl.utils import tensordict_utils as tu

from tests.engine.harness import (
    LORA,
    RefusesToBeWritten,
    assert_equal,
    gradients,
    log_probs,
    make_batch,
    make_engine,
    on_two_ranks,
    train,
    weights,
)

pytestmark = [pytest.mark.slow, pytest.mark.long]

EMA = {"digen": {"tsp": {"samples_per_tile": 2, "steps_per_tile": 2}, "ema": {"enable": True, "every_steps": 1}}}


def ratio_to_evaluated_log_probs(path: Path, folder: Path) -> Any:
    """Ratio metrics of an odd number of rows, where a rank runs a padding tile that repeats a row.

    Several batches, because a row alone and one among others can have the same rounding by chance.
    """
    engine = make_engine(path, digen={"tsp": {"samples_per_tile": 2, "steps_per_tile": 1}})
    metrics = []
    for seed in range(6):
        batch = tu.index_select_tensor_dict(make_batch(path, windows=((1,), (2,)), seed=seed), [0, 1, 2, 3, 4])
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
    engine = make_engine(path, save=["model", "optimizer"])
    if dist.get_rank() == 1:
        engine.optimizer.state[engine.optimizer.param_groups[0]["params"][0]]["unsavable"] = RefusesToBeWritten()
    errors = [None, None]
    try:
        engine.save_checkpoint(str(folder / "failed" / "actor"))
    except RuntimeError as error:
        dist.all_gather_object(errors, str(error))
    return errors


SCENARIOS = [ratio_to_evaluated_log_probs, exports, save_that_fails_on_rank_1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("two_ranks")


@pytest.fixture(scope="module")
def two_ranks(tiny_qwen_image: Path, folder: Path) -> dict[str, Any]:
    return on_two_ranks(SCENARIOS, tiny_qwen_image, folder)


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
    assert errors[0] == errors[1] == "OSError: [Errno 28] No space left on device on rank 1"
    assert list((folder / "failed").iterdir()) == []

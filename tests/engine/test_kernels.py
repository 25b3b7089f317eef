# SPDX-License-Identifier: Apache-2.0
"""Compiled blocks under FSDP2, with adapters, recomputation, offload, and copies that are swapped in; on two ranks with
an average, checkpoints and assistance."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.engine.cases import Case
from tests.engine.harness import (
    assert_close,
    assert_equal,
    begin,
    fragment,
    gradients,
    make_batch,
    make_engine,
    on_two_ranks,
    peek,
    perturb,
    train,
    weights,
)
from tests.engine.test_assistant import assert_same, assist
from verl_digen.engine.engine import DiffusersFSDPEngine
from verl_digen.models import kernels
from verl_digen.types import Generation

pytestmark = pytest.mark.long

RECOMPUTES = {"enable_gradient_checkpointing": True}
COMPILED = {"compile": True}
TILES = {"samples_per_tile": 3, "steps_per_tile": 2}
COMPILED_CASES = {
    "full_kl": Case(kl="flow_grpo", model=RECOMPUTES, kernels=COMPILED, tsp=TILES),
    "lora_kl": Case(is_lora=True, kl="flow_grpo", model=RECOMPUTES, kernels=COMPILED, tsp=TILES),
    "guided_from_host": Case(
        true_cfg_scale=3.0, model=RECOMPUTES | {"enable_activation_offload": True}, kernels=COMPILED, tsp=TILES
    ),
}
"""Full weights with a frozen copy swapped in, an adapter that is left out, and guidance."""


@pytest.fixture(autouse=True)
def compiled_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(kernels, "COMPILER", "aot_eager")
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("name", COMPILED_CASES)
def test_committed_gradient_is_that_of_the_serial_loop(one_rank: None, tiny_qwen_image: Path, name: str):
    case = COMPILED_CASES[name]
    found, metrics = case.committed(tiny_qwen_image)
    _, expected = case.serial(tiny_qwen_image)
    unused = found.keys() - expected.keys()  # by the loss: zero from compiled code, none from the network itself
    assert expected and not any(found.pop(key).any() for key in unused)
    assert_close(found, expected, 2e-5)
    assert metrics["ratio_deviation_max"] == metrics["ratio_deviation_min"] == 0.0


# -- two ranks ----------------------------------------------------------------------------------------------------
PLAIN_STEPS = {"optimizer": "SGD", "lr": 0.1, "weight_decay": 0.0, "override_optimizer_config": {"momentum": 0.9}}
"""Plain steps: Adam would make a step of the rate from a gradient that is only rounding."""
NUM_REQUESTS = 3


def engine_of(path: Path, *, compiles: bool = True) -> DiffusersFSDPEngine:
    """Engine with an average of its weights, and other weights than the checkpoint's."""
    tsp = {"samples_per_tile": 3, "steps_per_tile": 1}
    digen: dict[str, Any] = {"tsp": tsp, "ema": {"enable": True, "every_steps": 1}, "compile": compiles}
    engine = make_engine(path, digen=digen, optim=PLAIN_STEPS)
    perturb(engine)
    return engine


def exported(engine: DiffusersFSDPEngine) -> dict[str, torch.Tensor]:
    """Tensors of an update, and those of the average, by name."""
    average = weights(engine, policy="average")
    return weights(engine) | {f"average of {name}": tensor for name, tensor in average.items()}


def run(path: Path, folder: Path, *, compiles: bool = True) -> dict[str, Any]:
    """Gradient; samples of an assist inside a batch; weights after three steps, and resumed after two by engines that
    compile and that do not."""
    engine, batch = engine_of(path, compiles=compiles), make_batch(path, windows=((1,), (1,)))
    gradient, _ = gradients(engine, batch)
    groups = begin(engine, batch, [1.0, 2.0, 4.0, 8.0, 3.0, 5.0])
    engine.accumulate(fragment(groups, next(iter(groups))))
    before = peek(engine)
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, assist(engine, NUM_REQUESTS))
    assert_equal(peek(engine), before)
    engine.abort()
    train(engine, batch, 2)
    engine.save_checkpoint(str(folder / "actor"))
    train(engine, batch)
    resumed = {}
    for into in (True, False) if compiles else ():
        other = engine_of(path, compiles=into)
        other.load_checkpoint(str(folder / "actor"), del_local_after_load=False)
        train(other, batch)
        resumed[into] = exported(other)
    return {
        "gradient": gradient,
        "assisted": [one for part in parts for one in part],
        "weights": exported(engine),
        "resumed": resumed,
    }


def compiled_runs(path: Path, folder: Path) -> dict[str, Any]:
    kernels.COMPILER = "aot_eager"
    return run(path, folder)


def test_two_ranks_train_export_resume_and_assist_as_one_without_compilation(
    one_rank: None, tiny_qwen_image: Path, tmp_path: Path
):
    found = on_two_ranks([compiled_runs], tiny_qwen_image, tmp_path)["compiled_runs"]
    expected = run(tiny_qwen_image, tmp_path / "plain", compiles=False)
    unused = found["gradient"].keys() - expected["gradient"].keys()
    assert not any(found["gradient"].pop(key).any() for key in unused)
    assert_close(found["gradient"], expected["gradient"], 2e-5)
    assert_close(found["weights"], expected["weights"], 1e-5)
    assert not any("_orig_mod" in key for key in found["weights"])
    assert_equal(found["resumed"][True], found["weights"])
    assert_close(found["resumed"][False], found["weights"], 1e-5)
    untrained = exported(engine_of(tiny_qwen_image, compiles=False))
    assert any((untrained[key] - tensor).norm() > 1e-3 * tensor.norm() for key, tensor in found["weights"].items())
    assert_same_samples(found["assisted"], expected["assisted"])


def assert_same_samples(found: list[Generation], expected: list[Generation]) -> None:
    ours, theirs = (sorted(each, key=lambda one: one.trajectory.sample_index) for each in (found, expected))
    assert len(ours) == NUM_REQUESTS
    for generation, own in zip(ours, theirs, strict=True):
        assert_same(generation, own.trajectory)

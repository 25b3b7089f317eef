# SPDX-License-Identifier: Apache-2.0
"""Compiled blocks under FSDP2, with adapters, recomputation, offload, and copies that are swapped in; exports and
checkpoints."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.cases import Case
from tests.engine.harness import assert_close, make_batch, make_engine, perturb, train, weights
from tests.grid import in_grid
from verl_digen.engine.engine import DiffusersFSDPEngine

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("without_a_compiler")]

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


@pytest.mark.parametrize("name", ["lora_kl", *in_grid(["full_kl", "guided_from_host"])])
def test_committed_gradient_is_that_of_the_serial_loop(one_rank: None, tiny_qwen_image: Path, name: str):
    case = COMPILED_CASES[name]
    found, metrics = case.committed(tiny_qwen_image)
    _, expected = case.serial(tiny_qwen_image)
    unused = found.keys() - expected.keys()  # by the loss: zero from compiled code, none from the network itself
    assert expected and not any(found.pop(key).any() for key in unused)
    assert_close(found, expected, 2e-5)
    assert metrics["ratio_deviation_max"] == metrics["ratio_deviation_min"] == 0.0


# -- exports and checkpoints --------------------------------------------------------------------------------------
PLAIN_STEPS = {"optimizer": "SGD", "lr": 0.1, "weight_decay": 0.0, "override_optimizer_config": {"momentum": 0.9}}
"""Plain steps: Adam would make a step of the rate from a gradient that is only rounding."""


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


@pytest.mark.grid
def test_a_compiled_engine_exports_what_another_one_does_which_continues_from_its_checkpoint(
    one_rank: None, tiny_qwen_image: Path, tmp_path: Path
):
    batch = make_batch(tiny_qwen_image, windows=((1,), (1,)))
    compiled, plain = (engine_of(tiny_qwen_image, compiles=compiles) for compiles in (True, False))
    untrained = exported(plain)
    for engine in (compiled, plain):
        train(engine, batch, 2)
    found = exported(compiled)
    assert_close(found, exported(plain), 1e-5)
    assert any((untrained[key] - tensor).norm() > 1e-3 * tensor.norm() for key, tensor in found.items())
    compiled.save_checkpoint(str(tmp_path / "actor"))
    plain.load_checkpoint(str(tmp_path / "actor"), del_local_after_load=False)
    for engine in (compiled, plain):
        train(engine, batch)
    assert_close(exported(plain), exported(compiled), 1e-5)

# SPDX-License-Identifier: Apache-2.0
"""Compiled blocks under FSDP2, with adapters, recomputation, offload, and copies that are swapped in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.engine.cases import Case
from tests.engine.harness import assert_close
from verl_digen.models import kernels

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

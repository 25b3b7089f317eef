# SPDX-License-Identifier: Apache-2.0
"""A frozen base on one shard: forwards read it in place, with the numbers of one that FSDP2 copies."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from tests.engine.harness import (
    LORA,
    assert_equal,
    generate,
    gradients,
    log_probs,
    make_batch,
    make_engine,
    perturb,
    train,
    weights,
)
from verl_digen.engine.engine import DiffusersFSDPEngine
from verl_digen.engine.fsdp2 import gathered_bytes, parameters_of
from verl_digen.engine.whole_base import WholeBase

pytestmark = pytest.mark.usefixtures("one_rank")

FSDP: dict[str, dict[str, Any]] = {
    "resharded": {},
    "kept after forward": {"reshard_after_forward": False},
    "bf16": {"model_dtype": "bf16", "mixed_precision": {"param_dtype": "bf16", "reduce_dtype": "fp32"}},
    "offloaded": {"param_offload": True, "optimizer_offload": True},
}


def engine_with(path: Path, whole: bool | str = "auto", **fsdp: Any) -> DiffusersFSDPEngine:
    engine = make_engine(path, model=LORA | {"whole_base": whole}, fsdp=fsdp)
    perturb(engine)
    return engine


class Copies(TorchDispatchMode):
    """Bytes that are copied into other, flat tensors, as FSDP2 gathers, while the mode is on."""

    num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and args[0].dim() == 1 and args[0] is not args[1]:
            self.num_bytes += args[0].nbytes
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", FSDP)
def test_gradient_weights_log_probs_and_samples_are_those_of_a_copied_base(tiny_qwen_image: Path, name: str):
    batch, found = make_batch(tiny_qwen_image), []
    for whole in ("auto", False):
        engine = engine_with(tiny_qwen_image, whole, **FSDP[name])
        assert (engine.base.in_place_bytes > 0) is (whole == "auto")
        gradient, _ = gradients(engine, batch)
        train(engine, batch, 3)
        found.append((gradient, weights(engine), *log_probs(engine, batch), generate(engine)))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other) if isinstance(one, Tensor) else assert_equal(one, other) is None


def test_no_forward_or_backward_copies_the_base(tiny_qwen_image: Path):
    batch, copied = make_batch(tiny_qwen_image), {}
    for whole in ("auto", False):
        engine = engine_with(tiny_qwen_image, whole)
        with Copies() as copies:
            gradients(engine, batch)
        copied[whole] = copies.num_bytes
    base = sum(one.numel() * one.element_size() for one in engine.module.parameters() if not one.requires_grad)
    assert copied[False] - copied["auto"] >= 2 * base > copied["auto"]


def test_the_base_takes_no_room_in_a_plan_of_tiles(tiny_qwen_image: Path):
    base = engine_with(tiny_qwen_image).base
    assert (base.num_bytes, base.asks) == (0, False)
    assert gathered_bytes(parameters_of(base.module)) - base.in_place_bytes < 0.2 * base.in_place_bytes


def test_a_base_in_another_dtype_than_forwards_is_copied(tiny_qwen_image: Path):
    dtypes = {"model_dtype": "fp32", "mixed_precision": {"param_dtype": "bf16", "reduce_dtype": "fp32"}}
    base = engine_with(tiny_qwen_image, **dtypes).base
    assert (base.is_kept, base.in_place_bytes) == (False, 0)


@pytest.mark.parametrize(
    ("policy", "is_in_place"), [(OffloadPolicy(), True), (CPUOffloadPolicy(pin_memory=False), False)]
)
def test_a_base_on_the_host_is_copied(policy: OffloadPolicy, is_in_place: bool):
    module = nn.Linear(4, 4).requires_grad_(False)
    fully_shard(module, offload_policy=policy)
    assert (WholeBase(module, "auto").in_place_bytes > 0) is is_in_place


def test_a_base_that_moved_is_read_where_its_shards_are_then(tiny_qwen_image: Path):
    """A device that was handed over and taken back: the shards are other tensors."""
    batch, engine = make_batch(tiny_qwen_image), engine_with(tiny_qwen_image)
    expected, _ = gradients(engine, batch)
    before = [one._sharded_param_data for one in parameters_of(engine.module)]
    engine.module._apply(torch.clone)
    for shard in before:
        shard.fill_(torch.nan)
    found, _ = gradients(engine, batch)
    assert_equal(found, expected)

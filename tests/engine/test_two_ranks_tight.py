# SPDX-License-Identifier: Apache-2.0
"""Automatic tiles of two ranks, one of which has less memory: both choose the smaller tile, also if that rank found out
by running out of memory in the middle of a forward or backward, where the other one waits for it in a collective."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.engine.harness import LORA, assert_close, gathered, gradients, make_batch, make_engine, on_two_ranks
from tests.engine.test_tight_device import TightDevice

pytestmark = [pytest.mark.slow, pytest.mark.long]

TIGHT_RANK = 1
OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": {"model": LORA},
    "gathered": {"fsdp": {"reshard_after_forward": False}},
}


def run_out(size: int) -> None:
    raise torch.OutOfMemoryError(f"tried to allocate for {size} rows")


def in_the_forward(block: torch.nn.Module, args: Any, inputs: dict[str, Tensor]) -> None:
    size = len(args[0] if args else inputs["hidden_states"])
    if size > 1:
        run_out(size)


def in_the_backward(block: torch.nn.Module, args: Any, inputs: dict[str, Tensor], outputs: Any) -> None:
    hidden = outputs[1]
    if len(hidden) > 1 and hidden.requires_grad:
        hidden.register_hook(lambda gradient: run_out(len(gradient)))


@contextmanager
def tight(path: Path, capacity: float, options: dict[str, Any]) -> Iterator[tuple[Any, TightDevice]]:
    """An engine on a device of so many units of its weights, where a row takes half of one."""
    engine = make_engine(path, **options)
    device = TightDevice(engine, capacity, lambda count, length: 0.5 * count)
    with pytest.MonkeyPatch.context() as patch:
        device.put_in(patch)
        yield engine, device


def less_memory(path: Path, folder: Path) -> Any:
    """Tight ranks measure it, without running out."""
    with tight(path, 20 if dist.get_rank() != TIGHT_RANK else 6, {}) as (engine, device):
        found, _ = gradients(engine, make_batch(path))
        return found, gathered(device.sizes())


def out_of_memory(path: Path, folder: Path) -> Any:
    """Each option's gradient and tiles, if the tight rank runs out of memory in its last block."""
    results = {}
    for name, options in OPTIONS.items():
        for place in (in_the_forward, in_the_backward):
            with tight(path, 40, options) as (engine, device):
                if dist.get_rank() == TIGHT_RANK:
                    _watch(engine.module, place)
                found, _ = gradients(engine, make_batch(path))
                results[name, place.__name__] = found, gathered(device.sizes())
    return results


def _watch(module: torch.nn.Module, place: Callable[..., Any]) -> None:
    blocks = [part for part in module.modules() if "TransformerBlock" in type(part).__name__]
    if place is in_the_forward:
        blocks[-1].register_forward_pre_hook(place, with_kwargs=True)
    else:
        blocks[0].register_forward_hook(place, with_kwargs=True)


@pytest.fixture(scope="module")
def two_ranks(tiny_qwen_image: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return on_two_ranks([less_memory, out_of_memory], tiny_qwen_image, tmp_path_factory.mktemp("two_ranks"))


def expected(path: Path, options: dict[str, Any]) -> dict[str, Tensor]:
    digen = options.get("digen", {}) | {"tsp": {"samples_per_tile": 1, "steps_per_tile": 1}}
    return gradients(make_engine(path, **(options | {"digen": digen})), make_batch(path))[0]


def test_both_ranks_take_the_tile_of_the_one_with_less_memory(two_ranks: dict, one_rank: None, tiny_qwen_image: Path):
    found, (own, tights) = two_ranks["less_memory"]
    assert own == tights and max(own) < 9, "9 rows of a rank would fit on the other"
    assert_close(found, expected(tiny_qwen_image, {}), 1e-5)


@pytest.mark.parametrize("place", ["in_the_forward", "in_the_backward"])
@pytest.mark.parametrize("name", OPTIONS)
def test_after_one_rank_ran_out_of_memory_both_train_one_row_at_a_time(
    two_ranks: dict, one_rank: None, tiny_qwen_image: Path, name: str, place: str
):
    found, (own, tights) = two_ranks["out_of_memory"][name, place]
    assert own == {1, 2} and tights == {1, 2}, "two rows are rehearsed, one trains"
    assert_close(found, expected(tiny_qwen_image, OPTIONS[name]), 1e-5)

# SPDX-License-Identifier: Apache-2.0
"""A frozen base that is whole on every rank, against one that is sharded, on two ranks."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from tests.engine.harness import (
    LORA,
    Gathers,
    assert_equal,
    generate,
    gradients,
    log_probs,
    make_batch,
    make_engine,
    on_two_ranks,
    perturb,
    train,
    weights,
)
from verl_digen.engine.engine import DiffusersFSDPEngine
from verl_digen.engine.fsdp2 import all_groups
from verl_digen.engine.memory import TileMemory
from verl_digen.engine.whole_base import WholeBase
from verl_digen.schedulers.tiles import choose_tile

pytestmark = [pytest.mark.slow, pytest.mark.long]

TILES = {"tsp": {"samples_per_tile": 1, "steps_per_tile": 1}}
BF16 = {
    "model_dtype": "fp32",
    "mixed_precision": {"param_dtype": "bf16", "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
}
FSDP: dict[str, dict[str, Any]] = {
    "resharded": {},
    "kept after forward": {"reshard_after_forward": False},
    "bf16": BF16,
    "offloaded": {"param_offload": True, "optimizer_offload": True},
    "on one shard, in place": {"fsdp_size": 1},
}


def engine_with(path: Path, whole: bool | str, **options: Any) -> DiffusersFSDPEngine:
    engine = make_engine(path, model=LORA | {"whole_base": whole}, digen=TILES, **options)
    perturb(engine)
    return engine


def trained(path: Path, folder: Path) -> dict[str, Any]:
    """(gradient, weights after 3 steps, log-probs, generated latents) with and without a whole base."""
    results: dict[str, Any] = {}
    batch = make_batch(path)
    for name, fsdp in FSDP.items():
        for whole in (False, True):
            engine = engine_with(path, whole, fsdp=fsdp)
            gradient, _ = gradients(engine, batch)
            train(engine, batch, 3)
            results[f"{name}, {whole}"] = gradient, weights(engine), log_probs(engine, batch), generate(engine)
    return results


def gathered_per_step(path: Path, folder: Path) -> dict[bool, tuple[list[int], int, int, int]]:
    """(bytes gathered in each of two optimizer steps, their tiles, bytes of all weights, units that still hold gathered
    ones after them)"""
    found = {}
    batch = make_batch(path)
    for whole in (False, True):
        engine = engine_with(path, whole)
        steps, tiles = [], 0
        for _ in range(2):
            with Gathers() as gathers:
                (output,) = train(engine, batch)
            steps.append(gathers.num_bytes)
            tiles = int(output["metrics"]["num_tiles"])
        num_held = sum(group.is_unsharded for group in all_groups(engine.module))
        found[whole] = steps, tiles, engine.base.num_bytes, num_held
    return found


def continued(path: Path, folder: Path) -> list[dict[str, Tensor]]:
    """Weights after 4 steps: sharded throughout; 2 steps of one setting, and 2 of the other."""
    batch, straight = make_batch(path), engine_with(path, False)
    train(straight, batch, 4)
    results = [weights(straight)]
    for before in (False, True):
        first, second = engine_with(path, before), engine_with(path, not before)
        train(second, batch)  # its base is whole before it loads
        train(first, batch, 2)
        first.save_checkpoint(str(folder / str(before) / "actor"))
        second.load_checkpoint(str(folder / str(before) / "actor"), del_local_after_load=False)
        train(second, batch, 2)
        results.append(weights(second))
    return results


def after_abort(path: Path, folder: Path) -> list[dict[str, Tensor]]:
    """Gradient, sharded and whole, of a batch that failed in the middle of a forward and was trained again."""
    results = []
    batch = make_batch(path)
    for whole in (False, True):
        engine = engine_with(path, whole)
        blocks = [part for part in engine.module.modules() if isinstance(part, FSDPModule)]
        handle = blocks[-1].register_forward_hook(_fail)
        with pytest.raises(ArithmeticError):
            gradients(engine, batch)
        handle.remove()
        results.append(gradients(engine, batch)[0])
    return results


def _fail(*unused: Any) -> None:
    raise ArithmeticError("on purpose")


def decided(path: Path, folder: Path) -> dict[str, Any]:
    """Decisions of auto on a CPU: (before the first tile, after it)."""
    found: dict[str, Any] = {}
    batch = make_batch(path)
    for name, free in (("plenty", 10**12), ("too little on rank 1", 10**12 if dist.get_rank() == 0 else 10**5)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("verl_digen.platforms.device_memory.free_bytes", lambda num_ranks, free=free: free)
            engine = engine_with(path, "auto")
            before = engine.base.is_kept
            train(engine, batch)
        found[name] = before, engine.base.is_kept
    full = make_engine(path)
    train(full, batch)
    found["all weights"] = full.base.is_kept, full.base.is_kept
    return found


def keeps(module: nn.Module) -> bool:
    """True if units keep gathered parameters from forward to forward."""
    (kept,) = {group.post_forward_mesh_info is None for group in all_groups(module)}
    return kept


def chosen(path: Path, folder: Path) -> dict[str, Any]:
    """Decisions of auto by the measurements of tiles, of rows of one kind and then of a larger one."""
    found: dict[str, Any] = {}
    for name, room, wanted in (
        ("plenty", 100, "auto"),
        ("short", 14, "auto"),
        ("none", 10, "auto"),
        ("forced", 14, True),
    ):
        base = WholeBase(small(), wanted)
        base.num_bytes = 8
        kinds = []
        for row in (1, 95):
            measured_in: list[bool] = []
            tiles = TileMemory(room=room, base=2, row=row, kept=(row,) * 4)

            def measure(tiles=tiles, base=base, measured_in=measured_in) -> TileMemory:
                measured_in.append(keeps(base.module))
                return tiles

            measured = base.measured_without(measure)
            choice = base.choose(measured, partial(choose_tile, num_rows=8), 8)
            kinds.append((choice.num_recomputed, choice.shape.size, base.is_kept, keeps(base.module), measured_in))
        found[name] = kinds
    return found


def small() -> nn.Module:
    """Two units with a frozen and a trained parameter each, and a unit without a trained one."""
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    for part in (module[0], module[1]):
        part.weight.requires_grad_(False)
    module[2].requires_grad_(False)
    for part in (*module, module):
        fully_shard(part, mp_policy=MixedPrecisionPolicy())
    return module


SCENARIOS = [chosen, trained, gathered_per_step, continued, after_abort, decided]


@pytest.fixture(scope="module")
def two_ranks(tiny_qwen_image: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return on_two_ranks(SCENARIOS, tiny_qwen_image, tmp_path_factory.mktemp("whole_base"))


@pytest.mark.parametrize("name", FSDP)
def test_gradient_weights_log_probs_and_samples_are_those_of_a_sharded_base(two_ranks: dict, name: str):
    sharded, whole = (two_ranks["trained"][f"{name}, {setting}"] for setting in (False, True))
    for found, expected in zip(whole[:2], sharded[:2], strict=True):
        assert_equal(found, expected)
    for found, expected in zip(whole[2], sharded[2], strict=True):
        assert torch.equal(found, expected)
    assert torch.equal(whole[3], sharded[3])


def test_a_whole_base_is_gathered_once_per_step_and_dropped_after_it(two_ranks: dict):
    (sharded, again), tiles, num_bytes, _ = two_ranks["gathered_per_step"][False]
    (first, second), same_tiles, _, num_held = two_ranks["gathered_per_step"][True]
    assert tiles == same_tiles >= 9 and sharded == again > 1.5 * tiles * num_bytes
    assert first == second and num_bytes <= first < 1.1 * num_bytes, "once, with padding"
    assert num_held == 0


def test_a_checkpoint_of_one_setting_continues_with_the_other(two_ranks: dict):
    expected, *others = two_ranks["continued"]
    for found in others:
        assert_equal(found, expected)


def test_a_batch_that_failed_in_a_forward_trains_again(two_ranks: dict):
    sharded, whole = two_ranks["after_abort"]
    assert_equal(whole, sharded)


def test_auto_decides_once_and_the_same_on_all_ranks(two_ranks: dict):
    found = two_ranks["decided"]
    assert found == {"plenty": (None, True), "too little on rank 1": (None, False), "all weights": (False, False)}


def test_auto_keeps_the_base_whole_where_its_tiles_are_cheaper_and_gives_it_up_where_none_fits(two_ranks: dict):
    """A row takes 1 of so many units, and 1 more for each of 4 kept blocks; 8 rows; the whole base takes 8 units."""
    found = two_ranks["chosen"]
    first, second = found["plenty"]
    assert first[0] == 0 and first[2:] == (True, True, [False]), "90 units beside it hold 8 rows with all blocks"
    assert second[2:] == (False, False, [False]), "no row of 95 fits beside it: sharded, and while it is measured"
    assert found["short"][0][:4] == (0, 2, False, False), "beside it a block of 4 would be recomputed, and 1 row fit"
    assert found["none"][0][2:4] == (False, False)
    assert found["forced"][0] == (1, 1, True, True, [False]), "what is left beside it"
    assert found["forced"][1][2:4] == (True, True)

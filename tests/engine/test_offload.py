# SPDX-License-Identifier: Apache-2.0
"""The engine on the pretend device (`tests.pretend`): weights that are offloaded by copies that arrive late, and the
stalls of a logical batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine import harness
from tests.pretend.process import on_pretend
from verl_digen.engine import sharded


def _sharded(folder: str, *, rank: int = 0, world_size: int = 1) -> Any:
    """A module of odd sizes, sharded over ranks of which only this one exists."""
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from verl_digen.engine.offload import offload_safely

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    module = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 4)).to("pretend")
    fully_shard(module, mesh=init_device_mesh("pretend", (world_size,)))
    offload_safely(module)
    return module


def _copy_after_offload(folder: str) -> None:
    import torch
    from torch import nn
    from verl.utils.fsdp_utils import offload_fsdp2_model_to_cpu

    from verl_digen.engine.shadow import ShadowWeights

    module = nn.Linear(3, 4).to("pretend")
    weights = {name: tensor.detach().cpu() for name, tensor in module.named_parameters()}
    offload_fsdp2_model_to_cpu(module)
    assert module.weight.device.type == "cpu"
    assert not torch.equal(module.weight, weights["weight"])  # it is on its way
    kept = ShadowWeights(module, "cpu").shards
    assert all(torch.equal(kept[name], weights[name]) for name in weights)


def test_a_copy_right_after_an_offload_holds_the_weights(tmp_path: Path) -> None:
    on_pretend(_copy_after_offload, str(tmp_path))


def _uneven_shards(folder: str) -> None:
    import torch
    from verl.utils.fsdp_utils import load_fsdp2_model_to_gpu, offload_fsdp2_model_to_cpu

    from verl_digen.engine.shadow import local_shards

    module = _sharded(folder, rank=1, world_size=2)  # one of 3 rows is this rank's, padded to 2
    weights = {name: shard.cpu() for name, shard in local_shards(module).items()}
    assert weights["0.weight"].shape == (1, 4)
    offload_fsdp2_model_to_cpu(module)
    load_fsdp2_model_to_gpu(module)
    assert all(torch.equal(shard.cpu(), weights[name]) for name, shard in local_shards(module).items())


def test_shards_of_unequal_length_survive_an_offload(tmp_path: Path) -> None:
    on_pretend(_uneven_shards, str(tmp_path))


def test_the_engine_offloads_its_module_so(
    one_rank: None, tiny_qwen_image: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    treated: list[Any] = []
    monkeypatch.setattr(sharded, "offload_safely", treated.append)
    engine = harness.make_engine(tiny_qwen_image)
    assert treated == [engine.module]


def _batches(path: str, folder: str, options: dict[str, Any]) -> tuple[Any, dict[str, float]]:
    """(record of the second of two logical batches, its metrics) of an engine on the pretend device."""
    import torch.distributed as dist

    from tests.engine import harness
    from tests.pretend.record import recording

    batch = harness.make_batch(path, true_cfg_scale=2.0)
    dist.init_process_group("cpu:gloo,pretend:gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    engine = harness.make_engine(path, **options)
    harness.train(engine, batch)
    with recording() as record:
        (outputs,) = harness.train(engine, batch)
    return record, outputs["metrics"]


@pytest.fixture(scope="module")
def on_cpu(tiny_qwen_image: Path, one_rank: None) -> dict[str, float]:
    """Metrics of the same second batch on the CPU."""
    batch, engine = harness.make_batch(tiny_qwen_image, true_cfg_scale=2.0), harness.make_engine(tiny_qwen_image)
    return harness.train(engine, batch, num_updates=2)[-1]["metrics"]


def test_only_the_ends_of_a_batch_wait_for_the_device(
    tiny_qwen_image: Path, tmp_path: Path, on_cpu: dict[str, float]
) -> None:
    """Six tiles wait no more often than one of all rows, except in a line of diffusers; the gradient is the CPU's."""
    found = []
    for samples, steps in ((3, 1), (6, 3)):
        folder = tmp_path / str(steps)
        folder.mkdir()
        options = {"digen": {"tsp": {"samples_per_tile": samples, "steps_per_tile": steps}}}
        record, metrics = on_pretend(_batches, str(tiny_qwen_image), str(folder), options)
        assert metrics["grad_norm"] == pytest.approx(on_cpu["grad_norm"], rel=1e-4)
        found.append({line: number for line, number in record.stalls.items() if not line[1].startswith("diffusers/")})
    assert found[0] == found[1]


def test_an_engine_that_offloads_trains_as_on_the_cpu(
    tiny_qwen_image: Path, tmp_path: Path, on_cpu: dict[str, float]
) -> None:
    """Weights, optimizer and the average are on the host between batches."""
    options = {"digen": {"ema": {"enable": True}}, "fsdp": {"param_offload": True, "optimizer_offload": True}}
    _, metrics = on_pretend(_batches, str(tiny_qwen_image), str(tmp_path), options)
    assert metrics["grad_norm"] == pytest.approx(on_cpu["grad_norm"], rel=1e-4)

# SPDX-License-Identifier: Apache-2.0
"""The engine on the pretend device (`tests.pretend`): weights that are offloaded by copies that arrive late, and the
stalls of a logical batch."""

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.engine import harness
from tests.pretend.process import on_pretend
from verl_digen.engine import sharded
from verl_digen.model_config import DiffusionModelConfig


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
    offload_safely(module, keeps_base=False)
    return module


def _copy_after_offload(folder: str) -> None:
    import torch
    from torch import nn
    from verl.utils.fsdp_utils import offload_fsdp2_model_to_cpu

    from verl_digen.engine.copies import ShadowWeights

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

    from verl_digen.engine.copies import local_shards

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
    monkeypatch.setattr(sharded, "offload_safely", lambda module, **settings: treated.append((module, settings)))
    for model, keeps_base in (({}, False), (harness.LORA, True)):
        engine = harness.make_engine(tiny_qwen_image, model=model)
        assert treated.pop() == (engine.module, {"keeps_base": keeps_base})


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


# -- one host copy of the frozen base, for the trainer's offload and the replica's sleep ---------------------------
class Sharers:
    """A trainer rank and a replica of one node, on the pretend device.

    Args:
        odd: change the replica's base before either makes a copy.
    """

    def __init__(self, path: str, folder: str, *, trainer_first: bool, odd: bool = False):
        import torch
        import torch.distributed as dist

        from verl_digen.engine import offload
        from verl_digen.models import load_model
        from verl_digen.platforms import module_memory
        from verl_digen.platforms.module_memory import DeviceMemory
        from verl_digen.weights.receiver import WeightReceiver

        self.name = f"{os.getpid()}-sharers"
        module_memory.SHARING = (*module_memory.SHARING, "pretend")  # pyright: ignore[reportAttributeAccessIssue]
        offload.name_on_node = lambda: self.name
        dist.init_process_group("cpu:gloo,pretend:gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        model, device = load_model(path), torch.device("pretend")
        config = DiffusionModelConfig(path=path, digen=harness.digen_section(), **harness.LORA)
        network = model.load_transformer(torch.float32).to(device)
        self.weights = WeightReceiver(network, config.adapter_config())
        self.loaded = [value.detach().cpu() for value in self.frozen(self.weights.module)]
        if odd:
            with torch.no_grad():
                next(self.weights.module.parameters()).add_(1)
        self.expected = [value.detach().cpu() for value in self.frozen(self.weights.module)]
        self.memory = DeviceMemory([self.weights.module], device, self.name)
        if not trainer_first:
            self.memory.release(self.weights.lose)
        fsdp = {"param_offload": True, "optimizer_offload": True}
        self.engine = harness.make_engine(path, model=harness.LORA, fsdp=fsdp)
        if trainer_first:
            self.memory.release(self.weights.lose)

    @staticmethod
    def frozen(module: Any) -> list[Any]:
        """Frozen parameters, this rank's part."""
        from verl_digen.engine.copies import local_shard

        return [local_shard(value) for value in module.parameters() if not value.requires_grad]

    def turn(self) -> None:
        """The replica wakes and sleeps, then the trainer loads and offloads."""
        self.memory.restore()
        self.memory.release(self.weights.lose)
        self.engine.to("pretend")
        self.engine.to("cpu")

    @property
    def base_bytes(self) -> int:
        return sum(each.nbytes for each in self.expected)

    def shared_bytes(self) -> list[int]:
        """Bytes of each memory file that this process has open for parameters."""
        found: dict[int, int] = {}
        for link in Path("/proc/self/fd").iterdir():
            with suppress(OSError):
                if os.readlink(link).startswith(f"/memfd:digen-{self.name}-0-") and "buffers" not in os.readlink(link):
                    found[os.stat(link).st_ino] = os.stat(link).st_size
        return list(found.values())

    def replica_is_whole(self) -> bool:
        """True if the replica's frozen weights are those it was made with."""
        pairs = zip(self.frozen(self.weights.module), self.expected, strict=True)
        return all(one.cpu().equal(other) for one, other in pairs)


def _one_copy(path: str, folder: str, trainer_first: bool) -> None:
    import torch

    from tests.pretend import copies
    from tests.pretend.record import recording
    from verl_digen.weights.host_copies import ALIGNMENT_BYTES

    to_host = copies.to_host
    copied: list[int] = []
    copies.to_host = lambda target, *others: (copied.append(target.nbytes), to_host(target, *others))
    both = Sharers(path, folder, trainer_first=trainer_first)
    frozen = both.frozen(both.engine.module)
    (of_file,) = both.shared_bytes()
    assert both.base_bytes <= of_file <= both.base_bytes + (len(frozen) + 2) * ALIGNMENT_BYTES
    assert all(value.device.type == "cpu" for value in frozen) and all(map(torch.equal, frozen, both.expected))
    frozen[0].fill_(7)  # as nobody may: the replica's copy is the same memory
    both.memory.restore()
    assert (both.frozen(both.weights.module)[0].cpu() == 7).all()
    frozen[0].copy_(both.expected[0])

    adapter = sum(value.nbytes for value in both.engine.module.parameters() if value.requires_grad)
    buffers = sum(value.nbytes for value in both.engine.module.buffers())
    both.engine.to("pretend")
    copied.clear()
    with recording() as record:
        both.engine.to("cpu", optimizer=False)
    assert {kind for kind, _ in record.stalls} <= {"synchronize", "to host"}, "nothing is compared again"
    both.memory.release(both.weights.lose)
    assert adapter <= sum(copied) <= adapter + buffers < both.base_bytes
    assert both.shared_bytes() == [of_file]
    both.memory.restore()
    assert both.replica_is_whole()


@pytest.mark.parametrize("trainer_first", [True, False])
def test_trainer_and_replica_hold_the_frozen_base_once_and_copy_it_once(
    tiny_qwen_image: Path, tmp_path: Path, trainer_first: bool
) -> None:
    on_pretend(_one_copy, str(tiny_qwen_image), str(tmp_path), trainer_first)


def _int8_base(path: str, folder: str) -> None:
    import torch
    import torch.distributed as dist

    from tests.pretend import copies
    from verl_digen.models.kernels import Int8Linear

    def base(engine: Any) -> list[Any]:
        layers = [module for module in engine.module.modules() if isinstance(module, Int8Linear)]
        return [tensor for layer in layers for tensor in (layer.weight, layer.scale)]

    dist.init_process_group("cpu:gloo,pretend:gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    model, fsdp = {**harness.LORA, "int8_base": True}, {"param_offload": True, "optimizer_offload": True}
    expected = [tensor.cpu() for tensor in base(harness.make_engine(path, model=model))]
    engine = harness.make_engine(path, model=model, fsdp=fsdp)
    places = [tensor.data_ptr() for tensor in base(engine)]
    copied: list[int] = []
    to_host = copies.to_host
    copies.to_host = lambda target, *others: (copied.append(target.nbytes), to_host(target, *others))
    for _ in range(2):
        engine.to("pretend")
        assert all(torch.equal(found.cpu(), each) for found, each in zip(base(engine), expected, strict=True))
        copied.clear()
        engine.to("cpu")
        assert sum(copied) < sum(tensor.nbytes for tensor in expected)
        assert [tensor.data_ptr() for tensor in base(engine)] == places
        assert all(map(torch.equal, base(engine), expected))


def test_a_base_in_int8_is_copied_to_the_host_once(tiny_qwen_image: Path, tmp_path: Path) -> None:
    on_pretend(_int8_base, str(tiny_qwen_image), str(tmp_path))


def _train_in_turns(path: str, folder: str) -> None:
    import torch

    from verl_digen.engine.copies import local_shard
    from verl_digen.engine.export import full_weights

    def numbers(engine: Any) -> dict[str, Any]:
        return {name: local_shard(value).cpu() for name, value in engine.module.named_parameters()}

    def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
        return one.keys() == other.keys() and all(torch.equal(one[name].cpu(), other[name].cpu()) for name in one)

    both = Sharers(path, folder, trainer_first=True)
    batch = harness.make_batch(path, group_size=2, windows=((0,),))
    plain = harness.make_engine(path, model=harness.LORA)
    for _ in range(2):
        both.turn()
        with harness.stepped_gradients(both.engine) as of_turns:
            harness.train(both.engine, batch)
        with harness.stepped_gradients(plain) as of_plain:
            harness.train(plain, batch)
        both.turn()
        assert len(of_plain) and same(of_turns, of_plain) and same(numbers(both.engine), numbers(plain))
    assert next(both.engine.module.parameters()).device.type == "cpu"
    merged, expected = (dict(full_weights(each.module, merge_lora=True)) for each in (both.engine, plain))
    assert same(merged, expected)
    both.engine.save_checkpoint(f"{folder}/saved")
    harness.train(both.engine, batch)
    both.engine.load_checkpoint(f"{folder}/saved")
    assert same(numbers(both.engine), numbers(plain))
    both.memory.restore()
    assert both.replica_is_whole()


def test_training_in_turns_with_a_replica_that_shares_the_base_is_bitwise_training_alone(
    tiny_qwen_image: Path, tmp_path: Path
) -> None:
    """Gradients and weights of two steps; merged export, a save and a resume while the base is offloaded."""
    on_pretend(_train_in_turns, str(tiny_qwen_image), str(tmp_path))


def _odd(path: str, folder: str) -> None:
    import torch

    both = Sharers(path, folder, trainer_first=False, odd=True)
    both.turn()
    assert not torch.equal(both.loaded[0], both.expected[0])
    assert all(map(torch.equal, both.frozen(both.engine.module), both.loaded))
    both.memory.restore()
    assert both.replica_is_whole()


def test_a_replica_of_other_weights_and_the_trainer_keep_copies_of_their_own(
    tiny_qwen_image: Path, tmp_path: Path
) -> None:
    on_pretend(_odd, str(tiny_qwen_image), str(tmp_path))

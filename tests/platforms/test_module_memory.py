# SPDX-License-Identifier: Apache-2.0
"""Release and return of modules' memory; the code is the same on every device."""

import os

import pytest
import torch
from torch import nn

from verl_digen.hardware import torch_support
from verl_digen.hardware.torch_support import accelerator_support
from verl_digen.platforms import cpu_device, module_memory
from verl_digen.platforms.cpu import CpuPlatform
from verl_digen.platforms.module_memory import DeviceMemory
from verl_digen.weights import host_copies
from verl_digen.weights.host_copies import HostPool

CPU = torch.device("cpu")


def network():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.BatchNorm1d(4))
    return module


def storages(module):
    return [tensor.untyped_storage() for tensor in module.state_dict().values()]


def test_a_release_frees_every_byte_and_a_return_gives_back_every_number():
    module = network()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    objects = list(module.parameters())
    memory = DeviceMemory([module], CPU)
    num_bytes = sum(tensor.nbytes for tensor in before.values())
    for _ in range(2):
        assert memory.release() == num_bytes and memory.is_released
        assert memory.release() == 0, "it is free already"
        assert all(storage.nbytes() == 0 for storage in storages(module))
        memory.restore()
        assert not memory.is_released and all(map(torch.equal, module.state_dict().values(), before.values()))
    assert memory.num_bytes_copied_out == num_bytes, "the second release copies nothing"
    assert all(one is other for one, other in zip(module.parameters(), objects, strict=True))


def test_what_an_update_replaces_is_not_copied_and_can_be_loaded_after_the_return():
    module = network()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    memory = DeviceMemory([module], CPU)
    memory.release(replaced=lambda: [module[0].weight])
    memory.restore()
    with torch.no_grad():
        module[0].weight.copy_(before["0.weight"])
    assert all(map(torch.equal, module.state_dict().values(), before.values()))
    assert memory.num_bytes_copied_out == sum(tensor.nbytes for tensor in before.values()) - before["0.weight"].nbytes


def test_tensors_that_share_memory_are_released_and_copied_once():
    module = nn.ModuleList([nn.Linear(4, 4, bias=False) for _ in range(2)])
    module[1].weight = nn.Parameter(module[0].weight.data.t())
    expected = module[0].weight.detach().clone()
    memory = DeviceMemory([module, module[0]], CPU)
    assert memory.release() == expected.nbytes == memory.num_bytes_copied_out
    memory.restore()
    assert torch.equal(module[0].weight, expected) and torch.equal(module[1].weight, expected.t())


def test_of_processes_with_equal_weights_one_copies_each_module_and_all_give_them_back(caplog):
    """Three replicas, one of which has other parameters, and the same buffers; the first has an encoder, too."""
    name, encoder = f"{os.getpid()}-replicas", nn.Linear(4, 4)
    first, second, odd = network(), network(), network()
    with torch.no_grad():
        odd[1].bias += 1
    memories = [DeviceMemory([first, encoder], CPU, name), DeviceMemory([second], CPU, name)]
    memories.append(DeviceMemory([odd], CPU, name))
    before = [{key: tensor.clone() for key, tensor in each.state_dict().items()} for each in (first, second, odd)]
    size = sum(tensor.nbytes for tensor in first.state_dict().values())
    for memory in memories * 2:
        memory.release()
        memory.restore()
    of_encoder = sum(tensor.nbytes for tensor in encoder.state_dict().values())
    buffers = sum(tensor.nbytes for tensor in first.buffers())
    assert [memory.num_bytes_copied_out for memory in memories] == [size + of_encoder, 0, size - buffers]
    assert "other weights than the node's copy" in caplog.text
    for module, expected in zip((first, second, odd), before, strict=True):
        assert all(map(torch.equal, module.state_dict().values(), expected.values()))


@pytest.mark.parametrize(("name", "device"), [("run-0", torch.device("xpu")), (None, CPU)])
def test_a_process_keeps_copies_of_its_own_where_none_can_be_shared(monkeypatch, name, device):
    monkeypatch.setattr("verl_digen.platforms.module_memory.shared_copy", lambda *given, **how: pytest.fail("shared"))
    weights = torch.arange(3, dtype=torch.uint8)
    found = module_memory.host_copies(name, [weights], device, HostPool(CPU))
    assert found.is_new and torch.equal(found.parts[0], weights)


def test_host_copies_share_chunks_and_do_not_overlap(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(host_copies, "CHUNK_BYTES", 1024)
    pool = HostPool(torch.device("cpu"))
    tensors = [torch.full((size,), value, dtype=dtype) for size, value, dtype in CASES]
    copies = [pool.empty_like(tensor).copy_(tensor) for tensor in tensors]
    chunks = {storage.data_ptr(): storage.nbytes() for storage in map(torch.Tensor.untyped_storage, copies)}
    assert all(map(torch.equal, copies, tensors)) and [*chunks.values()] == [1024, 2048]
    assert all(copy.data_ptr() % copy.element_size() == 0 for copy in copies)


CASES = [(3, 1, torch.uint8), (5, 2.0, torch.float64), (7, 3.0, torch.bfloat16), (250, 4.0, torch.float64)]


@pytest.mark.parametrize(
    "support",
    [
        pytest.param({}, id="CPU build: laptop, CI machine"),
        pytest.param({"cuda": "13.0"}, id="CUDA build, whether or not this node has a GPU"),
        pytest.param({"hip": "7.1"}, id="ROCm build"),
        pytest.param({"xpu": "20250302"}, id="Intel GPU build"),
        pytest.param({"packages": "torch_npu"}, id="Ascend: a CPU build and a package"),
    ],
)
def test_cpu_is_chosen_only_where_pytorch_can_drive_nothing_else(monkeypatch, support):
    for name in ("cuda", "hip", "xpu"):
        monkeypatch.setattr(torch.version, name, support.get(name))
    monkeypatch.setattr(torch_support, "entry_points", lambda group: ())
    monkeypatch.setattr(torch_support, "find_spec", lambda name: support.get("packages") == name or None)
    assert accelerator_support() == support
    assert CpuPlatform().is_platform_available() is not bool(support)


def test_platform_places_tensors_and_says_gloo():
    platform = CpuPlatform()
    assert torch.zeros(1).to(platform.current_device()).device.type == platform.device_name == "cpu"
    assert platform.communication_backend_name() == "gloo"
    assert platform.ray_resource_options(1) == {"num_gpus": 1}
    with platform.nvtx_range("nothing"):
        pass


def test_device_module_answers_what_verl_asks_of_torch_cuda():
    free, total = cpu_device.mem_get_info()
    assert 0 < free <= total
    assert 0 < cpu_device.memory_allocated() <= total
    assert cpu_device.max_memory_allocated() > 2**20
    state = cpu_device.get_rng_state()
    first = torch.rand(1)
    cpu_device.set_rng_state(state)
    assert torch.equal(torch.rand(1), first)
    with cpu_device.stream(cpu_device.Stream()):  # torch.cpu's own
        cpu_device.synchronize()


@pytest.mark.skipif(bool(accelerator_support()), reason="this PyTorch can drive an accelerator")
def test_verl_chose_cpu_by_itself_with_a_cpu_build():
    from verl.plugin.platform import get_platform

    assert isinstance(get_platform(), CpuPlatform)


def test_a_platform_registered_later_goes_first(monkeypatch):
    from verl.plugin.platform import PlatformRegistry

    class Accelerator(CpuPlatform):
        def is_platform_available(self, use_smi_check=False):
            return True

    monkeypatch.setattr(PlatformRegistry, "_platforms", {"cpu": CpuPlatform})
    assert CpuPlatform().is_platform_available() is not bool(accelerator_support())
    PlatformRegistry.register(platform="accelerator")(Accelerator)
    assert not CpuPlatform().is_platform_available()

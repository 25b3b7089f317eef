# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from verl_digen.platforms import cpu_device
from verl_digen.platforms.cpu import CpuPlatform
from verl_digen.torch_support import TorchFacts, torch_facts, torch_has_accelerator_support

CPU_BUILD = TorchFacts(cuda=None, hip=None, xpu=None, backends=())


@pytest.mark.parametrize(
    ("facts", "has_support"),
    [
        pytest.param(CPU_BUILD, False, id="CPU build: laptop, CI machine"),
        pytest.param(TorchFacts("13.0", None, None, ()), True, id="CUDA build, whether or not this node has a GPU"),
        pytest.param(TorchFacts(None, "7.1", None, ()), True, id="ROCm build"),
        pytest.param(TorchFacts(None, None, "20250302", ()), True, id="Intel GPU build"),
        pytest.param(TorchFacts(None, None, None, ("torch_npu",)), True, id="Ascend: a CPU build and a package"),
    ],
)
def test_cpu_is_chosen_only_where_pytorch_can_drive_nothing_else(facts, has_support):
    assert torch_has_accelerator_support(facts) is has_support


def test_facts_do_not_depend_on_the_devices_of_this_node():
    facts = torch_facts()
    assert (facts.cuda, facts.hip) == (torch.version.cuda, torch.version.hip)


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


@pytest.mark.skipif(torch_has_accelerator_support(torch_facts()), reason="this PyTorch can drive an accelerator")
def test_verl_chose_cpu_by_itself_with_a_cpu_build():
    from verl.plugin.platform import get_platform

    assert isinstance(get_platform(), CpuPlatform)


def test_a_platform_registered_later_goes_first(monkeypatch):
    from verl.plugin.platform import PlatformRegistry

    class Accelerator(CpuPlatform):
        def is_platform_available(self, use_smi_check=False):
            return True

    monkeypatch.setattr(PlatformRegistry, "_platforms", {"cpu": CpuPlatform})
    assert CpuPlatform().is_platform_available() is not torch_has_accelerator_support(torch_facts())
    PlatformRegistry.register(platform="accelerator")(Accelerator)
    assert not CpuPlatform().is_platform_available()

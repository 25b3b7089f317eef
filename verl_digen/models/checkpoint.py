# SPDX-License-Identifier: Apache-2.0
"""A checkpoint folder in the diffusers format: its configs and its networks. Errors name
`actor_rollout_ref.model.path`.

A network has the same dtypes as from diffusers' own loader, however it is filled: modules that the class keeps in fp32
stay fp32, and so do tables that no checkpoint holds. A meta network filled with the loaded one's state dict equals it.

Random weights of a published size serve measurements of speed and memory where nothing can be downloaded:
`load_network` draws the weights of a folder that holds `RANDOM_MARKER` beside its config, the same in every process. A
network of 41 GB then takes no room on a disk. Norms are 1, biases 0, all else is normal numbers.
"""

import inspect
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn

from verl_digen.models.locate import read_object


class Experts(nn.Module):
    """Networks of one diffusers class, each for a part of the schedule, as one module, in the order of
    `DiffusionModel.expert_of`. One forward runs one whole expert; the others get no gradient.

    Wrappers of a transformer (FSDP2, peft, a weight receiver) wrap this module: parameter names get the expert's name
    as prefix.
    """

    def __init__(self, networks: Mapping[str, nn.Module]):
        super().__init__()
        self.names = tuple(networks)
        for name, network in networks.items():
            self.add_module(name, network)
        first: Any = networks[self.names[0]]
        self.config = first.config
        """Config of the first expert; read by verl's FSDP2 wrapping."""
        self._no_split_modules: list[str] = first._no_split_modules
        """Class names of the blocks FSDP2 shards one by one."""

    def forward(self, *, expert: int, **inputs: Any) -> Any:
        """Run expert number `expert` on its own inputs."""
        return self.get_submodule(self.names[expert])(**inputs)


def networks_of(module: Any) -> list[Any]:
    """The diffusers networks of what `load_transformer` returns, which peft may wrap, in the order of `expert_of`."""
    module = module.get_base_model() if hasattr(module, "get_base_model") else module
    return [module.get_submodule(name) for name in module.names] if isinstance(module, Experts) else [module]


RANDOM_MARKER = "RANDOM_WEIGHTS"
"""File in a network's folder: its weights are drawn when it is loaded."""
RANDOM_STD = 0.02
NUM_DRAWN = 1 << 24
"""Numbers that are drawn; the tensors of a network repeat them, each from a place of its own."""


def fill_randomly(network: nn.Module) -> nn.Module:
    """Give every parameter on the meta device a value on the CPU."""
    drawn = {
        name: draw_weight(name, parameter.shape, parameter.dtype)
        for name, parameter in network.named_parameters()
        if parameter.is_meta
    }
    network.load_state_dict(drawn, strict=False, assign=True)
    return network


def draw_weight(name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """The value of one tensor, a function of its name and shape."""
    value = torch.empty(shape, dtype=dtype)
    if value.ndim < 2:
        return value.fill_(1.0 if name.endswith("weight") else 0.0)
    rest, place = value.view(-1), crc32(name.encode()) % NUM_DRAWN
    while len(rest):
        part = _drawn(dtype)[place : place + len(rest)]
        rest[: len(part)] = part
        rest, place = rest[len(part) :], 0
    return value


@cache
def _drawn(dtype: torch.dtype) -> Tensor:
    return torch.randn(NUM_DRAWN, generator=torch.Generator().manual_seed(7)).mul_(RANDOM_STD).to(dtype)


def read_config(path: Path, name: str) -> dict[str, Any]:
    """Read the JSON file `name` of the checkpoint in `path`. ValueError if the file is missing or damaged."""
    file = path / name
    if not file.is_file():
        raise ValueError(
            f"actor_rollout_ref.model.path must hold {name}, but {str(path)!r} has none; complete the download"
        )
    return read_object(file, "actor_rollout_ref.model.path")


def read_network_config(path: Path, folder: str) -> dict[str, Any]:
    """Constructor arguments of the diffusers network in `folder`: the config file's, and the class's defaults for
    arguments that an older file lacks; the network is built with the same ones."""
    import diffusers

    config = read_config(path, f"{folder}/config.json")
    if not hasattr(diffusers, name := str(config.get("_class_name"))):
        raise ValueError(
            f"actor_rollout_ref.model.path must hold a {folder}/config.json that names a network of diffusers, got "
            f"_class_name={name} in {str(path)!r}; complete the download"
        )
    arguments = inspect.signature(getattr(diffusers, name).__init__).parameters.values()
    defaults = {argument.name: argument.default for argument in arguments if argument.default is not argument.empty}
    return defaults | config


def check_components(path: Path, index: dict[str, Any], needed: tuple[str, ...]) -> None:
    """ValueError, which lists what is missing, unless every component in the pipeline's index has its folder, and the
    index has all of `needed`."""
    listed = {name for name, entry in index.items() if isinstance(entry, list) and isinstance(entry[0], str)}
    absent = sorted(name for name in {*listed, *needed} if name not in listed or not (path / name).is_dir())
    if absent:
        raise ValueError(
            f"actor_rollout_ref.model.path must hold all parts of its {index['_class_name']}, but {str(path)!r} lacks "
            f"{', '.join(absent)}; complete the download"
        )


def diffusers_class(*names: str) -> Any:
    """diffusers' class of the first of these names that it has. What a trainer imports has its imports of diffusers
    inside functions: each process would spend half a second on them."""
    import diffusers

    return getattr(diffusers, next((name for name in names if hasattr(diffusers, name)), names[0]))


def load_network(folder: Path, architecture: str, dtype: torch.dtype) -> nn.Module:
    """Load the diffusers network in `folder`, in eval mode on the CPU."""
    if (folder / RANDOM_MARKER).exists():
        return fill_randomly(make_meta_network(folder, architecture, dtype))
    return diffusers_class(architecture).from_pretrained(folder, dtype=dtype, low_cpu_mem_usage=True).eval()


def make_meta_network(folder: Path, architecture: str, dtype: torch.dtype) -> nn.Module:
    """Build the network without weights: parameters on the meta device, buffers and tables real, on the CPU."""
    network = diffusers_class(architecture)
    with init_empty_weights(include_buffers=False):
        module = network.from_config(network.load_config(folder)).eval()
    for name, tensor in module.state_dict(keep_vars=True).items():  # without tables that no checkpoint holds
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(torch.float32 if kept_in_fp32(name, architecture) else dtype)
    return module


def kept_in_fp32(name: str, architecture: str) -> bool:
    """True if diffusers loads the parameter `name` in fp32 for any requested dtype."""
    return not set(diffusers_class(architecture)._keep_in_fp32_modules or ()).isdisjoint(name.split("."))


def in_one_dtype(network: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The network, with all parameters in `dtype`, those kept in fp32, too; buffers, angles of positions, stay fp32."""
    for parameter in network.parameters():
        parameter.data = parameter.data.to(dtype)
    return network

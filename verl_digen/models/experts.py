# SPDX-License-Identifier: Apache-2.0
"""Networks of one class, each for a part of the schedule, as one module.

- Wrappers of a transformer (FSDP2, peft, a weight receiver) wrap this module: parameter names get the expert's name as
  prefix.
- One forward runs one whole expert, chosen by the caller with `DiffusionModel.expert_of`.

Invariant (tests/models/test_wan.py): the expert that does not run gets no gradient and does not affect the result.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn


class Experts(nn.Module):
    """Several networks as one module.

    Args:
        networks: name -> network, all of one diffusers class, in the order of `DiffusionModel.expert_of`.
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
    """The diffusers networks of what `DiffusionModel.load_transformer` returns, which peft may wrap, in the order of
    `expert_of`."""
    module = module.get_base_model() if hasattr(module, "get_base_model") else module
    return [module.get_submodule(name) for name in module.names] if isinstance(module, Experts) else [module]

# SPDX-License-Identifier: Apache-2.0
"""Networks of one architecture that divide the schedule among them, as one module.

- What wraps a transformer (FSDP2, peft, a weight receiver) wraps this: the experts' names prefix their parameters'.
- One forward runs one expert, whole. Which one is the caller's to say: `DiffusionModel.expert_of`.

Invariant (tests/models/test_wan.py): the expert that is not asked for gets no gradient and leaves the result alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn


class Experts(nn.Module):
    """Args:
    networks: name -> network, all of one diffusers class; the order is that of `DiffusionModel.expert_of`.
    """

    def __init__(self, networks: Mapping[str, nn.Module]):
        super().__init__()
        self.names = tuple(networks)
        for name, network in networks.items():
            self.add_module(name, network)
        first: Any = networks[self.names[0]]
        self.config = first.config
        """Of the first expert; read by verl's FSDP2 wrapping."""
        self._no_split_modules: list[str] = first._no_split_modules
        """Class names of the blocks FSDP2 shards one by one."""

    def forward(self, *, expert: int, **inputs: Any) -> Any:
        """Run expert number `expert` on its own inputs."""
        return self.get_submodule(self.names[expert])(**inputs)

    def enable_gradient_checkpointing(self) -> None:
        """In every expert."""
        for name in self.names:
            network: Any = self.get_submodule(name)
            network.enable_gradient_checkpointing()

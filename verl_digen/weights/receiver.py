# SPDX-License-Identifier: Apache-2.0
"""Receiver of a weight update: stage everything, compare with the loaded tensors (seal), then switch at once.

Staging and sealing do not change the loaded weights, so generation continues; the caller decides when to switch.

Invariants (tests/weights): after an update that misses, adds or reshapes a tensor the old weights are untouched; every
tensor sent is loaded into the tensor that the network computes with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from verl_digen.weights.checksum import DecidingChecksums
from verl_digen.weights.probe import Probe

MAX_NAMES_SHOWN = 5
"""Maximum number of tensor names listed in an error."""


class WeightReceiver:
    """Receives weight updates for one transformer.

    Args:
        transformer: the loaded network.
        adapter_config: peft `LoraConfig` if updates carry only a LoRA adapter, else None (full or merged weights).
        networks: names of the networks that `transformer` holds, in order (`DiffusionModel.experts`).
    """

    def __init__(self, transformer: nn.Module, adapter_config: object | None, networks: Sequence[str]):
        self.module: nn.Module = transformer
        self._networks = tuple(networks)
        if adapter_config is not None:
            from peft import get_peft_model

            self.module = get_peft_model(transformer, adapter_config)  # type: ignore[arg-type]
        self._shapes = {name: tensor.shape for name, tensor in tensors_of_update(self.module).items()}
        if not self._shapes:
            raise RuntimeError(
                "a weight update must set at least one tensor of the network, but the adapter wraps no layer; "
                "actor_rollout_ref.model.target_modules must name layers of the transformer"
            )
        self._staged: dict[str, Tensor] = {}
        self._sealed: dict[str, Tensor] = {}

    def stage(self, named_tensors: dict[str, Tensor]) -> None:
        """Store a bucket on the CPU."""
        self._staged.update(named_tensors)

    def seal(self, num_tensors: int) -> None:
        """Check the staged tensors, ready for `switch`. Drops an update that was sealed earlier and not loaded.

        Args:
            num_tensors: number of tensors sent.

        Raises:
            RuntimeError: the tensors do not match the network's; names them. The old weights are unchanged.
        """
        staged, self._staged = self._staged, {}
        if len(staged) != num_tensors:
            raise RuntimeError(f"{num_tensors} tensors were sent but {len(staged)} arrived; the update is dropped")
        compare_with(staged, self._shapes)
        self._sealed = staged

    @property
    def is_staged(self) -> bool:
        """True if any tensor was received since the last `seal`."""
        return bool(self._staged)

    @property
    def is_sealed(self) -> bool:
        """True if a sealed update waits for `switch`."""
        return bool(self._sealed)

    def switch(self) -> None:
        """Copy the sealed tensors into the network.

        Raises:
            RuntimeError: nothing is sealed; or a tensor would go into a copy that the network does not compute with.
        """
        sealed, self._sealed = self._sealed, {}
        if not sealed:
            raise RuntimeError("no weight update is waiting to be taken; seal one first")
        # looked up at every switch: moving the module between devices replaces its tensors
        current = tensors_of_update(self.module)
        live = {tensor.data_ptr() for tensor in [*self.module.parameters(), *self.module.buffers()]}
        copies = [name for name in sealed if current[name].data_ptr() not in live]
        _raise_for("would be loaded into copies, not into the network", copies)
        with torch.no_grad():
            for name, tensor in sealed.items():
                current[name].copy_(tensor)

    def probe(self, version: int, fingerprint: tuple[float, ...]) -> Probe:
        """Report on the loaded weights; reads every number once, on the device that holds it.

        Args:
            version: version of these weights. fingerprint: the network's output with them.
        """
        current = tensors_of_update(self.module)
        sums = DecidingChecksums(self._networks)
        for name, tensor in current.items():
            sums.add(name, tensor)
        return Probe(version, sums.values, len(current), fingerprint)


def tensors_of_update(module: nn.Module) -> dict[str, Tensor]:
    """Tensors of an update of `module`, by name: peft's names if it wraps the network, else the network's."""
    from peft import PeftModel, get_peft_model_state_dict

    if isinstance(module, PeftModel):
        # save_embedding_layers: "auto" would ask the hub about the base model
        return get_peft_model_state_dict(module, save_embedding_layers=False)
    return dict(module.state_dict())


def compare_with(staged: Mapping[str, Tensor], shapes: Mapping[str, torch.Size]) -> None:
    """Raise RuntimeError, which names the tensors, unless an update has all of `shapes` and nothing else."""
    _raise_for("are missing from the update", sorted(shapes.keys() - staged.keys()))
    _raise_for("are unknown to the replica", sorted(staged.keys() - shapes.keys()))
    _raise_for(
        "have another shape than what is loaded",
        [
            f"{name} {tuple(tensor.shape)} != {tuple(shapes[name])}"
            for name, tensor in sorted(staged.items())
            if tensor.shape != shapes[name]
        ],
    )


def _raise_for(problem: str, names: list[str]) -> None:
    if names:
        more = f" and {len(names) - MAX_NAMES_SHOWN} more" if len(names) > MAX_NAMES_SHOWN else ""
        raise RuntimeError(
            f"{len(names)} tensors {problem}: {', '.join(names[:MAX_NAMES_SHOWN])}{more}; the old weights keep serving"
        )

# SPDX-License-Identifier: Apache-2.0
"""The receiving end of a weight update: stage everything, compare with what is loaded (seal), then switch at once.

Staging and sealing change nothing, so generation goes on meanwhile; when to switch is for the caller to say.

Invariants (tests/weights): after an update that misses, adds or reshapes a tensor the old weights are untouched; every
tensor that was sent is loaded into the one that the network computes with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from verl_digen.weights.checksum import DecidingChecksums
from verl_digen.weights.probe import Probe

MAX_NAMES_SHOWN = 5
"""Tensor names an error lists before it says how many more there are."""


class WeightReceiver:
    """Takes named tensors for one transformer.

    Args:
        transformer: the loaded network.
        adapter_config: peft `LoraConfig` if updates carry a LoRA adapter alone, else None (full or merged weights).
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
        """Keep a bucket aside, on the CPU."""
        self._staged.update(named_tensors)

    def seal(self, num_tensors: int) -> None:
        """Check what was staged; `switch` takes it. An update sealed before and not taken is forgotten.

        Args:
            num_tensors: how many the sender sent.

        Raises:
            RuntimeError: what was sent is not what is loaded; names the tensors. Nothing was changed.
        """
        staged, self._staged = self._staged, {}
        if len(staged) != num_tensors:
            raise RuntimeError(f"{num_tensors} tensors were sent but {len(staged)} arrived; the update is dropped")
        compare_with(staged, self._shapes)
        self._sealed = staged

    @property
    def is_staged(self) -> bool:
        """Whether anything was received since the last `seal`."""
        return bool(self._staged)

    @property
    def is_sealed(self) -> bool:
        """Whether an update waits to be taken."""
        return bool(self._sealed)

    def switch(self) -> None:
        """Copy the sealed tensors into the network.

        Raises:
            RuntimeError: nothing is sealed; or a tensor would go into a copy that the network does not compute with.
        """
        sealed, self._sealed = self._sealed, {}
        if not sealed:
            raise RuntimeError("no weight update is waiting to be taken; seal one first")
        # looked up anew: moving the module between devices replaces its tensors
        current = tensors_of_update(self.module)
        live = {tensor.data_ptr() for tensor in [*self.module.parameters(), *self.module.buffers()]}
        copies = [name for name in sealed if current[name].data_ptr() not in live]
        _raise_for("would be loaded into copies, not into the network", copies)
        with torch.no_grad():
            for name, tensor in sealed.items():
                current[name].copy_(tensor)

    def probe(self, version: int, fingerprint: tuple[float, ...]) -> Probe:
        """The report on the weights as they are loaded now; reads every number of them once, where they lie.

        Args:
            version: of these weights. fingerprint: what the network computes with them.
        """
        current = tensors_of_update(self.module)
        sums = DecidingChecksums(self._networks)
        for name, tensor in current.items():
            sums.add(name, tensor)
        return Probe(version, sums.values, len(current), fingerprint)


def tensors_of_update(module: nn.Module) -> dict[str, Tensor]:
    """What an update of `module` holds, by the names it uses: peft's where it wraps the network, else the network's."""
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

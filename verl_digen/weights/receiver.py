# SPDX-License-Identifier: Apache-2.0
"""The weights of one transformer and the update that is under way.

| update | for a replica | tensors go | until `switch` |
| --- | --- | --- | --- |
| staged | with its own devices | to host memory; `switch` loads them all | the old weights serve |
| live | that takes turns with the trainer | into the network, as they arrive | nothing serves (`is_whole`) |

Invariants (tests/weights): after a staged update that misses, adds or reshapes a tensor the old weights are untouched;
after such a live one, or an interrupted one, the network is not whole until a whole update has come; numbers that were
sent and are not in the network after `switch` are an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from verl_digen.weights.checksum import Casts, checksum
from verl_digen.weights.receiving import Named, Staging, Take

MAX_NAMES_SHOWN = 5
"""Maximum number of tensor names listed in an error."""
OLD_WEIGHTS_SERVE = "the old weights keep serving"
NOT_WHOLE = "the replica holds neither the old nor the new weights and serves nothing until a whole update has come"


class Live:
    """Loads an update as it arrives, bucket by bucket, after a comparison with the names and shapes of all of its
    tensors."""

    def __init__(self, shapes: Mapping[str, torch.Size], load: Take):
        self._shapes, self._load = shapes, load
        self._missing = set(shapes)

    def take(self, bucket: Named) -> None:
        """Load a bucket. RuntimeError if a tensor is unknown, came twice or has another shape."""
        _raise_for("are unknown to the replica", [name for name, _ in bucket if name not in self._shapes], NOT_WHOLE)
        _raise_for("came twice", [name for name, _ in bucket if name not in self._missing], NOT_WHOLE)
        _compare_shapes(dict(bucket), self._shapes, NOT_WHOLE)
        self._load(bucket)
        self._missing -= {name for name, _ in bucket}

    def finish(self) -> None:
        """Raise RuntimeError if a tensor has not come."""
        _raise_for("are missing from the update", sorted(self._missing), NOT_WHOLE)


@dataclass(frozen=True)
class _Sealed:
    """A complete update that waits for `WeightReceiver.switch`."""

    staged: Mapping[str, Tensor]
    """Tensors to load; none after a live update, which has loaded them."""
    checksum: int
    """Checksum of the tensors as they were sent."""
    casts: Casts


class WeightReceiver:
    """Receives weight updates for one transformer. `adapter_config` is a peft `LoraConfig` if updates carry only a LoRA
    adapter, else None (full or merged weights)."""

    def __init__(self, transformer: nn.Module, adapter_config: object | None):
        self.module: nn.Module = transformer
        if adapter_config is not None:
            from peft import get_peft_model

            # the adapter computes in the network's dtype, as in the trainer; peft would make it float32
            self.module = get_peft_model(transformer, adapter_config, autocast_adapter_dtype=False)  # type: ignore[arg-type]
        self._shapes = {name: tensor.shape for name, tensor in tensors_of_update(self.module).items()}
        if not self._shapes:
            raise RuntimeError(
                "a weight update must set at least one tensor of the network, but the adapter wraps no layer; "
                "actor_rollout_ref.model.target_modules must name layers of the transformer"
            )
        self.is_whole = True
        """False from the start of a live update until `switch`, and after `lose`."""
        self._update: Staging | Live | None = None
        self._casts = Casts()
        """Casts of the update that is under way."""
        self._sealed: _Sealed | None = None

    def begin_staged(self, device: torch.device) -> Take:
        """Begin an update, in place of an unfinished one -> function that stages a bucket of tensors on `device`."""
        self._update, self._casts = Staging(device), Casts()
        return self._update.take

    def begin_live(self) -> Take:
        """Begin an update, in place of an unfinished one -> function that loads a bucket of it. `is_whole` becomes
        false."""
        targets, casts = tensors_of_update(self.module), Casts()

        def load(bucket: Named) -> None:
            for name, tensor in bucket:
                casts.add(tensor, targets[name].dtype)
                targets[name].copy_(tensor, non_blocking=True)

        self._update, self._casts = Live(self._shapes, load), casts
        self.is_whole = False
        return self._update.take

    def seal(self, sent: int) -> None:
        """Check that the update, whose tensors have the checksum `sent`, is complete; it waits for `switch`, in place
        of one that was sealed earlier and not loaded. RuntimeError, which names tensors, if they do not match the
        network's. After a staged update the old weights are then unchanged."""
        update, self._update = self._update, None
        if update is None:
            raise RuntimeError("no weight update is under way; begin one first")
        if isinstance(update, Live):
            update.finish()
            self._sealed = _Sealed({}, sent, self._casts)
            return
        compare_with(update.tensors, self._shapes)
        self._sealed = _Sealed(update.tensors, sent, self._casts)

    @property
    def is_sealed(self) -> bool:
        """True if a sealed update waits for `switch`."""
        return self._sealed is not None

    def switch(self) -> None:
        """Copy a sealed staged update into the network, where a live update already is, and check it. RuntimeError if
        nothing is sealed; or the network holds other numbers, and serves nothing."""
        sealed, self._sealed = self._sealed, None
        if sealed is None:
            raise RuntimeError("no weight update is waiting to be taken; seal one first")
        self.is_whole = False
        # looked up at every update: moving the module between devices replaces its tensors
        current = tensors_of_update(self.module)
        with torch.no_grad():
            for name, tensor in sealed.staged.items():
                sealed.casts.add(tensor, current[name].dtype)
                current[name].copy_(tensor)
        sent, held = sealed.casts.applied(sealed.checksum), checksum(tensors_of_update(self.module).values())
        if sent != held:
            raise RuntimeError(
                f"a weight update with checksum {sent:x} did not reach the network, which holds {held:x}; {NOT_WHOLE}"
            )
        self.is_whole = True

    def tensors(self) -> list[Tensor]:
        """The tensors that an update replaces."""
        return list(tensors_of_update(self.module).values())

    def lose(self) -> list[Tensor]:
        """Declare the tensors of an update undefined -> those tensors. `is_whole` becomes false."""
        self.is_whole = False
        return self.tensors()

    def require_whole(self) -> None:
        """Raise RuntimeError unless the network holds the weights of one version."""
        if not self.is_whole:
            raise RuntimeError(f"a weight update was interrupted or has not come since the last sleep: {NOT_WHOLE}")


def tensors_of_update(module: nn.Module) -> dict[str, Tensor]:
    """Tensors of an update of `module`, by name: peft's names if it wraps the network, else the network's."""
    from peft import PeftModel, get_peft_model_state_dict

    if isinstance(module, PeftModel):
        # save_embedding_layers: "auto" would ask the hub about the base model
        return get_peft_model_state_dict(module, save_embedding_layers=False)
    return dict(module.state_dict())


def compare_with(staged: Mapping[str, Tensor], shapes: Mapping[str, torch.Size]) -> None:
    """Raise RuntimeError, which names the tensors, unless a staged update has all of `shapes` and nothing else."""
    _raise_for("are missing from the update", sorted(shapes.keys() - staged.keys()), OLD_WEIGHTS_SERVE)
    _raise_for("are unknown to the replica", sorted(staged.keys() - shapes.keys()), OLD_WEIGHTS_SERVE)
    _compare_shapes(staged, shapes, OLD_WEIGHTS_SERVE)


def _compare_shapes(staged: Mapping[str, Tensor], shapes: Mapping[str, torch.Size], outcome: str) -> None:
    _raise_for(
        "have another shape than what is loaded",
        [
            f"{name} {tuple(tensor.shape)} != {tuple(shapes[name])}"
            for name, tensor in sorted(staged.items())
            if tensor.shape != shapes[name]
        ],
        outcome,
    )


def _raise_for(problem: str, names: list[str], outcome: str) -> None:
    if names:
        more = f" and {len(names) - MAX_NAMES_SHOWN} more" if len(names) > MAX_NAMES_SHOWN else ""
        raise RuntimeError(f"{len(names)} tensors {problem}: {', '.join(names[:MAX_NAMES_SHOWN])}{more}; {outcome}")

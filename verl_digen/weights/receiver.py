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

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from verl_digen.require import first_of
from verl_digen.weights.checksum import Checksum, checksum
from verl_digen.weights.host_copies import HostPool
from verl_digen.weights.receiving import Named, Take

OLD_WEIGHTS_SERVE = "the old weights keep serving"
NOT_WHOLE = "the replica holds neither the old nor the new weights and serves nothing until a whole update has come"

Load = Callable[[Named], Collection[str]]
"""Loads tensors of an update -> the network's names of what it loaded."""


class Live(NamedTuple):
    """How an update gets into a network as it arrives."""

    shapes: Mapping[str, torch.Size]
    """Shapes of all of its tensors, by name."""
    load: Load


class Update:
    """A weight update on its way into a network.

    Args:
        dtype_of: name -> dtype of the network's tensor, to which loading casts; None for an unknown one.
        into: memory in which the update is staged, or how it is loaded bucket by bucket.
    """

    def __init__(self, dtype_of: Callable[[str], torch.dtype | None], into: HostPool | Live):
        self._dtype_of, self._into = dtype_of, into
        self._outcome = NOT_WHOLE if isinstance(into, Live) else OLD_WEIGHTS_SERVE
        self._before, self._after = Checksum(), Checksum()
        """Sums of the tensors that loading casts: as they were sent, and as the network holds them."""
        self._arrived: dict[str, torch.Size] = {}
        self.staged: dict[str, Tensor] = {}
        """Tensors of a staged update, on the host."""
        self._loaded: set[str] = set()

    def take(self, bucket: Named) -> None:
        """Take a bucket; see `verl_digen.weights.receiving.Take`. RuntimeError if a tensor came twice; of a live update
        also if one is unknown or has another shape."""
        counts = Counter(name for name, _ in bucket)
        twice = [name for name, count in counts.items() if count > 1 or name in self._arrived]
        self._raise_for("came twice", twice)
        arrived = {name: tensor.shape for name, tensor in bucket}
        self._arrived |= arrived
        if isinstance(self._into, Live):
            self._compare(arrived, self._into.shapes)
        for name, tensor in bucket:
            dtype = self._dtype_of(name) or tensor.dtype
            if tensor.dtype != dtype:
                self._before.add(tensor)
                self._after.add(tensor.to(dtype))
            if isinstance(self._into, HostPool):  # verl's receiver waits for the copies before it answers
                self.staged[name] = self._into.empty_like(tensor).copy_(tensor, non_blocking=True)
        if isinstance(self._into, Live):
            self._loaded.update(self._into.load(bucket))

    def check_complete(self, shapes: Mapping[str, torch.Size]) -> None:
        """Raise RuntimeError, which names the tensors, unless all of `shapes` have arrived and nothing else."""
        self._raise_for("are missing from the update", sorted(shapes.keys() - self._arrived.keys()))
        self._compare(self._arrived, shapes)

    def finish(self, load: Load) -> set[str]:
        """Load a staged update -> the network's names of all that was loaded, of either kind."""
        if self.staged:
            self._loaded.update(load(list(self.staged.items())))
        return self._loaded

    def loaded_checksum(self, sent: int) -> int:
        """Checksum of the network's numbers after an update with checksum `sent` is loaded; synchronises with the
        device."""
        return (sent - self._before.value + self._after.value) % 2**64

    def _compare(self, arrived: Mapping[str, torch.Size], shapes: Mapping[str, torch.Size]) -> None:
        self._raise_for("are unknown to the replica", sorted(arrived.keys() - shapes.keys()))
        self._raise_for(
            "have another shape than what is loaded",
            [
                f"{name} {tuple(shape)} != {tuple(shapes[name])}"
                for name, shape in sorted(arrived.items())
                if shape != shapes[name]
            ],
        )

    def _raise_for(self, problem: str, names: list[str]) -> None:
        if names:
            raise RuntimeError(f"{len(names)} tensors {problem}: {first_of(names)}; {self._outcome}")


class WeightReceiver:
    """Receives weight updates for one transformer. `adapter_config` is a peft `LoraConfig` if updates carry only a LoRA
    adapter, else None (full or merged weights)."""

    def __init__(self, transformer: nn.Module, adapter_config: object | None):
        self.module: nn.Module = transformer
        if adapter_config is not None:
            from peft import get_peft_model

            # the adapter computes in the network's dtype, as in the trainer; peft would make it float32
            self.module = get_peft_model(transformer, adapter_config, autocast_adapter_dtype=False)  # type: ignore[arg-type]
        tensors = tensors_of_update(self.module)
        self._shapes = {name: tensor.shape for name, tensor in tensors.items()}
        self._dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
        self.is_whole = True
        """False from the start of a live update until `switch`, and after `lose`."""
        self._update: Update | None = None
        self._sealed: tuple[Update, int] | None = None
        """A complete update that waits for `switch`, and the checksum of its tensors as they were sent."""

    def begin_staged(self, device: torch.device) -> Take:
        """Begin an update, in place of an unfinished one -> function that stages a bucket of tensors on `device`."""
        self._update = Update(self._dtypes.get, HostPool(device))
        return self._update.take

    def begin_live(self) -> Take:
        """Begin an update, in place of an unfinished one -> function that loads a bucket of it. `is_whole` becomes
        false."""
        self._update = Update(self._dtypes.get, Live(self._shapes, self._loader()))
        self.is_whole = False
        return self._update.take

    def _loader(self) -> Load:
        # looked up at every update: moving the module between devices replaces its tensors
        targets = tensors_of_update(self.module)

        def load(bucket: Named) -> list[str]:
            for name, tensor in bucket:
                targets[name].copy_(tensor, non_blocking=True)
            return [name for name, _ in bucket]

        return load

    def seal(self, sent: int) -> None:
        """Check that the update, whose tensors have the checksum `sent`, is complete; it waits for `switch`, in place
        of one that was sealed earlier and not loaded. RuntimeError, which names tensors, if they do not match the
        network's. After a staged update the old weights are then unchanged."""
        update, self._update = self._update, None
        if update is None:
            raise RuntimeError("no weight update is under way; begin one first")
        update.check_complete(self._shapes)
        self._sealed = update, sent

    @property
    def is_sealed(self) -> bool:
        """True if a sealed update waits for `switch`."""
        return self._sealed is not None

    def switch(self) -> None:
        """Copy a sealed staged update into the network, where a live update already is, and check it. RuntimeError if
        nothing is sealed; or the network holds other numbers, and serves nothing."""
        if self._sealed is None:
            raise RuntimeError("no weight update is waiting to be taken; seal one first")
        (update, checksum_sent), self._sealed = self._sealed, None
        self.is_whole = False
        with torch.no_grad():
            update.finish(self._loader())
        sent, held = update.loaded_checksum(checksum_sent), checksum(self.tensors())
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

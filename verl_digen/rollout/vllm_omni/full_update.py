# SPDX-License-Identifier: Apache-2.0
"""One update on its way into a worker of vLLM-Omni: staged in host memory, or loaded as it arrives."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from verl_digen.weights.checksum import Casts
from verl_digen.weights.receiver import Live, compare_with
from verl_digen.weights.receiving import Named, Staging

Load = Callable[[Named], set[str]]
"""Loads tensors into the network -> vLLM-Omni's names of what it loaded."""


class FullUpdate:
    """Full weights or an adapter, of one of two kinds. `dtype`: the network's. `staging`: destination of a staged
    update. `live`: shapes of all tensors, and how they load."""

    def __init__(
        self,
        dtype: torch.dtype,
        *,
        staging: Staging | None = None,
        live: tuple[Mapping[str, torch.Size], Load] | None = None,
    ):
        self._dtype, self._staging = dtype, staging
        self._casts = Casts()
        self._loaded: set[str] = set()
        self._live: Live | None = None
        if live is not None:
            shapes, load = live
            self._live = Live(shapes, lambda bucket: self._loaded.update(load(bucket)))

    def take(self, bucket: Named) -> None:
        """Take a bucket; see `verl_digen.weights.receiving.Take`."""
        for _, tensor in bucket:
            self._casts.add(tensor, self._dtype)
        destination = self._live or self._staging
        assert destination is not None, "an update is of one kind"
        destination.take(bucket)

    @property
    def staged(self) -> dict[str, Tensor]:
        """Tensors of a staged update, on the CPU."""
        assert self._staging is not None, "a live update keeps nothing"
        return self._staging.tensors

    def check_complete(self, shapes: Mapping[str, torch.Size]) -> None:
        """Raise RuntimeError, which names the tensors, unless all of `shapes` have arrived and nothing else."""
        if self._live is not None:
            self._live.finish()
        else:
            compare_with(self.staged, shapes)

    def loaded_checksum(self, sent: int) -> int:
        """Checksum that the network's numbers have after loading an update with checksum `sent`: that of the numbers
        cast to the network's dtype, as vLLM-Omni does, computed as they pass."""
        return self._casts.applied(sent)

    def finish(self, load: Load) -> set[str]:
        """Load a staged update -> vLLM-Omni's names of all that was loaded, of either kind."""
        return self._loaded if self._live is not None else load(list(self.staged.items()))

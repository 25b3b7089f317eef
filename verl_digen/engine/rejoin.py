# SPDX-License-Identifier: Apache-2.0
"""A dry run that survives one rank's lack of memory: that rank goes through the collectives that are left.

The other ranks wait for it in FSDP2's next all-gather. So it frees what the dry run took and runs again with fewer
rows, in which the collectives that it has taken part in are left out. In that run, weights whose all-gather is left
out are zeros; a dry run's numbers are discarded. All ranks are then at the same place, and agree on
smaller tiles.

Possible where the only collectives of a forward and backward are FSDP2's own over one mesh dimension: not with replicas
of the shards (`fsdp_size` smaller than the number of ranks), and not where ranks share a row.

Invariant (tests/engine/test_two_ranks_tight.py): after a shortage on one rank all ranks go on, with the gradient that
was open.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from torch.distributed.tensor import DTensor

from verl_digen.engine.gathered import reshard


class Rejoined(torch.OutOfMemoryError):
    """A dry run did not fit; this rank has taken part in all of its collectives."""


class Collectives:
    """Count of one dry run's collectives on this rank."""

    def __init__(self) -> None:
        self.num_done = 0
        """Number that this rank took part in."""
        self.num_left_out = 0
        """Number that the second run left out."""
        self._is_second = False

    def begin_again(self) -> None:
        """Leave out as many as were done from now on."""
        self._is_second = True

    def is_left_out(self) -> bool:
        """True for a collective that this rank has taken part in before; counts it."""
        if self._is_second and self.num_left_out < self.num_done:
            self.num_left_out += 1
            return True
        if not self._is_second:
            self.num_done += 1
        return False


class _Counted:
    """Mixin for one of FSDP2's collectives: its output is zeros where it is left out."""

    def __init__(self, collectives: Collectives):
        self._collectives = collectives

    def __call__(self, output_tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self._collectives.is_left_out():
            output_tensor.zero_()
            return None
        collective: Any = super()
        return collective.__call__(output_tensor, *args, **kwargs)


class _AllGather(_Counted, DefaultAllGather):
    pass


class _ReduceScatter(_Counted, DefaultReduceScatter):
    pass


def can_rejoin(module: nn.Module) -> bool:
    """True if every shard lies on one mesh dimension."""
    return all(
        not isinstance(parameter, DTensor) or parameter.device_mesh.ndim == 1 for parameter in module.parameters()
    )


def together(module: nn.Module, run: Callable[[], None], fewer: Callable[[], None]) -> None:
    """Call `run`, a dry run; if this rank runs out of memory, `fewer` in its place. Collective.

    Args:
        fewer: the same forwards and backwards with rows that fit.

    Raises:
        Rejoined: `run` did not fit.
        torch.OutOfMemoryError: nor did `fewer`; the other ranks wait.
    """
    with _counted(module) as collectives:
        try:
            run()
            return
        except torch.OutOfMemoryError as error:
            shortage = str(error)  # not the error: its traceback holds the run's activations
        reshard(module)
        gc.collect()
        collectives.begin_again()
        fewer()
    raise Rejoined(shortage)


@contextmanager
def _counted(module: nn.Module) -> Iterator[Collectives]:
    """Context in which the module's collectives are counted."""
    collectives = Collectives()
    units = [unit for unit in module.modules() if isinstance(unit, FSDPModule)]
    try:
        for unit in units:
            unit.set_custom_all_gather(_AllGather(collectives))
            unit.set_custom_reduce_scatter(_ReduceScatter(collectives))
        yield collectives
    finally:
        for unit in units:
            unit.set_custom_all_gather(DefaultAllGather())
            unit.set_custom_reduce_scatter(DefaultReduceScatter())

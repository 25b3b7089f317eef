# SPDX-License-Identifier: Apache-2.0
"""All ranks of a virtual trainer in one process: the worker's calls wait for the profile's time and train nothing.

| call | time |
| --- | --- |
| `assist` | its samples, sharded over the ranks |
| `accumulate` | training the fragment's rows on `digen.virtual.trainer_ranks` ranks, with or without TSP |
| `commit` | none: the profile does not separate it from publication |
| `update_weights` | the profile's `commit_s`, optimizer step and publication |

With `digen.virtual.fetch_rows` a fragment's rows and conditions are really fetched from TransferQueue; the call takes
the longer of the fetch and the training time.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from omegaconf import OmegaConf
from verl.single_controller.base.decorator import Dispatch, register

from verl_digen.algorithms.metric import Plain
from verl_digen.algorithms.objectives import find_objective
from verl_digen.config import digen_config
from verl_digen.engine.fragment import FragmentSpec
from verl_digen.engine.points import points_of
from verl_digen.engine.rows import fetch_samples
from verl_digen.engine.worker import DiffusionWorker, stored_by_group
from verl_digen.types import SampleRequest
from verl_digen.virtual.checkpoint_engine import VirtualEngine
from verl_digen.virtual.durations import virtual_durations
from verl_digen.virtual.samples import VirtualSamples

logger = logging.getLogger(__name__)

NO_CHECKPOINT = (
    "a virtual trainer has no state to {what}; set trainer.save_freq=-1 and trainer.resume_mode=disable, "
    "or leave out recipe virtual"
)


class VirtualWorker(DiffusionWorker):
    """See the module. Colocated training is not virtual."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # pyright: ignore[reportAttributeAccessIssue] - a dynamic enum
    def init_model(self) -> None:
        """Load the durations in place of a model."""
        digen = digen_config(OmegaConf.create({"digen": self.config.model.digen}))
        self._durations = virtual_durations(digen)
        self._samples = VirtualSamples(digen)
        self._points = points_of(find_objective(digen.loss_name), digen.seed)
        self._fetches = digen.virtual.fetch_rows
        self._partition = ""
        self._num_rows = 0
        self.checkpoint_engine = VirtualEngine()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)  # pyright: ignore[reportAttributeAccessIssue]
    def begin(self, num_samples: int, num_rows: int, partition: str, scale: float | None = None) -> None:
        """Begin a global batch."""
        self._partition = partition
        self._num_rows = 0

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)  # pyright: ignore[reportAttributeAccessIssue]
    def accumulate(self, fragment: FragmentSpec) -> dict[str, float]:
        """Wait for the fragment's training time -> `num_rows`, `fetch_s` and `accumulate_s`."""
        started_s = time.perf_counter()
        if self._fetches:
            samples = fetch_samples(self._points, self._partition, fragment.samples)
            assert samples.arrival is not None
            samples.arrival.complete()
        fetch_s = time.perf_counter() - started_s
        _sleep_until(started_s + self._durations.train_s(fragment.samples))
        num_rows = sum(sample.num_rows for sample in fragment.samples)
        self._num_rows += num_rows
        return {"num_rows": num_rows, "fetch_s": fetch_s, "accumulate_s": time.perf_counter() - started_s}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)  # pyright: ignore[reportAttributeAccessIssue]
    def assist(self, requests: tuple[SampleRequest, ...], version: int) -> list[tuple[str, Any]]:
        """Wait for the ranks' generation time -> all the samples, see `DiffusionWorker.assist`. One process makes what
        many ranks would: it does so within that time."""
        started_s, seconds = time.time(), self._durations.assist_s(len(requests))
        until_s, ended_s = time.perf_counter() + seconds, started_s + seconds
        made = [self._samples.make(request, (version, version), started_s, ended_s) for request in requests]
        stored = stored_by_group(made)
        _sleep_until(until_s)
        return stored

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)  # pyright: ignore[reportAttributeAccessIssue]
    def commit(self, more: bool = False) -> Plain:
        """Number of rows that real ranks would have trained."""
        return {"num_rows": (float(self._num_rows), "count")}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)  # pyright: ignore[reportAttributeAccessIssue]
    def abort(self) -> None:
        """No-op: there is no state to roll back."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)  # pyright: ignore[reportAttributeAccessIssue]
    async def update_weights(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, global_steps: int | None = None, mode: str = "auto"
    ) -> dict[str, Any]:
        """Wait for the time of optimizer step and publication; the first publication takes none."""
        if global_steps:
            await asyncio.sleep(self._durations.commit_s)
        return {}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # pyright: ignore[reportAttributeAccessIssue]
    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        raise ValueError(NO_CHECKPOINT.format(what="save"))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # pyright: ignore[reportAttributeAccessIssue]
    def load_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        raise ValueError(NO_CHECKPOINT.format(what="load"))


def _sleep_until(moment_s: float) -> None:
    while (remaining_s := moment_s - time.perf_counter()) > 0:
        time.sleep(remaining_s)

# SPDX-License-Identifier: Apache-2.0
"""Advice on the split while a run goes on: after its first steps, in a task beside the run, each piece told once.

- The first `WARM_UP_STEPS` steps are left out; a search begins after `FIRST_STEPS` more, and again whenever twice as
  many were measured. It reads the newest `MAX_STEPS` of them. So searches are few, and none of them holds up the run.
- Advice that was told is not told again; a search that finds other advice tells that.
- A search that fails is a warning, and the run goes on.

Example:
    watch = SplitWatch(setting, saves=True)
    watch.observe(intervals, 1)    # None, after every step
    watch.observe(intervals, 9)    # "another split of the same devices would be faster: ..."
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import ray
from ray.exceptions import RayError

from verl_digen.config import DigenConfig
from verl_digen.devices import PEAK_TFLOPS, Pool
from verl_digen.errors import plain
from verl_digen.models.flops import device_type
from verl_digen.observe.step_costs import StepParts, step_parts
from verl_digen.observe.timeline import Interval
from verl_digen.pool_sizes import split_limits
from verl_digen.sampling.requests import rows_per_group
from verl_digen.schedulers.rules import BatchRules
from verl_digen.simulate.cluster import Split
from verl_digen.simulate.layout import pooled_nodes
from verl_digen.trainer.split_advice import Advice, Setting, advice_line, advise
from verl_digen.trainer.utilisation import PoolDevices

logger = logging.getLogger(__name__)

WARM_UP_STEPS = 2
FIRST_STEPS = 5
MAX_STEPS = 20


class Search(Protocol):
    """A search that goes on beside this process."""

    def is_done(self) -> bool:
        """True if `result` does not wait."""
        ...

    def result(self) -> Advice | None:
        """Advice; None for none.

        Raises:
            RayError: it failed.
        """
        ...


class RaySearch:
    """`advise` in a Ray task."""

    def __init__(self, setting: Setting, steps: Sequence[StepParts]):
        self._reference = ray.remote(num_cpus=0)(advise).remote(setting, list(steps))

    def is_done(self) -> bool:
        return bool(ray.wait([self._reference], timeout=0)[0])

    def result(self) -> Advice | None:
        return ray.get(self._reference)


class SplitWatch:
    """See the module.

    Args:
        saves: True if the run writes checkpoints.
        begin: starts a search.
    """

    def __init__(
        self, setting: Setting, *, saves: bool, begin: Callable[[Setting, Sequence[StepParts]], Search] = RaySearch
    ):
        self._setting, self._saves, self._begin = setting, saves, begin
        self._steps: deque[StepParts] = deque(maxlen=MAX_STEPS)
        self._num_seen = self._num_measured = 0
        self._due = FIRST_STEPS
        self._search: Search | None = None
        self._told: Advice | None = None

    def observe(self, intervals: Iterable[Interval], step: int) -> str | None:
        """Note a step; returns a line for the log, if there is advice that was not told yet.

        Args:
            intervals: of this step, and of the one before, in which its first chunks may lie.
        """
        self._num_seen += 1
        parts = step_parts(intervals, step) if self._num_seen > WARM_UP_STEPS else None
        if parts is not None:
            self._steps.append(parts)
            self._num_measured += 1
        line = self._answer()
        if self._search is None and self._num_measured >= self._due:
            self._due = 2 * self._num_measured
            self._search = self._begin(self._setting, list(self._steps))
        return line

    def _answer(self) -> str | None:
        if self._search is None or not self._search.is_done():
            return None
        search, self._search = self._search, None
        try:
            advice = search.result()
        except RayError as error:
            logger.warning("the search of a faster split failed (%s); the run goes on", plain(error))
            return None
        if advice is None or (self._told is not None and advice.placed == self._told.placed):
            return None
        self._told = advice
        return advice_line(advice, saves=self._saves)


def split_watch(
    config: Any, digen: DigenConfig, devices: Mapping[str, PoolDevices], rules: BatchRules
) -> SplitWatch | None:
    """The watch of a run on separate pools; None where its steps cannot be simulated, with the reason in the log.

    Args:
        devices: "trainer" and "generator" -> their devices.
        rules: the planner's rules of the run.
    """
    if digen.environment.is_on:
        logger.info("no advice on the split of the devices: episodes of an environment are not simulated from a run")
        return None
    pools = {name: Pool(pool.num_devices, _type_of(pool.name)) for name, pool in devices.items()}
    split = Split(pools["trainer"], pools["generator"])
    types = {split.trainer.device, split.generator.device}
    if len(types) > 1 and not types <= set(PEAK_TFLOPS):
        logger.info("no advice on the split of the devices: how fast %s are is not known", " and ".join(sorted(types)))
        return None
    rollout = config.actor_rollout_ref.rollout
    setting = Setting(
        split,
        pooled_nodes((split.trainer, split.generator), (config.trainer.n_gpus_per_node, rollout.n_gpus_per_node)),
        split_limits(config),
        rules,
        num_steps=digen.num_generation_steps,
        num_rows=-(-rows_per_group(digen, rollout.n) // rollout.n),
        slots_per_replica=digen.slots_per_replica,
    )
    return SplitWatch(setting, saves=config.trainer.save_freq > 0)


def _type_of(name: str | None) -> str:
    """Type of device; a name that is not known stays as it is."""
    return "CPU" if name is None else device_type(name) or name

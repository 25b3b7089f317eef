# SPDX-License-Identifier: Apache-2.0
"""Bugs that are put into the project to see that the simulation finds them, each as the line it changes."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import CodeType

from tests.chaos.faults import Fault, Kind
from tests.chaos.simulation import Verdict, run_world
from tests.chaos.world import World


@dataclass(frozen=True)
class Bug:
    """Replacement of `old`, which occurs once in `module`, by `new`."""

    module: str
    old: str
    new: str
    world: World | None = None
    """A world that shows the bug, if random ones seldom do."""
    also: Bug | None = None
    """A second changed line, if two repairs cover for each other."""


BUGS = {
    "a replica lost while it loads is told that it has loaded": Bug(
        "verl_digen.trainer.pools",
        "if self._planner.has_slot(loaded):  # else reported lost while it loaded",
        "if True:",
        World(
            num_batches=3,
            max_versions=1,
            faults=(
                Fault("server 1", "activate_weights", 0, Kind.SLOW),
                Fault("engine 1", "update_weights", 1, Kind.DIES_BEFORE),
            ),
        ),
        also=Bug("verl_digen.trainer.replicas", "for server in replica.servers:", "for server in ():"),
    ),
    "the samples of a lost slot are never generated again": Bug(
        "verl_digen.schedulers.planner", "self._book.give_back(chunk_id, live.left)", "pass"
    ),
    "chunks of a group go to different agent loop workers": Bug(
        "verl_digen.trainer.pools",
        "self._workers[crc32(chunk.uid.encode()) % len(self._workers)]",
        "self._workers[chunk.id % len(self._workers)]",
    ),
    "conditions of dropped groups are left": Bug(
        "verl_digen.trainer.disaggregated",
        "|= published.condition_keys |",
        "|= {tag.facts.condition_key for tags in outcome.groups.values() for tag in tags.values()} |",
    ),
    "weights are switched in the middle of a batch": Bug(
        "verl_digen.rollout.batcher",
        "async with self._running:\n            await self._until_answered()\n            yield",
        "yield",
    ),
}


@contextmanager
def planted(bug: Bug) -> Iterator[None]:
    """Put a bug into the project: functions of the module and of its classes take the code of the changed text."""
    module = importlib.import_module(bug.module)
    path = Path(inspect.getfile(module))
    source = path.read_text()
    if source.count(bug.old) != 1:
        raise ValueError(f"{bug.module} must have this line once: {bug.old!r}; write the bug anew")
    changed = dict(_codes(compile(source.replace(bug.old, bug.new), str(path), "exec")))
    owners = [module, *(one for _, one in inspect.getmembers(module, inspect.isclass) if one.__module__ == bug.module)]
    functions = [inspect.unwrap(one) for owner in owners for one in vars(owner).values() if inspect.isfunction(one)]
    own = [(one, one.__code__) for one in functions if one.__code__.co_filename == str(path)]
    with nullcontext() if bug.also is None else planted(bug.also):
        try:
            for function, _ in own:
                function.__code__ = changed[function.__qualname__]
            yield
        finally:
            for function, code in own:
                function.__code__ = code


def _codes(code: CodeType, prefix: str = "") -> Iterator[tuple[str, CodeType]]:
    """(qualified name, code) of all functions and classes in a piece of code."""
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield prefix + inner.co_name, inner
            yield from _codes(inner, f"{prefix}{inner.co_name}.")


def hunt(bug: Bug, max_orders: int) -> Verdict | None:
    """Find the first of `max_orders` random worlds in which the bug shows; None if it shows in none."""
    with planted(bug):
        return next((found for seed in range(max_orders) if (found := run_world(seed)).problems), None)

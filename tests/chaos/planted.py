# SPDX-License-Identifier: Apache-2.0
"""Bugs that are put into the project to see that the simulation finds them, each as the line it changes.

python -m tests.chaos.planted        each bug, after how many orders it was found, and as what
"""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
import time
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.chaos.faults import Fault, Kind
from tests.chaos.simulation import Verdict, simulate
from tests.chaos.sweep import be_quiet
from tests.chaos.world import World, draw_world

MAX_ORDERS = 1000
"""Maximum number of random worlds in which to look for a bug."""


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
        "verl_digen.trainer.slots",
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
    "a replica takes weights while another of its slots generates": Bug(
        "verl_digen.trainer.slots", "if not self._unloaded.issuperset(slots):", "if False:"
    ),
    "a failure leaves the gradient open": Bug(
        "verl_digen.trainer.conductor",
        "if self._is_open:\n                await to_the_end",
        "if False:\n                await to_the_end",
    ),
    "a group is handed to the trainer again": Bug(
        "verl_digen.schedulers.planner",
        "uids = self._book.take_ready(batch, size)",
        "uids = self._book.take_ready(batch, size) * (1 + (self._num_fragments == 1))",
    ),
    "a failed sample is never generated again": Bug(
        "verl_digen.schedulers.group_book", "group.unissued = sorted({*group.unissued, *returned})", "pass"
    ),
    "the samples of a lost slot are never generated again": Bug(
        "verl_digen.schedulers.planner", "self._book.give_back(chunk_id, live.left)", "pass"
    ),
    "staleness has no bound": Bug("verl_digen.schedulers.group_book", "return age == 0 or ", "return True or "),
    "the death of a replica counts as bad luck of its samples": Bug(
        "verl_digen.agent_loop.chunks",
        "is_lost = any(isinstance(error, RayActorError) for error in errors.values())",
        "is_lost = False",
    ),
    "samples that failed are said to be generated": Bug(
        "verl_digen.agent_loop.chunks",
        "GeneratedChunk({index: _reason(error) for index, error in errors.items()}, is_lost)",
        "GeneratedChunk({}, is_lost)",
    ),
    "a fragment holds the samples of its first group only": Bug(
        "verl_digen.trainer.pools", "fragment_samples(groups,", "fragment_samples(dict(list(groups.items())[:1]),"
    ),
    "chunks of a group go to different agent loop workers": Bug(
        "verl_digen.trainer.pools",
        "self._workers[crc32(chunk.uid.encode()) % len(self._workers)]",
        "self._workers[chunk.id % len(self._workers)]",
    ),
    "conditions of dropped groups are left": Bug(
        "verl_digen.trainer.disaggregated",
        "|= outcome.condition_keys |",
        "|= {tag.condition_key for tags in outcome.groups.values() for tag in tags.values()} |",
    ),
    "conditions are cleared while another group needs them": Bug(
        "verl_digen.trainer.disaggregated",
        "self._condition_keys - self._generator.condition_keys()",
        "{*self._condition_keys}",
    ),
    "rows that were published for nothing are left": Bug(
        "verl_digen.trainer.disaggregated", "if outcome.unwanted:", "if False:"
    ),
    "a validation does not wait for the newest weights": Bug(
        "verl_digen.trainer.disaggregated",
        "self._supervision.run(self._conductor.drain())",
        "pass",
    ),
    "weights are switched in the middle of a batch": Bug(
        "verl_digen.rollout.batcher",
        "async with self._running:\n            await self._until_answered()\n            yield",
        "yield",
    ),
}


@contextmanager
def planted(bug: Bug) -> Iterator[None]:
    """Put a bug into the project: all functions of the module, and of its classes, come from the changed text."""
    with nullcontext() if bug.also is None else planted(bug.also), _planted_one(bug):
        yield


@contextmanager
def _planted_one(bug: Bug) -> Iterator[None]:
    module = importlib.import_module(bug.module)
    path = Path(inspect.getfile(module))
    source = path.read_text()
    if source.count(bug.old) != 1:
        raise ValueError(f"{bug.module} must have this line once: {bug.old!r}; write the bug anew")
    changed = types.ModuleType(bug.module)
    tree = ast.parse(source.replace(bug.old, bug.new))
    tree.body = [part for part in tree.body if not isinstance(part, ast.Expr)]  # nothing registers itself again
    exec(compile(tree, str(path), "exec"), changed.__dict__)
    classes = [owner for _, owner in inspect.getmembers(changed, inspect.isclass) if owner.__module__ == bug.module]
    owners = {changed: module, **{owner: getattr(module, owner.__name__) for owner in classes}}
    functions = [(owners[owner], name, value) for owner in owners for name, value in _functions(owner, bug.module)]
    undo = [(owner, name, vars(owner)[name]) for owner, name, _ in functions]
    try:
        for owner, name, value in functions:
            setattr(owner, name, _moved(value, owners))
        yield
    finally:
        for owner, name, value in undo:
            setattr(owner, name, value)


def _functions(owner: object, module: str) -> list[tuple[str, types.FunctionType]]:
    """Functions that are written in `owner`, with their names."""
    return [
        (name, value)
        for name, value in vars(owner).items()
        if isinstance(value, types.FunctionType) and inspect.unwrap(value).__globals__["__name__"] == module
    ]


def _moved(function: types.FunctionType, owners: Mapping[Any, Any]) -> types.FunctionType:
    """The function, with the `super()` of the class that it moves to."""
    if "__class__" not in function.__code__.co_freevars:
        return function
    cells = tuple(
        types.CellType(owners.get(cell.cell_contents, cell.cell_contents)) for cell in function.__closure__ or ()
    )
    moved = types.FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, cells)
    moved.__kwdefaults__ = function.__kwdefaults__
    return moved


def hunt(bug: Bug, max_orders: int) -> Verdict | None:
    """Find the first of `max_orders` random worlds in which the bug shows; None if it shows in none."""
    with planted(bug):
        for seed in range(max_orders):
            verdict = simulate(draw_world(seed))
            if verdict.problems:
                return verdict
    return None


def main() -> None:
    """Hunt every bug."""
    be_quiet()
    for name, bug in BUGS.items():
        began_s = time.process_time()
        verdict = hunt(bug, MAX_ORDERS)
        found = "NOT FOUND"
        if verdict is not None:
            kinds = sorted({problem.kind for problem in verdict.problems})
            found = f"{', '.join(kinds)} in order {verdict.world.seed}, {time.process_time() - began_s:.1f} s"
        print(f"{name}: {found}", flush=True)


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""Remote processes as the code under test sees them: handles, references and errors of Ray, on a virtual clock.

    handle.method.remote(args) -> reference     eager, as in Ray
    await reference, ray.get(reference)         the answer, or what Ray would raise
    ray.kill(handle)                            its calls raise ActorDiedError from then on

A call travels to the process, is done, and travels back. Each way takes a time that is a function of (seed, process,
method, number of the call), so that a plan with one fault less leaves the rest of a run as it was. About one way in
six takes no time: simultaneous events are where order goes wrong.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Iterable
from hashlib import md5
from types import SimpleNamespace
from typing import Any
from zlib import crc32

from ray import ActorID
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError, RayTaskError

from tests.chaos.faults import Fault, Kind
from tests.chaos.loop import VirtualLoop

WAY_S = 0.02
"""Mean time of a call's way to the process, and back."""

SIGN_OF_LIFE = "__ray_ready__"
"""A method that Ray gives to every actor."""
RAY_CALL = "__ray_call__"
"""Another one, which calls a function with the actor."""

SLOW_WAY_S = 10.0
"""Time of a slow call's way there, and back: several times as long as any work of a device."""


class Reference:
    """A future answer. Cancelling a waiter does not cancel the call."""

    def __init__(self, answer: asyncio.Future[Any]):
        self.answer = answer

    def __await__(self) -> Any:
        return asyncio.shield(self.answer).__await__()

    def future(self) -> asyncio.Future[Any]:
        """Stands for a future of a thread: called back when there is an answer."""
        return self.answer


class Process:
    """A process with an object in it whose methods others call.

    Args:
        name: its kind and number, e.g. "server 1".
        target: the object.
    """

    def __init__(self, cluster: Cluster, name: str, target: Any):
        self.cluster, self.name, self.target = cluster, name, target
        self.actor_id = ActorID(md5(name.encode()).digest())
        self.is_alive, self.is_stopped = True, False
        self.num_calls: Counter[str] = Counter()
        self._wakings: list[asyncio.Future[None]] = []
        self.unanswered: dict[asyncio.Task[None], tuple[str, asyncio.Future[Any]]] = {}
        self._once: list[tuple[asyncio.Task[None], asyncio.Future[Any]]] = []
        """Calls that Ray does not retry."""

    def die(self) -> None:
        """Fail all calls in flight, and all later ones."""
        self.is_alive = False
        for task, (_, answer) in self.unanswered.items():
            if not answer.done():
                answer.set_exception(ActorDiedError())
            task.cancel()

    def restart(self) -> None:
        """Come back with the same object, and retry the unanswered calls, as Ray does with `max_task_retries`."""
        self.is_stopped = False
        for task, answer in self._once:
            if not answer.done():
                answer.set_exception(ActorUnavailableError("it restarts", self.actor_id.binary()))
                task.cancel()
        self._once = []
        for woken in self._wakings:
            woken.set_result(None)
        self._wakings = []

    def call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_retried: bool = True) -> Reference:
        number = self.num_calls[method]
        self.num_calls[method] += 1
        answer = self.cluster.loop.create_future()
        answer.add_done_callback(lambda done: done.cancelled() or done.exception())  # awaited or not
        fault = self.cluster.take_fault(self.name, method, number)
        task = self.cluster.loop.create_task(self._serve(method, number, fault, answer, args, kwargs))
        self.unanswered[task] = f"{self.name}.{method} #{number}", answer
        task.add_done_callback(self.unanswered.pop)
        if not is_retried:
            self._once.append((task, answer))
        return Reference(answer)

    async def _serve(
        self,
        method: str,
        number: int,
        fault: Kind | None,
        answer: asyncio.Future[Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        """Do the call as its fault says, and answer."""
        there_s, back_s = (self.cluster.draw_s(WAY_S, self.name, method, number, way) for way in ("there", "back"))
        if fault is Kind.SLOW:
            there_s, back_s = SLOW_WAY_S + there_s, SLOW_WAY_S + back_s
        await _pass(there_s)
        try:
            if not self.is_alive:
                raise ActorDiedError()
            if fault is Kind.DIES_BEFORE:
                self.die()
                return
            if fault is Kind.AWAY_BEFORE:
                raise ActorUnavailableError("the connection was reset", self.actor_id.binary())
            if fault is Kind.HANGS:
                self.is_stopped = True
            await self._while_stopped()
            if fault is Kind.RAISES:
                raise _remote(MemoryError(f"{self.name} cannot {method}"), method)
            outcome = await self._do(method, args, kwargs)
            if fault is Kind.TWICE:
                outcome = await self._do(method, args, kwargs)
            await _pass(back_s)
            await self._while_stopped()
            if fault is Kind.DIES_AFTER:
                self.die()
                return
            if fault is Kind.AWAY_AFTER:
                raise ActorUnavailableError("the connection was reset", self.actor_id.binary())
            if not answer.done():
                answer.set_result(outcome)
        except Exception as error:
            if not answer.done():
                answer.set_exception(error)

    async def _do(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            if method == SIGN_OF_LIFE:
                return True
            if method == RAY_CALL:
                function, *rest = args
                return function(self.target, *rest)
            outcome = getattr(self.target, method)(*args, **kwargs)
            return await outcome if isinstance(outcome, Awaitable) else outcome
        except Exception as error:
            raise _remote(error, method) from error

    async def _while_stopped(self) -> None:
        """Block while the process is stopped: it answers nothing."""
        if self.is_stopped:
            self._wakings.append(self.cluster.loop.create_future())
            await self._wakings[-1]


class Handle:
    """An actor handle, as Ray gives to the callers of a process."""

    def __init__(self, process: Process):
        self._process = process
        self._actor_id = process.actor_id

    def __getattr__(self, method: str) -> Any:
        if method.startswith("__") and method not in (SIGN_OF_LIFE, RAY_CALL):
            raise AttributeError(method)

        def called(max_task_retries: int = 1) -> SimpleNamespace:
            return SimpleNamespace(
                remote=lambda *args, **kwargs: self._process.call(
                    method, args, kwargs, is_retried=max_task_retries > 0
                ),
                options=called,
            )

        return called()


class Cluster:
    """All processes of a run, and Ray's module-level functions for them.

    Args:
        faults: each strikes once, and is then listed in `struck`.
    """

    def __init__(self, loop: VirtualLoop, seed: int, faults: Iterable[Fault]):
        self.loop, self.seed = loop, seed
        self.processes: dict[str, Process] = {}
        self._named: dict[str, Process] = {}
        self.struck: list[Fault] = []
        self._faults = {(fault.process, fault.method, fault.call): fault for fault in faults}

    def put(self, value: Any) -> Reference:
        """`ray.put`."""
        stored = self.loop.create_future()
        stored.set_result(value)
        return Reference(stored)

    def start(self, name: str, target: Any, actor_name: str = "") -> Handle:
        """Start a process; `actor_name` is what `ray.get_actor` finds it by, if not its own name."""
        process = self.processes[name] = self._named[actor_name or name] = Process(self, name, target)
        return Handle(process)

    def take_fault(self, process: str, method: str, number: int) -> Kind | None:
        fault = self._faults.pop((process, method, number), None)
        if fault is None:
            return None
        self.struck.append(fault)
        return fault.kind

    def draw_s(self, mean_s: float, *names: Any) -> float:
        """Draw a time of about `mean_s`, equal for equal names; 0 in one case of six."""
        share = crc32(repr((self.seed, *names)).encode()) / 2**32
        return 0.0 if share < 1 / 6 else mean_s * (0.2 + 1.9 * share * share)

    def unanswered(self) -> list[str]:
        """Calls in flight, and how far they got."""
        return sorted(call for process in self.processes.values() for call, _ in process.unanswered.values())

    # -- Ray's functions -----------------------------------------------------------------------------------
    def get(self, references: Any, *, timeout: float | None = None) -> Any:
        """`ray.get`, from the driver's main thread: the clock runs meanwhile."""
        is_one = isinstance(references, Reference)

        async def wait() -> list[Any]:
            return [await reference for reference in ([references] if is_one else references)]

        try:
            answers = self.loop.run(asyncio.wait_for(wait(), timeout))
        except asyncio.TimeoutError as error:
            raise GetTimeoutError(f"no answer within {timeout} s") from error
        return answers[0] if is_one else answers

    def get_actor(self, name: str, namespace: str | None = None) -> Handle:
        """`ray.get_actor`."""
        if name not in self._named or not self._named[name].is_alive:
            raise ValueError(f"no actor is named {name!r}")
        return Handle(self._named[name])

    def list_named_actors(self) -> list[str]:
        """`ray.util.list_named_actors`: of this namespace, which TransferQueue's controller is not in."""
        return []

    def actors(self, actor_id: str) -> dict[str, str]:
        """`ray._private.state.actors`: nothing takes time to start here."""
        return {"State": "ALIVE"}

    def nodes(self) -> list[dict[str, Any]]:
        """`ray.nodes`: names of nodes are not simulated."""
        return []

    def kill(self, handle: Handle, *, no_restart: bool = True) -> None:
        """`ray.kill`."""
        handle._process.die() if no_restart else handle._process.restart()

    def sleep(self, duration_s: float) -> None:
        """`time.sleep`, in the driver's main thread."""
        self.loop.run(asyncio.sleep(duration_s))


def _remote(error: Exception, method: str) -> Exception:
    """The error as it reaches the caller."""
    if isinstance(error, RayTaskError):
        return error
    return RayTaskError(method, str(error), error).as_instanceof_cause()  # type: ignore[arg-type]


async def _pass(duration_s: float) -> None:
    if duration_s:
        await asyncio.sleep(duration_s)

# SPDX-License-Identifier: Apache-2.0
"""Request batching: collects concurrent requests and runs them together, one batch at a time.

    batch 1: runs ....... answers on their way ...
    batch 2:              runs ....................... answers on their way ...

- A batch holds requests with the `sampling` (size, steps, guidance) of the oldest pending request: the first of them by
  (uid, sample_index), and those whose prompts are nearest to its prompt in length, so that little is padded. The same
  requests always form the same batch. Pictures of the data set, which are encoded, have batches of their own; so have
  groups whose requests say so (`SampleRequest.batch_group`).
- A batch starts when it is full, when all pending requests that it may hold belong to bursts that have arrived whole
  (`SampleRequest.burst`), or when no request has arrived for `wait_s`; and as soon as the one before has run, while its
  answers are on their way. Answers of two batches are never under way at once.
- When all of the running batch is cancelled, it stops at its next step.
- Every request is answered, also when the task that runs the batches is cancelled.

Bound: at most one pending request per caller, because each caller waits for its own answer.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from verl_digen.hardware.transfers import send_as_bytes
from verl_digen.processes.bundles import outcomes
from verl_digen.processes.calls import tell
from verl_digen.types import Burst, Generation, SampleRequest, Sampling


class Bursts:
    """Counter of the arrivals of requests that were announced to come together (`SampleRequest.burst`), so that a
    replica starts them as soon as the last one is there, instead of waiting whether another one comes.

    A burst counts as complete from the arrival of its last request on, however many of the earlier ones have started,
    ended or been cancelled meanwhile.

    Example:
        bursts = Bursts()
        bursts.arrive(Burst("7", 2))                       # the first of two
        bursts.are_complete([Burst("7", 2)])               # False
        bursts.arrive(Burst("7", 2))
        bursts.are_complete([Burst("7", 2)])               # True
        bursts.are_complete([Burst("7", 2), None])         # False: more requests may follow one without a burst
    """

    def __init__(self) -> None:
        self._missing: dict[str, int] = {}
        """Name -> requests that have not arrived, of bursts that have begun and are not complete."""

    def arrive(self, burst: Burst | None) -> None:
        """Count one request."""
        if burst is None:
            return
        missing = self._missing.get(burst.name, burst.size) - 1
        if missing > 0:
            self._missing[burst.name] = missing
        else:
            self._missing.pop(burst.name, None)

    def are_complete(self, bursts: Iterable[Burst | None]) -> bool:
        """True if each of the requests that wait belongs to a burst that has arrived whole."""
        return all(burst is not None and burst.name not in self._missing for burst in bursts)

    def forget_all_but(self, bursts: Iterable[Burst | None]) -> None:
        """Forget incomplete bursts without a request in `bursts`: their other requests may never come."""
        names = {burst.name for burst in bursts if burst is not None}
        self._missing = {name: missing for name, missing in self._missing.items() if name in names}


Answers = Awaitable[Sequence[Generation | Exception]]
"""Answers in the order of the requests, with an exception for a request that failed alone."""

Execute = Callable[[Sequence[SampleRequest], Callable[[], bool]], Awaitable[Answers]]
"""(requests, should_stop) -> the answers, which may still be on their way when the next batch may run. Stops early when
should_stop() is true."""

Entry = tuple[SampleRequest, asyncio.Future[Generation]]


STOPPED = "the replica stopped generating before this sample was done"
"""Error of callers whose batch will not be answered."""


class Withdrawn(Exception):
    """The sample was cancelled."""


class RequestBatcher:
    """Collects requests into batches and runs them one at a time. A batch that is not full waits `wait_s` for one more
    request, unless it has all that were announced."""

    def __init__(self, execute: Execute, *, max_batch_size: int, wait_s: float):
        self._execute = execute
        self.max_batch_size = max_batch_size
        """May change between two batches."""
        self._wait_s = wait_s
        self._pending: list[Entry] = []
        self._batch: list[Entry] = []
        """Running batch."""
        self._answered: list[Entry] = []
        """Batch whose answers are on their way."""
        self._answering: asyncio.Task[None] | None = None
        self._last_s = 0.0
        """When the last request arrived."""
        self._bursts = Bursts()
        self._arrived = asyncio.Event()
        self._open = asyncio.Event()
        self._open.set()
        self._running = asyncio.Lock()
        self._worker: asyncio.Task[None] | None = None

    async def submit(self, request: SampleRequest) -> Generation:
        """Generate one sample; returns when its batch is done, raises the error of the sample or of its whole batch."""
        if self._worker is None:
            self._worker = asyncio.create_task(self._run())
            self._worker.add_done_callback(self._on_worker_ended)
        answer: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        self._pending.append((request, answer))
        self._last_s = asyncio.get_running_loop().time()
        self._bursts.arrive(request.burst)
        self._arrived.set()
        return await answer

    def _on_worker_ended(self, worker: asyncio.Task[None]) -> None:
        """Fail all waiting callers after the worker was cancelled; the next request starts a new worker."""
        self._worker = None
        waiting = [answer for _, answer in [*self._batch, *self._pending]]
        tell(waiting, [RuntimeError(STOPPED) for _ in waiting])
        self._batch, self._pending = [], []

    def withdraw(self, uid: str, sample_index: int) -> None:
        """Answer the sample's caller with `Withdrawn` at once. No effect if no caller waits for the sample."""
        for request, answer in [*self._pending, *self._batch, *self._answered]:
            if (request.uid, request.sample_index) == (uid, sample_index) and not answer.done():
                answer.set_exception(Withdrawn(f"sample {uid}_{sample_index} is not wanted any more"))
        self._pending = [entry for entry in self._pending if not entry[1].done()]
        self._arrived.set()  # the others may be complete without it

    def _is_unwanted(self) -> bool:
        """True if all of the running batch was cancelled; called from the thread that runs it."""
        return all(answer.done() for _, answer in self._batch)

    @property
    def waiting(self) -> list[SampleRequest]:
        """Requests of later batches that have arrived; from any thread."""
        return [request for request, _ in self._pending]

    def pause(self) -> None:
        """Start no further batch until `resume`; requests wait."""
        self._open.clear()

    def resume(self) -> None:
        """Allow batches again."""
        self._open.set()

    @asynccontextmanager
    async def exclusive(self) -> AsyncIterator[None]:
        """Hold the time between two batches: the running one ends and is answered first, the next one starts after.
        Weight updates use it, so that a trajectory has one version and no work in flight is lost."""
        async with self._running:
            await self._until_answered()
            yield

    async def _run(self) -> None:
        while True:
            await self._until_ready()
            async with self._running:
                if not self._open.is_set() or not self._pending:  # paused, or cancelled, while we waited for the lock
                    continue
                batch = self._batch = self._take()
                try:
                    answers = await self._execute([request for request, _ in batch], self._is_unwanted)
                except Exception as error:  # raised at every caller of the batch
                    tell((answer for _, answer in batch), [error] * len(batch))
                    continue
                await self._until_answered()
                self._answered, self._batch = batch, []
                self._answering = asyncio.create_task(self._answer(batch, answers))

    async def _answer(self, batch: list[Entry], answers: Answers) -> None:
        """Tell the callers of a batch that has run."""
        outcomes: Sequence[Generation | Exception] = [RuntimeError(STOPPED)] * len(batch)
        try:
            outcomes = await answers
            if len(outcomes) != len(batch):
                raise RuntimeError(f"a batch of {len(batch)} requests got {len(outcomes)} answers")
        except Exception as error:
            outcomes = [error] * len(batch)
        finally:
            tell((answer for _, answer in batch), outcomes)

    async def _until_answered(self) -> None:
        if self._answering is not None and not self._answering.done():
            await asyncio.wait([self._answering])

    async def _until_ready(self) -> None:
        """Return when batches may run and one is full, complete or has waited for `wait_s`."""
        while True:
            await self._open.wait()
            while not self._pending:
                self._arrived.clear()
                await self._arrived.wait()
            while not self._is_ready():
                self._arrived.clear()
                left_s = self._last_s + self._wait_s - asyncio.get_running_loop().time()
                try:
                    await asyncio.wait_for(self._arrived.wait(), left_s)
                except asyncio.TimeoutError:
                    break
            if self._open.is_set():
                return

    def _is_ready(self) -> bool:
        """True if the next batch is full, or no further request is announced for it; also if none is pending any more.
        Requests of other kinds count too, unless a group has its batches for itself."""
        group = self._pending[0][0].batch_group if self._pending else None
        waiting = [request for request, _ in self._pending if group is None or request.batch_group == group]
        return len(waiting) >= self.max_batch_size or self._bursts.are_complete(one.burst for one in waiting)

    def _take(self) -> list[Entry]:
        """Remove the next batch from the queue."""

        def by_name(entry: Entry) -> tuple[str, int]:
            return entry[0].uid, entry[0].sample_index

        def length(entry: Entry) -> int:
            return len(entry[0].inputs.text)

        def kind(entry: Entry) -> tuple[Sampling, bool, str | None]:
            return entry[0].sampling, entry[0].picture is None, entry[0].batch_group

        oldest = kind(self._pending[0])
        fitting = sorted((entry for entry in self._pending if kind(entry) == oldest), key=by_name)
        first = fitting[0]
        fitting.sort(key=lambda entry: (abs(length(entry) - length(first)), entry[0].uid != first[0].uid))
        batch = sorted(fitting[: self.max_batch_size], key=by_name)
        self._bursts.forget_all_but(request.burst for request, _ in self._pending)
        taken = {id(entry) for entry in batch}
        self._pending = [entry for entry in self._pending if id(entry) not in taken]
        return batch


class BatchingServer:
    """Base of the servers of our own back ends, actors that collect requests into batches. Method names are verl's."""

    def __init__(self, *, max_batch_size: int, wait_s: float):
        send_as_bytes()
        self._batcher = RequestBatcher(self._generate_batch, max_batch_size=max_batch_size, wait_s=wait_s)

    async def _generate_batch(self, requests: Sequence[SampleRequest], should_stop: Callable[[], bool]) -> Answers:
        """Run a batch -> its answers, for which the next batch does not wait."""
        raise NotImplementedError

    async def generate_all(self, requests: Sequence[SampleRequest]) -> list[Any]:
        """Generate samples -> `outcomes`."""
        return await outcomes([self._batcher.submit(request) for request in requests])

    async def abort_request(self, request_id: str) -> None:
        """Cancel the sample `UID_INDEX`: its caller gets `Withdrawn`."""
        uid, _, index = request_id.rpartition("_")
        self._batcher.withdraw(uid, int(index))

    async def start_profile(self, **kwargs: Any) -> None:
        """No-op: generation is profiled through verl's profiler of the trainer ranks."""

    stop_profile = start_profile

# SPDX-License-Identifier: Apache-2.0
"""Calls of one actor that are made in one pass of the event loop, sent as one: a message costs its two processes about
two milliseconds of CPU time, whatever is in it.

Who waits: a caller for all of its bundle. Bound: that of the call.

Invariants (tests/processes/test_bundles.py): every caller gets the answer to its own item; an item that fails fails
alone; if the call fails, each of its callers gets the error, and may call again.
"""

import asyncio
import pickle
import traceback
from collections.abc import Awaitable, Callable, Hashable, Sequence
from typing import Any, Generic, TypeVar

from ray.exceptions import RayTaskError

from verl_digen.errors import describe
from verl_digen.processes.calls import tell

MAX_ITEMS = 10_000
"""Maximum items of a bundle of names and numbers."""

Item = TypeVar("Item")


class Bundles(Generic[Item]):
    """Sends items that wait as bundles of at most `size`.

    Args:
        send: items -> an outcome of each, in order; an exception is raised at its caller.
        key: of an item; all items of a bundle have the same.
        cut_by: of an item; all items of a bundle have the same where more than `size` wait.

    Example:
        scores = Bundles(worker.score.remote, size=32)
        await asyncio.gather(*map(scores.call, samples))  # ceil(len(samples) / 32) calls
    """

    def __init__(
        self,
        send: Callable[[Sequence[Item]], Awaitable[Sequence[Any]]],
        *,
        size: int = MAX_ITEMS,
        key: Callable[[Item], Hashable] = lambda item: None,
        cut_by: Callable[[Item], Hashable] = lambda item: None,
    ):
        self._send, self._size, self._key, self._cut_by = send, size, key, cut_by
        self._waiting: list[tuple[Item, asyncio.Future[Any]]] = []
        self._sending: set[asyncio.Task[None]] = set()

    def call(self, item: Item) -> asyncio.Future[Any]:
        """The answer to one item, which is sent whether it is awaited or not. Raises the exception of the item, or of
        the call."""
        loop = asyncio.get_running_loop()
        if not self._waiting:
            loop.call_soon(self._begin)
        answer = loop.create_future()
        answer.add_done_callback(lambda done: done.cancelled() or done.exception())  # awaited or not
        self._waiting.append((item, answer))
        return answer

    def _begin(self) -> None:
        bundles: dict[Hashable, list[tuple[Item, asyncio.Future[Any]]]] = {}
        fits = len(self._waiting) <= self._size
        for entry in self._waiting:
            bundles.setdefault((self._key(entry[0]), fits or self._cut_by(entry[0])), []).append(entry)
        self._waiting = []
        for bundle in bundles.values():
            for start in range(0, len(bundle), self._size):
                task = asyncio.create_task(self._ask(bundle[start : start + self._size]))
                self._sending.add(task)
                task.add_done_callback(self._sending.discard)

    async def _ask(self, bundle: Sequence[tuple[Item, asyncio.Future[Any]]]) -> None:
        answers = [answer for _, answer in bundle]
        try:
            tell(answers, [_opened(outcome) for outcome in await self._send([item for item, _ in bundle])])
        except Exception as error:  # raised at every caller
            tell(answers, [error] * len(answers))


async def outcomes(calls: Sequence[Awaitable[Any]]) -> list[Any]:
    """Outcome of each call of a bundle, for its sender: a result, or an exception in Ray's envelope."""
    return [
        _sent(one) if isinstance(one, BaseException) else one
        for one in await asyncio.gather(*calls, return_exceptions=True)
    ]


def _sent(error: BaseException) -> RayTaskError:
    text = "".join(traceback.format_exception(error))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # its class cannot be read back: no sample of the bundle would have an answer
        error = RuntimeError(describe(error))
    return RayTaskError("outcomes", text, error)


def _opened(outcome: Any) -> Any:
    return outcome.as_instanceof_cause() if isinstance(outcome, RayTaskError) else outcome


def given(outcome: Any) -> Any:
    """One of `outcomes`; raises it if it is an exception."""
    if isinstance(opened := _opened(outcome), Exception):
        raise opened
    return opened

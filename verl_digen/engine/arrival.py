# SPDX-License-Identifier: Apache-2.0
"""Columns of samples that arrive from TransferQueue in the background, in the order in which tiles need them.

    arrival = Arrival(keys, names, fetch)      nothing is fetched yet
    arrival.request([[0, 1], [1, 2]])          samples of the first tile, of the second: one thread fetches them
    arrival.columns["latents"][0]              waits until that sample is there
    arrival.close()                            nothing further is fetched; returns when the call in flight has ended

- Calls of `fetch` are of the samples of 1, 1, 2, 4 ... tiles: the first tile waits for its own samples alone, and
  many tiles take few calls. One call is in flight at a time.
- A sample that is read before it was requested is fetched next.
- Bound: the tensors of these samples, which are one rank's of one training call; nobody asks for more.

Invariants (tests/engine/test_arrival.py): each sample is fetched once; an error reaches the reader with the samples'
keys; after `close` no thread runs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import overload

from torch import Tensor

FetchColumns = Callable[[Sequence[str]], Mapping[str, Sequence[Tensor]]]
"""Keys of samples -> their columns by name, in order."""


class Arrival:
    """See the module.

    Args:
        keys: the samples.
        names: the columns.
    """

    def __init__(self, keys: Sequence[str], names: Iterable[str], fetch: FetchColumns):
        self._keys, self._fetch = keys, fetch
        self.columns: Mapping[str, Sequence[Tensor]] = {name: ArrivingColumn(self, name) for name in names}
        self.waited_s = 0.0
        """Seconds that readers have waited."""
        self._changed = threading.Condition()
        self._found: dict[int, dict[str, Tensor]] = {}
        self._requested: set[int] = set()
        self._calls: list[list[int]] = []
        """Samples of the calls to come."""
        self._error: Exception | None = None
        self._failed: list[str] = []
        """Samples of the call that raised it."""
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def __len__(self) -> int:
        return len(self._keys)

    def request(self, tiles: Iterable[Sequence[int]]) -> None:
        """Begin to fetch the samples of tiles, by number, in this order; those requested before are left out."""
        call: list[int] = []
        with self._changed:
            for number, tile in enumerate(tiles):
                new = [index for index in dict.fromkeys(tile) if index not in self._requested]
                self._requested.update(new)
                call += new
                if number & (number + 1) == 0:  # 1, 2, 4, 8 ... tiles are requested
                    self._enqueue(call, len(self._calls))
                    call = []
            self._enqueue(call, len(self._calls))

    def wait_for(self, index: int) -> Mapping[str, Tensor]:
        """Columns of one sample, when it is there.

        Raises:
            RuntimeError: it could not be fetched; or the batch was closed before it came.
        """
        with self._changed:
            if index not in self._requested:
                self._requested.add(index)
                self._enqueue([index], 0)
            started_s = time.perf_counter()
            self._changed.wait_for(lambda: index in self._found or self._error is not None or self._is_closed)
            self.waited_s += time.perf_counter() - started_s
            if index in self._found:
                return self._found[index]
            if self._error is not None:
                raise RuntimeError(
                    f"sample {self._keys[index]} cannot train: the rows of {', '.join(self._failed)} could not be "
                    f"fetched from TransferQueue ({self._error})"
                ) from self._error
            raise RuntimeError(f"sample {self._keys[index]} is read after its batch was closed")

    def close(self) -> None:
        """Fetch nothing further, free what came, and wait for the call in flight."""
        with self._changed:
            self._is_closed = True
            self._calls.clear()
            self._found.clear()
            self._changed.notify_all()
        thread = self._thread
        if thread is not None:
            thread.join()

    def _enqueue(self, call: list[int], place: int) -> None:
        """Add a call, with the lock held."""
        if not call or self._is_closed or self._error is not None:
            return
        self._calls.insert(place, call)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="digen-rows", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._calls:
                    self._thread = None
                    return
                call = self._calls.pop(0)
            try:
                columns = self._fetch([self._keys[index] for index in call])
            except Exception as error:  # of TransferQueue or its store; raised where the sample is read
                with self._changed:
                    self._error, self._failed = error, [self._keys[index] for index in call]
                    self._calls.clear()
                    self._thread = None
                    self._changed.notify_all()
                return
            with self._changed:
                for place, index in enumerate(() if self._is_closed else call):
                    self._found[index] = {name: column[place] for name, column in columns.items()}
                self._changed.notify_all()


class ArrivingColumn(Sequence[Tensor]):
    """One column of all samples; reading a sample waits for it."""

    def __init__(self, arrival: Arrival, name: str):
        self._arrival, self._name = arrival, name

    def __len__(self) -> int:
        return len(self._arrival)

    @overload
    def __getitem__(self, index: int) -> Tensor: ...

    @overload
    def __getitem__(self, index: slice) -> list[Tensor]: ...

    def __getitem__(self, index: int | slice) -> Tensor | list[Tensor]:
        if isinstance(index, slice):
            return [self[one] for one in range(len(self))[index]]
        return self._arrival.wait_for(range(len(self))[index])[self._name]

    def __iter__(self) -> Iterator[Tensor]:
        return (self[index] for index in range(len(self)))

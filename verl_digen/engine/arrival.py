# SPDX-License-Identifier: Apache-2.0
"""Columns of samples that arrive from TransferQueue in the background, in the order in which tiles need them.

- One thread calls `fetch` for the samples of 1, 1, 2, 4 ... tiles: the first tile waits for its own samples alone, and
  many tiles take few calls. A sample that is read before it was requested is fetched by a call of its own.
- Bound: the tensors of one rank's samples of one training call; nobody asks for more.

Invariants (tests/engine/test_arrival.py): each sample is fetched once; an error reaches the reader with the samples'
keys; after `close` no thread runs.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any

from torch import Tensor

Columns = Mapping[str, Sequence[Tensor]]
"""Name -> the samples' tensors, in order."""
THREAD = "digen-rows"


class Arrival:
    """The named columns of the samples `keys`, which `fetch` brings. Reading `columns["latents"][0]` waits for it."""

    def __init__(self, keys: Sequence[str], names: Iterable[str], fetch: Callable[[Sequence[str]], Columns]):
        self._keys, self._fetch = keys, fetch
        self.columns: Columns = {name: ArrivingColumn(self, name) for name in names}
        self.waited_s = 0.0
        """Seconds that readers have waited."""
        self._thread = ThreadPoolExecutor(1, THREAD)
        self._calls: dict[int, tuple[Future[Columns], list[int]]] = {}
        """Sample -> the call that brings it, and the samples of that call."""
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._keys)

    def request(self, tiles: Iterable[Sequence[int]]) -> None:
        """Begin to fetch the samples of tiles, by number, in this order; those requested before are left out."""
        call: dict[int, None] = {}
        for number, tile in enumerate(tiles):
            call |= dict.fromkeys(index for index in tile if index not in self._calls)
            if number & (number + 1) == 0:  # 1, 2, 4, 8 ... tiles are requested
                self._begin(list(call))
                call = {}
        self._begin(list(call))

    def _begin(self, call: list[int]) -> None:
        if call and not self._is_closed:
            begun = self._thread.submit(self._fetch, [self._keys[index] for index in call])
            self._calls |= dict.fromkeys(call, (begun, call))

    def wait_for(self, index: int) -> dict[str, Tensor]:
        """Columns of one sample, when it is there. RuntimeError if it could not be fetched, or the batch was closed
        before."""
        if index not in self._calls:
            self._begin([index])
        if self._is_closed:
            raise RuntimeError(f"sample {self._keys[index]} is read after its batch was closed")
        began, call = self._calls[index]
        started_s = time.perf_counter()
        try:
            columns = began.result()
        except (Exception, CancelledError) as error:  # of TransferQueue or its store
            keys = ", ".join(self._keys[one] for one in call)
            raise RuntimeError(
                f"sample {self._keys[index]} cannot train: the rows of {keys} could not be fetched from TransferQueue "
                f"({error})"
            ) from error
        self.waited_s += time.perf_counter() - started_s
        place = call.index(index)
        return {name: column[place] for name, column in columns.items()}

    def close(self) -> None:
        """Fetch nothing further, free what came, and wait for the call in flight."""
        self._is_closed = True
        self._thread.shutdown(cancel_futures=True)
        self._calls.clear()


class ArrivingColumn(Sequence[Tensor]):
    """One column of all samples, by number; reading a sample waits for it."""

    def __init__(self, arrival: Arrival, name: str):
        self._arrival, self._name = arrival, name

    def __len__(self) -> int:
        return len(self._arrival)

    def __getitem__(self, index: Any) -> Any:
        return self._arrival.wait_for(range(len(self))[index])[self._name]

# SPDX-License-Identifier: Apache-2.0
"""TransferQueue's client of this process, for several threads.

TransferQueue makes the client in a process's first call, and other threads see it before it can be used: a second call
meanwhile fails with "Storage manager not initialized". So the first call of a process runs alone.

Invariant (tests/store/test_client.py): no call begins before the first one has ended; later ones run side by side.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


class FirstAlone:
    """Runs calls of any thread; until one has succeeded, one at a time.

    Example:
        calls = FirstAlone()
        calls.run(lambda: 1)    # 1; a call of another thread waits meanwhile
        calls.run(lambda: 2)    # 2; beside calls of other threads
    """

    def __init__(self) -> None:
        self._making = threading.Lock()
        self._is_made = False

    def run(self, call: Callable[[], Result]) -> Result:
        """Result of `call`."""
        if self._is_made:
            return call()
        with self._making:
            result = call()
            self._is_made = True
            return result


CLIENT = FirstAlone()
"""Calls of this process that several threads may make."""

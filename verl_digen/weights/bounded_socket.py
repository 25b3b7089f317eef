# SPDX-License-Identifier: Apache-2.0
"""A zmq socket whose waits end: by a timeout, or when a check raises."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import zmq

POLL_MS = 50
"""Interval between checks while a call waits."""


class BoundedSocket(zmq.Socket):
    """`send` and `recv` call `check` while they wait, and raise TimeoutError after `timeout_s`."""

    check: Callable[[], None]
    timeout_s: float

    @classmethod
    def open(cls, context: Any, kind: int, *, check: Callable[[], None], timeout_s: float) -> BoundedSocket:
        """A socket of the zmq type `kind`."""
        socket = context.socket(kind, socket_class=cls)
        socket.check, socket.timeout_s = check, timeout_s
        return socket

    def recv(self, *args: Any, **kwargs: Any) -> Any:
        self._wait(zmq.POLLIN)
        return super().recv(*args, **kwargs)

    def send(self, *args: Any, **kwargs: Any) -> Any:
        self._wait(zmq.POLLOUT)
        return super().send(*args, **kwargs)

    def _wait(self, event: int) -> None:
        deadline_s = time.monotonic() + self.timeout_s
        while not self.poll(POLL_MS, event):
            self.check()
            if time.monotonic() >= deadline_s:
                raise TimeoutError(
                    f"no part of it came for {self.timeout_s:g} s; if the sender was only slow, raise "
                    "digen.rollout.update_timeout_s"
                )

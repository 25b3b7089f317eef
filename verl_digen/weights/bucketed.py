# SPDX-License-Identifier: Apache-2.0
"""verl's bucketed weight transfer (CUDA IPC, or shared memory where the platform has none), also without vLLM.

The module needs no vLLM, but its package `verl.workers.rollout.vllm_rollout` imports it and fails without. So the file
is loaded by its path. Remove when the package can be imported without vLLM: a contract test fails then.
Beside it is a zmq socket whose waits end: by a timeout, or when a check raises.
"""

import sys
import time
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import verl.workers.rollout
import zmq

if TYPE_CHECKING:
    from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver, BucketedWeightSender

NAME = "verl.workers.rollout.vllm_rollout.bucketed_weight_transfer"


def _load() -> ModuleType:
    """The module, as Python has imported it already, or loaded from its file."""
    if NAME in sys.modules:
        return sys.modules[NAME]
    folder, file = NAME.split(".")[-2:]
    assert verl.workers.rollout.__file__ is not None, "a package with an __init__.py has a file"
    spec = spec_from_file_location(NAME, Path(verl.workers.rollout.__file__).parent / folder / f"{file}.py")
    assert spec is not None and spec.loader is not None, "a path of a Python file has a loader"
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if not TYPE_CHECKING:
    _module = _load()
    BucketedWeightReceiver, BucketedWeightSender = _module.BucketedWeightReceiver, _module.BucketedWeightSender

__all__ = ["BucketedWeightReceiver", "BucketedWeightSender"]

POLL_MS = 50
"""Interval between checks while a call waits."""


class BoundedSocket(zmq.Socket):
    """`send` and `recv` call `check` while they wait, and raise TimeoutError after `timeout_s`."""

    check: Callable[[], None]
    timeout_s: float

    @classmethod
    def open(cls, context: Any, kind: int, *, check: Callable[[], None], timeout_s: float) -> "BoundedSocket":
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

# SPDX-License-Identifier: Apache-2.0
"""Processes that have the pretend device, forked from one that has done the imports (5 s of a core)."""

import multiprocessing
import os
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from tests.engine import harness  # sets itself as what forks have imported

__all__ = ["harness", "on_pretend"]

PLATFORM = "VERL_PLATFORM"


def on_pretend(scenario: Callable[..., Any], *arguments: Any) -> Any:
    """Call a module's function in a process of its own, whose platform is `pretend`; returns what it returns.

    Raises:
        AssertionError: the scenario raised; holds its traceback.
    """
    context = multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(1, mp_context=context, initializer=_start) as pool:
        failure, result = pool.submit(_run, scenario, arguments).result()
    assert failure is None, failure
    return result


def _start() -> None:
    import torch

    from tests.pretend.backend import register, use_platform

    torch.set_num_threads(1)
    os.environ[PLATFORM] = "pretend"
    register()
    use_platform()


def _run(scenario: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[str | None, Any]:
    try:
        return None, scenario(*arguments)
    except BaseException:
        return traceback.format_exc(), None

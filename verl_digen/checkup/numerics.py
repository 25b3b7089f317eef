# SPDX-License-Identifier: Apache-2.0
"""The self-test of architectures on the device, in fp32 and in bf16."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed

import diffusers
import torch
import transformers
from verl.plugin.platform import get_platform

from verl_digen.checkup.outcome import CheckFailed
from verl_digen.checkup.setting import Setting
from verl_digen.models.tiny import BUILDERS
from verl_digen.selftest import LOG_PROBS, Check, run_selftest
from verl_digen.weights.own_device import own_device

DTYPES = (torch.float32, torch.bfloat16)
NUM_PROCESSES = 4
"""Architectures that are tested at the same time: their most of the time goes into building networks."""


def check_numerics(setting: Setting) -> str:
    """Run the self-test of the setting's architecture in both dtypes.

    Raises:
        CheckFailed: a number is beyond its bound.
    """
    return _test(setting.architecture)


def check_architectures(setting: Setting) -> str:
    """Run the self-test of every architecture; on a CPU that of the setting's alone.

    Raises:
        CheckFailed: a number of one is beyond its bound, or one raised an error.
    """
    names = [setting.architecture] if setting.is_cpu else sorted(BUILDERS)
    failed = {}
    context = multiprocessing.get_context("spawn")  # a fork cannot use a device that its parent has
    with ProcessPoolExecutor(NUM_PROCESSES, mp_context=context) as pool:
        running = {pool.submit(_test, name): name for name in names}
        for test in as_completed(running):
            name, error = running[test], test.exception()
            if error is None:
                setting.note(name, holds=test.result())
            else:
                failed[name] = error.cause if isinstance(error, CheckFailed) else f"{type(error).__name__}: {error}"
                setting.note(name, fails=failed[name])
    if failed:
        raise CheckFailed("; ".join(f"{name}: {cause}" for name, cause in failed.items()))
    return f"{len(names)} architectures hold in fp32 and bf16"


def _test(architecture: str) -> str:
    for library in (diffusers, transformers):  # no progress bars for tiny files
        library.logging.set_verbosity_error()
        library.logging.disable_progress_bar()
    checks = list(_checks(architecture))
    failed = [
        f"{check.what} in {dtype}: {check.value:.1e}, at most {check.bound:.0e}"
        + f" ({check.cause})" * bool(check.cause)
        for dtype, check in checks
        if not check.holds
    ]
    if failed:
        raise CheckFailed(f"{architecture}: {'; '.join(failed)}")
    gaps = [f"{check.value:.0e} in {dtype}" for dtype, check in checks if check.what == LOG_PROBS]
    return f"{architecture}: {len(checks)} numbers hold; log-probs differ by {', '.join(gaps)}"


def _checks(architecture: str) -> Iterator[tuple[str, Check]]:
    device = own_device(get_platform().device_name)
    with torch.backends.cudnn.flags(allow_tf32=False):  # convolutions round fp32 to 10 bits otherwise
        for dtype in DTYPES:
            name = str(dtype).removeprefix("torch.")
            yield from ((name, check) for check in run_selftest(architecture, device, dtype))

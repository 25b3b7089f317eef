# SPDX-License-Identifier: Apache-2.0
"""The self-test of an architecture on the device, in fp32 and in bf16."""

from __future__ import annotations

from collections.abc import Iterator

import diffusers
import torch
import transformers
from verl.plugin.platform import get_platform

from verl_digen.checkup.outcome import CheckFailed
from verl_digen.checkup.setting import Setting
from verl_digen.selftest import LOG_PROBS, Check, run_selftest
from verl_digen.weights.own_device import own_device

DTYPES = (torch.float32, torch.bfloat16)


def check_numerics(setting: Setting) -> str:
    """Run the self-test in both dtypes.

    Raises:
        CheckFailed: a number is beyond its bound.
    """
    for library in (diffusers, transformers):  # no progress bars for tiny files
        library.logging.set_verbosity_error()
        library.logging.disable_progress_bar()
    with torch.backends.cudnn.flags(allow_tf32=False):  # convolutions round fp32 to 10 bits otherwise
        checks = list(_checks(setting.architecture))
    failed = [
        f"{check.what} in {dtype}: {check.value:.1e}, at most {check.bound:.0e}"
        for dtype, check in checks
        if not check.holds
    ]
    if failed:
        raise CheckFailed(f"{setting.architecture}: {'; '.join(failed)}")
    gaps = [f"{check.value:.0e} in {dtype}" for dtype, check in checks if check.what == LOG_PROBS]
    return f"{setting.architecture}: {len(checks)} numbers hold; log-probs differ by {', '.join(gaps)}"


def _checks(architecture: str) -> Iterator[tuple[str, Check]]:
    device = own_device(get_platform().device_name)
    for dtype in DTYPES:
        name = str(dtype).removeprefix("torch.")
        yield from ((name, check) for check in run_selftest(architecture, device, dtype))

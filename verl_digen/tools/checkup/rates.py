# SPDX-License-Identifier: Apache-2.0
"""Rates of the device and its host: matrix products, memory, and copies between them."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from functools import partial

import torch
from verl.plugin.platform import get_platform

from verl_digen.tools.checkup.checks import Setting
from verl_digen.weights.sending import own_device

COPIED_BYTES, COPIED_BYTES_ON_CPU = 1 << 30, 1 << 26
MATRIX_SIDE, MATRIX_SIDE_ON_CPU = 8192, 512
WRITTEN_BYTES = 1 << 29


def check_rates(setting: Setting) -> str:
    """Measure the rates -> figure. Nothing here can fail but the device itself."""
    device = own_device(get_platform().device_name)
    is_cpu = device.type == "cpu"
    setting.note(
        "machine",
        device="cpu" if is_cpu else get_platform().device_module.get_device_name(0),
        torch=torch.__version__,
        cores=len(os.sched_getaffinity(0)),
        host_gb=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9,
        device_gb=get_platform().device_module.mem_get_info()[1] / 1e9,
        free_disk_gb=shutil.disk_usage(setting.folder).free / 1e9,
    )
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    products = {str(dtype).removeprefix("torch."): _product_tflops(device, dtype) for dtype in dtypes}
    setting.note("matrix products in TFLOP/s", **products)
    copies = _copies_gb_s(device)
    setting.note("copies in GB/s", **copies)
    setting.note("writes in GB/s", disk=_write_gb_s(setting))
    return f"{products['bfloat16']:.0f} TFLOP/s in bf16, {copies['on_the_device']:.0f} GB/s on the device"


def _product_tflops(device: torch.device, dtype: torch.dtype) -> float:
    side = MATRIX_SIDE_ON_CPU if device.type == "cpu" else MATRIX_SIDE
    one, other = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    return 2 * side**3 / _seconds(lambda: one @ other) / 1e12


def _copies_gb_s(device: torch.device) -> dict[str, float]:
    num_bytes = COPIED_BYTES_ON_CPU if device.type == "cpu" else COPIED_BYTES
    one, other, host = (torch.empty(num_bytes, dtype=torch.uint8, device=place) for place in (device, device, "cpu"))
    host.zero_()
    ways = {"on_the_device": (one, other), "to_device_pageable": (one, host), "to_host_pageable": (host, one)}
    found = {}
    if device.type != "cpu":
        began_s = time.perf_counter()
        pinned = host.pin_memory()
        found["page_locking_and_copy"] = num_bytes / (time.perf_counter() - began_s) / 1e9
        ways |= {"to_device_pinned": (one, pinned), "to_host_pinned": (pinned, one)}
    for name, (into, source) in ways.items():
        seconds = _seconds(partial(into.copy_, source, non_blocking=True))
        found[name] = (2 if name == "on_the_device" else 1) * num_bytes / seconds / 1e9
    return found


def _write_gb_s(setting: Setting) -> float:
    data = os.urandom(1 << 24) * (WRITTEN_BYTES >> 24)
    file = setting.folder / "written"
    began_s = time.perf_counter()
    file.write_bytes(data)
    seconds = time.perf_counter() - began_s
    file.unlink()
    return len(data) / seconds / 1e9


def _seconds(work: Callable[[], object], repeats: int = 5) -> float:
    """Mean seconds of the device's work, after one that is not timed."""
    work()
    get_platform().synchronize()
    began_s = time.perf_counter()
    for _ in range(repeats):
        work()
    get_platform().synchronize()
    return (time.perf_counter() - began_s) / repeats

# SPDX-License-Identifier: Apache-2.0
"""The device by itself: rates of matrix products, memory and copies, and attention's gradient in bf16 against fp32.

A wrong gradient is mostly finite, and a run trains something else without a word: cuDNN's attention has such a fault in
PyTorch 2.11 (docs/gpu_results.md), and one with masks where tokens are 64 more than a multiple of 128.
"""

import math
import os
import shutil
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from torch import Tensor
from verl.plugin.platform import get_platform

from verl_digen.patches import attention_gradient
from verl_digen.platforms.device_memory import accelerator_name
from verl_digen.tools.checkup.checks import CheckFailed, Setting
from verl_digen.weights.sending import own_device

COPIED_BYTES, COPIED_BYTES_ON_CPU = 1 << 30, 1 << 26
MATRIX_SIDE, MATRIX_SIDE_ON_CPU = 8192, 512
WRITTEN_BYTES = 1 << 29


def check_rates(setting: Setting) -> str:
    """Measure the rates -> figure. Nothing here can fail but the device itself."""
    device = own_device()
    setting.note(
        "machine",
        device=accelerator_name() or "cpu",
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


TOKENS, HEADS, WIDTHS = 1088, 8, (64, 128)
MAX_ERROR = 0.02
"""Relative error of a gradient; in bf16 it is 0.003."""


def check_attention(setting: Setting) -> str:
    """Compare gradients of queries, keys and values in two layouts, masked and not. CheckFailed beyond MAX_ERROR."""
    attention_gradient.apply()
    tokens = 192 if setting.is_cpu else TOKENS
    errors = {
        f"width {width}{', masked' * is_masked}": _error(tokens, width, is_masked)
        for width, is_masked in product(WIDTHS, (False, True))
    }
    setting.note("relative error of attention's gradient", **errors)
    wrong = [f"{what}: {error:.1e}" for what, error in errors.items() if error > MAX_ERROR]
    if wrong:
        raise CheckFailed(f"attention's gradient is off by {', '.join(wrong)}, at most {MAX_ERROR}")
    return f"gradients of attention differ by at most {max(errors.values()):.1e}"


def _error(tokens: int, width: int, is_masked: bool) -> float:
    """Largest relative error of a gradient; inf if one is not finite."""
    device = own_device()
    generator = torch.Generator().manual_seed(7)
    *inputs, wide = (
        torch.randn(1, tokens, heads, width, generator=generator).to(device, torch.bfloat16)
        for heads in (HEADS, HEADS, HEADS, 5 * HEADS)
    )
    mask = (torch.arange(tokens, device=device) < tokens - 9)[None, None, None] if is_masked else None
    errors = []
    for gradient in (wide[:, :, :HEADS], wide[:, :, :HEADS].contiguous()):  # as of FLUX.1's two kinds of blocks
        found = _gradients(dispatch_attention_fn, inputs, mask, gradient)
        exact = _gradients(_attend, [one.float() for one in inputs], mask, gradient.float())
        errors += [((one - other).norm() / other.norm()).item() for one, other in zip(found, exact, strict=True)]
    return max(error if math.isfinite(error) else math.inf for error in errors)


def _gradients(
    attend: Callable[..., Tensor], inputs: Sequence[Tensor], mask: Tensor | None, gradient: Tensor
) -> tuple[Tensor, ...]:
    leaves = [one.detach().requires_grad_() for one in inputs]
    return torch.autograd.grad(attend(*leaves, attn_mask=mask), leaves, gradient)


def _attend(queries: Tensor, keys: Tensor, values: Tensor, attn_mask: Tensor | None) -> Tensor:
    """Attention [B, S, H, D] by its formula."""
    scores = torch.einsum("bqhd,bkhd->bhqk", queries, keys) / math.sqrt(queries.shape[-1])
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -math.inf)
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), values)

# SPDX-License-Identifier: Apache-2.0
"""Device types and pools. Seconds convert between types by the ratio of peak compute: right for compute-bound work.

Peaks and memory are from the vendors' data sheets: dense bf16 with sums in fp32, no sparsity.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from verl_digen.require import require

ACCELERATORS = {
    "RTX3090": (71.0, 24),
    "RTX4090": (165.0, 24),
    "RTX5090": (209.0, 32),
    "L4": (121.0, 24),
    "A10": (125.0, 24),
    "A6000": (155.0, 48),
    "L40S": (362.0, 48),
    "A100": (312.0, 80),
    "H20": (148.0, 96),
    "H800": (989.0, 80),
    "H100": (989.0, 80),
    "H200": (989.0, 141),
    "B200": (2250.0, 180),
}
"""Type -> (TFLOP/s, GB). An A100 also comes with 40 GB."""
DEVICE_GB = {device: gb for device, (_, gb) in ACCELERATORS.items()}
"""Type -> GB."""
PEAK_TFLOPS = {device: peak for device, (peak, _) in ACCELERATORS.items()} | {"CPU": 0.1}  # one core, roughly
"""Type -> TFLOP/s."""


@dataclass(frozen=True)
class Pool:
    """Devices of one type."""

    num_devices: int
    device: str

    def slowdown(self, reference: str) -> float:
        """Factor from seconds on `reference` to seconds on this type."""
        return slowdown(self.device, reference)

    def __str__(self) -> str:
        return f"{self.num_devices}x{self.device}"


def parse_pool(option: str, text: str, *, default_device: str) -> Pool:
    """Parse `16` or `16xH20`.

    Raises:
        ValueError: the text is not a pool; the message names `option`.
    """
    match = re.fullmatch(r"(\d+)(?:x(\w+))?", text)
    require(match is not None, f"{option} must be a number of devices, or e.g. 16xH20", text, "write a number")
    assert match is not None
    num_devices, device = int(match[1]), match[2] or default_device
    require(num_devices >= 1, f"{option} must be >= 1 device", num_devices, "a pool needs a device")
    return Pool(num_devices, known_device(option, device))


def known_device(option: str, device: str) -> str:
    """Return `device` if it is in `PEAK_TFLOPS`.

    Raises:
        ValueError: it is not; the message names `option`.
    """
    require(
        device in PEAK_TFLOPS, f"{option} must name a device type of {', '.join(PEAK_TFLOPS)}", device, "choose one"
    )
    return device


def slowdown(device: str, reference: str) -> float:
    """Factor from seconds on `reference` to seconds on `device`; 1 for one and the same type, whatever its name."""
    return 1.0 if device == reference else PEAK_TFLOPS[reference] / PEAK_TFLOPS[device]

# SPDX-License-Identifier: Apache-2.0
"""Device types and pools. Seconds convert between types by the ratio of peak compute: right for compute-bound work.

Peaks and memory are from the vendors' data sheets: dense bf16 with sums in fp32, no sparsity.
"""

from dataclasses import dataclass

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
        """Factor from seconds on `reference` to seconds on this type; 1 for one and the same type, whatever its
        name."""
        return 1.0 if self.device == reference else PEAK_TFLOPS[reference] / PEAK_TFLOPS[self.device]

    def __str__(self) -> str:
        return f"{self.num_devices}x{self.device}"

# SPDX-License-Identifier: Apache-2.0
"""Let diffusers split a network's tokens over processes on a CPU.

Limitation:  `ModelMixin.enable_parallelism` divides the rank by the number of accelerators, which is 0 on a CPU.
Effect:      without this, ranks cannot share rows on a CPU (ZeroDivisionError). With accelerators nothing changes.
Affects:     diffusers >=0.42,<0.43; earlier ones count a CPU, and do not notice this
Remove when: it counts a CPU as a device; tests/contracts/test_private_names.py::
             test_diffusers_counts_no_device_on_a_cpu fails then.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from packaging.specifiers import SpecifierSet

from verl_digen.patches import is_for

VERSIONS = SpecifierSet("<0.43")


@contextmanager
def cpu_is_a_device() -> Iterator[None]:
    """Count one accelerator in the context where there is none."""
    counted = torch.accelerator.device_count
    if counted() or not is_for(__name__, "diffusers", VERSIONS):
        yield
        return
    torch.accelerator.device_count = lambda: 1
    try:
        yield
    finally:
        torch.accelerator.device_count = counted

# SPDX-License-Identifier: Apache-2.0
"""The clock of a timeline's timestamps. The driver records them, so it is the driver's clock."""

from __future__ import annotations

import time


class UnixClock:
    """Unix seconds that never go back: the time of day at construction, continued by the monotonic clock."""

    def __init__(self) -> None:
        self._base_s = time.time() - time.perf_counter()

    def __call__(self) -> float:
        return self._base_s + time.perf_counter()

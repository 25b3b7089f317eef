# SPDX-License-Identifier: Apache-2.0
"""The console line of a step: step, reward, throughput, time left. Pure."""

from __future__ import annotations

from collections.abc import Mapping


def progress_line(metrics: Mapping[str, float], *, step: int, num_steps: int, remaining_s: float) -> str:
    """E.g. `step 12/60 | reward 0.712 +-0.081 | 38.2 images/s | 2.51 s (generate 0.9, train 1.4) | eta 2m01s`."""
    return (
        f"step {step}/{num_steps} | reward {metrics['reward/mean']:.3f} ±{metrics['reward/std']:.3f} | "
        f"{metrics['perf/images_per_s']:.1f} images/s | {metrics['perf/step_s']:.2f} s "
        f"(generate {metrics['perf/generate_s']:.2f}, train {metrics['perf/train_s']:.2f}, "
        f"overhead {metrics['perf/overhead_s']:.2f}) | eta {duration(remaining_s)}"
    )


def duration(seconds: float) -> str:
    """`45s`, `2m05s`, `3h07m`."""
    total = round(max(0.0, seconds))
    if total < 60:
        return f"{total}s"
    if total < 3600:
        return f"{total // 60}m{total % 60:02d}s"
    return f"{total // 3600}h{total % 3600 // 60:02d}m"

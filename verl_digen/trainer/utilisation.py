# SPDX-License-Identifier: Apache-2.0
"""How much of its devices each pool used in a step: `perf/tflops_per_device/POOL` and `perf/mfu/POOL`.

Calculated work, by the FLOPs of the layers, over measured time:

| pool | useful work, calculated | in the time, measured |
| --- | --- | --- |
| trainer | forward and backward of every trained row | `perf/train_s`, of the engine's calls |
| generator | all denoise steps of the samples that were trained | `perf/generate_s`, in which any was generated |

- Useful work leaves out recomputation, old log-probs and the KL reference (`verl_digen.engine.row_flops`), text
  encoding, decoding, and samples that were thrown away. The time leaves out nothing.
- Samples that the trainer generated (`tag/assisted_samples`) are work of neither pool; `perf/train_s` leaves them out
  and `perf/generate_s` does not, so with assistance the generator's share is a lower bound.
- `perf/mfu/POOL` is there where the device's peak is known (`verl_digen.models.flops`). On a CPU and on other devices
  there are TFLOP/s alone. Virtual devices compute nothing and have neither.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from verl_digen.models.flops import utilisation_metrics

ROW_FORWARD = "actor/row_forward_flops"
ROW_TRAINING = "actor/row_training_flops"


@dataclass(frozen=True)
class PoolDevices:
    """What a pool computes on."""

    num_devices: int
    name: str | None
    """As the platform calls the first one; None for a CPU."""


def step_utilisation(
    metrics: Mapping[str, float], *, num_forwards: int, trainer: PoolDevices, generator: PoolDevices
) -> dict[str, float]:
    """The metrics of one step.

    Args:
        metrics: of the step, `actor/*` and `perf/*` among them.
        num_forwards: samples x denoise steps; a guided step counts once.
    """
    trained = metrics["actor/num_rows"] * metrics[ROW_TRAINING]
    generated = num_forwards * metrics[ROW_FORWARD]
    return utilisation_metrics(
        "trainer", trained, metrics["perf/train_s"], trainer.num_devices, trainer.name
    ) | utilisation_metrics("generator", generated, metrics["perf/generate_s"], generator.num_devices, generator.name)

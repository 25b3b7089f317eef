# SPDX-License-Identifier: Apache-2.0
"""Device utilisation of each pool in a step: `perf/tflops_per_device/POOL` and `perf/mfu/POOL`.

Work, calculated from the FLOPs of the layers, over measured time:

| pool | useful work, calculated | time, measured |
| --- | --- | --- |
| trainer | forward and backward of every trained row | `perf/train_s`, in the engine's calls |
| generator | all denoise steps of the trained samples | `perf/generate_s`, in which any sample was generated |

- Useful work excludes recomputation, old log-probs and the KL reference (`verl_digen.engine.row_flops`), text
  encoding, decoding, and discarded samples. The time excludes nothing.
- Samples that the trainer generated (`tag/assisted_samples`) are work of neither pool; `perf/train_s` excludes them
  and `perf/generate_s` does not, so with assistance the generator's share is a lower bound.
- `perf/mfu/POOL` is reported where the device's peak is known (`verl_digen.models.flops`). On a CPU and on other
  devices only TFLOP/s are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from verl_digen.models.flops import utilisation_metrics

ROW_FORWARD = "actor/row_forward_flops"
ROW_TRAINING = "actor/row_training_flops"


@dataclass(frozen=True)
class PoolDevices:
    """The devices of a pool."""

    num_devices: int
    name: str | None
    """The platform's name of the first device; None for a CPU."""


def step_utilisation(
    metrics: Mapping[str, float], *, num_forwards: int, trainer: PoolDevices, generator: PoolDevices
) -> dict[str, float]:
    """Metrics of one step.

    Args:
        metrics: the step's metrics, with `actor/*` and `perf/*`.
        num_forwards: samples x denoise steps; a guided step counts once.
    """
    trained = metrics["actor/num_rows"] * metrics[ROW_TRAINING]
    generated = num_forwards * metrics[ROW_FORWARD]
    return utilisation_metrics(
        "trainer", trained, metrics["perf/train_s"], trainer.num_devices, trainer.name
    ) | utilisation_metrics("generator", generated, metrics["perf/generate_s"], generator.num_devices, generator.name)

# SPDX-License-Identifier: Apache-2.0
"""A number about training, with the way in which numbers of tiles, ranks and optimizer steps combine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Reduce = Literal["mean", "count", "max", "min", "first", "first_max"]
"""Combination of a metric's values:

| value | tiles and ranks of one logical batch | optimizer steps on the same samples |
| --- | --- | --- |
| `mean` | shares of a mean: sum | mean |
| `count` | sum | sum |
| `max`, `min` | maximum, minimum | maximum, minimum |
| `first` | shares of a mean: sum | the first one's: it compares with what was recorded at generation |
| `first_max` | maximum | the first one's |
"""


@dataclass(frozen=True)
class Metric:
    """A named number's value and its reduction."""

    value: Tensor
    """[] fp32, detached."""
    reduce: Reduce = "mean"

    def scaled(self, factor: float) -> Metric:
        """A share of a mean over `factor` times fewer rows; other values stay."""
        return Metric(self.value * factor, self.reduce) if self.reduce in ("mean", "first") else self


def numbers(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """The values alone."""
    return {name: metric.value.item() for name, metric in metrics.items()}


Plain = dict[str, tuple[float, Reduce]]
"""Metrics in an answer to the driver, name -> value and reduction. As tensors, 36 would take 3 ms to pickle and read;
these take 0.01 ms."""


def plain(metrics: Mapping[str, Metric]) -> Plain:
    """The metrics without tensors."""
    return {name: (metric.value.item(), metric.reduce) for name, metric in metrics.items()}


def from_plain(metrics: Plain) -> dict[str, Metric]:
    """Metrics from `plain`, in fp64."""
    return {name: Metric(torch.tensor(value, dtype=torch.float64), reduce) for name, (value, reduce) in metrics.items()}


def combine_tiles(metrics: Iterable[Mapping[str, Metric]]) -> dict[str, Metric]:
    """Metrics of the tiles of one logical batch, or of its ranks, combined to the batch's."""
    return _combine(metrics, _of_tiles)


def combine_updates(metrics: Iterable[Mapping[str, Metric]]) -> dict[str, Metric]:
    """Metrics of several optimizer steps on the same samples, in order, combined to one step's."""
    return _combine(metrics, _of_updates)


def _combine(
    metrics: Iterable[Mapping[str, Metric]], combined: Callable[[Tensor, Reduce], Tensor]
) -> dict[str, Metric]:
    found: dict[str, list[Metric]] = {}
    for one in metrics:
        for name, metric in one.items():
            found.setdefault(name, []).append(metric)
    return {
        name: Metric(combined(torch.stack([metric.value for metric in some]), some[0].reduce), some[0].reduce)
        for name, some in found.items()
    }


def _of_tiles(values: Tensor, reduce: Reduce) -> Tensor:
    if reduce in ("max", "first_max"):
        return values.amax()
    return values.amin() if reduce == "min" else values.sum()


def _of_updates(values: Tensor, reduce: Reduce) -> Tensor:
    if reduce == "mean":
        return values.mean()
    return values[0] if reduce in ("first", "first_max") else _of_tiles(values, reduce)

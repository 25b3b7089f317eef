# SPDX-License-Identifier: Apache-2.0
"""The rows of one loss call: named tensors, the padding mask, and the mean every loss reduces with; and `Metric`, a
number about them, with the way in which numbers of tiles, ranks and optimizer steps combine.

A row is one (sample, trained timestep) pair. The mean over rows divides by the number of unmasked rows of the *logical
batch*, which the caller knows and a tile does not. So, summed over any split of a batch into fragments and tiles,
losses and gradients equal the batch's. Padding rows add nothing to a loss, a gradient or a metric, whatever their [N]
columns hold, NaN included.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Literal

import torch
from torch import Tensor

from verl_digen.require import require

Reduce = Literal["mean", "count", "max", "min", "first", "first_max"]
"""Combination of a metric's values."""
Combine = Callable[[Tensor], Tensor]
OF_TILES: dict[Reduce, Combine] = {
    "mean": torch.sum,  # shares of a mean
    "count": torch.sum,
    "max": torch.amax,
    "min": torch.amin,
    "first": torch.sum,  # shares of a mean
    "first_max": torch.amax,
}
"""Values [K] of the tiles and ranks of one logical batch -> the batch's."""
OF_UPDATES: dict[Reduce, Combine] = {
    **OF_TILES,
    **{"mean": torch.mean, "first": itemgetter(0), "first_max": itemgetter(0)},
}
"""Values [K] of optimizer steps on the same samples, in order -> one step's. The first ones compare with what was
recorded at generation."""


@dataclass(frozen=True)
class Metric:
    """A named number's value and its reduction."""

    value: Tensor
    """[] fp32, detached."""
    reduce: Reduce = "mean"

    def scaled(self, factor: float) -> "Metric":
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
    return _combine(metrics, OF_TILES)


def combine_updates(metrics: Iterable[Mapping[str, Metric]]) -> dict[str, Metric]:
    """Metrics of several optimizer steps on the same samples, in order, combined to one step's."""
    return _combine(metrics, OF_UPDATES)


def _combine(metrics: Iterable[Mapping[str, Metric]], combined: Mapping[Reduce, Combine]) -> dict[str, Metric]:
    found: dict[str, list[Metric]] = {}
    for one in metrics:
        for name, metric in one.items():
            found.setdefault(name, []).append(metric)
    return {
        name: Metric(combined[some[0].reduce](torch.stack([metric.value for metric in some])), some[0].reduce)
        for name, some in found.items()
    }


@dataclass(frozen=True)
class LossOutput:
    """Result of a loss: its scalar, and metrics."""

    loss: Tensor
    """[] fp32, a share of the logical batch's mean; the scalar to differentiate."""
    metrics: Mapping[str, Metric]
    """By name; each carries the way in which it combines over tiles."""


@dataclass(frozen=True)
class LossInputs:
    """The checked inputs of one loss.

    Example:
        rows = LossInputs.check("loss 'x'", {"log_prob": log_prob_N, "num_rows": 64}, columns=("log_prob",))
        rows["log_prob"]                # [N] fp32
        rows.mean(-rows["log_prob"])    # [] sum over unmasked rows / 64
    """

    tensors: Mapping[str, Tensor]
    """name -> fp32, columns [N] and latents [N, ...]. Columns read 1 in padding rows, safe to divide by."""
    is_row: Tensor
    """[N] bool, False in padding rows."""
    num_rows: Tensor
    """[] unmasked rows of the logical batch, at least 1; the denominator of every mean."""

    @classmethod
    def check(
        cls, consumer: str, inputs: Mapping[str, Tensor], *, columns: Sequence[str] = (), latents: Sequence[str] = ()
    ) -> "LossInputs":
        """Select `columns` [N] and `latents` [N, ...] of any float dtype from `inputs`.

        `inputs` may hold `mask` [N], 0 or False in padding rows (default: no padding), and `num_rows`, the unmasked
        rows of the whole logical batch, a number or [] (default: the unmasked rows here). ValueError, naming the
        `consumer`, if one is missing or misshapen.
        """
        needed = (*columns, *latents)
        missing = [name for name in needed if name not in inputs]
        if missing:
            there = ", ".join(inputs) or "nothing"
            raise ValueError(f"{consumer} needs {', '.join(missing)}; its inputs hold {there}")
        first = inputs[needed[0]]
        mask = inputs["mask"] if "mask" in inputs else torch.ones(first.shape[:1], device=first.device)
        for name, tensor in *((name, inputs[name]) for name in needed), ("mask", mask):
            if tensor.shape[:1] != first.shape[:1] or (tensor.dim() != 1 and name not in latents):
                shape = "[N, ...]" if name in latents else "[N]"
                raise ValueError(
                    f"{consumer} needs {name} of shape {shape} with one N for all inputs, got "
                    f"{list(tensor.shape)} beside {needed[0]} {list(first.shape)}"
                )
        is_row = mask.bool()
        tensors = {name: inputs[name].float() for name in needed}
        for name in columns:
            tensors[name] = torch.where(is_row, tensors[name], 1.0)
        num_rows = torch.as_tensor(inputs["num_rows"]) if "num_rows" in inputs else is_row.sum().clamp(min=1)
        return cls(tensors, is_row, num_rows)

    def __getitem__(self, name: str) -> Tensor:
        rule = f"an input that a loss reads must be one of those that it declares, {', '.join(self.tensors)}"
        require(name in self.tensors, rule, name, "add it to its columns or latents")
        return self.tensors[name]

    def mean(self, per_row: Tensor) -> Tensor:
        """[N] -> [], sum over unmasked rows / `num_rows`."""
        return torch.where(self.is_row, per_row, 0.0).sum() / self.num_rows

    def max(self, per_row: Tensor) -> Tensor:
        """[N] -> [], over unmasked rows; -inf if there is none."""
        return torch.where(self.is_row, per_row, -torch.inf).amax()

    def mean_metric(self, per_row: Tensor) -> Metric:
        return Metric(self.mean(per_row.detach()))

    def min_metric(self, per_row: Tensor) -> Metric:
        return Metric(torch.where(self.is_row, per_row.detach(), torch.inf).amin(), "min")

    def max_metric(self, per_row: Tensor) -> Metric:
        return Metric(self.max(per_row.detach()), "max")

# SPDX-License-Identifier: Apache-2.0
"""The rows of one loss call: named tensors, the padding mask, and the mean every loss reduces with.

A row is one (sample, trained timestep) pair. The mean over rows divides by the number of unmasked rows of the *logical
batch*, which the caller knows and a tile does not. So, summed over any split of a batch into fragments and tiles,
losses and gradients equal the batch's. Padding rows add nothing to a loss, a gradient or a metric, whatever their [N]
columns hold, NaN included.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from verl_digen.algorithms.metric import Metric


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

# SPDX-License-Identifier: Apache-2.0
"""The gradient of one logical batch, accumulated tile by tile, in any order.

    run(tiles) ... run(tiles)  ->  close()  ->  the logical batch's gradient is in the module, reduced over ranks

- A tile's loss is its share of the mean over the planned rows; `close` corrects the gradient if another number
  trained. FSDP2 averages gradients over ranks, so losses are multiplied by the number of ranks.
- Rows trained with centred rewards (`is_final=False`) are divided by the advantage scale in `settle`. That scale must
  not divide the KL term: with a KL term, policy and KL gradients of such rows are accumulated separately, which costs
  one extra backward and one extra gradient buffer.
- `reduce` says when gradients are reduced over the ranks: at each tile, at the last tile of each run, or at the last
  tile of the batch; `close` reduces what is still pending.
- For a loss that reads a whole trajectory's log-ratio (`gspo`) all tiles run a forward before the first backward, so a
  trajectory may lie in several tiles. It must lie on one rank.
- Metrics of tiles stay on their device until `close`, so that a run waits for no device and no rank.

Invariants (tests/engine/test_transaction.py, test_two_ranks_fragments.py, test_properties.py)
- The gradient is that of the serial loop over rows, whatever the tiles, runs, their order, `reduce`, and the number
  of ranks.
- After an exception only `drop` is legal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from verl_digen.algorithms.metric import Metric, combine_tiles
from verl_digen.algorithms.objectives.gspo import trajectory_log_ratios
from verl_digen.engine import gradients
from verl_digen.engine.gathered import recover
from verl_digen.engine.gradients import Gradient
from verl_digen.engine.loss import DiffusionLoss, LossTerms
from verl_digen.engine.policies import Outputs, PolicyForward
from verl_digen.engine.rows import Samples, tile_rows
from verl_digen.schedulers.tiles import Tile
from verl_digen.types import TrainingRows


@dataclass(frozen=True)
class TileWork:
    """Tiles of this rank and the samples of their rows; every rank has the same number of tiles."""

    samples: Samples
    places: Mapping[int, int]
    """`Row.sample`, a sample's number in the plan -> its index in `samples`."""
    tiles: Sequence[Tile]
    num_rows: int
    """Unmasked rows, over all ranks."""


class GradientTransaction:
    """See the module.

    Args:
        num_rows: planned unmasked rows of the logical batch, over all ranks.
        num_ranks: data-parallel ranks.
        reduce: "tile", "fragment" or "batch", see `digen.tsp.reduce`.
        backward: runs a loss's backward, with the loss scale of fp16 if any; takes (loss, retain_graph).
    """

    def __init__(
        self,
        module: nn.Module,
        forward: PolicyForward,
        loss: DiffusionLoss,
        *,
        num_rows: int,
        num_ranks: int,
        reduce: str,
        backward: Callable[[Tensor, bool], None],
    ):
        self.module, self.forward, self.loss = module, forward, loss
        self.num_rows, self.num_ranks, self.reduce, self.backward = num_rows, num_ranks, reduce, backward
        self.num_trained_rows = 0
        """Unmasked rows trained so far, over all ranks."""
        self.num_tiles = 0
        self.num_pad_rows = 0
        """Padding rows (mask 0) that this rank ran."""
        self.num_prompt_tokens = 0
        """Prompt tokens of this rank's unmasked rows."""
        self.is_poisoned = False
        self._settled: list[LossTerms] = []
        self._unsettled: list[LossTerms] = []
        self._kl_gradient: Gradient = {}

    @contextmanager
    def may_fail(self, what: str) -> Iterator[None]:
        """Context for work on the gradient. An exception in it leaves the gradient undefined."""
        self.require_sound(what)
        self.is_poisoned = True
        yield
        self.is_poisoned = False

    def require_sound(self, what: str) -> None:
        """Raise RuntimeError after an exception in earlier work."""
        if self.is_poisoned:
            raise RuntimeError(
                f"{what} needs a sound gradient, but an earlier call on this logical batch failed; "
                "call abort, then begin and train it again"
            )

    # -- rows in ------------------------------------------------------------------------------------------
    def run(self, work: TileWork, *, is_final: bool, is_last: bool) -> None:
        """Run forward and backward over the tiles.

        Args:
            is_final: advantages are divided by their scale already; required after `settle`.
            is_last: no more rows are expected; pending gradients are reduced with the last tile.
        """
        device = self.forward.device

        def rows_of(tile: Tile) -> TrainingRows:
            return tile_rows(work.samples, tile, work.places)[0].to(device)

        log_ratios = self._trajectory_log_ratios(work.tiles, rows_of) if self.loss.reads_trajectories else None
        others = self.forward.others(self.loss.wanted, [partial(rows_of, tile) for tile in work.tiles])
        for number, (tile, outputs) in enumerate(zip(work.tiles, others, strict=True)):
            ends = number == len(work.tiles) - 1
            rows, old_log_probs = tile_rows(work.samples, tile, work.places)
            self.num_pad_rows += int((rows.mask == 0).sum())
            self.num_prompt_tokens += _num_prompt_tokens(rows)
            rows = rows.to(device)
            reduces = self.reduce == "tile" or (ends and (is_last or self.reduce == "fragment"))
            terms = self._backward(
                rows,
                old_log_probs,
                outputs,
                None if log_ratios is None else log_ratios[number],
                is_final=is_final,
                reduces=reduces,
            )
            (self._settled if is_final else self._unsettled).append(terms.detach())
        self.num_tiles += len(work.tiles)
        self.num_trained_rows += work.num_rows

    def rehearse(self, rows: TrainingRows) -> None:
        """Dry run of a forward and backward like those of `run`; discards the gradient."""
        scratch: Gradient = {}
        with gradients.exchanged(self.module, scratch):
            log_ratios = torch.zeros_like(rows.log_probs) if self.loss.reads_trajectories else None
            others = next(self.forward.others(self.loss.wanted, [lambda: rows]))
            self._backward(rows, None, others, log_ratios, is_final=True, reduces=self.reduce == "tile")

    def _backward(
        self,
        rows: TrainingRows,
        old_log_probs: Tensor | None,
        others: Mapping[str, Outputs],
        log_ratios: Tensor | None,
        *,
        is_final: bool,
        reduces: bool,
    ) -> LossTerms:
        old = None
        if "old" not in others:
            old, before = self._before_update(rows, old_log_probs)
            others = {**others, **before}
        with gradients.reduced_at_end(self.module, reduces):
            terms = self.loss(
                self.forward(rows),
                others,
                rows,
                old,
                self.num_rows,
                trajectory_log_ratios=log_ratios,
                clamps=is_final,
            )
            if is_final or terms.kl is None:
                self.backward(terms.total * self.num_ranks, False)
            else:
                self.backward(terms.policy * self.num_ranks, True)
                with gradients.exchanged(self.module, self._kl_gradient):
                    self.backward(terms.kl * self.num_ranks, False)
        return terms

    def _before_update(
        self, rows: TrainingRows, computed_before: Tensor | None
    ) -> tuple[Tensor | None, dict[str, Outputs]]:
        """(old log-probs [N], outputs of the policy before the update), as far as they are not the forward's own.

        See `verl_digen.engine.loss`.
        """
        denominator = self.loss.denominator
        if denominator == "rollout":
            return rows.log_probs, {}
        if denominator != "unused" and computed_before is not None:
            return computed_before.to(rows.mask.device), {}
        if denominator == "recompute":  # weights are those of before the update until the batch is complete
            with torch.no_grad():
                return None, {"old": self.forward(rows).outputs(("log_prob", *self.loss.wanted.get("old", ())))}
        return None, {}

    @torch.no_grad()
    def _trajectory_log_ratios(self, tiles: Sequence[Tile], rows_of: Callable[[Tile], TrainingRows]) -> list[Tensor]:
        """Per tile [N] fp32: the mean log-ratio of each row's trajectory, under the current weights."""
        found = []
        for tile in tiles:
            rows = rows_of(tile)
            found.append(self.forward(rows).log_prob - rows.log_probs)
        # a filler's row is in another tile, too, and must not count twice there
        samples = [-1 if tile.is_filler else row.sample for tile in tiles for row in tile.rows]
        means = trajectory_log_ratios(torch.cat(found), torch.tensor(samples, device=self.forward.device))
        return list(means.split([len(tile.rows) for tile in tiles]))

    # -- the gradient out ---------------------------------------------------------------------------------
    def settle(self, divisor: float) -> None:
        """Divide the gradient of rows with centred rewards by the scale, and add the KL term's gradient."""
        if not self._unsettled:
            return
        gradient = gradients.take(self.module)
        gradients.scale_(gradient, 1 / divisor)
        gradients.add_(gradient, self._kl_gradient)
        gradients.put(self.module, gradient)
        self._settled += [terms.divide_policy(divisor) for terms in self._unsettled]
        self._unsettled, self._kl_gradient = [], {}

    def close(self) -> tuple[Tensor, dict[str, Metric]]:
        """Leave the logical batch's gradient in the module, reduced over the ranks.

        Returns:
            (this rank's loss times the number of ranks, this rank's metrics); on the device.

        Raises:
            RuntimeError: nothing was trained.
        """
        assert not self._unsettled
        if self.num_trained_rows == 0:
            raise RuntimeError("a logical batch needs at least one row to train, got none; call abort instead")
        correction = self.num_rows / self.num_trained_rows
        if correction != 1:
            gradient = gradients.take(self.module)
            gradients.scale_(gradient, correction)
            gradients.put(self.module, gradient)
        gradients.reduce_pending(self.module)
        loss = torch.stack([terms.total for terms in self._settled]).sum() * (self.num_ranks * correction)
        metrics = combine_tiles(terms.metrics for terms in self._settled)
        return loss, {name: metric.scaled(correction) for name, metric in metrics.items()} | {
            "num_pad_rows": Metric(torch.tensor(float(self.num_pad_rows)), "count"),
            "num_prompt_tokens": Metric(torch.tensor(float(self.num_prompt_tokens)), "count"),
        }

    def drop(self) -> None:
        """Discard the gradient, and reset the module if an exception left it inside a forward or backward."""
        if self.is_poisoned:
            recover(self.module)
        gradients.drop(self.module)
        self._kl_gradient = {}


def _num_prompt_tokens(rows: TrainingRows) -> int:
    """Prompt tokens of the unmasked rows; negative prompts are not counted."""
    return sum(
        len(condition["embeds"])
        for condition, weight in zip(rows.conditions, rows.mask.tolist(), strict=True)
        if weight > 0
    )

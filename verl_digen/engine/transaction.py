# SPDX-License-Identifier: Apache-2.0
"""The gradient of one logical batch, accumulated tile by tile, in any order.

    run(tiles) ... run(tiles)  ->  close()  ->  the logical batch's gradient is in the module, reduced over ranks

- A tile's loss is its share of the mean over the planned rows; `close` corrects the gradient if another number trained.
  FSDP2 averages gradients over ranks, so losses are multiplied by the number of ranks.
- Rows trained with centred rewards (`is_final=False`) are divided by the advantage scale in `settle`. That scale must
  not divide terms without advantages, such as KL: with one, the two gradients of such rows are accumulated separately,
  which costs one extra backward and one extra gradient buffer.
- For an objective with a joint column all tiles run a forward before the first backward.
- Metrics of tiles stay on their device until `close`, so that a run waits for no device and no rank.

Invariants (tests/engine/test_transaction.py, test_two_ranks_fragments.py, test_properties.py): the gradient equals the
serial loop's over rows, whatever the tiles, runs, their order, `reduce`, and the number of ranks. After an exception
only `drop` is legal.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import compress

import torch
from torch import Tensor

from verl_digen.algorithms.rows import Metric, combine_tiles
from verl_digen.engine import gradients
from verl_digen.engine.fsdp2 import kept_after_backward, recover
from verl_digen.engine.gradients import Gradient
from verl_digen.engine.loss import DiffusionLoss, LossTerms, tile_loss
from verl_digen.engine.policies import Outputs, moved
from verl_digen.engine.rows import TileWork, padded_tokens
from verl_digen.engine.verl_batches import VerlBatches
from verl_digen.schedulers.tiles import Tile
from verl_digen.types import TrainingRows


class GradientTransaction:
    """An accumulating gradient of an engine's module. `num_rows`: planned unmasked rows of the logical batch, over all
    ranks."""

    def __init__(self, engine: VerlBatches, loss: DiffusionLoss, num_rows: int):
        self.module, self.forward, self.loss = engine.module, engine.forward, loss
        self.recomputation, self.backward, self.exchange = engine.recomputation, engine.backward, engine.sum_over_ranks
        self.num_rows, self.num_ranks = num_rows, engine.get_data_parallel_size()
        self.reduce = engine.when_to_reduce()
        """When gradients are reduced over the ranks, "tile": at each, "fragment": at the last tile of a run, "batch":
        at the last of all. `close` reduces what is still pending."""
        self.loss_scale = 1.0 if engine.state.loss_scale is None else engine.state.loss_scale.value
        """Factor that `backward` multiplies losses by (fp16), and `close` divides the gradient by."""
        self.loss_factor = self.num_ranks * engine.ulysses_sequence_parallel_size
        """Ranks that FSDP2 averages gradients over; several may share a row, see `sharded.sequence_mesh`."""
        self.num_trained_rows = 0
        """Unmasked rows trained so far, over all ranks."""
        self.num_tiles = 0
        self.recomputed_shares = 0.0
        """Share of the blocks that backward recomputed, summed over the tiles."""
        self._counts: Counter[str] = Counter()
        """Counts of this rank: padding rows (mask 0); prompt tokens of the other rows, without negative prompts; text
        tokens that the network reads, negative prompts and padding included; and padding alone."""
        self.is_poisoned = False
        self._settled: list[LossTerms] = []
        self._unsettled: list[LossTerms] = []
        self._fixed_gradient: Gradient = {}
        """Gradient of the terms that the advantage scale does not divide, of unsettled rows."""

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

        `is_final`: advantages are divided by their scale already; required after `settle`. `is_last`: no more rows are
        expected; pending gradients are reduced with the last tile.
        """
        for number, (rows, outputs, column) in enumerate(self._tiles_of(work)):
            ends = number == len(work.tiles) - 1
            reduces = self.reduce == "tile" or (ends and (is_last or self.reduce == "fragment"))
            # tiles of one bucket run the same network
            keeps = not ends and work.tiles[number + 1].rows[0].bucket == work.tiles[number].rows[0].bucket
            with kept_after_backward(self.module, keeps):
                terms = self._backward(rows, outputs, column, is_final=is_final, reduces=reduces)
            self.recomputed_shares += self.recomputation.share
            (self._settled if is_final else self._unsettled).append(terms.detach())
        self.num_trained_rows += len(work.rows)

    def _tiles_of(self, work: TileWork) -> Iterator[tuple[TrainingRows, Mapping[str, Outputs], Tensor | None]]:
        """(rows on the device, outputs of other policies, joint column under the current weights) of each tile."""

        def on_device(tile: Tile) -> TrainingRows:
            return work.rows_of(tile).to(self.forward.device)

        makers = [partial(on_device, tile) for tile in work.tiles]
        others = self.forward.others(self.loss.wanted, makers)
        columns: Sequence[Tensor | None] = [None] * len(work.tiles)
        if self.loss.joint is not None:
            kept = [_moved(policies, "cpu") for policies in others]
            joint, scalars = self.loss.joint, []
            with torch.no_grad():
                for make, policies in zip(makers, kept, strict=True):
                    rows, outputs = make(), _moved(policies, self.forward.device)
                    scalars.append(self.loss.joint_scalars(self.forward(rows), outputs, rows))
                columns = work.joint_columns(scalars, lambda rows: joint.combine(rows, self.loss.config), self.exchange)
            others = (_moved(policies, self.forward.device) for policies in kept)
        for tile, outputs, column in zip(work.tiles, others, columns, strict=True):
            rows = work.rows_of(tile)
            self.recomputation.num_blocks = work.recomputed[tile.rows[0].bucket]
            self._count(rows)
            self.num_tiles += 1
            yield rows.to(self.forward.device), outputs, column

    def _count(self, rows: TrainingRows) -> None:
        trains = [weight > 0 for weight in rows.mask.tolist()]
        text, padding = padded_tokens(self.forward.model, rows)
        self._counts.update(
            num_pad_rows=trains.count(False),
            num_prompt_tokens=sum(len(one["embeds"]) for one in compress(rows.conditions, trains)),
            num_text_tokens=text,
            num_padding_tokens=padding,
        )

    def rehearse(self, rows: TrainingRows) -> None:
        """Dry run of a forward and backward as in `run`; leaves the module's gradient as it is, also if the device runs
        out of memory."""
        scratch: Gradient = {}
        with gradients.exchanged(self.module, scratch):
            try:
                others = next(self.forward.others(self.loss.wanted, [lambda: rows]))
                self._backward(rows, others, torch.zeros_like(rows.mask), is_final=True, reduces=self.reduce == "tile")
            except BaseException:
                recover(self.module)
                raise

    def _backward(
        self, rows: TrainingRows, others: Mapping[str, Outputs], joint: Tensor | None, *, is_final: bool, reduces: bool
    ) -> LossTerms:
        with gradients.reduced_at_end(self.module, reduces):
            _, terms = tile_loss(self.forward, self.loss, rows, others, self.num_rows, joint=joint, clamps=is_final)
            if is_final or terms.fixed is None:
                self.backward(terms.total * self.loss_factor, False)
            else:
                self.backward(terms.scaled * self.loss_factor, True)
                with gradients.exchanged(self.module, self._fixed_gradient):
                    self.backward(terms.fixed * self.loss_factor, False)
        return terms

    # -- the gradient out ---------------------------------------------------------------------------------
    def settle(self, divisor: float) -> None:
        """Divide the gradient of rows with centred rewards by the scale, and add terms without advantages."""
        if not self._unsettled:
            return
        gradient = gradients.take(self.module)
        gradients.scale_(gradient, 1 / divisor)
        gradients.add_(gradient, self._fixed_gradient)
        gradients.put(self.module, gradient)
        self._settled += [terms.divide(divisor) for terms in self._unsettled]
        self._unsettled, self._fixed_gradient = [], {}

    def close(self) -> tuple[Tensor, dict[str, Metric]]:
        """Leave the logical batch's gradient in the module, reduced over the ranks; at least one row was trained.
        Returns this rank's loss times the number of ranks, and its metrics; on the device."""
        assert not self._unsettled and self.num_trained_rows
        correction = self.num_rows / self.num_trained_rows
        if correction != 1:
            gradients.rescale(self.module, correction)
        gradients.reduce_pending(self.module)
        if self.loss_scale != 1:
            gradients.rescale(self.module, 1 / self.loss_scale)
        loss = torch.stack([terms.total for terms in self._settled]).sum() * (self.num_ranks * correction)
        metrics = combine_tiles(terms.metrics for terms in self._settled)
        counts = {name: Metric(torch.tensor(float(count)), "count") for name, count in self._counts.items()}
        return loss, {name: metric.scaled(correction) for name, metric in metrics.items()} | counts

    def drop(self) -> None:
        """Discard the gradient, and reset the module if an exception left it inside a forward or backward."""
        if self.is_poisoned:
            recover(self.module)
        gradients.drop(self.module)


def _moved(policies: Mapping[str, Outputs], device: torch.device | str) -> dict[str, Outputs]:
    """Copy of the outputs of each policy on `device`."""
    return {policy: moved(outputs, device) for policy, outputs in policies.items()}

# SPDX-License-Identifier: Apache-2.0
"""An open logical batch: fragments in, in the order in which they become ready; one gradient out.

    add(fragment)   its rewards to the ledger; refused without a change if any group of it was added before
    train(fragment) samples that the ledger releases: partitioned, fetched, tiled, into the gradient transaction
    finish()        samples that were held back; then the gradient is complete

Invariants (tests/engine/test_transaction.py): nothing trains twice; the fragments' order does not matter.
"""

import logging
from contextlib import closing

import torch
from torch import Tensor

from verl_digen.algorithms.rows import Metric
from verl_digen.engine.fragment import FragmentSpec, fragment_rows
from verl_digen.engine.ledger import AdvantageLedger
from verl_digen.engine.memory import shortage_explained, smaller_row, smaller_tile
from verl_digen.engine.planning import Planner
from verl_digen.engine.rows import Fetch
from verl_digen.engine.transaction import GradientTransaction

logger = logging.getLogger(__name__)


class LogicalBatch:
    """Ledger, planner and transaction of one logical batch."""

    def __init__(self, ledger: AdvantageLedger, transaction: GradientTransaction, planner: Planner, fetch: Fetch):
        self.ledger, self.transaction, self.planner, self._fetch = ledger, transaction, planner, fetch
        self.fragment_ids: set[str] = set()
        self.num_late_samples = 0
        """Samples that did not train with their own fragment."""
        self.fetch_wait_s = 0.0
        """Seconds that this rank's tiles waited for their samples."""

    def add(self, fragment: FragmentSpec) -> None:
        """Add a fragment. RuntimeError, and nothing is added, if the fragment or one of its groups was added before, it
        is malformed, or there are more samples than planned."""
        if fragment.fragment_id in self.fragment_ids:
            raise RuntimeError(
                f"a fragment trains once in a logical batch, but fragment {fragment.fragment_id} came twice; "
                "give every fragment its own id"
            )
        fragment_rows(fragment.samples)
        self.ledger.add(fragment.samples)
        self.fragment_ids.add(fragment.fragment_id)

    def train(self, fragment: FragmentSpec) -> int:
        """Train the samples that can train now that this fragment is added; returns their rows, over all ranks."""
        num_rows = self._train(is_last=self.ledger.is_complete)
        held = {*self.ledger.held}
        self.num_late_samples += sum(sample.key in held for sample in fragment.samples)
        return num_rows

    def finish(self) -> tuple[Tensor, dict[str, Metric]] | None:
        """Train the samples held back, and close the gradient transaction; see its `close`. None if no sample has rows,
        RuntimeError if none came."""
        if not self.ledger.samples:
            raise RuntimeError("a logical batch needs at least one group to commit, got none; call abort instead")
        self._train(is_last=True)
        if not self.transaction.num_trained_rows:
            return None
        loss, metrics = self.transaction.close()
        return loss, metrics | {"fetch_wait_s": Metric(torch.tensor(self.fetch_wait_s), "max")}

    def trained_advantages(self) -> Tensor:
        """Advantages of the samples that have rows, [samples] fp32, clamped as in the loss. In a tree: of the nodes at
        the last point, one sample each."""
        trains = torch.tensor([sample.facts.num_steps - 1 in sample.points for sample in self.ledger.samples])
        advantages = self.ledger.advantages()
        last = advantages if advantages.dim() == 1 else advantages[:, -1]
        return last[trains].clamp(-self.ledger.clip, self.ledger.clip)

    def _train(self, *, is_last: bool) -> int:
        ready = self.ledger.take(is_last=is_last)
        if ready.divisor is not None:
            self.transaction.settle(ready.divisor)
        loss = self.transaction.loss  # one without advantages is divided by no scale of them
        is_final = ready.divisor is not None or not loss.objective.reads_advantages(loss.config)
        if not any(sample.num_rows for sample in ready.samples):
            return 0
        work = self.planner.deal(ready.samples, ready.advantages, self._fetch)
        rows = max((tile.rows for tile in work.tiles), key=len)
        blocks, reduce = self.transaction.recomputation, self.transaction.reduce

        def remedy() -> str:
            return smaller_tile(rows) if len(rows) > 1 else smaller_row(blocks, reduce)

        with closing(work.samples), shortage_explained("a tile", len(rows), remedy):
            self.transaction.run(work, is_final=is_final, is_last=is_last)
        self.fetch_wait_s += work.samples.waited_s
        return len(work.rows)


def empty_metrics(loss_name: str) -> dict[str, Metric]:
    """Metrics of a batch without rows, whose gradient is 0, and a warning; the same on all ranks."""
    logger.warning(
        "digen.loss.name=%s selected none of the batch's samples, e.g. because the rewards of each group are equal: no "
        "optimizer step is taken (actor/num_empty_updates)",
        loss_name,
    )
    nothing = torch.zeros((), dtype=torch.float64)
    means = {name: Metric(nothing) for name in ("grad_norm", "grad_projection")}
    return means | {name: Metric(nothing, "count") for name in ("num_rows", "num_tiles")}

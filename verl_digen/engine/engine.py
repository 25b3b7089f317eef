# SPDX-License-Identifier: Apache-2.0
"""The training engine: logical batches, fragment by fragment, on a sharded transformer.

    begin(...)                      open a logical batch, before its samples are known
    accumulate(fragment) ...        in any order: ledger -> rows to ranks -> fetch own samples -> tiles -> gradient
        assisting()                 in between: forwards for generation; the gradient stays as it is
    commit() | abort()              one optimizer step, or discard everything

    evaluate(fragments)             log-probs of their rows, before the first of several optimizer steps trains them

Colocated training is the same calls: one fragment of all groups, or one logical batch per mini-batch.

Invariants (tests/engine)
- The committed gradient equals the serial loop's over rows, whatever the fragments, their order, the number of ranks
  and `digen.tsp.*`; also if the advantage scale is known only with the whole batch.
- The ratio of an update's own first pass is exactly 1.
- After `abort` weights, optimizer, copies, schedule and counters are bitwise as at `begin`.
"""

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from verl.utils.device import get_device_id
from verl.workers.engine import EngineRegistry

from verl_digen.algorithms.advantages import effective_samples
from verl_digen.algorithms.rows import Metric, Reduce
from verl_digen.engine import gradients, memory
from verl_digen.engine.build import row_flops
from verl_digen.engine.fragment import FragmentSpec
from verl_digen.engine.fsdp2 import forwards, gathered_bytes, parameters_of
from verl_digen.engine.ledger import AdvantageLedger
from verl_digen.engine.logical_batch import LogicalBatch, empty_metrics
from verl_digen.engine.loss import DiffusionLoss
from verl_digen.engine.planning import Planner
from verl_digen.engine.policies import PolicyForward
from verl_digen.engine.rows import Fetch, points_of
from verl_digen.engine.teacher import load_teacher
from verl_digen.engine.transaction import GradientTransaction
from verl_digen.engine.verl_batches import VerlBatches
from verl_digen.model_config import MODEL_TYPE

logger = logging.getLogger(__name__)


class DiffusersFSDPEngine(VerlBatches):
    """verl's engine for diffusers transformers, with logical batches that are trained fragment by fragment."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.points = points_of(self.objective, self.digen.seed)
        self._open: LogicalBatch | None = None
        self._loaded = ExitStack()
        """Keeps on the device, while a logical batch is open, what is offloaded between batches."""
        self._stays_loaded = False
        """True between two optimizer steps on the same samples: `_loaded` is not closed."""

    # -- build --------------------------------------------------------------------------------------------
    def initialize(self) -> None:
        """Build module, optimizer and schedule, then the copies of the weights that the loss needs."""
        super().initialize()
        wanted, is_bare = DiffusionLoss(self.digen).wanted, self.model_config.has_bare_reference
        is_frozen = "reference" in wanted and "reference" not in self.copies
        if is_frozen and not is_bare and not self.engine_config.forward_only:
            self.copies.keep("reference")
        teacher = self.digen.loss_settings.taught_by
        if teacher is not None and not self.engine_config.forward_only:
            load_teacher(self.copies, self.module, teacher)
        self.forward = PolicyForward(self.model, self.module, torch.device(get_device_id()), self.copies, is_bare)
        # rows of a batch are counted with the mean length of their prompts, each length once
        self.row_flops = cache(
            partial(row_flops, self.model, self.module, self.digen.sampling, is_frozen=self._is_lora)
        )
        self.planner = Planner(self)

    # -- a logical batch, fragment by fragment ------------------------------------------------------------
    def begin(self, num_samples: int, num_rows: int, fetch: Fetch, *, scale: float | None = None) -> None:
        """Open a logical batch, which is one optimizer step. Offloaded tensors stay on the device until it is closed.

        Args:
            num_samples: most samples it may have. Its gradient is complete when that many have arrived.
            num_rows: planned number of rows; `commit` corrects the gradient if another number trained. 0 if the
                objective selects none of the samples: its gradient is then empty, and `commit` takes no step.
            fetch: loads samples from TransferQueue, on each rank those whose rows it trains, from `accumulate` or, for
                samples held back, from `commit`. Do not clear them before `commit`.
            scale: divisor of centred rewards under `digen.advantage.scale` batch and max_group, where it is known: all
                rewards are there, of these samples and of the other mini-batches'.

        RuntimeError if a logical batch is open, or this one would have no samples.
        """
        self._require_closed("begin")
        if num_samples < 1 or num_rows < 0:
            raise RuntimeError(
                f"a logical batch needs at least one sample, and rows or none, got {num_samples} and {num_rows}; "
                "begin it with the samples that it may have"
            )
        loss = DiffusionLoss(self.digen)
        ledger = AdvantageLedger(
            self.digen.advantage,
            num_samples,
            clip=loss.config.advantage_bound,
            is_homogeneous=self.objective.homogeneous,
            whole_groups=self.objective.joint is not None and self.objective.joint.needs_groups,
            scale=scale,
        )
        if ledger.waits_for_batch and self.rank == 0 and self.state.num_updates == 0:
            logger.warning(
                "digen.loss.name=%s is not proportional to the advantage, so with digen.advantage.scale=%s nothing "
                "trains before the last group is complete; digen.advantage.scale=group trains each group at once",
                self.digen.loss_name,
                self.digen.advantage.scale,
            )
        with ExitStack() as loading:
            if self._stays_loaded:
                loading.push(self._loaded.pop_all())
                self._enter_training()
            else:
                loading.enter_context(self.train_mode(zero_grad_on_exit=False))
            gradients.drop(self.module)
            transaction = GradientTransaction(self, loss, max(1, num_rows))
            self._open = LogicalBatch(ledger, transaction, self.planner, fetch)
            self._loaded, self._stays_loaded = loading.pop_all(), False

    def accumulate(self, fragment: FragmentSpec) -> dict[str, int]:
        """Add the gradient of complete groups, or of a part of one. Its only collectives are in the forwards and
        backwards, and where tiles or recomputed blocks are automatic the ranks' agreement on the longest prompt.

        Returns `num_rows`, trained in this call, over all ranks, and `num_held_samples`, held back because their
        advantages might be clamped, see `verl_digen.engine.ledger`.

        RuntimeError if no logical batch is open, an earlier call on it failed, or part of the fragment was added
        before, in which case the batch stays as it is. After any other exception only `abort` is legal.
        """
        batch = self._require_open("accumulate")
        batch.transaction.require_sound("accumulate")
        batch.add(fragment)
        with batch.transaction.may_fail("accumulate"):
            self._enter_training()
            num_rows = batch.train(fragment)
        return {"num_rows": num_rows, "num_held_samples": len(batch.ledger.held)}

    def commit(self, *, more: bool = False) -> dict[str, Any]:
        """Take one optimizer step and one learning-rate step on the accumulated gradient; close the batch. A batch
        without rows, because the objective selected no sample, takes the learning-rate step alone, and counts in the
        metric `num_empty_updates`. With `more`, another optimizer step on the same samples follows: the learning rate
        stays, and offloaded tensors stay on the device.

        Returns `loss`, this rank's in a list, and `metrics`, name -> `Metric`, the same on all ranks.

        RuntimeError as in `accumulate`, or if no sample came. Then only `abort` is legal.
        """
        batch = self._require_open("commit")
        skipped = self.state.num_skipped
        with batch.transaction.may_fail("commit"):
            self._enter_training()
            finished = batch.finish()
            advantages, trained = batch.ledger.advantages().abs(), batch.trained_advantages()
            if finished is None:
                loss, metrics = torch.zeros((), device=self.forward.device), empty_metrics(self.digen.loss_name)
            else:
                loss, own = finished
                metrics = self._batch_metrics(batch.transaction, own) | self._step_metrics()
            metrics |= {
                "lr": _number(self.learning_rate() if more else self.lr_scheduler_step()),
                "num_skipped_updates": _number(self.state.num_skipped - skipped, "count"),
                "num_empty_updates": _number(finished is None, "count"),
                "num_fragments": _number(len(batch.fragment_ids), "count"),
                "num_late_samples": _number(batch.num_late_samples, "count"),
                "advantage_abs_mean": Metric(advantages.mean()),
                "advantage_abs_max": Metric(advantages.max(), "max"),
                "advantage_num_nonzero": _number((trained != 0).sum()),
                "advantage_effective_samples": _number(effective_samples(trained)),
            }
        self._close(stays_loaded=more)
        return {"model_output": {}, "loss": [loss], "metrics": metrics}

    def _step_metrics(self) -> dict[str, Metric]:
        """Take the optimizer step; returns numbers of its gradient."""
        assert self.optimizer is not None
        settings, sizes = self.optimizer.param_groups[0], None
        if "betas" in settings and isinstance(settings.get("eps"), float):
            sizes = gradients.sizes(self.module)
        norm = self.optimizer_step()
        numbers = {"grad_norm": norm}
        if sizes is not None and math.isfinite(norm):
            clip_factor = min(1.0, self.optimizer_config.clip_grad / max(norm, 1e-30))
            numbers |= gradients.eps_numbers(sizes, eps=settings["eps"], clip_factor=clip_factor)
        return {name: _number(value) for name, value in numbers.items()}

    def abort(self) -> None:
        """Close the logical batch and discard it: weights, optimizer, copies, schedule and counters stay. RuntimeError
        if none is open. If only some ranks raised, the others may hang in a collective; then only a restart helps."""
        self._require_open("abort").transaction.drop()
        self._close()

    @contextmanager
    def assisting(self) -> Iterator[nn.Module]:
        """Context in which the module may run forwards without gradient, for trainer-assisted generation, with the
        weights that replicas have. RuntimeError if an earlier call on the open logical batch failed.

        An open gradient stays bitwise as it is, also if the body raises. All ranks must run the same number of
        forwards. Weights are gathered once where memory allows (`memory.weights_may_stay`), else in every forward.
        """
        if self._open is not None:
            self._open.transaction.require_sound("assisting")
        with self.eval_mode(), torch.no_grad(), self._exported():
            keeps = memory.weights_may_stay(gathered_bytes(parameters_of(self.module)) - self.base.in_place_bytes)
            with forwards(self.module, keeps=keeps):
                yield self.module

    def keep_old(self) -> None:
        """Copy the weights, as policy `old` of the optimizer steps up to the next `commit` without `more`. RuntimeError
        if a logical batch is open."""
        self._require_closed("keep_old")
        self.copies.keep("old")

    @torch.no_grad()
    def evaluate(self, fragments: Sequence[FragmentSpec], fetch: Fetch) -> dict[str, dict[int, float]]:
        """Log-probs of the fragments' rows that this rank would train, under the current weights: sample's key ->
        trained step -> log-prob. Of ranks that share rows the first returns them. RuntimeError if a logical batch is
        open.

        Rows go to the same ranks and tiles as in `accumulate`, so that their first ratio is exactly 1.
        """
        self._require_closed("evaluate")
        found: dict[str, dict[int, float]] = {}
        with self.eval_mode():
            for samples in (fragment.samples for fragment in fragments):
                if not any(sample.num_rows for sample in samples):
                    continue
                work = self.planner.deal(samples, torch.zeros(len(samples)), fetch)
                with closing(work.samples):
                    tiles = map(work.rows_of, work.tiles)
                    evaluated = [self.forward(rows.to(self.forward.device)).log_prob for rows in tiles]
                for tile, log_probs in zip(work.tiles, evaluated, strict=True):
                    if tile.is_filler:  # its row is in another tile, too
                        continue
                    for row, log_prob in zip(tile.rows, log_probs.tolist(), strict=True):
                        found.setdefault(samples[row.sample].key, {})[row.point] = log_prob
        return found if self.is_mp_src_rank_with_outputs() else {}

    def _close(self, *, stays_loaded: bool = False) -> None:
        self._open = None
        self.optimizer_zero_grad()
        self._stays_loaded = stays_loaded
        if not stays_loaded:
            self.copies.drop("old")
            self._loaded.close()

    def _enter_training(self) -> None:
        """Return to train mode: `assisting` may have run in between."""
        self.mode = "train"
        self.module.train()

    def _require_open(self, what: str) -> LogicalBatch:
        if self._open is None:
            raise RuntimeError(f"{what} needs an open logical batch, got none; call begin first")
        return self._open

    def _require_closed(self, what: str) -> None:
        if self._open is not None:
            raise RuntimeError(f"{what} needs the logical batch before it closed, but one is open; commit or abort it")

    # -- verl's methods that offload, or must not touch an open gradient ------------------------------------
    def train_mode(self, **kwargs: Any) -> AbstractContextManager[None]:
        """verl's `train_mode`. RuntimeError while a logical batch is open, whose gradient would be zeroed."""
        self._require_closed("training")
        return super().train_mode(**kwargs)

    def eval_mode(self, **kwargs: Any) -> AbstractContextManager[None]:
        """verl's `eval_mode`; an open logical batch stays on the device."""
        if self._open is not None:
            kwargs["disable_auto_offload"] = True
        return super().eval_mode(**kwargs)

    def train_batch(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """verl's `train_batch`. RuntimeError while a logical batch is open, whose gradient would be zeroed."""
        self._require_closed("train_batch")
        return super().train_batch(*args, **kwargs)

    def forward_backward_batch(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """verl's `forward_backward_batch`, see `VerlBatches`. RuntimeError while a logical batch is open."""
        self._require_closed("train_batch or infer_batch")
        return super().forward_backward_batch(*args, **kwargs)

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """verl's `save_checkpoint`. RuntimeError while a logical batch is open."""
        self._require_closed("save_checkpoint")
        super().save_checkpoint(*args, **kwargs)

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """verl's `load_checkpoint`. RuntimeError while a logical batch is open."""
        self._require_closed("load_checkpoint")
        super().load_checkpoint(*args, **kwargs)

    # -- metrics --------------------------------------------------------------------------------------------
    def _batch_metrics(self, transaction: GradientTransaction, own: dict[str, Metric]) -> dict[str, Metric]:
        """Metrics of all ranks, of which this one has its `own`, and of the gradient before the step."""
        combined = self._of_all_ranks(own)
        prompt_tokens = combined.pop("num_prompt_tokens").value.item() / transaction.num_trained_rows
        text, padding = (combined.pop(name).value.item() for name in ("num_text_tokens", "num_padding_tokens"))
        return combined | {
            "num_rows": _number(transaction.num_trained_rows, "count"),
            "num_tiles": _number(transaction.num_tiles, "count"),
            "prompt_tokens": _number(prompt_tokens),
            "text_padding_share": _number(padding / text if text else 0.0),
            "recomputed_share": _number(transaction.recomputed_shares / transaction.num_tiles),
            "grad_projection": _number(gradients.projection(self.module)),
            **({} if self.state.loss_scale is None else {"loss_scale": _number(self.state.loss_scale.value, "min")}),
            **{name: _number(value) for name, value in self.row_flops(round(prompt_tokens)).items()},
        }


def _number(value: float | Tensor, reduce: Reduce = "mean") -> Metric:
    return Metric(torch.tensor(float(value), dtype=torch.float64), reduce)


# Not a decorator: verl's erases the class's type.
EngineRegistry.register(model_type=MODEL_TYPE, backend="fsdp2", device=["cuda", "npu", "cpu"])(DiffusersFSDPEngine)

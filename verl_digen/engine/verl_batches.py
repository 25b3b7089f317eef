# SPDX-License-Identifier: Apache-2.0
"""verl's `train_batch`, `infer_batch` and `forward_step` on rows that the caller has split over the ranks.

    engine.train_batch(rows, None)      zero the gradient -> forward_backward_batch -> optimizer step
    engine.lr_scheduler_step()          after the last optimizer step on a batch
    engine.infer_batch(rows)            log-probs and means, no gradient

`rows` is a TensorDict of batch size [N], whose columns have the names and meanings of the fields of `TrainingRows`,
`Transitions` and `Noised`:

| column | shape | rows |
| --- | --- | --- |
| `latents` | [N, ...] what the network reads | all |
| `sigmas`, `advantages` | [N] fp32 | all |
| `mask` | [N] fp32: 1 trains, 0 is padding | all |
| `rewards` | [N] fp32, if an objective reads them | all |
| `conditions`, `negative_conditions` | list of N `Condition`; negative ones with guidance only | all |
| `sampling` | list of N `Sampling` | all |
| `next_latents` | [N, ...] | path points |
| `next_sigmas`, `sigma_max`, `log_probs` | [N] fp32 | path points |
| `old_log_probs` | [N] fp32, before the first of several optimizer steps | path points, if given |
| `clean`, `noise` | [N, ...] fp32 | forward points |

Lists are a `NonTensorStack` of one object per row, so that verl's `tensordict_utils`, `chunk`, `to` and `torch.cat`
keep rows whole. Further columns are allowed, for a caller's loss function. Keys beside the columns:
`micro_batch_size_per_gpu`, the most rows of a tile (None or absent: all rows of this rank), and for `infer_batch` the
`policy` that is evaluated (`verl_digen.engine.policies`; absent: `current`).

- A rank's rows are its own: nothing is exchanged but their kinds (network and sampling). Ranks run the same number of
  tiles of each kind; a rank with fewer repeats a row, with mask 0.
- The loss is the mean over the unmasked rows of all ranks. Where several optimizer steps take the same rows, they need
  the column `old_log_probs`, from `infer_batch` before the first.
- verl's `loss_function(model_output=, data=, dp_group=) -> (loss, metrics)` sees `data["batch_num_tokens"]`, the
  unmasked rows of all ranks, and `data["dp_size"]`: a mean is `sum / batch_num_tokens * dp_size`, as in verl.
- `use_dynamic_bsz` has no effect: a row has no token budget.

Invariants (tests/engine/test_verl_batches.py): rows that were packed, split, joined and unpacked are the same. Loss,
gradient and weights after `train_batch` equal those after `begin`, `accumulate`, `commit` on the same rows; log-probs
of `infer_batch` equal `evaluate`'s.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import MISSING, fields
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu
from verl.utils.py_functional import append_to_dict

from verl_digen.algorithms.rows import Metric, combine_tiles, numbers
from verl_digen.engine import gradients, memory
from verl_digen.engine.copies import CURRENT
from verl_digen.engine.fsdp2 import recover
from verl_digen.engine.loss import DiffusionLoss, tile_loss
from verl_digen.engine.policies import PolicyForward, moved
from verl_digen.engine.recompute import ALL
from verl_digen.engine.rows import Points, text_order
from verl_digen.engine.sharded import ShardedTransformer
from verl_digen.schedulers.tiles import Budget, Row, Tile, plan_tiles
from verl_digen.types import SCHEDULE_COLUMNS, Noised, TrainingRows, Transitions

logger = logging.getLogger(__name__)

LossFunction = Callable[..., tuple[Tensor, dict[str, Any]]]
"""verl's contract of a loss: keywords `model_output`, `data` and `dp_group` -> (loss [], metrics)."""

_NAMES = {"log_prob": "log_probs", "mean": "latent_sample_means"}
"""Outputs of a policy that verl's RFC names otherwise."""


def pack_rows(rows: TrainingRows) -> TensorDict:
    """The rows as a TensorDict; it shares their tensors."""
    parts = {**vars(rows), **vars(rows.point), "sampling": [rows.sampling] * len(rows)}
    columns = {name: value for name, value in parts.items() if isinstance(value, Tensor)}
    lists = {name: list(parts[name]) for name in ("conditions", "negative_conditions", "sampling") if parts[name]}
    return tu.get_tensordict(columns | lists)


def unpack_rows(batch: TensorDict) -> TrainingRows:
    """The rows of a TensorDict, with the schedule on the host. ValueError if a column is missing, or the rows have
    several samplings."""
    kind = Noised if "clean" in batch else Transitions
    columns = _columns(batch, TrainingRows, besides=("point",))
    samplings = {*columns["sampling"]}
    if len(samplings) != 1:
        raise ValueError(f"rows of one micro-batch must have one sampling, got {samplings}; split the batch by them")
    columns["sampling"] = samplings.pop()
    return TrainingRows(**columns, point=kind(**_columns(batch, kind)))


def _columns(batch: TensorDict, kind: type, besides: tuple[str, ...] = ()) -> dict[str, Any]:
    """Columns of the fields of `kind` that the batch has."""
    wanted = [field for field in fields(kind) if field.name not in besides]
    missing = [field.name for field in wanted if field.name not in batch and field.default is MISSING]
    if missing:
        raise ValueError(
            f"a batch of rows needs the columns {', '.join(missing)} for {kind.__name__}, got "
            f"{', '.join(map(str, batch.keys()))}; see verl_digen.engine.verl_batches"
        )
    found = {field.name: tu.get(batch, field.name) for field in wanted if field.name in batch}
    return {name: value.cpu() if name in SCHEDULE_COLUMNS else value for name, value in found.items()}


def own_objective(**unused: Any) -> tuple[Tensor, dict[str, Any]]:
    """Stand-in for `digen.loss` and `digen.kl` where verl wants a loss function; the engine computes them itself, and a
    call of it is a RuntimeError."""
    raise RuntimeError("own_objective names the run's loss to DiffusersFSDPEngine, it computes none; pass it on")


class VerlBatches(ShardedTransformer):
    """The engine's methods with verl's names for a batch, on rows that the caller has split."""

    forward: PolicyForward
    points: Points
    """Kind of points that the run's objective trains."""
    _reduce: str | None = None
    """Choice made for `digen.tsp.reduce=auto`."""

    def forward_backward_batch(
        self, data: TensorDict, loss_function: LossFunction | None, forward_only: bool = False
    ) -> dict[str, Any]:
        """Forward of this rank's rows, and backward unless `forward_only`; the gradient is then in the module, reduced
        over the ranks. Collective. An exception discards the gradient. `loss_function`: see `forward_step`.

        Returns:
            `model_output`: name -> [N, ...] on the CPU, in the order of the rows; empty after a backward. `loss`: one
                per tile; the mean over the ranks of their sum is the batch's. `metrics`: name -> list of each tile's;
                of the run's own objective, the batch's number alone.

        ValueError if the rows cannot be trained together, or not without their groups.
        """
        unpack_rows(tu.index_select_tensor_dict(data, [0]))  # columns are checked before the first collective
        tiles = self._tiles(data)
        num_rows = self.sum_over_ranks(data["mask"].sum().to(self.forward.device)).item()
        if not num_rows:
            raise ValueError("a batch needs a row with mask 1 on some rank, got none; leave it out")
        tu.assign_non_tensor(data, batch_num_tokens=num_rows, dp_size=self.get_data_parallel_size())
        if self.recomputation.fixed is None:
            self.recomputation.num_blocks = ALL  # nothing was measured for tiles of this size
        outputs: list[dict[str, Any]] = []
        try:
            for number, tile in enumerate(tiles):
                reduces = number == len(tiles) - 1 or self.when_to_reduce() == "tile"
                with gradients.reduced_at_end(self.module, reduces):
                    loss, output = self.forward_step(_rows_of(data, tile), loss_function, forward_only)
                    if not forward_only:
                        self.backward(loss * self.ulysses_sequence_parallel_size, False)
                kept = moved(output["model_output"], "cpu") if forward_only and not tile.is_filler else {}
                outputs.append(output | {"model_output": kept})
            if not forward_only:
                gradients.reduce_pending(self.module)
        except BaseException:
            recover(self.module)
            gradients.drop(self.module)
            raise
        if not forward_only and self.state.loss_scale is not None:
            gradients.rescale(self.module, 1 / self.state.loss_scale.value)
        metrics = [output["metrics"] for output in outputs]
        if _is_own(loss_function, forward_only):
            metrics = [numbers(self._of_all_ranks(combine_tiles(metrics)))]
        appended: dict[str, list[Any]] = {}
        for of_tile in metrics:
            append_to_dict(appended, of_tile)
        return {
            "model_output": _in_order([output["model_output"] for output in outputs], tiles),
            "loss": [output["loss"] for output in outputs],
            "metrics": appended,
        }

    def forward_step(
        self, micro_batch: TensorDict, loss_function: LossFunction | None, forward_only: bool
    ) -> tuple[Tensor, dict[str, Any]]:
        """Forward of one tile, differentiable unless `forward_only`. Without `batch_num_tokens` and `dp_size`, which
        `forward_backward_batch` assigns, the tile is the whole batch. `loss_function` is verl's, or `own_objective`;
        None: the run's own objective, or with `forward_only` no loss.

        Returns:
            (loss [], 0 without one; `model_output`, `loss`, `metrics`). `model_output` of path points is `log_probs`
            [N], `latent_sample_means` [N, ...] of the SDE step, its `std` [N] and `velocity` [N, ...]; of forward
            points `velocity`. Metrics of the own objective are `Metric`s, shares of the batch's.

        ValueError if columns are missing, the policy has no weights here, a loss was asked of another one than
        `current`, or the own objective needs whole groups.
        """
        rows, policy = unpack_rows(micro_batch).to(self.forward.device), tu.get(micro_batch, "policy", CURRENT)
        is_own = _is_own(loss_function, forward_only)
        if policy != CURRENT and (is_own or loss_function is not None):
            raise ValueError(f"only policy={CURRENT} has a loss, got policy={policy}; set compute_loss=False")
        loss, metrics = torch.zeros((), device=self.forward.device), {}
        with torch.no_grad() if forward_only else nullcontext():
            if is_own:
                num_rows = tu.get(micro_batch, "batch_num_tokens", rows.mask.sum().clamp(min=1).item())
                tensors, loss, metrics = self._own_loss(rows, num_rows)
                loss = loss * tu.get(micro_batch, "dp_size", 1)
            else:
                tensors = self._under(policy, rows)
            model_output = {_NAMES.get(name, name): value for name, value in tensors.items()}
            if loss_function is not None and not is_own:
                data, group = micro_batch.to(self.forward.device), self.get_data_parallel_group()
                loss, metrics = loss_function(model_output=model_output, data=data, dp_group=group)
        detached = {name: value.detach() for name, value in model_output.items()}
        return loss, {"model_output": detached, "loss": loss.detach(), "metrics": metrics}

    def _own_loss(self, rows: TrainingRows, num_rows: float) -> tuple[dict[str, Tensor], Tensor, Mapping[str, Metric]]:
        """(outputs, share of the loss, metrics) of the run's objective."""
        loss = DiffusionLoss(self.digen)
        if loss.joint is not None:
            raise ValueError(
                f"digen.loss.name={self.digen.loss_name} reads whole groups, which rows in a TensorDict do not name; "
                "train it with begin, accumulate and commit"
            )
        others = next(self.forward.others(loss.wanted, [lambda: rows]))
        current, terms = tile_loss(self.forward, loss, rows, others, num_rows)
        return current.tensors(), terms.total, terms.metrics

    def _under(self, policy: str, rows: TrainingRows) -> Mapping[str, Tensor]:
        """Outputs of a policy."""
        if policy == CURRENT or (policy == "old" and policy not in self.copies):
            return self.forward(rows).tensors()
        if policy not in self.copies and not (policy == "reference" and self.model_config.has_bare_reference):
            there = ", ".join((CURRENT, *self.copies))
            raise ValueError(f"policy={policy} has no weights; digen.loss and digen.kl decide which have, here {there}")
        names = ("velocity", "log_prob", "mean", "std") if isinstance(rows.point, Transitions) else ("velocity",)
        return next(self.forward.others({policy: names}, [lambda: rows]))[policy]

    def _tiles(self, data: TensorDict) -> list[Tile]:
        """Tiles of this rank's rows; `Row.sample` is the number of a row."""
        experts = self.model.expert_of(data["sigmas"].cpu()).tolist()
        kinds = list(zip(experts, tu.get(data, "sampling"), strict=True))
        group, hands = self.get_data_parallel_group(), [kinds] * self.get_data_parallel_size()
        dist.all_gather_object(hands, kinds, group=group)
        buckets = {kind: number for number, kind in enumerate(dict.fromkeys(kind for hand in hands for kind in hand))}
        if any({*hand} != buckets.keys() for hand in hands):
            raise ValueError(
                f"every rank needs rows of every network and sampling, got {[len({*hand}) for hand in hands]} of "
                f"{len(buckets)} kinds per rank; distribute each kind over all ranks"
            )
        negatives = tu.get(data, "negative_conditions", [None] * len(data))
        pairs = list(zip(tu.get(data, "conditions"), negatives, strict=True))

        size = tu.get(data, "micro_batch_size_per_gpu") or max(map(len, hands))
        return plan_tiles(
            [[Row(number, 0, buckets[kind]) for number, kind in enumerate(hand)] for hand in hands],
            self.get_data_parallel_rank(),
            Budget(size),
            order=lambda row: text_order(self.model, pairs[row.sample]),
            agreed_most=memory.most_of_ranks if self.model.keeps_lengths_apart else None,
        )

    def lr_scheduler_step(self) -> Any:
        """verl's `lr_scheduler_step`, which ends a batch: copies that follow batches follow, and `old` of `keep_old` is
        deleted. Returns the learning rate."""
        self.copies.follow_batch(self.state.num_updates)
        self.copies.drop("old")
        return super().lr_scheduler_step()

    def _of_all_ranks(self, metrics: Mapping[str, Metric]) -> dict[str, Metric]:
        """This rank's metrics combined with the others'. Collective."""
        gathered: list[dict[str, Metric]] = [{}] * self.get_data_parallel_size()
        on_host = {name: Metric(metric.value.cpu(), metric.reduce) for name, metric in metrics.items()}
        dist.all_gather_object(gathered, on_host, group=self.get_data_parallel_group())
        return combine_tiles(gathered)

    def sum_over_ranks(self, values: Tensor) -> Tensor:
        """Sum of a tensor over the data-parallel ranks, in its place. Collective."""
        dist.all_reduce(values, group=self.get_data_parallel_group())
        return values

    def when_to_reduce(self) -> str:
        """Value of `digen.tsp.reduce`; auto is decided once, the same on all ranks."""
        if self.digen.tsp.reduce != "auto":
            return self.digen.tsp.reduce
        if self._reduce is None:
            waiting = gradients.unreduced_bytes(self.module)
            free = memory.agreed_free_bytes()
            self._reduce = "batch" if self._is_lora or memory.gradients_may_wait(waiting, free) else "tile"
            logger.info("gradients are reduced at every %s (%.1f GB unreduced)", self._reduce, waiting / 1e9)
        return self._reduce


def _is_own(loss_function: LossFunction | None, forward_only: bool) -> bool:
    """True where the loss is the run's objective."""
    return loss_function is own_objective or (loss_function is None and not forward_only)


def _rows_of(data: TensorDict, tile: Tile) -> TensorDict:
    """The rows of a tile; in a padding tile they have mask 0."""
    rows = tu.index_select_tensor_dict(data, [row.sample for row in tile.rows])
    if tile.is_filler:
        rows["mask"] = torch.zeros_like(rows["mask"])
    return rows


def _in_order(outputs: Sequence[Mapping[str, Tensor]], tiles: Sequence[Tile]) -> dict[str, Tensor]:
    """Outputs of tiles, [N, ...] in the order of the rows; padding tiles' are empty."""
    places = torch.tensor([row.sample for tile in tiles if not tile.is_filler for row in tile.rows]).argsort()
    kept = [output for output in outputs if output]
    return {name: torch.cat([output[name] for output in kept])[places] for name in (kept[0] if kept else ())}

# SPDX-License-Identifier: Apache-2.0
"""verl's FSDP2 engine for a diffusers transformer.

What is ours: how the module is built, what a micro-batch is (a tile of rows), KL reference, EMA, export.
What is verl's: sharding, mixed precision, optimizer, schedule, offload, clipping, file names of checkpoints.

    forward_backward_batch(data)
      samples -> rows -> tiles, as many on every rank
      [reference] frozen copy swapped in once, all tiles without gradient
      per tile:  score (one forward) [reference: adapter off, no gradient] -> loss -> backward
                 gradients are reduced over ranks after the last tile only
      metrics combined over tiles and ranks

FSDP2 averages gradients over ranks and a loss is a share of the logical batch's mean; so each tile's loss is
multiplied by the number of ranks before backward.

Invariants (tests/engine)
- The gradient is that of the serial loop over timesteps, whatever `digen.rows_per_tile`, the number of ranks,
  and how the samples lie on them.
- The ratio of an update's own first pass is exactly 1.
- A step with a gradient that is not finite changes neither weights nor EMA, and is counted.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from peft import PeftModel, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from tensordict import TensorDict
from torch import Tensor, nn
from verl.trainer.config import CheckpointConfig
from verl.utils.device import get_device_id, get_device_name
from verl.utils.torch_dtypes import PrecisionType
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

from verl_digen.algorithms.ema import ema_decay, ema_update_
from verl_digen.algorithms.sde import SdeStep
from verl_digen.config import require
from verl_digen.engine.checkpoint import DiffusersCheckpointManager, UpdateState
from verl_digen.engine.export import NamedTensors, adapter_config, adapter_weights, full_weights
from verl_digen.engine.loss import DiffusionLoss, Reference, combine_metrics
from verl_digen.engine.model_config import MODEL_TYPE, DiffusionModelConfig
from verl_digen.engine.rows import Samples, Tile, make_rows, num_tiles, read_samples, split_tiles
from verl_digen.engine.shadow import ShadowWeights, local_shards
from verl_digen.models import load_model
from verl_digen.rollout.sampler import score_rows
from verl_digen.types import Geometry, Rows

logger = logging.getLogger(__name__)


def check_engine_config(config: FSDPEngineConfig) -> None:
    """Raise ValueError for settings of `actor_rollout_ref.actor` that this engine does not do."""
    require(
        config.strategy == "fsdp2",
        "actor_rollout_ref.actor.strategy must be fsdp2 for diffusion models",
        config.strategy,
        "set it to fsdp2",
    )
    require(
        config.ulysses_sequence_parallel_size == 1,
        "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size must be 1 for diffusion models",
        config.ulysses_sequence_parallel_size,
        "set it to 1; rows are spread over the ranks anyway",
    )
    require(
        not config.qat.enable,
        "actor_rollout_ref.actor.fsdp_config.qat.enable must be false for diffusion models",
        config.qat.enable,
        "set it to false",
    )


class DiffusersFSDPEngine(FSDPEngine):
    """See the module. Constructor and methods are verl's.

    Raises:
        ValueError: settings that this engine does not do, named by their keys.
    """

    module: nn.Module
    model_config: DiffusionModelConfig  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(
        self,
        model_config: DiffusionModelConfig,
        engine_config: FSDPEngineConfig,
        optimizer_config: FSDPOptimizerConfig,
        checkpoint_config: CheckpointConfig,
    ):
        check_engine_config(engine_config)
        super().__init__(model_config, engine_config, optimizer_config, checkpoint_config)  # pyright: ignore
        self.digen = model_config.digen
        self.model = load_model(model_config.local_path)
        self.state = UpdateState()
        self.reference: ShadowWeights | None = None
        """The start weights, for the KL term of a full fine-tune; LoRA's reference is the adapter switched off."""
        self.wire_dtype: torch.dtype | None = None
        """dtype of exported floating tensors; None keeps each parameter's own."""
        self.exports_average = False
        """Whether exports are of the EMA by default, for validation with averaged weights."""

    # -- build --------------------------------------------------------------------------------------------
    def initialize(self) -> None:
        """Build module, optimizer and schedule, then the copies: EMA, frozen reference."""
        super().initialize()
        self.model.compute_dtype = self._autocast_dtype
        copies_on = "cpu" if self.engine_config.param_offload else None
        if not self.engine_config.forward_only:
            if self.digen.ema.enable:
                self.state.ema = ShadowWeights(self.module, copies_on)
            if self.digen.kl.coef > 0 and not self._is_lora:
                self.reference = ShadowWeights(self.module, copies_on)
        self.checkpoint_manager = DiffusersCheckpointManager(
            model=self.module,
            optimizer=self.optimizer,
            lr_scheduler=self.lr_scheduler,
            checkpoint_config=self.checkpoint_config,
            update_state=self.state,
        )

    def _build_module(self) -> nn.Module:
        """The transformer; real on rank 0, from which verl's `fsdp2_load_full_state_dict` broadcasts, else meta."""
        dtype = PrecisionType.to_dtype(self.engine_config.model_dtype)
        module = self.model.load_transformer(dtype, meta=self.rank != 0)
        if self.model_config.enable_gradient_checkpointing:
            module.enable_gradient_checkpointing()  # pyright: ignore[reportCallIssue] - of diffusers' ModelMixin
        return module

    def _build_lora_module(self, module: nn.Module) -> nn.Module:
        """Wrap with peft.

        verl's own asks for a transformers model, and rounds the adapter to the base's dtype. The adapter stays fp32
        here: an update of 3e-4 is lost on bf16 weights.
        """
        config = self.model_config.lora_config()
        if self.model_config.lora_adapter_path is not None and self.rank == 0:
            return PeftModel.from_pretrained(
                module,  # type: ignore[arg-type]
                self.model_config.lora_adapter_path,
                is_trainable=True,
            )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.digen.seed)
            return get_peft_model(module, config)  # type: ignore[arg-type]

    def _build_fsdp_module(self, module: nn.Module) -> nn.Module:
        if not (self.engine_config.forward_only and get_device_name() == "cpu"):
            return super()._build_fsdp_module(module)
        # verl offloads a forward-only engine through pinned memory, which needs an accelerator
        self.engine_config.forward_only = False
        try:
            return super()._build_fsdp_module(module)
        finally:
            self.engine_config.forward_only = True

    # -- forward and backward -----------------------------------------------------------------------------
    def forward_backward_batch(
        self, data: TensorDict, loss_function: Callable[..., Any] | None, forward_only: bool = False
    ) -> dict[str, Any]:
        """Run all rows of `data` (see `read_samples`) and leave the logical batch's gradient, unless `forward_only`.

        Args:
            loss_function: a `DiffusionLoss`; not read when `forward_only`.

        Returns:
            verl's shape: `loss`, one per tile, whose sum averaged over ranks is the batch's loss; `metrics`,
            floats that are the same on all ranks; `model_output`, with `log_probs` [B, K] (jagged if K
            differs; 0 for padding samples) when `forward_only`.
        """
        samples = read_samples(data)
        if forward_only:
            return {"model_output": {"log_probs": self._log_probs(samples)}, "loss": [], "metrics": {}}
        assert isinstance(loss_function, DiffusionLoss)
        samples = samples.take(samples.trained)
        rows = make_rows(samples)
        tiles, num_rows = self._plan_tiles(rows, self._old_log_probs(samples, rows))
        if num_rows == 0:
            raise RuntimeError("a training batch needs at least one sample with loss_mask 1; skip the update instead")
        references: Sequence[Reference | None] = [None] * len(tiles)
        if self.reference is not None:
            references = self._score_reference(tiles)

        losses, metrics = [], []
        dp_size = self.get_data_parallel_size()
        for index, (tile, reference) in enumerate(zip(tiles, references, strict=True)):
            rows = self._to_device(tile.rows)
            if self._is_lora and self.digen.kl.coef > 0:
                with torch.no_grad(), self.disable_adapter():
                    reference = _as_reference(self._score(rows))
            elif reference is not None:
                reference = reference.to(rows.mask.device)
            old = None if tile.old_log_probs is None else tile.old_log_probs.to(rows.mask.device)
            with self._gradient_sync_context(is_last_micro_batch=index == len(tiles) - 1):
                step, velocity = self._score(rows)
                output = loss_function(step, velocity, reference, rows, old, num_rows)
                loss = output.loss * dp_size
                if self.scaler is not None:
                    self.scaler.scale(loss).backward()
                else:
                    loss.backward()
            losses.append(loss.detach())
            metrics.append(output.metrics)
        counts = {"num_rows": float(num_rows), "num_tiles": float(len(tiles))}
        return {
            "model_output": {},
            "loss": losses,
            "metrics": self._reduce(combine_metrics(metrics)) | counts,
        }

    def _plan_tiles(self, rows: Rows, old_log_probs: Tensor | None) -> tuple[list[Tile], int]:
        """This rank's tiles, as many as on every other rank, and the unmasked rows of all ranks."""
        group, device = self.get_data_parallel_group(), get_device_id()
        count = torch.tensor(num_tiles(len(rows), self.digen.rows_per_tile), device=device)
        dist.all_reduce(count, op=dist.ReduceOp.MAX, group=group)
        num_rows = rows.mask.sum().to(device)
        dist.all_reduce(num_rows, op=dist.ReduceOp.SUM, group=group)
        return split_tiles(rows, old_log_probs, self.digen.rows_per_tile, int(count)), int(num_rows)

    def _old_log_probs(self, samples: Samples, rows: Rows) -> Tensor | None:
        """[N] what the ratio is taken against, or None for the forward's own; see `verl_digen.engine.loss`."""
        if self.digen.old_log_probs == "rollout":
            return rows.log_probs
        if samples.old_log_probs is not None:
            return torch.cat(list(samples.old_log_probs))
        if self.digen.old_log_probs == "recompute":
            raise RuntimeError(
                "digen.old_log_probs=recompute needs the column old_log_probs in the batch; "
                "compute it before the update"
            )
        return None

    def _score(self, rows: Rows) -> tuple[SdeStep, Tensor]:
        sampling = self.digen.sampling
        return score_rows(
            self.model,
            self.module,
            rows,
            law=self.digen.sde.law,
            noise_level=self.digen.sde.noise_level,
            guidance_scale=sampling.guidance_scale,
            geometry=Geometry(sampling.height_px, sampling.width_px, sampling.num_frames),
        )

    def _to_device(self, rows: Rows) -> Rows:
        return rows.to(torch.device(get_device_id()))

    @torch.no_grad()
    def _score_reference(self, tiles: Sequence[Tile]) -> list[Reference]:
        """All tiles under the frozen start weights, which are swapped in once; results wait on the host."""
        assert self.reference is not None
        with self.reference.swapped_in(self.module):
            return [_as_reference(self._score(self._to_device(tile.rows))).to("cpu") for tile in tiles]

    @torch.no_grad()
    def _log_probs(self, samples: Samples) -> Tensor:
        """In the tiles that training would use, so that both give the same numbers."""
        trained = samples.take(samples.trained)
        rows = make_rows(trained)
        tiles, _ = self._plan_tiles(rows, None)
        scored = [self._score(self._to_device(tile.rows))[0].log_prob.cpu() for tile in tiles]
        found = dict(zip(samples.trained, torch.cat(scored)[: len(rows)].split(trained.num_steps), strict=True))
        per_sample = [found.get(index, torch.zeros(count)) for index, count in enumerate(samples.num_steps)]
        if len(set(samples.num_steps)) == 1:
            return torch.stack(per_sample)
        return torch.nested.as_nested_tensor(per_sample, layout=torch.jagged)

    def _reduce(self, metrics: dict[str, Tensor]) -> dict[str, float]:
        """Combine metrics of all ranks, by the rule of `combine_metrics`."""
        gathered: list[dict[str, Tensor]] = [{}] * self.get_data_parallel_size()
        on_host = {name: value.cpu() for name, value in metrics.items()}
        dist.all_gather_object(gathered, on_host, group=self.get_data_parallel_group())
        return {name: value.item() for name, value in combine_metrics(gathered).items()}

    @contextmanager
    def disable_adapter(self) -> Iterator[None]:
        """Forwards without the adapter.

        peft's own context also switches `requires_grad`. With `reshard_after_forward=false` it finds the shards on
        the way in and the gathered parameters on the way out, and the adapter never trains again.
        """
        layers = [layer for layer in self.module.modules() if isinstance(layer, BaseTunerLayer)]
        for layer in layers:
            layer._disable_adapters = True
        try:
            yield
        finally:
            for layer in layers:
                layer._disable_adapters = False

    # -- update -------------------------------------------------------------------------------------------
    def train_batch(self, data: TensorDict, loss_function: Callable[..., Any]) -> dict[str, Any]:
        """One optimizer step on all of `data`: zero the gradient, `forward_backward_batch`, `optimizer_step`."""
        skipped = self.state.num_skipped
        outputs = super().train_batch(data, loss_function)
        outputs["metrics"]["num_skipped_updates"] = float(self.state.num_skipped - skipped)
        return outputs

    def optimizer_step(self) -> float:
        """Clip, step, update the EMA; nothing of it if the gradient is not finite. Returns its norm before clipping."""
        grad_norm = super().optimizer_step()
        if not math.isfinite(grad_norm):
            self.state.num_skipped += 1
            logger.warning(
                "optimizer step skipped: its gradient norm is %s (%d skipped so far); "
                "if this goes on, lower actor_rollout_ref.actor.optim.lr",
                grad_norm,
                self.state.num_skipped,
            )
            return grad_norm
        ema, config, k = self.state.ema, self.digen.ema, self.state.num_updates
        if ema is not None and (k + 1) % config.every_steps == 0:
            weights = local_shards(self.module)
            ema_update_(ema.shards.values(), weights.values(), ema_decay(k, config.max_decay))
        self.state.num_updates += 1
        return grad_norm

    # -- export -------------------------------------------------------------------------------------------
    def get_per_tensor_param(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, layered_summon: bool = False, base_sync_done: bool = True, *, ema: bool = False, **kwargs: Any
    ) -> tuple[NamedTensors, dict[str, Any] | None]:
        """What a replica needs: (name, full tensor) in `wire_dtype`, to be consumed by all ranks in step.

        Full weights, or with LoRA the merged ones (`model.lora.merge=true`), come under the checkpoint's names and
        without a peft config; an adapter alone under peft's names and with its config.

        Args:
            base_sync_done: False yields the base weights where updates carry the adapter alone.
            ema: the averaged weights, also without `exports_average`; nothing may train until all is consumed.
        """
        exported, config = self._export(base_sync_done)
        return (self._averaged(exported) if ema or self.exports_average else exported), config

    def _export(self, base_sync_done: bool) -> tuple[NamedTensors, dict[str, Any] | None]:
        if not self._is_lora or self.model_config.merges_lora:
            return full_weights(self.module, merge_lora=self._is_lora, dtype=self.wire_dtype), None
        assert isinstance(self.module, PeftModel)
        if base_sync_done:
            return adapter_weights(self.module, self.wire_dtype), adapter_config(self.module)
        return full_weights(self.module, merge_lora=False, dtype=self.wire_dtype), adapter_config(self.module)

    def _averaged(self, exported: NamedTensors) -> NamedTensors:
        require(
            self.state.ema is not None,
            "digen.ema.enable must be true to export averaged weights",
            False,
            "set it to true",
        )
        assert self.state.ema is not None
        with self.state.ema.swapped_in(self.module):
            yield from exported


def _as_reference(scored: tuple[SdeStep, Tensor]) -> Reference:
    step, velocity = scored
    return Reference(step.mean, velocity)


# Not a decorator: verl's erases the class's type. "fsdp" is filed too, because `check_engine_config` names the key,
# where verl would say "Unknown backend: fsdp".
EngineRegistry.register(model_type=MODEL_TYPE, backend=["fsdp", "fsdp2"], device=["cuda", "npu", "cpu"])(
    DiffusersFSDPEngine
)

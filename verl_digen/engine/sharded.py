# SPDX-License-Identifier: Apache-2.0
"""verl's FSDP2 engine around a diffusers transformer: how it is built, updated, averaged, saved and exported.

Ours: the module, copies of its weights, steps whose gradient is not finite, export.
verl's: sharding, mixed precision, optimizer, schedule, offload, clipping, file names of checkpoints.

Invariant (tests/engine): a step with a gradient that is not finite changes neither weights nor copies, and is counted.
"""

from __future__ import annotations

import logging
import math
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from verl.trainer.config import CheckpointConfig
from verl.utils.device import get_device_name
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig
from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

from verl_digen.algorithms.objectives import Objective, find_objective
from verl_digen.config import EmaConfig
from verl_digen.engine.build import add_adapter, build_transformer, check_engine_config, keep_input_dtypes
from verl_digen.engine.checkpoint import DiffusersCheckpointManager, UpdateState
from verl_digen.engine.copies import AVERAGE, CURRENT, PolicyCopies
from verl_digen.engine.export import NamedTensors, export
from verl_digen.engine.policies import without_adapter
from verl_digen.engine.shadow import ShadowWeights
from verl_digen.model_config import DiffusionModelConfig
from verl_digen.models import load_model
from verl_digen.require import require

logger = logging.getLogger(__name__)


class ShardedTransformer(FSDPEngine):
    """See the module. Constructor and methods are verl's.

    Raises:
        ValueError: settings that this engine does not support, named by their keys.
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
        self.wire_dtype: torch.dtype | None = None
        """dtype of exported floating tensors; None keeps each parameter's own."""
        self.exports: str = self.objective.behaviour
        """Policy that `get_per_tensor_param` exports, by name."""

    @property
    def objective(self) -> Objective:
        """The run's objective."""
        return find_objective(self.digen.loss_name)

    # -- build --------------------------------------------------------------------------------------------
    def initialize(self) -> None:
        """Build module, optimizer and schedule, then the copies of the weights that follow."""
        super().initialize()
        self.model.compute_dtype = self._autocast_dtype
        trains = not self.engine_config.forward_only
        self.copies = PolicyCopies(
            self.module,
            self._copy_weights,
            self.digen.ema if trains else EmaConfig(),
            self.digen.loss_settings.copies if trains else {},
        )
        self.checkpoint_manager = DiffusersCheckpointManager(
            model=self.module,
            optimizer=self.optimizer,
            lr_scheduler=self.lr_scheduler,
            checkpoint_config=self.checkpoint_config,
            update_state=self.state,
            copies=self.copies,
        )

    def _copy_weights(self) -> ShadowWeights:
        """Copy of the trainable shards as they are now; offloaded where the weights are."""
        return ShadowWeights(self.module, "cpu" if self.engine_config.param_offload else None)

    def _build_module(self) -> nn.Module:
        return build_transformer(self.model, self.model_config, self.engine_config, self.rank)

    def _build_lora_module(self, module: nn.Module) -> nn.Module:
        return add_adapter(module, self.model_config, self.rank)

    def _build_fsdp_module(self, module: nn.Module) -> nn.Module:
        sharded = self._shard(module)
        keep_input_dtypes(sharded)
        return sharded

    def _shard(self, module: nn.Module) -> nn.Module:
        if not (self.engine_config.forward_only and get_device_name() == "cpu"):
            return super()._build_fsdp_module(module)
        # verl offloads a forward-only engine through pinned memory, which needs an accelerator
        self.engine_config.forward_only = False
        try:
            return super()._build_fsdp_module(module)
        finally:
            self.engine_config.forward_only = True

    # -- update -------------------------------------------------------------------------------------------
    def optimizer_step(self) -> float:
        """Clip, step and update the average, unless the gradient is not finite. Returns its norm before clipping."""
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
        self.copies.follow_step(self.state.num_updates)
        self.state.num_updates += 1
        return grad_norm

    def backward(self, loss: Tensor, retain_graph: bool) -> None:
        """Run the backward of `loss`, with fp16's loss scale if there is one."""
        scaled = loss if self.scaler is None else self.scaler.scale(loss)
        assert isinstance(scaled, Tensor)
        scaled.backward(retain_graph=retain_graph)

    def loss_scale(self) -> float:
        """Loss scale of fp16 training; the gradient is divided by it in the optimizer step."""
        return 1.0 if self.scaler is None else self.scaler.get_scale()

    def learning_rate(self) -> float:
        """Learning rate of the last optimizer step."""
        assert self.optimizer is not None
        return self.optimizer.param_groups[0]["lr"]

    def disable_adapter(self) -> AbstractContextManager[None]:
        """Context in which forwards skip the adapter; see `without_adapter`."""
        return without_adapter(self.module)

    # -- export -------------------------------------------------------------------------------------------
    def get_per_tensor_param(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, layered_summon: bool = False, base_sync_done: bool = True, *, policy: str | None = None, **kwargs: Any
    ) -> tuple[NamedTensors, dict[str, Any] | None]:
        """Tensors for a replica: (name, full tensor) in `wire_dtype`, to be consumed by all ranks in step.

        Full weights, or with LoRA the merged ones (`model.lora.merge=true`), come under the checkpoint's names and
        without a peft config; an adapter alone under peft's names and with its config.

        Args:
            base_sync_done: False yields the base weights if updates carry the adapter alone.
            policy: name of the policy, in place of `exports`; do not train until all is consumed.

        Raises:
            ValueError: the run keeps no such copy.
        """
        policy = policy or self.exports
        require(
            policy != AVERAGE or policy in self.copies,
            "digen.ema.enable must be true to export averaged weights",
            False,
            "set it to true",
        )
        exported, config = export(
            self.module,
            self.wire_dtype,
            merge_lora=self._is_lora and self.model_config.merges_lora,
            base_sync_done=base_sync_done,
        )
        return (exported if policy == CURRENT else self._of_copy(policy, exported)), config

    def _of_copy(self, policy: str, exported: NamedTensors) -> NamedTensors:
        with self.copies[policy].swapped_in(self.module):
            yield from exported

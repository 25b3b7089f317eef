# SPDX-License-Identifier: Apache-2.0
"""verl's FSDP2 engine around a diffusers transformer.

Ours: the module, copies of its weights, steps whose gradient is not finite, the loss scale of fp16, export. verl's:
sharding, mixed precision, optimizer, schedule, offload, clipping, file names of checkpoints.

Invariant (tests/engine): a step with a gradient that is not finite changes neither weights nor copies, and is counted.
"""

import logging
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from verl.base_config import BaseConfig
from verl.plugin.platform import get_platform
from verl.trainer.config import CheckpointConfig
from verl.utils.device import get_device_name
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig
from verl.workers.config.optimizer import build_optimizer
from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

from verl_digen.algorithms.objectives import Objective, find_objective
from verl_digen.config import EmaConfig
from verl_digen.engine.build import add_adapter, build_transformer, keep_input_dtypes
from verl_digen.engine.checkpoint import DiffusersCheckpointManager, UpdateState
from verl_digen.engine.copies import CURRENT, PolicyCopies
from verl_digen.engine.export import NamedTensors, export
from verl_digen.engine.gradients import exempt_unused
from verl_digen.engine.offload import offload_safely
from verl_digen.engine.optimizer import LossScale, with_fused
from verl_digen.engine.policies import without_adapter
from verl_digen.engine.recompute import Recomputation
from verl_digen.engine.whole_base import WholeBase
from verl_digen.model_config import DiffusionModelConfig
from verl_digen.models import load_model
from verl_digen.models.kernels import compute_exactly
from verl_digen.models.sequence import MESH_DIMS, split_networks

logger = logging.getLogger(__name__)


class ShardedTransformer(FSDPEngine):
    """verl's constructor and methods."""

    module: nn.Module
    model_config: DiffusionModelConfig  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(
        self,
        model_config: DiffusionModelConfig,
        engine_config: FSDPEngineConfig,
        optimizer_config: FSDPOptimizerConfig,
        checkpoint_config: CheckpointConfig,
    ):
        # verl splits packed text only; a diffusion row has no padding to remove, see `sequence_mesh`
        is_split = engine_config.ulysses_sequence_parallel_size > 1
        with _set_to(model_config, "use_remove_padding", is_split):
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
        compute_exactly(self._autocast_dtype)
        self.recomputation = Recomputation(
            self.module, self.model_config.recomputed, offloads=self.model_config.enable_activation_offload
        )
        trains = not self.engine_config.forward_only
        if trains and self._autocast_dtype == torch.float16:
            self.state.loss_scale = LossScale()
        self.copies = PolicyCopies(
            self.module,
            self.digen.ema if trains else EmaConfig(),
            self.digen.loss_settings.copies if trains else {},
            device="cpu" if self.engine_config.param_offload else None,
        )
        self.base = WholeBase(self.module, self.model_config.whole_base if trains and self._is_lora else False)
        self.checkpoint_manager = DiffusersCheckpointManager(
            model=self.module,
            optimizer=self.optimizer,
            lr_scheduler=self.lr_scheduler,
            checkpoint_config=self.checkpoint_config,
            update_state=self.state,
            copies=self.copies,
        )

    def _build_module(self) -> nn.Module:
        return build_transformer(self.model, self.model_config, self.engine_config, self.rank)

    def _build_lora_module(self, module: nn.Module) -> nn.Module:
        return add_adapter(module, self.model_config, self.rank)

    def _build_fsdp_module(self, module: nn.Module) -> nn.Module:
        if self.use_ulysses_sp:
            split_networks(self.model, module, sequence_mesh(self.ulysses_sequence_parallel_size))
        with ExitStack() as changes:
            # ours is there already, see `verl_digen.engine.recompute`
            changes.enter_context(_set_to(self.model_config, "enable_activation_offload", False))
            if get_device_name() == "cpu":
                # verl offloads a forward-only engine through pinned memory, which needs an accelerator
                changes.enter_context(_set_to(self.engine_config, "forward_only", False))
            sharded = super()._build_fsdp_module(module)
        self.scaler = None  # verl's, for fp16; see `verl_digen.engine.optimizer`
        keep_input_dtypes(sharded)
        offload_safely(sharded, keeps_base=self._is_lora)
        return sharded

    def _build_optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        config = replace(self.optimizer_config, betas=(*map(float, self.optimizer_config.betas),))  # PyTorch takes no 0
        return build_optimizer(module.parameters(), with_fused(config, module.parameters()))

    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        """verl's `to`; the host may read what was offloaded when it returns."""
        super().to(device=device, model=model, optimizer=optimizer, grad=grad)
        if device == "cpu" and (model or optimizer):
            get_platform().synchronize()

    # -- update -------------------------------------------------------------------------------------------
    def optimizer_step(self) -> float:
        """Clip, step and update the average, unless the gradient is not finite. Returns its norm before clipping."""
        grad_norm, scale = super().optimizer_step(), self.state.loss_scale
        is_finite = math.isfinite(grad_norm)
        if scale is not None:
            scale.update(is_finite=is_finite)
        if not is_finite:
            self.state.num_skipped += 1
            if scale is not None:
                logger.info(
                    "optimizer step skipped: the gradient overflowed fp16 (%d skipped so far); the loss scale is now "
                    "%g",
                    self.state.num_skipped,
                    scale.value,
                )
                return grad_norm
            logger.warning(
                "optimizer step skipped: its gradient norm is %s (%d skipped so far); "
                "if this goes on, lower actor_rollout_ref.actor.optim.lr; if it is so from the first step on, look at "
                "what digen.loss.name=%s returns where actor/policy_loss is not finite either, and else try another "
                "attention kernel, whose backward may be at fault: `digen doctor --gpu --only architectures`",
                *(grad_norm, self.state.num_skipped, self.digen.loss_name),
            )
            return grad_norm
        self.copies.follow_step(self.state.num_updates)
        self.state.num_updates += 1
        return grad_norm

    def backward(self, loss: Tensor, retain_graph: bool) -> None:
        """Run the backward of `loss`, with fp16's loss scale if there is one."""
        scaled = loss if self.state.loss_scale is None else loss * self.state.loss_scale.value
        exempt_unused(self.module)
        scaled.backward(retain_graph=retain_graph)

    def learning_rate(self) -> float:
        """Learning rate of the last optimizer step."""
        assert self.optimizer is not None
        return self.optimizer.param_groups[0]["lr"]

    def disable_adapter(self) -> AbstractContextManager[None]:
        """Context in which forwards skip the adapter; see `without_adapter`."""
        return without_adapter(self.module)

    # -- export -------------------------------------------------------------------------------------------
    def get_per_tensor_param(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, layered_summon: bool = False, base_sync_done: bool = True, **kwargs: Any
    ) -> tuple[NamedTensors, dict[str, Any] | None]:
        """Tensors of policy `exports` for a replica: (name, full tensor) in `wire_dtype`. All ranks consume all of
        them, in step, before they train.

        Full weights, or with LoRA the merged ones (`model.lora.merge=true`), come under the checkpoint's names and
        without a peft config; an adapter alone under peft's names and with its config. `base_sync_done=False` yields
        the base weights if updates carry the adapter alone.
        """
        tensors, config = export(
            self.module,
            self.wire_dtype,
            merge_lora=self._is_lora and self.model_config.merges_lora,
            base_sync_done=base_sync_done,
        )
        return self._of_exported(tensors), config

    def _of_exported(self, tensors: NamedTensors) -> NamedTensors:
        with self._exported():
            yield from tensors

    def _exported(self) -> AbstractContextManager[None]:
        """Context in which the module has the weights of the policy that generates, `exports`."""
        return nullcontext() if self.exports == CURRENT else self.copies[self.exports].swapped_in(self.module)


@contextmanager
def _set_to(config: BaseConfig, field: str, value: bool) -> Iterator[None]:
    """Context in which a config's field has another value."""
    own = config[field]
    setattr(config, field, value)
    try:
        yield
    finally:
        setattr(config, field, own)


def sequence_mesh(size: int) -> DeviceMesh:
    """This rank's group of `size` consecutive ranks, which share rows, as diffusers wants it. Collective.

        rank = data-parallel number x size + sequence-parallel number        weights are sharded over all ranks

    - Rows are dealt to data-parallel groups. All ranks of a group fetch the same rows, run the same tiles, have the
      same velocities and the same loss, each with the gradient that comes through its own tokens.
    - FSDP2 averages gradients over all ranks, where the sum over a group is a row's gradient. So a loss is multiplied
      by the number of all ranks (`GradientTransaction`).
    - What describes rows (log-probs, metrics, generated samples) is returned by the first rank of each group.
    - What must be equal on all ranks (rows per tile, when gradients are reduced) is agreed among all of them, because
      gathering the weights is a collective of all.
    """
    num_groups = dist.get_world_size() // size
    return init_device_mesh(get_device_name(), (num_groups, 1, size), mesh_dim_names=("dp", *MESH_DIMS))[MESH_DIMS]

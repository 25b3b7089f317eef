# SPDX-License-Identifier: Apache-2.0
"""The module to train, before sharding: the transformer and its adapter, and the FLOPs of its rows."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from peft import PeftModel, get_peft_model, set_peft_model_state_dict
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from verl.utils.torch_dtypes import PrecisionType
from verl.workers.config import FSDPEngineConfig

from verl_digen.config import SamplingConfig
from verl_digen.engine.export import plain_name
from verl_digen.engine.fsdp2 import parameters_of, units_of
from verl_digen.model_config import DiffusionModelConfig
from verl_digen.models.base import DiffusionModel
from verl_digen.models.checkpoint import in_one_dtype, kept_in_fp32, networks_of
from verl_digen.models.flops import forward_flops
from verl_digen.models.kernels import set_kernels, store_int8
from verl_digen.sampling.requests import planned_geometry


def build_transformer(
    model: DiffusionModel, model_config: DiffusionModelConfig, engine_config: FSDPEngineConfig, rank: int
) -> nn.Module:
    """The transformer: real on rank 0, from which verl's `fsdp2_load_full_state_dict` broadcasts, meta elsewhere.

    Some networks keep a few parameters in fp32 when they are loaded in another dtype (Wan: norms, time embedding).
    FSDP2 trains the parameters of a unit in one dtype, so without an adapter all have `model_dtype`; a replica of the
    `diffusers` back end casts them then, too.
    """
    dtype = PrecisionType.to_dtype(engine_config.model_dtype)
    module = model.load_transformer(dtype, meta=rank != 0)
    for network in networks_of(module):
        network.register_forward_hook(_return_no_views)
    digen = model_config.digen
    set_kernels(model, module, side="trainer", attention=digen.attention_backend, compiles=digen.compile)
    if model_config.lora_rank == 0:
        in_one_dtype(module, dtype)
    if model_config.int8_base:
        store_int8(module)
    return module


def _return_no_views(network: nn.Module, inputs: Any, output: Any) -> Any:
    """Forward hook that copies outputs that are views, such as a last linear layer's or reshape's.

    FSDP2 gathers the weights for backward in a hook on the output, which an in-place operation on a view would drop. A
    copy is of the size of the latents.
    """
    if isinstance(output, list | tuple):
        return type(output)(_return_no_views(network, inputs, each) for each in output)
    is_view = torch.is_grad_enabled() and isinstance(output, Tensor) and output._is_view()
    return output.clone() if is_view else output


def add_adapter(module: nn.Module, model_config: DiffusionModelConfig, rank: int) -> nn.Module:
    """Wrap `module` with peft: the given adapter, else a new one, the same on every rank.

    verl's own builder needs a transformers model, and rounds the adapter to the base's dtype. The adapter stays fp32
    here: an update of 3e-4 is lost on bf16 weights.
    """
    from verl_digen.models.fused_layers import fuse_adapter  # diffusers, which the driver does without

    config, path = model_config.lora_config(), model_config.lora_adapter_path
    adapted: Any
    if path is not None and model_config.lora_file is None and rank == 0:
        adapted = PeftModel.from_pretrained(module, path, is_trainable=True, config=config)  # type: ignore[arg-type]
    else:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(model_config.digen.seed)
            adapted = get_peft_model(module, config)  # type: ignore[arg-type]
        if model_config.lora_file is not None and rank == 0:
            set_peft_model_state_dict(adapted, model_config.read_lora_file().tensors)
    fuse_adapter(adapted)
    return adapted  # type: ignore[no-any-return]


def keep_input_dtypes(module: nn.Module) -> None:
    """Make FSDP2 cast parameters only, not module inputs.

    verl casts both. A cast timestep is another timestep: in bf16 it moved the velocity of tiny Stable Diffusion 3.5
    and Z-Image networks by 0.1 of a standard deviation, against 0.004 without, and a replica does not cast it. Inputs
    come in the network's compute dtype (`DiffusionModel.input_dtype`), except those it wants in another.
    """
    for unit in units_of(module):
        unit._mp_policy = replace(unit._mp_policy, cast_forward_inputs=False)


def keep_fp32(module: nn.Module, architecture: str) -> None:
    """Make FSDP2 gather in fp32 the frozen parameters that diffusers keeps in fp32; before the first forward.

    Wan's network computes its time embedding and modulation with them, and a `diffusers` replica does, too. FSDP2 casts
    all parameters of a unit alike: in bf16 the velocity of a tiny Wan moves by 0.7 %. Trained ones stay as they are,
    because the gradients of a unit must have one dtype.
    """
    names = {parameter: plain_name(name) for name, parameter in module.named_parameters()}
    for parameter in parameters_of(module):
        sharded = parameter.sharded_param
        if not sharded.requires_grad and sharded.dtype == torch.float32 and kept_in_fp32(names[sharded], architecture):
            parameter.init_dtype_attrs = partial(_in_own_dtype, parameter.init_dtype_attrs)


def _in_own_dtype(initialise: Callable[[MixedPrecisionPolicy], None], policy: MixedPrecisionPolicy) -> None:
    initialise(replace(policy, param_dtype=None))


def row_flops(
    model: DiffusionModel, module: nn.Module, sampling: SamplingConfig, num_tokens: int, *, is_frozen: bool
) -> dict[str, float]:
    """`row_forward_flops` and `row_training_flops`, the FLOPs of a trained row with a prompt of `num_tokens` tokens:
    counted from the engine's own layers, never measured.

    - Useful work only: a forward and a backward. Recomputation and forwards of other policies are left out, so that a
      setting that adds work does not look like speed.
    - A row has as many images as every prompt of the model has (`ModelSpec.num_images`), at the size that
      `digen.sampling` asks for.

    Invariant (tests/engine/test_build.py): the forward counted is the checkpoint's network's, whatever wraps it.
    """
    geometry, is_guided = planned_geometry(sampling, model.spec.num_images[0]), sampling.true_cfg_scale != 1.0
    flops = forward_flops(model, module, geometry, num_tokens, is_guided=is_guided)
    training = flops.training(is_frozen=is_frozen, recomputed=0.0)
    return {"row_forward_flops": flops.forward, "row_training_flops": training}

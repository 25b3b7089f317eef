# SPDX-License-Identifier: Apache-2.0
"""Kernels of a loaded network: attention by diffusers' dispatcher, PyTorch's RMS norm, repeated blocks compiled one by
one, exact fp32, and frozen weights in int8 under an adapter.

- Only a block's forward is compiled. Hooks around it (FSDP2), recomputation in backward and the loop over blocks stay
  as they are; names of parameters, too. Compiled code reads parameters at each call, so weights may change in place, be
  swapped, or leave the device between two calls.
- Parameters that a loss does not depend on (the last block's text stream) get a gradient of zeros from compiled code,
  and none without it: an optimizer with weight decay then shrinks them, without effect on the network's output.
- Compiled code rounds to half precision where uncompiled code does. Fused code by itself leaves roundings out, others
  with gradients than without, so that the log-probs of a sample would be others in training than in sampling. In bf16
  forwards are bitwise the same with and without gradients (tests/models/test_kernels.py).
- Blocks of one class share their compiled variants: one per combination of batch size 1 or more, mask or none, gradient
  or none, adapter or none. A dimension that has changed once (batch, text length) is compiled as variable.
"""

import logging
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from verl.utils.device import get_device_name

from verl_digen.hardware.attention import ATTENTION_BACKENDS, NATIVE
from verl_digen.models.base import DiffusionModel
from verl_digen.models.checkpoint import networks_of
from verl_digen.patches import attention_gradient

logger = logging.getLogger(__name__)

COMPILER = "inductor"
"""torch.compile's back end."""
MAX_VARIANTS = 64
"""Compiled variants of a block. PyTorch's default of 8 is less than both guidance branches, tiles of one row and of
more, the reference without adapter, and evaluation need together. PyTorch warns when it is reached, and runs further
variants uncompiled."""


def set_kernels(model: DiffusionModel, network: nn.Module, *, side: str, attention: str, compiles: bool) -> None:
    """Choose the kernels of `network`, fresh from `model.load_transformer`, before any wrapper (FSDP2, peft). `side`:
    "trainer" or "replica", for the log. `attention`: a name of `verl_digen.hardware.attention`. RuntimeError of
    diffusers if the kernel's package is missing or too old."""
    from diffusers.models.attention_dispatch import attention_backend
    from diffusers.utils.constants import DIFFUSERS_ATTN_BACKEND

    from verl_digen.models.fused_layers import fuse_norms

    attention_gradient.apply()
    model.takes_masks = ATTENTION_BACKENDS[attention].takes_masks
    networks = networks_of(network)
    if get_device_name() != "cpu":  # whose norms are chains of operations in PyTorch, too
        fuse_norms(network)
    for each in networks:
        if (attention, DIFFUSERS_ATTN_BACKEND) != (NATIVE, NATIVE):  # diffusers' own default else, without a warning
            with attention_backend(NATIVE):  # it also sets all other networks' of the process: undone
                each.set_attention_backend(attention)
    num_blocks = sum(map(_compile_blocks, networks)) if compiles else 0
    logger.info(
        "%s: attention backend %s%s; %s",
        side,
        attention,
        ", texts of one length in each forward" if model.keeps_lengths_apart else "",
        f"{num_blocks} blocks compiled, at most {MAX_VARIANTS} variants each" if compiles else "blocks not compiled",
    )


def compute_exactly(dtype: torch.dtype) -> None:
    """Make this process compute in fp32 without TF32, which rounds factors to 10 bits, if the network computes in fp32.
    PyTorch allows cuDNN's convolutions TF32 by default; NVIDIA's containers allow it matrix products, too."""
    if dtype != torch.float32:
        return
    torch.backends.cudnn.allow_tf32 = False
    if torch.get_float32_matmul_precision() != "highest":
        torch.set_float32_matmul_precision("highest")


def repeated_blocks(network: Any) -> list[nn.Module]:
    """The blocks that repeat: those that diffusers names for compilation, else those it keeps whole on a device (Stable
    Diffusion 3.5)."""
    names = frozenset(getattr(network, "_repeated_blocks", None) or network._no_split_modules)
    return [module for module in network.modules() if type(module).__name__ in names]


def repeated_linears(module: nn.Module) -> list[nn.Linear]:
    """Linear layers of the blocks that repeat, in all networks of `module`, each once."""
    blocks = (block for network in networks_of(module) for block in repeated_blocks(network))
    layers = (layer for block in blocks for layer in block.modules() if type(layer) is nn.Linear)
    return list(dict.fromkeys(layers))


def _compile_blocks(network: nn.Module) -> int:
    """Compile the forward of each repeated block -> their number."""
    from torch._dynamo import config as dynamo
    from torch._functorch import config as functorch
    from torch._inductor import config as inductor

    dynamo.recompile_limit = max(dynamo.recompile_limit, MAX_VARIANTS)
    # a tile's terms with and without advantages have two backwards of one graph (`engine/transaction.py`)
    functorch.donated_buffer = False
    inductor.emulate_precision_casts = True
    blocks = repeated_blocks(network)
    for block in blocks:
        block.forward = torch.compile(block.forward, backend=COMPILER)
    return len(blocks)


LARGEST_INT8 = 127
SMALLEST_CHANNEL = 1e-12
"""Least largest number of a channel: channels of zeros have a scale, too."""


def store_int8(module: nn.Module) -> None:
    """Turn the linear layers of the blocks that repeat, in all networks of `module`, on any device, into `Int8Linear`,
    one after the other (`actor_rollout_ref.model.int8_base`): one byte a parameter in place of two.

    - A weight [out, in] is int8 x one scale per output channel: its largest number / 127, rounded to bf16.
    - A layer multiplies its weight out in forward and again in backward, for which autograd keeps the int8 alone.
    - int8 and scales are buffers: FSDP2 neither shards nor gathers them, verl sends rank 0's to the other ranks, and no
      checkpoint holds them. Adapters are saved for the checkpoint's own weights.
    """
    for layer in repeated_linears(module):
        quantise(layer)


def quantise(layer: nn.Linear) -> None:
    """Turn one layer into `Int8Linear`."""
    number, scale = _quantised(layer.weight.detach())
    del layer.weight
    layer.register_buffer("weight", number, persistent=False)
    layer.register_buffer("scale", scale, persistent=False)
    layer.__class__ = Int8Linear


def _quantised(weight: Tensor) -> tuple[Tensor, Tensor]:
    if weight.is_meta:  # a plan makes hundreds: there is nothing to calculate
        return torch.empty_like(weight, dtype=torch.int8), weight.new_empty(len(weight), 1, dtype=torch.bfloat16)
    weight = weight.float()
    scale = (weight.abs().amax(1, keepdim=True).clamp_min(SMALLEST_CHANNEL) / LARGEST_INT8).to(torch.bfloat16)
    return (weight / scale).round().clamp(-LARGEST_INT8, LARGEST_INT8).to(torch.int8), scale


class Int8Linear(nn.Linear):
    """A linear layer whose frozen weight is int8 [out, in] x `scale` [out, 1]; made by `store_int8`."""

    scale: Tensor

    def forward(self, input: Tensor) -> Tensor:
        return _Product.apply(input, self.weight, self.scale, self.bias)  # type: ignore[no-any-return]


class _Product(torch.autograd.Function):
    """`F.linear` with a weight that is multiplied out in forward and in backward, and kept in between as int8."""

    @staticmethod
    def forward(rows: Tensor, number: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(rows, number * scale.to(rows.dtype), bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.number, ctx.scale, _ = inputs  # no saved tensors, which hooks would count or move to the host

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        return gradient @ (ctx.number * ctx.scale.to(gradient.dtype)), None, None, None

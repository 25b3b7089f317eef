# SPDX-License-Identifier: Apache-2.0
"""fp8 copies of a network's linear layers, for forwards whose result need not be exact (`digen.sampling.outside.fp8`).

- Weights are kept beside the network as e4m3 with a scale per output channel, activations get a scale per token: a
  sample's numbers do not depend on the others of its batch, to float error. The product is bf16.
- The layers are the `nn.Linear` of the blocks that repeat. What is outside of them (input, output, time and text
  embeddings) stays exact, and so do adapters: an adapter's own factors are added to the fp8 product of its layer.

Invariants (tests/sampling/test_fp8.py): after `active` the network computes bitwise what it did before, also after an
exception. A layer's product equals its dequantised factors', to bf16's rounding.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.functional import ScalingType, scaled_mm

from verl_digen.models.kernels import repeated_linears
from verl_digen.require import refusing, require

logger = logging.getLogger(__name__)

DTYPE = torch.float8_e4m3fn
LARGEST = torch.finfo(DTYPE).max
SMALLEST = 1e-12
"""Least largest number of a row whose scale is taken from it: rows of zeros have a scale too."""
MULTIPLE = 16
"""Both sizes of a layer must be a multiple of it: kernels read 16 bytes at a time."""


class Fp8Layers:
    """Layers of a network fresh from `DiffusionModel.load_transformer`, before an adapter is added, and their copies,
    which are made at the first use after `clear`, from the current weights."""

    def __init__(self, network: nn.Module):
        self.layers = [
            layer
            for layer in repeated_linears(network)
            if layer.in_features % MULTIPLE == layer.out_features % MULTIPLE == 0
        ]
        """Layers that multiply in fp8."""
        self._copies: list[tuple[Tensor, Tensor]] = []

    @property
    def num_bytes(self) -> int:
        """Bytes of all copies, once they are made; scales left out."""
        return sum(layer.weight.numel() for layer in self.layers)

    def clear(self) -> None:
        """Free the copies; the next use makes new ones. Call it when weights change, or leave the device."""
        self._copies = []

    @contextmanager
    def active(self) -> Iterator[None]:
        """Context in which the layers multiply in fp8. Not for a forward with gradients."""
        if not self._copies:
            self._copies = [_quantised(layer.weight.detach()) for layer in self.layers]
        try:
            for layer, (weight, scale) in zip(self.layers, self._copies, strict=True):
                vars(layer)["forward"] = _forward(layer, weight, scale)
            yield
        finally:
            for layer in self.layers:
                vars(layer).pop("forward", None)  # the class's own is found again


def require_fp8(layers: Fp8Layers, device: torch.device) -> None:
    """Require layers that can multiply in fp8, and multiply two small matrices in fp8 on `device`. ValueError if there
    is no such layer, or the device cannot."""
    rule = "digen.sampling.outside.fp8 must be false"
    small = f"{rule} with a network whose blocks have no linear layer with sizes that are multiples of {MULTIPLE}"
    require(bool(layers.layers), small, True, "set it to false")
    ones = torch.ones(MULTIPLE, MULTIPLE, device=device)
    lacks = f"{rule} on this device ({device.type}), where PyTorch multiplies no fp8 matrices with a scale per row"
    with refusing(lacks, True, "set it to false, or generate on devices with fp8, such as H100"):
        _product(ones, *_quantised(ones))
    logger.info(
        "outside the window %d linear layers multiply in fp8; copies of %.2f GB",
        len(layers.layers),
        layers.num_bytes / 1e9,
    )


def _forward(layer: nn.Linear, weight: Tensor, scale: Tensor) -> Callable[[Tensor], Tensor]:
    def forward(input: Tensor) -> Tensor:
        product = _product(input.reshape(-1, layer.in_features), weight, scale).to(input.dtype)
        if layer.bias is not None:
            product = product + layer.bias
        return product.reshape(*input.shape[:-1], layer.out_features)

    return forward


def _quantised(rows: Tensor) -> tuple[Tensor, Tensor]:
    """[N, K] -> e4m3 [N, K] and its scale [N, 1] fp32: rows = e4m3 x scale, up to rounding."""
    exact = rows.float()
    scale = exact.abs().amax(dim=1, keepdim=True).clamp(min=SMALLEST) / LARGEST
    return (exact / scale).clamp(-LARGEST, LARGEST).to(DTYPE), scale


def _product(rows: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    """[N, K] times the transpose of the quantised weight [M, K] -> bf16 [N, M]."""
    own, scale = _quantised(rows)
    per_row = ScalingType.RowWise
    return scaled_mm(own, weight.t(), scale, per_row, weight_scale.t(), per_row, output_dtype=torch.bfloat16)

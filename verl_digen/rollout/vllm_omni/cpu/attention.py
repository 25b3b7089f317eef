# SPDX-License-Identifier: Apache-2.0
"""PyTorch's attention for vLLM-Omni on the CPU; vLLM-Omni's own dispatch supports only accelerators."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm_omni.diffusion.attention.backends.sdpa import SDPABackend, SDPAImpl


class CpuSDPAImpl(SDPAImpl):
    def forward(self, query: Tensor, key: Tensor, value: Tensor, attn_metadata: Any = None) -> Tensor:
        return self._forward_impl(query, key, value, attn_metadata, mask_mode="broadcast_k")


class CpuSDPABackend(SDPABackend):
    @staticmethod
    def get_impl_cls() -> type[CpuSDPAImpl]:
        return CpuSDPAImpl

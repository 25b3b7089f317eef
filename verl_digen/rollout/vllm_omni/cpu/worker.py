# SPDX-License-Identifier: Apache-2.0
"""vLLM-Omni's diffusion worker, model runner and attention on the CPU."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from vllm_omni.diffusion.attention.backends.sdpa import SDPABackend, SDPAImpl
from vllm_omni.diffusion.attention.layer import Attention
from vllm_omni.diffusion.worker.diffusion_model_runner import DiffusionModelRunner
from vllm_omni.diffusion.worker.diffusion_worker import DiffusionWorker

from verl_digen.patches import vllm_cpu_activations, vllm_cpu_linear


class CpuDiffusionModelRunner(DiffusionModelRunner):
    def load_model(self, *args: Any, **kwargs: Any) -> None:
        vllm_cpu_activations.apply()
        vllm_cpu_linear.apply()
        super().load_model(*args, **kwargs)
        if isinstance(self.pipeline, nn.Module):
            for module in self.pipeline.modules():
                if isinstance(module, Attention):  # float32 always uses this fallback, not the platform's backend
                    module.sdpa_fallback = module.attention


class CpuDiffusionWorker(DiffusionWorker):
    """CPU worker. Sleeps by dropping the parameters' tensors, where vLLM-Omni unmaps device memory; a reference to them
    stays. This frees nothing, but a module that is used while it sleeps fails as on an accelerator."""

    def __init__(self, *args: Any, **kwargs: Any):
        self._aside: dict[str, Tensor] = {}
        super().__init__(*args, **kwargs)

    def sleep(self, level: int = 1) -> int:
        pipeline = self.model_runner.pipeline
        assert isinstance(pipeline, nn.Module)
        if self._aside:
            return 0
        for name, parameter in pipeline.named_parameters():
            self._aside[name] = parameter.data
            parameter.data = torch.empty(0, dtype=parameter.dtype)
        return sum(tensor.nbytes for tensor in self._aside.values())

    def wake_up(self, tags: list[str] | None = None) -> bool:
        pipeline = self.model_runner.pipeline
        assert isinstance(pipeline, nn.Module)
        for name, parameter in pipeline.named_parameters():
            if name in self._aside:
                parameter.data = self._aside.pop(name)
        return True

    def _maybe_get_memory_pool_context(self, tag: str) -> AbstractContextManager[Any]:
        return nullcontext()  # sleep mode's memory pool is for device memory


class CpuSDPAImpl(SDPAImpl):
    """PyTorch's attention; vLLM-Omni's own dispatch supports only accelerators."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attn_metadata: Any = None) -> Tensor:
        return self._forward_impl(query, key, value, attn_metadata, mask_mode="broadcast_k")


class CpuSDPABackend(SDPABackend):
    @staticmethod
    def get_impl_cls() -> type[CpuSDPAImpl]:
        return CpuSDPAImpl

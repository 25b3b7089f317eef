# SPDX-License-Identifier: Apache-2.0
"""Let a vLLM that was built for accelerators run its linear layers in bf16 on a CPU with AMX.

Limitation:  on a CPU with AMX, linear layers in bf16 pack their weights with an operator of vLLM's CPU build, without a
             look whether it is there (fp16 and int8, too). The published wheel has no operators for a CPU.
Effect:      without this, a replica in bf16 does not start there: "'_OpNamespace' '_C' object has no attribute
             'convert_weight_packed'". CPUs without AMX use PyTorch's own linear layer, as all do with this.
Affects:     vllm >=0.28,<0.31
Remove when: a linear layer looks whether the operator is there; tests/vllm_omni/test_patches.py::
             test_a_linear_layer_packs_weights_with_an_operator_that_may_be_missing fails then.
"""

from __future__ import annotations

import torch
from packaging.specifiers import SpecifierSet

from verl_digen.patches import is_for

VERSIONS = SpecifierSet(">=0.28,<0.31")
OPERATOR = "convert_weight_packed"


def apply() -> None:
    """Replace vLLM's `check_cpu_sgl_kernel` where the operator is missing; RuntimeError if it has other parameters."""
    if hasattr(torch.ops._C, OPERATOR) or not is_for(__name__, "vllm", VERSIONS):
        return
    from vllm.model_executor.layers import utils

    names = utils.check_cpu_sgl_kernel.__code__.co_varnames[: utils.check_cpu_sgl_kernel.__code__.co_argcount]
    if names != ("n", "k", "dtype"):
        raise RuntimeError(f"{__name__} was made for check_cpu_sgl_kernel(n, k, dtype), and vLLM has {names}")
    utils.check_cpu_sgl_kernel = _is_never


def _is_never(n: int, k: int, dtype: torch.dtype) -> bool:
    """False: no layer has weights packed by the missing operator."""
    return False

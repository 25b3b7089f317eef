# SPDX-License-Identifier: Apache-2.0
"""Let a vLLM that was built for accelerators construct its activation modules on a CPU.

Limitation:  an activation's constructor looks up its compiled operator, even on a CPU, where it computes in PyTorch
             and never calls it. The published wheel of vLLM has no operators for a CPU.
Effect:      without this, FLUX.1 (whose T5 has gelu_new) and Z-Image (silu_and_mul) cannot be served on a CPU.
Affects:     vllm >=0.28,<0.31
Remove when: an activation that computes in PyTorch needs no operator; tests/vllm_omni/test_patches.py::
             test_an_activation_looks_up_an_operator_that_a_cpu_does_not_call fails then.
"""

from __future__ import annotations

import torch
from packaging.specifiers import SpecifierSet

from verl_digen.patches import is_for

VERSIONS = SpecifierSet(">=0.28,<0.31")
OPERATORS = ("gelu_new", "silu_and_mul")

_library: torch.library.Library | None = None
"""Owner of the declarations, which last as long as this object."""


def apply() -> None:
    """Declare the missing operators without an implementation: calling one is an error."""
    global _library
    missing = [name for name in OPERATORS if not hasattr(torch.ops._C, name)]
    if not missing or not is_for(__name__, "vllm", VERSIONS):
        return
    _library = torch.library.Library("_C", "FRAGMENT")
    for name in missing:
        _library.define(f"{name}(Tensor! out, Tensor input) -> ()")

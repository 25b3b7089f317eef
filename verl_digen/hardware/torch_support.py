# SPDX-License-Identifier: Apache-2.0
"""Abilities of this PyTorch: an accelerator, FSDP2. Light: reads PyTorch and the installed packages, no device."""

from importlib.metadata import entry_points
from importlib.util import find_spec

import torch
from packaging.version import Version

BACKEND_PACKAGES = (
    "torch_npu",
    "torch_musa",
    "torch_mlu",
    "torch_gcu",
    "torch_xla",
    "torch_neuronx",
    "habana_frameworks",
    "intel_extension_for_pytorch",
)
"""Packages that add an accelerator to a CPU build of PyTorch, besides those with a `torch.backends` entry point."""


FSDP2_HAS_SEVERAL_GROUPS = Version(torch.__version__) >= Version("2.12")
"""True if FSDP2 can keep the parameters of a unit in several groups, each of which is gathered on its own."""


def accelerator_support() -> dict[str, str]:
    """Support of this PyTorch for accelerators, whatever devices are present: versions of CUDA (also MACA and others
    that imitate it), ROCm and Intel's runtime, and packages. Empty in a CPU build to which no package adds one."""
    added = {entry_point.name for entry_point in entry_points(group="torch.backends")}
    added |= {name for name in BACKEND_PACKAGES if find_spec(name) is not None}
    built = {"cuda": torch.version.cuda, "hip": torch.version.hip, "xpu": torch.version.xpu}
    return {name: value for name, value in (built | {"packages": ", ".join(sorted(added))}).items() if value}


FSDP2_ACCUMULATES_IN_GRAD = Version(torch.__version__) >= Version("2.15")
"""True if FSDP2 keeps a gradient that waits to be reduced in the unsharded parameter's `grad` alone."""

# SPDX-License-Identifier: Apache-2.0
"""Abilities of this PyTorch: an accelerator, FSDP2. Light: reads PyTorch and the installed packages, no device."""

from dataclasses import dataclass
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


@dataclass(frozen=True)
class TorchFacts:
    """Facts that decide if this PyTorch can drive an accelerator; none depends on the devices present."""

    cuda: str | None
    """CUDA version PyTorch was built with (also MACA and others that imitate CUDA)."""
    hip: str | None
    """ROCm version."""
    xpu: str | None
    """Intel GPU runtime version."""
    backends: tuple[str, ...]
    """Installed packages that add an accelerator to PyTorch."""


def torch_facts() -> TorchFacts:
    """The facts of the PyTorch of this process."""
    added = [entry_point.name for entry_point in entry_points(group="torch.backends")]
    added += [name for name in BACKEND_PACKAGES if find_spec(name) is not None]
    return TorchFacts(torch.version.cuda, torch.version.hip, torch.version.xpu, tuple(sorted(set(added))))


def torch_has_accelerator_support(facts: TorchFacts) -> bool:
    """True unless this is a CPU build of PyTorch and no package adds an accelerator to it."""
    return any((facts.cuda, facts.hip, facts.xpu, facts.backends))


FSDP2_ACCUMULATES_IN_GRAD = Version(torch.__version__) >= Version("2.15")
"""True if FSDP2 keeps a gradient that waits to be reduced in the unsharded parameter's `grad` alone."""

# SPDX-License-Identifier: Apache-2.0
"""Findings of `digen doctor` about this machine and installation: versions, plugin, platform."""

import importlib
import os
import platform
import sys
import warnings
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, entry_points, requires, version

from packaging.requirements import Requirement

from verl_digen.hardware.versions import ENGINE_PACKAGES, ENGINE_TESTED, SUPPORTED, installed, is_engine_tested, outside

PACKAGES = (
    *("verl-digen", "verl", "torch", "ray", "TransferQueue", "diffusers", "transformers", "peft"),
    *("tensordict", "accelerate", "hydra-core", "omegaconf", "vllm", "vllm-omni"),
)
"""Packages whose versions belong in a bug report; those not installed are left out."""


@dataclass(frozen=True)
class Problem:
    """A reason why a run could not start."""

    what: str
    remedy: str


@dataclass
class Report:
    """Findings about this machine and installation."""

    versions: dict[str, str] = field(default_factory=dict)
    platform: str = "none"
    platform_reason: str = "verl could not be imported"
    devices: list[str] = field(default_factory=list)
    plugin_loaded: bool = False
    problems: list[Problem] = field(default_factory=list)

    def add_problem(self, what: str, remedy: str) -> None:
        """Add a problem once."""
        problem = Problem(what, remedy)
        if problem not in self.problems:
            self.problems.append(problem)


def examine() -> Report:
    """Look at this machine and installation. Imports verl, which takes seconds."""
    report = Report({"python": platform.python_version(), "system": platform.platform(), **installed(PACKAGES)})
    _check_requirements(report)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # verl warns of every engine it has no library for
        try:
            importlib.import_module("verl")
        except Exception as error:
            remedy = "pip install 'verl>=0.9.1,<0.10'"
            report.add_problem(f"verl cannot be imported ({type(error).__name__}: {error})", remedy)
            return report
        _check_plugin(report)
        _check_platform(report)
        _check_vllm_omni(report)
    return report


def to_text(report: Report) -> str:
    """The report as text for people."""
    lines = ["versions"]
    for name, number in report.versions.items():
        tested = f"  (tested: {' or '.join(map(str, SUPPORTED[name].tested))})" if name in SUPPORTED else ""
        lines.append(f"  {name:<14} {number}{tested}")
    lines += ["", f"platform: {report.platform} ({report.platform_reason})"]
    lines += [f"  {device}" for device in report.devices]
    lines += ["", f"plugin: {'loaded' if report.plugin_loaded else 'not loaded'}", ""]
    if not report.problems:
        lines.append("A run could start.")
    for problem in report.problems:
        lines += [f"PROBLEM  {problem.what}", f"  remedy {problem.remedy}"]
    return "\n".join(lines)


def _check_requirements(report: Report) -> None:
    """Check that the requirements in verl-digen's metadata, without extras, are installed in fitting versions."""
    for line in requires("verl-digen") or []:
        requirement = Requirement(line)
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        remedy = f"pip install '{requirement.name}{requirement.specifier}'"
        try:
            found = version(requirement.name)
        except PackageNotFoundError:
            report.add_problem(f"{requirement.name} is not installed", remedy)
            continue
        if not requirement.specifier.contains(found, prereleases=True):
            report.add_problem(f"{requirement.name} {found} is not {requirement.specifier}", remedy)
    installed = {name: number for name, number in report.versions.items() if name in SUPPORTED}
    for name, number, wanted in outside(installed, tested=False):
        report.add_problem(f"{name} {number} is not {wanted}, which can work", f"pip install '{name}{wanted}'")


def _check_plugin(report: Report) -> None:
    plugin = sys.modules.get("verl_digen.plugin")
    report.plugin_loaded = plugin is not None
    if plugin is not None:
        for module in ("verl.trainer.ppo.v1", "verl.workers.engine", "verl.workers.rollout.replica"):
            try:  # ours are registered when they are imported
                importlib.import_module(module)
            except Exception as error:
                cause = error.__cause__ or error  # transformers' own error only names a class
                remedy = "install what the error names, in the build for this PyTorch, or remove it"
                report.add_problem(f"verl cannot be imported ({type(cause).__name__}: {cause})", remedy)
        for failure in plugin.FAILURES:
            report.add_problem(f"plugin: {failure}", "repair what the error names, or install verl-digen again")
        return
    policy = os.environ.get("VERL_USE_EXTERNAL_PLUGINS", "auto")
    if not [entry for entry in entry_points(group="verl.plugins") if entry.name == "digen"]:
        report.add_problem("verl does not know the plugin: its entry point is not installed", "pip install verl-digen")
    else:
        report.add_problem(
            f"verl is set not to load the plugin (VERL_USE_EXTERNAL_PLUGINS={policy})",
            "unset VERL_USE_EXTERNAL_PLUGINS, or add `digen` to its list",
        )


def _check_platform(report: Report) -> None:
    import torch
    from verl.plugin.platform import get_platform

    from verl_digen.hardware.torch_support import accelerator_support

    support = accelerator_support()
    asked = os.environ.get("VERL_PLATFORM", "")
    try:
        chosen = get_platform()
    except ValueError as error:
        report.add_problem(str(error), "unset VERL_PLATFORM, or give one of the registered names")
        return
    report.platform = chosen.device_name
    if asked:
        report.platform_reason = f"VERL_PLATFORM={asked}"
    elif not support:
        report.platform_reason = f"torch {torch.__version__} is a CPU build"
    else:
        report.platform_reason = f"torch supports {', '.join(f'{name}={value}' for name, value in support.items())}"
    if chosen.device_name == "cpu":
        _, memory_bytes = chosen.device_module.mem_get_info()
        report.devices = [f"cpu: {os.cpu_count()} cores, {memory_bytes / 2**30:.0f} GiB memory"]
    elif chosen.is_available():
        indices = range(chosen.device_count())
        report.devices = [f"{chosen.device_name}:{i} {chosen.device_module.get_device_name(i)}" for i in indices]
    else:
        report.add_problem(
            f"platform {chosen.device_name} was chosen, but this machine shows no such device",
            "check the driver (nvidia-smi); on a machine without GPU set VERL_PLATFORM=cpu; a head node without GPU "
            "whose Ray cluster has some is in order",
        )


def _check_vllm_omni(report: Report) -> None:
    """Check the versions of an installed vLLM-Omni."""
    if "vllm-omni" not in report.versions:
        return
    found = [report.versions.get(package) for package in ENGINE_PACKAGES]
    if not is_engine_tested(found):
        report.add_problem(
            f"vllm and vllm-omni are {' and '.join(number or '(not installed)' for number in found)}, and were "
            f"tested as {' or '.join(ENGINE_TESTED)}, both the same",
            "pip install 'verl-digen[vllm-omni]'",
        )

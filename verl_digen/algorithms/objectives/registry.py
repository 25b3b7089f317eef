# SPDX-License-Identifier: Apache-2.0
"""Registry of policy losses by name: register, find, call. See the package."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from verl_digen.algorithms.objectives.config import ClampedConfig, LossConfig
from verl_digen.algorithms.rows import LossInputs, LossOutput
from verl_digen.require import require_one_of

BEHAVIOUR = "behaviour_log_prob"
"""Column: log-prob under the policy that generated the sample, recorded at generation."""
OLD = "old_log_prob"
"""Column: log-prob under the policy before the update, see `verl_digen.algorithms.objectives.denominator`."""
TRAJECTORY = "trajectory_log_ratio"
"""Column: mean of log_prob - behaviour_log_prob, under the current weights, over the trained steps of the row's
trajectory, see `trajectory_log_ratios`."""

COLUMNS = ("log_prob", BEHAVIOUR, OLD, TRAJECTORY, "advantage", "reward", "std", "sigma", "sigma_next")
"""[N] each; see the package."""
OUTPUTS = ("mean", "velocity")
"""Outputs of a policy on a row, [N, ...] each."""
POLICIES = ("old", "reference")
"""Policies besides the one that trains; input `old_mean` is the output `mean` of policy `old`."""
POLICY_LATENTS = {f"{policy}_{output}": (policy, output) for policy in POLICIES for output in OUTPUTS}
"""Name of an input -> (policy, its output)."""
LATENTS = ("latents", "next_latents", *OUTPUTS, *POLICY_LATENTS)
"""[N, ...] each; see the package."""

LossFn = Callable[[LossInputs, Any], LossOutput]
"""(checked inputs, settings of the loss's own class) -> output."""


@dataclass(frozen=True)
class Loss:
    """A registered loss: its function, and what it needs."""

    name: str
    compute: LossFn
    config: type[LossConfig]
    """Class of its settings; every field has a default."""
    columns: tuple[str, ...]
    latents: tuple[str, ...]
    homogeneous: bool
    """True: proportional to the advantage; see the package."""
    off_policy: bool
    """True: sound with `digen.staleness.max_versions` > 1."""
    laws: tuple[str, ...]
    """Values of `digen.sde.law` that it is defined for; (): all."""

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of all inputs."""
        return (*self.columns, *self.latents)

    @property
    def reads_trajectories(self) -> bool:
        """True if the loss of a row depends on the other rows of its trajectory."""
        return TRAJECTORY in self.columns

    @property
    def reads_old_latents(self) -> bool:
        """True if it needs a forward of the policy before the update, not its log-probs alone."""
        return any(POLICY_LATENTS.get(name, ("",))[0] == "old" for name in self.latents)


_LOSSES: dict[str, Loss] = {}


def register_loss(
    *names: str,
    config: type[LossConfig] = ClampedConfig,
    columns: Sequence[str] = (),
    latents: Sequence[str] = (),
    homogeneous: bool = False,
    off_policy: bool = False,
    laws: Sequence[str] = (),
) -> Callable[[LossFn], LossFn]:
    """Register a loss under `names`, with the inputs it needs, at least one.

    Args:
        config: frozen dataclass of its settings, the keys under `digen.loss`; every field has a default.
        columns: of `COLUMNS`, [N] each.
        latents: of `LATENTS`, [N, ...] each.
        homogeneous: loss(c A) = c loss(A) for every c > 0, except for clamping of A. False is always safe: if the
            advantage scale needs the whole batch, such a loss waits for the batch.
        off_policy: it is sound on samples that are several versions old.
        laws: values of `digen.sde.law` that it is defined for; (): all.

    Raises:
        ValueError: a name is taken, or training has no such input.
    """
    for argument, given, known in (("columns", columns, COLUMNS), ("latents", latents, LATENTS)):
        for name in given:
            require_one_of(f"{argument} of the policy loss {names[0] if names else ''!r}", name, known)
    if not names or not (columns or latents):
        raise ValueError(
            f"a policy loss must have a name and an input, got names {names} and inputs {(*columns, *latents)}; "
            "write @register_loss(NAME, columns=(...))"
        )

    def file(compute: LossFn) -> LossFn:
        for name in names:
            if name in _LOSSES:
                raise ValueError(f"a policy loss named {name!r} exists already; choose another name")
            _LOSSES[name] = Loss(
                name, compute, config, tuple(columns), tuple(latents), homogeneous, off_policy, tuple(laws)
            )
        return compute

    return file


def loss_names() -> tuple[str, ...]:
    """The names that `policy_loss` knows, sorted."""
    return tuple(sorted(_LOSSES))


def find_loss(name: str) -> Loss:
    """The loss `name`. ValueError if there is no such loss."""
    if name not in _LOSSES:
        raise ValueError(f"unknown policy loss {name!r}; known losses: {', '.join(loss_names())}")
    return _LOSSES[name]


def default_config(name: str) -> Any:
    """Default settings of loss `name`, a frozen dataclass of its own. ValueError if there is no such loss."""
    return find_loss(name).config()


def policy_loss(name: str, inputs: Mapping[str, Tensor], config: LossConfig) -> LossOutput:
    """Loss `name` of N rows, as their share of the logical batch's mean.

    Args:
        inputs: those that `find_loss(name).inputs` lists; optionally `mask` [N], 0 or False in padding rows, and
            `num_rows`, the unmasked rows of the whole logical batch, a number or [] (default: the unmasked
            rows here).
        config: settings of the loss, as `default_config(name)` makes them.

    Raises:
        ValueError: unknown loss; settings of another loss; an input is missing or misshapen.
    """
    loss = find_loss(name)
    if not isinstance(config, loss.config):
        raise ValueError(
            f"policy loss {name!r} needs settings of type {loss.config.__name__}, got {type(config).__name__}; "
            f"begin with default_config({name!r})"
        )
    rows = LossInputs.check(f"policy loss {name!r}", inputs, columns=loss.columns, latents=loss.latents)
    return loss.compute(rows, config)

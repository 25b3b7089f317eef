# SPDX-License-Identifier: Apache-2.0
"""Registry of policy losses by name: register, look up inputs, call. See the package."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from verl_digen.algorithms.losses.config import LossConfig
from verl_digen.algorithms.rows import LossInputs, LossOutput
from verl_digen.require import require_one_of

BEHAVIOUR = "behaviour_log_prob"
"""Column: log-prob under the policy that generated the sample, recorded at generation."""
OLD = "old_log_prob"
"""Column: log-prob under the policy before the update, see `verl_digen.algorithms.losses.denominator`."""
TRAJECTORY = "trajectory_log_ratio"
"""Column: mean of log_prob - behaviour_log_prob, under the current weights, over the trained steps of the row's
trajectory, see `off_policy.trajectory_log_ratios`."""

COLUMNS = ("log_prob", BEHAVIOUR, OLD, TRAJECTORY, "advantage", "reward", "std", "dt")
"""[N] each; see the package."""
LATENTS = ("latents", "next_latents", "mean", "velocity")
"""[N, ...] each; see the package."""

LossFn = Callable[[LossInputs, LossConfig], LossOutput]


@dataclass(frozen=True)
class _Loss:
    compute: LossFn
    columns: tuple[str, ...]
    latents: tuple[str, ...]
    homogeneous: bool
    off_policy: bool


_LOSSES: dict[str, _Loss] = {}


def register_loss(
    *names: str,
    columns: Sequence[str] = (),
    latents: Sequence[str] = (),
    homogeneous: bool = False,
    off_policy: bool = False,
) -> Callable[[LossFn], LossFn]:
    """Register a loss under `names`, with the inputs it needs, at least one.

    Args:
        columns: of `COLUMNS`, [N] each.
        latents: of `LATENTS`, [N, ...] each.
        homogeneous: loss(c A) = c loss(A) for every c > 0, except for clamping of A. False is always safe: if the
            advantage scale needs the whole batch, such a loss waits for the batch.
        off_policy: it is sound on samples that are several versions old.

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
            _LOSSES[name] = _Loss(compute, tuple(columns), tuple(latents), homogeneous, off_policy)
        return compute

    return file


def loss_names() -> tuple[str, ...]:
    """The names that `policy_loss` knows, sorted."""
    return tuple(sorted(_LOSSES))


def loss_inputs(name: str) -> tuple[str, ...]:
    """The inputs that loss `name` needs. ValueError if there is no such loss."""
    return (*_find(name).columns, *_find(name).latents)


def is_homogeneous(name: str) -> bool:
    """True if loss `name` is proportional to the advantage; see the package. ValueError if it is unknown."""
    return _find(name).homogeneous


def is_off_policy(name: str) -> bool:
    """True if loss `name` is sound with `digen.staleness.max_versions` > 1. ValueError if it is unknown."""
    return _find(name).off_policy


def reads_trajectories(name: str) -> bool:
    """True if loss `name` of a row depends on the other rows of its trajectory. ValueError if it is unknown."""
    return TRAJECTORY in _find(name).columns


def policy_loss(name: str, inputs: Mapping[str, Tensor], config: LossConfig) -> LossOutput:
    """Loss `name` of N rows, as their share of the logical batch's mean.

    Args:
        inputs: those that `loss_inputs(name)` lists; optionally `mask` [N], 0 or False in padding rows, and
            `num_rows`, the unmasked rows of the whole logical batch, a number or [] (default: the unmasked
            rows here).

    Raises:
        ValueError: unknown loss; an input is missing or misshapen.
    """
    loss = _find(name)
    rows = LossInputs.check(f"policy loss {name!r}", inputs, columns=loss.columns, latents=loss.latents)
    return loss.compute(rows, config)


def _find(name: str) -> _Loss:
    if name not in _LOSSES:
        raise ValueError(f"unknown policy loss {name!r}; known losses: {', '.join(loss_names())}")
    return _LOSSES[name]

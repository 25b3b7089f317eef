# SPDX-License-Identifier: Apache-2.0
"""`digen.loss`: the policy loss by name, and the settings of its own class.

    loss: {name: tis, high: 2.0}        # an algorithm's recipe, or digen.loss.name=tis digen.loss.high=2.0

A recipe may hold settings of the loss that it names while another one is chosen on the command line: settings that are
known to some other loss are left out then, and a note says so at the start. Unknown ones are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from verl_digen.algorithms.objectives import OLD_LOG_PROBS, LossConfig, find_objective, objective_names
from verl_digen.require import require_one_of, suggestion

LOSS_DEFAULTS = {"name": "flow_grpo", "old_log_probs": "auto"}
"""Keys of `digen.loss` that are not settings of the loss itself. `old_log_probs`, the denominator of the ratio, for
losses that read `old_log_prob` (flow_grpo): auto = the update's own first pass (ratio exactly 1) where one optimizer
step takes the whole batch, else recompute; recompute = a forward with the engine before the update; rollout = as
recorded. With stale samples auto is rollout, see `verl_digen.algorithms.objectives.denominator`."""


def check_loss_section(section: Mapping[str, Any]) -> None:
    """Require values that fit the loss, if there is one of this name.

    Raises:
        ValueError: a broken rule, with key, value and remedy.
    """
    require_one_of("digen.loss.old_log_probs", section["old_log_probs"], OLD_LOG_PROBS)
    if section["name"] in objective_names():
        loss_settings(section)


def loss_settings(section: Mapping[str, Any]) -> LossConfig:
    """Settings of the chosen loss.

    Raises:
        ValueError: there is no such loss, it has no such setting, or a value breaks a rule.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    loss = find_objective(section["name"]).loss
    known = _settings_of(loss.config)
    own = {name: value for name, value in section.items() if name in known}
    elsewhere = set().union(*(_settings_of(find_objective(name).loss.config) for name in objective_names()))
    for name in section.keys() - known - elsewhere - LOSS_DEFAULTS.keys():
        raise ValueError(
            f"digen.loss.{name} must be a setting of digen.loss.name={section['name']}, got {section[name]!r}; "
            f"{suggestion(name, sorted(known))}its settings are {', '.join(sorted(known)) or 'none'}"
        )
    try:
        merged = OmegaConf.merge(OmegaConf.structured(loss.config), own)
        settings = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        said = (error.msg or str(error)).splitlines()[0]
        raise ValueError(
            f"digen.loss.{error.full_key or ''}: {said}; the settings of {section['name']} are in "
            f"{loss.config.__module__}"
        ) from error
    assert isinstance(settings, LossConfig)
    return settings


def unused_settings(section: Mapping[str, Any]) -> dict[str, Any]:
    """Settings in `digen.loss` that other losses have and the chosen one has not."""
    known = _settings_of(find_objective(section["name"]).loss.config)
    return {name: value for name, value in section.items() if name not in known and name not in LOSS_DEFAULTS}


def _settings_of(config: type[LossConfig]) -> set[str]:
    return {field.name for field in fields(config)}

# SPDX-License-Identifier: Apache-2.0
"""Input of the rules: verl's composed config, and its `digen:` section, parsed once."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_digen.config import DigenConfig, digen_config
from verl_digen.require import require_value


@dataclass(frozen=True)
class StartConfig:
    """The config of a run that is about to start; rules call it `run`."""

    config: DictConfig
    prompts: dict[str, Any] = field(default_factory=dict)
    """train or val -> the `PromptSet` of its files, once `inputs.prompts_of` has read them."""

    @property
    def digen(self) -> DigenConfig:
        """The `digen:` section.

        Raises:
            ValueError: it cannot be parsed; the same for every rule, so it is shown once.
        """
        if isinstance(self._parsed, ValueError):
            raise self._parsed
        return self._parsed

    @cached_property
    def _parsed(self) -> DigenConfig | ValueError:
        try:
            return digen_config(self.config)
        except ValueError as error:
            return error

    def value(self, key: str) -> Any:
        """The value of a key, or of a property of a section under `digen:`."""
        section, _, name = key.partition(".")
        if section == "digen":
            return attrgetter(name)(self.digen)
        return OmegaConf.select(self.config, key, throw_on_missing=True)

    def require_values(self, condition: str, *rows: tuple[str, Any, str, str]) -> None:
        """Require keys to have the one value that goes with a setting.

        Args:
            condition: the setting, such as "with KEY=VALUE". rows: (key, value, reason, remedy); a reason is what the
                message has after the condition.

        Raises:
            ValueError: the first key that has another value.
        """
        for key, wanted, why, remedy in rows:
            require_value(key, self.value(key), wanted, f"{condition}{why}", remedy)

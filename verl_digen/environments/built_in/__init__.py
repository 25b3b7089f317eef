# SPDX-License-Identifier: Apache-2.0
"""Built-in environments, one per file of its name, and the class that `digen.environment` names: one of them, or your
own."""

import pkgutil
from typing import Any

from verl_digen.config import EnvironmentConfig
from verl_digen.environments.base import Environment
from verl_digen.require import check_class, require_one_of, settings_of
from verl_digen.user_modules import load


def environment_class(config: EnvironmentConfig) -> type[Environment]:
    """The class that the config names. ValueError if it cannot be loaded, or is another kind of object."""
    target = config.target
    assert target is not None
    if config.path is None:
        require_one_of(config.key, target, sorted(module.name for module in pkgutil.iter_modules(__path__)))
        target = f"{__name__}.{target}:ENVIRONMENT"
    return check_class(load(target, config.key, "FILE.py:NAME or package.module.NAME"), Environment, config.key)


def environment_settings(config: EnvironmentConfig, found: type[Environment]) -> Any:
    """`digen.environment.options` as an instance of the class's `config_class`. Raises as `settings_of`."""
    return settings_of(found.__name__, found.config_class, config.options, "digen.environment.options")

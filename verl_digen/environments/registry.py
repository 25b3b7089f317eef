# SPDX-License-Identifier: Apache-2.0
"""Environments by name: `digen.environment` -> the class, and its settings."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import sys
from dataclasses import is_dataclass
from hashlib import sha256
from types import ModuleType
from typing import Any, get_type_hints

from verl_digen.config import EnvironmentConfig
from verl_digen.environments import built_in
from verl_digen.environments.base import Environment
from verl_digen.require import require_one_of, suggestion

FILE_END = ".py:"


def built_in_names() -> list[str]:
    """Names of the files in `built_in/`; none of them is imported."""
    return sorted(module.name for module in pkgutil.iter_modules(built_in.__path__))


def environment_class(config: EnvironmentConfig) -> type[Environment]:
    """The class that the config names.

    Raises:
        ValueError: no such name, a module or file that cannot be loaded, or another kind of object.
    """
    target = config.target
    assert target is not None
    if config.path is None:
        require_one_of(config.key, target, built_in_names())
        target = f"{built_in.__name__}.{target}:ENVIRONMENT"
    module_name, _, attribute = target.rpartition(":" if ":" in target else ".")
    if not module_name or not attribute:
        raise ValueError(f"{config.key} must be FILE.py:NAME or package.module.NAME, got {target!r}; write one of them")
    try:
        module = _load_file(module_name) if FILE_END in target else importlib.import_module(module_name)
        found = getattr(module, attribute)
    except (Exception, SystemExit) as error:  # the user's module may raise anything at import
        cause = error.__cause__ or error
        raise ValueError(
            f"{config.key}: {target!r} could not be loaded ({type(cause).__name__}: {cause}); check its name, and that "
            "it is installed"
        ) from error
    if not (isinstance(found, type) and issubclass(found, Environment)):
        raise ValueError(
            f"{config.key} must name a class of verl_digen.environments.base.Environment, got {found!r}; derive it "
            "from that class"
        )
    return found


def _load_file(path: str) -> ModuleType:
    """Import a file as a module of a name of its own, once per process: dataclasses in it look their module up, which
    verl's `load_extern_object` does not register."""
    name = f"{__name__}_{sha256(path.encode()).hexdigest()[:12]}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(sys.modules[name])
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def environment_settings(config: EnvironmentConfig, found: type[Environment]) -> Any:
    """`digen.environment.options` as an instance of the class's `config_class`.

    Raises:
        ValueError: an unknown option, a value of the wrong type, or a broken rule of the class.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    key = "digen.environment.options"
    if not is_dataclass(found.config_class):
        raise ValueError(
            f"{config.key}: {found.__name__}.config_class must be a dataclass, got {found.config_class!r}; decorate it "
            "with @dataclass(frozen=True)"
        )
    known = list(get_type_hints(found.config_class))
    for name, value in config.options.items():
        if name not in known:
            raise ValueError(
                f"{key}.{name} must be a setting of {found.__name__} ({', '.join(known) or 'it has none'}), got "
                f"{value!r}; {suggestion(name, known)}take it out"
            )
    try:
        schema: Any = OmegaConf.structured(found.config_class)
        OmegaConf.set_readonly(schema, False)
        return OmegaConf.to_object(OmegaConf.merge(schema, dict(config.options)))
    except OmegaConfBaseException as error:
        raise ValueError(
            f"{key}.{error.full_key} must have a value of its type, got {config.options.get(str(error.full_key))!r}; "
            f"{str(error.msg or error).splitlines()[0]}"
        ) from error
    except ValueError as error:  # a rule of the class
        raise ValueError(f"{key}: {error}") from error

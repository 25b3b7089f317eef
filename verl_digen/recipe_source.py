# SPDX-License-Identifier: Apache-2.0
"""Hydra config sources of our recipes: `recipe=NAME` and `recipe=A+B` on verl's unmodified main, and on a user's own
configs that build on verl's.

`RecipeSlot`, in front of the search path, adds one more entry at the end of a config's defaults list, `recipe: null`.
As the last one, a recipe overrides values and picks (`override /model@...`) of all entries before it; a config whose
defaults name such a config overrides both. `RecipeSource`, behind, holds group `recipe/`. Applications whose config
folder neither is verl's nor holds a config that builds on verl's get neither.

Four kinds of recipes are computed when they are loaded:

- `A+B`: recipe A, then B. Hydra's `recipe=[A,B]` does the same, and needs quotes in some shells.
- `digen_schema`: the fields and defaults of `verl_digen.config.DigenConfig`, at `digen:`. A field can be overridden
  without `+`; an unknown one, or a value of the wrong type, is a Hydra error.
- `digen_machine`: on a machine whose verl platform is `cpu` it is `digen_cpu`, elsewhere the sections of its file that
  apply to this machine; none where the run joins a Ray cluster.
- `disaggregated`: where verl's platform communicates over NCCL, weights travel between the pools over it, by verl's own
  checkpoint engine; elsewhere as the file says.

Invariant: without a recipe the composed config equals verl's, byte for byte.
"""

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from hydra._internal.core_plugins.importlib_resources_config_source import ImportlibResourcesConfigSource
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import Container, OmegaConf, flag_override
from yaml import YAMLError

from verl_digen.processes.cluster import joins_cluster, num_machine_cpus
from verl_digen.require import suggestion

VERL_CONFIGS = "pkg://verl.trainer.config"
RECIPES = "pkg://verl_digen.recipes"
PRIMARY = "ppo_trainer.yaml"
"""The primary config of `verl.trainer.main_ppo`."""
PART = "@actor_rollout_ref.actor"
"""End of the entry of `PRIMARY`'s defaults list that names the actor's config."""
GROUP = "recipe"
AND = "+"
"""Separator of recipes in one word."""
OBJECTIVES = {"diffusion_nft": "nft", "online_dpo": "dpo", "grpo_guard": "guard", "flow_dppo": "dppo"}
"""Names of objectives whose recipe has a shorter one, for messages."""
FEW_CPUS = 16
"""A machine with at most this many CPUs starts fewer processes than verl's defaults."""


def recipe_hint(missed: str, names: Iterable[str]) -> str:
    """Name of the recipe that was probably meant by one that does not exist, as words for a message; or nothing."""
    meant = OBJECTIVES.get(missed)
    return suggestion(missed, names) if meant is None else f"the recipe of {missed} is {meant}; "


class RecipeSlot(ConfigSource):
    """Configs that take a recipe, with a `recipe` entry in their defaults list: verl's `ppo_trainer`, and in the
    application's own folder, which its path names, those that name verl's parts themselves.

    A config there that names a recipe beside a base that takes one, has `override recipe` in its place.
    """

    def __init__(self, provider: str, path: str) -> None:
        super().__init__(provider, path)
        scheme, separator, _ = self.path.partition("://")
        own = SourcesRegistry.instance().resolve(scheme if separator else "file")
        verls = ImportlibResourcesConfigSource(provider, VERL_CONFIGS)
        self._sources: tuple[ConfigSource, ConfigSource] = own(provider, self.path), verls
        self._found: dict[str, ConfigResult | None] = {}
        """Name -> config; Hydra asks for one a dozen times, and reading it takes longer than all that it does."""

    def __repr__(self) -> str:
        """Text that Hydra prints below "Config search path:" when a config is missing."""
        return f"{super().__repr__()}, for a recipe in ppo_trainer; its parts need hydra.searchpath=[{VERL_CONFIGS}]"

    @staticmethod
    def scheme() -> str:
        return "digen-slot"

    def load_config(self, config_path: str) -> ConfigResult:
        result = copy.deepcopy(self._find(config_path))  # what is loaded is Hydra's to change
        assert result is not None
        defaults = result.config["defaults"]
        with flag_override(result.config, ["struct", "readonly"], False):
            if _names_parts(result.config):
                defaults.append({GROUP: None})  # not `optional recipe`, which would let a misspelt name pass
            else:
                for number in [number for number, entry in enumerate(defaults) if _names_recipe(entry)]:
                    defaults.append({f"override {GROUP}": defaults.pop(number)[GROUP]})
        return result

    def is_config(self, config_path: str) -> bool:
        found = self._find(config_path)
        if found is None:
            return False
        names_recipe = any(map(_names_recipe, _defaults(found.config)))
        return names_recipe != _names_parts(found.config) and self._takes_recipe(config_path)

    def is_group(self, config_path: str) -> bool:
        return False

    def available(self) -> bool:
        return True

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        return []

    def is_used(self) -> bool:
        """True if a config of the application's folder takes a recipe."""
        own = self._sources[0]
        if not own.available():
            return False
        names = own.list("", ObjectType.CONFIG)
        return self._takes_recipe(PRIMARY) if PRIMARY.removesuffix(".yaml") in names else any(map(self._reads, names))

    def _reads(self, name: str) -> bool:
        """True if the config takes a recipe; one that cannot be read does not, and Hydra says so where it is used."""
        try:
            return self._takes_recipe(name)
        except YAMLError:
            return False

    def _takes_recipe(self, config_path: str) -> bool:
        """True if the config, or one that its defaults name, names verl's parts."""
        found = self._find(config_path)
        if found is None:
            return False
        return _names_parts(found.config) or any(map(self._takes_recipe, _bases(found.config)))

    def _find(self, config_path: str) -> ConfigResult | None:
        """The config, from the application's folder, or verl's `ppo_trainer`; None for what lies in a group."""
        name = self._normalize_file_name(config_path)
        if "/" in name:
            return None
        if name not in self._found:
            sources = self._sources if name == PRIMARY else self._sources[:1]
            self._found[name] = next((one.load_config(name) for one in sources if one.is_config(name)), None)
        return self._found[name]


class RecipeSource(ConfigSource):
    """The files in `verl_digen/recipes/`: flat ones as group `recipe/`, those in a subfolder as that group."""

    def __init__(self, provider: str, path: str) -> None:
        super().__init__(provider, path)
        self._files = ImportlibResourcesConfigSource(provider, RECIPES)
        self._served: dict[str, Callable[[], ConfigResult]] = {
            f"{GROUP}/digen_schema.yaml": self._load_schema,
            f"{GROUP}/digen_machine.yaml": self._load_machine,
            f"{GROUP}/disaggregated.yaml": self._load_disaggregated,
        }
        self._missed = ""
        """The last recipe that was requested and does not exist."""

    @staticmethod
    def scheme() -> str:
        return "digen"

    def __repr__(self) -> str:
        """Text that Hydra prints below "Config search path:" when a config is missing; of a recipe in a list it says
        nothing else but the name."""
        names = self.list(GROUP, ObjectType.CONFIG)
        return f"{super().__repr__()}, recipes: {', '.join(names)}; {recipe_hint(self._missed, names)}".rstrip("; ")

    def load_config(self, config_path: str) -> ConfigResult:
        name = self._normalize_file_name(config_path)
        if _is_several(name):
            return self._load_several(name)
        served = self._served.get(name)
        return served() if served else self._files.load_config(_file_of(config_path))

    def is_config(self, config_path: str) -> bool:
        name = self._normalize_file_name(config_path)
        if _is_several(name):
            return True
        is_there = name in self._served or ("/" in name and self._files.is_config(_file_of(name)))
        if not is_there and name.startswith(f"{GROUP}/"):
            self._missed = _file_of(name).removesuffix(".yaml")
        return is_there

    def is_group(self, config_path: str) -> bool:
        return config_path == GROUP or (config_path != "" and self._files.is_group(config_path))

    def available(self) -> bool:
        return self._files.available()

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        if config_path != GROUP:
            return self._files.list(config_path, results_filter)
        return self._files.list("", ObjectType.CONFIG) if results_filter != ObjectType.GROUP else []

    def _load_several(self, name: str) -> ConfigResult:
        names = _file_of(name).removesuffix(".yaml").split(AND)
        config = OmegaConf.create({"defaults": names})  # also recipes of other sources; Hydra names one that is missing
        return ConfigResult(self.provider, self.full_path(), config, header={"package": "_global_"})

    def _load_schema(self) -> ConfigResult:
        from verl_digen.config import digen_schema  # imports torch: only when one of our recipes is composed

        schema = copy.deepcopy(digen_schema())
        OmegaConf.set_struct(schema.reward.recipe_functions, False)  # its keys are the user's, and need no `+`
        return ConfigResult(self.provider, self.full_path(), schema, header={"package": "digen"})

    def _load_machine(self) -> ConfigResult:
        from verl.plugin.platform import get_platform

        if get_platform().device_name == "cpu":
            return self._files.load_config("digen_cpu")
        result = self._files.load_config("digen_machine")
        sections = [] if joins_cluster(None) else ["one_machine"]
        if sections and num_machine_cpus() <= FEW_CPUS:
            sections.append("few_cpus")
        merged = OmegaConf.merge({}, *(result.config[name] for name in sections))
        return ConfigResult(result.provider, result.path, merged, header=result.header)

    def _load_disaggregated(self) -> ConfigResult:
        from verl.plugin.platform import get_platform

        result = self._files.load_config("disaggregated")
        if get_platform().communication_backend_name() == "nccl":
            # rebuild_group: a replica that was started again is not in the old group
            nccl = {"backend": "nccl", "engine_kwargs": {"nccl": {"rebuild_group": True}}}
            OmegaConf.update(result.config, "actor_rollout_ref.rollout.checkpoint_engine", nccl)
        return result


class RecipeSearchPath(SearchPathPlugin):
    """Adds the two sources to Hydra's search path."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        own = next((entry.path for entry in search_path.get_path() if entry.provider == "main"), None)
        slot = f"{RecipeSlot.scheme()}://{own}"
        if own is not None and RecipeSlot("verl-digen", slot).is_used():
            search_path.prepend("verl-digen", slot)
            search_path.append("verl-digen", f"{RecipeSource.scheme()}://recipes")


def register() -> None:
    """Register the sources with Hydra, in this process."""
    for plugin in (RecipeSlot, RecipeSource, RecipeSearchPath):
        Plugins.instance().register(plugin)


def _defaults(config: Any) -> list[Any]:
    """Entries of a config's defaults list."""
    entries: Any = config.get("defaults") if OmegaConf.is_dict(config) else None
    return list(entries) if OmegaConf.is_list(entries) else []


def _names_parts(config: Container) -> bool:
    """True if the config's defaults name a config of verl's actor, as `ppo_trainer`'s do."""
    return any(str(key).endswith(PART) for entry in _defaults(config) if OmegaConf.is_dict(entry) for key in entry)


def _names_recipe(entry: Any) -> bool:
    return OmegaConf.is_dict(entry) and GROUP in entry


def _bases(config: Container) -> Iterator[str]:
    """Configs outside groups that a config's defaults name."""
    for entry in _defaults(config):
        if isinstance(entry, str) and entry != "_self_" and not {"@", "/"} & set(entry.removeprefix("/")):
            yield entry.removeprefix("/")


def _is_several(name: str) -> bool:
    """True for the normalised name of `recipe=A+B`."""
    return name.startswith(f"{GROUP}/") and AND in name


def _file_of(config_path: str) -> str:
    return config_path.removeprefix(f"{GROUP}/")

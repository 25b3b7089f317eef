# SPDX-License-Identifier: Apache-2.0
"""Hydra config sources of our recipes: `recipe=NAME` and `recipe=[a,b]` on verl's own, unmodified main.

Two config sources join the search path of applications whose primary config folder is verl's, and of no others:

- `RecipeSlot`, in front, serves verl's `ppo_trainer` with one more entry at the end of its defaults list,
  `recipe: null`. As the last one, a recipe overrides values and picks (`override /model@...`) of all entries before it.
- `RecipeSource`, behind, holds group `recipe/` (the flat files of `verl_digen/recipes/`) and the groups in its
  subfolders.

Three recipes are computed when they are loaded:

- `digen_schema`: the fields and defaults of `verl_digen.config.DigenConfig`, at `digen:`. A field can be overridden
  without `+`; an unknown one, or a value of the wrong type, is a Hydra error.
- `digen_machine`: on a machine whose verl platform is `cpu` it is `digen_cpu`, elsewhere the sections of its file that
  apply to this machine; none where the run joins a Ray cluster.
- `disaggregated`: where verl's platform communicates over NCCL, weights travel between the pools over it, by verl's own
  checkpoint engine; elsewhere as the file says.

Invariant: without a recipe the composed config equals verl's, byte for byte.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from hydra._internal.core_plugins.importlib_resources_config_source import ImportlibResourcesConfigSource
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf, flag_override

from verl_digen.cluster import joins_cluster, num_machine_cpus
from verl_digen.require import suggestion

VERL_CONFIGS = "pkg://verl.trainer.config"
RECIPES = "pkg://verl_digen.recipes"
PRIMARY = "ppo_trainer.yaml"
"""The primary config of `verl.trainer.main_ppo`."""
GROUP = "recipe"
OBJECTIVES = {"diffusion_nft": "nft", "online_dpo": "dpo", "grpo_guard": "guard", "flow_dppo": "dppo"}
"""Names of objectives whose recipe has a shorter one, for messages."""
FEW_CPUS = 16
"""A machine with at most this many CPUs starts fewer processes than verl's defaults."""


class RecipeSlot(ConfigSource):
    """verl's `ppo_trainer`, with a `recipe` entry in its defaults list."""

    def __init__(self, provider: str, path: str) -> None:
        super().__init__(provider, path)
        self._verl = ImportlibResourcesConfigSource(provider, VERL_CONFIGS)

    @staticmethod
    def scheme() -> str:
        return "digen-slot"

    def load_config(self, config_path: str) -> ConfigResult:
        result = self._verl.load_config(config_path)
        with flag_override(result.config, ["struct", "readonly"], False):
            # Not `optional recipe`, which would let a misspelt name pass.
            result.config["defaults"].append({GROUP: None})
        return result

    def is_config(self, config_path: str) -> bool:
        return self._normalize_file_name(config_path) == PRIMARY

    def is_group(self, config_path: str) -> bool:
        return False

    def available(self) -> bool:
        return True

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        return []


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
        meant = OBJECTIVES.get(self._missed)
        hint = suggestion(self._missed, names) if meant is None else f"the recipe of {self._missed} is {meant}"
        return f"{super().__repr__()}, recipes: {', '.join(names)}; {hint}".rstrip("; ")

    def load_config(self, config_path: str) -> ConfigResult:
        served = self._served.get(self._normalize_file_name(config_path))
        return served() if served else self._files.load_config(_file_of(config_path))

    def is_config(self, config_path: str) -> bool:
        name = self._normalize_file_name(config_path)
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

    def _load_schema(self) -> ConfigResult:
        from verl_digen.config import digen_schema  # imports torch: only when one of our recipes is composed

        schema = digen_schema()
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
    """Adds the two sources to the search path of verl's own applications."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        if any(entry.provider == "main" and _is_verl(entry.path) for entry in search_path.get_path()):
            search_path.prepend("verl-digen", f"{RecipeSlot.scheme()}://ppo_trainer")
            search_path.append("verl-digen", f"{RecipeSource.scheme()}://recipes")


def register() -> None:
    """Register the sources with Hydra, in this process."""
    for plugin in (RecipeSlot, RecipeSource, RecipeSearchPath):
        Plugins.instance().register(plugin)


def _is_verl(path: str | None) -> bool:
    """True if a search path entry is verl's config folder, given as a package or as a path."""
    if path is None or "://" in path.removeprefix("file://"):
        # "pkg://verl.trainer/config" if main is imported: Hydra takes both separators
        return path is not None and path.replace("/", ".") == VERL_CONFIGS.replace("/", ".")
    import verl  # not above: Hydra may have been imported before verl, and verl is importing us right now

    configs = Path(verl.__file__).parent / "trainer" / "config"
    return Path(path.removeprefix("file://")).resolve() == configs.resolve()


def _file_of(config_path: str) -> str:
    return config_path.removeprefix(f"{GROUP}/")

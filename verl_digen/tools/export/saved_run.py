# SPDX-License-Identifier: Apache-2.0
"""One checkpoint in a run's folder, and the config that the run had when it saved it, `run.json`."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from verl_digen.config import DigenConfig
from verl_digen.engine.driver_checkpoint import WEIGHTS
from verl_digen.model_config import DiffusionModelConfig
from verl_digen.models import load_model
from verl_digen.models.base import DiffusionModel
from verl_digen.observe.run_files import CHECKPOINT, POINTER, RUN_FILE, checkpoint_dir, json_in
from verl_digen.require import require


@dataclass(frozen=True)
class SavedRun:
    """A checkpoint and its settings."""

    folder: Path
    step: int
    config: DictConfig
    """The whole config of the run."""
    versions: Mapping[str, str]
    """Package -> version that the run had."""
    model_config: DiffusionModelConfig

    @property
    def actor(self) -> Path:
        """Folder of the engine's files."""
        return checkpoint_dir(self.folder, self.step) / "actor"

    @property
    def digen(self) -> DigenConfig:
        """The `digen:` section."""
        return self.model_config.digen

    @cached_property
    def model(self) -> DiffusionModel:
        """The base checkpoint; fetches it if it is on the hub."""
        return load_model(self.model_config.local_path)

    @property
    def is_lora(self) -> bool:
        """True if an adapter was trained."""
        return self.model_config.lora_rank > 0


def open_run(folder: Path, step: int | None, base: str | None) -> SavedRun:
    """Open the checkpoint of `step`, or the newest complete one. `base`: folder or hub repository of the base
    checkpoint, in place of the config's. ValueError: no run, no checkpoint, not this step; or a config that cannot be
    read."""
    require(
        folder.is_dir(), "RUN must be the folder of a run, its trainer.default_local_dir", str(folder), "see --help"
    )
    step = _chosen_step(folder, step)
    config, versions = _read_config(folder, step)
    try:
        model_config = DiffusionModelConfig.of(config, **({} if base is None else {"path": base}))
    except (TypeError, ValueError) as error:  # a key that this version does not have is a TypeError
        raise ValueError(
            f"{error} (the config that the run saved; --base names the base checkpoint where it is now)"
        ) from error
    return SavedRun(folder, step, config, versions, model_config)


def saved_steps(folder: Path) -> list[int]:
    """Steps of the complete checkpoints in a run's folder, in order."""
    numbers = (path.parent.name.removeprefix(CHECKPOINT) for path in folder.glob(f"{CHECKPOINT}*/actor"))
    return sorted(int(number) for number in numbers if number.isdecimal())


def _chosen_step(folder: Path, step: int | None) -> int:
    steps = saved_steps(folder)
    rule = f"RUN must hold checkpoints, folders {CHECKPOINT}N with an actor"
    require(bool(steps), rule, str(folder), "train with trainer.save_freq > 0, or name another folder")
    if step is not None:
        require(step in steps, f"--step must be one of {', '.join(map(str, steps))}", step, "choose one of these")
        return step
    pointer = folder / POINTER
    named = pointer.read_text().strip() if pointer.is_file() else ""
    return int(named) if named.isdecimal() and int(named) in steps else steps[-1]


def _read_config(folder: Path, step: int) -> tuple[DictConfig, dict[str, str]]:
    """(config, versions). Weights that the run named by a path from its working directory are found from any other."""
    path = checkpoint_dir(folder, step) / RUN_FILE
    remedy = "take another checkpoint"
    require(path.is_file(), f"{str(path)!r} must be there, the config of the run", "nothing", remedy)
    found = json_in(path, "config", "versions", remedy=remedy)
    config = OmegaConf.create(found["config"])
    assert isinstance(config, DictConfig)
    for key in WEIGHTS:
        given = OmegaConf.select(config, key)
        then = Path(found.get("cwd", ""), given or "")
        if given and not Path(given).exists() and then.exists():
            OmegaConf.update(config, key, str(then))
    return config, found["versions"]

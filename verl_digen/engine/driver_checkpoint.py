# SPDX-License-Identifier: Apache-2.0
"""The driver's part of a checkpoint: data loader, counters, and the pointer to the newest complete one.

    RUN_DIR/global_step_N/actor/...        written by the engine, see `verl_digen.engine.checkpoint`
    RUN_DIR/global_step_N/data.pt          data loader state
    RUN_DIR/global_step_N/digen.json       counters of the driver
    RUN_DIR/global_step_N/run.json         resolved config and versions, read by `digen export` and `digen sample`
    RUN_DIR/global_step_N/prompts.json     prompts that were drawn and not trained yet, in order
    RUN_DIR/latest_checkpointed_iteration.txt   the pointer, replaced last and at once

Invariant (tests/trainer/test_checkpoint.py): whatever fails before the pointer is replaced, the pointer names a
complete checkpoint.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf

from verl_digen.engine.saved_state import ANOTHER, require_format
from verl_digen.hardware.versions import installed
from verl_digen.models.locate import fingerprint
from verl_digen.observe.run_files import CHECKPOINT, POINTER, RUN_FILE, json_in, replace_text
from verl_digen.types import PromptRow

WEIGHTS = ("actor_rollout_ref.model.path", "actor_rollout_ref.model.lora_adapter_path")
"""Keys of folders with weights that a run begins with."""


@dataclass(frozen=True)
class DriverState:
    """Counters that continue over a resume."""

    num_prompts_drawn: int
    """Prompts taken from the data loader so far; numbers the groups, so that resumed runs draw the same noise."""
    drawn_from: str
    """`digest` of the prompts that they were taken from."""


def digest(prompts: Sequence[PromptRow]) -> str:
    """Hash of a set of prompts, in order: what is drawn."""
    content = [[row.text, row.negative, row.images, row.pair] for row in prompts]
    return sha256(json.dumps(content).encode()).hexdigest()


def save_driver_state(
    step_dir: Path, state: DriverState, dataloader_state: dict[str, Any], open_prompts: Sequence[PromptRow]
) -> None:
    """Write the driver's files into `step_dir`; a resumed run begins with `open_prompts`, which were drawn, and which
    no optimizer step has trained."""
    step_dir.mkdir(parents=True, exist_ok=True)
    torch.save(dataloader_state, step_dir / "data.pt")
    replace_text(step_dir / "prompts.json", json.dumps([_plain(vars(row), row.place) for row in open_prompts]))
    replace_text(step_dir / "digen.json", json.dumps(asdict(state)))


def save_run_description(step_dir: Path, config: DictConfig) -> None:
    """Write `RUN_FILE`: the config that the run has, with interpolations resolved, the folder that its paths are
    relative to, versions of packages, and fingerprints of the weights that it began with."""
    weights = {key: fingerprint(OmegaConf.select(config, key)) for key in WEIGHTS}
    resolved = OmegaConf.to_container(config, resolve=True)
    found = {"config": resolved, "cwd": os.getcwd(), "versions": installed(), "weights": weights}
    replace_text(step_dir / RUN_FILE, json.dumps(found, default=str))


def export_checkpoint(step_dir: Path) -> None:
    """Write `actor/huggingface`, for `hf_model` in `save_contents`, by `digen export` in a process of its own. OSError
    with what it said, if it failed."""
    run_dir, step = step_dir.parent, step_dir.name.removeprefix(CHECKPOINT)
    words = ["export", str(run_dir), "--step", step, "--output", str(step_dir / "actor" / "huggingface")]
    command = [sys.executable, "-c", "from verl_digen.cli import main; raise SystemExit(main())", *words]
    path = {"PYTHONPATH": os.pathsep.join(sys.path)}  # of modules that only this process found
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | path)
    if done.returncode != 0:
        raise OSError(done.stderr.strip()[-2000:])


def load_driver_state(step_dir: Path) -> DriverState:
    """Read what `save_driver_state` wrote. ValueError if it was not verl-digen that wrote it, or a version with other
    files."""
    path = step_dir / "digen.json"
    if not path.is_file():
        raise ValueError(
            f"trainer.resume_from_path must be a checkpoint of verl-digen, but {str(step_dir)!r} has no digen.json; "
            "start a new run with trainer.resume_mode=disable"
        )
    require_format(step_dir / "actor")
    return DriverState(**json_in(path, *(field.name for field in fields(DriverState)), remedy=ANOTHER))


def load_open_prompts(step_dir: Path) -> list[PromptRow]:
    """Read the prompts that were drawn and not trained."""
    return [
        PromptRow(**row | {name: tuple(row[name]) for name in row.keys() & {"images", "pair"}})
        for row in json_in(step_dir / "prompts.json", remedy=ANOTHER)
    ]


def _plain(value: Any, place: str) -> Any:
    """Convert a value of a prompt's row to what JSON gives back unchanged. ValueError, which names the row by `place`,
    for a type that no prompt file holds."""
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: _plain(item, place) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, place) for item in value]
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    if value is None or isinstance(value, str | int | float | bool):
        return value
    raise ValueError(
        f"data.train_files: {place or 'a prompt'} must hold texts, numbers, lists and mappings with text keys to be "
        f"saved in a checkpoint, got {value!r} of type {type(value).__name__}; convert that column"
    )


def publish(run_dir: Path, step: int) -> None:
    """Make `global_step_{step}` the checkpoint that a resume takes."""
    replace_text(run_dir / POINTER, str(step))

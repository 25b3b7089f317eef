# SPDX-License-Identifier: Apache-2.0
"""Rules for the folders that a run writes, and for a run that `trainer.default_local_dir` holds already: continued, set
aside, or in the hands of a live process (docs/checkpoints.md has the table); and the file that says what a start was
given. A start that continues a checkpoint elsewhere (`resume_path`) moves this folder's run aside, too.

Invariants (tests/plugin/test_run_folder.py): no file of a run is removed, and no folder gets the metrics of two; one
live process holds a folder, and its lock ends with it, however it ends.
"""

import fcntl
import json
import os
import platform
import re
import socket
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import fields
from datetime import datetime
from pathlib import Path
from typing import IO, Any
from weakref import WeakValueDictionary

from hydra import compose
from omegaconf import DictConfig, OmegaConf

from verl_digen.config.reward import FUNCTIONS, RECIPE_FUNCTIONS, PoolSettings
from verl_digen.data.prompts import without
from verl_digen.engine.driver_checkpoint import WEIGHTS, digest, load_driver_state, publish
from verl_digen.hardware.versions import installed
from verl_digen.models.locate import fingerprint
from verl_digen.observe.run_files import (
    CHECKPOINT,
    END,
    IMAGES,
    LOCK,
    LOG,
    METRICS,
    POINTER,
    REPORT,
    RUN_FILE,
    START,
    STOP,
    WARNINGS,
    json_in,
    newest_checkpoint,
    read_lines,
    replace_text,
)
from verl_digen.observe.timeline.file import NAME as TIMELINE
from verl_digen.preflight.inputs import has_checkpoint, num_steps, prompts_of
from verl_digen.preflight.start_config import GROUP_WORD, StartConfig, command_line, named_recipes
from verl_digen.processes.cluster import other_folder
from verl_digen.report.summary import leaves
from verl_digen.require import as_typed, first_of, refusing, require, require_value

HELD: WeakValueDictionary[Path, IO[str]] = WeakValueDictionary()
"""Folder -> this process's lock of it: in a main of one's own, Hydra's callback and `RayFlowGRPOTrainer` claim it."""
LEARNT = (
    *WEIGHTS,
    *(f"actor_rollout_ref.model.{name}" for name in ("lora_rank", "lora_alpha", "lora")),
    *(f"actor_rollout_ref.model.{name}" for name in ("target_modules", "exclude_modules")),
    *(FUNCTIONS, RECIPE_FUNCTIONS, "digen.reward.custom_weight", "digen.reward.combine"),
    *(f"digen.environment.{name}" for name in ("name", "path", "options", "max_turns")),
    *(f"reward.{name}" for name in ("custom_reward_function", "reward_model.enable", "reward_model.model_path")),
    *(f"digen.{name}" for name in ("loss", "advantage", "kl", "sde", "window", "branches", "forward")),
)
"""Keys of model, reward and objective; `auto` continues no run that has others. Prompts and weights are compared by
content."""
PACE = (
    *("actor_rollout_ref.actor.optim", "actor_rollout_ref.rollout.n", "data.train_batch_size"),
    *("digen.sampling", "digen.ema", "digen.staleness", "digen.seed"),
)
"""Keys that people change when they continue a run: a change is reported."""
OPTIMIZER = ("actor_rollout_ref.actor.optim.optimizer", "actor_rollout_ref.actor.optim.optimizer_impl")
"""Keys of the class whose moments a checkpoint has, which another class cannot read."""
NOT_COMPARED = {field.name for field in fields(PoolSettings)} | {"merge", "total_training_steps"}
"""Last names of keys that say where and how long: a reward's processes, how an adapter is sent, and the steps that verl
writes into `optim`."""
WITH_PATHS = (
    *("trainer.default_local_dir", "trainer.rollout_data_dir", "trainer.resume_from_path", "data", "digen"),
    *("actor_rollout_ref.model.path", "actor_rollout_ref.model.lora_adapter_path", "actor_rollout_ref.rollout.agent"),
    "reward.custom_reward_function",
)
"""The run's folder, and keys and sections that name files."""
MISSING = "(not there)"
"""Stands for the value of a key that one of two configs does not have."""
MAX_SHOWN = 6
WRITTEN = (f"{CHECKPOINT}*", IMAGES, "tensorboard", TIMELINE, WARNINGS, REPORT, LOG, END, POINTER, METRICS, START)
"""Files of a run, in the order in which they are moved: a move that was cut short goes on at the next start."""


def check_run_dir(run: StartConfig) -> None:
    """Require that the run's folder is a folder, or can be made, and that all processes take paths for the same."""
    _check_relative(run.config)
    for name in ("default_local_dir", "rollout_data_dir"):
        key, given = f"trainer.{name}", run.config.trainer[name]
        if given is None:
            continue
        require(
            "://" not in given, f"{key} must be a folder, not an address", given, "mount the storage, or copy later"
        )
        written = os.path.expandvars(os.path.expanduser(given))
        require(written == given, f"{key} must be written out, because no shell reads it", given, f"write {written}")
        path = Path(given).absolute()
        link = next((part for part in (path, *path.parents) if part.is_symlink() and not os.path.exists(part)), None)
        require(link is None, f"{key} must be a folder", given, f"{link} is a link to nothing; remove it")
        there = next(part for part in (path, *path.parents) if os.path.exists(part))
        require(there.is_dir(), f"{key} must be a folder", given, f"{there} is a file; name another folder")
        remedy = f"nothing can be written in {there}, name another folder"
        with refusing(f"{key} must be a folder that can be written", given, remedy):
            tempfile.TemporaryDirectory(dir=there).cleanup()  # permissions alone do not tell


def _check_relative(config: DictConfig) -> None:
    """Require absolute paths where the run joins a Ray that was started in another folder."""
    if (folder := other_folder(config.ray_kwargs.ray_init)) is None:
        return
    given = {key: value for section in WITH_PATHS for key, value in _values(config, section).items()}
    wanted = {key: _absolute(value, is_made=key == WITH_PATHS[0]) for key, value in given.items()}
    found = [key for key, value in wanted.items() if value != given[key]]
    rule = "must be absolute where a run joins a Ray that was started in another folder, whose processes read relative"
    remedy = f"begin the run there, or set {' '.join(f'{key}={as_typed(wanted[key])}' for key in found)}"
    require(not found, f"{', '.join(found)} {rule} paths there", folder, remedy)


def _absolute(value: Any, *, is_made: bool) -> Any:
    """The value, with relative paths of what is here, or `is_made`, written out."""
    if isinstance(value, list):
        return [_absolute(item, is_made=False) for item in value]
    is_path = isinstance(value, str) and {".", "/"} & {*value}
    is_here = is_path and (is_made or os.path.exists(value.rpartition(":")[0] or value))
    return os.path.join(os.getcwd(), value) if is_here else value


def check_resume(run: StartConfig) -> None:
    """Require the folder of a checkpoint with `trainer.resume_mode=resume_path`."""
    given = run.config.trainer.resume_from_path
    if run.config.trainer.resume_mode != "resume_path":
        remedy = "set trainer.resume_mode=resume_path, or leave the path out"
        row = "trainer.resume_from_path", None, "", remedy
        return run.require_values(f"with trainer.resume_mode={run.config.trainer.resume_mode}", row)
    require(
        re.search(rf"(^|/){CHECKPOINT}\d+/*$", str(given)) is not None and (Path(given) / "actor").is_dir(),
        f"trainer.resume_from_path must be the folder {CHECKPOINT}N of a checkpoint with "
        "trainer.resume_mode=resume_path",
        given,
        f"give RUN/{CHECKPOINT}N, or set trainer.resume_mode=auto, which finds the last one of "
        "trainer.default_local_dir",
    )


def checkpoint_to_continue(config: DictConfig) -> Path | None:
    """The folder `global_step_N` that a start continues."""
    trainer = config.trainer
    if trainer.resume_mode == "resume_path":
        return None if trainer.resume_from_path is None else Path(trainer.resume_from_path)
    return newest_checkpoint(Path(trainer.default_local_dir)) if trainer.resume_mode == "auto" else None


def check_continued(run: StartConfig) -> None:
    """Require with `trainer.resume_mode=auto` that the folder's run learnt the same, or that there is none."""
    checkpoint = checkpoint_to_continue(run.config)
    if checkpoint is None:
        return
    load_driver_state(checkpoint)
    for key, before, now in _differences(checkpoint, OPTIMIZER, run.config):
        remedy = "set it, or start a run from the exported weights"
        require_value(key, now, before, "to continue a checkpoint, which has its moments", remedy)
    if run.config.trainer.resume_mode != "auto":
        return
    found = [*_differences(checkpoint, LEARNT, run.config), *_other_prompts(checkpoint, run)]
    steps, is_other = num_steps(run), "must hold no run of another model, reward, objective or data"
    if not found and steps <= _step_of(checkpoint):
        found = list(_differences(checkpoint, PACE, run.config))
        is_other = f"must hold no run that has taken its {steps} steps with other settings"
    if found:
        folder = run.config.trainer.default_local_dir
        raise ValueError(
            f"trainer.default_local_dir {is_other}, which trainer.resume_mode=auto would continue after step "
            f"{_step_of(checkpoint)}, got {folder!r} with {_shown(found)}; name a folder for this run with "
            "trainer.experiment_name or trainer.default_local_dir, or set trainer.resume_mode=disable, which moves the "
            f"files of that run to {_aside(Path(folder))}. To continue it anyway: "
            f"trainer.resume_mode=resume_path trainer.resume_from_path={checkpoint}"
        )


def continue_notes(run: StartConfig) -> list[str]:
    """A sentence that says what a start continues, and with what other values."""
    checkpoint = checkpoint_to_continue(run.config)
    if checkpoint is None:
        return []
    step, steps = _step_of(checkpoint), num_steps(run)
    when = datetime.fromtimestamp((checkpoint / "digen.json").stat().st_mtime)
    note = f"continues {checkpoint.parent} after step {step} of {steps}, saved on {when:%Y-%m-%d at %H:%M}"
    if steps <= step:
        note += "; nothing is left to train, unless trainer.total_training_steps is raised"
    found = [*_differences(checkpoint, LEARNT + PACE, run.config), *_other_prompts(checkpoint, run)]
    return [f"{note}; other than before: {_shown(found)}" if found else note]


def claim(config: DictConfig) -> tuple[IO[str], list[str]]:
    """Hold the run's folder, and move the files of a run that this start does not continue -> the lock, which holds as
    long as it is open, and notes. ValueError if a live process holds the folder, or the files cannot be moved."""
    run_dir = Path(config.trainer.default_local_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    lock, notes = _hold(run_dir)
    checkpoint = checkpoint_to_continue(config)
    if checkpoint is not None and checkpoint.resolve().parent == run_dir.resolve():
        for name in (METRICS, WARNINGS):
            read_lines(run_dir / name)  # a damaged line is told now
        publish(run_dir, _step_of(checkpoint))  # resume_path may name an earlier one
    elif (run_dir / POINTER).is_file() or ((run_dir / METRICS).is_file() and (run_dir / METRICS).stat().st_size):
        notes.append(f"{run_dir} held a run that is not continued; its files are now in {_set_aside(run_dir)}")
    with refusing("trainer.default_local_dir must hold no folder stop or end.json", str(run_dir), "remove it"):
        (run_dir / STOP).unlink(missing_ok=True)
        (run_dir / END).unlink(missing_ok=True)
    return lock, notes


def _hold(run_dir: Path) -> tuple[IO[str], list[str]]:
    held = HELD.get(run_dir.resolve())
    if held is not None and not held.closed:
        return held, []
    lock = open(run_dir / LOCK, "a+", encoding="utf-8")  # noqa: SIM115 - open as long as the run
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        raise ValueError(
            f"trainer.default_local_dir must be held by one run, got {str(run_dir)!r}, held by {lock.read().strip()}; "
            "end that run, or name another folder with trainer.experiment_name or trainer.default_local_dir"
        ) from None
    except OSError as error:
        return lock, [
            f"the file system of {run_dir} has no locks ({error.strerror}): nothing refuses a second run in this "
            "folder while this one lives"
        ]
    HELD[run_dir.resolve()] = lock
    with refusing("trainer.default_local_dir must lie on a disk with free space", str(run_dir), "make room there"):
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {socket.gethostname()} since {datetime.now():%Y-%m-%d %H:%M:%S}\n")
        lock.flush()
    return lock, []


def _aside(run_dir: Path) -> Path:
    """Folder beside the run's, named by the time of its newest start, to which its files are moved."""
    known = next(path for name in (START, METRICS, POINTER) if (path := run_dir / name).is_file())
    began = datetime.fromtimestamp(known.stat().st_mtime)
    folder = run_dir.resolve()
    return folder.with_name(f"{folder.name}-{began:%Y-%m-%d_%H-%M-%S}")


def _set_aside(run_dir: Path) -> Path:
    target = _aside(run_dir)
    rule = "trainer.default_local_dir must be a folder whose earlier run can be moved beside it"
    with refusing(rule, str(run_dir), "move its files, or name another folder"):
        target.mkdir(exist_ok=True)
        for pattern in WRITTEN:
            for path in sorted(run_dir.glob(pattern)):
                path.rename(target / path.name)
    return target


def _step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix(CHECKPOINT))


def _differences(checkpoint: Path, keys: tuple[str, ...], config: DictConfig) -> Iterator[tuple[str, Any, Any]]:
    """(key, value of the run that wrote the checkpoint, value of this start) where they differ. A key that the run did
    not have is not compared: it is of a newer version."""
    path = checkpoint / RUN_FILE
    known = json_in(path, "config") if path.is_file() else {"config": {}}
    written, recorded = OmegaConf.create(known["config"]), known.get("weights", {})
    for key in keys:
        before, after = _values(written, key), _values(config, key)
        for name in sorted(before.keys() | after.keys()) if before else ():
            values = before.get(name, MISSING), after.get(name, MISSING)
            if values[0] == values[1] or name.rpartition(".")[2] in NOT_COMPARED:
                continue
            if name not in WEIGHTS:
                yield name, *values
            elif how := _other_weights(recorded.get(name), *values):
                yield name, f"{values[0]}{how}", values[1]


def _other_weights(recorded: str | None, before: Any, after: Any) -> str:
    """Difference of two folders with weights, for a message; "" if they hold the same."""
    now, then = fingerprint(after), recorded or fingerprint(before)
    if now is None or then is None:
        return f", compared by name{'' if now is None else ', because it is gone and not recorded'}"
    return "" if now == then else f", compared by {'fingerprints in ' + RUN_FILE if recorded else 'files'}"


def _values(config: DictConfig, key: str) -> dict[str, Any]:
    """Key -> value of everything at `key` and below, without rewards of weight 0; empty if there is no such key."""
    value = OmegaConf.select(config, key, default=MISSING)
    if value == MISSING:
        return {}
    plain: Any = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
    if key in (FUNCTIONS, RECIPE_FUNCTIONS) and isinstance(plain, dict):
        plain = {name: entry for name, entry in plain.items() if _counts(entry)}
    return dict(leaves(key, json.loads(json.dumps(plain, default=str))))


def _counts(entry: Any) -> bool:
    """True if a reward has a weight; one without is only looked at."""
    weight = entry.get("weight", 1) if isinstance(entry, dict) else entry
    return weight is not None and weight != 0


def _other_prompts(checkpoint: Path, run: StartConfig) -> Iterator[tuple[str, Any, Any]]:
    """The difference of the prompts' files, if they hold others than those that the checkpoint was drawn from."""
    if run.config.data.filter_overlong_prompts and not has_checkpoint(run.config):
        return  # which prompts are too long is not known here
    train, drawn_from = prompts_of(run, "train"), load_driver_state(checkpoint).drawn_from
    if drawn_from != digest(without(train.prompts, train.too_long)):
        yield "prompts of data.train_files", "others", run.config.data.train_files


def _shown(found: list[tuple[str, Any, Any]]) -> str:
    return first_of([f"{key}={after} (before: {before})" for key, before, after in found], MAX_SHOWN)


def save_start(config: DictConfig, notes: Sequence[str]) -> None:
    """Write `RUN_DIR/start.json`, what the newest start of a run was given, while Hydra runs the job; read by the run's
    report. `words`: the command line after `python -m verl.trainer.main_ppo`; `changes`: [key, value of the recipes
    alone, value of the run] for each value that the other words changed; `config`: with interpolations resolved."""
    words = command_line(config)
    of_recipes = compose(config.hydra.job.config_name, overrides=[word for word in words if GROUP_WORD.match(word)])
    run_dir = Path(config.trainer.default_local_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    found = {
        "words": words,
        "at_s": time.time(),
        "recipes": named_recipes(config),
        "changes": list(changes(of_recipes, config)),
        "config": _plain(config, resolve=True),
        "notes": list(notes),
        "versions": {"python": platform.python_version(), **installed()},
    }
    replace_text(run_dir / START, json.dumps(found, default=str))


def changes(before: DictConfig, after: DictConfig) -> Iterator[tuple[str, Any, Any]]:
    """(key, value before, value after) of every value that differs; interpolations as they are written."""
    old, new = (dict(leaves("", _plain(config, resolve=False))) for config in (before, after))
    for key in sorted(old.keys() | new.keys()):
        values = old.get(key, MISSING), new.get(key, MISSING)
        if values[0] != values[1]:
            yield key, *values


def _plain(config: DictConfig, *, resolve: bool) -> dict[str, Any]:
    """The config as plain values, without Hydra's own section."""
    shown = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
    values: Any = OmegaConf.to_container(shown, resolve=resolve)
    return {str(key): value for key, value in values.items()}

# SPDX-License-Identifier: Apache-2.0
"""Rules for the folders that a run writes, and the checkpoint it resumes from."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from omegaconf import DictConfig

from verl_digen.require import require

STEP_PREFIX = "global_step_"
"""Prefix of a checkpoint's folder, before the number of its step."""


def check_run_dir(config: DictConfig) -> None:
    """Require that the run's folder is a folder, or can be made."""
    for key, given in (
        ("trainer.default_local_dir", config.trainer.default_local_dir),
        ("trainer.rollout_data_dir", config.trainer.rollout_data_dir),
    ):
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
        try:
            tempfile.TemporaryDirectory(dir=there).cleanup()  # permissions alone do not tell
        except OSError as error:
            raise ValueError(
                f"{key} must be a folder that can be written, got {given!r}; nothing can be written in {there} "
                f"({error.strerror}), name another folder"
            ) from error


def check_resume(config: DictConfig) -> None:
    """Require the folder of a checkpoint with `trainer.resume_mode=resume_path`."""
    given = config.trainer.resume_from_path
    if config.trainer.resume_mode != "resume_path":
        require(
            given is None,
            "trainer.resume_from_path needs trainer.resume_mode=resume_path",
            given,
            "set trainer.resume_mode=resume_path, or leave the path out",
        )
        return
    require(
        isinstance(given, str) and Path(given).name.startswith(STEP_PREFIX) and (Path(given) / "actor").is_dir(),
        f"trainer.resume_from_path must be the folder {STEP_PREFIX}N of a checkpoint with "
        "trainer.resume_mode=resume_path",
        given,
        f"give RUN/{STEP_PREFIX}N, or set trainer.resume_mode=auto, which finds the last one of "
        "trainer.default_local_dir",
    )

# SPDX-License-Identifier: Apache-2.0
"""Snapshots of a training that is long enough to be interrupted: the same command goes on where it stopped."""

import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

logger = logging.getLogger(__name__)

EVERY_S = 60.0


class Snapshot:
    """State of one training in a file: step, parts with a `state_dict`, both random generators.

    Args:
        path: its file; None keeps nothing.
        settings: what the training was asked for; a snapshot of another training is refused.
        every_s: least seconds between two writes.
    """

    def __init__(self, path: Path | None, settings: Mapping[str, Any], every_s: float = EVERY_S):
        self._path, self._settings, self._every_s = path, dict(settings), every_s
        self._written_s = time.monotonic()

    def resume(self, parts: Mapping[str, Any], rng: np.random.Generator) -> int:
        """Load the parts and both generators from the file, if there is one -> steps already taken.

        Raises:
            ValueError: the file is of a training with other settings.
        """
        if self._path is None or not self._path.is_file():
            return 0
        state = torch.load(self._path, weights_only=True)
        if state["settings"] != self._settings:
            raise ValueError(
                f"--snapshots must be of a training with the settings {self._settings}, got one with "
                f"{state['settings']} in {self._path}; remove that file, or name another folder"
            )
        for name, part in parts.items():
            part.load_state_dict(state["parts"][name])
        rng.bit_generator.state = state["numpy"]
        torch.set_rng_state(state["torch"])
        logger.info("going on after step %d of %s", state["step"], self._path)
        return state["step"]

    def keep(self, step: int, parts: Mapping[str, Any], rng: np.random.Generator, *, is_last: bool) -> None:
        """Write the state after `step` steps, if it is due or the last one."""
        is_due = is_last or time.monotonic() - self._written_s >= self._every_s
        if self._path is None or not is_due:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        state = {
            "step": step,
            "settings": self._settings,
            "parts": {name: part.state_dict() for name, part in parts.items()},
            "numpy": rng.bit_generator.state,
            "torch": torch.get_rng_state(),
        }
        partial = self._path.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(self._path)  # a kill leaves the old one or the new one
        self._written_s = time.monotonic()

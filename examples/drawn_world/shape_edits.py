# SPDX-License-Identifier: Apache-2.0
"""Edits of the drawn world, one after the other: "make it red", then "move it to the left", and so on.

- The first instruction is the prompt; its ground truth is that of the reward `shape_edit`, "target" and "changed". Each
  further one is a random edit of the scene that the instructions so far ask for, whatever the pictures show, so that
  what an early turn got wrong counts in later ones.
- A turn earns the reward `shape_edit` of its picture over `num_turns`, so an episode earns the mean, 0 to 1. Details:
  `followed` and `kept`, means over its turns.
- `latency_s` is simulated: each turn sleeps for a lognormal time of that mean. It stands for an environment that
  computes elsewhere, such as a judge or a simulator, and changes no reward.

Invariant (tests/examples/test_drawn_world.py): instructions and times depend on the prompt, the seed and, times
alone, on the picture.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass
from typing import Annotated, Any
from zlib import crc32

import numpy as np
from drawn_edits import Edit, apply, edits_of, instruction, parse_instruction
from drawn_scenes import Scene, caption, parse_caption
from shape_edit_reward import compute_score

from verl_digen.environments.base import Environment, Instruction, Picture, TurnResult
from verl_digen.require import In, check_fields
from verl_digen.types import PromptRow


@dataclass(frozen=True)
class ShapeEditsConfig:
    """Settings of `shape_edits`."""

    num_turns: Annotated[int, In("[1, inf]")] = 3
    """Turns of an episode; at most `digen.environment.max_turns`."""
    latency_s: Annotated[float, In("[0, 3600]")] = 0.0
    """Mean of the simulated time of a turn, s. 0 sleeps never."""
    latency_spread: Annotated[float, In("[0, 3]")] = 0.5
    """Standard deviation of the logarithm of that time. At 3, half of the times are below a 90th of the mean."""

    def __post_init__(self) -> None:
        check_fields(self, "")


class ShapeEdits(Environment):
    """See the module."""

    config_class = ShapeEditsConfig

    @classmethod
    def num_turns(cls, config: ShapeEditsConfig) -> int:
        return config.num_turns

    def __init__(self, config: ShapeEditsConfig, shared: Any = None):
        super().__init__(config, shared)
        self._seed = 0
        self._scene: Scene
        """Scene that the instructions so far ask for."""
        self._edit: Edit
        """Edit that the turn's instruction asks for."""
        self._turns: list[dict[str, float]] = []

    def reset(self, row: PromptRow, seed: int) -> Instruction:
        """Begin with the prompt.

        Raises:
            ValueError: a prompt that is no edit of the drawn world, or another ground truth than its scene.
        """
        self._seed = seed
        self._edit = parse_instruction(row.text)
        truth = row.ground_truth
        if not isinstance(truth, dict) or set(truth) != {"target", "changed"}:
            raise ValueError(
                'the ground truth of a prompt of shape_edits must be a mapping of "target" and "changed", got '
                f"{truth!r}"
            )
        self._scene = parse_caption(truth["target"])
        if truth["changed"] != self._edit.attribute or apply(self._scene, self._edit) != self._scene:
            raise ValueError(
                f"the ground truth of a prompt of shape_edits must be the scene after its edit, got {truth!r} for "
                f"{row.text!r}"
            )
        return Instruction(row.text)

    async def step(self, picture: Picture) -> TurnResult:
        """Score the picture and ask for the next edit."""
        await asyncio.sleep(self._latency_s(picture))
        truth = {"target": caption(self._scene), "changed": self._edit.attribute}
        self._turns.append(compute_score("shape_edits", picture, truth))
        details = {name: float(np.mean([turn[name] for turn in self._turns])) for name in ("followed", "kept")}
        reward = self._turns[-1]["score"] / self.config.num_turns
        if len(self._turns) == self.config.num_turns:
            return TurnResult(reward, True, details=details)
        return TurnResult(reward, False, self._next(), details)

    def _next(self) -> Instruction:
        """Draw the next edit, of another attribute than the last one."""
        rng = np.random.default_rng([self._seed % 2**32, len(self._turns)])
        possible = [edit for edit in edits_of(self._scene) if edit.attribute != self._edit.attribute]
        self._edit = possible[rng.integers(len(possible))]
        self._scene = apply(self._scene, self._edit)
        return Instruction(instruction(self._edit))

    def _latency_s(self, picture: Picture) -> float:
        """Simulated time of the turn; differs between the samples of a group by their pictures."""
        mean, spread = self.config.latency_s, self.config.latency_spread
        if mean == 0:
            return 0.0
        rng = np.random.default_rng([self._seed % 2**32, len(self._turns), crc32(picture.tobytes())])
        return float(rng.lognormal(math.log(mean) - spread**2 / 2, spread))

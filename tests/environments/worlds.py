# SPDX-License-Identifier: Apache-2.0
"""Small environments of tests."""

import asyncio
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_digen.environments.base import Environment, Instruction, Picture, TurnResult
from verl_digen.types import PromptRow


@dataclass(frozen=True)
class BrighterConfig:
    max_turns: int = 3
    latency_s: float = 0.0


class Brighter(Environment):
    """Environment of text: one to `max_turns` turns, as the picture's content says; the reward is its light."""

    config_class = BrighterConfig
    edits = False

    def reset(self, row: PromptRow, seed: int) -> Instruction:
        self.text, self.num_turns = row.text, 0
        return Instruction(row.text)

    async def step(self, picture: Picture) -> TurnResult:
        await asyncio.sleep(self.config.latency_s)
        self.num_turns += 1
        total = int(picture.sum())
        done = self.num_turns > total % self.config.max_turns
        instruction = None if done else Instruction(f"{self.text}, brighter than {total}")
        return TurnResult(float(picture.mean()) / 255, done, instruction, {"light": float(picture.mean())})


class Editor(Brighter):
    """Like `Brighter`, with instructions that edit pictures."""

    edits = True


class Endless(Brighter):
    """Like `Brighter`, with a number of turns that cannot be told."""

    @classmethod
    def num_turns(cls, config: BrighterConfig) -> int:
        return config.max_turns // 0


@dataclass(frozen=True)
class MortalConfig:
    folder: str = ""
    """Folder in which the first process to reach turn 1 leaves a file, and dies."""


class Mortal(Environment):
    """Environment of three turns whose worker dies once, at its second turn."""

    config_class = MortalConfig
    edits = False

    def reset(self, row: PromptRow, seed: int) -> Instruction:
        self.pictures: list[int] = []
        return Instruction(f"{row.text} {seed}")

    async def step(self, picture: Picture) -> TurnResult:
        self.pictures.append(int(picture.sum()))
        if len(self.pictures) == 2:
            try:
                (Path(self.config.folder) / "died").touch(exist_ok=False)
            except FileExistsError:
                pass
            else:
                os.kill(os.getpid(), signal.SIGKILL)
        return TurnResult(float(len(self.pictures)), len(self.pictures) == 3, Instruction(f"after {self.pictures}"))


class Faulty(Environment):
    """Environment that always fails."""

    edits = False

    def reset(self, row: PromptRow, seed: int) -> Instruction:
        return Instruction(row.text)

    async def step(self, picture: Picture) -> Any:
        raise ConnectionError("the simulator is down")


class Wrong(Faulty):
    """Environment whose answers are malformed, and which cannot be closed."""

    async def step(self, picture: Picture) -> TurnResult:
        return TurnResult(float("nan") if picture.max() == 1 else 0.0, False)

    def close(self) -> None:
        raise ConnectionError("the simulator is gone")


class Fickle(Environment):
    """Environment that asks for something else each time it is made."""

    edits = False
    num_made = 0

    def reset(self, row: PromptRow, seed: int) -> Instruction:
        type(self).num_made += 1
        return Instruction(f"made {self.num_made}")

    async def step(self, picture: Picture) -> TurnResult:
        return TurnResult(0.0, False, Instruction("on"))


class Stepless(Environment):
    """Environment without `step`."""

    def reset(self, row: PromptRow, seed: int) -> Instruction:
        return Instruction(row.text)


class Sync(Stepless):
    """Environment whose `step` is synchronous."""

    def step(self, picture: Picture) -> TurnResult:  # type: ignore[override]
        return TurnResult(float(picture.max()), True)


class Seedless(Sync):
    """Environment whose `reset` takes no seed."""

    def reset(self, row: PromptRow) -> Instruction:  # type: ignore[override]
        return Instruction(row.text)


class Sharing(Sync):
    """Environment whose `make_shared` is no class method."""

    def make_shared(self, config: Any) -> None:  # type: ignore[override]
        """Read no class."""

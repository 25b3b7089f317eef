# SPDX-License-Identifier: Apache-2.0
"""`Environment`: the task of one episode, which answers every picture with a reward and the next instruction; an
example is in docs/environments.md.

- One instance lives for one episode, in an environment worker: a Ray actor that holds many episodes at once.
- All turns of an episode have one weight version. The episode's reward is the sum of its turns' rewards.
- A worker that dies costs time, not episodes: the environment is made again on another one, `reset` with the same seed,
  and given the pictures that the episode has. If it then asks for something else, the episode starts afresh.
- It may raise: the turn is tried again, within `digen.environment.max_retries`, and then the episode fails. It never
  returns a 0 for a failure.
"""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from verl_digen.reward.base import NoSettings
from verl_digen.types import PromptRow

PREVIOUS = "previous"
"""Entry of `Instruction.images`: the picture that the last turn generated."""

Picture = NDArray[np.uint8]
"""[H, W, 3] uint8, or [F, H, W, 3] for a video."""


@dataclass(frozen=True)
class Instruction:
    """Inputs of one turn."""

    text: str
    images: tuple[str | Picture, ...] | None = None
    """Images that the turn edits, in order: references as in a prompt's `images`, `PREVIOUS`, or pictures. None: the
    row's own images in the first turn and (PREVIOUS,) in later ones, or none if the environment's `edits` is false."""


@dataclass(frozen=True)
class TurnResult:
    """Answer of the environment to one picture."""

    reward: float
    """Reward of this turn, finite. 0 for every turn but the last is common."""
    done: bool
    """True ends the episode."""
    instruction: Instruction | None = None
    """Inputs of the next turn; needed unless `done`."""
    details: Mapping[str, float] = field(default_factory=dict)
    """Numbers to log; the last turn's become parts `environment/NAME` of the sample's reward."""


class Environment(ABC):
    """Base class of environments. `config`: an instance of `config_class`, from `digen.environment.options`; `shared`:
    what `make_shared` returned in this worker, e.g. a judge model."""

    config_class: ClassVar[type] = NoSettings
    """Dataclass of settings: the keys of `digen.environment.options`."""
    edits: ClassVar[bool] = True
    """True: instructions edit images by default, and the model must read them. False: they carry text alone."""

    @classmethod
    def num_turns(cls, config: Any) -> int | None:
        """Most turns that an episode with these settings takes, compared with `digen.environment.max_turns` before the
        start; None: not known before."""
        return None

    @classmethod
    def make_shared(cls, config: Any, device: torch.device) -> Any:
        """Make what all episodes of a worker share, once per worker, on its device; None by default."""
        return None

    def __init__(self, config: Any, shared: Any = None):
        self.config, self.shared = config, shared

    @abstractmethod
    def reset(self, row: PromptRow, seed: int) -> Instruction | Awaitable[Instruction]:
        """Begin the episode; called once, first. `seed` is equal for all episodes of a group, so that they start alike,
        and for an episode that is made again."""

    @abstractmethod
    async def step(self, picture: Picture) -> TurnResult:
        """Judge the turn's picture. Episodes share the worker's event loop; a sync `step` runs in a thread."""

    def close(self) -> None:  # noqa: B027 - optional
        """Free what the episode holds; called once, at its end, however it ends, unless its process dies."""

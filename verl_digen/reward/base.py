# SPDX-License-Identifier: Apache-2.0
"""`Reward`: a scorer that is made once per process and scores batches, or whole groups.

    class Brightness(Reward):
        def score(self, batch):
            return [float(sample.pixels.mean()) / 255 for sample in batch]

- `score` gets 1 to `max_batch_size` samples of any prompts; with `scope = "group"` all samples of one prompt at once.
- It returns one entry per sample, in order: a number, or a mapping with `score` and numeric details. An entry of a
  sample that alone failed may be the exception.
- A sync `score` runs in a thread, an async one in the process's event loop; one call at a time.
- With `timeshare` it sleeps while replicas generate and the trainer trains: `sleep` frees its device memory, `wake`
  brings it back, and no `score` runs in between. The built-in ones move the modules among its attributes.
- It may raise: the samples are tried again one by one, a group as a whole, and then fail. It never returns a 0 for a
  failure.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from verl_digen.reward.held import HeldMemory, held_modules
from verl_digen.types import PromptRow, RewardInput

Result = float | Mapping[str, Any]
"""A number, or a mapping with `score` and details."""


class RewardUnavailable(RuntimeError):
    """Error of a reward that can score no sample at present, such as a server that does not answer.

    Samples that fail with it are tried again together, not one by one.
    """


@dataclass(frozen=True)
class NoSettings:
    """Settings of a reward that has none."""


class Reward(ABC):
    """Base class of rewards; see the module.

    Args:
        config: an instance of `config_class`, from the entry's arguments.
        device: the process's device; the CPU where `num_gpus` is 0.
    """

    scope: ClassVar[Literal["sample", "group"]] = "sample"
    config_class: ClassVar[type] = NoSettings
    """Dataclass of settings: the arguments of the entry in `digen.reward.functions`."""

    packages: ClassVar[tuple[str, ...]] = ()
    """Packages that it imports when it is made, beyond those of every installation."""

    @classmethod
    def check_row(cls, arguments: Mapping[str, Any], row: PromptRow) -> None:
        """Raise ValueError if samples of a prompt could not be scored; called for every prompt before a run starts."""
        return

    @classmethod
    def reads_latents(cls, arguments: Mapping[str, Any]) -> bool:
        """True if `score` needs `RewardInput.latents`. Replicas send them where a reward of the run does."""
        return False

    @classmethod
    def settings_class(cls, arguments: Mapping[str, Any]) -> type:
        """Dataclass of settings for the given arguments, where one of them decides which others there are."""
        return cls.config_class

    def __init__(self, config: Any, device: torch.device):
        self.config, self.device = config, device
        self._held: HeldMemory | None = None
        """Made by the first `sleep`."""

    def take_counts(self) -> Mapping[str, int]:
        """Counts of events since the last time, such as retries; `reward_calls/NAME_COUNT` shows them."""
        return {}

    def modules(self) -> list[nn.Module]:
        """Modules on the device, whose weights and buffers leave it while the reward sleeps; those that it holds."""
        return held_modules(self)

    def sleep(self) -> None:
        """Free the device memory, with `timeshare`. Override both methods for what is not in `modules`."""
        if self._held is None:
            self._held = HeldMemory(self.modules(), self.device)
        self._held.release()

    def wake(self) -> None:
        """Bring back what `sleep` has freed; called only after it."""
        assert self._held is not None
        self._held.restore()

    @abstractmethod
    def score(
        self, batch: Sequence[RewardInput]
    ) -> Sequence[Result | Exception] | Awaitable[Sequence[Result | Exception]]:
        """Score samples; see the module for what a batch holds."""

# SPDX-License-Identifier: Apache-2.0
"""Windows: the stochastic denoise steps of a group, and the trained ones among them, at least one and never the last
step. Steps are numbered 0 .. T-1, from noise to image.

There is one window per group, a function of (run seed, uid) and, if the range moves, of the optimizer step: samples
with different windows could not be compared.
"""

import random
from dataclasses import dataclass
from typing import Annotated

from verl_digen.algorithms.noise import keyed_seed
from verl_digen.require import In, OneOf, Section

KINDS = ("all", "consecutive", "fraction")


@dataclass(frozen=True)
class Window:
    """The window of one group."""

    sde_steps: tuple[int, ...]
    """Steps that take noise, ascending; all others take the ODE step."""
    train_steps: tuple[int, ...]
    """Steps whose log-probs are trained, ascending; a subset of `sde_steps`."""


@dataclass(frozen=True)
class WindowConfig(Section, key="digen.window"):
    """`digen.window`: how windows are drawn."""

    kind: Annotated[str, OneOf(KINDS)] = "all"
    """all: every step but the last is stochastic and trained (Flow-GRPO).
    consecutive: `size` steps in a row within `range`; others are ODE steps (Flow-GRPO-Fast, MixGRPO).
    fraction: every step but the last is stochastic, and a random `fraction` of them is trained (DanceGRPO)."""
    size: Annotated[int, In("[1, inf]"), "2 or 3 is usual"] = 2
    """consecutive: steps in the window. 2 or 3 in Flow-GRPO-Fast, 4 in MixGRPO."""
    range: tuple[int, int] | None = None
    """consecutive: (lo, hi): the window lies in steps lo .. hi-1. null: the first half, (0, T // 2)."""
    shift_every: Annotated[int | None, In("[1, inf]"), "null keeps the window where it is"] = None
    """consecutive: `range` moves by one denoise step every shift_every optimizer steps, and starts over at the
    schedule's end (MixGRPO, with size = hi - lo: 25, MixGRPO-Flash 20). null: it stays."""
    fraction: Annotated[float, In("(0, 1]")] = 0.6
    """fraction: share of the stochastic steps that train, at least one. 0.6 in DanceGRPO."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.range is not None:
            if len(self.range) != 2 or not 0 <= self.range[0] < self.range[1]:
                raise ValueError(f"digen.window.range must be [lo, hi] in steps, 0 <= lo < hi, got {list(self.range)}")
            self._check_room(*self.range)

    def validate_for(self, num_steps: int) -> None:
        """ValueError unless all windows in a schedule of `num_steps` denoise steps end before its last."""
        if self.kind != "consecutive":
            return
        lo, hi = self.range_for(num_steps)
        self._check_room(lo, hi)
        if hi > num_steps - 1:
            raise ValueError(
                f"digen.window.range must end at {num_steps - 1} or before with {num_steps} denoise steps, "
                f"since the last is never trained, got [{lo}, {hi}]; lower its end or sample more steps"
            )

    def num_stochastic(self, num_steps: int) -> int:
        """Stochastic steps of each window in a schedule of `num_steps`."""
        return self.size if self.kind == "consecutive" else num_steps - 1

    def range_for(self, num_steps: int) -> tuple[int, int]:
        """(lo, hi) before it moves, in a schedule of `num_steps`: `range`, or the first half."""
        if self.range is None:
            return 0, num_steps // 2
        lo, hi = self.range
        return lo, hi

    def _check_room(self, lo: int, hi: int) -> None:
        if self.kind == "consecutive" and hi - lo < self.size:
            raise ValueError(
                f"digen.window.size must be <= the {hi - lo} steps of digen.window.range [{lo}, {hi}], "
                f"got {self.size}; lower the size or widen the range"
            )


def draw_window(config: WindowConfig, *, run_seed: int, uid: str, num_steps: int, step: int) -> Window:
    """The window of group `uid` in a schedule of `num_steps`. `step` counts the optimizer steps committed so far.
    Errors as `WindowConfig.validate_for`.

    Example:
        draw_window(WindowConfig(), run_seed=0, uid="g7", num_steps=4, step=0)
        # Window(sde_steps=(0, 1, 2), train_steps=(0, 1, 2))
    """
    config.validate_for(num_steps)
    rng = random.Random(keyed_seed("window", int(run_seed), str(uid)))
    candidates = range(num_steps - 1)
    if config.kind == "consecutive":
        lo, hi = config.range_for(num_steps)
        if config.shift_every is not None:
            moved = step // config.shift_every % (num_steps - hi)
            lo, hi = lo + moved, hi + moved
        start = rng.randint(lo, hi - config.size)
        steps = tuple(range(start, start + config.size))
        return Window(sde_steps=steps, train_steps=steps)
    if config.kind == "fraction":
        num_trained = max(1, round(config.fraction * len(candidates)))
        return Window(tuple(candidates), tuple(sorted(rng.sample(candidates, num_trained))))
    return Window(tuple(candidates), tuple(candidates))

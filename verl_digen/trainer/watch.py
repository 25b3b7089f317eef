# SPDX-License-Identifier: Apache-2.0
"""Gold rewards of validations: the alarm (`verl_digen.reward.hacking`), its log lines, and its metrics.

| metric | meaning |
| --- | --- |
| `hacking/warning` | 1: over the newest validations the reward rises and a gold reward falls |
| `hacking/verdict` | 1: it has been so in each of the newest validations (`Rules.patience`) |
| `hacking/reward_trend`, `hacking/NAME_trend` | trend over the window, in standard errors; from the sixth one on |
| `hacking/NAME_best`, `hacking/NAME_best_step` | highest value of gold reward NAME, and the step of that validation |

With `digen.reward.stop_on_hacking` a verdict ends the run after the step, with exit code 0, and the checkpoint of each
gold reward's best validation is kept, beside the newest `trainer.max_actor_ckpt_to_keep`.

Invariant (tests/trainer/test_watch.py): a run that is resumed in its folder judges as one that was never interrupted.
"""

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path

from verl_digen.config import RewardConfig
from verl_digen.observe.run_files import checkpoint_dir
from verl_digen.reward.hacking import RULES, Finding, Point, Rules, best, judge

logger = logging.getLogger(__name__)


class RewardWatch:
    def __init__(self, reward: RewardConfig, run_dir: Path, rules: Rules = RULES):
        self._golds, self._stops = reward.golds, reward.stop_on_hacking
        self._rules, self._run_dir = rules, run_dir
        self._by_step: dict[int, Point] = {}
        """Step -> the newest validation after it, in order."""

    @property
    def _best(self) -> dict[str, Point]:
        """Gold reward -> its best validation."""
        points = [*self._by_step.values()]
        return {name: best(points, name) for name in self._golds if points}

    @property
    def kept_checkpoints(self) -> list[str]:
        """Folders of the checkpoints to keep, as the engine was given them; before training there is none."""
        steps = sorted({point.step for point in self._best.values()} - {0})
        return [str(checkpoint_dir(self._run_dir, step) / "actor") for step in steps]

    def observe(self, step: int, metrics: Mapping[str, float]) -> tuple[dict[str, float], bool]:
        """Judge the validation after `step` optimizer steps by its `val/*` -> (`hacking/*`, True if the run should
        stop)."""
        missing = [name for name in self._golds if f"val/reward_{name}" not in metrics]
        if missing:
            logger.warning(
                "validation after %d steps: no sample was scored by %s, so it does not count for the alarm on hacking",
                *(step, ", ".join(missing)),
            )
            return {}, False
        self._add(step, metrics)
        finding = judge([*self._by_step.values()], self._rules)
        stops = finding.verdict == "hacking" and self._stops
        if finding.falling:
            logger.warning("%s", self._told(step, finding, stops=stops))
        return self._metrics(finding), stops

    def load(self, rows: Iterable[Mapping[str, float]]) -> None:
        """Take over the validations of a run that is resumed, from the lines of its `metrics.jsonl`."""
        for row in rows:
            if {"val/reward", *(f"val/reward_{name}" for name in self._golds)} <= row.keys():
                self._add(int(row["step"]), row)

    def _add(self, step: int, metrics: Mapping[str, float]) -> None:
        golds = {name: float(metrics[f"val/reward_{name}"]) for name in self._golds}
        self._by_step[step] = Point(step, float(metrics["val/reward"]), golds)

    def _metrics(self, finding: Finding) -> dict[str, float]:
        found = {
            "hacking/warning": float(bool(finding.falling)),
            "hacking/verdict": float(finding.verdict == "hacking"),
        }
        if finding.verdict != "too_few":
            found["hacking/reward_trend"] = finding.reward_trend
            found |= {f"hacking/{name}_trend": value for name, value in finding.gold_trends.items()}
        for name, point in self._best.items():
            found |= {f"hacking/{name}_best": point.golds[name], f"hacking/{name}_best_step": float(point.step)}
        return found

    def _told(self, step: int, finding: Finding, *, stops: bool) -> str:
        golds, highest = self._by_step[step].golds, self._best
        falls = "; ".join(
            f"{name} falls ({finding.gold_trends[name]:.1f} standard errors) and is {golds[name]:.4f}, at best "
            f"{highest[name].golds[name]:.4f} {self._place(highest[name].step)}"
            for name in finding.falling
        )
        text = (
            f"validation after {step} steps: the reward rises ({finding.reward_trend:+.1f} standard errors) while the "
            f"gold reward {falls}. The reward may be hacked"
        )
        if stops:
            return (
                f"{text}, as in each of the newest validations ({self._rules.patience}): the run ends here "
                "(digen.reward.stop_on_hacking=true). To continue anyway, start again with "
                "digen.reward.stop_on_hacking=false trainer.resume_mode=auto"
            )
        return text

    def _place(self, step: int) -> str:
        """Name the validation after `step`, and with `stop_on_hacking` its checkpoint."""
        if step == 0:
            return "before training"
        folder = checkpoint_dir(self._run_dir, step)
        return f"after step {step}" + (f" (kept: {folder})" if self._stops and folder.is_dir() else "")

# SPDX-License-Identifier: Apache-2.0
"""Gold rewards of validations: the alarm (`verl_digen.reward.hacking`), its log lines, metrics, and its checkpoint.

| metric | meaning |
| --- | --- |
| `hacking/warning` | 1: over the newest validations the reward rises and a gold reward falls |
| `hacking/verdict` | 1: it has been so in each of the newest validations (`Rules.patience`) |
| `hacking/reward_trend`, `hacking/NAME_trend` | trend over the window, in standard errors; from the sixth one on |
| `hacking/NAME_best`, `hacking/NAME_best_step` | highest value of gold reward NAME, and the step of that validation |

With `digen.reward.stop_on_hacking` a verdict ends the run after the step, with exit code 0, and the checkpoint of each
gold reward's best validation is kept, beside the newest `trainer.max_actor_ckpt_to_keep`.

Invariant (tests/trainer/test_watch.py): a resumed run judges as one that was never interrupted.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path

from verl_digen.config import RewardConfig
from verl_digen.reward.hacking import RULES, Finding, HackingAlarm, Rules
from verl_digen.trainer.checkpoint import replace_text

logger = logging.getLogger(__name__)

STATE = "watch.json"
"""File of the alarm's state in a checkpoint."""


class RewardWatch:
    def __init__(self, reward: RewardConfig, run_dir: Path, rules: Rules = RULES):
        self._golds, self._stops = reward.golds, reward.stop_on_hacking
        self._patience = rules.patience
        self._run_dir = run_dir
        self._alarm = HackingAlarm(reward.golds, rules)

    @property
    def kept_checkpoints(self) -> list[str]:
        """Folders of the checkpoints to keep, as the engine was given them; before training there is none."""
        steps = sorted({best.step for best in self._alarm.best.values()} - {0})
        return [str(self._step_dir(step) / "actor") for step in steps]

    def observe(self, step: int, metrics: Mapping[str, float]) -> tuple[dict[str, float], bool]:
        """Judge one validation -> (`hacking/*`, True if the run should stop).

        Args:
            metrics: `val/*` of the validation after `step` optimizer steps.
        """
        missing = [name for name in self._golds if f"val/reward_{name}" not in metrics]
        if missing:
            logger.warning(
                "validation after %d steps: no sample was scored by %s, so it does not count for the alarm on hacking",
                *(step, ", ".join(missing)),
            )
            return {}, False
        golds = {name: metrics[f"val/reward_{name}"] for name in self._golds}
        finding = self._alarm.observe(step, reward=metrics["val/reward"], golds=golds)
        step_dir = self._step_dir(step)
        if step_dir.is_dir():  # the checkpoint was written before the validation
            self.save(step_dir)
        stops = finding.verdict == "hacking" and self._stops
        if finding.falling:
            logger.warning("%s", self._told(step, finding, golds, stops=stops))
        return self._metrics(finding), stops

    def _metrics(self, finding: Finding) -> dict[str, float]:
        found = {
            "hacking/warning": float(bool(finding.falling)),
            "hacking/verdict": float(finding.verdict == "hacking"),
        }
        if finding.verdict != "too_few":
            found["hacking/reward_trend"] = finding.reward_trend
            found |= {f"hacking/{name}_trend": value for name, value in finding.gold_trends.items()}
        for name, best in self._alarm.best.items():
            found |= {f"hacking/{name}_best": best.value, f"hacking/{name}_best_step": float(best.step)}
        return found

    def _told(self, step: int, finding: Finding, golds: Mapping[str, float], *, stops: bool) -> str:
        falls = "; ".join(
            f"{name} falls ({finding.gold_trends[name]:.1f} standard errors) and is {golds[name]:.4f}, at best "
            f"{self._alarm.best[name].value:.4f} {self._place(self._alarm.best[name].step)}"
            for name in finding.falling
        )
        text = (
            f"validation after {step} steps: the reward rises ({finding.reward_trend:+.1f} standard errors) while the "
            f"gold reward {falls}. The reward may be hacked"
        )
        if stops:
            return (
                f"{text}, as in each of the newest validations ({self._patience}): the run ends here "
                "(digen.reward.stop_on_hacking=true). To continue anyway, start again with "
                "digen.reward.stop_on_hacking=false trainer.resume_mode=auto"
            )
        return text

    def _place(self, step: int) -> str:
        """Name the validation after `step`, and with `stop_on_hacking` its checkpoint."""
        if step == 0:
            return "before training"
        is_kept = self._stops and self._step_dir(step).is_dir()  # else it lies in the folder of the run before a resume
        return f"after step {step}" + (f" (kept: {self._step_dir(step)})" if is_kept else "")

    def save(self, step_dir: Path) -> None:
        """Write the state into a checkpoint; nothing without gold rewards."""
        if self._golds:
            replace_text(step_dir / STATE, json.dumps(self._alarm.state()))

    def load(self, step_dir: Path) -> None:
        """Take over the state of a checkpoint. One of a run without gold rewards has none: the alarm starts anew."""
        path = step_dir / STATE
        if self._golds and path.is_file():
            self._alarm.load(json.loads(path.read_text()))
        elif self._golds:
            logger.info("%s has no %s: the alarm on hacking starts with the next validation", step_dir, STATE)

    def _step_dir(self, step: int) -> Path:
        return self._run_dir / f"global_step_{step}"

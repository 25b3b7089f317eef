# SPDX-License-Identifier: Apache-2.0
"""Ends of verl's own loop before its last step: after a validation that shows hacking, or because somebody asks."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import verl.trainer.ppo.v1.trainer_base as verl_trainer
from omegaconf import OmegaConf
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from verl_digen.config import DigenConfig, RewardConfig
from verl_digen.engine.driver_checkpoint import publish
from verl_digen.errors import ReplicasLost, RunStopped
from verl_digen.observe.run_files import STOP
from verl_digen.reward.hacking import Rules
from verl_digen.store.samples import PromptStatus
from verl_digen.trainer.base import DiffusionTrainer
from verl_digen.trainer.colocated import ColocatedTrainer
from verl_digen.trainer.watch import RewardWatch

CONFIG = {
    "trainer": {
        **{"project_name": "p", "experiment_name": "e", "logger": [], "val_before_train": False},
        **{"total_epochs": 9, "test_freq": 2},
    },
    "global_profiler": {"steps": None},
}
RULES = Rules(least=3, window=3, threshold=1.0, patience=1)


class Loop:
    """verl's loop over the real `_watch_rewards`, with nothing in its steps."""

    fit = PPOTrainer.fit
    _watch_rewards = DiffusionTrainer._watch_rewards
    on_step_end = DiffusionTrainer._end_if_asked

    def __init__(self, run_dir, *, stops: bool, save_freq: int, asked_in_step: int | None, ask: str):
        functions = {"shapes": 1.0, "pick": {"weight": 0, "gold": True}}
        reward = RewardConfig(functions, stop_on_hacking=stops)
        self.digen, self.config = DigenConfig(reward=reward), OmegaConf.create(CONFIG)
        self.config.trainer.save_freq = save_freq
        self.run_dir, self.saved, self._asked_in_step = run_dir, list[int](), asked_in_step
        self._ask = ask
        self._watch = RewardWatch(reward, run_dir, RULES)
        self._supervision = SimpleNamespace(watch=lambda *what: nullcontext())
        self.kept: list[list[str]] = []
        self.actor_rollout_wg = SimpleNamespace(keep_checkpoints=self.kept.append)
        self.global_steps, self.total_training_steps, self.steps_per_epoch = 0, 12, 12
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.ended = ""

    def step(self, metrics: dict, timing_raw: dict) -> Any:
        if self.global_steps == self._asked_in_step:
            getattr(self.run_dir / STOP, self._ask)()
        return SimpleNamespace(keys=[], partition_id="train")

    def _validate(self) -> dict[str, float]:
        metrics = {"val/reward": float(self.global_steps), "val/reward_pick": -float(self.global_steps)}
        return metrics | self._watch_rewards(metrics)

    def _save_checkpoint(self) -> None:
        self.saved.append(self.global_steps)
        (self.run_dir / f"global_step_{self.global_steps}").mkdir()
        publish(self.run_dir, self.global_steps)

    def _compute_metrics(self, batch: Any, metrics: dict, timing_raw: dict, **facts: Any) -> None:
        self.logged.append((self.global_steps, metrics))

    def on_train_end(self) -> None:
        self.ended = "on_train_end"

    def _consume_sync_metrics(self) -> dict:
        return {}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("on_") or name in (
            *("_reissue_inflight_prompts", "_start_profiling", "_stop_profiling", "_shutdown_dump_executor"),
        ):
            return lambda *args: None
        raise AttributeError(name)


def run(run_dir, monkeypatch, *, stops: bool, save_freq=-1, asked_in_step: int | None = None, ask="touch") -> Loop:
    skips = SimpleNamespace(init=lambda config: None, set_step=lambda step: None)
    monkeypatch.setattr(verl_trainer, "SkipManager", skips)
    monkeypatch.setattr(verl_trainer, "tq", SimpleNamespace(kv_clear=lambda **given: None))
    loop = Loop(run_dir, stops=stops, save_freq=save_freq, asked_in_step=asked_in_step, ask=ask)
    loop.fit(None)  # type: ignore[arg-type]
    return loop


def test_the_run_ends_after_the_step_of_the_verdict_with_its_metrics_logged(tmp_path, monkeypatch):
    loop = run(tmp_path, monkeypatch, stops=True)
    assert [step for step, _ in loop.logged] == [1, 2, 3, 4, 5, 6] and loop.ended == "on_train_end"
    assert loop.logged[-1][1]["hacking/verdict"] == 1.0
    assert loop.kept == [[str(tmp_path / "global_step_2" / "actor")]] * 3


def test_a_run_that_does_not_stop_goes_on_and_keeps_nothing(tmp_path, monkeypatch):
    loop = run(tmp_path, monkeypatch, stops=False)
    assert [step for step, _ in loop.logged] == list(range(1, 13)) and loop.kept == []
    assert loop.logged[-1][1]["hacking/verdict"] == 1.0


@pytest.mark.parametrize(
    ("save_freq", "saved", "ask"), [(-1, [], "touch"), (2, [2, 3], "touch"), (3, [3], "touch"), (2, [2, 3], "mkdir")]
)
def test_a_run_that_is_asked_to_stop_ends_after_its_step_saved_once(tmp_path, monkeypatch, save_freq, saved, ask):
    loop = run(tmp_path, monkeypatch, stops=False, save_freq=save_freq, asked_in_step=3, ask=ask)
    assert [step for step, _ in loop.logged] == [1, 2, 3] and loop.ended == "on_train_end"
    assert loop.saved == saved and not (tmp_path / STOP).exists()
    assert ("save_checkpoint" in loop.timing_raw) == bool(saved), "saving is no part of the step's time"


def test_the_time_that_is_left_is_at_the_pace_since_the_first_step_of_this_process(monkeypatch):
    times = iter([100.0, 100.0, 107.0])
    monkeypatch.setattr("verl_digen.trainer.base.time", SimpleNamespace(time=lambda: next(times)))
    trainer: Any = SimpleNamespace(_first_step=None, timing_raw={"step": 2.0}, total_training_steps=10)
    left_s = [DiffusionTrainer._remaining_s(trainer, step) for step in (4, 6)]
    assert left_s == [2 * 6, (107 - 98) / 3 * 4]


@pytest.mark.parametrize(
    ("stopped", "told"),
    [
        (RunStopped("every reward worker is lost, the last one with: OSError: no weights"), "every reward .* weights"),
        (ReplicasLost(), "every rollout replica is lost .* out of memory is common"),
    ],
)
def test_a_failure_that_a_retry_cannot_help_ends_the_run_without_new_prompts(stopped, told):
    trainer: Any = SimpleNamespace(
        replay_buffer=SimpleNamespace(last_failure=PromptStatus.failed([ValueError(), stopped]))
    )
    with pytest.raises(RunStopped, match=rf"^{told}$"):
        ColocatedTrainer._add_prompts_to_generate(trainer, 4)

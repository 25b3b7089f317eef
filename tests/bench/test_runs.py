# SPDX-License-Identifier: Apache-2.0
"""The command of a run, and its outcome."""

import json
from pathlib import Path

import pytest

from verl_digen.bench.modes import MODES
from verl_digen.bench.runs import BenchWork, RunFailed, command_of, outcome_of

WORK = BenchWork(("digen_quickstart",), ("digen.seed=7", "trainer.logger=[console]"), num_steps=2)


def ended_run(run_dir: Path, num_steps: int) -> Path:
    (run_dir / "console.log").write_text("\n".join(f"line {number}" for number in range(100)))
    rows = [{"step": 0, "val/reward": 0.1}, *({"step": step, "perf/step_s": 2.0} for step in range(1, num_steps + 1))]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run_dir


def test_the_command_is_verls_main_with_the_modes_recipe_and_the_users_overrides_last(tmp_path):
    command = command_of(WORK, MODES["gap"], tmp_path)
    assert command[1:4] == ["-m", "verl.trainer.main_ppo", "recipe=digen_quickstart+disaggregated"]
    assert command.index("digen.gap.enable=true") < command.index("digen.seed=7")
    assert command.index("trainer.logger=[]") < command.index("trainer.logger=[console]")
    assert "trainer.total_training_steps=2" in command
    assert f"trainer.default_local_dir={tmp_path}" in command


def test_a_finished_run_has_its_steps_and_no_validation(tmp_path):
    run = outcome_of(MODES["gap"], 0, ended_run(tmp_path, 2), exit_code=0, num_steps=2, wall_s=41.0)
    assert [row["step"] for row in run.steps] == [1, 2]


@pytest.mark.parametrize(
    ("exit_code", "num_done", "message"), [(1, 2, "exit code 1"), (0, 1, "1 of 2 steps were done")]
)
def test_a_run_that_failed_or_ended_early_is_an_error_with_its_log(tmp_path, exit_code, num_done, message):
    with pytest.raises(RunFailed) as told:
        outcome_of(MODES["gap"], 1, ended_run(tmp_path, num_done), exit_code=exit_code, num_steps=2, wall_s=41.0)
    text = str(told.value)
    assert text.startswith(f"gap, repeat 2: {message}") and str(tmp_path / "console.log") in text
    assert text.endswith("line 99") and "line 80" in text and "line 79" not in text

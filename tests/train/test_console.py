# SPDX-License-Identifier: Apache-2.0
"""Lines of a run's output that `digen train` shows."""

from pathlib import Path

import pytest

from verl_digen.tools.train.launcher import Console

TASK = "\x1b[36m(TaskRunnerV1 pid=24729)\x1b[0m "
LOGGED = "INFO:2026-11-27 19:54:52,210:"


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        (f"{TASK}{LOGGED}step 1/3 | reward 0.592 ±0.262 | eta 19s", "step 1/3 | reward 0.592 ±0.262 | eta 19s"),
        (f"{TASK}{LOGGED}validation after 0 steps: reward 0.6", "validation after 0 steps: reward 0.6"),
        (f"{TASK}WARNING:2026-11-27 19:54:52,210:replacing 2 groups", "warning: replacing 2 groups"),
        ("verl-digen: reward = 1 x shapes", "verl-digen: reward = 1 x shapes"),
        (f"{TASK}wandb: 🚀 View run at https://wandb.ai/a/b", "wandb: 🚀 View run at https://wandb.ai/a/b"),
        ("(WorkerDict pid=3, ip=10.0.0.2) ValueError: no", "ValueError: no"),
        (
            "(A pid=3) ray.exceptions.RayTaskError(OSError): x [repeated 2x across cluster] (Ray deduplicates)",
            "ray.exceptions.RayTaskError(OSError): x",
        ),
        ("(raylet) 2 workers (tasks / actors) were killed", "2 workers (tasks / actors) were killed"),
        (f"{TASK}{LOGGED}Total training steps: 3", "   7 s  prompts are read; ranks, replicas and rewards start"),
        (f"{TASK}{LOGGED}create worker group dict_keys(['actor_rollout'])", None),
        (f"{TASK} 'actor_rollout_ref': {{'actor': {{'step 1/3 |': 0}}}}", None),
        (f'{TASK}  warnings.warn("automodel engine is not available: ModuleNotFoundError(x)")', None),
        (f"{TASK}Training Progress:  33%|███▎      | 1/3 [00:09<00:19,  9.51s/it]", None),
    ],
)
def test_a_person_sees_steps_warnings_links_and_errors(line, shown):
    console = Console()
    assert console.read(line, 7.0) == shown
    assert console.read(line, 7.0) is None, "a text is shown once"
    assert console.has_begun == (shown is not None and shown.startswith(("step", "validation")))


def test_the_end_is_explained_whole_and_what_ray_says_meanwhile_is_not():
    console = Console()
    lines = ["verl-digen: this config cannot run.", "data.x must be > 0", "", "see docs", "(A pid=3) bye"]
    assert [console.read(line, 0) for line in lines] == [*lines[:2], None, "see docs", None]
    assert console.explains_end


def test_a_run_that_was_interrupted_is_explained_by_the_command_that_started_it():
    console = Console()
    assert console.read("verl-digen: the run stopped: Ctrl-C; this continues after it: python -m x", 0) is None
    assert not console.explains_end and console.run_dir is None
    console.read("verl-digen: the run's folder is outputs/a b", 0)
    assert console.run_dir == Path("outputs/a b")

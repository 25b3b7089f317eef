# SPDX-License-Identifier: Apache-2.0
"""Runs with an environment: what is refused before Ray starts."""

import pytest

from tests.examples.test_drawn_world import SHAPE_EDITS
from tests.tiny_models import build_tiny
from verl_digen import preflight
from verl_digen.preflight.agent_loop import check_environment
from verl_digen.preflight.rules import notes
from verl_digen.preflight.start_config import StartConfig

WORLD = "digen.environment.path=tests.environments.worlds.Brighter"
KEY = "with digen.environment.path"
NO_FUNCTION = "digen.reward.functions={}"
SEPARATE = "recipe=digen_flowgrpo+disaggregated"


def separate(words: list[str]) -> list[str]:
    return [SEPARATE, *(word for word in words if not word.startswith("recipe="))]


def test_a_good_run_passes_and_says_what_it_trains_on(start, runnable):
    preflight.check(start(*runnable, WORLD, NO_FUNCTION))
    told = "sum of the turns' rewards of tests.environments.worlds.Brighter"
    assert notes(StartConfig(start(*runnable, WORLD, NO_FUNCTION)))[0] == f"reward = {told}"
    both = notes(StartConfig(start(*runnable, WORLD)))[0]
    assert both.endswith(f"jpeg_compressibility, of the last picture + {told}")
    for back_end in ("diffusers", "vllm_omni"):
        rollout = f"actor_rollout_ref.rollout.name={back_end}"
        check_environment(
            StartConfig(start(*separate(runnable), WORLD, "digen.environment.step_timeout_s=20", rollout))
        )


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("actor_rollout_ref.rollout.agent.default_agent_loop=mine",), f"must be diffusion_single_turn {KEY}"),
        (("digen.tag.policy=bts",), f"digen.tag.policy must be off {KEY}"),
        (
            ("digen.branches.splits=[0]", "digen.branches.factor=4", "digen.sampling.shared_initial_noise=true"),
            f"digen.branches.splits must be [] {KEY}",
        ),
        (("digen.loss.name=gspo",), f"digen.loss.name must be a loss of single rows {KEY}"),
        (("digen.loss.name=offline_dpo",), f"digen.loss.name must be a loss of single rows {KEY}"),
        (("digen.reward.combine=gdpo",), f"digen.reward.combine must not be gdpo {KEY}"),
        (
            ("digen.environment.path=tests.environments.worlds.Editor",),
            "must name an environment of text with this model, which reads 0 to 0 images",
        ),
        (("digen.environment.options={turns: 3}",), "digen.environment.options.turns must be a setting of Brighter"),
        (("digen.environment.max_turns=0",), "digen.environment.max_turns must lie in [1, 1000], got 0"),
        (
            ("digen.environment.num_gpus=1.5",),
            "digen.environment.num_gpus must be a fraction of one device, or a whole",
        ),
        (
            ("digen.environment.path=tests.environments.worlds.Endless",),
            "digen.environment.path: num_turns of Endless must return the most turns of an episode, or None, got "
            "BrighterConfig(max_turns=3, latency_s=0.0) (ZeroDivisionError: integer division or modulo by zero)",
        ),
        (("digen.environment.name=other",), "digen.environment.name must be null with digen.environment.path"),
    ],
)
def test_what_an_environment_does_not_go_with_is_refused(start, runnable, overrides, message):
    with pytest.raises(ValueError) as told:
        check_environment(StartConfig(start(*runnable, WORLD, *overrides)))
    assert message in str(told.value)


@pytest.mark.parametrize(
    ("words", "turns"),
    [
        ((f"digen.environment.path={SHAPE_EDITS}", "digen.environment.options={num_turns: 5}"), 5),
        (("digen.environment.name=vlm_judge", "digen.environment.options={url: 'http://judge', num_turns: 6}"), 6),
    ],
    ids=["shape_edits", "vlm_judge"],
)
def test_more_turns_than_an_episode_may_have_are_refused(start, runnable, tmp_path, words, turns):
    path = build_tiny("qwen_image_edit_plus", tmp_path / "checkpoint")
    words = (*runnable, *words, NO_FUNCTION, f"actor_rollout_ref.model.path={path}")
    message = rf"digen\.environment\.max_turns must be >= {turns}, the turns .*, got 4; raise it, or lower the turns in"
    with pytest.raises(ValueError, match=message):
        check_environment(StartConfig(start(*words)))
    check_environment(StartConfig(start(*words, f"digen.environment.max_turns={turns}")))


def test_what_an_environment_needs_on_separate_pools(start, runnable):
    with pytest.raises(ValueError, match=r"digen.deadlines.answer_s must be >= \(1 \+ digen.environment\."):
        check_environment(StartConfig(start(*separate(runnable), WORLD, "digen.environment.step_timeout_s=100")))


def test_keys_of_an_environment_have_no_effect_without_one(start, runnable):
    with pytest.raises(ValueError, match=r"digen.environment.max_turns must be 4 without an environment"):
        preflight.check(start(*runnable, "digen.environment.max_turns=2"))


def test_its_processes_count_among_the_runs_cpus(start, runnable):
    asked = "ray_kwargs.ray_init.num_cpus=7"
    preflight.check(start(*runnable, WORLD, asked, NO_FUNCTION))
    with pytest.raises(ValueError, match=r"num_cpus must be >= 8, .*digen.environment.num_workers \(3\), got 7"):
        preflight.check(start(*runnable, WORLD, NO_FUNCTION, asked, "digen.environment.num_workers=3"))

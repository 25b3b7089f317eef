# SPDX-License-Identifier: Apache-2.0
"""Starts with gold rewards, rewards of some sources, and the stop on hacking: which are refused, and what is said."""

import json

import pytest

from verl_digen.preflight.inputs import check_prompts
from verl_digen.preflight.rewards import check_group_rewards, check_watching, reward_formula
from verl_digen.preflight.start_config import StartConfig

GOLD = "digen.reward.recipe_functions.gold={weight: 0, gold: true, reward: jpeg_incompressibility}"
STOPS = (GOLD, "digen.reward.stop_on_hacking=true", "trainer.test_freq=20", "trainer.save_freq=10")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (STOPS[1:], "digen.reward.functions must have an entry with gold=true with digen.reward.stop_on_hacking=true"),
        ((*STOPS, "trainer.test_freq=-1"), "trainer.test_freq must be > 0 with digen.reward.stop_on_hacking=true"),
        ((*STOPS, "trainer.save_freq=-1"), "trainer.save_freq must be > 0 and divide trainer.test_freq=20 with"),
        ((*STOPS, "trainer.save_freq=15"), "got 15; set trainer.save_freq=20"),
        ((*STOPS, "trainer.save_freq=40"), "got 40; set trainer.save_freq=20"),
        (
            (*STOPS, "actor_rollout_ref.actor.checkpoint.save_contents=[optimizer,extra]"),
            "save_contents must have model with digen.reward.stop_on_hacking=true, got ['optimizer', 'extra']",
        ),
        (
            (GOLD, "trainer.test_freq=-1", "trainer.val_before_train=false"),
            "trainer.val_before_train true, with digen.reward.recipe_functions.gold.when=validation, got -1",
        ),
        (
            (GOLD, "reward.reward_manager.name=Mine", "reward.reward_manager.module.path=mine.py"),
            "digen.reward.recipe_functions.gold must score all samples with reward.reward_manager.name=Mine",
        ),
    ],
)
def test_what_watching_needs_is_asked_for_before_the_start(start, runnable, given, message):
    with pytest.raises(ValueError) as refused:
        check_watching(StartConfig(start(*runnable, *given)))
    assert message in str(refused.value)


@pytest.mark.parametrize("given", [(), (GOLD,), STOPS, (*STOPS, "trainer.save_freq=20")])
def test_a_start_that_has_it_is_not_refused(start, runnable, given):
    check_watching(StartConfig(start(*runnable, *given)))


def test_the_start_line_says_what_is_computed_at_validation_alone(start, runnable):
    assert reward_formula(StartConfig(start(*runnable, GOLD))) == (
        "reward = 1 x jpeg_compressibility (only at validation: gold (gold))"
    )


def test_a_gold_reward_of_groups_needs_groups_at_validation_alone(start, runnable):
    gold = "digen.reward.recipe_functions.gold={weight: 0, gold: true, reward: diversity}"
    with pytest.raises(ValueError, match=r"val_kwargs\.n must be >= 2 with gold, which compares"):
        check_group_rewards(StartConfig(start(*runnable, gold)))
    check_group_rewards(
        StartConfig(start(*runnable, gold, "actor_rollout_ref.rollout.n=1", "actor_rollout_ref.rollout.val_kwargs.n=2"))
    )


@pytest.fixture
def sourced(runnable, tmp_path) -> list[str]:
    """`runnable` with prompts of sources ocr and geneval for training, of ocr and drawn for validation."""
    for part, sources in (("train", ("ocr", "geneval")), ("val", ("ocr", "drawn"))):
        lines = [{"prompt": f"a cat {number}", "data_source": sources[number % 2]} for number in range(8)]
        (tmp_path / f"{part}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return [*runnable, *(f"data.{part}_files={tmp_path / part}.jsonl" for part in ("train", "val"))]


def routed(**sources: str) -> str:
    entries = [
        f"{name}: {{weight: 1, reward: jpeg_compressibility, data_sources: [{given}]}}"
        for name, given in sources.items()
    ]
    return f"digen.reward.functions={{{', '.join(entries)}}}"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((routed(a="ocr"),), "must be scored by a reward whose weight is not 0, got ['drawn', 'geneval']; add it to"),
        (
            (routed(a="ocr,geneval"), "+digen.reward.functions.log=0"),
            "must be scored by a reward whose weight is not 0, got ['drawn']",
        ),
        (
            (routed(a="ocr,genevall"), "+digen.reward.functions.jpeg_incompressibility=1"),
            "a.data_sources must name a data_source of the prompts, which have drawn, geneval, ocr, got ['genevall']; "
            "did you mean geneval?",
        ),
        (
            (
                "digen.reward.functions={jpeg_compressibility: 1, gold: {weight: 0, gold: true, reward: diversity, "
                "data_sources: [geneval]}}",
            ),
            "gold.data_sources must name a data_source of the prompts of data.val_files, which have drawn, ocr, "
            "got ['geneval']",
        ),
    ],
)
def test_prompts_without_a_reward_and_rewards_without_prompts_are_refused(start, sourced, given, message):
    with pytest.raises(ValueError) as refused:
        check_prompts(StartConfig(start(*sourced, *given)))
    assert message in str(refused.value)


@pytest.mark.parametrize(
    "given",
    [
        (routed(a="ocr,geneval", b="drawn"),),
        (routed(a="ocr"), "+digen.reward.functions.jpeg_incompressibility=1"),
        (routed(a="ocr"), "reward.custom_reward_function.path=mine.py"),
    ],
)
def test_prompts_that_rewards_cover_are_accepted(start, sourced, given):
    check_prompts(StartConfig(start(*sourced, *given)))

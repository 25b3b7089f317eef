# SPDX-License-Identifier: Apache-2.0
"""Runs on pairs of pictures: what is refused before Ray starts."""

import json
from pathlib import Path

import pytest
from PIL import Image

from verl_digen import preflight
from verl_digen.preflight.inputs import check_pairs, check_prompts
from verl_digen.preflight.rewards import check_rewards
from verl_digen.preflight.rules import notes
from verl_digen.preflight.start_config import StartConfig

LOSS = "with digen.loss.name=offline_dpo"
RECIPE = "recipe=digen_flowgrpo+offline_dpo"
SEPARATE = "recipe=digen_flowgrpo+disaggregated+offline_dpo"
NO_VALIDATION = ("trainer.test_freq=-1", "trainer.val_before_train=false")


def write_rows(folder: Path, *rows: dict[str, str]) -> str:
    """A file of prompts, one per row, beside good.png and bad.png -> its override."""
    for name in ("good.png", "bad.png"):
        Image.new("RGB", (8, 8)).save(folder / name)
    path = folder / "pairs.jsonl"
    lines = [json.dumps({"prompt": f"prompt {number}", **row}) for number, row in enumerate(rows)]
    path.write_text("\n".join(lines))
    return f"data.train_files={path}"


PAIR = {"chosen": "good.png", "rejected": "bad.png"}


@pytest.fixture
def pairs(runnable, tmp_path) -> list[str]:
    """Overrides of a small run on pairs that passes all checks."""
    given = [
        word
        for word in runnable
        if not word.startswith(("recipe=", "data.train_files=", "actor_rollout_ref.rollout.n="))
    ]
    return [RECIPE, *given, write_rows(tmp_path, *[PAIR] * 4), "data.train_batch_size=4"]


def test_a_good_run_passes_and_says_what_it_trains_on(start, pairs):
    preflight.check(start(*pairs))
    told = "reward = 1 for the chosen picture of a pair, 0 for the rejected one"
    assert notes(StartConfig(start(*pairs, *NO_VALIDATION)))[0] == told
    scored = f"{told}; validation: reward = 1 x jpeg_compressibility"
    assert notes(StartConfig(start(*pairs, "trainer.test_freq=2")))[0] == scored
    preflight.check(start(*pairs, *NO_VALIDATION, "digen.reward.functions={}"))
    check_pairs(StartConfig(start(*pairs, "trainer.test_freq=2")))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("actor_rollout_ref.rollout.n=4",), f"actor_rollout_ref.rollout.n must be 2 {LOSS}: the chosen and the"),
        (("actor_rollout_ref.rollout.name=vllm_omni",), f"rollout.name must not be vllm_omni {LOSS}"),
        (("digen.sampling.num_frames=5",), f"digen.sampling.num_frames must be 1 {LOSS}, whose pairs are pictures"),
        ((SEPARATE, "digen.tag.policy=always"), f"digen.tag.policy must be off {LOSS}"),
        (("digen.reward.combine=gdpo",), f"digen.reward.combine must not be gdpo {LOSS}"),
        (NO_VALIDATION, f"digen.reward.functions must be empty {LOSS} where the run does not validate"),
        (("trainer.test_freq=2", "digen.reward.functions={}"), "digen.reward.functions must name a reward function"),
        (("digen.sampling.shared_initial_noise=true",), "digen.sampling.shared_initial_noise must be false"),
        (("digen.window.fraction=0.5",), "digen.window.fraction must be left out"),
    ],
)
def test_a_run_that_cannot_train_on_pairs_is_refused(start, pairs, overrides, message):
    with pytest.raises(ValueError) as refused:
        preflight.check(start(*pairs, "trainer.test_freq=2", *overrides))
    assert message in str(refused.value)


def test_a_model_with_sound_is_refused(start, pairs, tiny_ltx2):
    with pytest.raises(ValueError) as refused:
        preflight.check(start(*pairs, "trainer.test_freq=2", f"actor_rollout_ref.model.path={tiny_ltx2}"))
    rule = f"model.path must hold a model that makes no sound {LOSS}, whose pairs are pictures, and LTX-2 makes sound"
    assert rule in str(refused.value)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{}] * 4, "but line 1 of '"),
        ([PAIR, PAIR, {}, {}], "pairs.jsonl' has none (as 2 of 4 rows); give both, or take the rows without them out"),
        (
            [PAIR, {"chosen": "good.png"}],
            "must have one picture in each of the columns chosen and rejected, or in none",
        ),
        ([PAIR, PAIR | {"rejected": ["good.png", "bad.png"]}], "or in none, got 1 and 2; give both"),
        ([PAIR, PAIR | {"rejected": "missing.png"}], "must have rejected that are files, but '"),
    ],
    ids=["none", "mixed", "half", "two", "missing"],
)
def test_a_file_that_lacks_pictures_is_refused_by_its_row(start, pairs, tmp_path, rows, message):
    with pytest.raises(ValueError) as refused:
        preflight.check(start(*pairs, write_rows(tmp_path, *rows)))
    assert message in str(refused.value)


def test_other_objectives_leave_pairs_alone_and_need_a_reward(start, pairs, tmp_path):
    online = ["recipe=digen_flowgrpo", *pairs[1:], "actor_rollout_ref.rollout.n=4"]
    check_pairs(StartConfig(start(*online)))
    check_prompts(StartConfig(start(*online)))
    with pytest.raises(ValueError, match=r"digen.reward.functions must name a reward function"):
        check_rewards(StartConfig(start(*online, *NO_VALIDATION, "digen.reward.functions={}")))

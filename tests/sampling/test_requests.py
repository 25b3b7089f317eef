# SPDX-License-Identifier: Apache-2.0
from dataclasses import replace

from verl_digen.config import DigenConfig, SamplingConfig
from verl_digen.sampling.requests import sample_request
from verl_digen.types import PromptRow

DIGEN = DigenConfig(sampling=SamplingConfig(num_steps=10, val_num_steps=20, true_cfg_scale=4.0, negative_prompt="ugly"))


def ask(digen=DIGEN, uid="p1", index=0, validate=False, negative=None):
    row = PromptRow("a cat", "test", None, negative, uid=uid)
    return sample_request(digen, row, index, step=1, validate=validate)


def test_a_group_shares_one_window_and_groups_differ():
    digen = replace(DIGEN, window=replace(DIGEN.window, kind="fraction", fraction=0.5))
    windows = {uid: {ask(digen, uid, index).window for index in range(4)} for uid in ("p1", "p2", "p3", "p4")}
    assert all(len(shared) == 1 for shared in windows.values())
    assert len(set.union(*windows.values())) > 1


def test_validation_is_deterministic_and_records_nothing():
    request = ask(validate=True)
    assert request.window.sde_steps == () and request.window.train_steps == ()
    assert request.sampling.num_steps == 20 and request.sampling.true_cfg_scale == 1.0
    assert not request.wants_condition


def test_only_the_first_sample_of_a_group_asks_for_the_conditions():
    assert [ask(index=index).wants_condition for index in range(3)] == [True, False, False]


def test_a_prompts_own_negative_prompt_wins_over_the_configs():
    assert ask().negative_prompt == "ugly"
    assert ask(negative="").negative_prompt == ""

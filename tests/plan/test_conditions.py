# SPDX-License-Identifier: Apache-2.0
from tests.models.cases import PROMPTS
from verl_digen.plan.conditions import empty_condition


def test_shapes_are_those_of_the_models_own_encoder(loaded):
    for encoded in loaded.encode(PROMPTS):
        planned = empty_condition(loaded.model, prompt_tokens=len(encoded["embeds"]))
        assert {name: value.shape for name, value in planned.items()} == {
            name: value.shape for name, value in encoded.items()
        }

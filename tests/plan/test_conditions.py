# SPDX-License-Identifier: Apache-2.0
from tests.models.cases import PROMPTS
from verl_digen.plan.run import empty_condition


def test_shapes_are_those_of_the_models_own_encoder(loaded):
    geometry = loaded.case.sizes[0]
    for encoded in loaded.encode(PROMPTS):
        of_text = len(encoded["embeds"]) - loaded.model.num_image_text_tokens(geometry)
        assert of_text < 30 or loaded.model.spec.condition.num_tokens is not None
        planned = empty_condition(loaded.model, of_text, geometry)
        assert {name: value.shape for name, value in planned.items()} == {
            name: value.shape for name, value in encoded.items()
        }

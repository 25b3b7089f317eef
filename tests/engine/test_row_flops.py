# SPDX-License-Identifier: Apache-2.0
"""FLOPs of the engine's rows."""

import pytest
import torch

from tests.engine.harness import LORA, SIZE_PX, make_batch, make_engine, train
from verl_digen.models.flops import forward_flops
from verl_digen.types import Geometry

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.mark.parametrize("scale", [1.0, 2.0], ids=["unguided", "guided"])
def test_a_training_step_reports_what_its_rows_cost(tiny_qwen_image, scale):
    batch = make_batch(tiny_qwen_image, true_cfg_scale=scale)
    engine = make_engine(tiny_qwen_image, digen={"sampling": {"true_cfg_scale": scale}})
    metrics = train(engine, batch)[0]["metrics"]
    assert metrics["num_rows"] == 18
    by_group = [len(batch["conditions"][uid][0]["embeds"]) for uid in sorted(batch["conditions"])]
    assert metrics["prompt_tokens"] == pytest.approx(sum(by_group) / 2), "two groups with as many rows"
    plain = forward_flops(
        engine.model,
        engine.model.load_transformer(torch.float32, meta=True),
        Geometry(SIZE_PX, SIZE_PX),
        round(metrics["prompt_tokens"]),
        is_guided=scale > 1,
    )
    assert metrics["row_forward_flops"] == plain.forward
    assert metrics["row_training_flops"] == 3 * plain.forward, "recomputation is no useful work"


def test_an_adapter_saves_the_gradients_of_what_is_frozen(tiny_qwen_image):
    metrics = train(make_engine(tiny_qwen_image, model=LORA), make_batch(tiny_qwen_image))[0]["metrics"]
    assert 2 * metrics["row_forward_flops"] < metrics["row_training_flops"] < 3 * metrics["row_forward_flops"]

# SPDX-License-Identifier: Apache-2.0
"""The network that is trained, in the dtype that is configured."""

from pathlib import Path

import pytest
import torch

from tests.engine.harness import LORA, SIZE_PX, full, make_batch, make_engine, on_two_ranks, train
from verl_digen.engine.build import keep_fp32
from verl_digen.models.flops import forward_flops
from verl_digen.types import Geometry

WAN_LORA = {"lora_rank": 4, "lora_alpha": 8, "target_modules": ["to_q", "to_out.0"]}

pytestmark = pytest.mark.usefixtures("one_rank")


def test_full_weights_train_in_one_dtype_where_the_network_keeps_some_in_fp32(tiny_wan):
    engine = make_engine(tiny_wan, fsdp={"model_dtype": "bf16"})
    assert {parameter.dtype for parameter in engine.module.parameters()} == {torch.bfloat16}
    (output,) = train(engine, make_batch(tiny_wan))
    assert output["metrics"]["grad_norm"] > 0


def test_an_adapter_leaves_them_alone(tiny_wan):
    engine = make_engine(tiny_wan, model=dict(WAN_LORA), fsdp={"model_dtype": "bf16"})
    dtypes = {parameter.requires_grad: set() for parameter in engine.module.parameters()}
    for parameter in engine.module.parameters():
        dtypes[parameter.requires_grad].add(parameter.dtype)
    assert dtypes == {True: {torch.float32}, False: {torch.float32, torch.bfloat16}}
    (output,) = train(engine, make_batch(tiny_wan))
    assert output["metrics"]["grad_norm"] > 0


BF16 = {
    "model_dtype": "bf16",
    "mixed_precision": {"param_dtype": "bf16", "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
}


@pytest.mark.parametrize(("fsdp", "allows_tf32"), [({}, False), (BF16, True), (BF16 | {"model_dtype": "fp32"}, True)])
def test_a_trainer_that_computes_in_fp32_does_without_tf32(tiny_qwen_image, monkeypatch, fsdp, allows_tf32):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    make_engine(tiny_qwen_image, fsdp=fsdp)
    assert torch.backends.cudnn.allow_tf32 == allows_tf32


def gap_to_replica(path: Path, *, keeps_fp32: bool) -> float:
    """Mean distance of log-probs from those of a `diffusers` replica in bf16."""
    engine = make_engine(path, model=dict(WAN_LORA), fsdp=BF16)
    if keeps_fp32:
        keep_fp32(engine.module, engine.model.spec.transformer)
    (output,) = train(engine, make_batch(path, dtype=torch.bfloat16))
    assert output["metrics"]["grad_norm"] > 0
    return output["metrics"]["rollout_log_prob_gap_mean"]


def test_what_a_replica_computes_in_fp32_the_trainer_does_too(tiny_wan):
    assert gap_to_replica(tiny_wan, keeps_fp32=True) < 0.05 * gap_to_replica(tiny_wan, keeps_fp32=False)


def test_parameters_kept_in_fp32_are_gathered_exactly(tiny_wan):
    engine = make_engine(tiny_wan, model=dict(WAN_LORA), fsdp=BF16 | {"reshard_after_forward": False})
    keep_fp32(engine.module, engine.model.spec.transformer)
    kept = "scale_shift_table"
    expected = {name: full(value).clone() for name, value in engine.module.named_parameters() if kept in name}
    train(engine, make_batch(tiny_wan))
    engine.module.unshard()
    for name, value in engine.module.named_parameters():
        if name in expected and "blocks" not in name:  # of the root, which is gathered
            assert value.dtype == torch.float32 and torch.equal(full(value), expected[name])


def gaps(path: Path, folder: Path) -> list[float]:
    return [gap_to_replica(path, keeps_fp32=keeps) for keeps in (True, False)]


@pytest.mark.slow
@pytest.mark.long
def test_two_ranks_gather_both_dtypes(tiny_wan, tmp_path):
    kept, cast = on_two_ranks([gaps], tiny_wan, tmp_path)["gaps"]
    assert kept < 0.05 * cast


@pytest.mark.parametrize("model", [{}, LORA], ids=["full", "lora"])
def test_the_network_returns_no_view_whose_change_would_drop_the_hook_that_gathers_for_backward(
    tiny_qwen_image, recwarn, model
):
    train(make_engine(tiny_qwen_image, model=dict(model)), make_batch(tiny_qwen_image))
    assert not [warning for warning in recwarn if "view tensor" in str(warning.message)]


# -- fLOPs of the engine's rows ------------------------------------------------------------------------------
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

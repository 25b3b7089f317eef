# SPDX-License-Identifier: Apache-2.0
"""The network that is trained, in the dtype that is configured."""

from pathlib import Path

import pytest
import torch

from tests.engine.harness import full, make_batch, make_engine, on_two_ranks, train

LORA = {"lora_rank": 4, "lora_alpha": 8, "target_modules": ["to_q", "to_out.0"]}

pytestmark = pytest.mark.usefixtures("one_rank")


def test_full_weights_train_in_one_dtype_where_the_network_keeps_some_in_fp32(tiny_wan):
    engine = make_engine(tiny_wan, fsdp={"model_dtype": "bf16"})
    assert {parameter.dtype for parameter in engine.module.parameters()} == {torch.bfloat16}
    (output,) = train(engine, make_batch(tiny_wan))
    assert output["metrics"]["grad_norm"] > 0


def test_an_adapter_leaves_them_alone(tiny_wan):
    engine = make_engine(tiny_wan, model=dict(LORA), fsdp={"model_dtype": "bf16"})
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
    engine = make_engine(path, model=dict(LORA), fsdp=BF16)
    if keeps_fp32:
        engine.keep_fp32()
    (output,) = train(engine, make_batch(path, dtype=torch.bfloat16))
    assert output["metrics"]["grad_norm"] > 0
    return output["metrics"]["rollout_log_prob_gap_mean"]


def test_what_a_replica_computes_in_fp32_the_trainer_does_too(tiny_wan):
    assert gap_to_replica(tiny_wan, keeps_fp32=True) < 0.05 * gap_to_replica(tiny_wan, keeps_fp32=False)


def test_parameters_kept_in_fp32_are_gathered_exactly(tiny_wan):
    engine = make_engine(tiny_wan, model=dict(LORA), fsdp=BF16 | {"reshard_after_forward": False})
    engine.keep_fp32()
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

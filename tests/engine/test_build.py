# SPDX-License-Identifier: Apache-2.0
"""The network that is trained, in the dtype that is configured."""

import pytest
import torch

from tests.engine.harness import make_batch, make_engine, train

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

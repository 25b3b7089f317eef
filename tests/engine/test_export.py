# SPDX-License-Identifier: Apache-2.0
"""Exported weights, for replicas and files."""

from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from threading import Barrier, BrokenBarrierError

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tensordict import TensorDict
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.engine.harness import (
    LORA,
    LORA_TARGETS,
    assert_equal,
    make_batch,
    make_engine,
    on_two_ranks,
    perturb,
    train,
    weights,
)
from tests.engine.serial import plain_lora, plain_transformer
from verl_digen.engine import export
from verl_digen.engine.export import LOOKAHEAD, in_step

pytestmark = pytest.mark.usefixtures("one_rank")

MERGED = LORA | {"lora": {"merge": True}}


@pytest.fixture(scope="module")
def batch(tiny_qwen_image: Path) -> TensorDict:
    return make_batch(tiny_qwen_image)


@pytest.fixture(scope="module")
def checkpoint(tiny_qwen_image: Path) -> dict[str, torch.Tensor]:
    return plain_transformer(tiny_qwen_image).state_dict()


@pytest.mark.parametrize("model", [{}, MERGED], ids=["full", "merged"])
def test_untrained_model_exports_its_checkpoint(tiny_qwen_image: Path, checkpoint: dict, model: dict):
    exported, config = make_engine(tiny_qwen_image, model=model).get_per_tensor_param()
    assert config is None
    assert_equal(dict(exported), checkpoint)


def test_merging_equals_peft_s_and_changes_nothing(tiny_qwen_image: Path, batch: TensorDict):
    engine = make_engine(tiny_qwen_image, model=LORA)
    perturb(engine)
    plain = plain_lora(tiny_qwen_image, engine.model_config.lora_config(), weights(engine))
    expected = plain.merge_and_unload().state_dict()
    engine.model_config.lora["merge"] = True
    found = weights(engine)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-7)
    assert_equal(weights(engine), found)


def test_a_merged_weight_of_a_bf16_base_is_rounded_once():
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(64, 64, bias=False)).bfloat16()
    module = get_peft_model(base, LoraConfig(r=4, lora_alpha=8, target_modules=["0"]))
    layer = module.get_submodule("base_model.model.0")
    nn.init.normal_(layer.get_parameter("lora_B.default.weight"))
    down, up = (layer.get_parameter(f"lora_{name}.default.weight").double() for name in "AB")
    assert up.any()
    expected = layer.get_parameter("base_layer.weight").double() + 8 / 4 * up @ down
    found = dict(export.full_weights(module, merge_lora=True))
    assert found.keys() == {"0.weight"} and torch.equal(found["0.weight"], expected.bfloat16())


def test_adapter_alone_has_peft_s_names_and_config(tiny_qwen_image: Path):
    engine = make_engine(tiny_qwen_image, model=LORA)
    perturb(engine)
    exported, config = engine.get_per_tensor_param(base_sync_done=True)
    found = dict(exported)
    layers = [f"transformer_blocks.{block}.{name}" for block in range(2) for name in LORA_TARGETS[:3]] + ["img_in"]
    assert found.keys() == {
        f"base_model.model.{layer}.{part}.weight" for layer in layers for part in ("lora_A", "lora_B")
    }
    assert config is not None
    assert (config["r"], config["lora_alpha"], config["target_modules"]) == (4, 8, set(LORA_TARGETS))
    assert config["peft_type"].value == "LORA"


def test_base_weights_for_a_replica_that_has_none(tiny_qwen_image: Path, checkpoint: dict):
    engine = make_engine(tiny_qwen_image, model=LORA)
    perturb(engine)
    exported, config = engine.get_per_tensor_param(base_sync_done=False)
    assert_equal(dict(exported), checkpoint)
    assert config is not None


def test_wire_dtype_is_that_asked_for(tiny_qwen_image: Path):
    engine = make_engine(tiny_qwen_image)
    exact = weights(engine)
    assert {value.dtype for value in exact.values()} == {torch.float32}
    engine.wire_dtype = torch.bfloat16
    assert_equal(weights(engine), {name: value.bfloat16() for name, value in exact.items()})


def test_exported_tensors_outlive_the_weights(tiny_qwen_image: Path, batch: TensorDict):
    engine = make_engine(tiny_qwen_image)
    exported = weights(engine)
    kept = {name: value.clone() for name, value in exported.items()}
    train(engine, batch)
    assert_equal(exported, kept)


def test_buffers_that_are_offloaded_come_on_the_compute_device_too(monkeypatch):
    """A bucket is sent when copies from the device of its tensors have arrived: of one device."""
    monkeypatch.setattr(export, "get_device_id", lambda: "meta")
    module = nn.BatchNorm1d(2, affine=False)
    assert {value.device.type for _, value in export.full_weights(module, merge_lora=False)} == {"meta"}


def test_adapter_that_cannot_be_merged_is_refused(tiny_qwen_image: Path):
    engine = make_engine(tiny_qwen_image, model=MERGED)
    config = engine.model_config.lora_config()
    config.use_dora = True
    engine.module = get_peft_model(plain_transformer(tiny_qwen_image), config)
    with pytest.raises(
        ValueError, match=r"lora.merge=true needs plain LoRA on linear layers, got Linear with DoRA around img_in"
    ):
        weights(engine)


def gathers_tensors_of_all_kinds(path: Path, folder: Path) -> list[int]:
    """Numbers of tensors that are gathered together, of which each must arrive whole, in memory of its own."""
    mesh = init_device_mesh("cpu", (2,))
    generator = torch.Generator().manual_seed(0)
    shapes = [(32, 8), (2,), (4, 2, 2), (3, 4), (8, 8), (600, 500), (2, 2)]
    whole = {str(number): torch.randn(shape, generator=generator) for number, shape in enumerate(shapes)}
    whole["low"], whole["plain"] = torch.ones(4).bfloat16(), torch.ones(3)
    sharded: dict[str, torch.Tensor] = {
        name: distribute_tensor(value, mesh, [Shard(0)]) for name, value in whole.items() if name != "plain"
    }
    sharded["plain"] = whole["plain"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export, "GATHER_BYTES", 1 << 20)
        found = dict(export.gathered(sharded.items()))
        assert list(found) == list(whole)
        assert_equal(found, whole)
        assert not any(value.untyped_storage().nbytes() > value.nbytes for name, value in found.items() if name != "3")
        return [len(run) for run in export.together(sharded.items())]


def test_small_tensors_are_gathered_together(tiny_qwen_image: Path, tmp_path: Path):
    found = on_two_ranks([gathers_tensors_of_all_kinds], tiny_qwen_image, tmp_path)
    assert found["gathers_tensors_of_all_kinds"] == [3, 1, 1, 1, 1, 1, 1]


def test_no_rank_gathers_far_ahead_of_one_that_writes_slowly():
    ranks = Barrier(2)

    gathered: list[int] = []

    def gather_all() -> None:
        gathered.extend(in_step(range(10 * LOOKAHEAD), ranks.wait))

    gathered_by_the_slow = 3 * LOOKAHEAD + 2
    with ThreadPoolExecutor(1) as pool:
        fast = pool.submit(gather_all)
        list(islice(in_step(range(10 * LOOKAHEAD), ranks.wait), gathered_by_the_slow))
        while ranks.n_waiting == 0:
            assert not fast.done()
        ranks.abort()
    with pytest.raises(BrokenBarrierError):
        fast.result()
    assert 0 < len(gathered) - gathered_by_the_slow <= LOOKAHEAD

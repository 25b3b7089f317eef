# SPDX-License-Identifier: Apache-2.0
from dataclasses import replace

import pytest

from tests.plan.runs import GB, MEASURED, make_run
from verl_digen.config import EmaConfig, GapConfig, KlConfig, RolloutConfig, TspConfig
from verl_digen.plan.memory import plan_memory, update_bytes

DEVICE = 80 * GB


def assert_invariants(memory):
    for phase in (memory.training, memory.generating):
        assert phase.total == sum(phase.items.values()) + phase.row_bytes * phase.num_rows
        assert all(size >= 0 for size in phase.items.values()) and phase.num_rows >= 1
    if memory.fits is not None:
        assert memory.fits == (max(memory.training.total, memory.generating.total) <= memory.limit_bytes)


def test_a_full_fine_tune_by_hand():
    memory = plan_memory(make_run(), DEVICE)
    items = memory.training.items
    assert items["parameters"] == items["gradients"] == 4 * GB  # 32 GB over 8 ranks
    assert items["optimizer"] == 8 * GB
    assert items["gathered parameters"] == 2 * GB // 4 * 2  # two blocks in bf16
    assert items["replica that waits"] == (5 * GB + GB // 2) * 2  # encoder and VAE stay; the transformer moves out
    assert memory.training.row_bytes == (3 + 2 + 1) * GB
    assert memory.generating.items["transformer"] == 16 * GB
    assert memory.generating.items["trainer that waits"] == 12 * GB
    assert memory.step["weights to all replicas"] == 8 * 16 * GB
    assert memory.checkpoint_bytes == (32 + 64) * GB
    assert_invariants(memory)


def test_an_adapter_has_small_gradients_and_updates_and_frozen_shards():
    run = make_run(lora=True)
    items = plan_memory(run, DEVICE).training.items
    assert items["parameters"] == LORA_BYTES // 8
    assert items["gradients"] == 4 * GB // 10 // 8
    assert items["unreduced gradients (batch)"] == 4 * GB // 10  # deferred automatically, see digen.tsp.reduce
    assert update_bytes(run) == 2 * GB // 10  # the adapter alone, in bf16
    assert update_bytes(make_run(lora=True, merges_lora=True)) == 16 * GB


LORA_BYTES = 16 * GB + 4 * GB // 10


def test_gradients_wait_only_where_the_engine_would_let_them():
    def items(device_bytes, **tsp):
        return plan_memory(make_run(digen={"tsp": TspConfig(**tsp)}), device_bytes).training.items

    assert "unreduced gradients (tile)" in items(DEVICE)  # 32 GB are more than 0.4 of 64 free
    assert items(200 * GB)["unreduced gradients (batch)"] == 32 * GB
    assert items(DEVICE, reduce="batch")["unreduced gradients (batch)"] == 32 * GB
    assert items(DEVICE, reduce="tile")["unreduced gradients (tile)"] == 2 * GB


def test_copies_are_on_the_device_unless_parameters_are_offloaded():
    digen = {"ema": EmaConfig(enable=True), "kl": KlConfig(coef=0.1)}
    here = plan_memory(make_run(digen=digen), DEVICE)
    assert here.training.items["EMA"] == 4 * GB
    replaced = "weights that a policy replaces"
    assert here.training.items["reference"] == here.training.items[replaced] == 4 * GB
    away = plan_memory(make_run(digen=digen, param_offload=True), DEVICE)
    assert not {"EMA", "reference"} & away.training.items.keys() and away.training.items[replaced] == 4 * GB
    assert away.host["offloaded parameters"] == 8 * (4 + 2 * 4) * GB
    assert not {"reference", replaced} & plan_memory(make_run(digen=digen, lora=True), DEVICE).training.items.keys()


def test_policies_that_an_objective_reads_are_counted():
    digen = {"loss": {"name": "diffusion_nft"}}
    here, plain = (plan_memory(make_run(digen=changes), DEVICE) for changes in (digen, {}))
    names = ("policy old", "reference", "weights that a policy replaces")
    assert [here.training.items[name] for name in names] == [4 * GB] * 3
    waiting = [plan.generating.items["trainer that waits"] for plan in (here, plain)]
    assert waiting[0] - waiting[1] == 2 * 4 * GB
    assert here.checkpoint_bytes - plain.checkpoint_bytes == 8 * 4 * GB  # `old`; the reference is not saved
    adapter = plan_memory(make_run(digen=digen, lora=True), DEVICE).training.items
    assert "reference" not in adapter and adapter["policy old"] == adapter["weights that a policy replaces"]
    away = plan_memory(make_run(digen=digen, param_offload=True), DEVICE)
    assert "policy old" not in away.training.items
    assert away.host["offloaded parameters"] == 8 * (4 + 2 * 4) * GB


def test_offloading_helps_the_phase_in_which_the_trainer_waits_and_costs_host_memory():
    plain, away = (
        plan_memory(make_run(), DEVICE),
        plan_memory(make_run(param_offload=True, optimizer_offload=True), DEVICE),
    )
    assert away.generating.items["trainer that waits"] == 0 < plain.generating.items["trainer that waits"]
    assert away.training.total == plain.training.total
    assert sum(away.host.values()) - sum(plain.host.values()) == 8 * 12 * GB


def test_separate_pools_share_no_device():
    memory = plan_memory(make_run(is_split=True, frees_replica=False), DEVICE)
    assert "replica that waits" not in memory.training.items
    assert "trainer that waits" not in memory.generating.items
    assert_invariants(memory)


def test_a_tile_has_the_rows_that_the_engine_would_choose_and_no_more_than_there_are():
    def rows(device_bytes, num_prompts=4, **tsp):
        run = make_run(digen={"tsp": TspConfig(**tsp)}, num_prompts=num_prompts)
        return plan_memory(run, device_bytes).training.num_rows

    assert rows(60 * GB) == 4  # 54 GB less 30 fixed ones, in rows of 6
    assert rows(60 * GB, samples_per_tile=2, steps_per_tile=3) == 6
    assert rows(2000 * GB, num_prompts=1) == 9  # 8 samples x 9 steps over 8 ranks
    assert rows(None) == 1


def test_tensor_parallelism_divides_the_transformer_alone():
    items = plan_memory(make_run(rollout_name="vllm_omni", tensor_parallel=4), DEVICE).generating.items
    assert items["transformer"] == 4 * GB
    assert items["text encoder"] == 10 * GB


def test_without_checkpointing_a_row_keeps_everything():
    assert plan_memory(make_run(recomputes=False), DEVICE).training.row_bytes == 101 * GB


def test_tables_are_whole_on_every_rank():
    run = make_run()
    with_tables = replace(run, measured=replace(MEASURED, counts=replace(MEASURED.counts, buffer_bytes=GB)))
    before, after = (plan_memory(each, DEVICE).training.items["parameters"] for each in (run, with_tables))
    assert after - before == GB


def test_unknown_memory_gives_no_verdict():
    memory = plan_memory(make_run(digen={"rollout": RolloutConfig(max_batch_size=1), "gap": GapConfig()}), None)
    assert memory.fits is None and memory.limit_bytes is None
    assert_invariants(memory)


@pytest.mark.parametrize("shards", [1, 2, 8])
def test_more_shards_never_need_more(shards):
    state = plan_memory(make_run(num_shards=shards), DEVICE).training.items
    assert state["parameters"] * shards == 32 * GB

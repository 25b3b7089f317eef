# SPDX-License-Identifier: Apache-2.0
from dataclasses import replace

import pytest

from tests.plan.runs import GB, MEASURED, SETTINGS, make_run
from verl_digen.config import EmaConfig, KlConfig, RewardConfig, RolloutConfig, TspConfig
from verl_digen.schedulers.rules import GapConfig, TagConfig
from verl_digen.tools.plan.host import PROMPT_CACHE, checkpoint_bytes, page_locked_bytes, step_traffic, update_bytes
from verl_digen.tools.plan.memory import CONTEXT_BYTES, NCCL_BYTES, RUNTIME, plan_memory
from verl_digen.tools.plan.networks import Tensors

DEVICE = 80 * GB


def assert_invariants(memory):
    for phase in memory.phases:
        assert phase.total == sum(phase.items.values()) + phase.row_bytes * phase.num_rows
        assert all(size >= 0 for size in phase.items.values()) and phase.num_rows >= 1
    if memory.fits is not None:
        assert memory.fits == (memory.peak_bytes <= memory.limit_bytes)


def test_a_full_fine_tune_by_hand():
    run = make_run()
    memory = plan_memory(run, DEVICE)
    items = memory.training.items
    assert items["parameters"] == items["gradients"] == 4 * GB  # 32 GB over 8 ranks
    assert items["optimizer"] == 8 * GB
    assert items["gathered parameters"] == 2 * GB // 4 * 2  # two blocks in bf16
    assert items["replica that waits"] == 0  # all of its networks leave the device
    assert memory.num_recomputed == memory.num_blocks == 32
    assert memory.training.row_bytes == 6 * GB - GB // 16  # the last block but one, beside the gradients of the last
    assert memory.generating.items["transformer"] == 16 * GB
    assert memory.generating.items["trainer that waits"] == 12 * GB
    assert step_traffic(run)["weights to all replicas"] == 8 * 16 * GB
    assert checkpoint_bytes(run) == (32 + 64) * GB
    assert_invariants(memory)


def test_a_teacher_is_a_copy_of_the_adapter_whose_place_is_needed_twice():
    digen, adapter = {"loss": {"name": "opd"}}, 4 * GB // 10 // 8
    taught, plain = (plan_memory(make_run(lora=True, digen=changes), DEVICE) for changes in (digen, {}))
    added = {name: size for name, size in taught.training.items.items() if name not in plain.training.items}
    assert added == {"teacher": adapter, "weights that a policy replaces": adapter}
    waiting = [memory.generating.items["trainer that waits"] for memory in (taught, plain)]
    assert waiting[0] - waiting[1] == adapter
    offloaded = plan_memory(make_run(lora=True, digen=digen, param_offload=True), DEVICE)
    assert "teacher" not in offloaded.training.items and offloaded.host["copies of the weights"] == 8 * adapter


def test_an_adapter_has_small_gradients_and_updates_and_frozen_shards():
    run = make_run(lora=True)
    items = plan_memory(run, DEVICE).training.items
    assert items["parameters"] == LORA_BYTES // 8
    assert items["gradients"] == 4 * GB // 10 // 8
    waiting = items["unreduced gradients (batch)"] + items["gradients"]  # the former turn into the latter
    assert waiting == 4 * GB // 10  # deferred automatically, see digen.tsp.reduce
    assert update_bytes(run) == 2 * GB // 10  # the adapter alone, in bf16
    assert update_bytes(make_run(lora=True, merges_lora=True)) == 16 * GB


LORA_BYTES = 16 * GB + 4 * GB // 10


def test_gradients_wait_only_where_the_engine_would_let_them():
    def items(device_bytes, **tsp):
        return plan_memory(make_run(digen={"tsp": TspConfig(**tsp)}), device_bytes).training.items

    assert "unreduced gradients (tile)" in items(DEVICE)  # 32 GB are more than 0.4 of 64 free
    assert items(200 * GB)["unreduced gradients (batch)"] == (32 - 4) * GB
    assert items(DEVICE, reduce="batch")["unreduced gradients (batch)"] == (32 - 4) * GB
    assert items(DEVICE, reduce="tile")["unreduced gradients (tile)"] == GB  # a block's, in fp32


def test_copies_are_on_the_device_unless_parameters_are_offloaded():
    digen = {"ema": EmaConfig(enable=True), "kl": KlConfig(coef=0.1)}
    here = plan_memory(make_run(digen=digen), DEVICE)
    assert here.training.items["EMA"] == 4 * GB
    replaced = "weights that a policy replaces"
    assert here.training.items["reference"] == here.training.items[replaced] == 4 * GB
    away = plan_memory(make_run(digen=digen, param_offload=True), DEVICE)
    assert not {"EMA", "reference"} & away.training.items.keys() and away.training.items[replaced] == 4 * GB
    assert away.host["offloaded parameters"] == 8 * 4 * GB and away.host["copies of the weights"] == 8 * 2 * 4 * GB
    new, given = (plan_memory(make_run(digen=digen, lora=True, bare_reference=bare), DEVICE) for bare in (True, False))
    assert not {"reference", replaced} & new.training.items.keys()
    assert {"reference", replaced} <= given.training.items.keys()


def test_policies_that_an_objective_reads_are_counted():
    digen = {"loss": {"name": "diffusion_nft"}}
    here, plain = (plan_memory(make_run(digen=changes), DEVICE) for changes in (digen, {}))
    names = ("policy old", "reference", "weights that a policy replaces")
    assert [here.training.items[name] for name in names] == [4 * GB] * 3
    waiting = [plan.generating.items["trainer that waits"] for plan in (here, plain)]
    assert waiting[0] - waiting[1] == 2 * 4 * GB
    saved, less = checkpoint_bytes(make_run(digen=digen)), checkpoint_bytes(make_run())
    assert saved - less == 8 * 4 * GB  # `old`; the reference is not saved
    adapter = plan_memory(make_run(digen=digen, lora=True), DEVICE).training.items
    assert "reference" not in adapter and adapter["policy old"] == adapter["weights that a policy replaces"]
    away = plan_memory(make_run(digen=digen, param_offload=True), DEVICE)
    assert "policy old" not in away.training.items
    assert away.host["offloaded parameters"] == 8 * 4 * GB and away.host["copies of the weights"] == 8 * 2 * 4 * GB


def test_old_weights_are_kept_while_several_optimizer_steps_are_taken():
    digen = {"loss": {"name": "grpo_guard"}}
    one, two = (plan_memory(make_run(digen=digen, num_mini_batches=number), DEVICE) for number in (1, 2))
    assert two.training.items == one.training.items | dict.fromkeys(("old", "weights that a policy replaces"), 4 * GB)
    assert two.generating == one.generating


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
    def rows(device_bytes, num_prompts=4, gap=None, settings=None, **tsp):
        digen = {"tsp": TspConfig(**tsp), "gap": gap or GapConfig()}
        run = make_run(digen=digen, num_prompts=num_prompts, **(settings or {}))
        return plan_memory(run, device_bytes).training.num_rows

    assert rows(60 * GB) == 6  # 54 GB less 17 fixed ones, in rows of 6
    assert rows(60 * GB, samples_per_tile=2, steps_per_tile=3) == 6
    assert rows(2000 * GB, num_prompts=1) == 9  # 8 samples x 9 steps over 8 ranks
    assert rows(2000 * GB, settings={"num_mini_batches": 2}) == 2 * 9
    pools = {"is_split": True, "frees_replica": False}
    whole = GapConfig(enable=False)
    for gap, groups in ((GapConfig(), 8), (GapConfig(max_groups_per_fragment=1), 1), (whole, 10)):
        assert rows(2000 * GB, num_prompts=10, gap=gap, settings=pools) == groups * 9
    assert rows(None) == 1


def test_a_trainer_that_assists_keeps_a_vae():
    split = {"is_split": True, "frees_replica": False}
    alone, assisting = (
        plan_memory(make_run(**split, digen={"tag": TagConfig(policy=policy)}), DEVICE).training.items
        for policy in ("off", "bts")
    )
    assert assisting == alone | {"VAE of assistance": GB}


def test_tensor_parallelism_divides_the_transformer_alone():
    items = plan_memory(make_run(rollout_name="vllm_omni", tensor_parallel=4), DEVICE).generating.items
    assert items["transformer"] == 4 * GB
    assert items["text encoder"] == 10 * GB


def test_without_checkpointing_a_row_keeps_everything():
    assert plan_memory(make_run(recompute="none"), DEVICE).training.row_bytes == (1 + 32 * 3) * GB


def test_as_few_blocks_are_recomputed_as_the_tiles_ask_for():
    def plan(device_bytes, **settings):
        run = make_run(recompute="auto", is_accelerated=True, **settings)
        memory = plan_memory(run, device_bytes)
        return memory.num_recomputed, memory.training.num_rows

    one_row = {"tsp": TspConfig(samples_per_tile=1, steps_per_tile=1)}
    assert plan(1000 * GB, digen=one_row) == (0, 1)
    assert plan(80 * GB, digen=one_row) == (15, 1)  # 72 GB less 17 fixed ones: 1 + 17 x 3 of kept blocks, 1 of inputs
    assert plan(80 * GB) == (15, 1)  # 9 rows per tile would save 8 tiles and cost the other 17 blocks for each row
    assert plan_memory(make_run(recompute="auto"), DEVICE).num_recomputed == 0  # on a CPU
    assert plan_memory(make_run(recompute="auto", is_accelerated=True), None).num_recomputed == 32
    assert plan_memory(make_run(recompute=7), DEVICE).recomputed_share == 7 / 32


def test_inputs_that_wait_on_the_host_take_no_device_memory():
    plain, away = (plan_memory(make_run(offloads_activations=away), DEVICE) for away in (False, True))
    assert away.training.row_bytes == 4 * GB + GB // 16  # what is outside of blocks, one block, and its own inputs
    rows = away.training.num_rows
    assert away.host["inputs of recomputed blocks"] == 8 * rows * 2 * GB
    assert plain.training.num_rows < rows


def test_ranks_of_a_sequence_share_its_activations():
    one, four = (plan_memory(make_run(sequence_parallel=size), DEVICE) for size in (1, 4))
    assert four.training.row_bytes == -(-one.training.row_bytes // 4)
    assert four.training.num_rows == 4 * one.training.num_rows == 36  # 8 samples x 9 steps, of 8 and of 2 groups


def test_tables_are_whole_on_every_rank():
    run = make_run()
    with_tables = replace(run, measured=replace(MEASURED, counts=replace(MEASURED.counts, buffer_bytes=GB)))
    before, after = (plan_memory(each, DEVICE).training.items["parameters"] for each in (run, with_tables))
    assert after - before == GB


def test_unknown_memory_gives_no_verdict():
    memory = plan_memory(make_run(digen={"rollout": RolloutConfig(max_batch_size=1), "gap": GapConfig()}), None)
    assert memory.fits is None and memory.limit_bytes is None
    assert_invariants(memory)


def test_decoding_is_a_phase_of_its_own_of_a_few_pictures_or_one_video():
    memory = plan_memory(make_run(), DEVICE)
    assert memory.decoding.items == memory.generating.items
    assert (memory.decoding.num_rows, memory.decoding.row_bytes) == (4, GB)
    one = {"rollout": RolloutConfig(max_batch_size=1)}
    assert plan_memory(make_run(digen=one), DEVICE).decoding.num_rows == 1
    alone = replace(make_run(), measured=replace(MEASURED, decodes_together=False))
    assert plan_memory(alone, DEVICE).decoding.num_rows == 1
    large = replace(make_run(), measured=replace(MEASURED, decoding_bytes=20 * GB, tiled_bytes=20 * GB))
    decoding = plan_memory(large, DEVICE)
    assert decoding.generating.total < decoding.limit_bytes < decoding.decoding.total
    assert decoding.fits is False and max(phase.total for phase in decoding.of_replica) == decoding.decoding.total
    assert_invariants(decoding)
    tiled = replace(large, measured=replace(large.measured, decoding_bytes=80 * GB, tiled_bytes=GB))
    found = plan_memory(tiled, DEVICE).decoding
    assert (found.row_bytes, found.num_rows, found.rows_name) == (GB, 1, "sample decoded in tiles")
    on_vllm_omni = replace(tiled, settings=replace(tiled.settings, rollout_name="vllm_omni"))
    assert plan_memory(on_vllm_omni, DEVICE).decoding.row_bytes == 80 * GB, "which does not"


def test_processes_take_memory_of_an_accelerator_that_no_tensor_is():
    def runtime(**settings):
        memory = plan_memory(make_run(**settings), DEVICE)
        return [phase.items.get(RUNTIME) for phase in memory.phases]

    assert runtime() == [None] * 3
    assert runtime(is_accelerated=True) == [2 * CONTEXT_BYTES + NCCL_BYTES] * 3 == [2 * GB] * 3
    shared = {"functions": {"pickscore": {"weight": 1.0, "timeshare": True}, "hpsv2": {"weight": 1.0, "num_gpus": 1}}}
    rewarded = runtime(is_accelerated=True, digen={"reward": RewardConfig(**shared)})
    assert rewarded == [3 * CONTEXT_BYTES + NCCL_BYTES] * 3, "the context of the timeshared reward's process"
    alone = runtime(is_accelerated=True, is_split=True, frees_replica=False)
    assert alone == [CONTEXT_BYTES + NCCL_BYTES, 2 * CONTEXT_BYTES, 2 * CONTEXT_BYTES], "a server and its worker"


def test_cached_prompts_lie_on_the_host_and_of_vllm_omni_on_the_device():
    memory, other = (
        plan_memory(replace(make_run(rollout_name=name), measured=replace(MEASURED, embedding_bytes=4 * 10**6)), DEVICE)
        for name in ("diffusers", "vllm_omni")
    )
    size = 1024 * 4 * 10**6  # digen.rollout.embed_cache_size prompts
    assert PROMPT_CACHE not in memory.generating.items and memory.host[PROMPT_CACHE] == 8 * size
    assert other.generating.items[PROMPT_CACHE] == size and PROMPT_CACHE not in other.host
    assert other.training.items["replica that waits"] == 0, "it keeps none while it sleeps"


def test_encoders_that_wait_on_the_host_and_the_transformer_are_never_there_together():
    """16 GB of transformer, 10 of encoder and 1 of VAE."""
    settings = {"is_accelerated": True, "is_split": True, "frees_replica": False, "shares_host_copies": True}
    on_device, on_host = (
        plan_memory(make_run(lora=True, digen={"rollout": RolloutConfig(encoders=place)}, **settings), DEVICE)
        for place in ("device", "host")
    )
    assert on_device.encoding is None and on_device.generating.items["text encoder"] == 10 * GB
    assert on_host.encoding is not None and on_host.encoding.total == 10 * GB + 2 * CONTEXT_BYTES
    for phase, before in ((on_host.generating, on_device.generating), (on_host.decoding, on_device.decoding)):
        assert before.total - phase.total == 10 * GB
    assert "replicas that wait" not in on_device.host
    adapters = 8 * on_host.generating.items["adapter"]  # they train, so each replica has its own copy
    assert on_host.host["replicas that wait"] == 27 * GB + adapters
    assert_invariants(on_host)
    for size, waits in ((51, True), (53, False)):  # auto: 26 GB together
        assert (plan_memory(make_run(lora=True, **settings), size * GB).encoding is not None) is waits
    assert plan_memory(make_run(lora=True, **(settings | {"is_accelerated": False})), 51 * GB).encoding is None
    colocated = {"is_accelerated": True, "frees_replica": False}
    awake = (
        plan_memory(make_run(lora=True, digen={"rollout": RolloutConfig(encoders=place)}, **colocated), DEVICE)
        for place in ("device", "host")
    )
    left = [memory.training.items["replica that waits"] for memory in awake]
    assert left[0] - left[1] == 10 * GB


# -- host memory of a node, by hand --------------------------------------------------------------------------
MIB = 1 << 20


@pytest.mark.parametrize(("asked", "taken"), [(0, 0), (1, 1), (3, 4), (4, 4), (5 * MIB, 8 * MIB), (8 * MIB, 8 * MIB)])
def test_page_locked_memory_comes_in_powers_of_two(asked, taken):
    assert page_locked_bytes(asked) == taken


def test_offloaded_shards_are_rounded_one_by_one():
    """Shards of each of 8 ranks: 5 MiB of ten frozen tensors, 1.5 MiB of two trained ones."""
    tensors = (Tensors(40 * MIB, False, 10), Tensors(12 * MIB, True, 2))
    run = make_run(param_offload=True, optimizer_offload=True, is_accelerated=True)
    host = plan_memory(replace(run, measured=replace(MEASURED, tensors=tensors)), DEVICE).host
    assert host["offloaded parameters"] == 8 * (10 * 8 + 2 * 2) * MIB
    assert host["offloaded optimizer"] == 8 * 2 * (2 * 2) * MIB


ONE = {"num_trainer_devices": 1, "num_generator_devices": 1, "trainer_devices_per_node": 1}
ONE |= {"generator_devices_per_node": 1, "param_offload": True, "is_accelerated": True}
SAME = replace(SETTINGS.dtypes, model=SETTINGS.dtypes.rollout)


@pytest.mark.parametrize(
    ("changes", "offloaded", "base", "waiting"),
    [
        ({"dtypes": SAME}, 4, 3000, 11),
        ({"dtypes": SAME, "trainer_devices_per_node": 8}, 8 * 4, 3000, 11),
        ({"dtypes": SAME, "merges_lora": True}, 4, 3000, 11),
        ({}, 4, 3000, 27),  # the replica has the base in another dtype
        ({"dtypes": SAME, "num_trainer_devices": 8}, 512.5, None, 27),
        ({"dtypes": SAME, "shares_host_copies": False}, 4096 + 4, None, 27),
    ],
)
def test_a_frozen_base_that_a_rank_holds_whole_is_there_once_and_is_not_rounded(changes, offloaded, base, waiting):
    """3000 MiB of base, of which the replica has 16 GB by hand, and 3 MiB of adapter."""
    run = make_run(lora=True, **(ONE | {"shares_host_copies": True} | changes))
    tensors = (Tensors(3000 * MIB, False, 1), Tensors(3 * MIB, True, 1))
    host = plan_memory(replace(run, measured=replace(run.measured, tensors=tensors)), DEVICE).host
    assert host["offloaded parameters"] == offloaded * MIB
    assert host.get("frozen base, offloaded") == (None if base is None else base * MIB)
    assert host["replicas that wait"] == waiting * GB


def test_a_node_holds_the_state_of_all_its_ranks_and_replicas():
    """Rank 0's checkpoint, and of each replica that sleeps encoder and VAE; the next update brings the transformer."""
    memory = plan_memory(make_run(param_offload=True), DEVICE)
    assert memory.host == {
        "trajectories and conditions": 32 * 10**7 + 4 * 10**6,
        "checkpoint of rank 0 while it loads": 32 * GB,
        "offloaded parameters": 8 * 4 * GB,
        "replicas that wait": 8 * 11 * GB,
        "prompt cache": 0,
    }
    assert memory.host_bytes == sum(memory.host.values())


@pytest.mark.parametrize(("shares", "copies"), [(True, 27), (False, 8 * 27)])
def test_sleeping_processes_of_a_node_share_one_copy_of_what_an_adapter_leaves_alone(shares, copies):
    """16 GB of base, 11 of encoder and VAE."""
    run = make_run(lora=True, shares_host_copies=shares)
    assert plan_memory(run, DEVICE).host["replicas that wait"] == copies * GB


def test_of_separate_pools_the_fuller_node_counts():
    split = plan_memory(make_run(is_split=True, frees_replica=False, param_offload=True), DEVICE).host
    expected = {"trajectories and conditions", "staged weight updates", "prompt cache"}  # 128 GB to the trainer's 64
    assert split.keys() == expected


def test_ranks_that_generate_hold_one_network():
    settings = {"rollout_name": "trainer", "is_accelerated": True}
    digen = {"rollout": RolloutConfig(encoders="host")}
    runs = [make_run(lora=True, **how) for how in (settings, {"is_accelerated": True})]
    memory, other = (plan_memory(run, DEVICE) for run in runs)
    assert "transformer" not in memory.generating.items and "replica that waits" not in memory.training.items
    assert memory.generating.items["trainer that waits"] == other.generating.items["trainer that waits"]
    assert memory.generating.items["gathered parameters"] == memory.training.items["gathered parameters"]
    assert memory.generating.items[RUNTIME] == other.generating.items[RUNTIME] - CONTEXT_BYTES
    own, others = (step_traffic(run)["weights to all replicas"] for run in runs)
    assert own == 0 < others
    turns = plan_memory(make_run(lora=True, digen=digen, **settings), DEVICE)
    assert turns.encoding is not None and {*turns.encoding.items} == {"text encoder", RUNTIME}
    assert turns.host["offloaded parameters"] > 0, "they leave the device for an encoding"
    assert_invariants(turns)

# SPDX-License-Identifier: Apache-2.0
import random
from dataclasses import replace

import pytest

from tests.plan.runs import BLOCK, GB, LORA, MEASURED, make_run
from verl_digen.config import RolloutConfig
from verl_digen.tools.plan import remedies
from verl_digen.tools.plan.memory import plan_memory
from verl_digen.tools.plan.remedies import find_remedies
from verl_digen.tools.plan.run import Job


def with_adapter(run):
    def read(*words):
        return Job(replace(run.settings, is_lora=True), replace(run.measured, counts=LORA))

    return read


def assert_invariants(run, device_bytes, remedies):
    """`fits` of each remedy agrees with the limit, and only the last one may fit."""
    limit = plan_memory(run, device_bytes).limit_bytes
    assert limit is not None
    assert not any(remedy.fits for remedy in remedies[:-1])
    for remedy in remedies:
        assert remedy.fits == (max(remedy.training_bytes, remedy.generating_bytes) <= limit)


def test_checkpointing_comes_before_an_adapter_and_that_before_devices():
    run = make_run(recompute="none")
    names = [remedy.override for remedy in find_remedies(run, 80 * GB, with_adapter(run))]
    assert names == ["actor_rollout_ref.model.recompute_blocks=all"]  # on a CPU, auto recomputes nothing
    (adapter,) = [name for name in _names(make_run(), 22 * GB) if "lora_rank" in name]
    assert adapter == "actor_rollout_ref.model.lora_rank=32 actor_rollout_ref.actor.fsdp_config.model_dtype=bf16"


def _names(run, device_bytes):
    return [remedy.override for remedy in find_remedies(run, device_bytes, with_adapter(run))]


def test_what_turns_out_needless_is_not_asked_for():
    """Offloading helps a little, but a batch of one sample suffices."""
    run = make_run()
    huge = replace(
        run, measured=replace(MEASURED, sampling=replace(MEASURED.sampling, blocks=(replace(BLOCK, saved=20 * GB),)))
    )
    names = _names(huge, 80 * GB)
    assert names == ["digen.rollout.max_batch_size=1"]


def test_encoders_leave_the_device_before_a_batch_is_cut():
    run = make_run(lora=True, is_accelerated=True, digen={"rollout": RolloutConfig(encoders="device")})
    needed = max(phase.total for phase in plan_memory(run, 200 * GB).of_replica)
    names = _names(run, int((needed - 9 * GB) / 0.9))
    assert names[-1] == "digen.rollout.encoders=host" and len(names) <= 2


def test_a_replica_leaves_the_device_before_anything_else_changes():
    names = _names(make_run(lora=True, frees_replica=False), 40 * GB)
    assert names == ["actor_rollout_ref.rollout.free_cache_engine=true", "digen.rollout.max_batch_size=1"]


@pytest.mark.parametrize("name", ["trainer", "vllm_omni"])
def test_a_base_in_int8_is_for_ranks_that_generate(name):
    run = replace(
        make_run(lora=True, rollout_name=name, fsdp_size=1, is_accelerated=True),
        measured=with_weights(param_bytes=40 * GB),
    )
    asked = []

    def read(*words):
        asked.append(words)
        return replace(run, measured=with_weights(param_bytes=GB, num_int8=20 * GB))

    names = [remedy.override for remedy in find_remedies(run, 40 * GB, read)]
    assert ("actor_rollout_ref.model.int8_base=true" in names) == (name == "trainer")
    assert not any("lora_rank" in word for words in asked for word in words)  # the run's own rank stays


def with_weights(**changes):
    return replace(MEASURED, counts=replace(LORA, **changes))


def test_tensor_parallelism_is_for_replicas_that_do_it():
    big = replace(MEASURED, counts=replace(LORA, num_params=40 * GB), transformer_bytes=80 * GB)
    for name in ("diffusers", "vllm_omni"):
        run = replace(make_run(lora=True, rollout_name=name, is_split=True, frees_replica=False), measured=big)
        asked = any("tensor_model_parallel_size" in word for word in _names(run, 80 * GB))
        assert asked == (name == "vllm_omni")


def test_more_devices_hold_no_smaller_shards_than_fsdp_size_allows():
    run = make_run(fsdp_size=2, num_trainer_devices=2)
    *_, (_, double) = remedies._candidates(True, with_adapter(run))
    assert double(run).settings.num_trainer_devices == 4 and double(run).settings.num_shards == 2


def test_any_run_is_told_the_truth():
    rng = random.Random(0)
    for _ in range(20):
        run = make_run(
            lora=rng.random() < 0.3,
            recompute=rng.choice(["all", "none", 5]),
            param_offload=rng.random() < 0.5,
            optimizer_offload=rng.random() < 0.5,
            reshard=rng.random() < 0.5,
            is_split=rng.random() < 0.5,
            frees_replica=rng.random() < 0.5,
            rollout_name=rng.choice(["diffusers", "vllm_omni"]),
        )
        device_bytes = rng.randrange(20, 150) * GB
        remedies = find_remedies(run, device_bytes, with_adapter(run))
        assert_invariants(run, device_bytes, remedies)
        if plan_memory(run, device_bytes).fits:
            assert remedies == []


def test_a_change_that_changes_nothing_is_not_planned(monkeypatch):
    planned = []

    def plan(run, device_bytes):
        planned.append(run)
        return plan_memory(run, device_bytes)

    monkeypatch.setattr(remedies, "plan_memory", plan)
    run = make_run()
    found = find_remedies(run, 1 * GB, with_adapter(run))
    assert len(planned) == len(set(map(repr, planned))) + len(found)  # which are planned once more, to be described

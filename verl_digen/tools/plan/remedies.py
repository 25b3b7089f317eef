# SPDX-License-Identifier: Apache-2.0
"""Config changes that make a run fit: real keys, tried in order, kept if they help, until the run fits. Cheap changes
come first: freeing unneeded memory, then more compute, then a restricted optimizer (LoRA), then devices.

Invariant (tests/plan/test_remedies.py): the run with all remedies needs no more than with all but the last, and fits if
the last one says so.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

from verl_digen.rollout.registry import TRAINER
from verl_digen.tools.plan.memory import Memory, plan_memory
from verl_digen.tools.plan.run import Job, Settings

MAX_DOUBLINGS = 6
"""Maximum number of times the devices are doubled."""
LORA_RANK = 32
"""LoRA rank of flow_grpo."""
LORA_WORDS = (f"actor_rollout_ref.model.lora_rank={LORA_RANK}", "actor_rollout_ref.actor.fsdp_config.model_dtype=bf16")
"""Words of a run that trains an adapter."""
DRAW_WORDS = ("actor_rollout_ref.rollout.name=trainer", "actor_rollout_ref.actor.fsdp_config.param_offload=false")
"""Words of a run whose ranks generate."""
INT8_WORD = "actor_rollout_ref.model.int8_base=true"
TENSOR_PARALLEL = (2, 4, 8)


@dataclass(frozen=True)
class Remedy:
    """One change, on top of the ones before it, and the bytes on a device of either kind after it."""

    override: str
    """Override as the user types it."""
    training_bytes: int
    generating_bytes: int
    fits: bool


Change = tuple[str, Callable[[Job], Job]]
"""(override as typed, empty where the number of devices changes; job -> changed job, the same one where there is
nothing to change)."""


def find_remedies(run: Job, device_bytes: int, read: Callable[..., Job]) -> list[Remedy]:
    """Find changes, in order; empty if the run fits or nothing helps. The last one says if they suffice. `read` plans
    the same run with more words."""
    changes: list[Change] = []
    changed, before = run, plan_memory(run, device_bytes)
    for change in _candidates(run.settings.is_lora, cache(read)):
        if before.fits:
            break
        after = change[1](changed)
        memory = before if after == changed else plan_memory(after, device_bytes)
        if _excess(memory) < _excess(before):
            changed, before = after, memory
            changes.append(change)
    for change in list(changes) if before.fits else ():  # those without which it fits, too, are left out
        others, without = [other for other in changes if other is not change], run
        for _, apply in others:
            without = apply(without)
        if plan_memory(without, device_bytes).fits:
            changes = others
    found = []
    for override, apply in changes:
        run = apply(run)
        memory, override = plan_memory(run, device_bytes), override or f"gpus={run.settings.num_devices}"
        generating_bytes = max(phase.total for phase in memory.of_replica)
        found.append(Remedy(override, memory.training.total, generating_bytes, bool(memory.fits)))
    return found


def _excess(memory: Memory) -> int:
    """Bytes over the limit, summed over the phases."""
    assert memory.limit_bytes is not None
    return sum(max(0, phase.total - memory.limit_bytes) for phase in memory.phases)


def _candidates(has_adapter: bool, read: Callable[..., Job]) -> Iterator[Change]:
    model, rollout = "actor_rollout_ref.model", "actor_rollout_ref.rollout"
    actor = "actor_rollout_ref.actor.fsdp_config"

    def change(override: str, is_possible: Callable[[Settings], bool] = lambda settings: True, **values: Any):
        return override, lambda run: _set(run, **values) if is_possible(run.settings) else run

    yield change(f"{rollout}.free_cache_engine=true", lambda settings: not settings.is_split, frees_replica=True)
    yield change("digen.rollout.encoders=host", lambda settings: settings.is_ours, rollout={"encoders": "host"})
    yield change(f"{actor}.reshard_after_forward=true", reshard=True)
    yield change(f"{model}.whole_base=false", whole_base=False)
    yield change(f"{actor}.optimizer_offload=true", optimizer_offload=True)
    yield change(f"{actor}.param_offload=true", lambda settings: not settings.draws, param_offload=True)
    yield change("digen.rollout.decode_batch_size=1", rollout={"decode_batch_size": 1})
    yield change(
        "digen.rollout.max_batch_size=auto",
        lambda settings: settings.is_ours and settings.is_accelerated,
        rollout={"max_batch_size": "auto"},
    )
    yield change("digen.rollout.max_batch_size=1", rollout={"max_batch_size": 1})
    yield change(" ".join(DRAW_WORDS), _may_draw, rollout_name=TRAINER, param_offload=False)
    yield change(
        "digen.tsp.samples_per_tile=1 digen.tsp.steps_per_tile=1", tsp={"samples_per_tile": 1, "steps_per_tile": 1}
    )
    for blocks in ("auto", "all"):
        yield change(f"{model}.recompute_blocks={blocks}", recompute=blocks)
    yield change(
        f"{model}.enable_activation_offload=true",
        lambda settings: settings.recompute not in ("none", 0),
        offloads_activations=True,
    )
    yield change("digen.tsp.reduce=tile", tsp={"reduce": "tile"})
    yield " ".join(LORA_WORDS), lambda run: run if run.settings.is_lora else _keeping(run, read(*LORA_WORDS))
    adapter = () if has_adapter else LORA_WORDS
    yield INT8_WORD, lambda run: _in_int8(run, partial(read, *DRAW_WORDS, *adapter, INT8_WORD))
    for size in TENSOR_PARALLEL:
        yield f"{rollout}.tensor_model_parallel_size={size}", partial(_tensor_parallel, size)
    for _ in range(MAX_DOUBLINGS):
        yield "", _double


def _set(run: Job, **values: Any) -> Job:
    """The run with other settings; a mapping has the changed values of a section of `digen`."""
    digen, own = run.settings.digen, dict[str, Any]()
    for name, value in values.items():
        if isinstance(value, dict):
            digen = replace(digen, **{name: replace(getattr(digen, name), **value)})
        else:
            own[name] = value
    return replace(run, settings=replace(run.settings, digen=digen, **own))


def _may_draw(settings: Settings) -> bool:
    is_fp8, timeshared = settings.digen.sampling.outside.fp8, settings.digen.reward.timeshared
    return settings.is_ours and not (settings.draws or settings.is_split or timeshared or is_fp8)


def _keeping(run: Job, lora: Job) -> Job:
    """The run `lora` with the settings that earlier changes made to `run`."""
    dtypes, merges = lora.settings.dtypes, lora.settings.merges_lora
    kept = replace(run.settings, is_lora=True, bare_reference=True, dtypes=dtypes, merges_lora=merges)
    return replace(lora, settings=kept)


def _in_int8(run: Job, read: Callable[[], Job]) -> Job:
    return replace(run, measured=read().measured) if run.settings.draws and run.settings.is_lora else run


def _tensor_parallel(size: int, run: Job) -> Job:
    settings = run.settings
    if settings.is_ours or size <= settings.tensor_parallel or settings.num_generator_devices % size:
        return run
    return _set(run, tensor_parallel=size)


def _double(run: Job) -> Job:
    trainer, generator = run.settings.num_trainer_devices, run.settings.num_generator_devices
    return _set(run, num_trainer_devices=2 * trainer, num_generator_devices=2 * generator)

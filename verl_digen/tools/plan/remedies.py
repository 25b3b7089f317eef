# SPDX-License-Identifier: Apache-2.0
"""Config changes that make a run fit: real keys, tried in order, kept if they help, until the run fits.

- Cheap changes first: freeing unneeded memory, then more compute, then a restricted optimizer (LoRA), then devices.
- Every remedy is planned like the run itself: its numbers come from the changed plan.

Invariant (tests/plan/test_remedies.py): the run with all remedies needs no more than with all but the last, and fits
if the last one says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

from verl_digen.rollout.registry import TRAINER
from verl_digen.tools.plan.memory import Memory, plan_memory
from verl_digen.tools.plan.run import Run

MAX_DOUBLINGS = 6
"""Maximum number of times the devices are doubled."""
LORA_RANK = 32
"""LoRA rank of flow_grpo."""
LORA_WORDS = (
    f"actor_rollout_ref.model.lora_rank={LORA_RANK}",
    "actor_rollout_ref.actor.fsdp_config.model_dtype=bf16",
)
"""Words of a run that trains an adapter."""
DRAW_WORDS = (
    "actor_rollout_ref.rollout.name=trainer",
    "actor_rollout_ref.actor.fsdp_config.param_offload=false",
)
"""Words of a run whose ranks generate."""
INT8_WORD = "actor_rollout_ref.model.int8_base=true"
MAX_TENSOR_PARALLEL = 8


@dataclass(frozen=True)
class Remedy:
    """One change, on top of the ones before it."""

    override: str
    """Override as the user types it."""
    training_bytes: int
    """Bytes on a training device after the change."""
    generating_bytes: int
    """Bytes on a generating device after the change."""
    fits: bool


def find_remedies(run: Run, device_bytes: int, read: Callable[..., Run]) -> list[Remedy]:
    """Find changes, in order; empty if the run fits or nothing helps. The last one says if they suffice.

    Args:
        read: plans the same run with more words.
    """
    changes: list[_Change] = []
    changed, before = run, plan_memory(run, device_bytes)
    for change in _candidates(run.settings.is_lora, cache(read)):
        if before.fits:
            break
        after = change.apply(changed)
        if after is None or after == changed:
            continue
        memory = plan_memory(after, device_bytes)
        if _excess(memory) < _excess(before):
            changed, before = after, memory
            changes.append(change)
    if before.fits:
        changes = _without_needless(run, device_bytes, changes)
    return list(_describe(run, device_bytes, changes))


def _without_needless(run: Run, device_bytes: int, changes: list[_Change]) -> list[_Change]:
    """Drop the changes without which the run still fits."""
    for change in list(changes):
        others = [other for other in changes if other is not change]
        *_, without = _applied(run, others)
        if plan_memory(without, device_bytes).fits:
            changes = others
    return changes


def _applied(run: Run, changes: list[_Change]) -> Iterator[Run]:
    """Yield the run, then the run after each change."""
    yield run
    for change in changes:
        after = change.apply(run)
        run = run if after is None else after
        yield run


def _describe(run: Run, device_bytes: int, changes: list[_Change]) -> Iterator[Remedy]:
    _, *runs = _applied(run, changes)
    for change, changed in zip(changes, runs, strict=True):
        memory = plan_memory(changed, device_bytes)
        override = change.override or f"gpus={changed.settings.num_devices}"
        yield Remedy(override, memory.training.total, memory.replica_bytes, bool(memory.fits))


def _excess(memory: Memory) -> int:
    """Bytes over the limit, summed over the phases."""
    assert memory.limit_bytes is not None
    return sum(max(0, phase.total - memory.limit_bytes) for phase in memory.phases)


@dataclass(frozen=True)
class _Change:
    override: str
    """Override as typed; empty: the number of devices changes."""
    apply: Callable[[Run], Run | None]
    """Run -> changed run, or None if there is nothing to change."""


def _candidates(has_adapter: bool, read: Callable[..., Run]) -> Iterator[_Change]:
    model, actor = "actor_rollout_ref.model", "actor_rollout_ref.actor.fsdp_config"
    rollout = "actor_rollout_ref.rollout"
    yield _Change(
        f"{rollout}.free_cache_engine=true",
        lambda run: None if run.settings.is_split else _set(run, frees_replica=True),
    )
    yield _Change(
        "digen.rollout.encoders=host",
        lambda run: _set_digen(run, "rollout", encoders="host") if run.settings.is_ours else None,
    )
    yield _Change(f"{actor}.reshard_after_forward=true", lambda run: _set(run, reshard=True))
    yield _Change(f"{model}.whole_base=false", lambda run: _set(run, whole_base=False))
    yield _Change(f"{actor}.optimizer_offload=true", lambda run: _set(run, optimizer_offload=True))
    yield _Change(
        f"{actor}.param_offload=true", lambda run: None if run.settings.draws else _set(run, param_offload=True)
    )
    yield _Change("digen.rollout.decode_batch_size=1", partial(_set_digen, section="rollout", decode_batch_size=1))
    yield _Change("digen.rollout.max_batch_size=auto", _as_many_as_fit)
    yield _Change("digen.rollout.max_batch_size=1", partial(_set_digen, section="rollout", max_batch_size=1))
    yield _Change(" ".join(DRAW_WORDS), _draw)
    one_row = partial(_set_digen, section="tsp", samples_per_tile=1, steps_per_tile=1)
    yield _Change("digen.tsp.samples_per_tile=1 digen.tsp.steps_per_tile=1", one_row)
    for blocks in ("auto", "all"):
        yield _Change(f"{model}.recompute_blocks={blocks}", partial(_set, recompute=blocks))
    yield _Change(
        f"{model}.enable_activation_offload=true",
        lambda run: _set(run, offloads_activations=True) if run.settings.recompute not in ("none", 0) else None,
    )
    yield _Change("digen.tsp.reduce=tile", partial(_set_digen, section="tsp", reduce="tile"))
    yield _Change(
        " ".join(LORA_WORDS),
        lambda run: None if run.settings.is_lora else _keeping(run, read(*LORA_WORDS)),
    )
    adapter = () if has_adapter else LORA_WORDS
    yield _Change(INT8_WORD, lambda run: _in_int8(run, partial(read, *DRAW_WORDS, *adapter, INT8_WORD)))
    size = 2
    while size <= MAX_TENSOR_PARALLEL:
        yield _Change(f"{rollout}.tensor_model_parallel_size={size}", partial(_tensor_parallel, size))
        size *= 2
    for _ in range(MAX_DOUBLINGS):
        yield _Change("", _double)


def _set(run: Run, **values: Any) -> Run:
    return replace(run, settings=replace(run.settings, **values))


def _draw(run: Run) -> Run | None:
    settings = run.settings
    if (
        settings.draws
        or settings.is_split
        or not settings.is_ours
        or settings.digen.reward.timeshared
        or settings.digen.sampling.outside.fp8
    ):
        return None
    return _set(run, rollout_name=TRAINER, param_offload=False)


def _as_many_as_fit(run: Run) -> Run | None:
    settings = run.settings
    is_measured = settings.is_ours and settings.is_accelerated
    return _set_digen(run, "rollout", max_batch_size="auto") if is_measured else None


def _set_digen(run: Run, section: str, **values: str | int) -> Run:
    """The run with other values in a section of its config."""
    digen = run.settings.digen
    return _set(run, digen=replace(digen, **{section: replace(getattr(digen, section), **values)}))


def _keeping(run: Run, lora: Run) -> Run:
    """The run `lora` with the settings that earlier changes made to `run`."""
    kept = replace(run.settings, is_lora=True, dtypes=lora.settings.dtypes, merges_lora=lora.settings.merges_lora)
    return replace(lora, settings=kept)


def _in_int8(run: Run, read: Callable[[], Run]) -> Run | None:
    if not (run.settings.draws and run.settings.is_lora):
        return None
    return replace(run, measured=read().measured)


def _tensor_parallel(size: int, run: Run) -> Run | None:
    settings = run.settings
    if settings.is_ours or size <= settings.tensor_parallel or settings.num_generator_devices % size:
        return None
    return _set(run, tensor_parallel=size)


def _double(run: Run) -> Run:
    settings = run.settings
    is_whole = settings.num_shards == settings.num_trainer_devices
    return _set(
        run,
        num_trainer_devices=2 * settings.num_trainer_devices,
        num_generator_devices=2 * settings.num_generator_devices,
        num_shards=2 * settings.num_shards if is_whole else settings.num_shards,
    )

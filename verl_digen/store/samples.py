# SPDX-License-Identifier: Apache-2.0
"""Samples in TransferQueue: the columns of a trajectory's record, and its tag, under `SampleName.key`; and prompts'
status. TransferQueue keeps both as plain mappings, which verl's replay buffer reads.

A prompt is pending -> finished | failure, and with rewards that take turns with the replicas running in between. A
failed prompt has no samples, and its status has the reason.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import transfer_queue as tq
from pydantic import TypeAdapter
from transfer_queue import KVBatchMeta

from verl_digen.errors import RunStopped, describe, plain
from verl_digen.store.client import StoredRow, put
from verl_digen.store.keys import TRAIN
from verl_digen.types import SampleTag, Trajectory

TAG = "digen"
"""Name of the sample's own facts, beside verl's; a prompt's status has none."""
_TAGS = TypeAdapter(SampleTag)


def to_entry(tag: SampleTag, step: int) -> dict[str, Any]:
    """Plain mapping of a tag; `step` is the optimizer step that the sample is for."""
    return {
        "status": "success",  # a failed group stores no samples
        "seq_len": 1,  # verl balances tokens, which diffusion has none of
        "global_steps": step,
        "min_global_steps": tag.facts.version,
        "max_global_steps": tag.facts.last_version,
        TAG: _TAGS.dump_python(tag, warnings=False),  # a number of another kind is stored as it is
    }


def from_entry(entry: Mapping[str, Any]) -> SampleTag:
    """Inverse of `to_entry`, without the step; transport makes lists of tuples."""
    return _TAGS.validate_python(entry[TAG])


async def put_samples(samples: Mapping[str, tuple[Trajectory, SampleTag]], step: int) -> None:
    """Store samples, key -> trajectory and tag, for the trainer's ranks and optimizer step `step`."""
    await put(TRAIN, {key: StoredRow(to_entry(tag, step), one.record.columns()) for key, (one, tag) in samples.items()})


async def put_tags(partition: str, tags: Mapping[str, SampleTag], step: int) -> None:
    """Store the tags of samples that are not trained; `step` is the number of optimizer steps taken."""
    await put(partition, {key: StoredRow(to_entry(tag, step)) for key, tag in tags.items()})


def clear(partition: str, keys: Sequence[str]) -> None:
    """Remove entries; unknown keys are ignored."""
    tq.kv_clear(keys=list(keys), partition_id=partition)


def to_batch(partition: str, tags: Mapping[str, SampleTag], step: int) -> KVBatchMeta:
    """Describe stored samples as verl's loop takes them; `tags`: key -> tag."""
    entries = [to_entry(tag, step) for tag in tags.values()]
    return KVBatchMeta(partition_id=partition, keys=list(tags), tags=entries)


def from_batch(batch: KVBatchMeta) -> dict[str, SampleTag]:
    """Key -> tag of the samples that verl's replay buffer gives out."""
    return {key: from_entry(entry) for key, entry in zip(batch.keys, batch.tags, strict=True)}


Status = Literal["pending", "running", "finished", "failure"]


@dataclass(frozen=True)
class PromptStatus:
    """Status of one prompt."""

    status: Status
    error: str = ""
    is_generated: bool = False
    """True of a running prompt if no sample of it waits for a replica any more: each is generated, or has failed. Told
    only in runs with rewards that take turns with the replicas."""
    ends_run: bool = False
    """True of a failed prompt if no retry can help: it met a `RunStopped`, whose message is the error."""

    @classmethod
    def failed(cls, failures: Sequence[BaseException]) -> "PromptStatus":
        """Status of a prompt whose samples met `failures`."""
        stops = [cause for cause in map(plain, failures) if isinstance(cause, RunStopped)]
        return cls("failure", str(stops[0]) if stops else describe(failures[0]), ends_run=bool(stops))

    @property
    def has_ended(self) -> bool:
        """True if no sample of the prompt will come any more."""
        return self.status in ("finished", "failure")


@dataclass(frozen=True)
class Listing:
    """The prompts and samples in a partition."""

    prompts: dict[str, PromptStatus]
    """By uid."""
    samples: dict[str, SampleTag]
    """By key."""


def submit_prompts(partition: str, uids: Sequence[str], step: int) -> None:
    """Register prompts as pending; `step` is the optimizer step they are for."""
    tags = [{"is_prompt": True, "status": "pending", "global_steps": step} for _ in uids]
    tq.kv_batch_put(keys=list(uids), partition_id=partition, tags=tags)


async def publish_status(partition: str, uid: str, status: PromptStatus) -> None:
    """Replace the status of a prompt."""
    await put(partition, {uid: StoredRow({name: value for name, value in vars(status).items() if value})})


def list_partition(partition: str) -> Listing:
    return to_listing(tq.kv_list(partition)[partition])


def to_listing(entries: Mapping[str, Mapping[str, Any]]) -> Listing:
    """Sort entries by kind. One that is being stored has a key before it has a tag: it is left out."""
    listing = Listing({}, {})
    for key, entry in entries.items():
        if TAG in entry:
            listing.samples[key] = from_entry(entry)
        elif entry:
            listing.prompts[key] = PromptStatus(
                entry["status"], entry.get("error", ""), entry.get("is_generated", False), entry.get("ends_run", False)
            )
    return listing

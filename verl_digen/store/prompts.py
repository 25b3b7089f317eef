# SPDX-License-Identifier: Apache-2.0
"""Status of prompts, as verl's replay buffer reads it: pending -> finished | failure, and with rewards that take turns
with the replicas running in between. A failed prompt has no samples, and its status has the reason."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import transfer_queue as tq

from verl_digen.store.client import Row, put
from verl_digen.store.samples import from_entry, is_sample
from verl_digen.types import SampleTag

Status = Literal["pending", "running", "finished", "failure"]


@dataclass(frozen=True)
class PromptStatus:
    """Status of one prompt."""

    status: Status
    error: str = ""
    is_generated: bool = False
    """True of a running prompt if no sample of it waits for a replica any more: each is generated, or has failed. Told
    only in runs with rewards that take turns with the replicas."""

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
    await put(partition, {uid: Row({name: value for name, value in vars(status).items() if value})})


def list_partition(partition: str) -> Listing:
    """List a partition of samples."""
    return to_listing(tq.kv_list(partition)[partition])


def to_listing(entries: Mapping[str, Mapping[str, Any]]) -> Listing:
    """Sort entries by kind. One that is being stored has a key before it has a tag: it is left out."""
    listing = Listing({}, {})
    for key, entry in entries.items():
        if is_sample(entry):
            listing.samples[key] = from_entry(entry)
        elif entry:
            listing.prompts[key] = PromptStatus(
                entry["status"], entry.get("error", ""), entry.get("is_generated", False)
            )
    return listing

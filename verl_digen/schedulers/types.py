# SPDX-License-Identifier: Apache-2.0
"""Decisions of the planner: chunks, fragments, and the next task of a slot or the trainer.

Versions and batches share one numbering: batch `b` is the one that trains on weight version `b` and makes it `b + 1`,
so a group generated under version `v` and trained in batch `b` is `b - v` versions stale.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

TRAINER = "trainer"
"""Generator id of an assist chunk."""

TrainerWaitReason = Literal[
    "no_fragment_ready",
    "waiting_pays",
    "gain_in_doubt",
    "costs_unknown",
    "no_slots",
    "scoring",
    "prompts",
    "batch_done",
]
"""Reasons why the trainer waits:

| reason | meaning |
| --- | --- |
| `no_fragment_ready` | groups of the open batch are still being generated |
| `waiting_pays` | the same, and assisting would lengthen the batch |
| `gain_in_doubt` | the same, and assisting would shorten it by less than the usual prediction error |
| `costs_unknown` | the same, and too little is measured to decide whether to assist |
| `no_slots` | as `no_fragment_ready`, and no replica is there to generate them |
| `scoring` | all groups are generated, and rewards are outstanding |
| `prompts` | prompts are expected: of the next batch, or in place of dropped groups |
| `batch_done` | no batch is left |
"""

SlotWaitReason = Literal["staleness_bound", "no_chunk_left", "slot_lost"]
"""Reasons why a slot waits:

| reason | meaning |
| --- | --- |
| `staleness_bound` | what may be begun early of the next batch is issued; the rest waits for new weights |
| `no_chunk_left` | every chunk of the batch is issued, and the next batch may not begin yet |
| `slot_lost` | the replica is lost, and its replacement is not there yet |
"""

WaitReason = Literal[TrainerWaitReason, SlotWaitReason]
"""All reasons to wait; the timeline's intervals and metrics carry them."""

AssistReason = Literal["gain", "always", "measure"]
"""Reasons for an assist. gain: it shortens the batch; always: `digen.tag.policy=always`; measure: once, so that its
cost is known."""

DropReason = Literal["failed", "zero_spread", "surplus"]
"""Reasons why a group is not trained. failed: samples failed beyond the bound; zero_spread: its rewards are all equal;
surplus: enough others were complete first."""


class Chunk(NamedTuple):
    """Samples of one group that one generation request carries."""

    id: int
    """Unique in the run, ascending in the order of issue."""
    batch: int
    uid: str
    samples: tuple[int, ...]
    """Sample indices within the group, ascending."""
    version: int
    """Weight version it must be generated under: the same for all chunks of a group."""


class Fragment(NamedTuple):
    """Complete groups that one training call consumes."""

    id: int
    batch: int
    uids: tuple[str, ...]
    """Group uids in the order of issue."""


class Generate(NamedTuple):
    """A free slot generates a chunk."""

    slot: str
    chunk: Chunk


class LoadWeights(NamedTuple):
    """A free slot takes a new version before its next chunk. A replica with several slots loads when all of them have
    this decision."""

    slot: str
    version: int


@dataclass
class BatchReport:
    """Counts of a batch; final once it is complete. Without a trained group every one was dropped."""

    batch: int
    uids: tuple[str, ...] = ()
    """Trained groups."""
    num_samples: int = 0
    """Trained samples."""
    num_fragments: int = 0
    """Training calls."""
    num_assists: int = 0
    """Assists: calls in which the trainer's ranks generated."""
    num_assisted: int = 0
    """Samples of these calls, of trained and dropped groups."""
    num_searches: int = 0
    """Bubbles at which waiting and assisting were compared."""
    prediction_error: float | None = None
    """Relative error of the first prediction, see `verl_digen.schedulers.search`; None if nothing was predicted."""
    stale_groups: Mapping[int, int] = field(default_factory=dict)
    """Versions behind -> number of trained groups; 0 is on-policy."""
    dropped: Mapping[DropReason, int] = field(default_factory=dict)
    """Reason -> number of groups drawn and not trained."""
    num_group_refills: int = 0
    num_sample_refills: int = 0
    num_reissued: int = 0
    """Samples regenerated because their slot was lost, or because no slot had their group's version any more."""
    num_late: int = 0
    """Samples that arrived after their chunk was cancelled; ignored."""

    @property
    def num_groups(self) -> int:
        """Trained groups."""
        return len(self.uids)


class Assist(NamedTuple):
    """Generate chunks on the trainer's devices, all in one call."""

    chunks: tuple[Chunk, ...]
    """One per group, in the order of issue."""
    reason: AssistReason
    predicted_gain_s: float | None
    """Predicted seconds by which the batch ends earlier than without further assists; None if nothing was predicted."""

    @property
    def num_samples(self) -> int:
        return sum(len(chunk.samples) for chunk in self.chunks)


class Wait(NamedTuple):
    """Do nothing; ask again after the next event."""

    reason: TrainerWaitReason
    predicted_wait_s: float | None = None
    """waiting_pays, gain_in_doubt: seconds until the next fragment is ready; infinite if no slot generates it."""


SlotDecision = Generate | LoadWeights
TrainerDecision = Fragment | Assist | BatchReport | Wait
"""Next task of the trainer: a fragment trains; a batch with its report is complete, and takes its optimizer step."""

# SPDX-License-Identifier: Apache-2.0
"""Words and colours of kinds of work and reasons to wait, for people. Pure.

Colours are those of Okabe and Ito (2008), which colour-blind people tell apart.
"""

from __future__ import annotations

from verl_digen.observe.timeline.interval import UNATTRIBUTED, Kind
from verl_digen.schedulers.types import WaitReason

COLOURS: dict[str, str] = {
    "generate": "#0072B2",
    "score": "#CC79A7",
    "train": "#E69F00",
    "assist": "#009E73",
    "commit": "#D55E00",
    "wake": "#8C6BB1",
    "sleep": "#4D4D4D",
    "publish": "#56B4E9",
    "validate": "#F0E442",
    "save": "#7F7F7F",
    "wait": "#EDEEF0",
}
KIND_WORDS: dict[Kind, str] = {
    "train": "training",
    "assist": "trainer generates",
    "generate": "generating",
    "commit": "optimizer step",
    "score": "scoring",
    "wake": "reward wakes",
    "sleep": "reward goes to sleep",
    "publish": "sending weights",
    "validate": "validation",
    "save": "checkpoint",
    "wait": "waiting",
    "step": "step",
}
REASON_WORDS: dict[WaitReason, str] = {
    "no_fragment_ready": "groups are still being generated",
    "waiting_pays": "assisting would lengthen the batch",
    "gain_in_doubt": "the gain of assisting is in doubt",
    "costs_unknown": "the cost of assisting is not measured yet",
    "merging_pays": "a larger fragment is nearly ready",
    "no_slots": "no replica is there",
    "scoring": "rewards are outstanding",
    "prompts": "prompts are awaited",
    "batch_done": "no batch is left",
    "staleness_bound": "new weights are awaited",
    "no_chunk_left": "no chunk of the batch is left",
    "slot_lost": "a lost replica is being replaced",
}
UNATTRIBUTED_WORDS = "not recorded"


def words_of(label: str) -> str:
    """Words for a kind, a reason to wait, or `UNATTRIBUTED`."""
    return {**KIND_WORDS, **REASON_WORDS, UNATTRIBUTED: UNATTRIBUTED_WORDS}[label]

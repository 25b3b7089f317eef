# SPDX-License-Identifier: Apache-2.0
"""Ids of training groups, and keys in TransferQueue: `UID_INDEX_VERSION` of a sample's row, `UID-HASH` of conditions
that a group shares with no other.

The weight version is part of the key, so that a sample which is generated again under newer weights never meets the
remains of its first attempt.
"""

from typing import NamedTuple

from verl_digen.types import SampleFacts

TRAIN = "train"
"""Samples that wait for the trainer, and the status of their prompts."""
VAL = "val"
"""Samples of a validation, and the status of their prompts."""
CONDITIONS = "digen_conditions"
"""Prompt conditions."""


class SampleName(NamedTuple):
    """A sample, and the weight version that generated it."""

    uid: str
    sample_index: int
    version: int

    @classmethod
    def of(cls, facts: SampleFacts) -> "SampleName":
        """Name a sample by its facts; the version is its first step's."""
        return cls(facts.uid, facts.sample_index, facts.version)

    @property
    def key(self) -> str:
        """Key of the sample's row."""
        return f"{self.uid}_{self.sample_index}_{self.version}"


def own_condition_key(uid: str, key: str) -> str:
    """Key of conditions with hash `key` that only this group has: an episode's turns, prompts that a loop rewrote."""
    return f"{uid}-{key}"


def group_uid(number: int) -> str:
    """Id of the training group with the run's prompt `number`."""
    return f"p{number:08d}"


def validation_uid(index: int) -> str:
    """The group id, and so the noise, of the validation prompt at `index`: the same at every validation."""
    return f"val-{index:05d}"


def group_number(uid: str) -> int:
    """Inverse of `group_uid`."""
    return int(uid.removeprefix("p"))

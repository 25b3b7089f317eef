# SPDX-License-Identifier: Apache-2.0
"""Files of `torch.distributed.checkpoint` that a run saved, by entry; any number of ranks read them, or one process.

| entry | holds |
| --- | --- |
| `weights/POLICY/NAME` | a tensor of the network, or of its adapter; POLICY is `current` or a copy's name |
| `moments/NAME/KEY` | the optimizer's value KEY for the parameter NAME, if it is distributed as the parameter is |
| `rank/N` | all else, as rank N had it: `verl_digen.engine.checkpoint` |

Each rank writes its shards to `__RANK_0.distcp`; `.metadata` says which piece of which tensor lies where. A reader gets
the pieces that overlap with its own shards, one saved shard in memory at a time; nothing is sent between ranks.

Invariants (tests/engine/test_resharding.py, tests/export/test_export.py): tensors are bitwise those that were saved, on
any number of ranks and without any; a file that is missing or cut is an error on all ranks.
"""

import pickle
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Size, Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from verl_digen.engine.copies import CURRENT
from verl_digen.require import require

METADATA = ".metadata"
"""Name of the file that torch writes last: a folder without it is no checkpoint."""
ANOTHER = "take an earlier one: trainer.resume_mode=resume_path trainer.resume_from_path=RUN/global_step_N"


class SavedState(FileSystemReader):
    """A checkpoint's folder `actor`. ValueError if it is no checkpoint, or not one of this format."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        require_format(folder)
        require(
            (folder / METADATA).is_file(),
            f"{str(folder)!r} must hold a whole checkpoint",
            f"a folder without {METADATA}, which is written last",
            "take another one; all nodes must see the files",
        )
        self._folder = folder
        try:
            self._metadata = super().read_metadata()
        except (pickle.UnpicklingError, EOFError) as error:
            raise self._damaged(str(error)) from error
        self.entries = self._metadata.state_dict_metadata
        """Entry -> its size and dtype."""
        tensors = {entry: saved for entry, saved in self.entries.items() if isinstance(saved, TensorStorageMetadata)}
        weights = {(*entry.split("/")[1:],): saved for entry, saved in tensors.items() if entry.startswith("weights/")}
        self.policies = list(dict.fromkeys(policy for policy, _ in weights))
        """Policies whose weights were saved."""
        self.shapes = {name: saved.size for (policy, name), saved in weights.items() if policy == CURRENT}
        """State-dict name -> shape of each tensor that trained."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """torch's method; the file is read once."""
        return self._metadata

    def require_shapes(self, own: Mapping[str, Size], remedy: str) -> None:
        """Raise ValueError unless the tensors that trained are `own`; names one that is not."""
        unlike = [name for name in own.keys() | self.shapes.keys() if own.get(name) != self.shapes.get(name)]
        if unlike:
            raise ValueError(
                f"a checkpoint must hold the {len(own)} tensors that the run trains, got {len(self.shapes)}, which "
                f"differ e.g. in {min(unlike)}; {remedy}"
            )

    def load(self, into: dict[str, Any]) -> None:
        """Fill the tensors of `into`, by entry, and replace its other values; collective where there are ranks.
        ValueError, on all ranks, if a file is missing or damaged."""
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "torch.distributed is")  # unavailable: one process is what is meant
                load(into, storage_reader=self, planner=planner)
        except CheckpointException as error:
            raise self._damaged(cause_of(error)) from error

    def tensor_for(self, entry: str, like: Tensor | None = None) -> Tensor:
        """An empty tensor to load the entry into: distributed and placed as `like`, or whole and on the CPU."""
        saved = self.entries[entry]
        assert isinstance(saved, TensorStorageMetadata)
        if like is None:
            return torch.empty(saved.size, dtype=saved.properties.dtype)
        return torch.empty_like(like.detach(), dtype=saved.properties.dtype)

    def tensors(self, policy: str, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """(name, whole tensor) of a policy, one at a time; those that a copy does not have are the trained ones."""
        for name in names:
            entry = f"weights/{policy}/{name}"
            entry = entry if entry in self.entries else f"weights/{CURRENT}/{name}"
            into = {entry: self.tensor_for(entry)}
            self.load(into)
            yield name, into[entry]

    def _damaged(self, why: str) -> ValueError:
        return ValueError(
            f"{str(self._folder)!r} must hold all files of one save, whole, got {why}; copy them again, from all "
            f"nodes into one folder, or {ANOTHER}"
        )


def require_format(folder: Path) -> None:
    """Raise ValueError if a checkpoint's folder `actor` holds files of an earlier version."""
    require(
        not any(folder.glob("model_world_size_*")),
        f"{str(folder)!r} must be a checkpoint in the format of this version of verl-digen",
        "one of an earlier version, with a file for each rank",
        "run `digen export` of the version that wrote it (run.json), and start a new run from those weights",
    )


def cause_of(error: CheckpointException) -> str:
    """Why the first rank failed."""
    rank, (cause, _) = next(iter(error.failures.items()))
    return f"{type(cause).__name__}: {cause} on rank {rank}"

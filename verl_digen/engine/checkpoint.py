# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a diffusers transformer: all or nothing on disk, bitwise on resume by as many ranks.

`torch.distributed.checkpoint` writes and reads the files, whose entries `verl_digen.engine.saved_state` lists. Ranks of
another number than saved continue up to the order of sums. They take what is the same on all ranks (optimizer steps,
learning rate, loss scale, counters) from rank 0, and keep torch's random state that they started with; no result
depends on it, noise is drawn by (seed, uid, sample, k). With LoRA a checkpoint holds the adapter alone, and a
fingerprint of the base weights.

A save writes into `NAME.partial` next to its folder, and rank 0 renames it when every rank is done, so a full disk or a
kill leaves the last good checkpoint intact; the next save removes leftovers.

Invariants (tests/engine/test_checkpoint.py, test_two_ranks.py, test_resharding.py): n updates, save, load, n updates
equal 2n updates bitwise; a save or load that fails on any rank raises on every rank; a save then leaves no folder.
"""

import logging
import re
import shutil
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import PeftModel
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from verl.utils.checkpoint.checkpoint_manager import BaseCheckpointManager

from verl_digen.engine.copies import CURRENT, PolicyCopies, local_shard
from verl_digen.engine.optimizer import LossScale
from verl_digen.engine.saved_state import SavedState, cause_of
from verl_digen.observe.run_files import POINTER
from verl_digen.require import require

logger = logging.getLogger(__name__)

FINGERPRINT_NUMBERS = 8
"""Numbers of each frozen parameter in a fingerprint."""


@dataclass
class UpdateState:
    """Engine state kept between updates, besides weights and optimizer; only the engine writes it."""

    num_updates: int = 0
    """Optimizer steps that changed the weights."""
    num_skipped: int = 0
    """Optimizer steps skipped because the gradient was not finite."""
    loss_scale: LossScale | None = None
    """Only of training in fp16."""


class DiffusersCheckpointManager(BaseCheckpointManager):
    """verl's manager, with saves that are all or nothing, and `update_state` and `copies` saved and loaded too."""

    def __init__(self, *args: Any, update_state: UpdateState, copies: PolicyCopies, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.update_state, self.copies = update_state, copies
        self.kept: frozenset[str] = frozenset()
        """`local_path` of checkpoints that are not removed, and not counted, whatever `max_ckpt_to_keep` is."""

    # -- save ---------------------------------------------------------------------------------------------
    def save_checkpoint(  # verl's signature
        self,
        local_path: str | None,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
    ) -> None:
        """Write this rank's part of a checkpoint; it appears under `local_path` when all ranks are done. The one before
        it is never removed: the driver does that once its own part is there. RuntimeError if a rank could not write:
        nothing appears then, and older checkpoints are untouched."""
        if local_path is None:
            return
        folder = Path(local_path).absolute()
        if max_ckpt_to_keep and self.rank == 0:
            remove_earlier(folder, max(1, max_ckpt_to_keep - 1), self.kept)
        writer = WholeFolder(folder)
        planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        try:
            save(self._state(), storage_writer=writer, planner=planner)
        except CheckpointException as error:
            if self.rank == 0:
                writer.clear()
            raise RuntimeError(cause_of(error)) from error
        if self.rank == 0:
            logger.info("saved checkpoint %s", local_path)

    def _state(self) -> dict[str, Any]:
        """This rank's part of what is saved, by entry; collective."""
        state: dict[str, Any] = self._weights() if self.should_save_model or self.should_save_hf_model else {}
        own: dict[str, Any] = {}
        if self.should_save_optimizer:
            moments, own["optimizer"] = self._optimizer_state()
            state |= moments
        if self.should_save_extra:
            state |= self._copies()
            own["extra"] = {
                **asdict(self.update_state),
                "lr_scheduler": None if self.lr_scheduler is None else self.lr_scheduler.state_dict(),
                "rng": self.get_rng_state(),
                "base": base_fingerprint(self.model),
            }
        return state | {f"rank/{self.rank}": own}

    def _weights(self) -> dict[str, Tensor]:
        """The network's tensors, with LoRA those that train, by entry: live storage."""
        state = self.model.state_dict()
        if isinstance(self.model, PeftModel):
            state = {name: state[name] for name, value in self.model.named_parameters() if value.requires_grad}
        return {f"weights/{CURRENT}/{name}": value for name, value in state.items()}

    def _copies(self) -> dict[str, Tensor]:
        """Copies of the weights that checkpoints have, by entry: live storage."""
        return {
            f"weights/{policy}/{name}": value
            for policy, tensors in self.copies.state_dict().items()
            for name, value in tensors.items()
        }

    def _trained(self) -> list[tuple[str, Tensor]]:
        """(name, parameter) in the optimizer's order."""
        assert self.optimizer is not None
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        return [(names[value], value) for group in self.optimizer.param_groups for value in group["params"]]

    def _optimizer_state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """(moments that are distributed as their parameters, by entry; the rest of the state, without settings)."""
        assert self.optimizer is not None
        state, trained = self.optimizer.state_dict(), self._trained()
        moments: dict[str, Tensor] = {}
        rest: dict[str, dict[str, Any]] = {}
        for number, values in state["state"].items():
            name, parameter = trained[number]
            rest[name] = {}
            for key, value in values.items():
                if _is_moment(value, parameter):
                    moments[f"moments/{name}/{key}"] = value
                else:  # on the CPU: torch loads values onto the device that they were saved from
                    rest[name][key] = value.cpu() if isinstance(value, Tensor) else value
        return moments, {"state": rest, "layout": _layout(trained[0][1])}

    # -- load ---------------------------------------------------------------------------------------------
    def load_checkpoint(
        self, local_path: str | None, hdfs_path: str | None = None, del_local_after_load: bool = False
    ) -> None:
        """Load this rank's part of a checkpoint of any number of ranks. ValueError, on all ranks, if it is no
        checkpoint, or of a run that trained other weights."""
        if local_path is None:
            return
        saved, into = SavedState(Path(local_path)), self._weights()
        saved.require_shapes(
            {entry.split("/")[2]: value.shape for entry, value in into.items()},
            "resume with the same actor_rollout_ref.model.lora_* and target_modules",
        )
        own = self._load_own(saved, local_path)
        if not self.should_load_model:
            into = {}
        if self.should_load_optimizer:
            trained = dict(self._trained())
            moments = [entry for entry in saved.entries if entry.startswith("moments/")]
            into |= {entry: saved.tensor_for(entry, trained[entry.split("/")[1]]) for entry in moments}
        if self.should_load_extra:
            into |= {entry: value for entry, value in self._copies().items() if entry in saved.entries}
        saved.load(into)
        if self.should_load_optimizer:
            self._load_optimizer(own["optimizer"], into)
        if self.should_load_extra:
            self._load_extra(own["extra"])
        self.copies.resume(saved.policies if self.should_load_extra else (), self.update_state.num_updates)

    def _load_own(self, saved: SavedState, local_path: str) -> dict[str, Any]:
        """Values beside the tensors: this rank's, or rank 0's without random states if there were more or fewer ranks.
        ValueError if they are not those that this run needs."""
        is_same_number = sum(entry.startswith("rank/") for entry in saved.entries) == self.world_size
        entry = f"rank/{self.rank if is_same_number else 0}"
        saved.load(values := {entry: None})
        own: dict[str, Any] = values[entry]
        for content, is_needed in (("optimizer", self.should_load_optimizer), ("extra", self.should_load_extra)):
            require(
                content in own or not is_needed,
                f"{local_path!r} must hold the {content} of a run",
                "a checkpoint without: actor_rollout_ref.actor.checkpoint.save_contents did not have it",
                "take another one",
            )
        if self.should_load_extra:
            base = base_fingerprint(self.model)
            if own["extra"]["base"] and base and own["extra"]["base"] != base:
                raise ValueError(
                    f"{local_path} holds an adapter for other base weights than actor_rollout_ref.model.path has "
                    "in the dtype of actor_rollout_ref.actor.fsdp_config.model_dtype; set both to what the run began "
                    "with"
                )
            if not is_same_number:
                del own["extra"]["rng"]
        if self.should_load_optimizer and own["optimizer"]["layout"] != _layout(self._trained()[0][1]):
            kept = [pair for values in own["optimizer"]["state"].values() for pair in values.items()]
            odd = sorted({key for key, value in kept if isinstance(value, Tensor) and value.ndim > 0})
            require(
                not odd,
                "an optimizer must keep its state as tensors of the parameters' shapes to continue on other ranks",
                ", ".join(odd),
                "resume on the number of ranks that saved, with the same fsdp_size",
            )
        return own

    def _load_optimizer(self, rest: dict[str, Any], loaded: dict[str, Tensor]) -> None:
        assert self.optimizer is not None
        numbers = {name: number for number, (name, _) in enumerate(self._trained())}
        state = {numbers[name]: values for name, values in rest["state"].items()}
        for entry, value in loaded.items():
            kind, name, key = entry.split("/")
            if kind == "moments":
                state[numbers[name]][key] = value
        self.optimizer.load_state_dict(self.optimizer.state_dict() | {"state": state})

    def _load_extra(self, extra: dict[str, Any]) -> None:
        if "rng" in extra:
            self.load_rng_state(extra["rng"])
        if self.lr_scheduler is not None:
            rates = {"base_lrs": self.lr_scheduler.base_lrs}  # this run's, at the place of the schedule that was saved
            self.lr_scheduler.load_state_dict(extra["lr_scheduler"] | rates)
            self.lr_scheduler.last_epoch -= 1
            self.lr_scheduler.step()
        self.update_state.num_updates, self.update_state.num_skipped = extra["num_updates"], extra["num_skipped"]
        if self.update_state.loss_scale is None:
            return
        if extra["loss_scale"] is not None:
            self.update_state.loss_scale = LossScale(**extra["loss_scale"])
        else:
            logger.warning(
                "the checkpoint was not trained in fp16 and has no loss scale; it starts at %g",
                self.update_state.loss_scale.value,
            )


# -- optimizer and base ---------------------------------------------------------------------------------------
def _is_moment(value: Any, parameter: Tensor) -> bool:
    """True for a tensor that is distributed as its parameter is."""
    return (
        isinstance(value, Tensor)
        and value.shape == parameter.shape
        and _layout(value) == _layout(parameter)
        and type(local_shard(value)) is Tensor
    )


def _layout(value: Tensor) -> str:
    """How a tensor is distributed: its mesh of ranks, and what is sharded over them."""
    return f"{value.device_mesh.mesh.tolist()} {value.placements}" if isinstance(value, DTensor) else ""


@torch.no_grad()
def base_fingerprint(module: nn.Module) -> str:
    """Hash of the first numbers of every frozen parameter, "" without one: tells base weights apart. Collective. The
    numbers are of the first row, which rank 0 has, however many ranks share the rest."""
    frozen = [value for value in module.parameters() if not value.requires_grad]
    heads = [local_shard(value).flatten()[: min(FINGERPRINT_NUMBERS, value.shape[1:].numel())] for value in frozen]
    digest = [sha256(torch.cat([head.float() for head in heads]).cpu().numpy().tobytes()).hexdigest() if heads else ""]
    dist.broadcast_object_list(digest, src=0)
    return digest[0]


# -- folders ----------------------------------------------------------------------------------------------
class WholeFolder(FileSystemWriter):
    """torch's writer into a folder that appears when all ranks have written. Its errors are raised on all ranks."""

    def __init__(self, folder: Path):
        self._folder, self._partial = folder, folder.with_name(f"{folder.name}.partial")
        super().__init__(self._partial)

    def clear(self) -> None:
        """Remove what was written so far, or by a save that was killed."""
        shutil.rmtree(self._partial, ignore_errors=True)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """torch's method, without its mkdir: a node that does not see rank 0's folder fails."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """torch's method; rank 0 alone, before any rank writes."""
        self.clear()
        self._partial.mkdir(parents=True)
        return super().prepare_global_plan(plans)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """torch's method; rank 0 alone, after all ranks have written. An earlier save of the same step is replaced."""
        super().finish(metadata, results)
        old = self._folder.with_name(f"{self._partial.name}-old")
        shutil.rmtree(old, ignore_errors=True)
        if self._folder.exists():
            self._folder.rename(old)
        self._partial.rename(self._folder)
        shutil.rmtree(old, ignore_errors=True)


def remove_earlier(folder: Path, num_kept: int, besides: Iterable[str]) -> None:
    """Remove the folders of the run's checkpoints before `folder`'s, except `besides` and `num_kept` others: first the
    one that a resume takes, then the newest, which may lack the driver's part."""
    prefix, own, run_dir = folder.parent.name.rstrip("0123456789"), _number(folder.parent), folder.parent.parent
    resumed = (run_dir / POINTER).read_text().strip() if (run_dir / POINTER).is_file() else ""
    kept = {Path(path).absolute() for path in besides}
    found = (path.absolute() for path in run_dir.glob(f"{prefix}*/{folder.name}"))
    numbered = sorted(
        (str(number) == resumed, number, path)
        for path in found
        if path not in kept and 0 <= (number := _number(path.parent)) < own
    )
    for *_, path in numbered[: max(0, len(numbered) - num_kept)]:
        shutil.rmtree(path.parent, ignore_errors=True)


def _number(step_dir: Path) -> int:
    """The step in the name of a checkpoint's folder; -1 without one."""
    digits = re.search(r"[0-9]+$", step_dir.name)
    return int(digits[0]) if digits else -1

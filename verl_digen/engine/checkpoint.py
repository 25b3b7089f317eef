# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a diffusers transformer: all or nothing on disk, bitwise on resume by as many ranks.

Files are verl's, per rank: model, optimizer, extra (schedule, RNG); `digen_state_*` adds the EMA and
counters. With LoRA the model's file holds the adapter alone, and a fingerprint of the base weights, which
come from `actor_rollout_ref.model.path` again. Files are loaded into host memory, whatever device they were saved from.
Ranks of another number, or with other shards, read the pieces that are theirs: `verl_digen.engine.resharding`.

With "hf_model" in `actor_rollout_ref.actor.checkpoint.save_contents` also an export for other tools, gathered tensor
by tensor and written by rank 0:

    transformer/     full weights in the diffusers format
    lora_adapter/    with LoRA instead: the adapter, in peft's format (`lora_adapter_path` reads it back) and
                     as `pytorch_lora_weights.safetensors` for diffusers' `pipeline.load_lora_weights`

A save writes into `NAME.partial-TOKEN` next to its folder and renames it when every rank is done. So a full disk
or a kill leaves the last good checkpoint intact; the next save removes leftovers of a killed one.

Invariants (tests/engine/test_checkpoint.py): n updates, save, load, n updates equal 2n updates bitwise; a
save that fails on any rank raises on every rank and leaves no folder behind; so does a load, which then ends the run.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from peft import PeftModel
from torch import Tensor
from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager, FSDPConfig
from verl.utils.fsdp_utils import fsdp_version

from verl_digen.engine.copies import PolicyCopies
from verl_digen.engine.export import adapter_weights, full_weights
from verl_digen.engine.fingerprint import frozen_fingerprint
from verl_digen.engine.folders import WRITE_ERRORS, save_adapter, save_networks
from verl_digen.engine.loss_scale import LossScale
from verl_digen.engine.optimizer import implementations, settle
from verl_digen.engine.resharding import OtherRanks, SameRanks, are_same_ranks
from verl_digen.engine.saved_ranks import SavedRanks, shard_file
from verl_digen.engine.shadow import local_shard

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass
class UpdateState:
    """Engine state kept between updates, besides weights and optimizer; only the engine writes it."""

    num_updates: int = 0
    """Optimizer steps that changed the weights."""
    num_skipped: int = 0
    """Optimizer steps skipped because the gradient was not finite."""
    loss_scale: LossScale | None = None
    """Only of training in fp16."""


class DiffusersCheckpointManager(FSDPCheckpointManager):
    """verl's manager, with saves that are all or nothing, and `update_state` and `copies` saved and loaded too."""

    def __init__(self, *args: Any, update_state: UpdateState, copies: PolicyCopies, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.update_state, self.copies = update_state, copies
        self.kept: frozenset[str] = frozenset()
        """`local_path` of checkpoints that are not removed, and not counted, whatever `max_ckpt_to_keep` is."""
        self._resumed_from: Path | None = None
        """Checkpoint that was loaded; None again once the next one is saved."""

    # -- save ---------------------------------------------------------------------------------------------
    def save_checkpoint(  # verl's signature
        self,
        local_path: str | None,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
    ) -> None:
        """Write this rank's part of a checkpoint; it appears under `local_path` when all ranks are done.

        Raises:
            RuntimeError: a rank could not write; nothing appears, and older checkpoints are untouched.
        """
        if local_path is None:
            return
        self.previous_global_step = global_step
        self._count_earlier(Path(local_path))
        kept = [path for path in self.previous_saved_paths if path in self.kept]
        self.previous_saved_paths = [path for path in self.previous_saved_paths if path not in self.kept]
        if self.rank == 0:
            self.ensure_checkpoint_capacity(max_ckpt_to_keep)  # type: ignore[arg-type]
        target = Path(local_path).absolute()
        try:
            with _all_or_nothing(target) as folder:
                _on_all_ranks(target, lambda: self._save_shards(folder))
                if self.should_save_hf_model:
                    _on_all_ranks(target, lambda: self._save_export(folder))
            if self.rank == 0:
                self.register_checkpoint(local_path, max_ckpt_to_keep)  # type: ignore[arg-type]
                logger.info("saved checkpoint %s", local_path)
        finally:
            self.previous_saved_paths = [*kept, *self.previous_saved_paths]

    def _count_earlier(self, target: Path) -> None:
        """Count the checkpoints of the start before, if this one resumed in the same run, as its own."""
        resumed, self._resumed_from = self._resumed_from, None
        run_dir = target.parent.parent
        if resumed is None or resumed.parent.parent.absolute() != run_dir.absolute():
            return
        prefix, last = resumed.parent.name.rstrip("0123456789"), _number(resumed.parent)
        earlier = [path for path in run_dir.glob(f"{prefix}*/{target.name}") if 0 <= _number(path.parent) <= last]
        self.previous_saved_paths = [str(path) for path in sorted(earlier, key=lambda path: _number(path.parent))]

    def _save_shards(self, folder: Path) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch names sharded state dicts as experimental, each time
            if self.should_save_model:
                _save(self._model_state(), folder / self._file("model"))
            if self.should_save_optimizer:
                _save(self.optimizer.state_dict(), folder / self._file("optim"))
            if self.should_save_extra:
                schedule = None if self.lr_scheduler is None else self.lr_scheduler.state_dict()
                _save(
                    {"lr_scheduler": schedule, "rng": self.get_rng_state()},
                    folder / self._file("extra_state"),
                )
                _save(
                    {
                        **asdict(self.update_state),
                        "copies": self.copies.state_dict(),
                        "frozen": frozen_fingerprint(self.model),
                    },
                    folder / self._file("digen_state"),
                )
        if self.rank == 0:
            self._save_description(folder)

    def _model_state(self) -> dict[str, Tensor]:
        """This rank's shards; with LoRA those that train."""
        state = self.model.state_dict()
        if not self._has_lora():
            return state
        trained = {name for name, parameter in self.model.named_parameters() if parameter.requires_grad}
        return {name: value for name, value in state.items() if name in trained}

    def _save_description(self, folder: Path) -> None:
        """Write the description of the sharding that verl's own tools read."""
        config = FSDPConfig(FSDP_version=fsdp_version(self.model), world_size=self.world_size)
        (folder / "fsdp_config.json").write_text(json.dumps(asdict(config), indent=4))
        self._save_lora_train_meta(str(folder), self.model)

    def _save_export(self, folder: Path) -> None:
        """All ranks gather, rank 0 writes."""
        writes = self.rank == 0
        if isinstance(self.model, PeftModel):
            tensors = {name: value.cpu() for name, value in adapter_weights(self.model) if writes}
            if writes:
                save_adapter(self.model, tensors, folder / "lora_adapter")
            return
        save_networks(self.model, full_weights(self.model, merge_lora=False), folder, writes=writes)

    # -- load ---------------------------------------------------------------------------------------------
    def load_checkpoint(
        self, local_path: str | None, hdfs_path: str | None = None, del_local_after_load: bool = False
    ) -> None:
        """Load this rank's part, from files of any number of ranks, see `verl_digen.engine.resharding`.

        Raises:
            ValueError: it is no checkpoint, or of a run that trained other weights; on the ranks that noticed the
                error itself, on others one with its text.
        """
        if local_path is None:
            return
        found = _on_every_rank(lambda: self._find(Path(local_path)))
        saved = _on_every_rank(lambda: self._read_state(found, local_path))
        _require_one_save(_on_every_rank(lambda: found.num_updates(saved)), local_path)
        if saved is not None:
            fingerprint = found.fingerprint(self.model)
            _on_every_rank(lambda: _check_base(saved["frozen"], fingerprint, local_path))
        _on_every_rank(lambda: self._load(found, saved))
        self._resumed_from = Path(local_path)
        if isinstance(found, OtherRanks):
            logger.info("resharded %s: this rank read %.3f GB", local_path, found.num_bytes / 1e9)

    def _find(self, folder: Path) -> SameRanks | OtherRanks:
        files, live = SavedRanks(folder), self._model_state()
        return SameRanks(files) if are_same_ranks(files, live) else OtherRanks(files, live)

    def _read_state(self, found: SameRanks | OtherRanks, local_path: str) -> dict[str, Any] | None:
        saved = found.read("digen_state") if self.should_load_extra and found.has("digen_state") else None
        if saved is not None and not {"copies", "frozen"} <= saved.keys():
            raise ValueError(
                f"{local_path} was written by an older version, which saved other things; start a new run from its "
                "weights"
            )
        return saved

    def _load(self, found: SameRanks | OtherRanks, saved: dict[str, Any] | None) -> None:
        if self.should_load_model:
            self._load_model(found)
        if self.should_load_optimizer:
            own = implementations(self.optimizer)
            self.optimizer.load_state_dict(found.optimizer_state(self.optimizer))
            settle(self.optimizer, own)
        if self.should_load_extra:
            extra = found.read("extra_state")
            if (rng := found.rng_state(extra)) is not None:
                self.load_rng_state(rng)
            if self.lr_scheduler is not None:
                self.lr_scheduler.load_state_dict(extra["lr_scheduler"])
        if saved is None:
            self.copies.load_state_dict({}, num_updates=0)
            return
        self.copies.load_state_dict(found.copies(saved["copies"]), saved["num_updates"])
        self.update_state.num_updates, self.update_state.num_skipped = saved["num_updates"], saved["num_skipped"]
        self._load_loss_scale(saved)

    def _load_loss_scale(self, saved: dict[str, Any]) -> None:
        if self.update_state.loss_scale is None:
            return
        if "loss_scale" in saved and saved["loss_scale"] is not None:
            self.update_state.loss_scale = LossScale(**saved["loss_scale"])
        else:
            logger.warning(
                "the checkpoint was not trained in fp16 and has no loss scale; it starts at %g",
                self.update_state.loss_scale.value,
            )

    @torch.no_grad()
    def _load_model(self, found: SameRanks | OtherRanks) -> None:
        """Copy saved shards into the module.

        Raises:
            ValueError: they are not those that this run trains; names one.
        """
        live, saved = self._model_state(), found.tensors
        unlike = saved.keys() ^ live.keys() or {name for name in live if saved[name].shape != live[name].shape}
        if unlike:
            raise ValueError(
                f"a checkpoint must hold the {len(live)} tensors that this run trains, got {len(saved)}, which differ "
                f"e.g. in {min(unlike)}; resume with the same actor_rollout_ref.model.lora_* and target_modules"
            )
        for name, value in live.items():
            local_shard(value).copy_(found.shard(name, value))

    def _file(self, kind: str) -> str:
        return shard_file(kind, self.world_size, self.rank)


# -- reading ----------------------------------------------------------------------------------------------
def _on_every_rank(read: Callable[[], T]) -> T:
    """Result of `read`; raises on every rank if it raised on any. It has no collectives."""
    try:
        value = read()
    except (ValueError, RuntimeError, OSError) as error:
        _texts_of_all_ranks(str(error))
        raise
    for text in _texts_of_all_ranks(None):
        if text is not None:
            raise ValueError(text)
    return value


def _texts_of_all_ranks(text: str | None) -> list[str | None]:
    """Gather one text of each rank; collective."""
    texts: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(texts, text)
    return texts


def _check_base(saved: str, own: str, local_path: str) -> None:
    """Require the frozen weights of the run that saved, by fingerprints; "" without frozen weights."""
    if saved and own and saved != own:
        raise ValueError(
            f"{local_path} holds an adapter for other base weights than those of actor_rollout_ref.model.path in "
            "the dtype of actor_rollout_ref.actor.fsdp_config.model_dtype; set both to what the run began with"
        )


def _require_one_save(counts: Mapping[int, int | None], local_path: str) -> None:
    """Raise ValueError unless all files count the same optimizer steps; collective.

    Args:
        counts: saved rank -> optimizer steps, of some of the files; all ranks' are compared.
    """
    gathered: list[Mapping[int, int | None]] = [{}] * dist.get_world_size()
    dist.all_gather_object(gathered, counts)
    steps = {rank: count for part in gathered for rank, count in part.items()}
    if len(set(steps.values())) > 1:
        said = ", ".join(f"{steps[rank]} in rank {rank}'s" for rank in sorted(steps))
        raise ValueError(
            f"the files of {local_path} must be of one save and count the same optimizer steps, got {said}; copy the "
            "files of one save, of all its ranks"
        )


# -- writing ----------------------------------------------------------------------------------------------
@contextmanager
def _all_or_nothing(folder: Path) -> Iterator[Path]:
    """A folder to write to, renamed to `folder` at the end, or removed if the body raised on any rank.

    The body writes through `_on_all_ranks`, so that it raises on all ranks or none. Ranks may or may not share a file
    system: on each file system, the rank whose mkdir succeeded cleans up and renames.
    """
    token = [secrets.token_hex(4)]
    dist.broadcast_object_list(token, src=0)
    partial = folder.with_name(f"{folder.name}.partial-{token[0]}")
    is_owner = False

    def make_folder() -> None:
        nonlocal is_owner
        partial.parent.mkdir(parents=True, exist_ok=True)
        try:
            partial.mkdir()
        except FileExistsError:
            return
        is_owner = True
        for leftover in partial.parent.glob(f"{folder.name}.partial-*"):
            if leftover != partial:
                shutil.rmtree(leftover, ignore_errors=True)

    def put_in_place() -> None:
        if is_owner:
            _replace(partial, folder)

    try:
        _on_all_ranks(folder, make_folder)
        yield partial
        _on_all_ranks(folder, put_in_place)
    except BaseException:
        if is_owner:
            shutil.rmtree(partial, ignore_errors=True)
        raise


def _on_all_ranks(folder: Path, write: Callable[[], None]) -> None:
    """Run `write`; RuntimeError on every rank if it raised one of `WRITE_ERRORS` on any."""
    error: BaseException | None = None
    try:
        write()
    except WRITE_ERRORS as raised:
        error = raised
    errors: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, None if error is None else f"{type(error).__name__}: {error}")
    failed = {rank: text for rank, text in enumerate(errors) if text is not None}
    if failed:
        rank, text = next(iter(failed.items()))
        raise RuntimeError(
            f"the checkpoint {folder} could not be written, {len(failed)} of {len(errors)} ranks failed (rank {rank}: "
            f"{text}); make room on the disk, or let trainer.default_local_dir name another one; "
            "older checkpoints are untouched"
        ) from error


def _replace(partial: Path, folder: Path) -> None:
    """Put `partial` in the place of `folder`, which may exist from an earlier save of the same step."""
    if not folder.exists():
        partial.rename(folder)
        return
    old = folder.with_name(f"{partial.name}-old")
    folder.rename(old)
    partial.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def _save(value: Any, path: Path) -> None:
    """torch.save with fsync: a file system may report only then that it is full."""
    with open(path, "wb") as file:
        torch.save(value, file)
        file.flush()
        os.fsync(file.fileno())


def _number(step_dir: Path) -> int:
    """The step in the name of a checkpoint's folder; -1 without one."""
    digits = re.search(r"[0-9]+$", step_dir.name)
    return int(digits[0]) if digits else -1

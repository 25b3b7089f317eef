# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a diffusers transformer: all or nothing on disk, bitwise on resume.

Files are verl's, per rank: model, optimizer, extra (schedule, RNG); `digen_state_*` adds the EMA, counters and
teachers' checksums. With LoRA the model's file holds the adapter alone, and a fingerprint of the base weights, which
come from `actor_rollout_ref.model.path` again. Files are loaded into host memory, whatever device they were saved from.

With "hf_model" in `actor_rollout_ref.actor.checkpoint.save_contents` also an export for other tools, gathered tensor
by tensor and written by rank 0:

    transformer/     full weights in the diffusers format
    lora_adapter/    with LoRA instead: the adapter, in peft's format (`lora_adapter_path` reads it back) and
                     as `pytorch_lora_weights.safetensors` for diffusers' `pipeline.load_lora_weights`

A save writes into `NAME.partial-TOKEN` next to its folder and renames it when every rank is done. So a full disk
or a kill leaves the last good checkpoint intact; the next save removes leftovers of a killed one.

Invariants (tests/engine/test_checkpoint.py): n updates, save, load, n updates equal 2n updates bitwise; a
save that fails on any rank raises on every rank and leaves no folder behind.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from hashlib import sha256
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from diffusers.loaders.lora_base import LORA_ADAPTER_METADATA_KEY, LORA_WEIGHT_NAME_SAFE
from diffusers.utils.constants import SAFE_WEIGHTS_INDEX_NAME, SAFETENSORS_WEIGHTS_NAME
from peft import PeftModel
from peft.utils import SAFETENSORS_WEIGHTS_NAME as ADAPTER_WEIGHTS_NAME
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager, FSDPConfig
from verl.utils.fsdp_utils import fsdp_version

from verl_digen.engine.copies import PolicyCopies
from verl_digen.engine.export import ADAPTER, PEFT_PREFIX, adapter_weights, full_weights
from verl_digen.engine.loss_scale import LossScale
from verl_digen.engine.shadow import local_shard
from verl_digen.engine.teachers import Teachers, check_saved, checksums
from verl_digen.models.experts import Experts

logger = logging.getLogger(__name__)

MAX_FILE_BYTES = 5 << 30
"""Largest safetensors file of an export; the diffusers library's own limit is 10 GB."""

FINGERPRINT_NUMBERS = 8
"""Numbers of each frozen shard in its fingerprint: enough for other weights, cheap at 20 billion parameters."""

WRITE_ERRORS = (OSError, RuntimeError, SafetensorError)
"""Exceptions on a full disk: torch's zip writer raises RuntimeError, safetensors its own."""


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

    def __init__(self, *args: Any, update_state: UpdateState, copies: PolicyCopies, teachers: Teachers, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.update_state, self.copies, self.teachers = update_state, copies, teachers
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
        """Write this rank's part of a checkpoint; it appears under `local_path` when all ranks are done.

        Raises:
            RuntimeError: a rank could not write; nothing appears, and older checkpoints are untouched.
        """
        if local_path is None:
            return
        self.previous_global_step = global_step
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
                        "teachers": checksums(self.teachers),
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
        """Load this rank's part.

        Raises:
            ValueError: it was saved by another number of ranks, or is no checkpoint.
        """
        if local_path is None:
            return
        folder = Path(local_path)
        if self.should_load_model and not (folder / self._file("model")).is_file():
            found = sorted(file.name for file in folder.glob("model_world_size_*_rank_0.pt"))
            raise ValueError(
                f"a run on {self.world_size} trainer ranks resumes from a checkpoint of as many, but {local_path} "
                f"has {', '.join(found) or 'none'}; change trainer.nnodes x trainer.n_gpus_per_node, or start a new run"
            )
        state = folder / self._file("digen_state")
        saved = _load(state) if self.should_load_extra and state.is_file() else None
        if saved is not None and not {"copies", "frozen"} <= saved.keys():
            raise ValueError(
                f"{local_path} was written by an older version, which saved other things; start a new run from its "
                "weights"
            )
        frozen = frozen_fingerprint(self.model)
        if saved is not None and saved["frozen"] and frozen and saved["frozen"] != frozen:
            raise ValueError(
                f"{local_path} holds an adapter for other base weights than those of actor_rollout_ref.model.path in "
                "the dtype of actor_rollout_ref.actor.fsdp_config.model_dtype; set both to what the run began with"
            )
        if saved is not None and "teachers" in saved:
            check_saved(self.teachers, saved["teachers"], local_path)
        self._load_shards(folder)
        if saved is None:
            self.copies.load_state_dict({}, num_updates=0)
        else:
            self.copies.load_state_dict(saved["copies"], saved["num_updates"])
            self.update_state.num_updates, self.update_state.num_skipped = saved["num_updates"], saved["num_skipped"]
            self._load_loss_scale(saved)
        dist.barrier()

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

    def _load_shards(self, folder: Path) -> None:
        if self.should_load_model:
            self._load_model(_load(folder / self._file("model")))
        if self.should_load_optimizer:
            self.optimizer.load_state_dict(_load(folder / self._file("optim")))
        if self.should_load_extra:
            extra = _load(folder / self._file("extra_state"))
            self.load_rng_state(extra["rng"])
            if self.lr_scheduler is not None:
                self.lr_scheduler.load_state_dict(extra["lr_scheduler"])

    @torch.no_grad()
    def _load_model(self, saved: dict[str, Tensor]) -> None:
        """Copy saved shards into the module.

        Raises:
            ValueError: they are not those that this run trains; names one.
        """
        live = self._model_state()
        unlike = saved.keys() ^ live.keys() or {name for name in live if saved[name].shape != live[name].shape}
        if unlike:
            raise ValueError(
                f"a checkpoint must hold the {len(live)} tensors that this run trains, got {len(saved)}, which differ "
                f"e.g. in {min(unlike)}; resume with the same actor_rollout_ref.model.lora_* and target_modules"
            )
        for name, value in live.items():
            local_shard(value).copy_(local_shard(saved[name]))

    def _file(self, kind: str) -> str:
        return f"{kind}_world_size_{self.world_size}_rank_{self.rank}.pt"


def _load(path: Path) -> Any:
    return torch.load(path, map_location="cpu", weights_only=False)  # written by this run: RNG states, a schedule


@torch.no_grad()
def frozen_fingerprint(module: nn.Module) -> str:
    """Hash of the first numbers of this rank's frozen shards; tells base weights apart that are not the same."""
    shards = (local_shard(value) for value in module.parameters() if not value.requires_grad)
    heads = [shard.flatten()[:FINGERPRINT_NUMBERS].float() for shard in shards if shard.numel()]
    return sha256(torch.cat(heads).cpu().numpy().tobytes()).hexdigest() if heads else ""


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


def save_adapter(module: PeftModel, tensors: dict[str, Tensor], folder: Path) -> None:
    """Write gathered adapter tensors for peft and for diffusers' pipelines."""
    folder.mkdir()
    config = module.peft_config[ADAPTER]
    save_file(tensors, folder / ADAPTER_WEIGHTS_NAME, metadata={"format": "pt"})
    is_inference, config.inference_mode = (
        config.inference_mode,
        True,
    )  # as peft's own save_pretrained leaves it
    config.save_pretrained(str(folder))
    config.inference_mode = is_inference
    described = {
        f"transformer.{key}": sorted(value) if isinstance(value, set) else value
        for key, value in config.to_dict().items()
    }
    save_file(
        {f"transformer.{name.removeprefix(PEFT_PREFIX)}": value for name, value in tensors.items()},
        folder / LORA_WEIGHT_NAME_SAFE,
        metadata={"format": "pt", LORA_ADAPTER_METADATA_KEY: json.dumps(described, indent=2, sort_keys=True)},
    )


def save_networks(module: Any, tensors: Iterable[tuple[str, Tensor]], folder: Path, *, writes: bool) -> None:
    """Write streamed tensors as diffusers folders in `folder`: `transformer`, or one for each expert, by its name.

    Args:
        tensors: for an `Experts`, one expert after the other, names prefixed with the expert's.
        writes: see `save_transformer`.
    """
    network = module.base_model.model if isinstance(module, PeftModel) else module
    if not isinstance(network, Experts):
        save_transformer(network, tensors, folder / "transformer", writes=writes)
        return
    errors: list[BaseException] = []
    for expert, named in groupby(tensors, key=lambda named: named[0].partition(".")[0]):
        stripped = ((name.partition(".")[2], tensor) for name, tensor in named)
        try:
            save_transformer(network.get_submodule(expert), stripped, folder / expert, writes=writes)
        except WRITE_ERRORS as error:  # every rank must still gather the next expert's tensors
            errors.append(error)
    if errors:
        raise errors[0]


def save_transformer(
    module: Any,
    tensors: Iterable[tuple[str, Tensor]],
    folder: Path,
    *,
    writes: bool,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Write streamed tensors as a diffusers folder; holds at most one file's tensors in memory.

    Args:
        writes: False only consumes the tensors. A rank that fails to write keeps consuming, so that others can gather.
    """
    error: BaseException | None = None

    def attempt(action: Callable[[], Any]) -> None:
        nonlocal error
        if error is None and writes:
            try:
                action()
            except WRITE_ERRORS as raised:
                error = raised

    files: list[list[str]] = []
    pending: dict[str, Tensor] = {}
    num_bytes = total_bytes = 0

    def flush() -> None:
        save_file(pending, folder / f"{len(files)}.safetensors", metadata={"format": "pt"})
        files.append(list(pending))

    attempt(folder.mkdir)
    for name, value in tensors:
        if not writes:
            continue
        if pending and num_bytes + value.nbytes > max_file_bytes:
            attempt(flush)
            pending, num_bytes = {}, 0
        pending[name] = value.cpu().contiguous()
        num_bytes += value.nbytes
        total_bytes += value.nbytes
    attempt(flush)
    attempt(lambda: _name_files(folder, files, total_bytes))
    attempt(lambda: module.save_config(folder))
    if error is not None:
        raise error


def _name_files(folder: Path, files: list[list[str]], total_bytes: int) -> None:
    """Rename numbered files to the names diffusers expects, which contain their count, and write the index."""
    if len(files) == 1:
        (folder / "0.safetensors").rename(folder / SAFETENSORS_WEIGHTS_NAME)
        return
    stem, suffix = SAFETENSORS_WEIGHTS_NAME.rsplit(".", 1)
    weight_map = {}
    for number, names in enumerate(files):
        file = f"{stem}-{number + 1:05d}-of-{len(files):05d}.{suffix}"
        (folder / f"{number}.safetensors").rename(folder / file)
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=2, sort_keys=True))

# SPDX-License-Identifier: Apache-2.0
"""Formats of an export (docs/checkpoints.md), folders with whole weights that other tools read, and their model card.

An adapter of two networks (Wan2.2) is written as two adapters, in folders with the networks' names.
"""

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

import torch
from diffusers.loaders.lora_base import LORA_ADAPTER_METADATA_KEY, LORA_WEIGHT_NAME_SAFE
from diffusers.utils.constants import SAFE_WEIGHTS_INDEX_NAME, SAFETENSORS_WEIGHTS_NAME
from huggingface_hub import ModelCardData, metadata_load
from omegaconf import OmegaConf
from peft import PeftModel
from peft.tuners.lora import LoraConfig
from peft.utils import SAFETENSORS_WEIGHTS_NAME as ADAPTER_WEIGHTS_NAME
from peft.utils.other import get_pattern_key
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from verl_digen.engine.export import PEFT_PREFIX
from verl_digen.models.checkpoint import Experts
from verl_digen.models.locate import HUB_ID
from verl_digen.observe.run_files import CHECKPOINT, METRICS, read_lines
from verl_digen.report.curves import thinned
from verl_digen.report.summary import read_start
from verl_digen.require import require, require_one_of
from verl_digen.tools.export.comfyui import NAMES, comfyui_tensors, scales_of
from verl_digen.tools.export.policy import PolicyWeights
from verl_digen.tools.export.saved_run import SavedRun, open_run

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
"""Value of --dtype -> dtype of the written weights."""

MAX_FILE_BYTES = 5 << 30
"""Largest safetensors file of an export; the diffusers library's own limit is 10 GB."""

WRITE_ERRORS = (OSError, SafetensorError)
"""Exceptions on a full disk: safetensors has its own."""

Value = TypeVar("Value")


def save_networks(network: Any, tensors: Iterable[tuple[str, Tensor]], folder: Path) -> None:
    """Write streamed tensors as diffusers folders in `folder`: `transformer`, or one for each expert, by its name. The
    tensors of an `Experts` come one expert after the other, with its name as prefix."""
    network = network.base_model.model if isinstance(network, PeftModel) else network
    if not isinstance(network, Experts):
        save_transformer(network, tensors, folder / "transformer")
        return
    for expert, named in groupby(tensors, key=lambda named: named[0].partition(".")[0]):
        stripped = ((name.partition(".")[2], tensor) for name, tensor in named)
        save_transformer(network.get_submodule(expert), stripped, folder / expert)


def save_transformer(
    module: Any, tensors: Iterable[tuple[str, Tensor]], folder: Path, *, max_file_bytes: int = MAX_FILE_BYTES
) -> None:
    """Write streamed tensors as a diffusers folder; holds at most one file's tensors in memory."""
    folder.mkdir()
    files: list[list[str]] = []
    pending: dict[str, Tensor] = {}
    num_bytes = total_bytes = 0

    def flush() -> None:
        save_file(pending, folder / f"{len(files)}.safetensors", metadata={"format": "pt"})
        files.append(list(pending))

    for name, value in tensors:
        if pending and num_bytes + value.nbytes > max_file_bytes:
            flush()
            pending, num_bytes = {}, 0
        pending[name] = value.contiguous()
        num_bytes += value.nbytes
        total_bytes += value.nbytes
    flush()
    _name_files(folder, files, total_bytes)
    module.save_config(folder)


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


Write = Callable[[SavedRun, PolicyWeights, Path, torch.dtype | None], None]
"""Writes a policy into an empty folder; the dtype is `PolicyWeights.full`'s."""


def require_fit(run: SavedRun, name: str) -> None:
    """Raise ValueError unless format `name` fits what the run trained."""
    fits, trained = (FORMATS, "an adapter") if run.is_lora else (("diffusers",), "all weights")
    if name == "comfyui":
        require_one_of("--format comfyui: the pipeline of the base checkpoint", run.model.pipeline, NAMES)
    require(
        name in fits, f"--format must be one of {', '.join(fits)} for a run that trained {trained}", name, "choose one"
    )


def _write_networks(run: SavedRun, weights: PolicyWeights, folder: Path, dtype: torch.dtype | None) -> None:
    save_networks(weights.network, weights.full(dtype), folder)


def _write_diffusers(run: SavedRun, weights: PolicyWeights, folder: Path, dtype: torch.dtype | None) -> None:
    if not run.is_lora:
        return _write_networks(run, weights, folder, dtype)
    for name, config, tensors in adapters(run, weights, dtype):  # each for `pipeline.load_lora_weights(folder)`
        (folder / name).mkdir(exist_ok=True)
        described = {f"transformer.{key}": value for key, value in config.to_dict().items()}
        save_file(
            {f"transformer.{key.removeprefix(PEFT_PREFIX)}": value for key, value in tensors.items()},
            folder / name / LORA_WEIGHT_NAME_SAFE,
            metadata={"format": "pt", LORA_ADAPTER_METADATA_KEY: json.dumps(described, sort_keys=True, default=sorted)},
        )


def _write_peft(run: SavedRun, weights: PolicyWeights, folder: Path, dtype: torch.dtype | None) -> None:
    for name, config, tensors in adapters(run, weights, dtype):  # each for `PeftModel.from_pretrained`
        (folder / name).mkdir(exist_ok=True)
        save_file(tensors, folder / name / ADAPTER_WEIGHTS_NAME, metadata={"format": "pt"})
        config.save_pretrained(str(folder / name))


def _write_comfyui(run: SavedRun, weights: PolicyWeights, folder: Path, dtype: torch.dtype | None) -> None:
    scales = scales_of(weights)
    for name, _, tensors in adapters(run, weights, dtype):
        found = comfyui_tensors(run.model.pipeline, tensors, _of_network(scales, name))
        save_file(found, folder / f"{name or 'lora'}.safetensors", metadata={"format": "pt"})


def adapters(
    run: SavedRun, weights: PolicyWeights, dtype: torch.dtype | None = None
) -> Iterator[tuple[str, LoraConfig, dict[str, Tensor]]]:
    """(folder, peft config, tensors under peft's names) of the adapter of each network; folder "" if there is one."""
    tensors = {name: value if dtype is None else value.to(dtype) for name, value in weights.adapter().items()}
    if len(run.model.experts) == 1:
        yield "", weights.adapter_config, tensors
        return
    for expert in run.model.experts:
        if own := _of_network(tensors, expert):
            yield expert, _of_layers(weights.adapter_config, own, expert), own


def _of_network(values: Mapping[str, Value], network: str) -> dict[str, Value]:
    """Entries of one network, under the names that they have where it is alone; "": it is."""
    prefix = f"{PEFT_PREFIX}{network}." if network else PEFT_PREFIX
    own = [name for name in values if name.startswith(prefix)]
    return {f"{PEFT_PREFIX}{name.removeprefix(prefix)}": values[name] for name in own}


def _of_layers(config: LoraConfig, tensors: Mapping[str, Tensor], network: str) -> LoraConfig:
    """The config with the layers that have tensors as its targets; a pattern may name the network itself."""
    own = copy(config)
    own.target_modules = layers = sorted({name.removeprefix(PEFT_PREFIX).rpartition(".lora_")[0] for name in tensors})
    own.exclude_modules = None
    for kind in ("rank_pattern", "alpha_pattern"):
        found = getattr(config, kind)
        keys = {layer: get_pattern_key(list(found), f"{network}.{layer}") for layer in layers}
        setattr(own, kind, {f"^{layer}": found[key] for layer, key in keys.items() if key in found})
    return own


FORMATS: dict[str, Write] = {
    "diffusers": _write_diffusers,
    "peft": _write_peft,
    "merged": _write_networks,
    "comfyui": _write_comfyui,
}
"""Value of --format -> writer. A run that trained all weights has the first alone."""


MAX_ROWS = 20
"""Validations in the table; of more, evenly spaced ones, the first and the last among them."""


def model_card(run: SavedRun, policy: str, form: str) -> str:
    """Text of README.md for the export of `policy` in format `form`."""
    settings, model = run.digen, run.model_config
    trained = f"LoRA, rank {model.lora_rank}, alpha {model.lora_alpha}" if run.is_lora else "all weights"
    facts = {
        "base model": f"`{model.path}`",
        "pipeline": run.model.pipeline,
        "trained": trained,
        "objective": f"`{settings.loss_name}`",
        "checkpoint": f"step {run.step}, policy `{policy}`, format `{form}`",
    }
    parts = [f"---\n{_metadata(run)}\n---", f"# {run.folder.absolute().name}", "Trained with verl-digen."]
    parts.append(_table(("", ""), facts.items()))
    parts.append("## Rewards\n\n" + _table(("reward", "weight"), _rewards(run)))
    if rows := list(validations(run.folder / METRICS, run.step)):
        parts.append("## Validation\n\nMean reward over the validation prompts.\n\n" + _table(("step", "reward"), rows))
    if words := read_start(run.folder)["words"]:
        parts.append("## Command line\n\n" + "\n".join(f"    {word}" for word in words))
    parts.append("## Versions\n\n" + _table(("package", "version"), run.versions.items()))
    return "\n\n".join(parts) + "\n"


def _metadata(run: SavedRun) -> str:
    """The card's front matter; the licence is that which the base checkpoint's own card states."""
    card = run.model.path / "README.md"
    known: Mapping[str, Any] = (metadata_load(card) or {}) if card.is_file() else {}
    path = run.model_config.path
    data = ModelCardData(
        base_model=path if HUB_ID.fullmatch(path) and not Path(path).exists() else None,
        license=known.get("license"),
        license_name=known.get("license_name"),
        license_link=known.get("license_link"),
        library_name="diffusers",
        tags=["verl-digen", "reinforcement-learning", *(["lora"] if run.is_lora else [])],
    )
    return data.to_yaml()


def _rewards(run: SavedRun) -> Iterator[tuple[str, str]]:
    custom = OmegaConf.select(run.config, "reward.custom_reward_function.path")
    for name, weight in run.digen.reward.weights(has_custom=custom is not None).items():
        yield f"`{name}`", f"{weight:g}"


def validations(metrics: Path, step: int) -> Iterator[tuple[int, str]]:
    """(step, mean reward) of validations up to `step` in a run's metrics.jsonl; at most `MAX_ROWS`."""
    rows = [row for row in read_lines(metrics) if "val/reward" in row and row["step"] <= step]
    found = {row["step"]: row["val/reward"] for row in rows}
    for at in thinned(sorted(found), MAX_ROWS):
        yield at, f"{found[at]:.4f}"


def _table(head: tuple[str, str], rows: Any) -> str:
    lines = [head, ("---", "---"), *rows]
    return "\n".join(f"| {left} | {right} |" for left, right in lines)


def export(
    run_dir: Path,
    *,
    step: int | None = None,
    policy: str = "current",
    base: str | None = None,
    format: str = "diffusers",
    dtype: str | None = None,
    output: Path | None = None,
) -> Path:
    """Export a checkpoint -> the folder that was written. ValueError if there is no such run, checkpoint, policy or
    format, or `output` holds something; OSError if the folder cannot be written."""
    if dtype is not None:
        require_one_of("--dtype", dtype, DTYPES)
    saved = open_run(run_dir, step, base)
    require_fit(saved, format)
    default = saved.folder / "exports" / f"{CHECKPOINT}{saved.step}-{policy}-{format}"
    folder = (default if output is None else output).absolute()
    require_empty(folder)
    weights = PolicyWeights(saved, policy)
    with written_whole(folder) as partial:
        FORMATS[format](saved, weights, partial, None if dtype is None else DTYPES[dtype])
        (partial / "README.md").write_text(model_card(saved, policy, format), encoding="utf-8")
    return folder


def require_empty(folder: Path) -> None:
    """Raise ValueError unless `folder` is missing or empty, and no other command is writing it."""
    is_free = not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))
    require(is_free, "--output must be a new or an empty folder", str(folder), "name another one")
    partial = partial_of(folder)
    rule = f"{str(partial)!r} must not be there: another command writes it, or was killed"
    require(not partial.exists(), rule, "a folder", "remove it, or give another --output")


def partial_of(folder: Path) -> Path:
    """The folder in which the content of `folder` is collected."""
    return folder.with_name(folder.name + ".partial")


@contextmanager
def written_whole(folder: Path) -> Iterator[Path]:
    """A folder to write to, renamed to `folder` at the end, or removed if the body raised; after `require_empty`."""
    partial = partial_of(folder)
    partial.mkdir(parents=True)
    try:
        yield partial
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise

# SPDX-License-Identifier: Apache-2.0
"""Rules for the adapter that trains: before Ray starts it is built on the meta device, as every rank will build it, and
compared with the headers of the files that it starts from. A teacher (`digen.loss.teacher`) is an adapter, too."""

import pickle
import re
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from verl_digen.algorithms.objectives import find_objective
from verl_digen.algorithms.objectives.objective import TEACHER
from verl_digen.model_config import ADAPTER_CONFIG_NAME, DiffusionModelConfig
from verl_digen.models.base import DiffusionModel
from verl_digen.models.locate import read_object
from verl_digen.models.lora_file import check_lora_file
from verl_digen.preflight.inputs import has_checkpoint
from verl_digen.preflight.model import KEY, load_configs, model_section, trains_all
from verl_digen.preflight.start_config import StartConfig
from verl_digen.preflight.weights import shapes_of
from verl_digen.require import refusing, require, suggestion

if TYPE_CHECKING:
    from peft import LoraConfig, PeftModel

FOLDER = f"{KEY}.lora_adapter_path"
ALL_LINEAR = "all-linear"
"""peft's word for every linear layer."""
NOT_SENT = ("bias", "lora_bias", "modules_to_save", "trainable_token_indices", "target_parameters", "layer_replication")
"""peft's settings that train something else than matrices beside layers, which no replica and no export takes."""


def check_adapter(run: StartConfig) -> None:
    """Require layers that take an adapter, and files with the tensors of the one that trains."""
    section: Any = run.config.actor_rollout_ref.model
    given = {key: section[key] for key in ("target_modules", "exclude_modules", "lora_adapter_path")}
    if trains_all(run.config) or "://" in section.path or not any(given.values()):  # the model's own layers take one
        return
    model = load_configs(section.path)
    network = model.load_structure(torch.float32)  # on the meta device
    for key in ("target_modules", "exclude_modules"):
        _check_names(model, network, f"{KEY}.{key}", given[key])
    model_config = model_section(run)
    if model_config.lora_file is not None:
        check_lora_file(model_config.lora_file, model, network)
    adapted = build_on_meta(network, model_config)
    if model_config.lora_adapter_path is not None and model_config.lora_file is None:
        from peft import get_peft_model_state_dict

        own = get_peft_model_state_dict(adapted, save_embedding_layers=False)  # under the names that peft saves
        shapes = {name: tuple(value.shape) for name, value in own.items()}
        _compare(Path(model_config.lora_adapter_path), shapes)
    if run.config.actor_rollout_ref.rollout.name == "vllm_omni" and not model_config.merges_lora:
        _check_sent(adapted)


def _check_sent(adapted: "PeftModel") -> None:
    """Require an adapter that vLLM-Omni computes as it trains: its layers know one scale, and no DoRA."""
    from peft.tuners.lora import LoraLayer

    layers = [layer for layer in adapted.modules() if isinstance(layer, LoraLayer)]
    kinds = {f"{'DoRA, ' * bool(one.lora_variant)}alpha/rank {one.scaling['default']:.6g}" for one in layers}
    require(
        len(kinds) == 1 and "DoRA" not in min(kinds),
        f"{FOLDER} must hold plain LoRA with one alpha/rank for actor_rollout_ref.rollout.name=vllm_omni",
        "; ".join(sorted(kinds)),
        "set actor_rollout_ref.rollout.name=diffusers, or for plain LoRA actor_rollout_ref.model.lora.merge=true",
    )


def build_on_meta(network: nn.Module, model_config: DiffusionModelConfig) -> "PeftModel":
    """The adapter around a network on the meta device. ValueError if peft refuses it, or it trains more than that."""
    from verl_digen.engine.build import add_adapter

    given = model_config.lora_config()
    _check_settings(model_config, given)
    names = [name for name, _ in network.named_modules() if name]
    try:
        with torch.device("meta"):
            adapted: Any = add_adapter(network, model_config, rank=1)
    except (ValueError, LookupError, TypeError, RuntimeError, AttributeError, NotImplementedError) as error:
        targets = given.target_modules
        key = "target_modules" if model_config.lora_adapter_path is None else "lora_adapter_path"
        linear = (name for name, one in network.named_modules() if name in names and isinstance(one, nn.Linear))
        raise ValueError(
            f"{KEY}.{key} must name layers of the network that take an adapter, such as "
            f"{next(linear, 'none of it')}, got {_listed(targets)}"
            f"{f' without {_listed(given.exclude_modules)}' if given.exclude_modules else ''}: "
            f"{str(error).splitlines()[0]}; name linear layers, or leave it out for the model's own"
        ) from error
    return adapted


def _listed(names: Any) -> Any:
    return names if isinstance(names, str) else sorted(names)


def _check_settings(model_config: DiffusionModelConfig, given: "LoraConfig") -> None:
    """Require settings of a file that train an adapter alone."""
    from peft import LoraConfig

    if model_config.lora_adapter_path is None:
        return
    rule = f"the adapter_config.json of {FOLDER} must have target_modules"
    require(bool(given.target_modules), rule, given.target_modules, "take the file that peft saved with the adapter")
    plain = LoraConfig()
    variants = {field.name for field in fields(LoraConfig) if field.metadata.get("is_lora_variant")} - {"use_dora"}
    for name in (*NOT_SENT, *sorted(variants)):
        value = getattr(given, name, None)
        require(
            not value or value == getattr(plain, name),
            f"{name} in the adapter_config.json of {FOLDER} must be left out: replicas and exports take only "
            "the matrices of LoRA, rsLoRA and DoRA",
            value,
            "train an adapter without it, or merge this one into the base checkpoint",
        )


def _compare(folder: Path, own: Mapping[str, tuple[int, ...]]) -> None:
    """Require the tensors `own`, name -> shape, in the adapter's file."""
    found = _shapes_in(folder)
    fit = {name for name, shape in own.items() if found.get(name) == shape}
    if len(fit) == len(own) == len(found):
        return
    listed = [
        ", ".join(f"{name} {list(shapes[name])}" for name in sorted(shapes.keys() - fit)[:3]) or "nothing more"
        for shapes in (found, own)
    ]
    raise ValueError(
        f"{FOLDER} must hold the {len(own)} tensors of the adapter that trains, got {str(folder)!r}, of whose "
        f"{len(found)} tensors {len(fit)} fit: it has {listed[0]}; the network takes {listed[1]}; rename them, or take "
        "an adapter of this network, with the rank and the layers in its adapter_config.json"
    )


def _shapes_in(folder: Path) -> Mapping[str, tuple[int, ...]]:
    """Tensors of an adapter's file: name -> shape."""
    from peft.utils import SAFETENSORS_WEIGHTS_NAME, WEIGHTS_NAME

    file = next((file for name in (SAFETENSORS_WEIGHTS_NAME, WEIGHTS_NAME) if (file := folder / name).is_file()), None)
    if file is None:
        rule = f"{FOLDER} must hold an adapter's weights, {SAFETENSORS_WEIGHTS_NAME}"
        raise ValueError(f"{rule}, got {str(folder)!r}; complete the download")
    if file.suffix == ".safetensors":
        shapes = shapes_of(file)
    else:
        try:
            shapes = {name: tuple(value.shape) for name, value in torch.load(file, "meta", weights_only=True).items()}
        except (OSError, RuntimeError, ValueError, pickle.UnpicklingError, EOFError, AttributeError):
            shapes = None
    if shapes is None:
        raise ValueError(
            f"{FOLDER} must hold whole weight files, got {str(file)!r} with {file.stat().st_size} bytes, which is "
            "none; download it again"
        )
    return shapes


def adapter_notes(run: StartConfig) -> list[str]:
    """Notes where the adapter's file has settings that the run does not take, or takes in place of a recipe's."""
    section = run.config.actor_rollout_ref.model
    if section.lora_adapter_path is None or "://" in section.path:
        return []
    from peft import LoraConfig

    made = model_section(run)
    given = {"lora_rank": made.lora_rank, "lora_alpha": made.lora_alpha}
    other = [f"{name}={value} in place of {section[name]}" for name, value in given.items() if value != section[name]]
    found = [f"{FOLDER}: its {' and '.join(other)} of the recipe"] if other and section.lora_rank else []
    file = Path(made.lora_adapter_path or "") / ADAPTER_CONFIG_NAME
    saved = read_object(file, FOLDER) if file.is_file() else {}
    if dropout := saved.get("lora_dropout", 0):
        found.append(f"{FOLDER}: its lora_dropout={dropout} is 0 here, because replicas draw without")
    known = {"peft_type", "auto_mapping", "peft_version", *(field.name for field in fields(LoraConfig))}
    if unknown := {name: value for name, value in saved.items() if value and name not in known}:
        found.append(f"{FOLDER}: {unknown} of its {ADAPTER_CONFIG_NAME} are unknown to peft here")
    return found


def _check_names(model: DiffusionModel, network: nn.Module, key: str, given: Any) -> None:
    """Require every name the user gives to match a module, in the way peft reads it: a suffix, or a whole regex."""
    if given is None or given == ALL_LINEAR:
        return
    names = [name for name, _ in network.named_modules() if name]
    if isinstance(given, str):
        with refusing(f"{key} must be a regular expression", given, "repair it"):
            found = any(re.fullmatch(given, name) for name in names)
        require(
            found,
            f"{key} must match a module of this {model.spec.title}",
            given,
            f"a regular expression must match a whole name, such as {names[-1]!r}; null takes {_own(model)}",
        )
        return
    for target in given:
        require(
            any(name == target or name.endswith(f".{target}") for name in names),
            f"{key} must hold endings of names of modules of this {model.spec.title}",
            target,
            f"{suggestion(target, _endings(names))}null takes {_own(model)}",
        )


def _own(model: DiffusionModel) -> str:
    return f"the model's own, {', '.join(model.spec.lora_targets)}"


def _endings(names: Iterable[str]) -> set[str]:
    """The last one and the last two parts of each name: `to_out.0`, `to_q`."""
    endings = {".".join(name.split(".")[-count:]) for name in names for count in (1, 2)}
    return {ending for ending in endings if not ending.isdecimal()}


def check_teacher(run: StartConfig) -> None:
    """Require an adapter that can teach the one that trains, where the objective reads a teacher, and fitting
    settings."""
    from verl_digen.engine.teacher import KEY, adapter_shapes, check_teacher_files

    digen = run.digen
    objective, settings = find_objective(digen.loss_name), digen.loss_settings
    if TEACHER not in objective.policies_for(settings):
        return
    require(
        settings.taught_by is not None,
        f"{KEY} must be the folder of a LoRA adapter with digen.loss.name={digen.loss_name}",
        settings.taught_by,
        f"set {KEY}=FOLDER",
    )
    assert settings.taught_by is not None
    require(
        not trains_all(run.config),
        f"actor_rollout_ref.model.lora_rank must be that of the teacher's adapter with digen.loss.name="
        f"{digen.loss_name}, whose teacher and student are adapters of one base",
        run.config.actor_rollout_ref.model.lora_rank,
        "set actor_rollout_ref.model.lora_rank, and target_modules where the teacher has others",
    )
    if not objective.reads_advantages(settings):
        row = "digen.queue.drop_zero_spread", False, ", where a group trains whatever its rewards are", "leave it out"
        run.require_values(f"with digen.loss.name={digen.loss_name}", row)
    if has_checkpoint(run.config):
        network = load_configs(run.config.actor_rollout_ref.model.path).load_structure(torch.float32)
        check_teacher_files(settings.taught_by, adapter_shapes(build_on_meta(network, model_section(run))))

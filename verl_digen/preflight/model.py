# SPDX-License-Identifier: Apache-2.0
"""Rules for the checkpoint, the layers that are trained, and the loss."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from verl_digen.preflight.images import check_image_settings
from verl_digen.preflight.recipes import typed_keys
from verl_digen.preflight.start_config import StartConfig
from verl_digen.require import require, require_one_of, suggestion

if TYPE_CHECKING:
    from verl_digen.model_config import DiffusionModelConfig
    from verl_digen.models.base import DiffusionModel

KEY = "actor_rollout_ref.model"
FETCHED = "hdfs://"
OF_VERL = frozenset({"_target_", "digen", "model_type", "hf_config", "tokenizer", "processor", "mtp"})
"""Fields of `DiffusionModelConfig` that a user has no reason to set."""


def check_model(run: StartConfig) -> None:
    """Require a complete checkpoint that makes what is asked for, is served, and has the layers to train."""
    section, model = run.config.actor_rollout_ref.model, model_of(run.config)
    require(
        model is not None or section.path.startswith(FETCHED),
        f"{KEY}.path must be a folder, OWNER/NAME on the hub, or {FETCHED}..., which verl fetches",
        section.path,
        "download it, or name the repository without its address",
    )
    if model is None:
        return
    from verl_digen.models.sequence import check_sequence
    from verl_digen.rollout.vllm_omni.served import require_bound, require_served
    from verl_digen.sampling.requests import planned_geometry

    if run.config.actor_rollout_ref.rollout.name == "vllm_omni":
        serving = require_served(model.pipeline)
        lora = {"rank": section.lora_rank, "merge": False} | OmegaConf.to_container(section.lora, throw_on_missing=True)  # type: ignore[operator]
        require_bound(
            serving,
            sends_adapter=lora["rank"] > 0 and not lora["merge"],
            targets=section.target_modules,
            excluded=section.exclude_modules,
        )
    sampling = run.digen.sampling
    check_image_settings(run, model)
    _check_guidance(run, model)
    geometry = planned_geometry(sampling, model.spec.num_images[0])
    model.latent_shape(geometry)
    size = run.config.actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size
    check_sequence(model, size, geometry)
    model.embedded_guidance(sampling.guidance_scale)


def _check_guidance(run: StartConfig, model: DiffusionModel) -> None:
    """Require no guidance of a checkpoint that its pipeline runs without."""
    if model.takes_guidance:
        return
    remedy = f"set it to 1, or choose a base checkpoint, such as {model.spec.example}"
    for key in ("digen.sampling.true_cfg_scale", "digen.sampling.val_true_cfg_scale"):
        row = key, 1, ", which its pipeline never guides", remedy
        run.require_values(f"for this distilled {model.spec.title}", row)


def check_model_section(run: StartConfig) -> None:
    """Require known keys in `actor_rollout_ref.model`, and a readable adapter if training starts from one."""
    from verl_digen.model_config import DiffusionModelConfig

    section: Any = OmegaConf.to_container(run.config.actor_rollout_ref.model, resolve=True, throw_on_missing=True)
    names = {field.name for field in fields(DiffusionModelConfig)}
    known = sorted(names - OF_VERL)
    for name in sorted(section.keys() - {*names, "_target_"}):
        raise ValueError(
            f"{KEY}.{name} must be a key of a diffusion model, got {section[name]!r}; {suggestion(name, known)}"
            f"known are {', '.join(known)}"
        )
    if not isinstance(section["path"], str) or "://" in section["path"]:
        return
    made = model_section(run)
    require(
        made.lora_rank > 0 or "lora_alpha" not in typed_keys(run.config, KEY),  # recipes hold one, too
        f"{KEY}.lora_alpha must be left out with lora_rank=0, which trains all weights and no adapter",
        made.lora_alpha,
        f"set {KEY}.lora_rank, e.g. 32",
    )
    adopted = {"rank": made.lora_rank, "alpha": made.lora_alpha} if made.lora_adapter_path else {}
    for name in typed_keys(run.config, KEY):  # a recipe's give way
        value, given = adopted.get(name.removeprefix("lora")[1:]), OmegaConf.select(run.config, f"{KEY}.{name}")
        require(
            value is None or given in (value, 0),
            f"{KEY}.{name} must be that of lora_adapter_path, {value}",
            given,
            f"leave out {name}",
        )


def model_section(run: StartConfig) -> DiffusionModelConfig:
    """The section `actor_rollout_ref.model` as the ranks get it, of the checkpoint's configs alone."""
    from verl_digen.model_config import DiffusionModelConfig
    from verl_digen.models.locate import locate_configs

    section: Any = OmegaConf.to_container(run.config.actor_rollout_ref.model, resolve=True, throw_on_missing=True)
    section.pop("_target_", None)
    located = str(locate_configs(section["path"]))
    return DiffusionModelConfig(**section | {"digen": run.digen, "path": located})


def check_loss(run: StartConfig) -> None:
    """Require a policy loss that is registered, by us or by a module the user names, with the log-probs it needs."""
    from verl_digen.algorithms.objectives import find_objective, objective_names
    from verl_digen.config.loss import unused_settings

    digen = run.digen
    require_one_of("digen.loss.name", digen.loss_name, objective_names())
    _ = digen.denominator  # it raises
    for name in unused_settings(digen.loss).keys() & typed_keys(run.config, "digen.loss"):
        raise ValueError(
            f"digen.loss.{name} must be a setting of digen.loss.name={digen.loss_name}, got {digen.loss[name]!r}, a "
            "setting of another loss; leave it out, or choose that loss"
        )
    for section in ("window", "sde") if digen.trains_forward_points else ("forward",):
        if typed := sorted(typed_keys(run.config, f"digen.{section}")):
            trained = "digen.forward" if digen.trains_forward_points else "digen.window"
            raise ValueError(
                f"digen.{section}.{typed[0]} must be left out, because it has no effect with digen.loss.name="
                f"{digen.loss_name}, got {run.config.digen[section][typed[0]]!r}; {trained} says what is trained"
            )
    find_objective(digen.loss_name).check_inputs(digen.loss_settings)


def model_of(config: DictConfig) -> DiffusionModel | None:
    """The run's model, from its checkpoint's configs alone; None where verl fetches them once the run has started."""
    path = config.actor_rollout_ref.model.path
    return None if "://" in path else load_configs(path)


def load_configs(path: str) -> DiffusionModel:
    """The model of a checkpoint, from its configs alone.

    Raises:
        ValueError: they do not belong to a supported pipeline, or are damaged.
    """
    from verl_digen.models import load_model
    from verl_digen.models.locate import locate_configs

    folder = locate_configs(path)
    try:
        return load_model(folder)
    except (AttributeError, LookupError, TypeError) as error:  # configs that are JSON, but of another pipeline
        raise ValueError(
            f"{KEY}.path must hold the configs of a diffusers pipeline, got {str(folder)!r}, in which they are damaged "
            f"({type(error).__name__}: {error}); complete the download"
        ) from error

# SPDX-License-Identifier: Apache-2.0
"""Rules for the checkpoint, the layers that are trained, the loss, and the images of prompts."""

import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_digen.algorithms.objectives import find_objective
from verl_digen.config import SamplingConfig
from verl_digen.config.sampling import unused_settings
from verl_digen.inputs.images import file_size_px, source_image
from verl_digen.inputs.sizes import IMAGE_SIZES
from verl_digen.inputs.tables import TABLE, TableImage
from verl_digen.model_config import DiffusionModelConfig
from verl_digen.models import MODELS, load_model, read_index
from verl_digen.models.base import DiffusionModel, PackedModel
from verl_digen.models.locate import locate_configs
from verl_digen.models.sequence import TRAINER_KEY, check_sequence
from verl_digen.preflight.start_config import StartConfig, typed_keys
from verl_digen.require import require, suggestion
from verl_digen.rollout.vllm_omni.settings import require_bound, require_served
from verl_digen.sampling.requests import geometry_of, planned_geometry
from verl_digen.types import Geometry, PromptRow

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
    _check_vae(model, geometry)
    for num_steps in (sampling.num_steps, sampling.val_num_steps):
        model.sigmas(num_steps, geometry)
    size = run.config.actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size
    check_sequence(model, size, geometry)
    model.embedded_guidance(sampling.guidance_scale)


def _check_vae(model: DiffusionModel, geometry: Geometry) -> None:
    """Require a VAE with the channels of the network's latents, where configs tell both."""
    folder, is_packed = model.experts[0], isinstance(model, PackedModel)
    network, vae = model.read_network_config(folder), model.read_network_config("vae")
    num_tokens, *others = model.latent_shape(geometry)
    names, size = ("out_channels", "in_channels"), 1
    if is_packed:  # latent positions of a token
        names, size = ("in_channels",), geometry.height_px * geometry.width_px // model._vae_scale**2 // num_tokens
    wanted = [network[name] // size for name in names if network.get(name)]
    channels = vae.get("latent_channels", vae.get("z_dim"))
    if wanted and channels is not None and is_packed == (len(others) == 1):
        rule = f"{KEY}.path must hold a VAE with the {wanted[0]} channels of its {folder}'s latents"
        require(channels in wanted, rule, channels, "take both from one checkpoint")


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
    located = str(locate_configs(run.config.actor_rollout_ref.model.path))
    return DiffusionModelConfig.of(run.config, digen=run.digen, path=located)


def check_loss(run: StartConfig) -> None:
    """Require the log-probs that the policy loss needs, and no setting of another loss or of points that it lacks."""
    digen = run.digen
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


def trains_all(config: DictConfig) -> bool:
    """True if all weights train, not an adapter."""
    model = config.actor_rollout_ref.model
    return not (model.lora_rank or model.lora.get("rank") or model.lora_adapter_path)


def model_of(config: DictConfig) -> DiffusionModel | None:
    """The run's model, from its checkpoint's configs alone; None where verl fetches them once the run has started."""
    path = config.actor_rollout_ref.model.path
    return None if "://" in path else load_configs(path)


def load_configs(path: str) -> DiffusionModel:
    """The model of a checkpoint, from its configs alone. ValueError if they are damaged, or of no known pipeline."""
    folder = locate_configs(path)
    try:
        return load_model(folder)
    except (AttributeError, LookupError, TypeError) as error:  # configs that are JSON, but of another pipeline
        reader = MODELS[read_index(folder)["_class_name"]]
        raise ValueError(
            f"{KEY}.path must hold configs that {reader} can read, got {str(folder)!r} "
            f"({type(error).__name__}: {error}); complete the download, or repair that class if it is yours"
        ) from error


NUM_READERS = 16
"""Files that are opened at the same time: on a network's storage, opening one is waiting."""
MAX_OPENED = 2000
PICTURE_PATH = re.compile(r"\.(png|jpe?g|webp|bmp|gif|tiff?)\b", re.IGNORECASE)
"""A picture's path in a value of a prompt's row."""
IMAGES_REMEDY = "or take the images out of the prompts, and set digen.sampling.planned_images=0"


def check_image_settings(run: StartConfig, model: DiffusionModel) -> None:
    """Require settings of images, that go with what the model's pipeline reads."""
    sampling = run.digen.sampling
    title, (least, most) = model.spec.title, model.spec.num_images
    if most == 0:
        why = ", which reads no images"
        rows = ("size_from_image", False), ("image_px", SamplingConfig().image_px)
        run.require_values(
            f"for {title}", *((f"digen.sampling.{name}", value, why, "leave it out") for name, value in rows)
        )
    else:
        remedy = f"set it to {model.spec.image_sizes}, the rule of its pipeline"
        run.require_values(f"for {title}", ("digen.sampling.image_sizes", model.spec.image_sizes, "", remedy))
    require(
        sampling.planned_images is None or least <= sampling.planned_images <= most,
        f"digen.sampling.planned_images must be null or lie in [{least}, {most}] for {title}",
        sampling.planned_images,
        f"null plans {least}",
    )
    if least > 0 or sampling.planned_images:
        _check_takers(run, model)


def check_prompt_images(run: StartConfig, model: DiffusionModel, prompts: Sequence[PromptRow]) -> None:
    """Require as many images of each prompt as the pipeline reads, and a run that can make pictures of them."""
    least, most = model.spec.num_images
    for prompt in prompts:
        require(
            least <= len(prompt.images) <= most,
            f"{prompt.place} must have {_number_of_images(least, most)} for {model.spec.title}",
            len(prompt.images),
            "choose a checkpoint that reads them, or rename the column 'images'" if prompt.images else _missing(prompt),
        )
    _check_pictures(model, prompts)
    if not any(prompt.images for prompt in prompts):
        return
    _check_takers(run, model)
    sampling = run.digen.sampling
    model.latent_shape(geometry_of(sampling, [(sampling.width_px, sampling.height_px)] * max(1, least)))


def _check_pictures(model: DiffusionModel, prompts: Sequence[PromptRow]) -> None:
    """Require pictures, of sizes that the model's pipeline takes, by the heads of their files; of pipelines without
    limits at most `MAX_OPENED`, and of a column of a table the first one. Others are checked when they are drawn."""
    refuse = IMAGE_SIZES[model.spec.image_sizes].check if model.spec.num_images[1] else None
    places = {path: prompt for prompt in prompts for path in (*prompt.images, *prompt.pair)}
    files = [path for path in places if not path.startswith(TABLE)]
    parsed = {path: TableImage.parse(path) for path in reversed(places) if path.startswith(TABLE)}
    tables = {(table.source, table.column): path for path, table in parsed.items()}
    if refuse is None:
        files = files[:: -(-len(files) // MAX_OPENED) or 1]

    def check(path: str) -> None:
        try:
            size = source_image(path) if path.startswith(TABLE) else file_size_px(path)
            if refuse is not None and isinstance(size, tuple) and path in places[path].images:
                refuse(*size, path)
        except ValueError as error:
            raise ValueError(f"{places[path].place}: {error}") from error

    with ThreadPoolExecutor(NUM_READERS) as readers:
        for _ in readers.map(check, [*files, *tables.values()]):
            pass


def _check_takers(run: StartConfig, model: DiffusionModel) -> None:
    """Require a network that takes prompts with images, if ranks share rows."""
    layout, title = model.spec.sequence, model.spec.title
    if layout is not None and not layout.takes_images:
        row = TRAINER_KEY, 1, ", whose tokens are not split", f"set it to 1, {IMAGES_REMEDY}"
        run.require_values(f"for {title} and prompts with images", row)


def _missing(prompt: PromptRow) -> str:
    """The remedy for a prompt without images: the columns that hold paths of pictures, if there are any."""
    columns = [name for name, value in prompt.extra.items() if PICTURE_PATH.search(str(value))]
    if not columns:
        return "add them, or set data.image_key to the name of their column"
    return f"set data.image_key={' or '.join(columns)}, the column that has paths"


def _number_of_images(least: int, most: int) -> str:
    if most == 0:
        return "no images"
    return f"{least} images" if least == most else f"{least} to {most} images"

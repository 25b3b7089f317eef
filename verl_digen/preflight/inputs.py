# SPDX-License-Identifier: Apache-2.0
"""What a run reads: the checkpoint, prompts, the loss, rewards."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from verl_digen.config import digen_config
from verl_digen.preflight.pools import VIRTUAL
from verl_digen.schedulers.require import require, require_one_of

if TYPE_CHECKING:
    from verl_digen.data.prompts import Prompt

SURELY_SHORT_BYTES = 200
"""A prompt this long fits every model: a token is a byte or more, and none reads fewer than 256. (Eight quotations in
one can be too much for HunyuanVideo 1.5, whose encoder then says so.)"""


def check_model(config: DictConfig) -> None:
    """The checkpoint is there, with all its parts; the model can make what is asked for, and the back end serves it."""
    section = config.actor_rollout_ref.model
    if OmegaConf.is_missing(section, "path"):
        raise ValueError(
            "actor_rollout_ref.model.path must be a checkpoint in the diffusers format, a folder or a repository of "
            "the hub, got nothing; set actor_rollout_ref.model.path=..."
        )
    if "://" in section.path:  # on a remote file system: verl fetches it once the run has started
        return
    from verl_digen.models import ARCHITECTURES, load_model, read_architecture
    from verl_digen.models.locate import locate_configs
    from verl_digen.rollout.vllm_omni.served import require_bound, require_served
    from verl_digen.types import Geometry

    folder = locate_configs(section.path)
    architecture = read_architecture(folder)
    require_one_of("the architecture of actor_rollout_ref.model.path", architecture, tuple(sorted(ARCHITECTURES)))
    sampling = digen_config(config).sampling
    model = load_model(folder)
    if config.actor_rollout_ref.rollout.name == "vllm_omni":
        require_served(model.pipeline)
        lora = {"rank": section.lora_rank, "merge": False} | OmegaConf.to_container(section.lora)  # type: ignore[operator]
        require_bound(
            model.pipeline,
            sends_adapter=lora["rank"] > 0 and not lora["merge"],
            targets=section.target_modules,
            excluded=section.exclude_modules,
        )
    model.latent_shape(Geometry(sampling.height_px, sampling.width_px, sampling.num_frames))
    model.embedded_guidance(sampling.embedded_guidance_scale)


def check_prompts(config: DictConfig) -> None:
    """Prompt files can be read, there are enough prompts for one step, and none is longer than the model reads."""
    prompts: list[Prompt] = []
    for name in ("train_files", "val_files"):
        if config.data[name] is None:
            raise ValueError(f"data.{name} must name a file of prompts, got nothing; set data.{name}=FILE")
        of_file = _read_prompts(config, name)
        prompts += of_file
        if name == "train_files":
            num_prompts, most = len(of_file), config.data.train_max_samples
            require(
                (min(num_prompts, most) if most > 0 else num_prompts) >= config.data.train_batch_size,
                f"data.train_files must hold data.train_batch_size={config.data.train_batch_size} prompts or more",
                num_prompts,
                "add prompts, or lower data.train_batch_size",
            )
    _check_lengths(config, prompts)


def _check_lengths(config: DictConfig, prompts: Iterable[Prompt]) -> None:
    """No prompt is longer than the model reads. For checkpoints on this machine; others tell when they encode."""
    from verl_digen.models import load_model

    section = config.actor_rollout_ref.model
    is_here = not OmegaConf.is_missing(section, "path") and Path(section.path).expanduser().is_dir()
    if not is_here or config.trainer.v1.trainer_mode == VIRTUAL:
        return
    texts = [digen_config(config).sampling.negative_prompt]
    for prompt in prompts:
        texts += [prompt.text] if prompt.negative is None else [prompt.text, prompt.negative]
    long = [text for text in dict.fromkeys(texts) if len(text.encode()) > SURELY_SHORT_BYTES]
    if long:
        check = load_model(Path(section.path).expanduser()).load_prompt_check()
        for text in long:
            check(text)


def check_loss(config: DictConfig) -> None:
    """The policy loss is registered, by us or by a module the user names, and has the log-probs it needs."""
    from verl.utils.import_utils import import_external_libs

    from verl_digen.algorithms.losses import loss_names

    import_external_libs(config.actor_rollout_ref.model.external_lib)  # a user's loss is filed by being imported
    digen = digen_config(config)
    require_one_of("digen.loss_name", digen.loss_name, loss_names())
    _ = digen.denominator  # raises


def check_rewards(config: DictConfig) -> None:
    """There is a reward, and every function named can be found."""
    from verl_digen.reward.functions import resolve

    functions = digen_config(config).reward.functions
    custom = config.reward.custom_reward_function.path
    require(
        bool(functions) or custom is not None,
        "digen.reward.functions must name a reward function and its weight",
        dict(functions),
        "set e.g. digen.reward.functions.jpeg_compressibility=1.0, or reward.custom_reward_function.path",
    )
    for name in functions:
        resolve(name)
    require(
        custom is None or "://" in custom or Path(custom).is_file(),
        "reward.custom_reward_function.path must be an existing file",
        custom,
        "check the path",
    )
    if custom is not None and "://" not in custom:
        _load_custom_reward(config)


def _load_custom_reward(config: DictConfig) -> None:
    """As reward workers will."""
    from verl.trainer.ppo.reward import get_custom_reward_fn

    section = config.reward.custom_reward_function
    try:
        get_custom_reward_fn(config)
    except Exception as error:  # whatever the user's module raises while it is imported
        cause = error.__cause__ or error
        raise ValueError(
            f"reward.custom_reward_function.path={section.path} must be a module that can be imported and has a "
            f"function reward.custom_reward_function.name={section.name}, got {type(cause).__name__}: {cause}; repair "
            "the file, or install what it imports"
        ) from error


def _read_prompts(config: DictConfig, name: str) -> list[Prompt]:
    """Of `data.NAME`, a file or several."""
    from verl_digen.data.prompts import read_prompts

    given = config.data[name]
    files: Any = OmegaConf.to_container(given) if OmegaConf.is_list(given) else given
    return read_prompts(files, key=f"data.{name}")

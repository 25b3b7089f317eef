# SPDX-License-Identifier: Apache-2.0
"""The config of a run from its command line, composed as by verl's main, and the plan's own words."""

import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple, get_args, get_type_hints

import verl  # noqa: F401 - loads the plugin, and with it the recipes
from hydra import compose, initialize_config_module
from hydra.errors import HydraException
from omegaconf import DictConfig, read_write
from omegaconf.errors import OmegaConfBaseException
from verl.plugin.platform import PlatformRegistry, get_platform, set_platform

from verl_digen.hardware.devices import DEVICE_GB, Pool
from verl_digen.models.flops import device_type
from verl_digen.preflight.start_config import check_recipes
from verl_digen.require import In, OneOf, check_fields, refusing, require, require_one_of, suggestion
from verl_digen.tools.simulate.splits import (
    NODE_SIZE,
    POOL_KEYS,
    Shape,
    arrange,
    parse_pool,
    pool_overrides,
    pooled_nodes,
    type_overrides,
)

GB = 10**9


class Mfu(NamedTuple):
    """Shares of a device's peak in bf16."""

    training: float
    generating: float


MFU = Mfu(0.4, 0.4)
"""Assumed: verl-omni's generation of Qwen-Image on 4 H800 reaches 0.41 (derived from its published 107.9 s)."""
MEASURED_MFU = {
    "SD3Transformer2DModel": (range(3 * 10**9), Mfu(0.21, 0.21)),
    "QwenImageTransformer2DModel": (range(15 * 10**9, 25 * 10**9), Mfu(0.15, 0.37)),
}
"""Network -> (its parameters, what a LoRA run of it reached on an H100 or H200, docs/gpu_results.md), in place of what
is assumed."""
PROMPT_TOKENS = 128
"""Assumed length of a prompt, for networks that read prompts without padding."""


@dataclass(frozen=True)
class Words:
    """Assumptions of the plan that are not in the config."""

    gpus: Annotated[int | None, In("[1, inf]"), "give the devices of the run"] = None
    """Devices of the whole run; separate pools share them equally. None: as configured."""
    pools: tuple[Pool, Pool] | None = None
    """Devices that train and devices that generate, by `gpus=20xH800+24xA100`."""
    gpu_mem: Annotated[float | None, In("(0, inf)"), "e.g. 80"] = None
    """GB of one device; None: the memory of `device`."""
    device: Annotated[str | None, OneOf(DEVICE_GB)] = None
    """Type of device; None: this machine's."""
    host_mem: Annotated[float | None, In("(0, inf)"), "e.g. 1000"] = None
    """GB of host memory of one node; None: no verdict."""
    mfu: Annotated[float | None, In("(0, 1]"), f"{MFU.training} is assumed without it"] = None
    """Share of the peak; None: the measured ones of the network, else `MFU`."""
    prompt_tokens: Annotated[int, In("[1, 2048]"), "no model reads a longer prompt"] = PROMPT_TOKENS
    reward_s: Annotated[float, In("[0, inf)"), "give seconds"] = 0.0
    """From a sample's pixels to its rewards: a VLM judge or a server takes seconds."""

    def __post_init__(self) -> None:
        check_fields(self, "", null=None)
        rule = "device must be left out where gpus names types"
        require(self.pools is None or self.device is None, rule, self.device, "drop one or the other")
        for pool in self.pools or ():
            require_one_of("gpus", pool.device, tuple(DEVICE_GB))

    @property
    def host_bytes(self) -> int | None:
        return None if self.host_mem is None else int(self.host_mem * GB)

    @property
    def names_accelerator(self) -> bool:
        """True if any of `gpus`, `gpu_mem`, `device` is given: the run is planned for accelerators."""
        return any(value is not None for value in (self.gpus, self.pools, self.gpu_mem, self.device))

    @property
    def types(self) -> tuple[str, str] | None:
        """Types of the devices that train and of those that generate; None if no word names them."""
        if self.pools is not None:
            return self.pools[0].device, self.pools[1].device
        return None if self.device is None else (self.device, self.device)


def split_words(arguments: Sequence[str]) -> tuple[Words, list[str]]:
    """Split command-line words into the plan's own and Hydra's overrides. ValueError: a word after the first is not
    KEY=VALUE, or a value is not a number.

    Example:
        split_words(["digen_qwen_image", "gpus=8"])  # Words(gpus=8), ["recipe=digen_qwen_image"]
    """
    kinds = {name: (get_args(kind) or (kind,))[0] for name, kind in get_type_hints(Words).items() if name != "pools"}
    own: dict[str, Any] = {}
    overrides = []
    if arguments and arguments[0][:1].isalpha() and "=" not in arguments[0]:  # as `digen train` takes it
        arguments = [f"recipe={arguments[0]}", *arguments[1:]]
    for argument in arguments:
        key, separator, value = argument.partition("=")
        rule = "words must be KEY=VALUE"
        require(bool(separator and key.strip()) or argument.startswith("~"), rule, argument, "see --help")
        meant = suggestion(key, kinds)
        is_known = "." in key or key in kinds or not meant
        require(is_known, "words must be keys of the config, or of the plan", argument, f"{meant}see --help")
        if key not in kinds:
            overrides.append(argument)
            continue
        if key == "gpus" and {"x", "+"} & set(value):
            own |= _typed_pools(value)
            continue
        with refusing(f"{key} must be a number", value, f"e.g. {key}=8"):
            own[key] = kinds[key](value)
    return Words(**own), overrides


def _typed_pools(text: str) -> dict[str, Any]:
    """Words of `8xH100`, `2x24GB`, or of devices that train + devices that generate."""
    parts = [part.partition("x") for part in text.split("+")]
    require(
        len(parts) <= 2 and all(number.isdecimal() and kind for number, _, kind in parts),
        "gpus must be a number, with a type or a memory, or devices that train + devices that generate",
        text,
        "e.g. gpus=8xH100, gpus=2x24GB, or gpus=20xH800+24xA100",
    )
    (number, _, kind), *others = parts
    if others:
        trainer, generator = (parse_pool("gpus", part, default_device=part) for part in text.split("+"))
        return {"pools": (trainer, generator)}
    memory = re.fullmatch(r"(\d+)GB", kind)
    return {"gpus": int(number), **({"device": kind} if memory is None else {"gpu_mem": float(memory[1])})}


def compose_run(overrides: Sequence[str], words: Words) -> DictConfig:
    """Compose the config as verl's main does, with Hydra's record of the command line, which checks read. ValueError,
    with the first line of Hydra's message, if it cannot be composed."""
    overrides = list(overrides)
    with platform_of(words), initialize_config_module("verl.trainer.config", version_base=None):
        try:
            config = compose("ppo_trainer", overrides=overrides, return_hydra_config=True)
            check_recipes(config)
            if words.gpus is None and words.pools is None:
                return config
            given = [key for key in POOL_KEYS if any(word.partition("=")[0].lstrip("+") == key for word in overrides)]
            require(not given, "gpus must be left out where the pools are given", given, "drop one or the other")
            pools = _pools(words, not config.actor_rollout_ref.hybrid_engine)
            with read_write(config), read_write(config.hydra):  # composing again takes as long as all the rest
                config.merge_with_dotlist(pools)
                config.hydra.overrides.task.extend(pools)
            return config
        except (HydraException, OmegaConfBaseException) as error:
            lines = str(error).strip().splitlines()
            recipes = next((line.partition(", recipes: ")[2] for line in lines if ", recipes: " in line), "")
            more = f"; recipes: {recipes}" if recipes else ""
            raise ValueError(f"the config cannot be composed: {lines[0]}{more}") from error


def _pools(words: Words, split: bool) -> list[str]:
    """Overrides that give each pool its devices; `split`: trainer and generator have separate ones."""
    if words.pools is not None:
        given = "+".join(map(str, words.pools))
        require(
            split, "gpus must be a number where trainer and replicas share devices", given, "add recipe disaggregated"
        )
        shapes = arrange(pooled_nodes(words.pools, ()), *words.pools)
        assert shapes is not None  # pools of nodes with one device each can always be placed
        return [*pool_overrides(*shapes), *type_overrides(*words.pools)]
    gpus = words.gpus
    assert gpus is not None
    require(not split or gpus % 2 == 0, "gpus must be even with separate pools", gpus, "give the pools' own keys")
    num_devices = gpus // 2 if split else gpus
    num_nodes = -(-num_devices // NODE_SIZE)
    rule = f"gpus must fill nodes of {NODE_SIZE} evenly"
    require(num_devices % num_nodes == 0, rule, gpus, "give trainer.nnodes and trainer.n_gpus_per_node")
    return pool_overrides(*[Shape(num_nodes, num_devices // num_nodes)] * (1 + split))


@contextmanager
def platform_of(words: Words) -> Iterator[None]:
    """Set the platform of the plan: this machine's, or NVIDIA's if `words` name accelerators and it has none."""
    here = get_platform()
    if here.device_name != "cpu" or not words.names_accelerator:
        yield
        return
    planned = PlatformRegistry.get("nvidia")
    assert planned is not None
    logger = logging.getLogger("verl.plugin.platform.platform_manager")
    level = logger.level
    logger.setLevel(logging.ERROR)  # it warns about every change of platform
    set_platform(planned())
    try:
        yield
    finally:
        set_platform(here)
        logger.setLevel(level)


def mfu_of(network: str, num_params: int) -> Mfu:
    """Shares of its device's peak that a network reaches: measured, else `MFU`."""
    sizes, shares = MEASURED_MFU.get(network, ((), MFU))
    return shares if num_params in sizes else MFU


def device_of(words: Words) -> tuple[str | None, int | None]:
    """(type of device, bytes of its memory) of the plan; None if unknown. Of two types: the trainer's, and the smaller
    memory. Without an accelerator, here or in `words`, the memory is this machine's."""
    here, kind, found = get_platform(), None, None
    if words.types is not None:
        kind, found = words.types[0], min(DEVICE_GB[kind] for kind in words.types) * GB
    elif here.is_available() if here.device_name != "cpu" else not words.names_accelerator:
        _, found = here.device_module.mem_get_info()
        kind = None if here.device_name == "cpu" else device_type(here.device_module.get_device_name(0))
    return kind, found if words.gpu_mem is None else int(words.gpu_mem * GB)

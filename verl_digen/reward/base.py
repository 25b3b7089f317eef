# SPDX-License-Identifier: Apache-2.0
"""`Reward`: a scorer that is made once per process and scores batches, or whole groups.

    class Brightness(Reward):
        def score(self, batch):
            return [float(sample.pixels.mean()) / 255 for sample in batch]

The functions below the class give a sample's pictures as scorers want them, and find packages, which are looked for
before a run starts and imported when the reward is made, and weights.
"""

import importlib
import importlib.util
import io
from abc import ABC, abstractmethod
from base64 import b64encode
from collections.abc import Awaitable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import nn
from verl.plugin.platform import get_platform

from verl_digen.platforms.module_memory import DeviceMemory
from verl_digen.require import refusing, require, settings_of
from verl_digen.types import PromptRow, RewardInput

Result = float | Mapping[str, Any]
"""A number, or a mapping with `score` and details."""


class RewardUnavailable(RuntimeError):
    """Error of a reward that can score no sample at present, such as a server that does not answer. Samples that fail
    with it are tried again together, not one by one."""


@dataclass(frozen=True)
class NoSettings:
    """Settings of a reward that has none."""


class Reward(ABC):
    """Base class of rewards. `config` is an instance of `config_class`, made from the entry's arguments; `device` is
    the process's device, the CPU where `num_gpus` is 0.

    With `timeshare` it sleeps while replicas generate and the trainer trains; no `score` runs in between.
    """

    scope: ClassVar[Literal["sample", "group"]] = "sample"
    config_class: ClassVar[type] = NoSettings
    """Dataclass of settings: the arguments of the entry in `digen.reward.functions`."""

    has_pool: ClassVar[bool] = True
    """False: it shares the processes of `reward.num_workers` with its like, unless its entry asks for its own."""
    packages: ClassVar[tuple[str, ...]] = ()
    """Packages that it imports when it is made, beyond every installation's."""

    @classmethod
    def check_row(cls, arguments: Mapping[str, Any], row: PromptRow) -> None:
        """Raise ValueError if samples of a prompt could not be scored; called for every prompt before a run starts."""
        return

    @classmethod
    def reads_latents(cls, arguments: Mapping[str, Any]) -> bool:
        """True if `score` needs `RewardInput.latents`. Replicas send them where a reward of the run does."""
        return False

    @classmethod
    def settings(cls, arguments: Mapping[str, Any], key: str) -> Any:
        """The entry's arguments as its settings, an instance of `config_class`. ValueError for an unknown argument, a
        value of the wrong type, or a broken rule; the message begins with `key`."""
        return settings_of(cls.__name__, cls.config_class, arguments, key)

    def __init__(self, config: Any, device: torch.device):
        self.config, self.device = config, device
        self._memory: DeviceMemory | None = None
        """Made by the first `sleep`; None on a CPU, where the copies would take as much memory as a release frees."""

    def take_counts(self) -> Mapping[str, int]:
        """Counts of events since the last time, such as retries; `reward_calls/NAME_COUNT` shows them."""
        return {}

    def modules(self) -> list[nn.Module]:
        """Modules on the device, whose weights and buffers leave it while the reward sleeps: those among its attributes
        and its helpers', in lists and mappings too."""
        return list({id(module): module for module in _modules(vars(self), MAX_DEPTH)}.values())

    def sleep(self) -> None:
        """Free the device memory, with `timeshare`. Override both methods for what is not in `modules`."""
        if self.device.type == "cpu":
            return
        if self._memory is None:
            self._memory = DeviceMemory(self.modules(), self.device)
        platform = get_platform()
        platform.synchronize()
        self._memory.release()
        platform.synchronize()
        platform.empty_cache()

    def wake(self) -> None:
        """Bring back what `sleep` has freed; called only after it."""
        if self._memory is not None:
            self._memory.restore()
            get_platform().synchronize()

    @abstractmethod
    def score(
        self, batch: Sequence[RewardInput]
    ) -> Sequence[Result | Exception] | Awaitable[Sequence[Result | Exception]]:
        """Score 1 to `max_batch_size` samples of any prompts; with `scope = "group"` all samples of one prompt at once.

        It returns one entry per sample, in order: a number, or a mapping with `score` and numeric details. An entry of
        a sample that alone failed may be the exception. A sync `score` runs in a thread, an async one in the process's
        event loop; one call at a time. It may raise: the samples are tried again one by one, a group as a whole, and
        then fail. It never returns a 0 for a failure.
        """


MAX_DEPTH = 3
"""Attributes of attributes that are looked at: a reward, its encoder, what that one is made of."""


def _modules(value: Any, depth: int) -> Iterator[nn.Module]:
    if isinstance(value, nn.Module):
        yield value
    elif isinstance(value, Mapping):
        for own in value.values():
            yield from _modules(own, depth)
    elif isinstance(value, list | tuple):
        for own in value:
            yield from _modules(own, depth)
    elif depth > 0 and not isinstance(value, type) and hasattr(value, "__dict__"):
        yield from _modules(vars(value), depth - 1)


def frames_of(pixels: NDArray[np.uint8], at_most: int | None = None) -> NDArray[np.uint8]:
    """[F, H, W, 3] of a picture [H, W, 3] (F = 1) or a video [F, H, W, 3]. `at_most`: take this many frames, evenly
    spaced with the first and the last; one frame is the middle one."""
    frames = pixels if pixels.ndim == 4 else pixels[None]
    if at_most is None or len(frames) <= at_most:
        return frames
    if at_most == 1:
        return frames[len(frames) // 2][None]
    return frames[np.linspace(0, len(frames) - 1, at_most).round().astype(int)]


def images_of(sample: RewardInput, at_most: int | None = None) -> list[Image.Image]:
    """The sample's frames as RGB images; a picture is one frame. `at_most` as in `frames_of`."""
    return [Image.fromarray(frame) for frame in frames_of(sample.pixels, at_most)]


def encoded(image: Image.Image, format: Literal["PNG", "JPEG"] = "PNG", *, quality: int = 95) -> bytes:
    """A picture as a file in memory; `quality` is JPEG's."""
    buffer = io.BytesIO()
    options = {"quality": quality} if format == "JPEG" else {}
    image.save(buffer, format=format, **options)
    return buffer.getvalue()


def base64_of(image: Image.Image) -> str:
    """A picture as a PNG in text, for JSON."""
    return b64encode(encoded(image)).decode("ascii")


def imported(module: str, needed_by: str) -> ModuleType:
    """Import an optional package. `needed_by`: name of the reward, for the message. ValueError if it is not installed,
    or cannot be imported."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        is_missing = isinstance(error, ModuleNotFoundError) and error.name == module.partition(".")[0]
        state = "is not installed" if is_missing else f"cannot be imported ({error})"
        raise ValueError(_told(module, needed_by, state)) from error


def require_installed(modules: Iterable[str], needed_by: str) -> None:
    """Raise ValueError unless the packages are installed; imports none of them."""
    rule = f"packages of the reward {needed_by} must be a tuple of names"
    require(not isinstance(modules, str), rule, modules, f"write ({modules!r},), with the comma")
    for module in modules:
        if importlib.util.find_spec(module.partition(".")[0]) is None:
            raise ValueError(_told(module, needed_by, "is not installed"))


def _told(module: str, needed_by: str, state: str) -> str:
    package = module.partition(".")[0]
    remedy = "pip install 'verl-digen[rewards]', or what your own reward imports"
    return f"reward {needed_by} needs the package {package}, which {state}; {remedy}"


def checkpoint_folder(name: str, key: str, files: Sequence[str] | None = None) -> Path:
    """The folder of a checkpoint, which is fetched once per machine. `name` is a folder, or "owner/repository" of the
    hub, "owner/repository@revision" for one revision; `files` are patterns of the files that are needed, None fetches
    all. ValueError, naming `key`, if there is no such folder, and the hub does not answer or has no such repository."""
    if Path(name).expanduser().is_dir():
        return Path(name).expanduser()
    from huggingface_hub import snapshot_download

    repository, _, revision = name.partition("@")
    patterns = None if files is None else list(files)
    remedy = "check the name and the network, or fetch it elsewhere and give its path"
    with refusing(f"{key} must name a folder or a repository of the hub that can be fetched", name, remedy):
        return Path(snapshot_download(repository, revision=revision or None, allow_patterns=patterns))


def checkpoint_file(name: str, filename: str, key: str) -> Path:
    """One file of weights: `name` itself if it is a file, else `filename` in the folder or repository `name`.
    ValueError if there is no such file, or the hub does not answer."""
    path = Path(name).expanduser()
    if path.is_file():
        return path
    found = checkpoint_folder(name, key, [filename]) / filename
    if not found.is_file():
        raise ValueError(f"{key} must hold {filename}, got {name!r} without it; fetch it, or name it")
    return found

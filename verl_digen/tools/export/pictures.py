# SPDX-License-Identifier: Apache-2.0
"""Pictures that a policy of a checkpoint draws in this process, with the settings of the run's validation: prompt
number i takes the noise of validation prompt number i.

Invariant (tests/export/test_sample.py): pictures equal a replica's for a validation's requests.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from verl_digen.config import DigenConfig
from verl_digen.data.prompts import UNREADABLE, Columns, read_prompts
from verl_digen.data.splits import VAL
from verl_digen.inputs.audio import Audio
from verl_digen.observe.images import Shown, save_grid, save_pixels
from verl_digen.platforms.module_memory import DeviceMemory
from verl_digen.require import require
from verl_digen.rollout.encoders import Encoders
from verl_digen.rollout.network import LoadedNetwork, load_network, open_checkpoint
from verl_digen.rollout.samples import SampleMaker
from verl_digen.sampling.requests import sample_request
from verl_digen.store.keys import validation_uid
from verl_digen.tools.export.policy import PolicyWeights
from verl_digen.tools.export.saved_run import SavedRun
from verl_digen.types import PromptRow
from verl_digen.weights.checksum import Checksum


def changed(
    digen: DigenConfig, *, seed: int | None = None, num_steps: int | None = None, size_px: tuple[int, int] | None = None
) -> DigenConfig:
    """The run's settings with others in their place (`size_px`: height, width); None keeps the run's. Raises ValueError
    for a setting that validation could not have either."""
    sampling = digen.sampling
    if num_steps is not None:
        sampling = replace(sampling, val_num_steps=num_steps)
    if size_px is not None:
        sampling = replace(sampling, height_px=size_px[0], width_px=size_px[1])
    return replace(digen, sampling=sampling, seed=digen.seed if seed is None else seed)


def rows_of(run: SavedRun, texts: Sequence[str], file: str | None) -> list[PromptRow]:
    """Prompts of the command line, else of a prompt file, numbered as validation prompts. ValueError for neither or
    both, a text that is not UTF-8, or a malformed file."""
    require(bool(texts) != bool(file), "one of --prompt and --prompts must be given", [*texts, file], "give one")
    for text in texts:
        require(
            not UNREADABLE.search(text), "--prompt must be text in UTF-8", text, "write it so to a file for --prompts"
        )
    if file:
        columns = Columns.of(run.config.data) if "data" in run.config else Columns()
        rows = read_prompts(file, VAL, columns)
    else:
        rows = [PromptRow(text, "", None) for text in texts]
    return [replace(row, index=index, uid=validation_uid(index)) for index, row in enumerate(rows)]


class Painter:
    """Draws with one policy of a checkpoint, by the run's settings or changed ones. Raises as `PolicyWeights`."""

    def __init__(self, run: SavedRun, policy: str, digen: DigenConfig):
        self._digen, self._step = digen, run.step
        weights = PolicyWeights(run, policy)
        checkpoint = open_checkpoint(run.config.actor_rollout_ref.rollout, run.model_config, num_threads=0)
        settings = digen.rollout
        if settings.encoders == "before":  # of the run's own prompts
            settings = replace(settings, encoders="auto")
        encoders = Encoders(*checkpoint, settings)
        network = load_network(checkpoint, run.model_config)
        _load(network, weights, carries_adapter=run.model_config.adapter_config() is not None)
        self._samples = SampleMaker.of_network(network, encoders.prompts.lookup, digen)
        encoders.alternate_with(DeviceMemory(self._samples.modules, network.device))

    def draw(self, row: PromptRow, num_samples: int) -> Iterator[tuple[Tensor, Audio | None]]:
        """Pixels uint8 [H, W, 3], or [F, H, W, 3], and the sound of each sample of one prompt. ValueError: a prompt
        that the encoder refuses, an image of it that cannot be read, or a sample that is not finite."""
        requests = [
            sample_request(self._digen, row, index, step=self._step, validate=True) for index in range(num_samples)
        ]
        size = self._digen.rollout.batch_size
        for start in range(0, num_samples, size):
            for answer in self._samples.make(requests[start : start + size], self._step)():
                if isinstance(answer, ValueError):
                    raise answer
                yield answer.pixels, answer.audio


@torch.no_grad()
def _load(network: LoadedNetwork, weights: PolicyWeights, *, carries_adapter: bool) -> None:
    """Load a policy into a replica's network, as a weight update would."""
    tensors = weights.adapter().items() if carries_adapter else weights.full(network.dtype)
    take, sent = network.weights.begin_live(), Checksum()
    for named in tensors:
        sent.add(named[1])
        take([named])
    network.weights.seal(sent.value)
    network.weights.switch()


def save_pictures(painter: Painter, rows: Sequence[PromptRow], num_samples: int, folder: Path, title: str) -> None:
    """Draw and save all prompts into `folder`: PROMPT-SAMPLE.png, of a video its filmstrip and a GIF, sound as WAV, and
    grid.png."""
    shown = []
    for row in rows:
        for index, (pixels, audio) in enumerate(painter.draw(row, num_samples)):
            path = folder / f"{row.index:05d}-{index:02d}.png"
            save_pixels(pixels, path, row.images, audio)
            shown.append(Shown(path, row.text, None))
    save_grid([(title, shown)], folder / "grid.png")

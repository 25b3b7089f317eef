# SPDX-License-Identifier: Apache-2.0
"""Generated samples under the names of verl's RFC for diffusion models: `to_dataproto` for many, `ImageOutput` for one.

| column | holds |
| --- | --- |
| `prompts` | N texts |
| `responses` | uint8 [N, H, W, 3], or [N, F, H, W, 3] for videos; missing where the pixels are gone |
| `prompt_embeddings` | [N, L, D], zeros after a shorter prompt; `prompt_embeddings_mask` is [N, L] bool |
| `timesteps` | [N, K] fp32, sigma x 1000 of each trained step |
| `latent_samples` | [N, K+1, ...]: step k goes from latent k to latent k+1 |
| `log_probs` | [N, K] fp32 |
| `latent_sample_means` | [N, K, ...] fp32; missing unless `means` is given |
| `rm_scores` | [N, 1] fp32 rewards; missing where nothing has scored them |

With windows whose trained steps are not consecutive, `latent_samples` is [N, S, ...] with zeros at its end, and step k
goes from latent `positions[k]` to the next one. Further columns: `positions`, `sigmas`, `next_sigmas` [N, K] and
`sigma_max` [N, 1], the schedule that `algorithms.sde` reads; other parts of the model's condition as `prompt_NAME`;
the negative prompt's as `negative_prompt_...`; and without tensors `uid`, `sample_index`, `seed`, `version`,
`data_source`, `ground_truth`, the `PromptRow` as `row`, its `Sampling` as `sampling`, and `audio` of videos with sound.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from verl import DataProto

from verl_digen.data.rows import ROW, object_column
from verl_digen.inputs.audio import Audio
from verl_digen.models.base import TIMESTEPS_PER_SIGMA
from verl_digen.store.client import fetch_columns
from verl_digen.store.conditions import ConditionPair, fetch_conditions
from verl_digen.store.keys import TRAIN
from verl_digen.store.samples import from_batch
from verl_digen.types import Condition, Generation, PathRecord, PromptRow, TrainingRows, Trajectory, Transitions

if TYPE_CHECKING:
    from verl_digen.store.samples import KVBatchMeta

FACTS = ("uid", "sample_index", "seed", "version", "sampling")
"""Fields of a `Trajectory` that are columns without tensors."""

Means = Callable[[TrainingRows], Tensor]
"""Means [K, ...] of a sample's K transitions, e.g. `lambda rows: score_rows(model, network, rows)[0].mean`."""


class ImageOutput(Generation):
    """A replica's answer with the RFC's names beside ours."""

    @classmethod
    def of(cls, generation: Generation) -> "ImageOutput":
        """Give a replica's answer the RFC's names."""
        return cls(**vars(generation))

    @property
    def image(self) -> Tensor:
        """uint8 [H, W, 3], or [F, H, W, 3] for a video."""
        return self.pixels

    @property
    def prompt_embeddings(self) -> Tensor | None:
        """[L, D]; None if the request did not ask for them."""
        return None if self.condition is None else self.condition["embeds"]

    @property
    def timesteps(self) -> Tensor:
        """[K] fp32, sigma x 1000 of each trained step."""
        return self.trajectory.record.sigmas * TIMESTEPS_PER_SIGMA

    @property
    def latent_samples(self) -> Tensor:
        """[K+1, ...], or [S, ...] where trained steps are not consecutive; ValueError if no path was recorded."""
        return _path(self.trajectory).latents

    @property
    def log_probs(self) -> Tensor:
        """[K] fp32; ValueError if no path was recorded."""
        return _path(self.trajectory).log_probs


@dataclass(frozen=True)
class FinishedSample:
    """One generated sample, with what is known of it."""

    trajectory: Trajectory
    conditions: ConditionPair
    prompt: str
    data_source: str
    row: PromptRow | None = None
    """None for a sample from TransferQueue, where its tag has text and source alone."""
    pixels: Tensor | None = None
    """uint8, as in `Generation`."""
    audio: Audio | None = None
    reward: float | None = None

    @classmethod
    def of(cls, generation: Generation, row: PromptRow, reward: float | None) -> "FinishedSample":
        """A generation that carries its conditions."""
        if generation.condition is None:
            raise RuntimeError(f"a sample of group {row.uid} has no conditions; request it with wants_condition=True")
        return cls(
            generation.trajectory,
            (generation.condition, generation.negative_condition),
            row.text,
            row.data_source,
            row,
            generation.pixels,
            generation.audio,
            reward,
        )


def finished_samples(batch: "KVBatchMeta") -> list[FinishedSample]:
    """The samples of a finished batch of training, from TransferQueue, in order; for runs that record paths.
    RuntimeError if one is not there, ValueError for episodes, which have a prompt per turn."""
    tags = from_batch(batch)
    if any(tag.episode is not None for tag in tags.values()):
        raise ValueError("samples must have one prompt each, got episodes; leave digen.environment.name out")
    columns = fetch_columns(TRAIN, list(tags), PathRecord.COLUMNS)
    conditions = fetch_conditions([tag.facts.condition_key for tag in tags.values()])
    samples = []
    for number, tag in enumerate(tags.values()):
        record = PathRecord(**{column: tensors[number] for column, tensors in columns.items()})
        trajectory, pair = Trajectory(tag.facts, record), conditions[tag.facts.condition_key]
        samples.append(FinishedSample(trajectory, pair, tag.prompt, tag.data_source, reward=tag.reward))
    return samples


def to_dataproto(samples: Sequence[FinishedSample], means: Means | None = None) -> DataProto:
    """The samples as one DataProto, in order; its columns are listed in the module. `means` is called once per sample
    with its K transitions, on the CPU, which share their conditions and settings. ValueError for samples without a
    path, or whose columns differ in shape, such as pictures of two sizes."""
    paths = [_path(sample.trajectory) for sample in samples]
    records = [path.columns() for path in paths]
    tensors: dict[str, Tensor] = {
        "timesteps": _stacked("timesteps", [path.sigmas * TIMESTEPS_PER_SIGMA for path in paths]),
        "latent_samples": _padded("latent_samples", [path.latents for path in paths]),
    }
    for name in ("log_probs", "positions", "sigmas", "next_sigmas", "sigma_max"):
        tensors[name] = _stacked(name, [record[name] for record in records])
    tensors |= _condition_columns("", [sample.conditions[0] for sample in samples])
    if all(sample.conditions[1] is not None for sample in samples):
        tensors |= _condition_columns("negative_", [sample.conditions[1] or {} for sample in samples])
    pixels = [sample.pixels for sample in samples if sample.pixels is not None]
    if len(pixels) == len(samples):
        tensors["responses"] = _stacked("responses", pixels)
    rewards = [sample.reward for sample in samples if sample.reward is not None]
    if len(rewards) == len(samples):
        tensors["rm_scores"] = torch.tensor(rewards).unsqueeze(1)
    if means is not None:
        tensors["latent_sample_means"] = _stacked(
            "latent_sample_means", [means(training_rows(to_dataproto([one]))) for one in samples]
        )
    return DataProto(TensorDict(tensors, batch_size=len(samples)), _facts(samples))  # pyright: ignore[reportArgumentType]


def training_rows(batch: DataProto) -> TrainingRows:
    """The N * K transitions of a batch that `to_dataproto` made, sample after sample, on the CPU. Columns `advantages`
    [N] or [N, 1] and `old_log_probs` [N, K] are theirs; without advantages they are 0. Samples that are not `selected`
    [N, 1] have mask 0. ValueError if the samples have several settings."""
    tensors: Any = batch.batch
    starts, samplings = tensors["positions"], {*batch.non_tensor_batch["sampling"]}
    if len(samplings) != 1:
        raise ValueError(f"samples that train together must have one sampling, got {samplings}; train them apart")
    num_samples, num_steps = starts.shape
    samples = torch.arange(num_samples).unsqueeze(1)
    advantages = tensors["advantages"].flatten() if "advantages" in tensors else torch.zeros(num_samples)
    mask = tensors["selected"].flatten().float() if "selected" in tensors else torch.ones(num_samples)
    rewards = tensors["rm_scores"].flatten() if "rm_scores" in tensors else torch.zeros(num_samples)
    positive, negative = (_conditions(tensors, prefix) for prefix in ("", "negative_"))
    return TrainingRows(
        latents=tensors["latent_samples"][samples, starts].flatten(0, 1),
        sigmas=tensors["sigmas"].flatten(),
        point=Transitions(
            next_latents=tensors["latent_samples"][samples, starts + 1].flatten(0, 1),
            next_sigmas=tensors["next_sigmas"].flatten(),
            sigma_max=tensors["sigma_max"].expand(-1, num_steps).flatten(),
            log_probs=tensors["log_probs"].flatten(),
            old_log_probs=tensors["old_log_probs"].flatten() if "old_log_probs" in tensors else None,
        ),
        conditions=[condition for condition in positive for _ in range(num_steps)],
        negative_conditions=[condition for condition in negative for _ in range(num_steps)] or None,
        advantages=advantages.repeat_interleave(num_steps),
        mask=mask.repeat_interleave(num_steps),
        sampling=samplings.pop(),
        rewards=rewards.repeat_interleave(num_steps),
    )


def _facts(samples: Sequence[FinishedSample]) -> dict[str, np.ndarray]:
    """The columns without tensors."""
    facts_of = [vars(sample.trajectory.facts) for sample in samples]
    facts: dict[str, Sequence[Any]] = {
        "prompts": [sample.prompt for sample in samples],
        "data_source": [sample.data_source for sample in samples],
        **{name: [one[name] for one in facts_of] for name in FACTS},
    }
    rows = [sample.row for sample in samples if sample.row is not None]
    if len(rows) == len(samples):
        facts |= {"ground_truth": [row.ground_truth for row in rows], ROW: rows}
    if any(sample.audio is not None for sample in samples):
        facts["audio"] = [sample.audio for sample in samples]
    return {name: object_column(values) for name, values in facts.items()}


def _condition_columns(prefix: str, conditions: Sequence[Condition]) -> dict[str, Tensor]:
    """Columns of one branch; a sequence [L, D] is padded, and has a mask."""
    columns: dict[str, Tensor] = {}
    for item in conditions[0]:
        name = f"{prefix}prompt_{'embeddings' if item == 'embeds' else item}"
        tensors = [condition[item] for condition in conditions]
        if tensors[0].dim() == 2:
            columns[name] = _padded(name, tensors)
            lengths = torch.tensor([len(tensor) for tensor in tensors])
            columns[f"{name}_mask"] = torch.arange(int(lengths.max())) < lengths.unsqueeze(1)
        else:
            columns[name] = _stacked(name, tensors)
    return columns


def _conditions(tensors: Any, prefix: str) -> list[Condition]:
    """Inverse of `_condition_columns`; [] without such columns."""
    start = f"{prefix}prompt_"
    names = [name for name in map(str, tensors.keys()) if name.startswith(start) and not name.endswith("_mask")]
    conditions: list[Condition] = [{} for _ in range(len(tensors) if names else 0)]
    for name in names:
        item = name.removeprefix(start).replace("embeddings", "embeds")
        is_padded = f"{name}_mask" in tensors
        for number, condition in enumerate(conditions):
            value = tensors[name][number]
            condition[item] = value[tensors[f"{name}_mask"][number]] if is_padded else value
    return conditions


def _padded(name: str, tensors: Sequence[Tensor]) -> Tensor:
    """[N, L, ...] of N tensors [l, ...], with zeros after a shorter one."""
    _require_alike(name, [tensor.shape[1:] for tensor in tensors])
    return pad_sequence(list(tensors), batch_first=True)


def _stacked(name: str, tensors: Sequence[Tensor]) -> Tensor:
    _require_alike(name, [tensor.shape for tensor in tensors])
    return torch.stack(list(tensors))


def _require_alike(name: str, shapes: Sequence[torch.Size]) -> None:
    if len(set(shapes)) != 1:
        found = ", ".join(sorted(str(list(shape)) for shape in set(shapes))) or "no sample"
        raise ValueError(f"samples of one DataProto must have one shape of {name}, got {found}; convert them apart")


def _path(trajectory: Trajectory) -> PathRecord:
    if not isinstance(trajectory.record, PathRecord):
        raise ValueError(
            "latent_samples and log_probs need a recorded path, got only final latents; choose a "
            "digen.loss.name that trains transitions, such as flow_grpo"
        )
    return trajectory.record

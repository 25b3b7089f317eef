# SPDX-License-Identifier: Apache-2.0
"""Every type that is passed along the data path, as a frozen dataclass.

Notation, used in names and docstrings everywhere: `P` prompts of a logical batch, `G` samples of a group,
`B` = P*G samples, `T` denoising steps, `K` trained steps of one sample, `S` recorded latents of one sample,
`N` rows ((sample, point) pairs), `L` text tokens, `D` text width. Latents have the shape the
transformer reads ("packed"), written `...`; a sigma of 1 is noise and 0 is the picture.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from verl_digen.algorithms.forward import NoiseLevels
from verl_digen.algorithms.tree import Tree
from verl_digen.algorithms.window import Window
from verl_digen.hardware.transfers import to_device
from verl_digen.inputs.audio import Audio
from verl_digen.inputs.images import PromptInputs, SourceImage, content_key, read_images
from verl_digen.types.settings import EpisodeFacts
from verl_digen.types.settings import Geometry as Geometry
from verl_digen.types.settings import Sampling as Sampling

Condition = dict[str, Tensor]
"""Transformer inputs of ONE prompt, by name, without a batch dimension, e.g. {"embeds": [L, D]}."""


def move_condition(condition: Condition, device: torch.device | str) -> Condition:
    """Copy of the condition on `device`."""
    return {name: to_device(tensor, torch.device(device)) for name, tensor in condition.items()}


CHOSEN = 0
"""Place of the chosen picture in `PromptRow.pair`, and index of its sample."""


@dataclass(frozen=True)
class PromptRow:
    """One prompt, from its file to its requests, in plain values, as unfinished prompts are part of a checkpoint, as
    JSON. Read by `verl_digen.data`; the trainer that draws it sets `uid`."""

    text: str
    data_source: str
    ground_truth: Any
    """The reference that reward functions compare with."""
    negative: str | None = None
    """This prompt's own negative prompt, or None for `digen.sampling.negative_prompt`."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """More for reward functions, their `extra_info`."""
    uid: str = ""
    """Its group; empty until the prompt is drawn."""
    index: int = 0
    """Position in the data set."""
    images: tuple[str, ...] = ()
    """References to the images that the prompt is about, see `verl_digen.inputs.images.source_image`."""
    pair: tuple[str, ...] = ()
    """References to two pictures of the prompt, the chosen and the rejected one; () without a pair."""
    place: str = field(default="", compare=False)
    """Place where it was read, for messages: "line 3 of 'train.jsonl'"."""


@dataclass(frozen=True)
class Burst:
    """Requests that one caller sends to one replica at the same time."""

    name: str
    """Unique among the bursts of a run."""
    size: int


@dataclass(frozen=True)
class SampleRequest:
    """One sample to generate. Written by the agent loop, read by a replica."""

    uid: str
    sample_index: int
    inputs: PromptInputs
    negative_inputs: PromptInputs
    window: Window
    """Stochastic steps, and steps recorded for training; the same for a whole group."""
    sampling: Sampling
    wants_condition: bool = False
    """True for one sample of a group: its answer carries the prompt's conditions (they travel once per prompt)."""
    noise_levels: NoiseLevels | None = None
    """Levels at which its picture is noised again to train, the same in a group; None: its path is recorded."""
    wants_latents: bool = False
    """True where a reward reads latents: the answer of every sample carries them."""
    tree: Tree | None = None
    """Tree of its group, of which it is leaf `sample_index`; None: samples share no stochastic step."""
    turn: int = 0
    """Number of the turn in its episode; its noise is another one in each."""
    picture: SourceImage | None = None
    """Picture of the data set that is the sample: the replica encodes it and generates nothing. None: generate it."""
    burst: Burst | None = None
    """Requests that it comes together with; no sample depends on it. None: others may follow at any time."""

    def noise_index(self, step: int) -> int:
        """Number of the sample in its group whose noise a stochastic step takes: its own, or its node's."""
        return self.sample_index if self.tree is None else self.tree.node(self.sample_index, step)

    @property
    def batch_group(self) -> str | None:
        """Group that has its batches for itself; None where groups share them."""
        return None if self.burst is None else self.uid

    @property
    def nodes(self) -> tuple[int, ...]:
        """K entries: node that each trained step leads to; () without a tree."""
        return () if self.tree is None else tuple(map(self.noise_index, self.window.train_steps))

    @property
    def branches(self) -> tuple[PromptInputs, ...]:
        """Inputs to encode: the prompt's, and where guidance reads it the negative prompt's."""
        return (self.inputs, self.negative_inputs) if self.sampling.is_guided else (self.inputs,)

    @property
    def condition_key(self) -> str:
        """Key of its prompt's conditions: a hash of what is encoded, equal for equal texts and images."""
        return content_key(self.branches)


@dataclass(frozen=True)
class PathRecord:
    """The recorded part of a denoising path: K transitions x -> x' with their log-probs.

    Example: with trained steps (2, 3) of T = 10, `latents` holds x at steps 2, 3, 4 (S = 3), `positions` = [0, 1]:
    row k goes from `latents[positions[k]]` to `latents[positions[k] + 1]`.
    """

    latents: Tensor
    """[S, ...] in the dtype they were sampled in; S = K+1 when the trained steps are consecutive."""
    positions: Tensor
    """[K] int64: where in `latents` each trained step starts."""
    sigmas: Tensor
    """[K] fp32."""
    next_sigmas: Tensor
    """[K] fp32."""
    sigma_max: Tensor
    """[] fp32: the schedule's second sigma, which the SDE uses in place of 1; [turns] of an episode."""
    log_probs: Tensor
    """[K] fp32: log-density of each trained step under the behaviour policy."""

    COLUMNS = ("latents", "positions", "sigmas", "next_sigmas", "sigma_max", "log_probs")

    def columns(self) -> dict[str, Tensor]:
        """Columns of its row in TransferQueue, `COLUMNS`; `sigma_max` has shape [1], or [turns]."""
        return {**vars(self), "sigma_max": self.sigma_max.reshape(-1)}


@dataclass(frozen=True)
class CleanRecord:
    """The end of a denoising path, and the K noise levels at which it is noised again when it trains."""

    clean: Tensor
    """[...] the final latents, in the dtype they were sampled in; of an episode its turns', one after the other
    along the first dimension."""
    sigmas: Tensor
    """[K] fp32."""

    COLUMNS = ("clean", "sigmas")

    def columns(self) -> dict[str, Tensor]:
        """Columns of its row in TransferQueue, `COLUMNS`."""
        return dict(vars(self))


@dataclass(frozen=True)
class SampleFacts:
    """Facts about the generation of a sample, in names and numbers. Written once, by the replica; a part of its
    trajectory, of its tag and of its fragment. Those of an episode are its first turn's, but for the numbers of steps.
    """

    uid: str
    sample_index: int
    seed: int
    """Seed of its initial noise; a picture of the data set has one too, which nothing reads."""
    version: int
    """Weight version that generated the first step, or that the replica had when it encoded a picture."""
    last_version: int
    """Weight version that generated the last step; differs from `version` only by a bug."""
    num_steps: int
    """K, its points."""
    sampling: Sampling
    condition_key: str
    """Key of its prompt's conditions in TransferQueue."""
    experts: tuple[int, ...] = ()
    """K entries: number of the network that runs each point; () if the model has one."""
    num_shared_steps: int = 0
    """Denoising steps that another sample of its group ran for it, in its batch or before, see `sampling.prefix`."""
    num_skipped_steps: int = 0
    """Denoising steps that it took or passed over without an evaluation of the network, see `Sampling.outside`. Steps
    that another sample ran do not count."""
    nodes: tuple[int, ...] = ()
    """`SampleRequest.nodes`."""


@dataclass(frozen=True)
class Trajectory:
    """Record of one generation of a sample, for training. Written by a replica, read by the engine."""

    facts: SampleFacts
    record: PathRecord | CleanRecord


@dataclass(frozen=True)
class Generation:
    """A replica's answer to one request."""

    trajectory: Trajectory
    pixels: Tensor
    """uint8 [H, W, 3] for an image, [F, H, W, 3] for a video."""
    started_s: float
    """Unix time."""
    ended_s: float
    """Unix time."""
    condition: Condition | None = None
    """The prompt's condition, if the request asked for it."""
    negative_condition: Condition | None = None
    """The negative prompt's condition, if the request asked for it and guidance is on."""
    latents: "SampleLatents | None" = None
    """Input of rewards that read latents, if the request asked for it."""
    audio: Audio | None = None
    """Sound of the video; None where the model makes none."""


@dataclass(frozen=True)
class Stored:
    """Reference to one `Generation` of a list in Ray's object store."""

    samples: Any
    """Reference to the list."""
    place: int


@dataclass(frozen=True)
class SampleLatents:
    """One sample before it was decoded, on the CPU. Written by a replica, read by rewards."""

    final: Tensor
    """[...] the latents after the last step, as the decoder gets them, in the dtype they were sampled in."""
    condition: Condition
    """The prompt's condition that it was generated with."""


@dataclass(frozen=True)
class RewardInput:
    """One sample for a reward. Made by the agent loop; never stored."""

    pixels: NDArray[np.uint8]
    """[H, W, 3], or [F, H, W, 3] for a video."""
    row: PromptRow
    """Its prompt, with source, ground truth, extra columns and images."""
    sample_index: int
    """Its number in the group `row.uid`."""
    is_validation: bool = False
    latents: SampleLatents | None = None
    """The latents that it was decoded from; None where the reward reads no latents."""
    audio: Audio | None = None
    """Sound of the video; None where the model makes none."""

    def sources(self) -> list[Image.Image]:
        """The images of its prompt as RGB, in order, in their own sizes. Each call reads and decodes them. ValueError:
        an image is missing, is no picture, or has changed during the run."""
        return read_images(self.row.images)


@dataclass(frozen=True)
class RewardCall:
    """One call of a reward; samples of one batch or group share it. Plain values: it is part of a tag."""

    reward: str
    """Name in `digen.reward.functions`, or `custom`."""
    start_s: float
    """Unix seconds."""
    end_s: float
    num_samples: int
    num_queued: int
    """Samples that waited in the same process when the call began, without the call's."""
    counts: tuple[tuple[str, int], ...] = ()
    """(name, number) of `Reward.take_counts` after the call, with failed calls' since the last answer."""


@dataclass(frozen=True)
class PartScore:
    """Result of one reward for one sample."""

    value: float
    details: Mapping[str, float]
    call: RewardCall


@dataclass(frozen=True)
class Score:
    """Reward of one sample."""

    total: float
    """Weighted sum over the rewards, or what the user's own combination made of them."""
    parts: Mapping[str, float]
    """Value of each reward that scored it, and the numeric details that it returned as `name/detail`."""
    calls: tuple[RewardCall, ...]


@dataclass(frozen=True)
class SampleTag:
    """Names and numbers about one scored sample that travel to the driver: latents stay in TransferQueue, pixels with
    the agent loop. Written by the agent loop; read by trainer and metrics."""

    facts: SampleFacts
    reward: float
    """`Score.total`."""
    parts: Mapping[str, float]
    """`Score.parts`."""
    prompt: str
    data_source: str
    generated: tuple[float, float]
    """(start, end) of its generation, in unix s."""
    scored: tuple[float, float]
    """(start, end) of its scoring, in unix s."""
    calls: tuple[RewardCall, ...] = ()
    """`Score.calls`."""
    episode: EpisodeFacts | None = None
    """Facts about its turns; None without an environment."""

    @property
    def generations(self) -> tuple[tuple[float, float], ...]:
        """(start, end) of each of its pictures' generation, in unix s."""
        return (self.generated,) if self.episode is None else tuple(turn.generated for turn in self.episode.turns)

    @property
    def turn_keys(self) -> tuple[str, ...]:
        """Keys of all conditions that its points read, in order of the turns."""
        return (
            (self.facts.condition_key,) if self.episode is None else tuple(t.condition_key for t in self.episode.turns)
        )


GroupTags = Mapping[int, SampleTag]
"""Sample index -> tag, of one group."""


@dataclass(frozen=True)
class Transitions:
    """The part of N rows that path points have: recorded transitions from `TrainingRows.latents`."""

    next_latents: Tensor
    """[N, ...]."""
    next_sigmas: Tensor
    """[N] fp32."""
    sigma_max: Tensor
    """[N] fp32."""
    log_probs: Tensor
    """[N] fp32, recorded at generation."""
    old_log_probs: Tensor | None = None
    """[N] fp32 before the first of several optimizer steps; None if one is taken."""


@dataclass(frozen=True)
class Noised:
    """The part of N rows that forward points have: `TrainingRows.latents` are (1 - sigma) clean + sigma noise."""

    clean: Tensor
    """[N, ...] fp32."""
    noise: Tensor
    """[N, ...] fp32."""


@dataclass(frozen=True)
class TrainingRows:
    """N rows of one tile, ready for a forward. Made by the engine from trajectories; never leaves its rank."""

    latents: Tensor
    """[N, ...] what the network reads."""
    sigmas: Tensor
    """[N] fp32."""
    point: Transitions | Noised
    conditions: Sequence[Condition]
    """N entries; rows of one prompt share the object."""
    advantages: Tensor
    """[N] fp32."""
    mask: Tensor
    """[N] fp32: 1 for a row that trains, 0 for padding."""
    sampling: Sampling
    """Settings that all of them were generated with."""
    negative_conditions: Sequence[Condition] | None = None
    """N entries, or None without guidance."""
    rewards: Tensor | None = None
    """[N] fp32: the weighted sum over the reward functions, not centred; None if not given."""

    def __len__(self) -> int:
        return self.latents.shape[0]

    def to(self, device: torch.device) -> "TrainingRows":
        """Copy on `device`; rows of one prompt still share their conditions. Sigmas stay on the host, where the SDE
        step reads them: on a device each would cost a synchronisation."""
        moved: dict[int, Condition] = {}

        def move(condition: Condition) -> Condition:
            if id(condition) not in moved:
                moved[id(condition)] = move_condition(condition, device)
            return moved[id(condition)]

        def convert(part: Any) -> dict[str, Tensor]:
            tensors = {name: value for name, value in vars(part).items() if isinstance(value, Tensor)}
            return {
                name: value if name in SCHEDULE_COLUMNS else to_device(value, device) for name, value in tensors.items()
            }

        return replace(
            self,
            point=replace(self.point, **convert(self.point)),
            conditions=[move(condition) for condition in self.conditions],
            negative_conditions=None
            if self.negative_conditions is None
            else [move(condition) for condition in self.negative_conditions],
            **convert(self),
        )


SCHEDULE_COLUMNS = ("sigmas", "next_sigmas", "sigma_max")
"""Fields that stay on the host."""

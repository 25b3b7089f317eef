# SPDX-License-Identifier: Apache-2.0
"""Settings that a picture was generated with, and facts about the turns of an episode; part of a sample's tag."""

from dataclasses import dataclass

from verl_digen.algorithms.outside import EXACT, Outside
from verl_digen.algorithms.solvers.terms import NO_NOISE, SolverNoise


@dataclass(frozen=True)
class Geometry:
    """Size of a generated image or video, and of the images that the network reads beside it."""

    height_px: int
    width_px: int
    num_frames: int = 1
    """1 for an image."""
    sources: tuple[tuple[int, int], ...] = ()
    """(height, width) in px of each image of the prompt, as the network reads it."""


@dataclass(frozen=True)
class Sampling:
    """Denoising settings of a request; requests share a batch only if theirs are equal."""

    geometry: Geometry
    num_steps: int
    """T."""
    true_cfg_scale: float
    """True classifier-free guidance w: v = v_neg + w (v_pos - v_neg); 1.0 runs the positive branch alone."""
    law: str
    """SDE law, see `verl_digen.algorithms.sde`."""
    noise_level: float
    """eta of the SDE steps."""
    shared_initial_noise: bool = False
    """True: all samples of a group start from the same noise."""
    guidance_scale: float | None = None
    """Guidance scale for networks that take one as an input (FLUX.1 dev, HunyuanVideo); None: the pipeline's
    default."""
    solver: str = "euler"
    """Solver of the steps that are not stochastic, see `verl_digen.algorithms.solvers`."""
    solver_noise: SolverNoise = NO_NOISE
    """Noise of solver `sa`."""
    outside: Outside = EXACT
    """Sampling of the steps before and after the window; `EXACT` for requests without one."""

    @property
    def is_guided(self) -> bool:
        """True if the negative branch runs too."""
        return self.true_cfg_scale > 1.0


@dataclass(frozen=True)
class Turn:
    """One turn of an episode: a generation, and the environment's answer to it."""

    num_steps: int
    """K of the turn."""
    sampling: Sampling
    condition_key: str
    """Key of its conditions in TransferQueue."""
    generated: tuple[float, float]
    """(start, end) of its generation, in unix s."""
    environment_s: float
    """Seconds from the picture to the environment's answer, retries included."""
    reward: float


@dataclass(frozen=True)
class EpisodeFacts:
    """Facts about the episode that a sample is. Written by the agent loop, read by the trainer and by metrics."""

    turns: tuple[Turn, ...]
    """At least one. The sample's K points are its turns' points, in order."""
    is_exceeded: bool = False
    """True if it ended at `digen.environment.max_turns`, and not because the environment was done."""
    num_retries: int = 0
    """Times that its environment was made again."""

# SPDX-License-Identifier: Apache-2.0
"""Record the parts of a generation that training needs, on replicas and trainers alike.

Records own their memory: a view of a batch would be sent with the whole batch. A replica makes trajectories in another
thread, when the numbers of a batch have come to the host (`Denoised.moved`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from verl_digen.algorithms.noise import sample_seed
from verl_digen.algorithms.window import Window
from verl_digen.inputs.audio import Audio
from verl_digen.models.base import DiffusionModel
from verl_digen.types import CleanRecord, PathRecord, SampleFacts, SampleRequest, Trajectory


def initial_seed(run_seed: int, request: SampleRequest) -> int:
    """Seed of a sample's initial noise; of its group's sample 0 if the group shares one."""
    index = 0 if request.sampling.shared_initial_noise else request.sample_index
    return sample_seed(run_seed, request.uid, index, request.turn)


def noise_seed(run_seed: int, request: SampleRequest, step: int) -> int:
    """Seed of the noise of a stochastic step: the sample's, or in a tree the node's that the step leads to."""
    return sample_seed(run_seed, request.uid, request.noise_index(step), request.turn)


def with_experts(model: DiffusionModel, trajectory: Trajectory) -> Trajectory:
    """The trajectory, whose facts say which network runs each point if the model has several."""
    if len(model.experts) == 1:
        return trajectory
    experts = tuple(model.expert_of(trajectory.record.sigmas).tolist())
    return replace(trajectory, facts=replace(trajectory.facts, experts=experts))


def not_finite(
    request: SampleRequest, final: Tensor, version: int, is_finite: Tensor, audio: Audio | None
) -> ValueError | None:
    """The error of a sample whose numbers (final latents [...], pixels, sound) are not all finite; None for others.
    Waits for a device that holds them. 8 bits cannot show what is not finite: rewards would score a black picture as
    any other."""
    sample = f"sample {request.sample_index} of group {request.uid} must have finite"
    if not final.isfinite().all():
        return ValueError(
            f"{sample} latents after its last step, got NaN or inf under weight version {version}; if that is the "
            "first version, the network overflows in actor_rollout_ref.rollout.dtype (bfloat16 has the range of "
            "float32), or is your own and no module of actor_rollout_ref.model.external_lib registers it; if it is a "
            "later one, resume from a checkpoint before it with a lower actor_rollout_ref.actor.optim.lr"
        )
    has_sound = audio is None or np.isfinite(audio.waveform).all()
    if is_finite and has_sound:
        return None
    return ValueError(
        f"{sample} {'sound' if is_finite else 'pixels'}, got NaN or inf of finite latents; what decodes them overflows "
        "in actor_rollout_ref.rollout.dtype (bfloat16 has the range of float32), or its weights in "
        "actor_rollout_ref.model.path are damaged: download them again"
    )


def trained_latents(window: Window) -> list[int]:
    """Steps whose latents training needs, ascending: the start and the end of each trained step."""
    return sorted({step for start in window.train_steps for step in (start, start + 1)})


@dataclass(frozen=True)
class Denoised:
    """B samples after their last step, before their trajectories are made. Made by `Sampler.denoise`."""

    requests: Sequence[SampleRequest]
    seeds: Sequence[int]
    """Seeds of the initial noise."""
    version: int
    sigmas: Tensor
    """[T+1] on the host."""
    path: Mapping[int, Tensor]
    """Step -> latents [B, ...], at the recorded steps of any of them, ascending."""
    log_probs_TB: Tensor
    latents: Tensor
    """[B, ...] the latents after the last step."""
    num_shared: Sequence[int]
    num_skipped: Sequence[int]
    """See `SampleFacts`."""

    def moved(self, move: Callable[[Tensor], Tensor]) -> "Denoised":
        """A copy whose tensors of the device are moved by `move`."""
        path = {step: move(latents) for step, latents in self.path.items()}
        return replace(self, path=path, log_probs_TB=move(self.log_probs_TB), latents=move(self.latents))

    def trajectories(self) -> list[Trajectory]:
        """The trajectories, on the CPU; waits for a device that holds tensors."""
        log_probs_TB = self.log_probs_TB.cpu()
        return [
            record_trajectory(
                request,
                seed=seed,
                versions=(self.version, self.version),
                path={at: self.path[at][row] for at in trained_latents(request.window)},
                final=self.latents[row],
                sigmas=self.sigmas,
                log_probs_T=log_probs_TB[:, row],
                num_shared_steps=self.num_shared[row],
                num_skipped_steps=self.num_skipped[row],
            )
            for row, (request, seed) in enumerate(zip(self.requests, self.seeds, strict=True))
        ]


def record_trajectory(
    request: SampleRequest,
    *,
    seed: int,
    versions: tuple[int, int],
    path: Mapping[int, Tensor],
    final: Tensor,
    sigmas: Tensor,
    log_probs_T: Tensor,
    num_shared_steps: int = 0,
    num_skipped_steps: int = 0,
) -> Trajectory:
    """One sample's trajectory, on the CPU.

    Args:
        versions: weight versions of the first and of the last step.
        path: step -> latents [...], at the `trained_latents`, ascending.
        final: [...] the latents after the last step.
        sigmas: [T+1] on the CPU. log_probs_T: [T], 0 where the step was deterministic.
    """
    levels = request.noise_levels
    record = (
        _path_record(request.window, path, final, sigmas, log_probs_T)
        if levels is None
        else CleanRecord(clean=final.to("cpu", copy=True), sigmas=levels.sigmas(sigmas))
    )
    facts = SampleFacts(
        uid=request.uid,
        sample_index=request.sample_index,
        seed=seed,
        version=versions[0],
        last_version=versions[1],
        num_steps=len(record.sigmas),
        sampling=request.sampling,
        condition_key=request.condition_key,
        num_shared_steps=num_shared_steps,
        num_skipped_steps=num_skipped_steps,
        nodes=request.nodes,
    )
    return Trajectory(facts, record)


def _path_record(
    window: Window, path: Mapping[int, Tensor], final: Tensor, sigmas: Tensor, log_probs_T: Tensor
) -> PathRecord:
    steps = list(path)
    trained = torch.tensor(window.train_steps, dtype=torch.int64)
    return PathRecord(
        latents=(torch.stack(list(path.values())) if path else final.new_empty(0, *final.shape)).cpu(),
        positions=torch.tensor([steps.index(start) for start in window.train_steps], dtype=torch.int64),
        sigmas=sigmas[trained],
        next_sigmas=sigmas[trained + 1],
        sigma_max=sigmas[1].clone(),
        log_probs=log_probs_T.cpu()[trained],
    )

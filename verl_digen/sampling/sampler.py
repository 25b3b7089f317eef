# SPDX-License-Identifier: Apache-2.0
"""The one denoising loop, and the replay of its steps.

- All generation (replicas and assisting trainers) runs `Sampler.sample`; all log-probs of recorded steps come from
  `score_rows`, all velocities of rows from `row_velocity`. They share `DiffusionModel.velocity` and `sde_step`.
- A step costs one forward for the whole batch, or one per guidance branch (`branches`). Each row's own window decides
  whether a step is stochastic; other rows take the step of `Sampling.solver`.
- Steps outside a window may pass without a forward (`Sampling.outside`): the solver passes over some, and others take a
  row's last velocity again, as the row's own `StepCache` says. The rows that evaluate the network share a forward; with
  `outside.fp8` those whose step is not stochastic share one in fp8.
- x is rounded to `latents_dtype` when it is made (the initial noise too), and only the rounded x is used further: by
  the log-prob, the next forward, the record and the replay.

Invariants (tests/sampling/test_sampler.py, test_outside.py)
- A sample is a function of its request, the weights and the run seed: the rest of its batch, and the order, change it
  by float error only.
- `score_rows` on what `sample` recorded, under the same weights, gives the recorded log-probs.
- Without stochastic steps the result equals the model's own diffusers pipeline.
- A clean record holds bitwise the final latents.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import KW_ONLY, dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from verl_digen.algorithms.noise import INITIAL_LATENTS, step_noise
from verl_digen.algorithms.sde import SdeStep, sde_step
from verl_digen.algorithms.solvers import NOISY, Prediction, denoise_step
from verl_digen.algorithms.step_cache import StepCache
from verl_digen.hardware.transfers import to_device
from verl_digen.models.base import DiffusionModel
from verl_digen.sampling.branches import ONE_FORWARD, GuidanceBranches
from verl_digen.sampling.fp8 import Fp8Layers
from verl_digen.sampling.prefix import Lanes, PrefixCache, SharedPrefix
from verl_digen.sampling.recording import Denoised, initial_seed, noise_seed, trained_latents
from verl_digen.sampling.requests import check_batch
from verl_digen.types import Condition, SampleRequest, Sampling, TrainingRows, Trajectory, Transitions

TEXT_STEP = 64
"""Tokens to which the length of a prompt is rounded, where lengths differ, in what a forward takes of memory."""


class SamplingStopped(Exception):
    """`should_stop` returned True before the last step; the batch is discarded."""


@dataclass(frozen=True)
class _Batch:
    """Rows of one call of `Sampler.sample`."""

    requests: Sequence[SampleRequest]
    conditions: Sequence[Condition]
    negative_conditions: Sequence[Condition] | None
    sigmas: Tensor
    """[T+1] on the host."""
    sampling: Sampling
    prefix: SharedPrefix
    should_stop: Callable[[], bool] | None

    @cached_property
    def schedule(self) -> tuple[float, ...]:
        """`sigmas` as numbers."""
        return tuple(self.sigmas.tolist())

    def memory(self) -> "_Memory":
        """Empty memory, before the first step."""
        outside = self.sampling.outside
        return _Memory(StepCache(outside.cache, outside.cache_max_skips))


@dataclass
class _Memory:
    """Numbers of earlier steps that the next one reads, of the rows in `Lanes.lane_of`."""

    cache: StepCache
    predicted: Prediction | None = None


@dataclass(eq=False)
class Sampler:
    """Denoises batches of requests with one transformer, on `device`, in whatever wrapper (FSDP2, peft), whose mode
    stays."""

    model: DiffusionModel
    transformer: nn.Module
    _: KW_ONLY
    run_seed: int
    device: torch.device
    latents_dtype: torch.dtype
    """Dtype of latents between steps and in the record."""
    branches: GuidanceBranches = ONE_FORWARD
    prefixes: PrefixCache | None = None
    """Latents at the start of windows, kept from call to call; code that changes weights clears them. None: a call
    shares them among its own rows."""
    fp8: Fp8Layers | None = None
    """Copies of the transformer's layers, for requests with `outside.fp8`."""

    def sample(
        self,
        requests: Sequence[SampleRequest],
        conditions: Sequence[Condition],
        negative_conditions: Sequence[Condition] | None,
        *,
        version: int,
        should_stop: Callable[[], bool] | None = None,
    ) -> tuple[list[Trajectory], Tensor]:
        """Denoise as `denoise` -> B trajectories on the CPU, and the final latents [B, ...] on `device`."""
        denoised = self.denoise(requests, conditions, negative_conditions, version=version, should_stop=should_stop)
        return denoised.trajectories(), denoised.latents

    @torch.no_grad()
    def denoise(
        self,
        requests: Sequence[SampleRequest],
        conditions: Sequence[Condition],
        negative_conditions: Sequence[Condition] | None,
        *,
        version: int,
        should_stop: Callable[[], bool] | None = None,
    ) -> Denoised:
        """Denoise B requests that share their `Sampling`; windows and uids may differ. The samples are on `device`,
        latents in `latents_dtype`. Does not wait for the device.

        Args:
            conditions, negative_conditions: B entries each, on `device`; negative ones only with guidance.
            version: weight version of the transformer, which must not change until this returns.
            should_stop: called before every step; True raises SamplingStopped. Under FSDP all ranks must get the same
                answer.

        RuntimeError for requests that do not belong together, or a window that reaches the last step.
        """
        sampling = check_batch(requests, conditions, negative_conditions)
        shape = self.model.latent_shape(sampling.geometry)
        sigmas = self.model.sigmas(sampling.num_steps, sampling.geometry)
        initial_seeds = [initial_seed(self.run_seed, request) for request in requests]
        prefix = SharedPrefix(requests, initial_seeds)
        batch = _Batch(requests, conditions, negative_conditions, sigmas, sampling, prefix, should_stop)

        latents = torch.stack([step_noise(seed, INITIAL_LATENTS, shape) for seed in initial_seeds])
        latents = to_device(latents, self.device, self.latents_dtype)
        recorded = {step for request in requests for step in trained_latents(request.window)}
        latents = self._to_windows(batch, latents, version)
        path: dict[int, Tensor] = {}
        log_probs: list[Tensor] = []
        memory = batch.memory()
        for step in range(sampling.num_steps):
            if step in recorded:
                path[step] = latents
            lanes, edges = prefix.lanes(step), prefix.edges(step)
            skipped = latents.new_zeros(len(latents), dtype=torch.float32)
            if not lanes.rows:
                log_probs.append(skipped)
                continue
            taken = self._advance(batch, lanes, edges, latents, step, memory)
            latents = edges.place(taken.next_sample, latents)
            log_probs.append(edges.place(taken.log_prob, skipped))

        return Denoised(
            requests,
            initial_seeds,
            version,
            sigmas,
            path,
            torch.stack(log_probs),
            latents,
            prefix.num_shared,
            prefix.num_skipped,
        )

    def _to_windows(self, batch: _Batch, latents: Tensor, version: int) -> Tensor:
        """Latents [B, ...]; rows that wait for their window have theirs as they are at its start. Each run has one
        row, so that its latents do not depend on the batch (`PrefixCache`)."""
        prefix = batch.prefix
        if not prefix.waiting:
            return latents
        cache = PrefixCache() if self.prefixes is None else self.prefixes
        rows = list(latents.split(1))
        for row, steps in prefix.waiting.items():
            known = cache.lookup(steps, version)
            if known is not None:
                rows[row] = to_device(known, self.device).unsqueeze(0)
                prefix.count(row)
                continue
            alone = Lanes((row,), (0,))
            memory = batch.memory()
            for step in range(steps.num_steps):
                if prefix.ends[row][step] is None:
                    prefix.num_skipped[row] += 1
                else:
                    rows[row] = self._advance(batch, alone, alone, rows[row], step, memory).next_sample
            cache.keep(steps, version, rows[row][0])
        return torch.cat(rows)

    def _advance(
        self, batch: _Batch, lanes: Lanes, edges: Lanes, latents: Tensor, step: int, memory: _Memory
    ) -> SdeStep:
        """Take one denoising step of the rows that run, stochastic for the requests whose window says so, the solver's
        for the others -> steps of the edges [R]; `memory` is then this step's. Lanes and edges are in numbers of
        `batch`'s rows, and latents and memory those of the rows in their `lane_of`."""
        if batch.should_stop is not None and batch.should_stop():
            raise SamplingStopped(f"stopped before denoise step {step} of {batch.sampling.num_steps}")
        velocity = self._velocities(batch, lanes, latents, step, memory.cache)
        if edges != lanes:
            velocity = velocity[[lanes.lane_of[row] for row in edges.rows]]
        before, known = latents, memory.predicted
        if not edges.is_whole:
            before, known = latents[list(edges.rows)], None if known is None else known.rows(edges.rows)
        ends = [batch.schedule[end] for row in edges.rows if (end := batch.prefix.ends[row][step]) is not None]
        is_sde = _stochastic(batch, edges.rows, step)
        sampling, shape = batch.sampling, latents.shape[1:]
        # Drawn while an accelerator is still busy with the forward.
        noise = [
            step_noise(noise_seed(self.run_seed, batch.requests[row], step), step, shape)
            if sde or sampling.solver in NOISY
            else torch.zeros(shape)
            for row, sde in zip(edges.rows, is_sde, strict=True)
        ]
        taken, predicted = denoise_step(
            velocity,
            before,
            (batch.schedule[step],) * len(edges.rows),
            tuple(ends),
            solver=sampling.solver,
            is_sde=is_sde,
            previous=known,
            law=sampling.law,
            noise_level=sampling.noise_level,
            sigma_max=batch.schedule[1],
            noise=to_device(torch.stack(noise), self.device),
            storage_dtype=self.latents_dtype,
            solver_noise=sampling.solver_noise,
        )
        memory.predicted = None if predicted is None else _of_all_rows(predicted, edges, memory.predicted)
        if memory.cache.is_on:
            memory.cache.disturb([row for rows, sde in zip(edges.members, is_sde, strict=True) if sde for row in rows])
        return taken

    def _velocities(self, batch: _Batch, lanes: Lanes, latents: Tensor, step: int, cache: StepCache) -> Tensor:
        """Velocities [R, ...] of the rows that run: the network's, or their last ones again where `cache` says so."""
        if not cache.is_on:
            own = latents if lanes.is_whole else latents[list(lanes.rows)]
            return self._velocity(batch, lanes.rows, own, step)
        members, sigma = lanes.members, batch.schedule[step]
        heads = [rows[0] for rows in members]
        expert = int(self.model.expert_of(batch.sigmas[step : step + 1]))
        is_again = cache.reusable(heads, _stochastic(batch, lanes.rows, step), sigma, expert)
        again = [lane for lane, reused in enumerate(is_again) if reused]
        fresh = [lane for lane, reused in enumerate(is_again) if not reused]
        for lane in again:
            batch.prefix.num_skipped[lanes.rows[lane]] += 1
        parts = []
        if again:
            parts.append(cache.take([heads[lane] for lane in again], [members[lane] for lane in again]))
        if fresh:
            own = latents[[heads[lane] for lane in fresh]]
            parts.append(self._velocity(batch, [lanes.rows[lane] for lane in fresh], own, step))
            cache.put([members[lane] for lane in fresh], parts[-1], sigma, expert)
        order = [*again, *fresh]
        return torch.cat(parts)[[order.index(lane) for lane in range(len(order))]]

    def _velocity(self, batch: _Batch, rows: Sequence[int], latents: Tensor, step: int) -> Tensor:
        """Velocities [N, ...] of the network, of the batch's `rows` with these latents; in fp8 where the step of a row
        may be."""
        if not batch.sampling.outside.fp8:
            return self._exact_velocity(batch, rows, latents, step)
        if self.fp8 is None:
            raise RuntimeError("digen.sampling.outside.fp8 needs a generator with fp8 copies of its layers, got none")
        is_exact = _stochastic(batch, rows, step)
        velocity = latents.new_empty(latents.shape, dtype=torch.float32)
        for exact, copies in ((True, nullcontext()), (False, self.fp8.active())):
            places = [place for place, each in enumerate(is_exact) if each == exact]
            if places:
                own = latents if len(places) == len(rows) else latents[places]
                with copies:
                    found = self._exact_velocity(batch, [rows[place] for place in places], own, step)
                velocity[places] = found.float()
        return velocity

    def _exact_velocity(self, batch: _Batch, rows: Sequence[int], latents: Tensor, step: int) -> Tensor:
        """Velocities [N, ...] of the network as it is."""
        sampling, sigmas = batch.sampling, batch.sigmas[step].expand(len(rows))
        conditions = [batch.conditions[row] for row in rows]
        negative = batch.negative_conditions
        negative_conditions = None if negative is None else [negative[row] for row in rows]

        def forward(splits: bool) -> Tensor:
            return self.model.velocity(
                self.transformer,
                latents,
                sigmas,
                conditions,
                negative_conditions,
                sampling.true_cfg_scale,
                sampling.geometry,
                sampling.guidance_scale,
                splits=splits,
            )

        if sampling.true_cfg_scale == 1.0 or negative_conditions is None:
            return forward(False)
        longest = max(len(condition["embeds"]) for condition in (*conditions, *negative_conditions))
        return self.branches.run((sampling.geometry, len(latents), longest // TEXT_STEP), forward)


def _stochastic(batch: _Batch, rows: Sequence[int], step: int) -> list[bool]:
    """True for each row whose window has `step`."""
    return [step in batch.requests[row].window.sde_steps for row in rows]


def _of_all_rows(predicted: Prediction, edges: Lanes, previous: Prediction | None) -> Prediction:
    """The prediction of each row's edge. A row that does not run keeps what it has: before its window none, count 0."""
    made: dict[str, Tensor] = vars(predicted)
    none = {name: of.new_zeros(len(edges.lane_of), *of.shape[1:]) for name, of in made.items()}
    before = none if previous is None else vars(previous)
    return Prediction(**{name: edges.place(of, before[name]) for name, of in made.items()})


def row_velocity(model: DiffusionModel, transformer: nn.Module, rows: TrainingRows) -> Tensor:
    """Guided velocity [N, ...] fp32 of rows of either kind, differentiable. Rows of different points and prompts share
    the forward, if they belong to one expert (`DiffusionModel.expert_of`)."""
    return model.velocity(
        transformer,
        rows.latents,
        rows.sigmas,
        rows.conditions,
        rows.negative_conditions,
        rows.sampling.true_cfg_scale,
        rows.sampling.geometry,
        rows.sampling.guidance_scale,
    )


def score_rows(model: DiffusionModel, transformer: nn.Module, rows: TrainingRows) -> tuple[SdeStep, Tensor]:
    """Replay N recorded steps, differentiably -> (steps under `transformer`, `row_velocity`). RuntimeError for rows of
    forward points, which have no step."""
    point = rows.point
    if not isinstance(point, Transitions):
        raise RuntimeError(
            f"log-probs are of recorded steps, got rows of {type(point).__name__} points; evaluate velocities instead"
        )
    velocity = row_velocity(model, transformer, rows)
    step = sde_step(
        velocity,
        rows.latents,
        rows.sigmas,
        point.next_sigmas,
        law=rows.sampling.law,
        noise_level=rows.sampling.noise_level,
        sigma_max=point.sigma_max,
        next_sample=point.next_latents,
    )
    return step, velocity

# SPDX-License-Identifier: Apache-2.0
"""Trainer-assisted generation on a rank: the project's sampler over the trainer's own FSDP-sharded weights.

- No second copy of the network, nothing offloaded; the gradient of the open logical batch stays as it is.
- The samples of a call, of one group or several, are split over the data-parallel ranks; of ranks that share rows the
  first decodes.
- Every forward gathers weights from all ranks, so all ranks denoise the same number of batches, and all batches of a
  call take the same number of forwards. A batch holds samples of one `Sampling`; a rank with fewer batches than others
  denoises a padding sample and discards it.
- A rank also holds the decoders of picture and sound, which a trainer does not have otherwise. Prompts are encoded by a
  replica.

Invariant (tests/engine/test_assistant.py): a sample equals what a replica with the same weights generates, to float
error; an open gradient is bitwise as before.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Mapping, Sequence
from itertools import groupby, pairwise

import torch
from torch import Tensor

from verl_digen.engine.engine import DiffusersFSDPEngine
from verl_digen.models.pixels import in_batches
from verl_digen.sampling.branches import GuidanceBranches
from verl_digen.sampling.prefix_cache import PrefixCache
from verl_digen.sampling.recording import experts_of, not_finite
from verl_digen.sampling.sampler import Sampler
from verl_digen.store.conditions import ConditionPair
from verl_digen.types import Condition, Generation, SampleRequest, Trajectory, move_condition


class Assistant:
    """Args:
    latents_dtype: `digen.rollout.latents_dtype`. decoder_dtype: `actor_rollout_ref.rollout.dtype`.
    """

    def __init__(self, engine: DiffusersFSDPEngine, *, latents_dtype: torch.dtype, decoder_dtype: torch.dtype):
        self._engine = engine
        self._device = engine.forward.device
        self._decode = engine.model.load_decoder(decoder_dtype, self._device)
        self._decode_audio = engine.model.load_audio_decoder(decoder_dtype, self._device)
        self._sampler = Sampler(
            engine.model,
            engine.module,
            run_seed=engine.digen.seed,
            device=self._device,
            latents_dtype=latents_dtype,
            # `auto` too is one forward: a tile of a row, both branches with gradients, fits
            branches=GuidanceBranches(engine.digen.rollout.split_guidance is True, self._device),
            # where groups share steps, a call has one group (`trainer.batch_rules`): all ranks skip the same forwards
            prefixes=PrefixCache(),
        )

    def generate(
        self, requests: Sequence[SampleRequest], conditions: Mapping[str, ConditionPair], *, version: int
    ) -> list[Generation]:
        """Generate this rank's share of `requests`. All ranks call it with the same arguments.

        Args:
            conditions: condition key -> conditions of that prompt; the negative one only with guidance.
            version: weight version.

        Raises:
            ValueError: latents, pixels or sound of one of them are not finite.
        """
        rank, num_ranks = self._engine.get_data_parallel_rank(), self._engine.get_data_parallel_size()
        kinds = [self._kind(request, *conditions[request.condition_key]) for request in requests]
        batches = [[requests[index] for index in batch] for batch in deal_samples(kinds, num_ranks)[rank]]
        started_s = time.time()
        with self._engine.assisting():
            denoised = [self._denoise(batch or requests[:1], conditions, version) for batch in batches]
        if not self._engine.is_mp_src_rank_with_outputs():
            return []
        made = [(batch, samples) for batch, samples in zip(batches, denoised, strict=True) if batch]
        # after the last forward, for which other ranks need this one
        finished = [self._finish(batch, *samples, started_s) for batch, samples in made]
        return [generation for batch in finished for generation in batch]

    def _kind(self, request: SampleRequest, condition: Condition, negative: Condition | None) -> Hashable:
        """Equal for samples that may share a forward."""
        model = self._engine.model
        if not model.keeps_lengths_apart:
            return request.sampling
        return request.sampling, model.text_lengths(condition), model.text_lengths(negative or {})

    def _denoise(
        self, batch: Sequence[SampleRequest], conditions: Mapping[str, ConditionPair], version: int
    ) -> tuple[list[Trajectory], Tensor, list[Condition]]:
        """Trajectories, final latents [B, ...] and conditions of a batch."""
        moved = {
            key: tuple(None if one is None else move_condition(one, self._device) for one in conditions[key])
            for key in {request.condition_key for request in batch}
        }
        pairs = [moved[request.condition_key] for request in batch]
        positive = [condition for condition, _ in pairs if condition is not None]
        negative = [condition for _, condition in pairs if condition is not None] or None
        return *self._sampler.sample(batch, positive, negative, version=version), positive

    def _finish(
        self,
        batch: Sequence[SampleRequest],
        trajectories: Sequence[Trajectory],
        latents: Tensor,
        conditions: Sequence[Condition],
        started_s: float,
    ) -> list[Generation]:
        """Decode a batch."""
        geometry = trajectories[0].sampling.geometry
        whole = self._engine.model.completed(latents, conditions)
        pictures = in_batches(self._decode, whole, geometry, self._engine.digen.rollout.decode_batch_size)
        audio = self._decode_audio(whole, geometry)
        version = trajectories[0].version
        for request, final, is_finite, sound in zip(batch, latents, pictures.is_finite, audio, strict=True):
            if (error := not_finite(request, final, version, is_finite, sound)) is not None:
                raise error
        ended_s = time.time()
        return [
            Generation(
                trajectory=trajectory,
                pixels=pictures.pixels[index],
                audio=audio[index],
                started_s=started_s,
                ended_s=ended_s,
                experts=experts_of(self._engine.model, trajectory),
            )
            for index, trajectory in enumerate(trajectories)
        ]


def deal_samples(kinds: Sequence[Hashable], num_ranks: int) -> list[list[list[int]]]:
    """Batches of each rank: positions of its samples, those of a batch of one kind. Pure.

    Numbers of samples differ by one at most. All ranks have as many batches; some may be empty.

    Args:
        kinds: kind of each sample.

    Example: four samples of a kind and one of another, on two ranks
        deal_samples(["a", "a", "b", "a", "a"], 2)   # [[[0, 1, 3], []], [[4], [2]]]
    """
    order = sorted(range(len(kinds)), key=lambda index: (kinds.index(kinds[index]), index))
    ends = [-(-len(order) * rank // num_ranks) for rank in range(num_ranks + 1)]
    shares = [
        [list(batch) for _, batch in groupby(order[first:last], key=kinds.__getitem__)]
        for first, last in pairwise(ends)
    ]
    most = max(1, *map(len, shares))
    return [share + [[]] * (most - len(share)) for share in shares]

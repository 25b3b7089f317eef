# SPDX-License-Identifier: Apache-2.0
"""Trainer-assisted generation on a rank: the project's sampler over the trainer's own FSDP-sharded weights.

- No second copy of the network, nothing offloaded; the gradient of the open logical batch stays as it is.
- The samples of a call are split over the data-parallel ranks; of ranks that share rows the first decodes. A rank that
  gets none denoises a padding sample and discards it, because every forward gathers weights from all ranks.
- A rank also holds the decoders of picture and sound, which a trainer does not have otherwise. Prompts are encoded by a
  replica.

Invariant (tests/engine/test_assistant.py): a sample equals what a replica with the same weights generates, to float
error; an open gradient is bitwise as before.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from verl_digen.engine.engine import DiffusersFSDPEngine
from verl_digen.models.pixels import in_batches
from verl_digen.sampling.branches import GuidanceBranches
from verl_digen.sampling.prefix_cache import PrefixCache
from verl_digen.sampling.recording import experts_of
from verl_digen.sampling.sampler import Sampler
from verl_digen.types import Condition, Generation, SampleRequest, move_condition


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
            # all ranks get the same calls, of one group each, so they skip the same forwards
            prefixes=PrefixCache(),
        )

    def generate(
        self,
        requests: Sequence[SampleRequest],
        condition: Condition,
        negative_condition: Condition | None,
        *,
        version: int,
    ) -> list[Generation]:
        """Generate this rank's share of `requests`, all of one group. All ranks call it with the same arguments.

        Args:
            condition, negative_condition: conditions of the group's prompt; the negative one only with guidance.
            version: weight version.
        """
        rank, num_ranks = self._engine.get_data_parallel_rank(), self._engine.get_data_parallel_size()
        share = requests[rank::num_ranks]
        batch = share or requests[:1]
        started_s = time.time()
        conditions = [move_condition(condition, self._device)] * len(batch)
        negative = (
            None if negative_condition is None else [move_condition(negative_condition, self._device)] * len(batch)
        )
        with self._engine.assisting():
            trajectories, latents = self._sampler.sample(batch, conditions, negative, version=version)
        if not share or not self._engine.is_mp_src_rank_with_outputs():
            return []
        batch_size = self._engine.digen.rollout.decode_batch_size
        latents = self._engine.model.completed(latents, conditions)
        pixels = in_batches(self._decode, latents, share[0].sampling.geometry, batch_size)
        audio = self._decode_audio(latents, share[0].sampling.geometry)
        ended_s = time.time()
        return [
            Generation(
                trajectory=trajectory,
                pixels=pixels[index],
                audio=audio[index],
                started_s=started_s,
                ended_s=ended_s,
                experts=experts_of(self._engine.model, trajectory),
            )
            for index, trajectory in enumerate(trajectories)
        ]

# SPDX-License-Identifier: Apache-2.0
"""Samples of a `diffusers` replica or of a trainer's rank, one batch at a time. A replica makes them on the device in
one thread and answers in another.

    compute thread    encode, denoise, decode; begin the copies to the host    the next batch ...
    answer thread                                  wait for the copies         trajectories, pixels, answers

Nothing in the compute thread waits for the device, where prompts are known: it gets the next batch's first step while
it still works on the last decoding. Decoding stays behind the denoising of its batch in the device's one order, so it
takes no memory beside the denoising of the next one. Answers are the same as without overlap, and each holds the memory
of one sample.
"""

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from verl.utils.torch_dtypes import PrecisionType

from verl_digen.config import DigenConfig
from verl_digen.hardware.transfers import HostCopies
from verl_digen.inputs.audio import Audio
from verl_digen.models.pixels import AudioDecoder, Decoded, Decoder, fitted, in_batches
from verl_digen.rollout.encoders import LookUp, carried, conditions_by_place
from verl_digen.rollout.fitting import Fitting
from verl_digen.rollout.network import LoadedNetwork
from verl_digen.sampling.branches import GuidanceBranches
from verl_digen.sampling.prefix import PrefixCache
from verl_digen.sampling.recording import Denoised, initial_seed, not_finite, record_trajectory, with_experts
from verl_digen.sampling.sampler import TEXT_STEP, Sampler
from verl_digen.types import Condition, Generation, SampleLatents, SampleRequest, move_condition

Answers = list[Generation | ValueError]
"""Answers in the order of the requests; an error for a prompt that the encoder refuses, or numbers that are not
finite."""


@dataclass(frozen=True)
class _Made:
    """Samples of one forward; its tensors are on their way to the host."""

    places: Sequence[int]
    denoised: Denoised
    pictures: Decoded
    audio: Sequence[Audio | None]
    conditions: Sequence[Sequence[Condition]]
    """Per sample: the prompt's condition, then with guidance the negative prompt's; on the host."""
    decoded: Tensor
    """[B, ...] latents as the decoder got them."""


class SampleMaker:
    """Maker of batches in parts that fit into memory (`fitting`), decoded at most `batch_size` pictures at a time."""

    def __init__(
        self,
        sampler: Sampler,
        look_up: LookUp,
        decoder: Decoder,
        audio_decoder: AudioDecoder,
        *,
        fitting: Fitting,
        batch_size: int,
    ):
        self.sampler, self._look_up, self._model = sampler, look_up, sampler.model
        self.fitting, self._batch_size = fitting, batch_size
        self.decoder, self.audio_decoder = decoder, audio_decoder
        self._ended_s = 0.0

    @classmethod
    def of_network(
        cls, network: LoadedNetwork, look_up: LookUp, digen: DigenConfig, prefixes: PrefixCache | None = None
    ) -> "SampleMaker":
        """The one of a replica's network, with decoders. `prefixes`: see `Sampler`."""
        model, dtype, device = network.model, network.dtype, network.device
        sampler = Sampler(
            model,
            network.weights.module,
            run_seed=digen.seed,
            device=device,
            latents_dtype=PrecisionType.to_dtype(digen.rollout.latents_dtype),
            branches=GuidanceBranches(digen.rollout.split_guidance, device),
            prefixes=prefixes,
            fp8=network.fp8,
        )
        return cls(
            sampler,
            look_up,
            model.load_decoder(dtype, device),
            model.load_audio_decoder(dtype, device),
            fitting=Fitting(digen.rollout.fits_batches, device),
            batch_size=digen.rollout.decode_batch_size,
        )

    @property
    def modules(self) -> list[nn.Module]:
        """The transformer and the decoders."""
        return [self.sampler.transformer, *self.decoder.modules, *self.audio_decoder.modules]

    def make(
        self, requests: Sequence[SampleRequest], version: int, should_stop: Callable[[], bool] | None = None
    ) -> Callable[[], Answers]:
        """Make a batch of samples -> function that waits for them, for another thread. Raises as `Sampler.denoise`."""
        started_s = time.time()
        if requests[0].picture is not None:
            answers = self._make_pictures(requests, version)
            return lambda: answers
        conditions, refused = conditions_by_place(self._look_up, requests)
        copies = HostCopies(self.sampler.device)

        def make_part(places: Sequence[int]) -> _Made:
            part = {place: requests[place] for place in places}
            return self._make(part, [conditions[place] for place in places], version, should_stop, copies)

        made = [
            part
            for places in self._together(conditions)
            for part in self.fitting.make(self._kind(requests, conditions, places), places, make_part)
        ]
        copies.end()

        def answer() -> Answers:
            copies.wait()
            generated = {place: one for part in made for place, one in self._answers(part, started_s)}
            self._ended_s = time.time()
            return [refused[place] if place in refused else generated[place] for place in range(len(requests))]

        return answer

    def _together(self, conditions: dict[int, list[Condition]]) -> list[list[int]]:
        """Places of the samples of each forward: all, unless lengths of texts must be kept apart."""
        alike: dict[tuple[tuple[int, ...], ...], list[int]] = {}
        for place, known in conditions.items():
            lengths = tuple(map(self._model.text_lengths, known)) if self._model.keeps_lengths_apart else ()
            alike.setdefault(lengths, []).append(place)
        return list(alike.values())

    def _kind(
        self, requests: Sequence[SampleRequest], conditions: dict[int, list[Condition]], places: Sequence[int]
    ) -> Hashable:
        """Equal for batches whose samples take the same memory."""
        longest = max(len(condition["embeds"]) for place in places for condition in conditions[place])
        return requests[places[0]].sampling, -(-longest // TEXT_STEP)

    def _make(
        self,
        requests: Mapping[int, SampleRequest],
        conditions: Sequence[Sequence[Condition]],
        version: int,
        should_stop: Callable[[], bool] | None,
        copies: HostCopies,
    ) -> _Made:
        """Denoise and decode samples, by place, in one batch."""
        asked, device = list(requests.values()), self.sampler.device
        distinct = {id(condition): condition for of_sample in conditions for condition in of_sample}
        moved = {key: move_condition(condition, device) for key, condition in distinct.items()}
        positive, *negative = ([moved[id(one)] for one in branch] for branch in zip(*conditions, strict=True))
        denoised = self.sampler.denoise(
            asked, positive, negative[0] if negative else None, version=version, should_stop=should_stop
        )
        geometry = asked[0].sampling.geometry
        latents = self._model.completed(denoised.latents, positive)
        return _Made(
            list(requests),
            denoised.moved(copies.begin),
            Decoded(*map(copies.begin, in_batches(self.decoder.in_memory, latents, geometry, self._batch_size))),
            self.audio_decoder(latents, geometry),
            conditions,
            copies.begin(latents) if any(request.wants_latents for request in asked) else latents,
        )

    def _answers(self, made: _Made, started_s: float) -> list[tuple[int, Generation | ValueError]]:
        """(place, answer) of each sample; the tensors have arrived."""
        ended_s = time.time()
        began_s = min(max(started_s, self._ended_s), ended_s)  # batches follow one another on the device
        answers: list[tuple[int, Generation | ValueError]] = []
        for row, trajectory in enumerate(made.denoised.trajectories()):
            request, conditions = made.denoised.requests[row], made.conditions[row]
            is_finite, audio = made.pictures.is_finite[row], made.audio[row]
            error = not_finite(request, made.denoised.latents[row], trajectory.facts.version, is_finite, audio)
            answer = error or Generation(
                trajectory=with_experts(self._model, trajectory),
                pixels=made.pictures.pixels[row].clone(),  # a view would be sent with the whole batch
                audio=audio,
                started_s=began_s,
                ended_s=ended_s,
                **carried(request, conditions),
                latents=SampleLatents(made.decoded[row].clone(), conditions[0]) if request.wants_latents else None,
            )
            answers.append((made.places[row], answer))
        return answers

    # -- pictures of the data set -------------------------------------------------------------------------
    def _make_pictures(self, requests: Sequence[SampleRequest], version: int) -> Answers:
        """`make` for pictures of the data set (`SampleRequest.picture`). A picture or a prompt that cannot be read
        fails its own sample alone. Latents are a function of the picture and the size, in batches of any size, up to
        float error.

            file -> the run's size (`fitted`) -> VAE (mode of its posterior) -> clean latents, with a sample's noise
            levels
        """
        started_s = time.time()
        conditions, failed = conditions_by_place(self._look_up, requests)
        pixels: dict[int, Tensor] = {}
        for place in conditions:
            request = requests[place]
            assert request.picture is not None  # the batch is of pictures
            try:
                pixels[place] = fitted(request.picture.read(), request.sampling.geometry)
            except ValueError as error:
                failed[place] = error
        answers: dict[int, Generation | ValueError] = {**failed}
        for place, latents in zip(pixels, self._encode([*pixels.values()]) if pixels else (), strict=True):
            request, sampling = requests[place], requests[place].sampling
            trajectory = record_trajectory(
                request,
                seed=initial_seed(self.sampler.run_seed, request),
                versions=(version, version),
                path={},
                final=latents,
                sigmas=self._model.sigmas(sampling.num_steps, sampling.geometry),
                log_probs_T=torch.zeros(sampling.num_steps),
            )
            answers[place] = not_finite(request, latents, version, torch.tensor(True), None) or Generation(
                trajectory=with_experts(self._model, trajectory),
                pixels=pixels[place],
                started_s=started_s,
                ended_s=time.time(),
                **carried(request, conditions[place]),
            )
        return [answers[place] for place in range(len(requests))]

    @torch.no_grad()
    def _encode(self, pixels: Sequence[Tensor]) -> Tensor:
        """Latents [B, ...] on the CPU, at most `batch_size` pictures in the VAE at a time."""
        parts = torch.stack(list(pixels)).split(self._batch_size)
        return torch.cat([self.decoder.encode(part).to("cpu", self.sampler.latents_dtype) for part in parts])

# SPDX-License-Identifier: Apache-2.0
"""Generation on the trainer's ranks: the project's sampler over their own FSDP-sharded weights.

| who asks | when | prompts |
| --- | --- | --- |
| the planner (`digen.tag`) | while a logical batch is open | encoded by a replica |
| `actor_rollout_ref.rollout.name=trainer` | between batches; there is no other generator | encoded by the rank |

Every forward gathers weights from all ranks, so all ranks denoise the same number of batches, and all batches of a call
take the same number of forwards. A rank with fewer batches than others makes a padding sample and discards it.

Invariant (tests/engine/test_assistant.py): a sample equals what a replica with the same weights generates, to float
error; an open gradient is bitwise as before.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from verl.utils.device import get_device_name
from verl.utils.torch_dtypes import PrecisionType

from verl_digen.engine.engine import DiffusersFSDPEngine
from verl_digen.inputs.images import PromptInputs
from verl_digen.platforms import device_memory
from verl_digen.platforms.module_memory import DeviceMemory, name_on_node
from verl_digen.rollout.encoders import Conditions, Encoders, LookUp, conditions_by_place
from verl_digen.rollout.fitting import Fitting
from verl_digen.rollout.samples import SampleMaker
from verl_digen.sampling.branches import GuidanceBranches
from verl_digen.sampling.prefix import PrefixCache
from verl_digen.sampling.recording import Denoised
from verl_digen.sampling.sampler import Sampler
from verl_digen.store.conditions import ConditionPair
from verl_digen.types import Condition, Generation, SampleRequest


class Assistant:
    """Sampler over the engine's weights, and decoders of picture and sound, which a trainer does not have otherwise."""

    def __init__(self, engine: DiffusersFSDPEngine, *, decoder_dtype: torch.dtype):
        self._engine = engine
        device, rollout = engine.forward.device, engine.digen.rollout
        is_alone = dist.get_world_size() == 1  # and decides for itself how many forwards it takes
        self.decoder = engine.model.load_decoder(decoder_dtype, device)
        self.audio_decoder = engine.model.load_audio_decoder(decoder_dtype, device)
        self.fitting = Fitting(rollout.fits_batches and is_alone, device)
        self._sampler = _RankSampler(
            engine,
            # of several ranks `auto` is one forward: a tile of a row, both branches with gradients, fits
            GuidanceBranches(rollout.split_guidance if is_alone else rollout.split_guidance is True, device),
        )

    def generate(
        self, requests: Sequence[SampleRequest], look_up: LookUp, *, version: int
    ) -> list[tuple[int, Generation | ValueError]]:
        """Generate this rank's share of `requests` -> (place in `requests`, answer). All ranks call it with the same
        arguments, and with prompts for which `look_up` gives the same conditions. Of ranks that share rows the first
        answers."""
        rank, num_ranks = self._engine.get_data_parallel_rank(), self._engine.get_data_parallel_size()
        conditions, refused = conditions_by_place(look_up, requests)
        taken = [*conditions]
        kinds = [self._kind(requests[place], own) for place, own in conditions.items()]
        answers: list[tuple[int, Generation | ValueError]] = [*refused.items()] if rank == 0 else []
        maker = SampleMaker(
            self._sampler,
            look_up,
            self.decoder,
            self.audio_decoder,
            fitting=self.fitting,
            batch_size=self._engine.digen.rollout.decode_batch_size,
        )
        for batch in deal_samples(kinds, num_ranks)[rank] if taken else ():
            places = [taken[number] for number in batch]
            made = maker.make([requests[place] for place in places or taken[:1]], version)()
            answers += zip(places, made, strict=False)  # none of a padding sample
        return answers if self._engine.is_mp_src_rank_with_outputs() else []

    def forget_weights(self) -> None:
        """Drop what was made with the weights before an update."""
        self._sampler.prefixes.clear()

    def assist(
        self, requests: Sequence[SampleRequest], conditions: Mapping[str, ConditionPair], *, version: int
    ) -> list[Generation]:
        """Generate this rank's share of requests whose prompts are encoded, and stored, already.

        `conditions` holds each prompt's conditions by condition key; the negative one only with guidance. ValueError if
        latents, pixels or sound of a sample are not finite.
        """
        known: Conditions = {}
        for request in requests:
            given = [condition for condition in conditions[request.condition_key] if condition is not None]
            known |= zip(request.branches, given, strict=False)
        samples = []
        asked = [replace(request, wants_condition=False) for request in requests]
        for _, answer in self.generate(asked, lambda _: known, version=version):
            if isinstance(answer, ValueError):
                raise answer
            samples.append(answer)
        return samples

    def _kind(self, request: SampleRequest, conditions: Sequence[Condition]) -> Hashable:
        """Equal for samples that may share a forward."""
        model = self._engine.model
        return request.sampling, *(map(model.text_lengths, conditions) if model.keeps_lengths_apart else ())


class _RankSampler(Sampler):
    """A sampler over the engine's module, whose weights are gathered for one batch at a time."""

    def __init__(self, engine: DiffusersFSDPEngine, branches: GuidanceBranches):
        super().__init__(
            engine.model,
            engine.module,
            run_seed=engine.digen.seed,
            device=engine.forward.device,
            latents_dtype=PrecisionType.to_dtype(engine.digen.rollout.latents_dtype),
            branches=branches,
        )
        # where groups share steps, a call has one group (`groups_are_alike`): all ranks skip the same forwards
        self.prefixes: PrefixCache = PrefixCache()
        self._engine = engine

    def denoise(self, *args: Any, **kwargs: Any) -> Denoised:
        with self._engine.assisting():
            return super().denoise(*args, **kwargs)


def deal_samples(kinds: Sequence[Hashable], num_ranks: int) -> list[list[list[int]]]:
    """Batches of each rank: positions of its samples; a batch has samples of one kind. Numbers of samples differ by one
    at most. All ranks have as many batches; some may be empty.

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


class RankGenerator:
    """Generation where there is no replica: `actor_rollout_ref.rollout.name=trainer`.

    While the rank trains, encoders and decoders have no device memory. Encoders that wait on the host take the place of
    everything else on the device for the time of one encoding.
    """

    def __init__(self, engine: DiffusersFSDPEngine, dtype: torch.dtype):
        rollout, device, name = engine.digen.rollout, engine.forward.device, name_on_node()
        self._encoders = Encoders(engine.model, dtype, device, rollout, name)
        self.assistant = Assistant(engine, decoder_dtype=dtype)
        decoders = [*self.assistant.decoder.modules, *self.assistant.audio_decoder.modules]
        self._decoders = DeviceMemory(decoders, device, name and f"{name}-decoders")
        self._engine, self._frees_memory = engine, device.type != "cpu"
        self._encoders.alternate_with(self)

    def draw(
        self, requests: Sequence[SampleRequest], coming: Sequence[PromptInputs], version: int
    ) -> list[tuple[int, Generation | ValueError]]:
        """Generate this rank's share of `requests`, see `Assistant.generate`. The prompts of later requests, `coming`,
        are encoded in the same turn of encoders that wait on the host."""
        prompts = self._encoders.prompts
        if self._encoders.wait_on_host:
            prompts.prepare([inputs for request in requests for inputs in request.branches], coming)
        return self.assistant.generate(requests, prompts.lookup, version=version)

    def facts(self) -> dict[str, Any]:
        """State of the rank for its server: `prompt_cache`, and how many samples `fitted` together, None if unknown."""
        return {"prompt_cache": self._encoders.prompts.stats(), "fitted": self.assistant.fitting.size}

    def rest(self) -> None:
        """Free the device memory of encoders and decoders."""
        if self._frees_memory:
            self._decoders.release()
            self._encoders.sleep()
            device_memory.release_cached()

    def renew(self) -> None:
        """Allocate it again, for other weights than before."""
        self.assistant.forget_weights()
        if self._frees_memory:
            self._decoders.restore()
            self._encoders.wake()

    def release(self, *, changed: Callable[[], Iterable[Tensor]]) -> None:
        """Free the rank's device memory but for its encoders'; see `Encoders.alternate_with`."""
        self._decoders.release()
        self._engine.to("cpu", model=True, optimizer=True, grad=False)

    def restore(self) -> None:
        """Allocate and fill it again."""
        self._engine.to(get_device_name(), model=True, optimizer=True, grad=False)
        self._decoders.restore()

# SPDX-License-Identifier: Apache-2.0
"""Pipelines without step execution: the same samples as a `diffusers` replica's, before and after updates."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from tests.grid import IN_GRID, in_grid
from tests.models.cases import draw_image
from tests.sampling.runs import assert_bitwise
from tests.tiny_models import build_tiny
from tests.vllm_omni.compare import TOLERANCE, assert_same, by_diffusers
from tests.vllm_omni.conftest import (
    GUIDED,
    SAMPLING,
    Replica,
    adapter_weights,
    by_sampler,
    full_weights,
    request,
    start_replica,
)
from tests.vllm_omni.faults import EMPTY, LOST, assert_found, load_nothing, load_weights, register_empty_adapters
from verl_digen.algorithms.forward import NoiseLevels
from verl_digen.algorithms.window import Window
from verl_digen.inputs.images import PromptInputs, SourceImage
from verl_digen.inputs.sizes import IMAGE_SIZES
from verl_digen.models import load_model
from verl_digen.rollout.vllm_omni.requests import ORDER
from verl_digen.sampling.requests import ODE_ONLY, inputs_of
from verl_digen.types import Geometry, SampleRequest

pytestmark = pytest.mark.slow

NUM_REQUESTS = 6
VIDEO, SOUND = Geometry(64, 64, 5), Geometry(64, 64, 9)
IMAGE_PX = 64
FIRST_RANK = 10
"""First replica rank of this file; these ranks are unique in the tests."""


@dataclass(frozen=True)
class Case:
    """One tiny checkpoint."""

    name: str
    """Key in `verl_digen.models.tiny.BUILDERS`."""
    geometry: Geometry = SAMPLING.geometry
    guidance_scale: float | None = None
    ending: str = ""
    """Text appended to the second group's prompt."""
    image_sizes: str = "qwen_image_edit"
    """Rule of the sizes of images (`verl_digen.inputs.sizes`)."""
    num_images: int = 0
    """Images of a prompt."""
    is_mixed: bool = False
    """The second group's prompts have no images."""
    drawn_px: tuple[tuple[int, int], ...] = ((90, 40), (50, 70))
    """(width, height) of the images, as they lie in their files."""
    images: tuple[SourceImage, ...] = ()
    """Images of different shapes: the first group's prompts have the first of them, the second group's the last."""

    def __str__(self) -> str:
        return f"{self.name}, images" if self.num_images else self.name

    def requests(self, *, is_guided: bool) -> list[SampleRequest]:
        """Requests of two groups, with prompts of different lengths, and different windows and laws; the last one for
        forward points."""
        sampling = replace(GUIDED if is_guided else SAMPLING, geometry=self.geometry)
        if is_guided:
            sampling = replace(sampling, guidance_scale=self.guidance_scale)
        laws = ("flow", "cps")
        asked = [request(number, replace(sampling, law=laws[number % 2])) for number in range(NUM_REQUESTS)]
        asked[-1] = replace(asked[-1], window=ODE_ONLY, noise_levels=NoiseLevels((0, 2, 5)))
        return [
            self.with_images(one, () if self.is_mixed else self.images[::-1][: self.num_images], self.ending)
            if one.uid == "p1"
            else self.with_images(one, self.images[: self.num_images])
            for one in asked
        ]

    def with_images(self, asked: SampleRequest, images: tuple[SourceImage, ...], ending: str = "") -> SampleRequest:
        read = IMAGE_SIZES[self.image_sizes].read
        made = (self.geometry.height_px, self.geometry.width_px)
        sources = tuple(
            made if read is None or self.geometry.num_frames > 1 else read(image.width_px, image.height_px, IMAGE_PX**2)
            for image in images
        )
        return replace(
            asked,
            inputs=inputs_of(asked.inputs.text + ending, images, self.geometry, IMAGE_PX),
            negative_inputs=inputs_of(asked.negative_inputs.text, images, self.geometry, IMAGE_PX),
            sampling=replace(asked.sampling, geometry=replace(self.geometry, sources=sources)),
        )

    def drawn(self, folder: Path) -> Case:
        """The case with its images, written to `folder`."""
        sizes = self.drawn_px
        return replace(
            self, images=tuple(draw_image(folder / f"{number}.png", size, number) for number, size in enumerate(sizes))
        )


CASES = (
    Case("sd3"),
    Case("flux_dev", guidance_scale=2.0),
    Case("z_image"),
    Case("wan2.1", VIDEO),
    Case("wan2.2_a14b", VIDEO),
    Case("wan2.1_i2v", VIDEO, num_images=1),
    Case("wan2.2_i2v_a14b", VIDEO, num_images=1),
    Case("wan2.2_ti2v_5b", VIDEO, num_images=1, is_mixed=True),
    Case("hunyuan_video15", VIDEO, ending=' that says "red" and “2”'),
    Case("hunyuan_video15_i2v", VIDEO, ending=' that says "red" and “2”', num_images=1),
    Case("ltx2", SOUND),
    Case("qwen_image_edit_plus", num_images=2),
    Case("flux_kontext", guidance_scale=2.0, image_sizes="flux_kontext", num_images=1, is_mixed=True),
    Case("flux2_klein", image_sizes="flux2", num_images=2, drawn_px=((90, 70), (64, 100))),
)
JOINED = CASES[-2:]
"""Pipelines of one request at a time, of which a batch is one request."""
NOT_REFINER = "actor_rollout_ref.model.exclude_modules='.*refiner_blocks.*'"
ADAPTED = (
    (Case("qwen_image_edit", num_images=1), ()),
    (JOINED[0], ()),
    (JOINED[1], ()),
    (Case("wan2.1_i2v", VIDEO, num_images=1), ()),
    (Case("wan2.2_i2v_a14b", VIDEO, num_images=1), ()),
    (Case("wan2.2_ti2v_5b_i2v", VIDEO, num_images=1), ()),
    (Case("hunyuan_video15_i2v", VIDEO, num_images=1), (NOT_REFINER,)),
    (Case("ltx2", SOUND), ()),
)
"""Checkpoints, and overrides with which vLLM-Omni binds an adapter to all layers that LoRA wraps."""
NOT_READ_BY_DIFFUSERS = {"text_encoder_out_layers": [1, 2, 3]}
"""Entries of a text encoder's config."""


SERVED_IN_CI = {"sd3", "wan2.2_a14b", "ltx2", "flux2_klein"}
"""A picture, two networks, sound, and two images in a batch that is one request."""
ADAPTED_IN_CI = {"flux_kontext", "wan2.1_i2v"}


def in_ci(names: Collection[str], case: Case) -> Collection[pytest.MarkDecorator]:
    """Marks of a case: CI has those of `names`."""
    return [] if case.name in names else IN_GRID


@pytest.fixture(
    scope="module", params=[pytest.param(case, id=case.name, marks=in_ci(SERVED_IN_CI, case)) for case in CASES]
)
def served(request, ray_here, tmp_path_factory) -> Iterator[tuple[Case, Replica]]:
    """A replica per checkpoint, one at a time; updates carry full weights."""
    case: Case = request.param
    path = build_tiny(case.name, tmp_path_factory.mktemp(case.name))
    replica = start_replica(path, FIRST_RANK + CASES.index(case))
    yield case.drawn(path), replica
    ray.kill(replica.server)


@pytest.mark.parametrize("is_guided", [False, True], ids=["plain", "guided"])
def test_a_batch_gives_the_samples_of_the_diffusers_replica(served, is_guided):
    case, replica = served
    requests = case.requests(is_guided=is_guided)
    got = replica.generate(requests)
    for sample, expected in zip(got, by_diffusers(replica.path, requests), strict=True):
        assert_same(sample, expected)
    alone = replica.generate(requests[:1])
    torch.testing.assert_close(
        alone[0].trajectory.record.latents, got[0].trajectory.record.latents, atol=TOLERANCE, rtol=0
    )


@pytest.mark.parametrize("served", [JOINED[1], *in_grid(JOINED[:1])], indirect=True, ids=str)
def test_requests_with_the_same_images_run_as_one_and_others_wait(served):
    """The most images that the model takes, and none."""
    case, replica = served
    most = load_model(replica.path).spec.num_images[1]
    requests = [
        case.with_images(asked, (case.images * most)[:most] if asked.uid == "p0" else ())
        for asked in case.requests(is_guided=True)
    ]
    expected = by_diffusers(replica.path, requests)
    ray.get(replica.server.__ray_call__.remote(note_batches))
    for sample, wanted in zip(replica.generate(requests), expected, strict=True):
        assert_same(sample, wanted)
    batches = ray.get(replica.server.__ray_call__.remote(lambda server: server.batches))
    assert sorted(sources for batch in batches for sources in batch) == sorted(
        asked.sampling.geometry.sources for asked in requests
    )
    assert all(len(set(batch)) == 1 for batch in batches) and max(map(len, batches)) > 1


def note_batches(server: Any) -> None:
    """Keep the sizes of images of each request, batch by batch, in `server.batches`."""
    from verl_digen.rollout.vllm_omni.edit_pipelines import ReadsSources

    server.batches, run = [], ReadsSources.forward_recorded

    def forward_recorded(self: Any, requests: Any, **arguments: Any) -> Any:
        server.batches.append(
            [one.sampling_params.extra_args[ORDER].request.sampling.geometry.sources for one in requests]
        )
        return run(self, requests, **arguments)

    ReadsSources.forward_recorded = forward_recorded


def test_a_group_runs_the_steps_before_its_window_once(served):
    """Alone a sample is bitwise the one that runs every step; in a batch, at its window's start."""
    case, replica = served
    starts = {"p0": 3, "p1": 2}
    requests = [
        replace(
            asked,
            sampling=replace(asked.sampling, shared_initial_noise=True, law="flow"),
            window=Window((starts[asked.uid],), (starts[asked.uid],)),
            noise_levels=None,
        )
        for asked in case.requests(is_guided=True)
    ]
    alone = []
    for asked in requests[:2]:
        replica.update(full_weights(replica.path, 0).items(), 0).result()  # which forgets what was kept
        alone += replica.generate([asked])
    replica.update(full_weights(replica.path, 0).items(), 0).result()
    later = [replica.generate([asked])[0] for asked in requests[:2]]
    replica.update(full_weights(replica.path, 0).items(), 0).result()
    together = replica.generate(requests)
    assert [got.trajectory.facts.num_shared_steps for got in (*alone, *later)] == [0, 0, 0, 3]
    assert sum(got.trajectory.facts.num_shared_steps for got in together) == 2 * 3 + 2 * 2
    for got, expected in zip(later, alone, strict=True):
        assert torch.equal(got.pixels, expected.pixels)
        assert_bitwise(got.trajectory, expected.trajectory)
    for got, expected in zip(together, alone, strict=False):
        assert torch.equal(got.trajectory.record.latents[0], expected.trajectory.record.latents[0])
    for got, expected in zip(together, by_diffusers(replica.path, requests), strict=True):
        assert_same(got, expected)


def test_updates_come_between_trajectories_and_with_every_weight(served):
    case, replica = served
    requests = case.requests(is_guided=False)
    network = load_model(replica.path).load_transformer(torch.float32)
    versions = set()
    for version in (1, 2):
        under_way = [replica.submit(asked) for asked in requests]
        replica.update(full_weights(replica.path, version).items(), version).result()
        for asked, got in zip(requests * 2, [*ray.get(under_way), *replica.generate(requests)], strict=True):
            found = got.trajectory
            assert found.facts.version == found.facts.last_version
            versions.add(found.facts.version)
            if asked.sample_index == 0:
                network.load_state_dict(full_weights(replica.path, found.facts.version))
                expected = by_sampler(replica.path, network, asked, found.facts.version)
                torch.testing.assert_close(found.record.latents, expected.record.latents, atol=TOLERANCE, rtol=0)
    assert {1, 2} <= versions
    assert_found(replica, load_weights, load_nothing, LOST)
    replica.update(full_weights(replica.path, 0).items(), 0).result()


@pytest.mark.grid
@pytest.mark.parametrize("case", [*CASES[:2], *JOINED], ids=str)
def test_a_replica_in_bf16_decodes_in_fp32_where_the_authors_do(ray_here, tmp_path, case):
    path = build_tiny(case.name, tmp_path / "checkpoint")
    rank = FIRST_RANK + len(CASES) + 2 + len(ADAPTED) + CASES.index(case)
    replica = start_replica(path, rank, "actor_rollout_ref.rollout.dtype=bfloat16")
    case = case.drawn(tmp_path)
    (got,) = replica.generate([case.with_images(case.requests(is_guided=False)[-1], case.images[: case.num_images])])
    ray.kill(replica.server)
    decode = load_model(path).load_decoder(torch.float32, torch.device("cpu"))
    clean = got.trajectory.record.clean[None]
    # the pipeline may round the latents on their way to the VAE
    gaps = [(got.pixels.int() - decode(x, case.geometry)[0].int()).abs().max() for x in (clean, clean.bfloat16())]
    assert min(gaps) <= 2  # bf16 kernels differ from CPU to CPU, and so do the latents


@pytest.fixture(scope="module")
def adapted(ray_here, tmp_path_factory) -> Iterator[Replica]:
    """A replica whose updates carry a LoRA adapter."""
    path = build_tiny("sd3", tmp_path_factory.mktemp("sd3"))
    replica = start_replica(path, FIRST_RANK + len(CASES), "actor_rollout_ref.model.lora_rank=4")
    yield replica
    ray.kill(replica.server)


def test_a_trajectory_has_the_adapter_it_was_asked_for(adapted):
    requests = CASES[0].requests(is_guided=True)
    under_way = []
    for version in (1, 2):
        adapted.update(adapter_weights(adapted, version)[1].items(), version).result()
        under_way += [(version, asked, adapted.submit(asked)) for asked in requests]
    for version, asked, answer in under_way:
        found = ray.get(answer).trajectory
        assert (found.facts.version, found.facts.last_version) == (version, version)
        if asked.sample_index == 0:
            expected = by_sampler(adapted.path, adapter_weights(adapted, version)[0], asked, version)
            torch.testing.assert_close(found.record.latents, expected.record.latents, atol=TOLERANCE, rtol=0)
    assert_found(adapted, adapter_weights, register_empty_adapters, EMPTY)


@pytest.mark.parametrize(
    "number",
    [pytest.param(number, id=case.name, marks=in_ci(ADAPTED_IN_CI, case)) for number, (case, _) in enumerate(ADAPTED)],
)
def test_a_sample_with_an_adapter_is_encoded_once_and_fails_alone_without_its_image(ray_here, tmp_path, number):
    case, overrides = ADAPTED[number]
    path = build_tiny(case.name, tmp_path / "checkpoint")
    encoder = path / "text_encoder" / "config.json"
    encoder.write_text(json.dumps({**json.loads(encoder.read_text()), **NOT_READ_BY_DIFFUSERS}))
    rank = FIRST_RANK + len(CASES) + 2 + number
    replica = start_replica(path, rank, "actor_rollout_ref.model.lora_rank=4", *overrides)
    network, tensors = adapter_weights(replica, 1)
    replica.update(tensors.items(), 1).result()
    *asked, third = case.drawn(tmp_path).requests(is_guided=False)[:3]
    before = replica.health()["prompt_cache"]
    for one, got in zip(asked, replica.generate(asked), strict=True):
        expected = by_sampler(path, network, one, 1)
        for name in ("latents", "log_probs"):
            ours, theirs = got.trajectory.record.columns()[name], expected.record.columns()[name]
            torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=TOLERANCE)
        if one.wants_condition:
            (condition,) = load_model(path).load_encoder(torch.float32, torch.device("cpu"))([one.inputs])
            torch.testing.assert_close(got.condition, condition, atol=TOLERANCE, rtol=0)
    after = replica.health()["prompt_cache"]
    assert after["misses"] - before["misses"] == after["hits"] - before["hits"] == 1
    for image in third.inputs.images:
        lost = replace(image, reference=str(tmp_path / "lost.png"))
        with pytest.raises(Exception, match=r"lost\.png"):
            replica.generate([replace(third, inputs=replace(third.inputs, images=(lost,)))])
    assert len(replica.generate([third])) == 1
    ray.kill(replica.server)


def test_the_trainer_need_not_wait_for_a_batch_and_an_abort_loses_one_sample_of_it(adapted):
    adapted.update(adapter_weights(adapted, 3)[1].items(), 3).result()
    first, second = (
        replace(asked, sampling=replace(asked.sampling, num_steps=400))
        for asked in CASES[0].requests(is_guided=False)[:2]
    )
    under_way = [adapted.submit(first), adapted.submit(second)]
    while adapted.health()["num_running"] < 2:
        assert not ray.wait(under_way, timeout=0)[0], "one finished before both had begun"
    condition, _ = ray.get(
        adapted.server.encode.remote(replace(first, inputs=PromptInputs("a prompt that was not asked for yet")))
    )
    assert condition["embeds"].isfinite().all()
    ray.get(adapted.server.abort_request.remote(f"{first.uid}_{first.sample_index}"))
    assert not ray.wait(under_way[1:], timeout=0)[0], "the batch is not under way any more"
    with pytest.raises(Exception, match="was aborted"):
        ray.get(under_way[0], timeout=60)
    assert ray.get(under_way[1], timeout=60).trajectory.facts.sample_index == second.sample_index

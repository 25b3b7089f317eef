# SPDX-License-Identifier: Apache-2.0
"""Episodes of an agent loop worker, in this process: turns, pictures that are edited, records, and tags."""

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.agent_loop.worker import make_worker
from tests.environments.local import Replica, connect
from tests.environments.worlds import Brighter, Editor
from tests.tags import changed
from verl_digen.agent_loop.episode import EnvironmentAgentLoop, Episode, joined
from verl_digen.agent_loop.manager import ScoredSample
from verl_digen.algorithms.window import WindowConfig
from verl_digen.config import DigenConfig, EnvironmentConfig, SamplingConfig
from verl_digen.data.rows import loop_columns
from verl_digen.engine.fragment import FragmentSample, fragment_rows
from verl_digen.engine.rows import ForwardPoints, PathPoints
from verl_digen.environments.episodes import EpisodeFailed
from verl_digen.store.samples import from_entry, to_entry
from verl_digen.trainer.updates import fragment_samples
from verl_digen.types import CleanRecord, PathRecord, PromptRow, Score

ROW = PromptRow("a cat", "test", None, uid="p00000007")
WORLDS = "tests.environments.worlds"


def make_digen(world: str = "Brighter", loss: str = "flow_grpo", **environment: Any) -> DigenConfig:
    return DigenConfig(
        sampling=SamplingConfig(height_px=64, width_px=64, num_steps=6),
        window=WindowConfig(size=2),
        loss={"name": loss},
        environment=EnvironmentConfig(path=f"{WORLDS}.{world}", **environment),
    )


def play(digen: DigenConfig, *indices: int, row: PromptRow = ROW, validate: bool = False) -> tuple[list[Any], Replica]:
    """Play episodes of a group -> the episodes, and the replica that served them."""
    replica, (workers, _) = Replica(digen), connect(digen.environment)
    edits = {"Editor": True}.get(str(digen.environment.path).rpartition(".")[2], False)
    loop = EnvironmentAgentLoop(replica, workers, edits=edits)  # type: ignore[arg-type]

    async def run() -> list[Any]:
        columns = {**loop_columns(row), "global_steps": 4}
        return await asyncio.gather(
            *(loop.run({"validate": validate}, session_id=index, **columns) for index in indices)
        )

    return asyncio.run(run()), replica


def records(episode: Episode) -> list[Any]:
    return [turn.generation.trajectory.record for turn in episode.played]


def long_one(digen: DigenConfig) -> Episode:
    """The first episode of several turns."""
    episodes, _ = play(digen, *range(8))
    return next(episode for episode in episodes if len(episode.played) > 1)


def test_episodes_of_a_group_have_turns_of_their_own_and_noise_differs_in_each():
    episodes, replica = play(make_digen(), *range(8))
    assert {len(episode.played) for episode in episodes} > {1, 2}
    for index, episode in enumerate(episodes):
        own = [request for request in replica.requests if request.sample_index == index]
        assert [request.turn for request in own] == list(range(len(episode.played)))
        assert own[0].inputs.text == "a cat" and all(" brighter than " in one.inputs.text for one in own[1:])
        assert all(request.wants_condition and request.window == own[0].window for request in own)
    seeds = [turn.generation.trajectory.facts.seed for episode in episodes for turn in episode.played]
    assert len({*seeds}) == len(seeds), "no two turns of the group share noise"
    again, _ = play(make_digen(), *range(8))
    for one, other in zip(episodes, again, strict=True):
        assert one.facts.turns == tuple(
            replace(turn, environment_s=own.environment_s)
            for turn, own in zip(other.facts.turns, one.facts.turns, strict=True)
        )


def test_an_episode_ends_at_the_maximum_of_turns_and_is_counted():
    episodes, _ = play(make_digen(max_turns=2), *range(12))
    assert {(len(one.played), one.facts.is_exceeded) for one in episodes} == {(1, False), (2, False), (2, True)}


def test_validation_draws_without_noise_and_carries_no_condition():
    episodes, replica = play(make_digen(), 0, 1, validate=True)
    assert not any(request.wants_condition or request.window.train_steps for request in replica.requests)
    assert all(not episode.conditions for episode in episodes)


def test_a_turn_edits_the_picture_of_the_last_one_and_the_first_one_the_rows(tmp_path):
    path = tmp_path / "source.png"
    Image.new("RGB", (96, 64), "red").save(path)
    episodes, replica = play(make_digen("Editor"), *range(4), row=replace(ROW, images=(str(path),)))
    assert max(len(episode.played) for episode in episodes) > 1
    for request in replica.requests:
        (image,) = request.inputs.images
        if request.turn == 0:
            assert image.reference == str(path) and image.content is None
            continue
        before = episodes[request.sample_index].played[request.turn - 1].generation.pixels.numpy()
        assert np.array_equal(np.asarray(image.read()), before), "the request carries the picture, lossless"
        assert (image.width_px, image.height_px) == (8, 8) and len(request.sampling.geometry.sources) == 1
    assert Editor.edits and not Brighter.edits


@pytest.mark.parametrize("loss", ["flow_grpo", "diffusion_nft"])
def test_the_points_of_the_joined_record_are_bitwise_those_of_the_turns(loss):
    digen = make_digen(loss=loss)
    episode = long_one(digen)
    trajectory, facts = episode.generation.trajectory, episode.facts
    columns = {name: [tensor] for name, tensor in trajectory.record.columns().items()}
    sample = FragmentSample("k", trajectory.facts, 0.0, turns=facts.turns)
    points = PathPoints() if loss == "flow_grpo" else ForwardPoints(digen.seed)
    latents, sigmas, made = points.make([sample], columns, [(0, sample.points)])
    turns = records(episode)
    assert torch.equal(sigmas, torch.cat([record.sigmas for record in turns]))
    owners = [number for number, record in enumerate(turns) for _ in record.sigmas]
    assert [sample.turn_of(point) for point in sample.points] == owners
    if isinstance(turns[0], PathRecord):
        starts = [record.latents[position] for record in turns for position in record.positions]
        ends = [record.latents[position + 1] for record in turns for position in record.positions]
        assert torch.equal(latents, torch.cat([one[None] for one in starts]))
        assert torch.equal(made.next_latents, torch.stack(ends))
        assert torch.equal(made.sigma_max, torch.stack([turns[number].sigma_max for number in owners]))
        assert torch.equal(made.log_probs, torch.cat([record.log_probs for record in turns]))
    else:
        assert torch.equal(made.clean, torch.stack([turns[number].clean for number in owners]))
        assert len({tuple(noise.flatten().tolist()) for noise in made.noise}) == len(owners), "noise of each point"


def test_turns_of_two_sizes_are_refused_and_of_two_versions_the_last_is_kept_for_who_refuses_them():
    turns = [turn.generation.trajectory for turn in long_one(make_digen()).played]
    facts = joined([turns[0], changed(turns[1], last_version=4)]).facts
    assert (facts.version, facts.last_version) == (3, 4)
    wide = replace(turns[1].record, latents=torch.zeros(3, 2, 4))
    with pytest.raises(RuntimeError, match="size_from_image=false"):
        joined([turns[0], replace(turns[1], record=wide)])
    assert isinstance(turns[0].record, PathRecord) and not isinstance(turns[0].record, CleanRecord)


class Rewards:
    """Scores the last picture with 0.25."""

    async def score(self, sample: Any, *, version: int, group_size: int) -> Any:
        assert sample.row.text == "a cat", "reward functions see the prompt, not the last instruction"
        return Score(0.25, {"jpeg": 0.25}, ()), (3.0, 4.0)


def scored(episode: Episode) -> ScoredSample:
    worker = make_worker(digen=make_digen(), _rewards=Rewards())
    return asyncio.run(worker._finish(episode, ROW, 4, validate=False))


def test_the_tag_tells_the_turns_and_the_reward_is_the_sum_of_theirs_and_the_functions():
    episode = long_one(make_digen())
    sample = scored(episode)
    rewards = [turn.result.reward for turn in episode.played]
    assert sample.tag.reward == pytest.approx(sum(rewards) + 0.25) and sample.tag.parts["jpeg"] == 0.25
    assert sample.tag.parts["environment"] == pytest.approx(sum(rewards))
    assert sample.tag.parts["environment/light"] == episode.played[-1].result.details["light"]
    assert {*sample.conditions} == {*sample.tag.turn_keys} and len(sample.conditions) == len(episode.played)
    assert all(key.startswith(f"{ROW.uid}-") for key in sample.tag.turn_keys), "cleared with the group"
    assert from_entry(to_entry(sample.tag, 4)) == sample.tag


def test_a_fragment_has_a_row_for_each_point_of_each_turn_and_buckets_tell_their_settings_apart():
    tag = scored(long_one(make_digen())).tag
    first, *later = tag.episode.turns
    wide = replace(first.sampling, geometry=replace(first.sampling.geometry, sources=((8, 8),)))
    mixed = replace(tag, episode=replace(tag.episode, turns=(first, *(replace(turn, sampling=wide) for turn in later))))
    samples = fragment_samples({"g": {0: tag, 1: mixed}}, lambda rewards: range(len(rewards)))
    rows = fragment_rows(samples)
    assert len(rows) == 2 * tag.facts.num_steps
    buckets = [[row.bucket for row in rows if row.sample == number] for number in range(2)]
    assert {*buckets[0]} == {0} and buckets[1] == [0] * first.num_steps + [1] * (tag.facts.num_steps - first.num_steps)


def test_an_environment_that_keeps_failing_fails_its_episode_with_its_reason():
    with pytest.raises(EpisodeFailed, match=r"failed 2 times at turn 0, .*max_retries=1 .*the simulator is down"):
        play(make_digen("Faulty", max_retries=1), 0)

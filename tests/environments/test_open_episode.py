# SPDX-License-Identifier: Apache-2.0
"""Environment workers that die: as real Ray actors, and in this process at chosen moments."""

import asyncio
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from tests.environments import worlds
from tests.environments.local import connect
from tests.environments.worlds import Mortal
from tests.local_ray import local_ray
from verl_digen.config import EnvironmentConfig, digen_config
from verl_digen.environments.built_in import environment_class, environment_settings
from verl_digen.environments.episodes import (
    EpisodeDiverged,
    EpisodeHost,
    OpenEpisode,
    environment_pool,
    start_environments,
)
from verl_digen.processes.deadlines import DeadlinesConfig
from verl_digen.processes.workers import WorkerPool
from verl_digen.types import PromptRow

ROW = PromptRow("a cat", "test", None, uid="p00000007")
WORLDS = "tests.environments.worlds"


def opened(workers: WorkerPool, name: str = "e", max_retries: int = 2) -> OpenEpisode:
    return OpenEpisode(workers, name, ROW, 5, max_retries=max_retries)


def picture(number: int) -> Any:
    return np.full((2, 2, 3), number, dtype=np.uint8)


async def play(episode: OpenEpisode, first: int) -> tuple[list[float], list[str]]:
    """Rewards and instructions of an episode with pictures `first`, `first` + 1, ..."""
    rewards, asked = [], [(await episode.reset()).text]
    for turn in range(10):
        result = await episode.step(picture(first + turn))
        rewards.append(result.reward)
        if result.done:
            break
        assert result.instruction is not None
        asked.append(result.instruction.text)
    episode.close()
    return rewards, asked


@pytest.fixture(scope="module")
def ray_here() -> Iterator[None]:
    with local_ray(num_cpus=4):
        yield


@pytest.mark.slow
async def test_a_killed_worker_loses_no_episode(ray_here, tmp_path):
    config = EnvironmentConfig(path=f"{WORLDS}.{Mortal.__name__}", options={"folder": str(tmp_path)}, num_workers=2)
    run = OmegaConf.create({"digen": {"environment": asdict(config)}})
    handles = start_environments(run, digen_config(run))
    workers = environment_pool(handles, DeadlinesConfig())
    episodes = [opened(workers, f"e{number}") for number in range(8)]
    played = await asyncio.gather(*(play(episode, 10 * number) for number, episode in enumerate(episodes)))
    for number, (rewards, asked) in enumerate(played):
        assert rewards == [1.0, 2.0, 3.0], "the turns go on where they were"
        sums = [12 * (10 * number + turn) for turn in range(2)]
        assert asked == ["a cat 5", f"after {sums[:1]}", f"after {sums}"], "each environment saw its own pictures"
    assert (tmp_path / "died").exists() and sum(episode.num_retries for episode in episodes) >= 1


async def test_an_episode_whose_environment_then_asks_for_something_else_starts_afresh():
    workers, (worker,) = connect(EnvironmentConfig(path=f"{WORLDS}.Fickle"))
    episode = opened(workers)
    assert (await episode.reset()).text == "made 1"
    await episode.step(picture(1))
    worker.restart()
    with pytest.raises(EpisodeDiverged):
        await episode.step(picture(2))
    episode.close()
    episode.forget()
    calls, used = worker.num_calls, episode._id
    assert (await episode.reset()).text == "made 3" and episode.num_retries == 1
    assert episode._id != used, "a late call for the one before reaches none"
    assert worker.num_calls == calls + 1, "the pictures of the forgotten turns are given to no one"


async def test_a_restarted_worker_gets_the_pictures_again_and_the_episodes_go_to_the_one_with_the_fewest():
    config = EnvironmentConfig(path=f"{WORLDS}.Brighter", options={"max_turns": 5})
    workers, handles = connect(config, num_workers=2)
    episodes = [opened(workers, f"e{number}") for number in range(4)]
    for episode in episodes:
        await episode.reset()
    assert [len(handle.host._episodes) for handle in handles] == [2, 2]
    before = await episodes[0].step(picture(1))
    episodes[0]._worker.restart()
    after = await episodes[0].step(picture(2))
    assert episodes[0].num_retries == 1 and (before.done, after.reward) == (False, 2 / 255)
    for episode in episodes:
        episode.close()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not any(handle.host._episodes for handle in handles), "closed environments are forgotten"


def test_the_documented_environment_can_be_played(tmp_path):
    """Play the class of docs/environments.md, from a file of its own."""
    page = (Path(__file__).parents[2] / "docs" / "environments.md").read_text()
    (tmp_path / "mine.py").write_text(page.split("```python\n")[1].split("```")[0])
    workers, _ = connect(EnvironmentConfig(path=f"{tmp_path / 'mine.py'}:Brighter"))
    rewards, asked = asyncio.run(play(opened(workers), 126))
    assert rewards == [126 / 255, 127 / 255, 128 / 255] and asked == ["a cat", *["make it brighter"] * 2]


def test_a_step_may_be_synchronous():
    workers, _ = connect(EnvironmentConfig(path=f"{WORLDS}.Sync", max_retries=0))
    assert asyncio.run(play(opened(workers), 3)) == ([3.0], ["a cat"])


def test_a_step_that_takes_too_long_counts_as_failed():
    config = EnvironmentConfig(
        path=f"{WORLDS}.Brighter", options={"latency_s": 60.0}, step_timeout_s=0.01, max_retries=0
    )
    workers, _ = connect(config)

    async def run() -> None:
        episode = opened(workers, max_retries=config.max_retries)
        await episode.reset()
        await episode.step(picture(1))

    with pytest.raises(
        RuntimeError, match=r"failed 1 times .*took longer than digen.environment.step_timeout_s=0.01 s"
    ):
        asyncio.run(run())


async def test_no_more_calls_run_at_once_than_there_are_places():
    host = EpisodeHost(EnvironmentConfig(path=f"{WORLDS}.Sync", concurrent=2), torch.device("cpu"))
    running, most, both = 0, 0, asyncio.Event()

    async def call() -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        if running == 2:
            both.set()
        await both.wait()
        await asyncio.sleep(0.05)
        running -= 1

    await asyncio.gather(*(host._run(call) for _ in range(5)))
    assert most == 2


async def test_an_environment_that_cannot_be_closed_costs_a_warning_and_a_malformed_answer_the_turn(caplog):
    host = EpisodeHost(EnvironmentConfig(path=f"{WORLDS}.Wrong"), torch.device("cpu"))
    await host.begin("e", ROW, 5)
    for light, told in ((1, "a finite reward, got TurnResult.reward=nan"), (2, "an Instruction of a text, got None")):
        with pytest.raises(TypeError, match=f"Wrong.* must .*{told}"):
            await host.step("e", picture(light))
    await host.end("e")
    assert caplog.messages == ["closing the environment of episode e failed"]


@pytest.mark.parametrize("method", ["__init__", "reset", "step"])
async def test_an_environment_that_exits_fails_its_episode_and_not_the_process(monkeypatch, method):
    def leave(*arguments: Any) -> None:
        raise SystemExit("no key")

    monkeypatch.setattr(worlds.Brighter, method, leave)
    host = EpisodeHost(EnvironmentConfig(path=f"{WORLDS}.Brighter"), torch.device("cpu"))
    with pytest.raises(RuntimeError, match="it raised SystemExit: no key"):
        await host.begin("e", ROW, 5)
        await host.step("e", picture(1))


def test_a_class_of_a_file_is_loaded_once(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(Path(worlds.__file__).read_text())
    config = EnvironmentConfig(path=f"{path}:Brighter", options={"max_turns": 7})
    found = environment_class(config)
    assert found is environment_class(config) is not worlds.Brighter
    assert environment_settings(config, found).max_turns == 7
    path.with_name("broken.py").write_text("1 / 0")
    with pytest.raises(ValueError, match=r"can be loaded, got '.*broken.py:X' \(ZeroDivisionError"):
        environment_class(EnvironmentConfig(path=f"{path.with_name('broken.py')}:X"))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"name": "nonesuch"}, "digen.environment.name must be one of"),
        ({"path": "nonesuch"}, "digen.environment.path must name FILE.py:NAME or package.module.NAME, got 'nonesuch'"),
        ({"path": f"{WORLDS}.Nothing"}, f"must name what can be loaded, got '{WORLDS}.Nothing' (AttributeError"),
        ({"path": f"{WORLDS}.BrighterConfig"}, "must be a class of verl_digen.environments.base.Environment, got"),
        (
            {"path": f"{WORLDS}.Brighter", "options": {"max_turn": 3}},
            "digen.environment.options.max_turn must be a setting of Brighter (max_turns, latency_s), got 3; did you "
            "mean max_turns?",
        ),
        ({"path": f"{WORLDS}.Brighter", "options": {"latency_s": "long"}}, "options.latency_s must have a value"),
        ({"path": f"{WORLDS}.Stepless"}, "digen.environment.path must be a class of Environment with step(self, pict"),
        (
            {"path": f"{WORLDS}.Sharing"},
            "make_shared(config, device), got 'Sharing' (TypeError: it is not decorated with",
        ),
        ({"path": f"{WORLDS}.Seedless"}, "with reset(self, row, seed), got 'Seedless' (TypeError: too many positional"),
    ],
)
def test_an_environment_that_cannot_be_made_is_refused_with_the_reason(given, message):
    config = EnvironmentConfig(**given)
    with pytest.raises(ValueError) as told:
        environment_settings(config, environment_class(config))
    assert message in str(told.value)

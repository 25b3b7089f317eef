# SPDX-License-Identifier: Apache-2.0
"""Episodes: the agent loop of an environment, and an episode as one sample: its turns' trajectories as one record, and
what its environment said.

    reset --> instruction --> request --> replica --> picture --> step --> instruction ...     until the episode ends

While an episode waits for its environment it has no request on a replica, which generates for other episodes.

Its K points are its turns' points, one after the other. So rewards, advantages, selection and scheduling see a sample,
and the engine finds the settings and conditions of a point by its turn.

Invariants (tests/agent_loop/test_episodes.py): noise differs in every turn; an episode that is played again from equal
answers is the same; at most `digen.environment.max_turns` pictures; the points of the record bitwise equal the turns'.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from verl.experimental.agent_loop.agent_loop import AgentLoopBase

from verl_digen.agent_loop.server_manager import DiffusionServerClient, ReplicaClient
from verl_digen.algorithms.noise import keyed_seed
from verl_digen.data.rows import loop_row
from verl_digen.environments.base import PREVIOUS, Instruction, TurnResult
from verl_digen.environments.episodes import EpisodeDiverged, EpisodeFailed, OpenEpisode
from verl_digen.inputs.images import SourceImage, generated_image, source_image
from verl_digen.processes.workers import WorkerPool
from verl_digen.sampling.requests import turn_request
from verl_digen.store.conditions import ConditionPair
from verl_digen.store.keys import own_condition_key
from verl_digen.types import CleanRecord, Generation, PathRecord, PromptRow, SampleFacts, Score, Trajectory
from verl_digen.types.settings import EpisodeFacts, Turn

logger = logging.getLogger(__name__)

ENVIRONMENT = "environment"
"""Part of a sample's reward that its environment gave."""


@dataclass(frozen=True)
class PlayedTurn:
    """One turn: a generation, and the environment's answer to it."""

    generation: Generation
    result: TurnResult
    environment_s: float


@dataclass(frozen=True)
class Episode:
    """A finished episode. Made by the environment's agent loop."""

    played: tuple[PlayedTurn, ...]
    """At least one."""
    num_retries: int

    @property
    def generation(self) -> Generation:
        """All turns as one generation, with the last one's picture and latents, without conditions. Raises as
        `joined`."""
        turns = [turn.generation for turn in self.played]
        return replace(
            turns[-1],
            trajectory=joined([turn.trajectory for turn in turns]),
            started_s=turns[0].started_s,
            condition=None,
            negative_condition=None,
        )

    @property
    def facts(self) -> EpisodeFacts:
        """Facts for the tag."""
        turns = []
        for played in self.played:
            trajectory = played.generation.trajectory
            turns.append(
                Turn(
                    num_steps=trajectory.facts.num_steps,
                    sampling=trajectory.facts.sampling,
                    condition_key=_condition_key(trajectory.facts),
                    generated=(played.generation.started_s, played.generation.ended_s),
                    environment_s=played.environment_s,
                    reward=played.result.reward,
                )
            )
        return EpisodeFacts(tuple(turns), not self.played[-1].result.done, self.num_retries)

    @property
    def conditions(self) -> Mapping[str, ConditionPair]:
        """Key -> conditions of each turn whose generation carries them."""
        return {
            _condition_key(generation.trajectory.facts): (generation.condition, generation.negative_condition)
            for generation in (turn.generation for turn in self.played)
            if generation.condition is not None
        }

    def scored(self, last: Score) -> Score:
        """Reward of the episode: the sum of its turns' rewards, and `last`, that of reward functions for its last
        picture."""
        total = sum(turn.result.reward for turn in self.played)
        details = {f"{ENVIRONMENT}/{name}": float(value) for name, value in self.played[-1].result.details.items()}
        return Score(total + last.total, {ENVIRONMENT: total, **details, **last.parts}, last.calls)


def _condition_key(facts: SampleFacts) -> str:
    """Key of a turn's conditions: a turn is of its group alone, so the trainer clears them with the group."""
    return own_condition_key(facts.uid, facts.condition_key)


def joined(turns: Sequence[Trajectory]) -> Trajectory:
    """The turns of an episode as one trajectory; settings, seed and condition are the first one's. RuntimeError for
    pictures of several sizes."""
    facts = [turn.facts for turn in turns]
    first = facts[0]
    records = [turn.record for turn in turns]
    paths = [record for record in records if isinstance(record, PathRecord)]
    cleans = [record for record in records if isinstance(record, CleanRecord)]
    shapes = {record.latents.shape[1:] for record in paths} | {record.clean.shape for record in cleans}
    if len(shapes) != 1:
        raise RuntimeError(
            f"all pictures of an episode must have one size, but the latents of sample {first.sample_index} of group "
            f"{first.uid} have {sorted(map(tuple, shapes))}; set digen.sampling.size_from_image=false"
        )
    if paths:
        starts = accumulate((len(path.latents) for path in paths[:-1]), initial=0)
        moved = [
            path.columns() | {"positions": path.positions + start} for path, start in zip(paths, starts, strict=True)
        ]
        record = PathRecord(**{name: torch.cat([columns[name] for columns in moved]) for name in PathRecord.COLUMNS})
    else:
        record = CleanRecord(torch.cat([one.clean for one in cleans]), torch.cat([one.sigmas for one in cleans]))
    of_all = replace(
        first,
        last_version=facts[-1].last_version,
        num_steps=sum(turn.num_steps for turn in facts),
        condition_key=_condition_key(first),
        experts=tuple(expert for turn in facts for expert in turn.experts),
        num_shared_steps=sum(turn.num_shared_steps for turn in facts),
        num_skipped_steps=sum(turn.num_skipped_steps for turn in facts),
    )
    return Trajectory(of_all, record)


class EnvironmentAgentLoop(AgentLoopBase):
    """Stateless agent loop. Skips `AgentLoopBase.__init__`, which builds a chat-token builder from a chat tokenizer.
    `edits`: `Environment.edits` of the run's environment."""

    def __init__(self, server_manager: DiffusionServerClient | ReplicaClient, environments: WorkerPool, *, edits: bool):
        self.digen = server_manager.digen
        self.server_manager = server_manager
        self._environments, self._edits = environments, edits

    async def run(self, sampling_params: dict[str, Any], **columns: Any) -> Episode:  # type: ignore[override]
        """Play the episode that is sample `session_id` of the group `uid`; see `verl_digen.data.rows.loop_columns`.
        EpisodeFailed: its environment kept failing. RunStopped: no environment worker or no replica is left."""
        row, index = loop_row(columns), columns["session_id"]
        name = f"{row.uid}_{index}"
        seed, retries = keyed_seed("environment", self.digen.seed, row.uid), self.digen.environment.max_retries
        opened = OpenEpisode(self._environments, name, row, seed, max_retries=retries)
        while True:
            try:
                played = await self._play(
                    opened, row, index, step=columns["global_steps"], validate=sampling_params["validate"]
                )
                return Episode(tuple(played), opened.num_retries)
            except EpisodeDiverged as error:
                logger.warning("episode %s starts afresh: %s", name, error)
                opened.forget()
            finally:
                opened.close()

    async def _play(
        self, opened: OpenEpisode, row: PromptRow, index: int, *, step: int, validate: bool
    ) -> list[PlayedTurn]:
        instruction: Instruction | None = await opened.reset()
        played: list[PlayedTurn] = []
        while instruction is not None and len(played) < self.digen.environment.max_turns:
            previous = played[-1].generation.pixels.numpy() if played else None
            request = turn_request(
                self.digen,
                replace(row, text=instruction.text),
                index,
                len(played),
                self._images(instruction, row, previous),
                step=step,
                validate=validate,
            )
            generation = await self.server_manager.generate_sample(request)
            began_s = time.time()
            result = await opened.step(generation.pixels.numpy())
            played.append(PlayedTurn(generation, result, time.time() - began_s))
            instruction = None if result.done else result.instruction
        return played

    def _images(
        self, instruction: Instruction, row: PromptRow, previous: NDArray[np.uint8] | None
    ) -> tuple[SourceImage, ...]:
        """The images that a turn edits. Raises EpisodeFailed: it asks for a previous picture in the first turn."""
        given = instruction.images
        if given is None:
            given = () if not self._edits else row.images if previous is None else (PREVIOUS,)
        found = []
        for image in given:
            if not isinstance(image, str):
                found.append(generated_image(f"a picture of group {row.uid}", image))
            elif image != PREVIOUS:
                found.append(source_image(image))
            elif previous is None:
                raise EpisodeFailed(
                    f"the first instruction of an episode must not ask for the picture {PREVIOUS!r}, but that of group "
                    f"{row.uid} does; name the row's images"
                )
            else:
                found.append(generated_image(f"a turn's picture of group {row.uid}", previous))
        return tuple(found)

# SPDX-License-Identifier: Apache-2.0
"""The agent loop of an environment: picture, answer, picture, answer, until the episode ends.

    reset --> instruction --> request --> replica --> picture --> step --> instruction ...

While an episode waits for its environment it has no request on a replica, which generates for other episodes.

Invariants (tests/agent_loop/test_episodes.py): noise differs in every turn; an episode that is played again from equal
answers is the same; at most `digen.environment.max_turns` pictures.
"""

from __future__ import annotations

import logging
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray
from verl.experimental.agent_loop.agent_loop import AgentLoopBase

from verl_digen.agent_loop.episode import Episode, PlayedTurn
from verl_digen.agent_loop.server_manager import DiffusionServerClient, ServerClient
from verl_digen.algorithms.seeds import keyed_seed
from verl_digen.data.rows import loop_row
from verl_digen.environments.base import PREVIOUS, Instruction
from verl_digen.environments.open_episode import EpisodeDiverged, EpisodeFailed, OpenEpisode
from verl_digen.inputs.images import SourceImage, generated_image, source_image
from verl_digen.processes.workers import WorkerPool
from verl_digen.sampling.requests import turn_request
from verl_digen.types import PromptRow

logger = logging.getLogger(__name__)


class EnvironmentAgentLoop(AgentLoopBase):
    """Stateless agent loop. Skips `AgentLoopBase.__init__`, which builds a chat-token builder from a chat tokenizer.

    Args:
        edits: `Environment.edits` of the run's environment.
    """

    def __init__(self, server_manager: DiffusionServerClient | ServerClient, environments: WorkerPool, *, edits: bool):
        self.digen = server_manager.digen
        self.server_manager = server_manager
        self._environments, self._edits = environments, edits

    async def run(self, sampling_params: dict[str, Any], **columns: Any) -> Episode:  # type: ignore[override]
        """Play the episode that is sample `session_id` of the group `uid`; see `verl_digen.data.rows.loop_columns`.

        Raises:
            EpisodeFailed: its environment kept failing. RunStopped: no environment worker or no replica is left.
        """
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
                _asking(row, instruction),
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
        """The images that a turn edits.

        Raises:
            EpisodeFailed: it asks for a previous picture in the first turn.
        """
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


def _asking(row: PromptRow, instruction: Instruction) -> PromptRow:
    """The row with the instruction as its text; its images are given apart."""
    return PromptRow(
        instruction.text, row.data_source, row.ground_truth, negative=row.negative, uid=row.uid, index=row.index
    )

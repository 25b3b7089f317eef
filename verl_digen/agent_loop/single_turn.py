# SPDX-License-Identifier: Apache-2.0
"""The agent loop of a diffusion model: one prompt, one generation."""

from __future__ import annotations

from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, register

from verl_digen.agent_loop.server_manager import DiffusionServerClient, ServerClient
from verl_digen.data.rows import loop_row
from verl_digen.sampling.requests import SINGLE_TURN, sample_request
from verl_digen.types import Generation


class DiffusionSingleTurnAgentLoop(AgentLoopBase):
    """Stateless agent loop. Skips `AgentLoopBase.__init__`, which builds a chat-token builder from a chat tokenizer."""

    def __init__(self, server_manager: DiffusionServerClient | ServerClient, **unused: Any):
        self.digen = server_manager.digen
        self.server_manager = server_manager

    async def run(self, sampling_params: dict[str, Any], **columns: Any) -> Generation:  # type: ignore[override]
        """Generate the sample `session_id` of the group `uid`; see `verl_digen.data.rows.loop_columns`."""
        request = sample_request(
            self.digen,
            loop_row(columns),
            columns["session_id"],
            step=columns["global_steps"],
            validate=sampling_params["validate"],
        )
        return await self.server_manager.generate_sample(request)


register(SINGLE_TURN)(DiffusionSingleTurnAgentLoop)  # not as a decorator: verl's erases the class's type

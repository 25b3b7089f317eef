# SPDX-License-Identifier: Apache-2.0
"""The agent loop of a diffusion model: one prompt, one generation."""

from __future__ import annotations

from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, DictConfigWrap, ToolListWrap, register

from verl_digen.agent_loop.server_manager import DiffusionServerClient, ServerClient
from verl_digen.data.rows import loop_row
from verl_digen.sampling.requests import SINGLE_TURN, sample_request
from verl_digen.types import Generation


class DiffusionSingleTurnAgentLoop(AgentLoopBase):
    """Stateless agent loop. Skips `AgentLoopBase.__init__`, which builds a chat-token builder from a chat tokenizer.

    Args:
        server_manager: client of the replicas.
        trainer_config, tokenizer, processor, dataset_cls, data_config, hf_model_type, tools: verl gives them to every
            loop. They are attributes, with the config unwrapped, for custom loops; this one reads none of them.
        kwargs: other keys of the loop's entry in the file of agent loops, such as `name`; attribute `settings`.
    """

    def __init__(
        self,
        trainer_config: DictConfigWrap,
        server_manager: DiffusionServerClient | ServerClient,
        tokenizer: Any = None,
        processor: Any = None,
        dataset_cls: Any = None,
        data_config: DictConfigWrap | None = None,
        hf_model_type: str | None = None,
        tools: ToolListWrap | None = None,
        **kwargs: Any,
    ):
        self.config = trainer_config.config
        self.digen = server_manager.digen
        self.server_manager = server_manager
        self.tokenizer, self.processor, self.dataset_cls = tokenizer, processor, dataset_cls
        self.data_config = None if data_config is None else data_config.config
        self.hf_model_type = hf_model_type
        self.tools = [] if tools is None else tools.tools
        self.settings = kwargs

    async def run(self, sampling_params: dict[str, Any], **columns: Any) -> Generation:  # type: ignore[override]
        """Generate the sample `session_id` of the group `uid`.

        Args:
            sampling_params: `validate`, True for a deterministic validation sample.
            columns: of the prompt, see `verl_digen.data.rows.loop_row`; `global_steps`, the optimizer step.

        Raises:
            ValueError: a column is missing. RunStopped: no replica is left.
        """
        request = sample_request(
            self.digen,
            loop_row(columns),
            columns["session_id"],
            step=columns["global_steps"],
            validate=sampling_params["validate"],
        )
        return await self.server_manager.generate_sample(request)


register(SINGLE_TURN)(DiffusionSingleTurnAgentLoop)  # not as a decorator: verl's erases the class's type

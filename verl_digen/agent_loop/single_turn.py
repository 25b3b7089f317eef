# SPDX-License-Identifier: Apache-2.0
"""The agent loop of a diffusion model: one prompt, one generation; and custom loops, which are subclasses of it.

A loop's `run` returns one `Generation` of the row's sample. The samples of a group share the prompt's conditions, so
all of them must use the same prompt.
"""

from typing import Any

import hydra.utils
from verl.experimental.agent_loop.agent_loop import (
    AgentLoopBase,
    DictConfigWrap,
    ToolListWrap,
    _agent_loop_registry,
    register,
)

from verl_digen.agent_loop.server_manager import DiffusionServerClient, ReplicaClient
from verl_digen.data.rows import loop_row
from verl_digen.require import require
from verl_digen.sampling.requests import SINGLE_TURN, sample_request
from verl_digen.types import Generation


class DiffusionSingleTurnAgentLoop(AgentLoopBase):
    """Stateless agent loop. Skips `AgentLoopBase.__init__`, which builds a chat-token builder from a chat tokenizer.

    verl gives every loop the other arguments; they are attributes, with the config unwrapped, for custom loops.
    `kwargs` are other keys of the loop's entry in the file of agent loops, such as `name`; attribute `settings`.
    """

    def __init__(
        self,
        trainer_config: DictConfigWrap,
        server_manager: DiffusionServerClient | ReplicaClient,
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


def make_agent_loop(name: str, worker: Any, client: Any) -> Any:
    """Create the agent loop called `name` as verl does, from its registry, with the arguments that verl's `worker`
    passes to every loop; it requests samples from `client`. ValueError: no loop of that name is registered in this
    process."""
    key, known = "actor_rollout_ref.rollout.agent", ", ".join(_agent_loop_registry)
    is_known, remedy = name in (SINGLE_TURN, *_agent_loop_registry), f"name it in the file {key}.agent_loop_config_path"
    require(is_known, f"{key}.default_agent_loop must be one of {known}", name, remedy)
    arguments: dict[str, Any] = {
        "trainer_config": DictConfigWrap(config=worker.config),
        "server_manager": client,
        "tokenizer": worker.tokenizer,
        "processor": worker.processor,
        "hf_model_type": worker.hf_model_type,
        "dataset_cls": worker.dataset_cls,
        "data_config": DictConfigWrap(worker.config.data),
        "tools": ToolListWrap(worker.tools),
    }
    if name == SINGLE_TURN:
        return DiffusionSingleTurnAgentLoop(**arguments)
    return hydra.utils.instantiate(config=_agent_loop_registry[name], **arguments)

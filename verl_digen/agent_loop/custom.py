# SPDX-License-Identifier: Apache-2.0
"""Custom agent loops, created as verl does: from its registry, by name.

verl's worker registers at start the names in `actor_rollout_ref.rollout.agent.agent_loop_config_path`, a file in verl's
format; `actor_rollout_ref.rollout.agent.default_agent_loop` selects the one that a run uses. A loop is
`DiffusionSingleTurnAgentLoop` or a subclass: its `run` returns one `Generation` of the row's sample. The samples of a
group share the prompt's conditions, so all of them must use the same prompt.
"""

from __future__ import annotations

from typing import Any

import hydra.utils
from verl.experimental.agent_loop.agent_loop import DictConfigWrap, ToolListWrap, _agent_loop_registry

from verl_digen.agent_loop.single_turn import DiffusionSingleTurnAgentLoop
from verl_digen.sampling.requests import SINGLE_TURN


def make_agent_loop(name: str, worker: Any, client: Any) -> Any:
    """Create the agent loop called `name`, which requests samples from `client`.

    Args:
        worker: verl's agent loop worker, for the arguments that verl passes to every loop.

    Raises:
        ValueError: no loop of that name is registered in this process.
    """
    if name != SINGLE_TURN and name not in _agent_loop_registry:
        raise ValueError(
            f"actor_rollout_ref.rollout.agent.default_agent_loop must be one of {', '.join(_agent_loop_registry)}, got "
            f"{name!r}; name it in the file actor_rollout_ref.rollout.agent.agent_loop_config_path"
        )
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

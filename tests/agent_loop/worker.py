# SPDX-License-Identifier: Apache-2.0
"""verl's worker without the processes that its constructor connects to."""

from types import SimpleNamespace
from typing import Any

from verl_digen.agent_loop.manager import DiffusionAgentLoopWorker
from verl_digen.config import DigenConfig
from verl_digen.sampling.requests import SINGLE_TURN


def make_worker(agent_loop: str = SINGLE_TURN, **given: Any) -> Any:
    """A worker with groups of 4, and these attributes."""
    worker = object.__new__(DiffusionAgentLoopWorker)
    vars(worker).update(
        digen=DigenConfig(),
        rollout_config=SimpleNamespace(agent=SimpleNamespace(default_agent_loop=agent_loop), n=4),
        config=SimpleNamespace(data=None),
        tools=[],
        **dict.fromkeys(("tokenizer", "processor", "hf_model_type", "dataset_cls")),
        _rewards=None,
        _run_dir=None,
        _environments=None,
    )
    vars(worker).update(given)
    return worker

# SPDX-License-Identifier: Apache-2.0
"""verl-digen: reinforcement learning on diffusion models, as a plugin of verl. Importing this package does nothing.

`train` and `Run`, for programs and notebooks, and the names of verl's RFC for diffusion models can be imported from
here; each is loaded when it is asked for.
"""

OWN_NAMES = dict.fromkeys(("Run", "train"), "tools.train.program")
"""Name -> module of this package, as in `RFC_NAMES`."""

RFC_NAMES = {
    "RayFlowGRPOTrainer": "facade",
    "DiffusionAgentLoopWorker": "agent_loop.manager",
    "DiffusionAgentLoopWorkerBase": "agent_loop.manager",
    "AsyncDiffusionServerManager": "agent_loop.server_manager",
    "DiffusionSingleTurnAgentLoop": "agent_loop.single_turn",
    "ImageOutput": "sampling.outputs",
    "to_dataproto": "sampling.outputs",
    "finished_samples": "sampling.outputs",
    "compute_advantage": "algorithms.advantages",
    "DiffusionRewardLoopManager": "reward.manager",
    "DiffusionRewardLoopWorker": "reward.manager",
    "DiffusionRewardManager": "reward.manager",
    "DiffusersFSDPEngine": "engine.engine",
    "vLLMOmniReplica": "rollout.vllm_omni.server",
    "vLLMOmniHttpServer": "rollout.vllm_omni.server",
    "vLLMOmniHttpServerBase": "rollout.vllm_omni.server",
    "vLLMOmniServerAdapter": "rollout.vllm_omni.adapter",
    "vLLMOmniColocateWorkerExtension": "rollout.vllm_omni.worker",
    "QwenImagePipelineWithLogProb": "rollout.vllm_omni.pipeline",
}
"""Name -> module of this package. Those of `rollout.vllm_omni` need vLLM-Omni."""


def __getattr__(name: str):
    """A name of `OWN_NAMES` or `RFC_NAMES`, or `__version__`: the version of the installed distribution.
    PackageNotFoundError: no distribution is installed, so that verl does not know the plugin either."""
    if name in (modules := {**OWN_NAMES, **RFC_NAMES}):
        from importlib import import_module

        return getattr(import_module(f"{__name__}.{modules[name]}"), name)
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib.metadata import version

    return version("verl-digen")

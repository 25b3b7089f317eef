# SPDX-License-Identifier: Apache-2.0
"""`actor_rollout_ref.rollout.name=vllm_omni`: generation by vLLM-Omni's diffusion engine.

| file | runs in | holds |
| --- | --- | --- |
| `replica.py` | task runner | starts the servers of a replica |
| `server.py` | a Ray actor, with the engine in its process or in front of its workers | verl's server methods |
| `engine.py` | the server's process | the engine that runs weight updates between trajectories |
| `served.py` | everywhere | the supported pipelines |
| `pipeline.py` | engine worker | the recording class of each pipeline |
| `recorder.py` | engine worker | steps with our SDE, and records |
| `step_mode.py` | engine worker | any pipeline with step execution |
| `request_mode.py`, `request_pipelines.py` | engine worker | all other pipelines |
| `worker.py` | engine worker | receives weights, compares them, loads them |
| `full_update.py` | engine worker | an update on its way into the network |
| `adapter.py` | trainer rank | sends weights |
| `cpu/` | all of these processes, without an accelerator | vLLM-Omni's platform for the CPU |

Importing this package imports nothing of vLLM.
"""

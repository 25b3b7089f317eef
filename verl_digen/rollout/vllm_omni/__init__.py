# SPDX-License-Identifier: Apache-2.0
"""`actor_rollout_ref.rollout.name=vllm_omni`: generation by vLLM-Omni's diffusion engine.

| file | runs in | holds |
| --- | --- | --- |
| `replica.py` | task runner | starts the servers of a replica |
| `http.py` | beside the server | the HTTP API, if asked for |
| `server.py` | a Ray actor, with the engine in its process or in front of its workers | verl's server methods |
| `engine.py` | beside the server | the engine that keeps weight updates between trajectories |
| `probing.py` | beside the server | the request that proves that new weights take effect |
| `served.py` | everywhere | which pipelines there are |
| `pipeline.py` | engine worker | which pipeline is recorded how |
| `recorder.py` | engine worker | steps with our SDE, and records |
| `step_mode.py` | engine worker | any pipeline with step execution |
| `request_mode.py`, `request_pipelines.py` | engine worker | pipelines without: all others |
| `worker.py` | engine worker | receives weights (`receiving.py`), compares them, loads them |
| `loopback_store.py` | engine worker | where the workers of a replica find each other |
| `adapter.py` | trainer rank | sends weights |
| `cpu/` | all of them, without an accelerator | vLLM-Omni's platform for the CPU |

Importing this package imports nothing of vLLM.
"""

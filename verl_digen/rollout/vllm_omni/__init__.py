# SPDX-License-Identifier: Apache-2.0
"""`actor_rollout_ref.rollout.name=vllm_omni`: generation by vLLM-Omni's diffusion engine. Importing this package
imports nothing of vLLM.

`adapter.py` runs in the trainer's ranks, `server.py` and `engine.py` in a Ray actor with the engine in its process or
in front of its workers, `cpu/` in all processes without an accelerator, and the pipelines, the recorder and `worker.py`
in the engine's workers.
"""

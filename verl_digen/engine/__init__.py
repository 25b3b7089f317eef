# SPDX-License-Identifier: Apache-2.0
"""Training: verl's FSDP2 engine on a diffusers transformer, batched over (sample, timestep) rows.

| module | holds |
| --- | --- |
| `model_config` | `actor_rollout_ref.model` as a validated dataclass |
| `rows` | trajectories of samples -> rows -> tiles |
| `loss` | scored rows -> policy loss + KL, and which old log-probs the ratio takes |
| `engine` | build, forward/backward over tiles, optimizer step, EMA, KL reference |
| `shadow` | a second copy of this rank's trainable shards: EMA, frozen reference |
| `export` | sharded weights -> full tensors by diffusers name, adapters merged or apart |
| `checkpoint` | save all or nothing, resume bitwise |
| `worker` | verl's worker around the engine |

Import the modules; this package itself imports nothing. `register` files the engine with verl.
"""

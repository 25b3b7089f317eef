# SPDX-License-Identifier: Apache-2.0
"""Training: verl's FSDP2 engine on a diffusers transformer, batched over (sample, timestep) rows.

| module | holds |
| --- | --- |
| `model_config` | `actor_rollout_ref.model` as a validated dataclass |
| `engine` | verl's engine: a logical batch or verl's batch, optimizer step, EMA, export |
| `build` | the transformer and its adapter, before sharding |
| `fragment` | a fragment as the driver describes it, and how a rank fetches its samples |
| `logical_batch` | an open logical batch: fragments in, one gradient out |
| `ledger` | streaming advantages: samples that can train before all rewards have arrived |
| `planning` | partition of rows over ranks and tiles |
| `transaction` | the accumulating gradient of a logical batch |
| `gradients` | the gradient of an FSDP2 module: move, scale, reduce, drop |
| `rows` | trajectories of samples -> the rows of a tile |
| `scoring` | rows under the current weights and under the KL reference |
| `loss` | scored rows -> policy loss + KL, and which old log-probs the ratio takes |
| `memory` | choices made from free memory: rows per tile, unreduced gradients |
| `shadow` | a second copy of this rank's trainable shards: EMA, frozen reference |
| `export` | sharded weights -> full tensors by diffusers name, adapters merged or separate |
| `checkpoint` | save all or nothing, resume bitwise |
| `worker` | verl's worker around the engine |

Import the modules; this package itself imports nothing. `register` registers the engine with verl.
"""

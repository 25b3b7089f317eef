# SPDX-License-Identifier: Apache-2.0
"""Training: verl's FSDP2 engine on a diffusers transformer, batched over (sample, timestep) rows.

| module | holds |
| --- | --- |
| `model_config` | `actor_rollout_ref.model` as a validated dataclass |
| `engine` | verl's engine: a logical batch or verl's batch, optimizer step, EMA, export |
| `build` | what is trained, before it is sharded |
| `fragment` | what the driver says of a fragment, and how a rank fetches its part |
| `logical_batch` | an open logical batch: fragments in, one gradient out |
| `ledger` | which samples can train already, while rewards still come in |
| `planning` | who trains which rows, in which tiles, on this rank |
| `transaction` | the gradient while it is open |
| `gradients` | where FSDP2 keeps it: move, scale, reduce, drop |
| `rows` | trajectories of samples -> the rows of a tile |
| `scoring` | rows under the current weights and under the KL reference |
| `loss` | scored rows -> policy loss + KL, and which old log-probs the ratio takes |
| `memory` | what memory decides: rows of a tile, unreduced gradients |
| `shadow` | a second copy of this rank's trainable shards: EMA, frozen reference |
| `export` | sharded weights -> full tensors by diffusers name, adapters merged or apart |
| `checkpoint` | save all or nothing, resume bitwise |
| `worker` | verl's worker around the engine |

Import the modules; this package itself imports nothing. `register` files the engine with verl.
"""

# SPDX-License-Identifier: Apache-2.0
"""Training: verl's FSDP2 engine on a diffusers transformer, batched over (sample, timestep) rows.

| module | holds |
| --- | --- |
| `engine` | verl's engine, with logical batches: begin, accumulate, commit, abort |
| `sharded` | how the module is built, updated, saved and exported |
| `build` | the transformer and its adapter, before sharding |
| `fragment` | a fragment as the driver describes it |
| `logical_batch` | an open logical batch: fragments in, one gradient out |
| `ledger` | streaming advantages: samples that can train before all rewards have arrived |
| `planning` | partition of rows over ranks and tiles |
| `transaction` | the accumulating gradient of a logical batch |
| `gradients` | the gradient of an FSDP2 module: move, scale, reduce, drop |
| `gradient_sizes` | size of the gradient's entries against Adam's eps |
| `points` | the two kinds of rows: recorded transitions, and clean latents noised again |
| `rows` | records of samples, fetched by key -> the rows of a tile |
| `tile_work` | a rank's tiles with their samples, all rows by numbers, and columns that they make together |
| `policies` | rows evaluated under the weights that train, and under other policies |
| `copies` | copies of the weights by policy name, and when they follow |
| `loss` | evaluated rows -> the terms of the loss, and which old log-probs the ratio takes |
| `memory` | choices made from free memory: rows per tile, unreduced gradients |
| `row_flops` | FLOPs of a trained row, for metrics |
| `loss_scale` | dynamic loss scale of fp16 |
| `shadow` | a second copy of this rank's trainable shards, and how it takes the weights' place |
| `export` | sharded weights -> full tensors by diffusers name, adapters merged or separate |
| `checkpoint` | save all or nothing, resume bitwise, tell other base weights |
| `saved_state` | files of a checkpoint, by entry, for any number of ranks and for none |
| `assistant` | samples that the trainer generates itself |
| `worker` | verl's worker around the engine |

Import the modules; this package itself imports nothing. `register` registers the engine with verl.
"""

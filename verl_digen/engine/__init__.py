# SPDX-License-Identifier: Apache-2.0
"""Training: verl's FSDP2 engine on a diffusers transformer, batched over (sample, timestep) rows.

From a batch to an update: `engine` (verl's, with begin, accumulate, commit, abort) -> `logical_batch` -> `planning`
(rows over ranks and tiles) -> `transaction` (the open gradient) -> `policies`, `loss` -> `gradients`.

Import the modules; this package itself imports nothing. `engine` registers itself with verl.
"""

# SPDX-License-Identifier: Apache-2.0
"""Weight transfer between device pools without NCCL, as checkpoint engines of verl.

| `rollout.checkpoint_engine.backend` | transfer | for |
| --- | --- | --- |
| `digen_gloo` | broadcast over gloo, all replicas at once | CPU (the default there), accelerators without NCCL |
| `digen_ray` | Ray objects, fetched by each replica | one node (shared memory), elastic replicas |
| `nccl`, ... | verl's own; stays on the devices | accelerators (the default where there is NCCL) |

This project's engines go through host memory, and go on with the other replicas after one died in an update. With
verl's `nccl` such an update ends at `digen.deadlines.publish_s`, and the run with it. verl imports this package if
`rollout.checkpoint_engine.custom_backend_module` names it.
"""

from verl_digen.weights.checkpoint_engines import gloo, objects

__all__ = ["gloo", "objects"]

# SPDX-License-Identifier: Apache-2.0
"""Weight transfer between device pools without NCCL, as checkpoint engines of verl.

| `rollout.checkpoint_engine.backend` | transfer | for |
| --- | --- | --- |
| `digen_gloo` | broadcast over gloo, all replicas at once | CPU, or accelerators without NCCL |
| `digen_ray` | Ray objects, fetched by each replica | one node (shared memory), elastic replicas |
| `nccl`, `hccl`, ... | verl's own | accelerators that have them |

This project's engines go through host memory. verl imports this package if
`rollout.checkpoint_engine.custom_backend_module` names it.
"""

from verl_digen.weights.checkpoint_engines import gloo, objects

__all__ = ["gloo", "objects"]

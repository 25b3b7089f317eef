# SPDX-License-Identifier: Apache-2.0
"""Every setting under `digen:`, as validated dataclasses.

- Recipes hold choices, this package holds the schema: `digen:` of a composed config is checked by name and type by
  OmegaConf, then turned into `DigenConfig`. A field's bound is in its annotation (`verl_digen.require`);
  `__post_init__` methods check rules between fields.
- Rules that span verl's own keys and ours are in `verl_digen.preflight`.
- An error names the key as typed, the rule, the value and the remedy.

| section | file |
| --- | --- |
| `sampling`, `sde`, `advantage`, `kl`, `ema` | `sampling.py` |
| `window` | `verl_digen/algorithms/window.py` |
| `branches` | `verl_digen/algorithms/tree.py` |
| `loss` | `sampling.py`; the losses' own settings in `verl_digen/algorithms/objectives/` |
| `rollout` | `rollout.py` |
| `reward` | `reward.py` |
| `gap`, `queue`, `tag`, `staleness` | `verl_digen/schedulers/rules.py` |
| `tsp`, `placement`, `environment` | `digen.py` |
| `deadlines` | `verl_digen/processes/deadlines.py` |
"""

from verl_digen.config.digen import DigenConfig, EnvironmentConfig, TspConfig
from verl_digen.config.load import digen_config, digen_schema
from verl_digen.config.reward import PoolSettings, RewardConfig, RewardEntry
from verl_digen.config.rollout import RolloutConfig
from verl_digen.config.sampling import AdvantageConfig, EmaConfig, KlConfig, SamplingConfig, SdeConfig

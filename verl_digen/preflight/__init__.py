# SPDX-License-Identifier: Apache-2.0
"""Checks of the whole composed config before Ray starts, which span keys, files and registries; rules about one field
under `digen:` are in `verl_digen.config`. Recipes install them as a Hydra callback.

A rule raises ValueError with the key as typed, the rule, the value and the remedy; all rules are run, so that one start
shows everything there is to repair. Nothing is checked under `--cfg`, which shows a config even if it could not run.
"""

from verl_digen.preflight.callback import Preflight, checked
from verl_digen.preflight.rules import RULES, check

__all__ = ["RULES", "Preflight", "check", "checked"]

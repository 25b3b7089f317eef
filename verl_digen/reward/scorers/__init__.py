# SPDX-License-Identifier: Apache-2.0
"""Built-in rewards, one module each: NAME in `digen.reward.functions` is the module NAME, which defines

    REWARD = a `Reward` class (verl_digen/reward/base.py), or a function like verl's `compute_score`

A module is imported when a run asks for it, and imports heavy packages when its reward is made. Its docstring says what
the score means, its range, and source and licence of the weights.
"""

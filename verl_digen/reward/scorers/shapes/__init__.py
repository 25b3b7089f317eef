# SPDX-License-Identifier: Apache-2.0
"""Shapes task: a drawn world with captions, and a rule-based score of how well a picture shows its caption.

`scene` holds the world (scenes, captions, drawings), `scorer` the reward.
"""

from verl_digen.reward.scorers.shapes.scorer import compute_score

REWARD = compute_score

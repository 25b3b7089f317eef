# SPDX-License-Identifier: Apache-2.0
"""`offline_dpo`: the two pictures of a prompt's row as a preference pair (Diffusion-DPO). No picture is generated to
train: replicas encode the data set's pictures.

The loss is `verl_digen.algorithms.objectives.preference`. A prompt is a group of two samples: number 0 is the chosen
picture, of reward 1, number 1 the rejected one, of reward 0.

Source: Diffusion-DPO, arXiv 2311.12908; beta is 5000 in both of its launch scripts (SD1.5 and SDXL).
"""

from dataclasses import dataclass

from verl_digen.algorithms.objectives.objective import register_objective
from verl_digen.algorithms.objectives.preference import DECLARED, DpoConfig, preference


@dataclass(frozen=True)
class OfflineDpoConfig(DpoConfig):
    beta: float = 5000.0
    """Strength of the preference. 5000 as in Diffusion-DPO's launch scripts; its paper has 2000 for SD1.5."""


register_objective("offline_dpo", config=OfflineDpoConfig, source="dataset", **DECLARED)(preference)

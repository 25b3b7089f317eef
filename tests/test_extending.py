# SPDX-License-Identifier: Apache-2.0
"""The objective that docs/extending.md shows can be registered and computed as it stands there."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from verl_digen.algorithms import ema, objectives, sde
from verl_digen.algorithms.objectives import find_objective, policy_loss, ratio

PAGE = Path(__file__).parents[1] / "docs" / "extending.md"
KNOWN: dict[str, Any] = {
    **vars(ema),
    **vars(sde),
    **vars(ratio),
    **vars(objectives),
    "dataclass": dataclass,
    "Tensor": torch.Tensor,
    "torch": torch,
    "__name__": __name__,
}
"""Names that the sketches use; a real file imports them."""


def test_a_sketched_objective_can_be_registered_and_computed():
    section = PAGE.read_text().split("## An objective of your own")[1].split("\n## ")[0]
    code = "\n".join(re.findall(r"```python\n(.*?)```", section, re.DOTALL))
    exec(compile(code, PAGE.name, "exec", dont_inherit=True), dict(KNOWN))
    objective = find_objective("my_matching")
    generator = torch.Generator().manual_seed(0)
    settings = objective.loss.config()
    inputs = {column: torch.randn(4, generator=generator) for column in objective.loss.columns}
    latents = objective.latents_for(settings)
    inputs |= {latent: torch.randn(4, 3, 2, generator=generator) for latent in latents}
    inputs["sigma"] = torch.rand(4, generator=generator)
    velocity = inputs["velocity"].requires_grad_()
    output = policy_loss("my_matching", inputs, settings)
    (gradient,) = torch.autograd.grad(output.loss, velocity)
    assert output.loss.isfinite() and gradient.ne(0).any()

# SPDX-License-Identifier: Apache-2.0
"""The rewards and the objective in docs/extending.md work as they stand there."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.reward.samples import make_sample
from verl_digen.algorithms import ema, objectives, sde
from verl_digen.algorithms.objectives import find_objective, policy_loss, ratio
from verl_digen.config.reward import reward_entry
from verl_digen.reward.base import NoSettings, Reward
from verl_digen.reward.named import make

PAGE = Path(__file__).parents[2] / "docs" / "extending.md"


def sketches() -> list[str]:
    section = PAGE.read_text().split("## A reward class")[1].split("\n## ")[0]
    return re.findall(r"```python\n(.*?)```", section, re.DOTALL)


@pytest.fixture
def tiny_classifier(tmp_path: Path) -> Path:
    """A random ViT of 16 px pictures with two classes, and its processor."""
    from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessorPil

    small = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    labels = {0: "normal", 1: "nsfw"}
    torch.manual_seed(0)
    config = ViTConfig(
        **small,
        image_size=16,
        patch_size=8,
        id2label=labels,
        label2id={name: number for number, name in labels.items()},
    )
    ViTForImageClassification(config).save_pretrained(tmp_path)
    ViTImageProcessorPil(size={"height": 16, "width": 16}).save_pretrained(tmp_path)
    return tmp_path


def test_the_model_on_a_gpu_scores_a_batch_as_it_scores_each_picture(tiny_classifier, tmp_path):
    file = tmp_path / "safe.py"
    file.write_text(sketches()[0])
    settings = {"weight": 1.0, "reward": f"{file}:Safe", "path": str(tiny_classifier), "num_gpus": 0.5}
    reward = make(reward_entry("safe", settings), torch.device("cpu"))
    batch = [make_sample(index, value=50 * index) for index in range(4)]
    together = reward.score(batch)
    alone = [score for sample in batch for score in reward.score([sample])]  # type: ignore[union-attr]
    assert together == pytest.approx(alone, abs=1e-5) and len({*alone}) > 1
    other = make(reward_entry("safe", {**settings, "label": "nsfw"}), torch.device("cpu"))
    assert [one + rest for one, rest in zip(alone, other.score(batch), strict=True)] == pytest.approx([1] * 4)  # type: ignore[arg-type]


def test_the_win_rate_is_the_share_of_the_others_that_lose():
    found: dict[str, type] = {"Reward": Reward}
    exec(sketches()[1], found)
    judge = found["WinRate"](NoSettings(), torch.device("cpu"))
    judge.prefers = lambda one, other: one.pixels.mean() > other.pixels.mean()
    assert judge.scope == "group"
    assert judge.score([make_sample(value=value) for value in (10, 30, 20)]) == [0.0, 1.0, 0.5]


# -- the objective that docs/extending.md shows can be registered and computed as it stands there ------------
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
    section = PAGE.read_text().split("## An objective\n")[1].split("\n## ")[0]
    code = "\n".join(re.findall(r"```python\n(.*?)```", section, re.DOTALL))
    exec(compile(code, PAGE.name, "exec", dont_inherit=True), dict(KNOWN))
    objective = find_objective("my_matching")
    generator = torch.Generator().manual_seed(0)
    settings = objective.config()
    inputs = {column: torch.randn(4, generator=generator) for column in objective.columns}
    latents = objective.latents_for(settings)
    inputs |= {latent: torch.randn(4, 3, 2, generator=generator) for latent in latents}
    inputs["sigma"] = torch.rand(4, generator=generator)
    velocity = inputs["velocity"].requires_grad_()
    output = policy_loss("my_matching", inputs, settings)
    (gradient,) = torch.autograd.grad(output.loss, velocity)
    assert output.loss.isfinite() and gradient.ne(0).any()

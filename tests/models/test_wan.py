# SPDX-License-Identifier: Apache-2.0
"""Features of Wan only: two experts, whole-numbered timesteps, cleaned prompts."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.schedulers.scheduling_unipc_multistep import UniPCMultistepScheduler
from torch import Tensor

from tests.models.cases import CPU, changed
from tests.texts import of_texts
from tests.tiny_models import build_tiny
from verl_digen.engine.recompute import Recomputation
from verl_digen.models import load_model
from verl_digen.models.base import DiffusionModel
from verl_digen.models.checkpoint import Experts
from verl_digen.types import Geometry

CLIP = Geometry(32, 32, 5)


@pytest.fixture(scope="module")
def one_expert(tmp_path_factory: pytest.TempPathFactory) -> DiffusionModel:
    return load_model(build_tiny("wan2.1", tmp_path_factory.mktemp("wan2.1") / "m"))


@pytest.fixture(scope="module")
def two_experts(tmp_path_factory: pytest.TempPathFactory) -> DiffusionModel:
    return load_model(build_tiny("wan2.2_a14b", tmp_path_factory.mktemp("a14b") / "m"))


def velocity(model: DiffusionModel, transformer: Any, *sigmas: float) -> Tensor:
    x = torch.randn(len(sigmas), *model.latent_shape(CLIP), generator=torch.Generator().manual_seed(0))
    conditions = [{"embeds": torch.ones(3, 32)}] * len(sigmas)
    return model.velocity(transformer, x, torch.tensor(sigmas), conditions, None, 1.0, CLIP)


def test_the_first_expert_denoises_down_to_the_boundary_inclusive(
    two_experts: DiffusionModel, one_expert: DiffusionModel
) -> None:
    sigmas = torch.tensor([0.999999, 0.9, 0.8751, 0.875, 0.8749, 0.5, 0.01])
    assert two_experts.expert_of(sigmas).tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert one_expert.expert_of(sigmas).tolist() == [0] * 7
    assert two_experts.expert_of(sigmas).dtype == torch.int64


def test_one_forward_runs_one_expert_and_only_that_one_learns(two_experts: DiffusionModel) -> None:
    transformer = two_experts.load_transformer(torch.float32)
    assert isinstance(transformer, Experts)
    prefixes = {name.split(".")[0] for name in transformer.state_dict()}
    assert prefixes == {"transformer", "transformer_2"}
    for sigma, used, idle in ((0.95, "transformer", "transformer_2"), (0.3, "transformer_2", "transformer")):
        transformer.zero_grad()
        velocity(two_experts, transformer, sigma).sum().backward()
        assert all(p.grad is not None for p in transformer.get_submodule(used).parameters())
        assert all(p.grad is None for p in transformer.get_submodule(idle).parameters())
        before = velocity(two_experts, transformer, sigma)
        with torch.no_grad():
            next(transformer.get_submodule(idle).parameters()).add_(1.0)
        assert torch.equal(velocity(two_experts, transformer, sigma), before)


def test_rows_of_both_experts_in_one_forward_are_an_error(two_experts: DiffusionModel) -> None:
    transformer = two_experts.load_transformer(torch.float32)
    assert len(velocity(two_experts, transformer, 0.95, 0.9)) == 2
    with pytest.raises(RuntimeError, match=r"one expert, got sigmas .* both sides of 0\.875; tile them by expert_of"):
        velocity(two_experts, transformer, 0.95, 0.3)


def test_recomputation_reaches_every_expert(two_experts: DiffusionModel) -> None:
    transformer = two_experts.load_transformer(torch.float32)
    assert isinstance(transformer, Experts)
    Recomputation(transformer, "all", offloads=False)
    assert all(transformer.get_submodule(name).gradient_checkpointing for name in transformer.names)
    assert transformer._no_split_modules == ["WanTransformerBlock"]


@pytest.mark.parametrize("flow_shift", [3.0, 5.0, 8.0, 12.0])
def test_timesteps_are_the_schedulers_whole_numbers(
    one_expert: DiffusionModel, tmp_path: Path, flow_shift: float
) -> None:
    """Timesteps are recovered from the sigma in fp32, for every number of steps up to 60."""
    file = "scheduler/scheduler_config.json"
    configs = changed(one_expert.path, tmp_path / "m", file, {"flow_shift": flow_shift})
    model: Any = load_model(configs)
    scheduler: Any = UniPCMultistepScheduler.from_pretrained(configs / "scheduler")
    for num_steps in range(1, 61):
        scheduler.set_timesteps(num_steps)
        sigmas = model.sigmas(num_steps, CLIP)
        assert torch.equal(sigmas, scheduler.sigmas)
        assert torch.equal(model.timesteps(sigmas[:-1]), scheduler.timesteps)


def test_an_euler_schedule_has_fractional_timesteps(one_expert: DiffusionModel, tmp_path: Path) -> None:
    """Wan2.1's second published scheduler."""
    name = "FlowMatchEulerDiscreteScheduler"
    configs = changed(one_expert.path, tmp_path / "m", "model_index.json", {"scheduler": ["diffusers", name]})
    (configs / "scheduler" / "scheduler_config.json").write_text(json.dumps({"_class_name": name, "shift": 3.0}))
    model: Any = load_model(configs)
    sigmas = model.sigmas(7, CLIP)
    assert sigmas[0] == 1.0 and sigmas[-1] == 0.0
    assert torch.equal(model.timesteps(sigmas), sigmas * 1000)


def test_a_prompt_is_cleaned_as_in_the_pipeline(one_expert: DiffusionModel) -> None:
    encode = of_texts(one_expert.load_encoder(torch.float32, CPU))
    plain, messy = encode(["a red circle & more", "  a red \n circle &amp;amp; more "])
    assert torch.equal(plain["embeds"], messy["embeds"])

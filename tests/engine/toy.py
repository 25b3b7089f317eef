# SPDX-License-Identifier: Apache-2.0
"""A network of a few hundred weights, and the checkpoint from which the engine loads it.

Engines on it are real (`tests.engine.harness.make_engine`): only the network is small. Sizes are odd, so that shards
are uneven, and some ranks have none of a parameter.
"""

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from diffusers.configuration_utils import FrozenDict
from torch import Tensor, nn

from verl_digen import models
from verl_digen.models.base import Collated, Decoder, DiffusionModel, PromptCheck, PromptEncoder
from verl_digen.models.checkpoint import Experts
from verl_digen.models.spec import ConditionLayout, FlopsLayout, ModelSpec
from verl_digen.types import Condition, Geometry

PIPELINE = "ToyPipeline"
LATENTS = (3, 1)
"""Shape of a sample's latents."""
TEXT_WIDTH = 3
BOUNDARY = 0.55
"""Sigma below which the second expert runs, in a checkpoint with two."""
LORA = {"lora_rank": 2, "lora_alpha": 4, "target_modules": ["mix", "enter"]}
"""Layers: one in the block, and one that belongs to FSDP's root."""


class ToyBlock(nn.Module):
    """A unit that FSDP2 shards by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(5, 5)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + torch.tanh(self.mix(hidden))


class ToyNetwork(nn.Module):
    """Latents, sigma and a prompt's mean embedding -> velocity."""

    def __init__(self) -> None:
        super().__init__()
        self._no_split_modules = ["ToyBlock"]
        self.config = FrozenDict(tie_word_embeddings=False)
        self.enter = nn.Linear(LATENTS[0] + 1 + TEXT_WIDTH, 5)
        self.block = ToyBlock()
        self.leave = nn.Linear(5, LATENTS[0])

    def forward(self, latents: Tensor, sigmas: Tensor, text: Tensor) -> Tensor:
        """[N, 3, 1], [N], [N, 3] -> [N, 3, 1]."""
        hidden = self.enter(torch.cat([latents.flatten(1), sigmas[:, None], text], dim=1))
        return self.leave(self.block(hidden)).view(latents.shape)


class Toy(DiffusionModel):
    """The model file, with only the parts that training and denoising need."""

    spec = ModelSpec(
        transformer="ToyNetwork",
        title="Toy",
        example="none",
        components=("scheduler", "transformer"),
        lora_targets=("mix",),
        flops=FlopsLayout(patch="enter", streams=(), attention=()),
        condition=ConditionLayout(width="none"),
    )

    def __init__(self, path: str | Path):
        super().__init__(path)
        if "transformer_2" in self.index:
            self.experts = ("transformer", "transformer_2")

    def load_transformer(self, dtype: torch.dtype, *, meta: bool = False) -> nn.Module:
        networks = _networks(self.experts, "meta" if meta else "cpu")
        return Experts(networks) if len(networks) > 1 else networks["transformer"]

    def expert_of(self, sigmas: Tensor) -> Tensor:
        return (sigmas < BOUNDARY).long() if len(self.experts) > 1 else torch.zeros_like(sigmas, dtype=torch.int64)

    def collate(self, conditions: Sequence[Condition]) -> Collated:
        return {"text": torch.stack([condition["embeds"].mean(dim=0) for condition in conditions])}

    def predict(
        self, transformer: nn.Module, latents: Tensor, sigmas: Tensor, condition: Collated, geometry: Geometry
    ) -> Tensor:
        chosen: dict[str, Any] = {}
        if len(self.experts) > 1:
            (expert,) = self.expert_of(sigmas).unique().tolist()
            chosen = {"expert": expert}
        return transformer(latents=latents, sigmas=sigmas, text=condition["text"], **chosen)

    def latent_shape(self, geometry: Geometry) -> tuple[int, ...]:
        return LATENTS

    def sigmas(self, num_steps: int, geometry: Geometry) -> Tensor:
        return torch.linspace(1.0, 0.0, num_steps + 1)

    def load_prompt_check(self) -> PromptCheck:
        raise NotImplementedError

    def load_encoder(self, dtype: torch.dtype, device: torch.device) -> PromptEncoder:
        raise NotImplementedError

    def load_decoder(self, dtype: torch.dtype, device: torch.device) -> Decoder:
        raise NotImplementedError


@cache
def toy_weights(flavour: str) -> dict[str, Tensor]:
    """The checkpoint's weights by name: of the network, of its two "experts", or an adapter of zeros for "lora"."""
    if flavour == "lora":
        shapes = {name: value.shape for name, value in toy_weights("plain").items() if name.endswith("weight")}
        adapter = {}
        for name, (rows, columns) in shapes.items():
            layer = name.removesuffix(".weight")
            if layer.endswith(tuple(LORA["target_modules"])):
                adapter[f"{layer}.lora_A.default.weight"] = torch.zeros(LORA["lora_rank"], columns)
                adapter[f"{layer}.lora_B.default.weight"] = torch.zeros(rows, LORA["lora_rank"])
        return adapter
    networks = _networks(("transformer", "transformer_2") if flavour == "experts" else ("transformer",))
    prefixes = {name: f"{name}." if flavour == "experts" else "" for name in networks}
    return {
        prefixes[name] + weight: value.detach()
        for name, network in networks.items()
        for weight, value in network.named_parameters()
    }


def _networks(names: Sequence[str], device: str = "cpu") -> dict[str, nn.Module]:
    """The networks; their weights depend on their number."""
    networks = {}
    for number, name in enumerate(names):
        with torch.random.fork_rng(devices=[]), torch.device(device):
            torch.manual_seed(number)
            networks[name] = ToyNetwork()
    return networks


def build_toy(path: Path, *, num_experts: int) -> Path:
    """Write the checkpoint without weights; `Toy` generates them."""
    parts = ["scheduler", "transformer", "transformer_2"][: 1 + num_experts]
    for part in parts:
        (path / part).mkdir(parents=True)
    index = {"_class_name": PIPELINE} | {part: ["toy", Toy.spec.transformer] for part in parts}
    (path / "model_index.json").write_text(json.dumps(index))
    (path / "scheduler" / "scheduler_config.json").write_text("{}")
    return path


def register_toy() -> None:
    """Make the toy loadable in this process, permanently: call it in a process of your own."""
    models.MODELS[PIPELINE] = f"{__name__}:{Toy.__name__}"

# SPDX-License-Identifier: Apache-2.0
"""Weights of one policy of a checkpoint, under the names that other tools use."""

from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from diffusers.utils.constants import SAFE_WEIGHTS_INDEX_NAME
from peft import get_peft_model_state_dict
from peft.tuners.lora import LoraConfig
from safetensors import safe_open
from torch import Tensor

from verl_digen.engine.build import add_adapter
from verl_digen.engine.copies import AVERAGE
from verl_digen.engine.export import ADAPTER, BASE_LAYER, is_adapter, merge, mergeable, plain_name
from verl_digen.engine.saved_state import SavedState
from verl_digen.models.locate import VARIANTS, read_object
from verl_digen.require import require, require_one_of
from verl_digen.tools.export.saved_run import SavedRun

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""safetensors' names of floating dtypes."""


class BaseWeights:
    """Tensors of a checkpoint's networks, by their names, with the network's folder as prefix if there are several."""

    def __init__(self, path: Path, networks: Sequence[str]):
        self._path, self._networks = path, tuple(networks)

    @cached_property
    def _files(self) -> dict[str, tuple[Path, str]]:
        """Name -> (file, name in it)."""
        found: dict[str, tuple[Path, str]] = {}
        for network in self._networks:
            prefix = f"{network}." if len(self._networks) > 1 else ""
            for file in _files_of(self._path / network):
                with safe_open(file, framework="pt") as tensors:
                    found |= {f"{prefix}{name}": (file, name) for name in tensors.keys()}  # noqa: SIM118 - no mapping
        return found

    def tensor(self, name: str) -> Tensor:
        """The tensor `name`, on the CPU. Raises ValueError if the checkpoint has none of this name."""
        file, inner = self._place(name)
        with safe_open(file, framework="pt") as tensors:
            return tensors.get_tensor(inner)

    def dtype(self, name: str) -> torch.dtype:
        """The dtype in which the tensor `name` lies in its file. Raises as `tensor`."""
        file, inner = self._place(name)
        with safe_open(file, framework="pt") as tensors:
            found = tensors.get_slice(inner).get_dtype()
        rule = f"{name} of the base checkpoint must have a dtype of {', '.join(DTYPES)} where none is asked for"
        require(found in DTYPES, rule, found, "give one, e.g. --dtype bf16")
        return DTYPES[found]

    def _place(self, name: str) -> tuple[Path, str]:
        rule = f"the base checkpoint {str(self._path)!r} must hold the network that was trained, with {name}"
        require(name in self._files, rule, f"{len(self._files)} other tensors", "name the right one with --base")
        return self._files[name]


def _files_of(folder: Path) -> list[Path]:
    index = folder / SAFE_WEIGHTS_INDEX_NAME
    if index.is_file():
        names = read_object(index, "actor_rollout_ref.model.path")["weight_map"].values()
        return [folder / name for name in sorted(set(names))]
    duplicates = {file for pattern in VARIANTS for file in folder.glob(pattern)}
    files = sorted(set(folder.glob("*.safetensors")) - duplicates)
    others = sorted(file.name for file in folder.glob("*.bin"))
    require(
        bool(files),
        f"{str(folder)!r} must hold weights as safetensors",
        others or "none",
        "name a base with safetensors, --base DIR; `save_pretrained` of diffusers writes them",
    )
    return files


TYPED = {AVERAGE: "ema"}
"""Policy -> how it is typed, where that is another word."""


class PolicyWeights:
    """Weights of policy `name`. The network is built without weights, for its names and its adapter's layers alone.
    ValueError if the checkpoint lacks files or this policy, or is of another network."""

    def __init__(self, run: SavedRun, name: str):
        self._run, self._saved = run, SavedState(run.actor)
        known = {TYPED.get(policy, policy): policy for policy in self._saved.policies}
        require_one_of("--policy", name := TYPED.get(name, name), known)
        self._policy = known[name]
        state = self.network.state_dict()
        self._shapes = {name: state[name].shape for name in state if is_adapter(name) or not run.is_lora}
        """State-dict name -> shape of the tensors that trained, in order."""
        self._saved.require_shapes(self._shapes, "name the base checkpoint of the run with --base")

    @cached_property
    def network(self) -> Any:
        """The network, with its adapter, all on the meta device."""
        module = self._run.model.load_structure(torch.float32)
        # not rank 0, which would read the adapter's weights
        return add_adapter(module, self._run.model_config, rank=1) if self._run.is_lora else module

    @property
    def adapter_config(self) -> LoraConfig:
        """The adapter's peft config."""
        config = self.network.peft_config[ADAPTER]
        assert isinstance(config, LoraConfig)
        return config

    @cached_property
    def _base(self) -> BaseWeights:
        return BaseWeights(self._run.model.path, self._run.model.experts)

    # -- tensors ------------------------------------------------------------------------------------------
    def full(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """All tensors of the networks, with an adapter merged into the base, in order, one at a time. Floating ones
        have `dtype`, or the base checkpoint's; a merged weight is rounded once. ValueError: an adapter that cannot be
        merged, or a base checkpoint without a tensor."""
        tensors = self._merged() if self._run.is_lora else self._trained()
        for name, value in tensors:
            if value.is_floating_point():
                value = value.to(self._base.dtype(name) if dtype is None else dtype)
            yield name, value

    def _trained(self) -> Iterator[tuple[str, Tensor]]:
        return self._saved.tensors(self._policy, self._shapes)

    @torch.no_grad()
    def _merged(self) -> Iterator[tuple[str, Tensor]]:
        layers, adapter = mergeable(self.network, "--format merged"), dict(self._trained())
        for name in self.network.state_dict():
            if is_adapter(name):
                continue
            value = self._base.tensor(plain_name(name))
            if name in layers:
                layer = name.removesuffix(f"{BASE_LAYER}weight")
                down, up = (adapter[f"{layer}.{part}.{ADAPTER}.weight"].float() for part in ("lora_A", "lora_B"))
                value = merge(value, layers[name], down, up)
            yield plain_name(name), value

    def adapter(self) -> dict[str, Tensor]:
        """The adapter's tensors under peft's names, "base_model.model.LAYER.lora_A.weight"."""
        # save_embedding_layers: "auto" asks the Hugging Face hub about the base model
        return get_peft_model_state_dict(self.network, state_dict=dict(self._trained()), save_embedding_layers=False)

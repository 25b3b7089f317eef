# SPDX-License-Identifier: Apache-2.0
"""Peak memory of one training tile of the real engine, on tensors that have shapes and no memory.

- The engine is the run's own, `DiffusersFSDPEngine`, on one of many ranks of PyTorch's `fake` process group: its LoRA,
  FSDP2 wrapping, mixed precision, checkpointing of activations, optimizer and copies. Only the loading of weights is
  left out, and everything after the network was built runs under `FakeTensorMode`.
- `FSDPMemTracker` counts each storage once: parameters, gathered parameters, gradients, moments of the optimizer,
  activations, and buffers of collectives.
- Two tiles run, so that the peak is that of a tile whose predecessors left a gradient and whose optimizer has stepped
  before. The loss is the mean square of the velocity: a real one adds some latents.
- Networks are made shallower with `Depth`, because a block takes seconds.
"""

import gc
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.autograd.graph import register_multi_grad_hook
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker, _FSDPModMemStats
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing._internal.distributed.fake_pg import FakeStore
from verl.utils.config import omega_conf_to_dataclass

from verl_digen.config import digen_config
from verl_digen.engine import gradients
from verl_digen.engine.build import build_transformer
from verl_digen.engine.engine import DiffusersFSDPEngine
from verl_digen.engine.recompute import ALL, Recomputation
from verl_digen.engine.sharded import sequence_mesh
from verl_digen.model_config import DiffusionModelConfig
from verl_digen.models.checkpoint import networks_of
from verl_digen.models.fused_layers import fuse_norms
from verl_digen.models.published import write_configs
from verl_digen.models.sequence import split_networks
from verl_digen.sampling.requests import planned_geometry
from verl_digen.tools.plan.activations import fused_norms, run_rows
from verl_digen.tools.plan.compose import Words, compose_run
from verl_digen.tools.plan.networks import blocks_of
from verl_digen.tools.plan.peak import give_fake_weights
from verl_digen.tools.plan.run import Job, empty_condition, read_run

LOADS = "verl.workers.engine.fsdp.transformer_impl.fsdp2_load_full_state_dict"
MAKES_MESH = "verl_digen.engine.sharded.sequence_mesh"
SPLITS = "verl_digen.engine.sharded.split_networks"
HOST = "verl_digen.engine.recompute.HOST"
WAITS_FOR_GRADIENTS = "torch.distributed._tools.mod_tracker.register_multi_grad_hook"
ELSEWHERE = "meta"
"""Device of inputs that wait in host memory: the engine's own is the CPU here."""
NOT_FIRST = 1
"""A rank that loads nothing and gets its weights from rank 0."""

Depth = Mapping[str, Any]
"""Changed keys of the transformer's config, e.g. {"num_layers": 4}; empty: as published."""


@dataclass(frozen=True)
class Peak:
    """Bytes at the moment at which one rank holds most."""

    total: int
    items: dict[str, int]
    """The tracker's kinds of tensors -> bytes."""


@contextmanager
def shallow(repository: str, depth: Depth) -> Iterator[Path]:
    """Folder of a published checkpoint's configs, with fewer blocks."""
    with tempfile.TemporaryDirectory() as folder:
        write_configs(repository, Path(folder))
        for file in Path(folder).glob("transformer*/config.json"):
            file.write_text(json.dumps(json.loads(file.read_text()) | depth))
        yield Path(folder)


def plan_run(words: Sequence[str], num_ranks: int, path: str) -> Job:
    """The plan's own reading of a run on `num_ranks` devices."""
    own = Words(gpus=num_ranks, gpu_mem=80)
    return read_run(compose_run([*words, f"actor_rollout_ref.model.path={path}"], own), own.prompt_tokens)


class FakeEngine(DiffusersFSDPEngine):
    """The engine, whose weights are fake from the moment at which they would be sharded.

    Args:
        faking: leaves the fake mode when it is closed.
    """

    def __init__(self, faking: ExitStack, *args: Any):
        super().__init__(*args)
        self._faking = faking

    def _build_module(self) -> nn.Module:
        network = build_transformer(self.model, self.model_config, self.engine_config, NOT_FIRST)
        fuse_norms(network)  # as on a GPU
        return network

    def _build_fsdp_module(self, module: nn.Module) -> nn.Module:
        self.mode = self._faking.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        give_fake_weights(module.modules())
        with ExitStack() as changes:
            changes.enter_context(patch(LOADS, lambda *unused: None))
            changes.enter_context(patch(MAKES_MESH, _unfaked(sequence_mesh)))
            changes.enter_context(patch(SPLITS, _unfaked(split_networks)))
            return super()._build_fsdp_module(module)


def _unfaked(make: Callable[..., Any]) -> Callable[..., Any]:
    """`make` with real tensors: numbers of ranks are read."""

    def real(*args: Any) -> Any:
        with unset_fake_temporarily():
            return make(*args)

    return real


def peak_of_tile(
    words: Sequence[str], num_ranks: int, path: str, *, num_rows: int, reduce: str, num_recomputed: int
) -> Peak:
    """Peak of one rank during a tile of `num_rows` rows, with the first `num_recomputed` blocks recomputed.

    Args:
        reduce: "tile", or "batch" where gradients wait.
    """
    own = Words(gpus=num_ranks, gpu_mem=80)
    config = compose_run([*words, f"actor_rollout_ref.model.path={path}"], own)
    dist.init_process_group("fake", rank=min(NOT_FIRST, num_ranks - 1), world_size=num_ranks, store=FakeStore())
    try:
        with ExitStack() as faking, sdpa_kernel(SDPBackend.FLASH_ATTENTION), fused_norms():
            engine = _engine(config, faking)
            engine.recomputation.num_blocks = num_recomputed
            return _track(engine, own.prompt_tokens, num_rows, reduce)
    finally:
        dist.destroy_process_group()


def _engine(config: Any, faking: ExitStack) -> FakeEngine:
    section: Any = OmegaConf.to_container(config.actor_rollout_ref.model, resolve=True)
    section.pop("_target_")
    actor = config.actor_rollout_ref.actor
    fsdp: Any = OmegaConf.merge(actor.fsdp_config, {"strategy": actor.strategy})
    optim: Any = OmegaConf.merge(actor.optim, {"total_training_steps": 10})
    engine = FakeEngine(
        faking,
        DiffusionModelConfig(**(section | {"digen": digen_config(config)})),
        omega_conf_to_dataclass(fsdp),
        omega_conf_to_dataclass(optim),
        omega_conf_to_dataclass(actor.checkpoint),
    )
    engine.initialize()
    offloads = engine.model_config.enable_activation_offload
    engine.recomputation = Recomputation(engine.module, ALL, offloads=offloads)  # the platform here is a CPU
    return engine


def _track(engine: FakeEngine, prompt_tokens: int, num_rows: int, reduce: str) -> Peak:
    _make_moments(engine)
    for expert in range(len(engine.model.experts)):  # what never ran has nothing that the tracker could look at
        _train_tile(engine, prompt_tokens, num_rows, reduces=reduce == "tile", expert=expert)
    assert engine.optimizer is not None
    tracker = FSDPMemTracker(engine.module, engine.optimizer)
    for network in networks_of(_bare(engine.module))[1:]:  # they do not run in this tile, and reduce at its end
        for module in network.modules():
            tracker.memory_tracking[module] = _FSDPModMemStats("another expert")
    tracker.track_inputs(tuple(_kept_beside(engine)))
    with ExitStack() as contexts:
        contexts.enter_context(_collected_at_blocks(engine.module))
        contexts.enter_context(patch(WAITS_FOR_GRADIENTS, _wait_for_first))
        contexts.enter_context(patch(HOST, ELSEWHERE))
        contexts.enter_context(tracker)
        _train_tile(engine, prompt_tokens, num_rows, reduces=True)
    found = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
    items = {str(getattr(kind, "value", kind)): size for kind, size in found.items()}
    return Peak(items.pop("Total"), items)


def _bare(module: Any) -> Any:
    """Unwrap peft's model."""
    return module.get_base_model() if hasattr(module, "get_base_model") else module


def _wait_for_first(tensors: Sequence[Tensor], hook: Any, **mode: Any) -> Any:
    """Replacement for `register_multi_grad_hook`, which keeps the gradients of a module's inputs until the last one is
    there. That of an input of all blocks (the embedded time) comes at the end of backward, and until then the tracker
    counted a gradient of the size of the video for every block, which nothing but its own hook held."""
    return register_multi_grad_hook(tensors[:1], hook, **mode)


@contextmanager
def _collected_at_blocks(module: nn.Module) -> Iterator[None]:
    """Context in which garbage is collected before each block runs: fake tensors hang in cycles, and Python frees those
    at random moments. That moved a peak by 50 MB, which the line through two depths makes 20 times as much."""

    def collect(*unused: Any) -> None:
        gc.collect()

    gc.collect()
    gc.freeze()  # what is there already is not looked through again
    handles = [block.register_forward_pre_hook(collect) for block in blocks_of(module)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        gc.unfreeze()


def _kept_beside(engine: FakeEngine) -> Iterator[Tensor]:
    """Tensors that the tracker does not find by itself: the gradient of the tile before, and copies of the weights."""
    waiting = gradients.take(engine.module)
    gradients.put(engine.module, waiting)
    yield from waiting.values()
    if not engine.engine_config.param_offload:
        for weights in engine.copies.values():
            yield from weights.shards.values()


def _make_moments(engine: FakeEngine) -> None:
    """Let the optimizer allocate its state, as its first step does."""
    assert engine.optimizer is not None
    for parameter in engine.module.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    engine.optimizer.step()
    engine.optimizer.zero_grad()


def _train_tile(engine: FakeEngine, prompt_tokens: int, num_rows: int, *, reduces: bool, expert: int = 0) -> None:
    sampling, model = engine.digen.sampling, engine.model
    geometry = planned_geometry(sampling, model.spec.num_images[0])
    engine.module.train()
    network: Any = engine.module
    if len(model.experts) > 1:  # a choice by sigma needs numbers
        network = partial(network, expert=expert)
        model = copy(model)
        model.experts = model.experts[:1]
    with gradients.reduced_at_end(engine.module, reduces):
        velocity = run_rows(
            engine.mode,
            model,
            network,
            geometry,
            empty_condition(model, prompt_tokens, geometry),
            num_rows=num_rows * (2 if sampling.true_cfg_scale != 1.0 else 1),
        )
        engine.backward(velocity.float().square().mean(), False)

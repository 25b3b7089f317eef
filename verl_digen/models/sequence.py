# SPDX-License-Identifier: Apache-2.0
"""Sequence parallelism (Ulysses) of a network: one row's tokens are split over several devices.

    latents, the same on every device of a group
      -> each device keeps its share of the tokens      (diffusers' hooks, by the network's plan)
      -> blocks; in attention each device has all tokens of its share of the heads (diffusers' all-to-all)
      -> velocity, gathered, the same on every device of the group

A loss of the gathered velocity gives each device the part of the gradient that comes through its own tokens. The
group's sum is the gradient of the row, also for layers that every device runs whole, such as the timestep's. Prompts
whose length the devices do not divide are padded with tokens that a mask takes out of the attention.

Invariants (tests/models/test_sequence.py, tests/engine/test_sequence.py): the velocity and the sum of the gradients are
one device's, to 1e-5, with masks and padding, with an adapter and with recomputation.
"""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from verl_digen.inputs.sizes import SIDE_MULTIPLE
from verl_digen.patches import diffusers_cpu_devices
from verl_digen.require import require
from verl_digen.types import Geometry

if TYPE_CHECKING:
    from verl_digen.models.base import DiffusionModel

TRAINER_KEY = "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size"
"""verl's key for the number of the trainer's devices that share one row."""
MESH_DIMS = ("ring", "ulysses")
"""Names that diffusers gives the dimensions of its mesh; the first has size 1."""


def check_sequence(model: "DiffusionModel", size: int, geometry: Geometry) -> None:
    """Check that `size` devices can share a row of this checkpoint. ValueError for a network that cannot be split, or
    one whose heads or tokens `size` does not divide."""
    if size == 1:
        return
    layout, title = model.spec.sequence, model.spec.title
    if layout is None:
        raise ValueError(
            f"{TRAINER_KEY} must be 1 for {title}, whose network ({model.spec.transformer}) has no plan in diffusers "
            f"that splits all tokens, got {size}; set it to 1 (more devices take more rows then), or choose a model "
            "that docs/sequence_parallel.md lists"
        )
    num_heads = model.read_network_config(model.experts[0])["num_attention_heads"]
    video = f"{geometry.num_frames} frame(s) of {geometry.height_px} x {geometry.width_px} px for {title}"
    resize = "change digen.sampling.height_px, width_px or num_frames, or "
    shared = [
        (num_heads, f"attention heads of this {title} checkpoint", ""),
        (model.num_tokens(geometry), f"tokens of {video}", resize),
    ]
    if model.spec.num_images[1] > 0 and layout.takes_images:
        least = model.num_source_tokens(replace(geometry, sources=((SIDE_MULTIPLE, SIDE_MULTIPLE),)))
        multiple = f"because an image may have any multiple of {least}"
        shared.append((least, f"tokens of the smallest image of a prompt for {title}, {multiple}", ""))
    if layout.splits_prompts and model.spec.condition.num_tokens is not None:
        shared.append((model.spec.condition.num_tokens, f"tokens of every prompt of this {title} checkpoint", ""))
    for count, what, remedy in shared:
        valid = ", ".join(str(number) for number in range(1, size + 1) if count % number == 0)
        require(
            count % size == 0, f"{TRAINER_KEY} must divide the {count} {what}", size, f"{remedy}choose one of {valid}"
        )


def split_networks(model: "DiffusionModel", module: nn.Module, mesh: DeviceMesh) -> None:
    """Make the forwards of `module`'s networks, in peft's wrapper or none, run on one share of the tokens per device of
    `mesh` (`MESH_DIMS`), which must all run the same forwards on equal rows. Call it once, after an adapter was added
    and before FSDP2 shards: hooks belong on the layers that run."""
    from diffusers.models._modeling_parallel import ContextParallelConfig

    layout = model.spec.sequence
    assert layout is not None
    model.sequence_size = mesh.size()
    for network in module.modules():
        if type(network).__name__ != model.spec.transformer:
            continue
        own: Any = network
        plan = layout.plan or {name: part for name, part in own._cp_plan.items() if name not in layout.unsplit}
        with diffusers_cpu_devices.cpu_is_a_device():
            own.enable_parallelism(config=ContextParallelConfig(ulysses_degree=mesh.size(), mesh=mesh), cp_plan=plan)
        own.sequence_mesh = mesh


def pad_prompts(text: Tensor, mask: Tensor | None, multiple: int) -> tuple[Tensor, Tensor | None]:
    """Pad prompts [N, L, D] and their mask [N, L], 1 for tokens, to a multiple of tokens; None stays None where the
    length is one already."""
    missing = -text.shape[1] % multiple
    if missing == 0:
        return text, mask
    if mask is None:
        mask = torch.ones(text.shape[:2], dtype=torch.bool, device=text.device)
    return F.pad(text, (0, 0, 0, missing)), F.pad(mask, (0, missing))


def own_share(network: Any, text: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """This device's tokens of prompts [N, L, D] and of their mask [N, L], padded where the devices do not divide L; all
    of them if the network is not split. `network`: its `sequence_mesh` is None, or the mesh of `split_networks`."""
    mesh: DeviceMesh | None = network.sequence_mesh
    if mesh is None:
        return text, mask
    text, mask = pad_prompts(text, mask, mesh.size())
    number = mesh["ulysses"].get_local_rank()

    def share(tensor: Tensor) -> Tensor:
        return tensor.chunk(mesh.size(), dim=1)[number]

    return share(text), None if mask is None else share(mask)

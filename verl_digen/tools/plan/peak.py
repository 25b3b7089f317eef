# SPDX-License-Identifier: Apache-2.0
"""Peak of the bytes that some code allocates, on fake tensors, and that of decoding one picture or video.

The decoder is the model file's own, `load_decoder`, with its tiling and batching; only its weights are fake.

Invariant (tests/plan/test_decoding.py): real tensors of a tiny VAE take the same bytes.
"""

import json
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from verl_digen.models.base import DiffusionModel
from verl_digen.models.checkpoint import diffusers_class
from verl_digen.models.pixels import TILE_PX
from verl_digen.types import Geometry


class PeakBytes(TorchDispatchMode):
    """Count what is allocated inside the context, each storage from its first use until it is freed. Tensors in
    `known`, and views of them, are there already.

        with FakeTensorMode(), PeakBytes() as allocated:
            network(torch.empty(1, 3, 512, 512))
        allocated.peak  # bytes
    """

    def __init__(self, known: Iterable[Tensor] = ()):
        super().__init__()
        self.current = 0
        self.peak = 0
        self._kept = [tensor.untyped_storage() for tensor in known]
        """Storages that are there already; kept, so that none of their addresses is given to another."""
        self._seen = {storage._cdata for storage in self._kept}
        self._number_of: dict[int, int] = {}
        """Live storage -> its number."""
        self._events: list[tuple[int, int]] = []
        """(number of the storage, bytes allocated or, below 0, freed), in order."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._note(leaf.untyped_storage())
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        address = storage._cdata
        if address in self._seen:
            return
        self._seen.add(address)
        self.current += storage.nbytes()
        self.peak = max(self.peak, self.current)
        number = self._number_of[address] = len(self._events)
        self._events.append((number, storage.nbytes()))
        weakref.finalize(storage, self._free, address, storage.nbytes())

    def _free(self, address: int, size: int) -> None:
        self._seen.discard(address)
        self._events.append((self._number_of.pop(address), -size))
        self.current -= size

    def peaks(self, apart: Iterable[Tensor]) -> tuple[tuple[int, int], ...]:
        """(bytes of other tensors, bytes of the tensors `apart`) at the moments at which, by some weight of the two,
        most is allocated. `apart`: live tensors that were allocated in the context."""
        numbers = {self._number_of[tensor.untyped_storage()._cdata] for tensor in apart}
        held, moments = [0, 0], set()
        for number, size in self._events:
            held[number in numbers] += size
            moments.add((held[0], held[1]))
        front: list[tuple[int, int]] = []
        for moment in sorted(moments, reverse=True):
            if not front or moment[1] > front[-1][1]:
                front.append(moment)
        return tuple(front)


def give_fake_weights(modules: Iterable[nn.Module], dtype: torch.dtype | None = None) -> None:
    """Give every parameter, buffer and table of these modules' own a fake CPU tensor, parameters of `dtype` or each of
    its own. Call it under a fake mode."""
    for module in modules:
        for name, value in list(module._parameters.items()):
            if value is not None:
                fake = torch.empty(value.shape, dtype=dtype or value.dtype, device="cpu")
                module._parameters[name] = nn.Parameter(fake, requires_grad=value.requires_grad)
        for name, value in list(module._buffers.items()):
            if value is not None:
                module._buffers[name] = torch.empty(value.shape, dtype=value.dtype, device="cpu")
        for name, value in list(vars(module).items()):
            if isinstance(value, Tensor):
                setattr(module, name, torch.empty(value.shape, dtype=value.dtype, device="cpu"))


CHANNELS = 3


@dataclass(frozen=True)
class Piece:
    """Largest size that is traced of a VAE that decodes piece by piece (None: all of it); others add their pixels."""

    side_px: int | None = None
    num_frames: int | None = None
    pixel_copies: float = 1.0
    """Copies of the other pixels at the peak."""

    def of(self, geometry: Geometry) -> Geometry:
        """The part of `geometry` that is traced."""
        return Geometry(
            min(geometry.height_px, self.side_px or geometry.height_px),
            min(geometry.width_px, self.side_px or geometry.width_px),
            min(geometry.num_frames, self.num_frames or geometry.num_frames),
        )


PIECES = {
    # frame by frame
    "AutoencoderKLWan": Piece(num_frames=9),
    # in tiles of 256 px and 16 frames
    "AutoencoderKLHunyuanVideo": Piece(side_px=256, pixel_copies=1.5),
    # in tiles of 256 px, whose rows are joined and then joined with each other: 1.4 copies more at 480x480x53 and
    # 480x832x121, traced whole
    "AutoencoderKLHunyuanVideo15": Piece(side_px=256, pixel_copies=1.5),
}
"""Class of a VAE -> its piece."""

TILED = {
    **dict.fromkeys(("AutoencoderKL", "AutoencoderKLFlux2"), Piece(side_px=TILE_PX, pixel_copies=2.0)),
    "AutoencoderKLQwenImage": Piece(side_px=256, pixel_copies=2.0),
    "AutoencoderKLWan": Piece(side_px=256, num_frames=9, pixel_copies=2.0),
}
"""Class of a VAE -> its piece where it takes tiles (`Decoder.in_memory`). At the peak there are one tile, the pixels of
all tiles, which overlap, and the picture: 1.0 to 2.0 copies at 512 to 1536 px, traced whole."""

_known: dict[tuple[str, str, Geometry, torch.dtype], int] = {}
"""Results by pipeline, VAE config, size and dtype: a plan with remedies asks again."""


def decoding_bytes(
    model: DiffusionModel, geometry: Geometry, dtype: torch.dtype, pieces: Mapping[str, Piece] = PIECES
) -> int:
    """Peak of decoding one sample in a replica of `dtype`, without the VAE's weights. `pieces`: `TILED` for a VAE that
    takes tiles; one that has none there is decoded as it is."""
    dtype, geometry = model.decoder_dtype(dtype), replace(geometry, sources=())  # a given frame is decoded, too
    piece = {**PIECES, **pieces}.get(model.index["vae"][1], Piece())
    traced = piece.of(geometry)
    config = json.dumps(model.read_config("vae/config.json"), sort_keys=True)
    key = (model.pipeline, config, traced, dtype)
    if key not in _known:
        _known[key] = _trace(model, traced, dtype)
    others = _pixels(geometry) - _pixels(traced)
    return _known[key] + round(piece.pixel_copies * others * CHANNELS * dtype.itemsize)


def _pixels(geometry: Geometry) -> int:
    return geometry.height_px * geometry.width_px * geometry.num_frames


def _trace(model: DiffusionModel, geometry: Geometry, dtype: torch.dtype) -> int:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with _without_weights(model.index["vae"][1], mode) as loaded, _empty_masks():
        decode = model.load_decoder(dtype, torch.device("cpu"))
        (vae,) = loaded
        with mode, torch.no_grad(), PeakBytes([*vae.parameters(), *vae.buffers()]) as allocated:
            decode(torch.empty(1, *model.latent_shape(geometry)), geometry)
    return allocated.peak


@contextmanager
def _without_weights(class_name: str, mode: FakeTensorMode) -> Iterator[list[nn.Module]]:
    """Context in which `from_pretrained` of a diffusers class reads the config alone -> the networks that it made."""
    network_class = diffusers_class(class_name)
    made: list[nn.Module] = []

    def from_config(folder: Any, *, dtype: torch.dtype, **unused: Any) -> nn.Module:
        with torch.device("meta"):
            network: Any = network_class.from_config(network_class.load_config(folder))
        with mode:
            give_fake_weights(network.modules(), dtype)
        network.to = lambda *unused: network  # fake tensors cannot be moved, and are there already
        made.append(network)
        return network

    with patch.object(network_class, "from_pretrained", from_config):
        yield made


def _empty_masks() -> AbstractContextManager[Any]:
    """Context in which HunyuanVideo 1.5's VAE makes its attention mask, positions x positions, in one operation: row by
    row it takes minutes to trace."""
    from diffusers.models.autoencoders.autoencoder_kl_hunyuanvideo15 import HunyuanVideo15AttnBlock

    def empty(n_frame: int, n_hw: int, dtype: Any, device: Any, batch_size: int | None = None) -> Tensor:
        mask = torch.empty(n_frame * n_hw, n_frame * n_hw, dtype=dtype, device=device)
        return mask if batch_size is None else mask.unsqueeze(0).expand(batch_size, -1, -1)

    return patch.object(HunyuanVideo15AttnBlock, "prepare_causal_attention_mask", staticmethod(empty))

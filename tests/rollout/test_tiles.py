# SPDX-License-Identifier: Apache-2.0
"""Decoding in the memory there is: whole where it fits, one by one, and in tiles where one does not fit."""

import logging
from pathlib import Path

import pytest
import torch

from tests.pretend.memory import memory
from tests.pretend.process import on_pretend
from tests.tiny_models import build_tiny
from verl_digen.models import load_model
from verl_digen.models.pixels import Decoded, Decoder
from verl_digen.types import Geometry

SIZE = Geometry(64, 64)


def decoded_in_little_memory(path: Path) -> dict[str, list]:
    """For room of two pictures, of one, and of half of one: pixels, whether the VAE has tiles, warnings."""
    warnings: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())
    logging.getLogger("verl_digen.models.pixels").addHandler(handler)
    device = torch.device("pretend")
    model = load_model(path)
    decoder = model.load_decoder(torch.float32, device)
    draw = torch.Generator().manual_seed(0)
    latents = torch.randn(2, *model.latent_shape(SIZE), generator=draw).to(device)
    peaks = []
    for part in (latents, latents[:1]):
        kept, memory.peak = memory.recount(), 0
        decoder(part, SIZE)
        peaks.append(memory.peak - kept)
    found = {}
    for name, room in (("two", peaks[0]), ("one", peaks[1] * 1.1), ("half", peaks[1] * 0.5)):
        with memory.limited(memory.recount() + int(room)):
            pixels, is_finite = decoder(latents, SIZE)
        found[name] = [pixels.clone(), bool(is_finite.all()), decoder.modules[0].use_tiling, len(warnings)]
    return found


@pytest.mark.slow
def test_a_vae_takes_tiles_only_where_a_whole_picture_does_not_fit(tmp_path: Path):
    found = on_pretend(decoded_in_little_memory, build_tiny("sd3", tmp_path / "c"))
    assert [found[name][1:] for name in found] == [[True, False, 0], [True, False, 0], [True, True, 1]]
    whole, alone, tiled = (found[name][0].int() for name in found)
    assert (whole - alone).abs().max() <= 1, "a batch of another size rounds differently"
    assert whole.shape == tiled.shape and (whole - tiled).abs().float().mean() < 40, "the same picture"


def test_what_does_not_fit_in_tiles_is_an_error():
    def decode(latents: torch.Tensor, geometry: Geometry) -> Decoded:
        raise torch.OutOfMemoryError("no")

    with pytest.raises(torch.OutOfMemoryError):
        Decoder(decode, (torch.nn.Identity(),), lambda pixels: pixels).in_memory(torch.zeros(2, 1), SIZE)

# SPDX-License-Identifier: Apache-2.0
"""Peak of decoding, traced on fake tensors, against real ones and against known sizes."""

from dataclasses import replace

import pytest
import torch

from tests.grid import IN_GRID
from verl_digen.models import load_model
from verl_digen.models.published import checkpoint_folder
from verl_digen.tools.plan import peak
from verl_digen.tools.plan.networks import count_parts
from verl_digen.tools.plan.peak import TILED, PeakBytes, decoding_bytes
from verl_digen.types import Geometry


def test_a_traced_decoder_takes_what_a_real_one_does(loaded):
    model, geometry = load_model(loaded.path), loaded.case.sizes[0]
    decode = model.load_decoder(torch.float32, torch.device("cpu"))
    latents = torch.zeros(1, *model.latent_shape(replace(geometry, sources=())))
    with PeakBytes() as allocated:
        decode(latents, geometry)
    weights = count_parts(model, torch.float32, as_loaded_by_us=True)[
        "vae"
    ].num_bytes  # views of real weights are counted
    traced = decoding_bytes(model, geometry, torch.float32)
    assert traced * 0.99 <= allocated.peak <= traced * 1.01 + weights


def test_the_classes_of_diffusers_load_weights_again_afterwards(tiny_qwen_image):
    from diffusers.models.autoencoders.autoencoder_kl_qwenimage import AutoencoderKLQwenImage

    before = AutoencoderKLQwenImage.from_pretrained
    decoding_bytes(load_model(tiny_qwen_image), Geometry(48, 48), torch.bfloat16)
    assert before == AutoencoderKLQwenImage.from_pretrained
    assert "from_pretrained" not in vars(AutoencoderKLQwenImage)


def test_a_picture_of_sd3_takes_three_feature_maps_of_its_last_level():
    """Calculated from the graph: the last level holds 512 x 512 px x 256 channels three times at its peak, in fp32, in
    which this VAE decodes for replicas of any dtype."""
    with checkpoint_folder("stabilityai/stable-diffusion-3.5-medium") as folder:
        model = load_model(folder)
        small, large = (decoding_bytes(model, Geometry(side, side), torch.bfloat16) for side in (256, 512))
    assert large == pytest.approx(3 * 512 * 512 * 256 * 4, rel=0.01)
    assert large == pytest.approx(4 * small, rel=0.01)


@pytest.mark.parametrize(
    ("repository", "size"),
    [pytest.param("black-forest-labs/FLUX.1-dev", (1024, 1024), marks=IN_GRID), ("Qwen/Qwen-Image", (512, 512))],
)
def test_a_decoder_that_takes_tiles_needs_what_one_tile_does(monkeypatch, repository, size):
    """Against a trace of the whole picture in tiles, as a replica decodes it that ran out of memory."""
    with checkpoint_folder(repository) as folder:
        model, geometry = load_model(folder), Geometry(*size)
        whole, tiled = (decoding_bytes(model, geometry, torch.bfloat16, pieces) for pieces in ({}, TILED))
        load = model.load_decoder

        def load_tiled(*given):
            decoder = load(*given)
            assert decoder._take_tiles()
            return decoder

        monkeypatch.setattr(model, "load_decoder", load_tiled)
        traced = peak._trace(model, geometry, model.decoder_dtype(torch.bfloat16))
    assert traced <= tiled * 1.01 and tiled == pytest.approx(traced, rel=0.03)
    assert tiled < 0.3 * whole


def test_peak_bytes_counts_a_storage_once_until_it_is_freed():
    known = torch.zeros(100)
    with PeakBytes([known]) as allocated:
        first = torch.zeros(256)
        view = first.view(16, 16) + 0 * known.view(10, 10)[0, 0]
        del first
        second = torch.zeros(1024)
        del view, second
        torch.zeros(10)
    assert allocated.peak >= (256 + 1024) * 4 and allocated.peak <= (2 * 256 + 1024 + 110) * 4
    assert allocated.current == 0
